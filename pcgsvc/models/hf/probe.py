"""What a model asks of attention, learned by watching one forward of it.

In: a transformers model, or a config from which one is made on the meta device. Out: the
`AttentionSpec` of its layers, or a `ConfigError` that names what we could not do. Runs no kernel of
ours; knows nothing of families: whatever calls transformers' attention interface is seen.

The forward runs with an attention function of our own that notes its arguments, and a mask function
that notes which mask was asked for: transformers describes a mask as a function of (query, key)
positions, which is evaluated far beyond the few tokens of the probe.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pcgsvc import torch_private
from pcgsvc.errors import ConfigError
from pcgsvc.models.files import require
from pcgsvc.models.hf.attention import first_position
from pcgsvc.models.hf.source import OWN_ATTENTION, Source
from pcgsvc.models.hf.weights import implementation, make
from pcgsvc.ops.attention import AttentionSpec

logger = logging.getLogger(__name__)

IMPLEMENTATION = "pcgsvc_probe"
_TOKENS = 8

_HARMLESS = {
    "cache": "there is none: use_cache=False",
    "cache_position": "positions are inputs",
    "is_causal": "looked at by itself",
    "layer_idx": "the module has it",
    "output_attentions": "off",
    "output_hidden_states": "off",
    "past_key_value": "there is none: use_cache=False",
    "past_key_values": "there is none: use_cache=False",
    "position_embeddings": "applied to query and key before",
    "position_ids": "positions are inputs",
    "return_dict": "does not concern attention",
    "training": "off",
    "use_cache": "off",
}
"""Arguments of an attention call that change nothing of what is computed, and why."""
_NAMED = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a bias by position (ALiBi, T5)",
    "alibi": "an ALiBi bias",
    "head_mask": "a mask of heads",
    "cu_seq_lens_q": "packed sequences",
    "cu_seqlens": "packed sequences",
}


@dataclass(frozen=True)
class Call:
    """One attention call, as far as it counts."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    window: int | None


@dataclass
class Notes:
    """What a probe has seen so far."""

    source: Source
    max_position: int
    calls: list[Call] = field(default_factory=list)
    masks: list[tuple[torch.Tensor, int | MaskError | None]] = field(default_factory=list)
    """Masks that transformers was given, each with its window (None: causal over all), or why we
    do not have it: a model may make masks that no layer of it uses."""


_NOTES: contextvars.ContextVar[Notes] = contextvars.ContextVar("pcgsvc_hf_probe")
"""The probe that is running; transformers' registries hold functions, not objects."""


def spec_of_source(
    source: Source, shard: Callable[[Any], object] = lambda model: None
) -> AttentionSpec | None:
    """Return what the model's attention needs, from its config alone: nothing is allocated.

    Args:
        source: names the model.
        shard: leaves of the model what one rank holds.

    Returns:
        None if the forward reads values and so needs real tensors, see `spec_of_model`.

    Raises:
        ConfigError: the model is refused, by name.
    """
    _register()
    meta = torch.device("meta")
    model = make(source, IMPLEMENTATION, "batched_mm", device=meta, dtype=torch.float32)
    shard(model)
    # With fake tensors, since some forwards make tensors on the CPU beside those they are given.
    for mode, name in ((contextlib.nullcontext(), "meta"), (torch_private.fake_tensors(), "cpu")):
        try:
            with mode:
                return _watch(source, model.to_empty(device=name), torch.device(name))
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a model does that needs values
            logger.info("the forward needs more than tensors without values (%s)", error)
    if not model._supports_attention_backend:
        raise source.refuse(
            f"transformers says of {type(model).__name__} that it takes no attention function of "
            "others; it has attention code of its own."
        )
    return None


def spec_of_model(source: Source, model: nn.Module) -> AttentionSpec:
    """Return what a built model's attention needs; its attention implementation is put back."""
    _register()
    with implementation(model, IMPLEMENTATION):
        try:
            return _watch(source, model, next(model.parameters()).device)
        except ConfigError:
            raise
        except Exception as error:
            raise source.refuse(f"its forward fails: {type(error).__name__}: {error}") from error


def _watch(source: Source, model: nn.Module, device: torch.device) -> AttentionSpec:
    first = first_position(model)
    longest = source.max_position() - first
    if longest < 1:
        raise source.refuse(
            f"its positions begin at {first}, and max_position_embeddings leaves room for none."
        )
    tokens = min(_TOKENS, longest)
    notes = Notes(source, longest)
    token = _NOTES.set(notes)
    try:
        with torch.no_grad():
            model(
                input_ids=torch.zeros(1, tokens, dtype=torch.int64, device=device),
                position_ids=torch.arange(first, first + tokens, device=device).unsqueeze(0),
                # Without one, transformers looks into position_ids for packed sequences.
                attention_mask=torch.ones(1, tokens, dtype=torch.int64, device=device),
                use_cache=False,
            )
    finally:
        _NOTES.reset(token)
    return _summary(notes)


def _summary(notes: Notes) -> AttentionSpec:
    calls, source = notes.calls, notes.source
    if not calls:
        raise source.refuse(OWN_ATTENTION)
    for name in ("heads", "kv_heads", "head_dim", "scale", "softcap"):
        values = sorted({getattr(call, name) for call in calls}, key=str)
        if len(values) > 1:
            raise source.refuse(
                f"its attention layers differ in {name} ({', '.join(map(str, values))}); one KV "
                "cache geometry for all layers is supported."
            )
    first = calls[0]
    windows = tuple(call.window for call in calls)
    return AttentionSpec(
        num_layers=len(calls),
        num_heads=first.heads,
        num_kv_heads=first.kv_heads,
        head_dim=first.head_dim,
        scale=first.scale,
        max_position=notes.max_position,
        sliding_windows=windows if any(windows) else None,
        softcap=first.softcap,
    )


def _register() -> None:
    """Register the probe with transformers, where it stays; no user's model is given its name."""
    transformers = require("transformers", "hf")
    transformers.AttentionInterface.register(IMPLEMENTATION, _note_call)
    transformers.AttentionMaskInterface.register(IMPLEMENTATION, _note_mask)


def _note_mask(*args: Any, mask_function: Callable[..., Any], **settings: Any) -> torch.Tensor:
    """Transformers' mask interface: return a token for the mask, and note its window."""
    notes = _NOTES.get()
    token = torch.empty(1, 1, _TOKENS, _TOKENS, dtype=torch.bool)
    try:
        with torch_private.real_tensors():
            notes.masks.append((token, mask_window(mask_function, notes.max_position)))
    except MaskError as error:
        notes.masks.append((token, error))
    return token


def _note_call(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface: note a call, or refuse what it asks for."""
    notes = _NOTES.get()
    heads, tokens, head_dim = query.shape[1:]
    for problem in _problems(notes, module, query, key, value, dropout, settings):
        raise notes.source.refuse(f"{_where(module)} {problem}.")
    window = _window_of(notes, module, attention_mask)
    asked = sliding_window if sliding_window and sliding_window < notes.max_position else None
    if asked is not None and asked != window:
        raise notes.source.refuse(
            f"{_where(module)} asks for a sliding window of {asked} keys, but its mask has "
            f"{window or 'none'}."
        )
    scale = float(scaling) if scaling is not None else head_dim**-0.5
    cap = float(softcap) if softcap else None
    notes.calls.append(Call(heads, key.shape[1], head_dim, scale, cap, window))
    return query.new_empty(1, tokens, heads, value.shape[3]), None


def _problems(
    notes: Notes,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    settings: dict[str, Any],
) -> Iterator[str]:
    """Yield what is asked for that we cannot do."""
    layer, number = getattr(module, "layer_idx", None), len(notes.calls)
    causal = settings.get("is_causal")
    if key.shape[2] != query.shape[2] or query.shape[0] != 1:
        yield (
            f"attends from {query.shape[2]} rows to {key.shape[2]} others: cross attention, or "
            "keys that it keeps itself, are not supported"
        )
    if query.shape[3] != key.shape[3] or value.shape[3] > key.shape[3]:
        yield (
            f"has queries, keys and values of {query.shape[3]}, {key.shape[3]} and "
            f"{value.shape[3]} features; values may be narrower than keys, no more is supported"
        )
    if value.shape[1] != key.shape[1] or query.shape[1] % key.shape[1]:
        yield f"has {query.shape[1]} query, {key.shape[1]} key and {value.shape[1]} value heads"
    if layer != number:
        yield (
            f"is attention call number {number} but has layer_idx {layer}: layers without "
            "attention, which keep a state of their own, and layers that attend twice are not "
            "supported"
        )
    if causal is False or (causal is None and not getattr(module, "is_causal", True)):
        yield "is not causal"
    if dropout:
        yield f"has dropout {dropout} outside training"
    for name, setting in settings.items():
        if setting is not None and setting is not False and name not in _HARMLESS:
            what = _NAMED.get(name, f"the argument {name!r}, which pcgsvc does not know")
            yield f"asks for {what}"


def _window_of(notes: Notes, module: nn.Module, mask: torch.Tensor | None) -> int | None:
    if mask is None:
        return None
    for token, window in notes.masks:
        if token is not mask:
            continue
        if isinstance(window, MaskError):
            raise notes.source.refuse(f"the mask of {_where(module)} {window}.") from window
        return window
    raise notes.source.refuse(
        f"{_where(module)} gets a mask that is not as transformers' mask functions made it: a bias "
        "(ALiBi, relative positions) or a mask of its own, which is not supported."
    )


def _where(module: nn.Module) -> str:
    return f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')}"


# ---- masks ---------------------------------------------------------------------------------------


class MaskError(Exception):
    """The mask is neither causal nor a sliding window; the message continues a sentence."""


def mask_window(mask_function: Callable[..., Any], length: int) -> int | None:
    """Return how many keys a row sees at most, itself included; None: all up to itself.

    Args:
        mask_function: of int64 tensors on the CPU.
        length: longest sequence; a window of that size is none.

    Raises:
        MaskError: it is another mask, or depends on data. Rows are sampled: the first ones, those
            around every power of two, and the last.
    """
    keys = torch.arange(length, device="cpu")
    found = int(_seen(mask_function, length - 1, keys).sum())
    rows = {*range(min(16, length)), length - 1}
    for power in (1 << n for n in range(4, length.bit_length())):
        rows |= {row for row in (power - 1, power, power + 1) if row < length}
    for row in sorted(rows):
        expected = (keys <= row) & (keys > row - found)
        if found < 1 or not torch.equal(_seen(mask_function, row, keys), expected):
            raise MaskError(
                "is neither causal nor a sliding window (chunked attention, a prefix, or the "
                f"like): row {row} sees other keys than the {found} up to itself"
            )
    return found if found < length else None


def _seen(mask_function: Callable[..., Any], row: int, keys: torch.Tensor) -> torch.Tensor:
    """Return which keys a row sees, bool [len(keys)]."""
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    try:
        seen = torch.as_tensor(mask_function(zero, zero, zero + row, keys))
        return seen.expand(len(keys)).bool().cpu()
    except Exception as error:
        raise MaskError(
            f"depends on data; only causal masks and sliding windows are supported ({error})"
        ) from error
