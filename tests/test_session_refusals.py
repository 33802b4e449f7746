"""What a segment of a graph must not hold is refused when it is recorded, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_helpers import WIDTH, build, rows
from model_helpers import make_context
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

import pcgsvc
from pcgsvc.capture.capture import _way_out
from pcgsvc.capture.recorded import RecordedEngine
from pcgsvc.capture.session import Session
from pcgsvc.errors import CaptureError, HostReadError
from pcgsvc.ops.support import Support

FORBIDDEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "if": lambda x: 1 if x.sum() > 0 else 2,
    "int": lambda x: int(x.sum()),
    "float": lambda x: float(x.sum()),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask index": lambda x: x[x > 0],
    "mask write": lambda x: x.clone().__setitem__(x > 0, torch.ones(int(WIDTH))[0]),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "array": lambda x: __import__("numpy").asarray(x),
    "torch.tensor": lambda x: torch.tensor([1.0, 2.0]),
    "as_tensor": lambda x: torch.as_tensor([1.0]),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "asarray": lambda x: torch.asarray([1.0]),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "bincount": lambda x: (x > 0).long().view(-1).bincount(),
    "repeat_interleave": lambda x: x.repeat_interleave((x[:, 0] > 0).long(), 0),
    "resize": lambda x: x.clone().resize_(1),
    "text": lambda x: str(x),
    "apply": lambda x: x.clone().apply_(abs),
    "map": lambda x: x.clone().map_(x, max),
    "list as index": lambda x: x[:, [0, 1]],
    "list as index, written": lambda x: x.clone().__setitem__([0, 1], 0.0),
    "one_hot of unknown classes": lambda x: F.one_hot((x > 0).long()),
}


class _Call:
    """Stands for a compiled piece."""

    opaque = False
    boundaries = None

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return (self._function(*args),)


UNSEEN = ["array", "new_tensor", "asarray", "equal", "allclose", "bincount"]


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_cuda_would_refuse_in_a_segment_is_refused(name: str) -> None:
    engine = RecordedEngine()
    session = Session(engine, make_context(None, [3]), breaks=True)
    try:
        with (
            engine.session(),
            pytest.raises(CaptureError, match="while a segment is captured"),
        ):
            session.region("piece_00", _Call(FORBIDDEN[name]), [rows(3)])
    finally:
        session.abort()
    assert rows(3).sum().item() == rows(3).sum().item()  # the modes are gone


def set_item(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    made = x.clone()
    made[index] = value
    return made


ALLOWED: dict[str, Callable[[torch.Tensor], Any]] = {
    "shapes": lambda x: x.view(-1)[: x.shape[0]],
    "where": lambda x: torch.where(x > 0, x, 0),
    "index": lambda x: x[torch.arange(2)],
    "masked_fill": lambda x: x.masked_fill(x > 0, 1.0),
    "repeat_interleave of known size": lambda x: x.repeat_interleave(
        torch.ones(3, dtype=torch.long), 0, output_size=3
    ),
    "full": lambda x: torch.full((2,), 3.0),
    "topk": lambda x: x.topk(2)[0],
    "number written by a mask": lambda x: set_item(x, x > 0, 2.0),
    "number written by a mask of rows": lambda x: set_item(x, x[:, 0] > 0, 2),
    "number written by a mask of columns": lambda x: set_item(x, (slice(None), x[0] > 0), True),
    "one_hot": lambda x: F.one_hot((x > 0).long(), 2),
    "one_hot by name": lambda x: F.one_hot((x > 0).long(), num_classes=3),
}


@pytest.mark.parametrize(
    "name",
    ALLOWED,
)
def test_what_cuda_allows_in_a_segment_is_recorded(name: str) -> None:
    engine = RecordedEngine()
    session = Session(engine, make_context(None, [3]), breaks=True)
    x = rows(3)
    try:
        with engine.session():
            (out,) = session.region("piece_00", _Call(ALLOWED[name]), [x])
            entry = session.finish([out])
    finally:
        session.abort()
    x.copy_(rows(3, seed=5))
    for step in entry.steps:
        step()
    assert torch.equal(out, ALLOWED[name](x))


def test_a_host_read_in_a_full_graph_raises_and_is_not_frozen() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.toy.host_reader(x, out)
        return out

    with pytest.raises(CaptureError, match="num_tokens was read"):
        build(forward, mode="full")
    with build(forward, mode="piecewise") as runner:
        assert torch.equal(runner(rows(5)), rows(5) * 5)


def test_varlen_forced_into_full_raises_host_read_error() -> None:
    from pcgsvc.ops.varlen import VarlenAttention

    class Liar(VarlenAttention):
        cudagraph_support = Support.ALWAYS

    from pcgsvc.ops import backends

    before = dict(backends.BACKENDS)
    backends.BACKENDS["varlen"] = Liar
    try:
        with pytest.raises(CaptureError) as caught:
            pcgsvc.load_runner(
                [
                    "model=llama",
                    "model.num_layers=1",
                    "attention=varlen",
                    "mode=full",
                    "compiler=eager",
                    "capture.sizes=[4]",
                    "cache.mode=off",
                ]
            )
    finally:
        backends.BACKENDS.clear()
        backends.BACKENDS.update(before)
    assert isinstance(caught.value.__cause__, HostReadError)


def test_an_uncut_splitting_op_that_must_stay_outside_is_not_captured() -> None:
    """S8: `splitting_ops=[]` leaves a support=never op in the graph, host values and all."""
    scale = [1.0]

    @pcgsvc.splitting_op("toy::hidden", mutates_args=("out",), support="never")
    def hidden(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x * scale[0])

    def forward(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.toy.hidden(x, out)
        return out

    with build(forward, splitting_ops=[]) as runner:
        assert runner.report["mode"]["resolved"] == "none"
        assert "toy::hidden" in runner.report["mode"]["reasons"][0]


def test_what_cuda_refuses_to_capture_is_told_with_its_way_out() -> None:
    # CUDA's own words; on the CPU there are no streams.
    text = "CUDA error: capturing stream has unjoined work"
    assert "current_stream().wait_stream(side)" in _way_out(text)
    text = "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU"
    assert "x[0].fill_(2)" in _way_out(text)
    assert _way_out("CUDA error: out of memory") == ""
