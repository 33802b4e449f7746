"""What running a forward changes of a module, put back: tensors, Python attributes, random state.

In: a callable. Out: a block after which it is as before. Not seen: writes that go past torch, and
Python state outside the module tree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pcgsvc import torch_private
from pcgsvc.errors import TraceError
from pcgsvc.forward.objects import containers_in, tensors_held, tensors_of


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

    def __init__(self, kept: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.writes = Writes(kept, {})

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable:
            self.writes.before(str(func._schema.name), func._schema, args, kwargs or {})
        return func(*args, **(kwargs or {}))


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

    def before(self, op: str, schema: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Look at what an op is about to write to."""
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | dict(kwargs)
        written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
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
                if name not in self._saved:
                    self._saved[name] = (tensor, tensor.clone())

    def put_back(self) -> None:
        """Undo what was written."""
        for tensor, value in self._saved.values():
            tensor.copy_(value)

    def names(self) -> set[str]:
        """Return the names of the kept tensors that were written to."""
        return set(self._saved)


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
