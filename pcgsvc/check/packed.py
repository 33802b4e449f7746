"""Refuse what plain execution packs by a mask: the nested tensors of `nn.TransformerEncoder`.

In: a `Trial`. Out: nothing, or a `TraceError`. Not seen: branches that this run does not take.
"""

from __future__ import annotations

from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.check.trial import Trial
from pcgsvc.errors import TraceError


def refuse_packed_rows(trial: Trial) -> None:
    """Raise TraceError if torch's fast path drops masked positions, which no trace does.

    Plain execution then gives zeros at those positions where every mask ends in them, and what
    attention gives where one does not: a branch on values, which a build's self-check would meet
    by chance only.
    """
    module: Any = trial.model.module
    names = [
        name
        for name, sub in (module.named_modules() if isinstance(module, torch.nn.Module) else ())
        if isinstance(sub, torch.nn.TransformerEncoder) and sub.use_nested_tensor
    ]
    if not names:
        return
    torch.backends.mha.set_fastpath_enabled(True)
    try:
        with _Packing():
            trial.plain(trial.step(next((n for n in trial.config.capture.final_sizes if n > 1), 1)))
    except _PackedError:
        raise TraceError(
            f"nn.TransformerEncoder {names}: plain execution packs rows by src_key_padding_mask "
            "(torch's fast path) and leaves zeros at masked positions, if the values of the mask "
            "allow it; a graph cannot. Make it with enable_nested_tensor=False, which gives the "
            "same results at all other positions."
        ) from None
    except Exception:  # noqa: BLE001 - the forward's own: told where it is compared
        pass
    finally:
        torch.backends.mha.set_fastpath_enabled(False)


class _PackedError(Exception):
    """A forward packs rows."""


class _Packing(torch_private.RecordingMode):
    """Ends a forward that packs rows, or would for another mask."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = torch_private.op_name(func)
        if name == "aten::_nested_tensor_from_mask_left_aligned":
            return True
        if name == "aten::_nested_tensor_from_mask":
            raise _PackedError
        return func(*args, **(kwargs or {}))
