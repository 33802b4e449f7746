"""What a forward does that a graph cannot hold, and what its ops do that their schemas do not say.

In: a request. Out: an `Observation` of one plain run. What splitting ops do inside is no hazard:
they run outside the graphs.

Not seen: branches that this run does not take; what an op does to tensors that are no arguments of
its own; writes that go past torch's version counter to arguments above `_SAVED_BYTES`; random
numbers of the caller's own generators; writes to Python globals.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from pcgsvc import torch_private
from pcgsvc.capture.recorded import HOST_DATA, HOST_FUNCTIONS, why_forbidden
from pcgsvc.check.trial import generators
from pcgsvc.forward.objects import tensors_of
from pcgsvc.forward.process import build_modes
from pcgsvc.forward.request import Request, make_samples, make_workspace
from pcgsvc.forward.results import tensors_in
from pcgsvc.forward.state import Attributes, same_bits, state_kept
from pcgsvc.ops.breaks import handle_breaks, without_reads
from pcgsvc.ops.context import use_context
from pcgsvc.trace.sources import line_that_sets, made_permanent

_SAVED_BYTES = 64 * 2**20
"""Largest argument whose content is compared."""

_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
"""Ops that count negative numbers from the last row; others refuse them."""
_NUMBERS = (torch.int32, torch.int64)

_COPIED = "a tensor of the device is copied to the host, which waits for it"


class Hazard(NamedTuple):
    """Something that a plain run does and a replay would not."""

    kind: str
    """`host read`, `host data`, `random numbers`, `row index`, `attribute write` or `print`."""
    what: str
    """Op, attribute or text, and why it is a hazard."""
    line: str
    """`file:line in function` of the user's code; empty where it is not known."""
    way_out: str = ""
    """What to do, where there is more to say than of any hazard of its kind."""


class Undeclared(NamedTuple):
    """What an op does with an argument that its schema does not say."""

    op: str
    argument: str
    schema: str
    is_write: bool
    """Else a result is the argument, or a view of it."""
    is_models: bool
    """Whether the argument was a tensor of the model's own."""


@dataclass
class Observation:
    """What one plain run showed; each thing once, in the order in which it was met."""

    hazards: dict[Hazard, None] = field(default_factory=dict)
    undeclared: dict[Undeclared, None] = field(default_factory=dict)
    called: dict[str, None] = field(default_factory=dict)
    """Names of the ops that are not torch's own."""


def observe(request: Request) -> Observation:
    """Run the module of a request once, plainly, and note what it does.

    What it changes of the module is put back, but for what an op writes and does not declare.

    Raises:
        Exception: whatever the forward raises.
    """
    module, seen = request.bundle.module, Observation()
    tensors, attributes = tensors_of(module), Attributes(module)
    rows = next((n for n in request.config.capture.final_sizes if n > 1), 1)
    with (
        build_modes(request.device),
        contextlib.closing(make_workspace(request, [], {})) as memory,
        state_kept(module, request.device),
        memory.on_stream(),
    ):
        samples = make_samples(request, memory)
        inputs, batch = samples.inputs(rows), samples.batch(rows, uniform=False)
        models = {torch_private.storage_id(t) for t in tensors.values()}
        ops = _Ops(seen, models, request.device, rows)
        out = contextlib.redirect_stdout(_Out(ops))
        context = use_context(memory.unpadded_context(batch))
        try:
            with context, out, handle_breaks(ops), _Functions(ops), ops:
                module(**inputs, **request.constants)
        finally:
            changed = attributes.restore()
    for name in changed:
        line, way_out = line_that_sets(module, name) or "", made_permanent(module, [name])
        seen.hazards[Hazard("attribute write", name, line, way_out)] = None
    return seen


def undeclared_in(run: Callable[[], object], device: torch.device) -> list[Undeclared]:
    """Run something, and return what its ops do that their schemas do not declare."""
    seen = Observation()
    with _Ops(seen, set(), device):
        run()
    return list(seen.undeclared)


class _Ops(torch_private.RecordingMode):
    """Notes what ops of torch do that replays do not, and compares other ops with their schemas.

    Args:
        seen: where it is noted.
        models: storages of the model's own tensors.
        device: what runs.
        rows: of the inputs; 0: indices of rows are not noted.
    """

    supports_higher_order_operators = True

    def __init__(
        self, seen: Observation, models: set[int], device: torch.device, rows: int = 0
    ) -> None:
        super().__init__()
        self._seen, self._models, self._device, self._rows = seen, models, device, rows
        self._inside = False
        """Whether a splitting op or a break runs."""

    def note(self, kind: str, what: str) -> None:
        """Note a hazard of the line that runs, unless it is inside of a splitting op."""
        if not self._inside:
            self._seen.hazards[Hazard(kind, what, _line())] = None

    def at_function(
        self, name: str, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """See `BreakHandler`."""
        with self._apart():
            return function(*args, **kwargs)

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = torch_private.op_name(func), kwargs or {}
        if name is None:
            return func(*args, **kwargs)
        if not name.startswith(("aten::", "prims::")):
            self._seen.called[name] = None
            with self._apart():
                return self._compared(name, func, args, kwargs)
        draws = torch.Tag.nondeterministic_seeded in torch_private.op_tags(func)
        before = generators(self._device) if draws else []
        result = func(*args, **kwargs)
        if draws and not all(map(torch.equal, before, generators(self._device))):
            self.note("random numbers", name)
        why = why_forbidden(func, args, kwargs)
        if name in ("aten::_to_copy", "aten::copy_") and result.device.type == "cpu":
            source = args[name == "aten::copy_"]
            why = _COPIED if source.device.type != "cpu" else None
        if why is not None:
            self.note("host read", f"{name}: {why}")
        if self._indexes_rows(name, args):
            self.note("row index", f"{name}: in a padded call, -1 is the last row of padding")
        return result

    def _indexes_rows(self, name: str, args: Any) -> bool:
        """Whether rows are picked by numbers, as in `h[k]`, which may be negative."""
        if name not in _INDEXING:
            return False
        pairs = zip(args[0].shape, args[1], strict=False)
        picks = any(n == self._rows and k is not None and k.dtype in _NUMBERS for n, k in pairs)
        return picks and torch_private.storage_id(args[0]) not in self._models

    def _compared(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call an op, and note the writes and aliases that its schema does not declare."""
        schema = torch_private.op_schema(func)
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        kept = [
            (argument, tensor, _version(tensor), _copy(tensor))
            for argument, value in given.items()
            for tensor in tensors_in(value)
            if tensor.layout is torch.strided and torch_private.has_memory(tensor)
        ]
        declared = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
        writable = {torch_private.storage_id(t) for argument, t, *_ in kept if argument in declared}
        result = func(*args, **kwargs)
        aliases = any(r.alias_info is not None for r in schema.returns)
        returned = set() if aliases else {torch_private.storage_id(t) for t in tensors_in(result)}
        for argument, tensor, version, copy in kept:
            storage = torch_private.storage_id(tensor)
            same = version == _version(tensor) and (copy is None or same_bits(tensor, copy))
            for is_write, found in (
                (True, not same and storage not in writable),
                (False, storage in returned),
            ):
                if found:
                    is_models = storage in self._models
                    fault = Undeclared(name, argument, str(schema), is_write, is_models)
                    self._seen.undeclared[fault] = None
        return result


class _Functions(TorchFunctionMode):
    """Notes what reads values and never reaches a dispatch mode."""

    def __init__(self, ops: _Ops) -> None:
        super().__init__()
        self._ops = ops

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (why := HOST_FUNCTIONS.get(func)) is not None:
            kind = "host data" if func in HOST_DATA else "host read"
            self._ops.note(kind, f"{func.__name__}: {why}")
        func, args, kwargs = without_reads(func, args, kwargs or {})
        return func(*args, **kwargs)


class _Out(io.TextIOBase):
    """Takes what the forward prints."""

    def __init__(self, ops: _Ops) -> None:
        self._ops = ops

    def write(self, text: str) -> int:
        self._ops.note("print", "writes to standard output")
        return len(text)


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _copy(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.detach().clone() if tensor.nbytes <= _SAVED_BYTES else None


def _line() -> str:
    """Return the line of user code that runs now; empty if there is none."""
    for frame, line in traceback.walk_stack(inspect.currentframe()):
        file = frame.f_code.co_filename
        if file != __file__ and not torch_private.is_torch_file(file):
            return f"{file}:{line} in {frame.f_code.co_name}"
    return ""
