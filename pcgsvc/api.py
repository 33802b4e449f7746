"""The doors of the library: a module, or what the command line builds, as Python objects.

In: a module; or overrides, a config folder, or a config. Out: a `Config` or a `Runner`. Safe in a
process, and in threads, that use Hydra themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pcgsvc.config import Config, copy
from pcgsvc.config.compose import compose, from_tree
from pcgsvc.errors import ConfigError
from pcgsvc.events import Progress
from pcgsvc.forward.arguments import DynamicDims, MakeInputs
from pcgsvc.forward.request import request_for
from pcgsvc.ops.attention import AttentionSpec
from pcgsvc.pipeline import build, build_from_config
from pcgsvc.serve.runner import Runner


def build_runner(
    module: Callable[..., Any],
    example_inputs: Any,
    *,
    dynamic_dims: DynamicDims,
    config: Config | None = None,
    make_inputs: MakeInputs | None = None,
    attention: AttentionSpec | None = None,
    progress: Progress | None = None,
) -> Runner:
    """Build, or start warm, a runner for any `nn.Module` or callable.

    Args:
        module: in eval mode; its parameters are used where they are, never copied.
        example_inputs: a tuple of arguments, or a dict by argument name. Tensors become inputs of
            the runner; non-tensor values are constants of the graph, and a call that passes another
            value is refused.
        dynamic_dims: which dimension, or dimensions, of which tensor input carry the rows
            (tokens), by name; every dynamic dimension must have the same length in a call.
        config: settings; `model` is not read, and `attention` only with `attention=`. None: the
            defaults.
        make_inputs: `make_inputs(rows, generator)` gives valid tensor inputs by name, for
            verification; None: drawn from a normal distribution, integers from the examples'.
        attention: for a module that calls `pcgsvc::attention`: what its layers need. The runner
            then has a paged KV cache, and the backend that `config.attention` names.
        progress: listens to long phases.

    Returns:
        The runner. It owns its input buffers, graph pool, stream and KV cache until it is closed,
        and keeps the module.

    Raises:
        ConfigError: a setting or an argument is wrong.
        TraceError, SplitError, CompileError, CaptureError: a stage failed.
        CacheError: the disk cache is not safe to use, or `cache.require_warm=true` met a miss.
        VerifyError: a captured entry does not give what the module gives; `report` has the rows.
    """
    settings = config or Config()
    request = request_for(
        module, example_inputs, dynamic_dims, settings, make_inputs=make_inputs, attention=attention
    )
    return build(request, progress)


def load_config(
    overrides: Sequence[str] = (), *, config_dir: str | None = None, config: Any = None
) -> Config:
    """Return plain settings: names and kinds are checked here, ranges when a runner is built.

    Args:
        overrides: as on the command line, e.g. `["mode=piecewise"]`.
        config_dir: folder with more YAML files, searched before the packaged ones.
        config: instead of composing: a `Config`, a nested dict, or an OmegaConf node; overrides
            are then not allowed.

    Raises:
        ConfigError: naming the setting, what was got and what there is.
    """
    if isinstance(overrides, str) or not isinstance(overrides, Sequence):
        raise ConfigError(
            f"overrides: got {overrides!r}; a list of them is needed, e.g. ['mode=piecewise']. A "
            "Config or a dict goes into config=."
        )
    wrong = [o for o in overrides if not isinstance(o, str)]
    if wrong:
        raise ConfigError(f"overrides: got {wrong[0]!r} among them; text is needed, 'name=value'.")
    if config is None:
        return compose(overrides, config_dir=config_dir)
    if overrides or config_dir is not None:
        raise ConfigError("load_config: got config= with overrides= or config_dir=; pass one.")
    if isinstance(config, Config):
        return copy(config)
    return from_tree(config)


def load_runner(
    overrides: Sequence[str] = (), *, config_dir: str | None = None, config: Any = None
) -> Runner:
    """Build, or start warm, the runner that the command line would build; see `load_config`."""
    return build_from_config(load_config(overrides, config_dir=config_dir, config=config))
