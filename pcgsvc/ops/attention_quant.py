"""Attention whose output is quantised at once, and the compiler pass that makes it of two ops.

In: a graph after Inductor's own decompositions. Out: the same graph with `pcgsvc::attention`
followed by `pcgsvc::quantize` as one `pcgsvc::attention_quant`. Knows nothing of partitions: under
`partition.strategy=fx` attention is in no graph that is compiled, so that nothing is found.

The digest of this file stands for the pass in keys: ops and pass belong together.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.ops.attention import attention
from pcgsvc.ops.registry import register_splitting_op


@torch.library.custom_op("pcgsvc::quantize", mutates_args=())
def quantize(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Return x / scale as int8, rounded to even and clamped; one scale for the whole tensor."""
    return (x / scale).round().clamp(-128, 127).to(torch.int8)


@quantize.register_fake
def _(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.int8)


def attention_quant(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    layer: int,
    scale: float,
) -> None:
    """Write `quantize(attention(q, k, v), scale)` into `output`, int8 of attention's shape."""
    exact = torch.empty_like(output, dtype=q.dtype)
    attention(q, k, v, exact, layer)
    output.copy_(quantize(exact, scale))


register_splitting_op(
    "pcgsvc::attention_quant",
    attention_quant,
    mutates_args=("output",),
    support=None,
    zeroes_padding=True,
    stands_for="pcgsvc::attention",
)

_VIEWS = {
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.alias.default,
}


def fuse_attention_quant(graph: torch.fx.Graph) -> None:
    """Replace attention and quantize by one op wherever nothing else reads what attention gave."""
    for node in list(graph.nodes):
        if node.target is torch.ops.pcgsvc.quantize.default:
            found = _attention_before(node)
            if found is not None:
                _replace(graph, node, *found)


def _attention_before(
    quantized: torch.fx.Node,
) -> tuple[torch.fx.Node, torch.fx.Node, list[torch.fx.Node]] | None:
    """Return the call of attention, its result, and the views of it up to the quantisation."""
    views: list[torch.fx.Node] = []
    at: Any = quantized.args[0]
    while at.target in _VIEWS and len(at.users) == 1:
        views.insert(0, at)
        at = at.args[0]
    if at.target is not operator.getitem or at.args[1] != 1 or len(at.users) != 1:
        return None
    call = at.args[0]
    if torch_private.functionalized_op(call) is not torch.ops.pcgsvc.attention.default:
        return None
    bases = call.kwargs["_all_bases"]
    if len(call.users) != 1 or len(bases) != 1:
        return None
    # A part of a larger buffer would leave the rest of it without a quantised value.
    if any(key.startswith(("_output_size", "_output_slice")) for key in call.kwargs):
        return None
    return call, at, views


def _replace(
    graph: torch.fx.Graph,
    quantized: torch.fx.Node,
    call: torch.fx.Node,
    result: torch.fx.Node,
    views: list[torch.fx.Node],
) -> None:
    kwargs: dict[str, Any] = dict(call.kwargs)
    (base,) = kwargs["_all_bases"]
    _, scale = quantized.args

    def fake() -> Any:
        return torch_private.fake_like(base.meta["val"], torch.int8)

    with graph.inserting_before(call):
        buffer = graph.call_function(
            torch.ops.aten.empty_like.default, (base,), {"dtype": torch.int8}
        )
        buffer.meta["val"] = fake()
        fused = graph.call_function(
            call.target,  # type: ignore[arg-type]
            (torch.ops.pcgsvc.attention_quant.default,),
            {**kwargs, "_all_bases": [buffer], "scale": scale},
        )
        last = graph.call_function(operator.getitem, (fused, 1))
        last.meta["val"] = fake()
        fused.meta["val"] = (None, last.meta["val"])
    for view in views:
        with graph.inserting_before(view):
            args = (last, *view.args[1:])
            values = torch.fx.map_arg(args, lambda n: n.meta["val"])
            last = graph.call_function(view.target, args, view.kwargs)  # type: ignore[arg-type]
            last.meta["val"] = torch_private.fake_call(view.target, values, dict(view.kwargs))
    quantized.replace_all_uses_with(last)
    for node in (quantized, *reversed(views), result, call):
        graph.erase_node(node)
