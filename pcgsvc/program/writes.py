"""Writes that an op's schema does not declare: found, put back, refused.

In: a compiled model and its memory, around everything that a build executes. Out: the tensors as
they were, and an error that names op, argument and schema. Torch's own ops and ours write what they
declare; so a program without any other is not watched.

A write is seen by the tensor's version, which torch counts, and by its content, where that was
saved: the smallest tensors first, up to a budget, so that no large model is copied. Not seen: a
write to one of the others that goes past torch (a raw pointer, `.data`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from pcgsvc import torch_private
from pcgsvc.errors import CaptureError, PcgError
from pcgsvc.forward.objects import tensors_of, tensors_of_op
from pcgsvc.forward.state import SAVED_BYTES, same_bits
from pcgsvc.ops.registry import find_spec
from pcgsvc.program.image import ProgramImage
from pcgsvc.program.model import CompiledModel
from pcgsvc.trace.rows import Row, find_target, refs


@contextlib.contextmanager
def undeclared_writes_refused(
    model: CompiledModel, tensors: Mapping[str, torch.Tensor]
) -> Iterator[None]:
    """Leave a block with every tensor as it was that the program does not declare to write.

    Args:
        model: what is executed in the block.
        tensors: parameters, buffers and other tensors that it is bound to, by name.

    Raises:
        CaptureError: one was written to, naming operator, argument and schema. It has been put
            back, unless the message says otherwise. What only the operator's own function reaches
            (a global of its module) is put back without an error: no schema could declare it.
    """
    ops = _foreign_ops(model.image)
    watched = _watched(model, tensors, ops) if ops else []
    wrong: list[str] = []
    try:
        yield
    except Exception as error:
        wrong = [words for w in watched if (words := _put_back(w, model.image, ops))]
        if wrong and isinstance(error, PcgError):  # it comes of the write
            raise CaptureError("; ".join(wrong)) from error
        raise
    wrong = [words for w in watched if (words := _put_back(w, model.image, ops))]
    if wrong:
        raise CaptureError("; ".join(wrong))


def _foreign_ops(image: ProgramImage) -> list[str]:
    """Return the ops of a program that are neither torch's nor ours."""
    names = {*image.schemas, *image.matched}
    found = []
    for name in sorted(n for n in names if not n.startswith(("aten::", "prims::"))):
        spec = find_spec(name)
        if spec is None or spec.kernel.__module__.partition(".")[0] != "pcgsvc":
            found.append(name)
    return found


@dataclass
class _Watched:
    """A tensor as it was before the block."""

    name: str
    tensor: torch.Tensor
    version: int | None
    """None: torch does not count (a tensor of inference mode)."""
    saved: torch.Tensor | None
    """None: over the budget."""
    is_models: bool
    """Whether the model holds it; else only a function of an op does."""


def _watched(
    model: CompiledModel, tensors: Mapping[str, torch.Tensor], ops: list[str]
) -> list[_Watched]:
    declared = {torch_private.storage_id(tensors[name]) for name in model.mutated}
    models = {**tensors_of(model.module), **tensors}
    own = {f"{op}: {n}": t for op in ops for n, t in tensors_of_op(op).items()}
    dense = [
        (name, tensor)
        for name, tensor in {**own, **models}.items()
        if tensor.layout is torch.strided and torch_private.has_memory(tensor)
    ]
    found, seen, left = [], set[int](), SAVED_BYTES
    for name, tensor in sorted(dense, key=lambda item: item[1].nbytes):
        if id(tensor) in seen or torch_private.storage_id(tensor) in declared:
            continue
        seen.add(id(tensor))
        left -= tensor.nbytes
        version = None if tensor.is_inference() else tensor._version
        saved = tensor.detach().clone() if left >= 0 else None
        found.append(_Watched(name, tensor, version, saved, name in models))
    return found


def _put_back(watched: _Watched, image: ProgramImage, ops: list[str]) -> str | None:
    """Put a tensor back; return what is wrong with a write to it, or None."""
    tensor, saved = watched.tensor, watched.saved
    is_counted = watched.version is not None and tensor._version != watched.version
    is_changed = saved is not None and not same_bits(tensor, saved)
    if not is_counted and not is_changed:
        return None
    if is_changed and saved is not None:
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.copy_(saved)
    if saved is not None and not watched.is_models:
        return None
    after = "It has been put back." if saved is not None else "It is too large to be put back."
    return f"{_who_writes(watched.name, image, ops)} {after}"


def _who_writes(name: str, image: ProgramImage, ops: list[str]) -> str:
    takers = dict.fromkeys(_takers(name, image, ops))
    if not takers:
        return (
            f"tensor {name!r} was written to by one of the operators {ops}, and no schema says so. "
            "Pass it as an argument that is declared as written (mutates_args, or Tensor(a!))."
        )
    listed = " or ".join(f"{op} writes to its argument {arg!r} ({s})" for op, arg, s in takers)
    return (
        f"{listed}, which the schema does not say: {name!r} of the model was changed by the build. "
        "Declare the write (mutates_args, or Tensor(a!)), or write to a copy."
    )


def _takers(name: str, image: ProgramImage, ops: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield operator, argument and schema of the calls that take a bound tensor and may not."""
    bound = [b.name for b in image.spec.bindings]
    for step in image.spec.steps:
        document = image.documents.get(step.piece or "")
        inputs = [bound[n] if n < len(bound) else None for n in step.inputs]
        for row in document["rows"] if document is not None else ():
            yield from _taken_by(row, {at for at, n in enumerate(inputs) if n == name}, ops)
        for call in step.calls:
            yield from _taken_by(call.row, {at for at, n in enumerate(bound) if n == name}, ops)


def _taken_by(row: Row, numbers: set[int], ops: list[str]) -> Iterator[tuple[str, str, str]]:
    if row[0] != "call_function" or not row[1].startswith("torch.ops."):
        return
    target = find_target(row[1])
    name, schema = torch_private.op_name(target), torch_private.op_schema(target)
    if name not in ops or schema is None:
        return
    given = itertools.chain(
        zip((a.name for a in schema.arguments), row[2][1], strict=False),
        ((key[1], item) for key, item in row[3][1]),
    )
    declared = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    for argument, item in given:
        if refs(item) & numbers and argument not in declared:
            yield name, argument, str(schema)
