"""What running a forward changes of a module, put back: tensors, Python attributes, random state.

In: a callable. Out: a block after which it is as before, also where an op writes to what its schema
does not declare. Not seen: such writes beyond `SAVED_BYTES`, and Python state outside the module
tree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pcgsvc import torch_private
from pcgsvc.errors import TraceError
from pcgsvc.forward.objects import containers_in, tensors_held, tensors_of, tensors_of_op

SAVED_BYTES = 256 * 2**20
"""Most that is copied for writes that no schema declares."""


@contextlib.contextmanager
def state_kept(module: Callable[..., Any], device: torch.device) -> Iterator[None]:
    """Put back at the end of a block what running the forward in it has changed.

    A tensor is copied when it is about to be written to, so that no large model is.
    """
    attributes, watch = Attributes(module), _Watch({**tensors_held(module), **tensors_of(module)})
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), watch:
            yield
    finally:
        attributes.restore()
        watch.writes.put_back()


class _Watch(torch_private.RecordingMode):
    """Has tensors kept before an op writes to them."""

    supports_higher_order_operators = True
    """Their bodies write to nothing that is handed to them; a trace refuses them by name."""

    def __init__(self, kept: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.writes = Writes(kept, {})

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch_private.higher_order_name(func) is not None:
            return func(*args, **(kwargs or {}))
        if may_write(func):
            self.writes.before(str(func._schema.name), func._schema, args, kwargs or {})
        if func.namespace not in ("aten", "prims"):
            self.writes.before_foreign(str(func._schema.name), (args, kwargs))
        return func(*args, **(kwargs or {}))


def may_write(func: Any) -> bool:
    """Whether an op writes to an argument: by its schema, or one of torch's that omits it there."""
    return bool(func._schema.is_mutable) or func._schema.name in _STATISTICS


_STATISTICS = dict.fromkeys(
    ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"),
    ("running_mean", "running_var"),
)
"""Ops of torch's whose schemas do not say what they write in training, with those arguments."""


class Writes:
    """Keeps tensors as they were before the forward writes to them, and inputs from writes."""

    def __init__(
        self, kept: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor]
    ) -> None:
        storage_id = torch_private.storage_id
        self._inputs = {storage_id(b): name for name, b in inputs.items()}
        self._kept: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in kept.items():
            if can_be_put_back(tensor):
                self._kept.setdefault(storage_id(tensor), []).append((name, tensor))
        self._saved: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.written: set[str] = set()
        """Names of the kept tensors that were written to."""
        self._ops: set[str] = set()
        self._left = SAVED_BYTES

    def before(self, op: str, schema: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Look at what an op is about to write to."""
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | dict(kwargs)
        written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        if given.get("training"):
            written += _STATISTICS.get(op, ())
        for leaf in pytree.tree_leaves([given.get(name) for name in written]):
            if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
                continue
            storage = torch_private.storage_id(leaf)
            if storage in self._inputs:
                raise TraceError(
                    f"the forward writes to its input {self._inputs[storage]!r} with {op}; a "
                    "runner copies inputs, so the caller's tensor would not change. Write to a "
                    "clone."
                )
            for name, tensor in self._kept.get(storage, ()):
                self.written.add(name)
                if name not in self._saved:
                    self._saved[name] = (tensor, tensor.clone())

    def before_foreign(self, op: str, given: Any) -> None:
        """Look at what an op that is not torch's may write to though its schema says otherwise."""
        reached: dict[str, torch.Tensor] = {}
        if op not in self._ops:  # what its function holds is searched for once
            self._ops.add(op)
            held = tensors_of_op(op)
            reached = {f"{op}: {n}": t for n, t in held.items() if can_be_put_back(t)}
        for leaf in pytree.tree_leaves(given):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                reached |= dict(self._kept.get(torch_private.storage_id(leaf), ()))
        for name, tensor in reached.items():
            if name not in self._saved and tensor.nbytes <= self._left:
                self._left -= tensor.nbytes
                self._saved[name] = (tensor, tensor.clone())

    def put_back(self) -> None:
        """Undo what was written, the oldest copy of shared memory last."""
        for name, (tensor, value) in reversed(self._saved.items()):
            if name in self.written or not same_bits(tensor, value):
                tensor.copy_(value)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype read as the same bytes."""
    plain = [t.detach().resolve_conj().resolve_neg() for t in (one, other)]
    bits = [t.reshape(-1).contiguous().view(torch.uint8) for t in plain]
    return torch.equal(*bits)


def can_be_put_back(tensor: torch.Tensor) -> bool:
    """Whether a tensor's content can be copied back; torch writes to no others itself."""
    overlaps = tensor.layout is torch.strided and any(
        step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    dense = tensor.layout is torch.strided and tensor.device.type != "meta"
    return dense and not overlaps and not tensor.is_inference()


class Attributes:
    """The Python state of a module tree, to put back after tracing."""

    def __init__(self, module: Callable[..., Any]) -> None:
        self._saved = [(name, held, held.copy()) for name, held in containers_in(module)]

    def restore(self) -> dict[str, Any]:
        """Put everything back; return what tracing had changed, by dotted name; None if removed."""
        changed: dict[str, Any] = {}
        for name, held, before in self._saved:
            if _same_content(held, before):
                continue
            if isinstance(held, dict):
                keys = dict.fromkeys([*before, *held])
                differ = [k for k in keys if held.get(k, self) is not before.get(k, self)]
                changed |= {f"{name}{key}": held.get(key) for key in differ}
            else:
                changed[name] = held
            held.clear()
            held.extend(before) if isinstance(held, list) else held.update(before)
        return changed


def _same_content(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(a[k] is b[k] for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
    return bool(a == b)
