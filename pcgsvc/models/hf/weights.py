"""Making the transformers model of a `Source`: empty, with random weights, or with a checkpoint's.

In: a `Source`. Out: a module of transformers in eval mode. Knows nothing of attention backends or
graphs.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pcgsvc import torch_private
from pcgsvc.config.devices import is_here
from pcgsvc.errors import ConfigError
from pcgsvc.models.files import open_safetensors, require
from pcgsvc.models.hf.sharding import ColumnsOfLinear
from pcgsvc.models.hf.source import Source, looks_at_length
from pcgsvc.models.sharding import Cut
from pcgsvc.models.weights import generator_for

logger = logging.getLogger(__name__)


def experts_for(device: torch.device, dtype: torch.dtype) -> str:
    """Return how experts run: as one of transformers' formulations that never waits for the device.

    Its default reads on the host which experts were hit, which no graph can hold. `grouped_mm` is
    one grouped product per projection, for which CUDA has a kernel in bfloat16 alone; elsewhere
    transformers falls back to a loop over host values. `batched_mm` gathers the weights of every
    row's experts: right everywhere, and cheap for few rows only.
    """
    grouped = device.type == "cuda" and dtype is torch.bfloat16
    if grouped and (not is_here(device) or torch.cuda.get_device_capability(device) >= (8, 0)):
        return "grouped_mm"
    return "batched_mm"


def has_experts(config: Any) -> bool:
    """Whether a transformers config is of a mixture of experts."""
    text = config.get_text_config(decoder=True)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return any(getattr(text, name, None) for name in names)


def _experts_option(config: Any, experts: str) -> dict[str, Any]:
    """Return the option for how experts run; transformers takes none for models without them."""
    return {"experts_implementation": experts} if has_experts(config) else {}


def make(
    source: Source, attention: str, experts: str, *, device: torch.device, dtype: torch.dtype
) -> Any:
    """Return the model without a checkpoint, as transformers initialises it.

    Raises:
        ConfigError: transformers cannot make it, or it takes no attention function of others.
    """
    transformers = require("transformers", "hf")
    try:
        with device:
            model = transformers.AutoModelForCausalLM.from_config(
                copy.deepcopy(source.config),
                dtype=dtype,
                attn_implementation=attention,
                trust_remote_code=False,
                **_experts_option(source.config, experts),
            )
    except Exception as error:
        raise source.refuse(_why_not(error, attention)) from error
    return model.eval().requires_grad_(False)


def _why_not(error: Exception, attention: str) -> str:
    if isinstance(error, KeyError) and error.args == (attention,):
        return "it chooses among attention functions of its own, and takes no other."
    return f"transformers cannot make it: {type(error).__name__}: {error}"


def build(
    source: Source, attention: str, *, device: torch.device, dtype: torch.dtype, seed: int
) -> Any:
    """Return the model with its checkpoint's weights, or random ones from `seed`."""
    experts = experts_for(device, dtype)
    if torch_private.shapes_only():  # a plan; nothing is read
        return make(source, attention, experts, device=device, dtype=dtype)
    if source.path is not None:
        return _load(source, attention, experts, device, dtype)
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(seed)
        model = make(source, attention, experts, device=device, dtype=dtype)
    _randomize(model, seed)
    return model


def _randomize(model: nn.Module, seed: int) -> None:
    """Draw random weights in place: equal for equal seed, device type, dtype and config.

    As `weights.initialize`: matrices get the standard deviation 1 / sqrt(columns), so that every
    layer matters. Vectors are spread around what transformers sets them to, so that no two
    parameters are alike and a mixed-up one shows.
    """
    generator = generator_for(model, seed)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
        else:
            noise = torch.empty_like(parameter).normal_(0.0, 0.1, generator=generator)
            parameter.data.add_(noise)


def _load(
    source: Source, attention: str, experts: str, device: torch.device, dtype: torch.dtype
) -> Any:
    """Return the model with the weights of `source.path`; every parameter comes from there."""
    start = time.perf_counter()
    transformers = require("transformers", "hf")
    options: dict[str, Any] = _experts_option(source.config, experts)
    if source.gguf:
        options["gguf_file"] = source.gguf
    try:
        with _quiet(transformers):
            model, about = transformers.AutoModelForCausalLM.from_pretrained(
                source.folder,
                config=copy.deepcopy(source.config),
                dtype=dtype,
                attn_implementation=attention,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
    except Exception as error:
        raise source.refuse(f"transformers cannot load it: {error}") from error
    for name in ("missing_keys", "mismatched_keys", "error_msgs", "conversion_errors"):
        wrong = sorted(map(str, about.get(name) or ()))
        if wrong:
            raise ConfigError(
                f"{source.setting}: '{source.label}' does not fit its config: {name} "
                f"{', '.join(wrong[:4])}{' …' if len(wrong) > 4 else ''}; those parameters would "
                "be random. Fetch the checkpoint again, or correct its config.json."
            )
    _warn_surplus(source, map(str, about.get("unexpected_keys") or ()))
    logger.info("weights: %s, %.1f s", source.label, time.perf_counter() - start)
    return model.eval().requires_grad_(False).to(device)


def _warn_surplus(source: Source, names: Iterable[str]) -> None:
    if surplus := sorted(names):
        logger.warning(
            "%s: %d tensors of the checkpoint are not used: %s", source.label, len(surplus), surplus
        )


def _tensors_of(source: Source) -> dict[str, Any]:
    """Return, by the name of each tensor of a checkpoint's folder, the file that has it."""
    assert source.path is not None
    handles: dict[str, Any] = {}
    for file in sorted(source.path.glob("*.safetensors")):
        handle = open_safetensors(file, "hf")
        handles |= dict.fromkeys(handle.keys(), handle)
    return handles


def renamed(source: Source) -> list[str]:
    """Return the parameters that a checkpoint has under other names, which transformers converts.

    Such tensors are stacked from several, or called as an older release had them.
    """
    meta, stored = torch.device("meta"), _tensors_of(source)
    model = make(source, "eager", "batched_mm", device=meta, dtype=torch.float32)
    return sorted(dict(model.named_parameters()).keys() - stored.keys())


def load_shards(
    source: Source,
    attention: str,
    shard: Callable[[Any], Mapping[str, Cut]],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Any:
    """Return what one rank holds of the model of `source.path`, reading no more than that.

    `shard(model)`: leaves this rank's part of a model and returns the cuts of its parameters.
    """
    start, meta = time.perf_counter(), torch.device("meta")
    model = make(source, attention, experts_for(device, dtype), device=meta, dtype=dtype)
    cuts = shard(model)
    model.to_empty(device=device)
    model.tie_weights()
    stored, parameters = _tensors_of(source), dict(model.named_parameters())
    _warn_surplus(source, stored.keys() - parameters.keys())
    for name, parameter in parameters.items():
        tensor, cut = stored[name].get_slice(name), cuts.get(name)
        whole = parameter.shape if cut is None else cut.whole(parameter.shape)
        if tuple(tensor.get_shape()) != tuple(whole):
            raise source.refuse(
                f"its checkpoint has {name} in the shape {tensor.get_shape()}, its config asks for "
                f"{list(whole)}."
            )
        parameter.data.copy_(tensor[:] if cut is None else cut.of(tensor))
        parameter._is_hf_initialized = True
    for module in model.modules():  # what is left are buffers, such as rotary frequencies
        module._is_hf_initialized = False
        if isinstance(module, ColumnsOfLinear):
            module.fill_columns()
    model.initialize_weights()
    logger.info("weights: a share of %s, %.1f s", source.label, time.perf_counter() - start)
    return model


def freeze_frequencies(model: nn.Module) -> None:
    """Keep rotary frequencies at what they are, where they would follow the longest sequence.

    Up to `Source.max_position` that is what transformers computes as well.
    """
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and looks_at_length(kinds):
            kinds = "default"
        elif isinstance(kinds, dict):
            kinds = {k: "default" if looks_at_length(str(v)) else v for k, v in kinds.items()}
        if kinds is not None:
            module.__dict__["rope_type"] = kinds


@contextmanager
def implementation(model: Any, attention: str, experts: str | None = None) -> Iterator[None]:
    """Have the model use another attention implementation, and experts', for a block.

    What the modeling code reads is set: `set_attn_implementation` does nothing, but for a warning,
    where the source of the model's class does not look as transformers' own.
    """
    config = model.config
    before = config._attn_implementation, getattr(config, "_experts_implementation", None)
    config._attn_implementation = attention
    if experts is not None:
        config._experts_implementation = experts
    try:
        yield
    finally:
        config._attn_implementation = before[0]
        if experts is not None:
            config._experts_implementation = before[1]


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keep transformers' own progress bars off for a block; pcgsvc shows its own.

    The one of GGUF files knows no switch: what is written to stderr meanwhile goes nowhere. Log
    handlers hold a stream of their own, so warnings arrive.
    """
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()
