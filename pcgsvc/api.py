"""The doors of the library: a module, or what the command line builds, as Python objects.

In: a module; or overrides, a config folder, or a config. Out: a `Config` or a `Runner`. Safe in a
process, and in threads, that use Hydra themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pcgsvc.config import Config, Mode, copy, updated
from pcgsvc.config.tree import from_tree, plain
from pcgsvc.errors import ConfigError
from pcgsvc.events import Progress
from pcgsvc.forward.arguments import DynamicDims, MakeInputs
from pcgsvc.forward.request import request_for
from pcgsvc.ops.attention import AttentionSpec
from pcgsvc.pipeline import build, build_from_config
from pcgsvc.serve.runner import Runner

Settings = Config | Mapping[str, Any]
"""What is accepted wherever a config is: a `Config`, a nested dict, or OmegaConf's DictConfig."""

_COMPILE = "pcgsvc.compile(model, (x,), dynamic_dims={'x': 0}, capture={'max_size': 32})"
_LOAD = "pcgsvc.load('llama', mode='piecewise', capture={'max_size': 32})"
_BUILD = "pcgsvc.build_runner(model, (x,), dynamic_dims={'x': 0}, config={'mode': 'piecewise'})"
_NOT_READ = {
    "model": "the model is the first argument",
    "device": "the runner is where the model and its inputs are; move them with .to()",
    "dtype": "the model has its dtype already; change it with model.to()",
    "attention": "a model that calls pcgsvc::attention goes to pcgsvc.build_runner(attention=…)",
    "preset": "it picks values on the command line and in pcgsvc.load(['preset=…']); name those",
    "size": "the row counts that are captured are sizes=[1, 2, 4]",
    "kwargs": "arguments by name are example_inputs={'x': x, 'scale': 2.0}, a dict of all of them",
    "config": "settings are given by name, or a dict of them as **settings",
} | dict.fromkeys(
    [
        "job",
        "prompt",
        "max_new_tokens",
        "traffic",
        "max_traffic_calls",
        "report",
        "bench",
        "sweep",
        "compare",
    ],
    "only the command line reads it",
)
"""Settings that `compile` refuses, with the reason."""


def compile(
    model: Callable[..., Any],
    example_inputs: Any,
    *,
    dynamic_dims: DynamicDims | None = None,
    mode: str | Mode = "full_and_piecewise",
    compiler: Any = "auto",
    sizes: Any = None,
    cache: Any = "readwrite",
    make_inputs: MakeInputs | None = None,
    **settings: Any,
) -> Runner:
    """Compile a model piecewise, capture its graphs, and return the runner that is called in place.

        runner = pcgsvc.compile(model, (x,))
        y = runner(x)

    Nothing of the model is changed or copied. The first build fills the disk cache, later ones of
    the same model start warm.

    Args:
        model: an `nn.Module` in eval mode, or any callable of tensors.
        example_inputs: a tuple or list of positional arguments, or a dict of keyword arguments.
            Tensors become inputs of the runner; other values are constants of the graph.
        dynamic_dims: which dimension, or dimensions, of which tensor carry the rows of a call, by
            argument name: `{"x": 0}`. None: dimension 0 of every tensor that is as long there as
            the first one, which two plain calls of the model must confirm.
        mode: which graphs serve which batches: `none`, `piecewise`, `full`, `full_decode_only` or
            `full_and_piecewise`.
        compiler: `auto` (Inductor on CUDA, else eager), `eager`, `inductor`, or a dict of the
            group's settings.
        sizes: row counts to capture, as `capture.sizes` takes them; None: a schedule up to
            `capture.max_size`.
        cache: `readwrite`, `read`, `off`, `refresh`, or a dict of the group's settings.
        make_inputs: `make_inputs(rows, generator)` gives valid tensor inputs by name, for
            verification; None: drawn like the examples.
        **settings: any other setting by name, groups as dicts: `capture={"max_size": 32}`.

    Returns:
        The runner. It owns its input buffers, graph pool and stream until it is closed, and keeps
        the model.

    Raises:
        ConfigError: a setting or an argument is wrong, or the dynamic dimensions are not clear.
        ForwardError: the model itself fails with the example inputs.
        TraceError, SplitError, CompileError, CaptureError: a stage failed.
        CacheError: the disk cache is not safe to use, or `cache.require_warm=true` met a miss.
        VerifyError: a captured entry does not give what the model gives; `report` has the rows.
    """
    with _shown(_COMPILE):
        for name in settings.keys() & _NOT_READ.keys():
            raise ConfigError(f"{name}: not read by pcgsvc.compile: {_NOT_READ[name]}.")
        named = {"mode": mode, "compiler": compiler, "sizes": sizes, "cache": cache, **settings}
        config = _with_settings(Config(), named)
        request = request_for(model, example_inputs, dynamic_dims, config, make_inputs=make_inputs)
    return build(request)


def load(name_or_overrides: str | Sequence[str] | Settings, **settings: Any) -> Runner:
    """Build, or start warm, the runner of a configured model.

        runner = pcgsvc.load("llama", mode="piecewise", capture={"max_size": 32})
        runner = pcgsvc.load(["model=hf", "model.path=models/mine"])

    Args:
        name_or_overrides: a model's name (a file under `conf/model/`), overrides as on the command
            line, or a config.
        **settings: settings by name, as for `compile`; they are put over what the first argument
            says.

    Returns:
        The runner; see `compile`.

    Raises:
        PcgError: as `compile`.
    """
    given = name_or_overrides
    with _shown(_LOAD):
        if isinstance(given, str):
            given = [given if "=" in given else f"model={given}"]
        config = load_config(given) if isinstance(given, Sequence) else _as_config(given)
        config = _with_settings(config, settings)
    return build_from_config(config)


def build_runner(
    module: Callable[..., Any],
    example_inputs: Any,
    *,
    dynamic_dims: DynamicDims | None,
    config: Settings | None = None,
    make_inputs: MakeInputs | None = None,
    attention: AttentionSpec | None = None,
    progress: Progress | None = None,
) -> Runner:
    """Build, or start warm, a runner for any `nn.Module` or callable: `compile` in full.

    Args:
        module: in eval mode; its parameters are used where they are, never copied.
        example_inputs: a tuple or list of positional arguments, or a dict by argument name. Tensors
            become inputs of the runner; non-tensor values are constants of the graph, and a call
            that passes another value is refused.
        dynamic_dims: which dimension, or dimensions, of which tensor input carry the rows
            (tokens), by name; every dynamic dimension must have the same length in a call. None: as
            for `compile`.
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
    with _shown(_BUILD):
        if progress is not None and not all(
            callable(getattr(progress, name, None)) for name in ("start", "advance", "stop")
        ):
            raise ConfigError(f"progress: got {progress!r}, a pcgsvc.events.Progress is needed.")
        request = request_for(
            module,
            example_inputs,
            dynamic_dims,
            Config() if config is None else _as_config(config),
            make_inputs=make_inputs,
            attention=attention,
        )
    return build(request, progress)


def load_config(
    overrides: Sequence[str] = (), *, config_dir: str | None = None, config: Settings | None = None
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
        from pcgsvc.config.compose import compose  # imports Hydra

        return compose(overrides, config_dir=config_dir)
    if overrides or config_dir is not None:
        raise ConfigError("load_config: got config= with overrides= or config_dir=; pass one.")
    return _as_config(config)


def load_runner(
    overrides: Sequence[str] = (), *, config_dir: str | None = None, config: Settings | None = None
) -> Runner:
    """Build, or start warm, the runner that the command line would build; see `load_config`."""
    return build_from_config(load_config(overrides, config_dir=config_dir, config=config))


# ---- settings by name ----------------------------------------------------------------------------

_WORD = {"compiler": "name", "attention": "name", "cache": "mode"}
"""The setting that a word in place of a group means."""


def _with_settings(config: Config, named: Mapping[str, Any]) -> Config:
    """Return a config with settings replaced; a word stands for a group's first setting."""
    tree = dict(plain(dict(named)))
    for name in tree:
        if "." in name:
            group, _, rest = name.partition(".")
            raise ConfigError(f"{name}: a group is a dict here: {group}={{{rest!r}: …}}.")
    for group, name in _WORD.items():
        if group in tree and not isinstance(tree[group], Mapping | type(getattr(config, group))):
            word = tree[group]
            tree[group] = {name: None if (group, word) == ("compiler", "auto") else word}
    sizes = tree.pop("sizes", None)
    config = updated(config, tree)
    if sizes is None:
        return config
    if isinstance(tree.get("capture"), Mapping) and "sizes" in tree["capture"]:
        raise ConfigError("capture.sizes: given as sizes= and in capture=; pass one.")
    return updated(config, {"capture": {"sizes": sizes}})


def _as_config(config: Settings) -> Config:
    return copy(config) if isinstance(config, Config) else from_tree(config)


@contextlib.contextmanager
def _shown(call: str) -> Iterator[None]:
    """Put the right call behind what is wrong with one."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{error}\nThe form of a call: {call}") from error.__cause__
