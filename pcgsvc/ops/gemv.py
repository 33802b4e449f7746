"""Products of few rows as one kernel with what is around them, and the pass that finds them.

In: a graph after Inductor's own decompositions. Out: the same graph with `mm` of at most 16 rows by
a weight as `pcgsvc::gemv`, with the RMS norm before it and the SwiGLU or residual after it. Knows
nothing of pieces; a graph whose row count is no plain number is left as it is.

The digest of this file stands for the pass in keys: op and pass belong together.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.nn import functional

from pcgsvc.config.resolve import GEMV_ROWS
from pcgsvc.ops.gemv_tuning import choose_plan, launch, padded_rows

aten = torch.ops.aten

_MIN_BYTES = 1 << 20
"""Of a weight; below it a launch's latency counts, no longer the weight."""
_DEVICE = "cuda"


@torch.library.custom_op("pcgsvc::gemv", mutates_args=())
def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm: torch.Tensor | None,
    residual: torch.Tensor | None,
    gated: bool,
    eps: float,
    plan: list[int],
) -> torch.Tensor:
    """Return x @ weight^T [M, N], with what is around it; on CUDA in one Triton kernel.

    Args:
        x: [M, K].
        weight: [N, K], row by row; [2N, K] if `gated`.
        norm: [K]; x is RMS-normed and multiplied by it first. None: it is not.
        residual: [M, N], added last, or None.
        gated: the result is silu(first half of the columns) * second half.
        eps: of the norm.
        plan: of the launch; speed only.
    """
    if norm is not None:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        x = norm * wide.to(x.dtype)
    y = functional.linear(x, weight)
    if gated:
        gate, up = y.chunk(2, -1)
        y = functional.silu(gate) * up
    return y if residual is None else residual + y


@gemv.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, _: Any, __: Any, gated: bool, *___: Any) -> Any:
    return x.new_empty(x.shape[0], weight.shape[0] // (2 if gated else 1))


gemv.register_kernel("cuda")(launch)


# ---- the pass ------------------------------------------------------------------------------------

_CONVERT = torch.ops.prims.convert_element_type.default
_WIDE = (_CONVERT, "x", torch.float32)
_MEAN = (aten.mean.dim, (aten.pow.Tensor_Scalar, _WIDE, 2), [-1], True)
_SCALED = (aten.mul.Tensor, _WIDE, (aten.rsqrt.default, (aten.add.Tensor, _MEAN, "eps")))
_NORM = (aten.mul.Tensor, "norm", (_CONVERT, _SCALED, torch.bfloat16))
"""An RMS norm as Llama's: rounded before it is multiplied by its weight."""
_GATE = (_CONVERT, "gate", torch.float32)
_EXP = (aten.add.Tensor, (aten.exp.default, (aten.neg.default, _GATE)), 1)
_SWIGLU = (aten.mul.Tensor, (_CONVERT, (aten.div.Tensor, _GATE, _EXP), torch.bfloat16), "up")


def fuse_small_products(graph: torch.fx.Graph) -> list[str]:
    """Replace products of at most `GEMV_ROWS` rows by a weight, on a GPU, by `pcgsvc::gemv`.

    Where torch's product is faster it stays. Returns what is wrong with those that stay otherwise.
    """
    problems = []
    for node in list(graph.nodes):
        if node.target is aten.mm.default and _is_small(*node.args):
            problems.append(_replace(graph, node))
    graph.eliminate_dead_code()
    return [f"compiler.passes: gemv is off for {p}" for p in problems if p is not None]


def _is_small(x: torch.fx.Node, right: torch.fx.Node) -> bool:
    """Whether few bfloat16 rows are multiplied by a large weight [N, K] that lies row by row."""
    rows, weight = x.meta["val"], right.meta["val"]
    return bool(
        right.target is aten.permute.default
        and rows.device.type == _DEVICE
        and rows.dtype is torch.bfloat16
        and isinstance(rows.shape[0], int)
        and rows.shape[0] <= GEMV_ROWS
        and tuple(weight.stride()) == (1, weight.shape[0])
        and 2 * weight.numel() >= _MIN_BYTES
    )


def _replace(graph: torch.fx.Graph, product: torch.fx.Node) -> str | None:
    """Replace a product, with what is around it; return what is wrong with that, or None."""
    x: Any = product.args[0]
    weight: Any = product.args[1].args[0]  # type: ignore[union-attr]
    (rows, features), value = x.meta["val"].shape, weight.meta["val"]
    gated = _swiglu_of(product)
    choice = choose_plan(
        padded_rows(rows), value.shape[0], features, gated is not None, value.device
    )
    if choice.plan is None:
        return choice.problem
    last, norm, residual, found = gated or product, None, None, dict[str, Any]()
    # Several rows are normed as they are loaded, by every program again: slower than a kernel.
    if rows == 1 and _matches(x, _NORM, found) and found["norm"].meta["val"].dim() == 1:
        x, norm = found["x"], found["norm"]
    if gated is None and (added := _sum_of(product)) is not None:
        last, residual = added
    eps, plan = found.get("eps", 0.0), list(choice.plan)
    with graph.inserting_before(last):
        made = graph.call_function(
            torch.ops.pcgsvc.gemv.default, (x, weight, norm, residual, gated is not None, eps, plan)
        )
    made.meta = dict(last.meta)
    last.replace_all_uses_with(made)
    graph.erase_node(last)
    return None


def _sum_of(product: torch.fx.Node) -> tuple[torch.fx.Node, Any] | None:
    """Return the only user of a product if it adds a matrix of its shape, and that matrix."""
    (user, *others) = product.users
    found: dict[str, Any] = {}
    if others or not _matches(user, (aten.add.Tensor, "residual", product), found):
        return None
    residual = found["residual"]
    if not isinstance(residual, torch.fx.Node):
        return None
    added, made = residual.meta["val"], product.meta["val"]
    return (user, residual) if (added.shape, added.dtype) == (made.shape, made.dtype) else None


def _swiglu_of(product: torch.fx.Node) -> torch.fx.Node | None:
    """Return `silu(first half) * second half` of a product, where nothing else reads the halves."""
    (split, *others) = product.users
    half = product.meta["val"].shape[1] // 2
    if (
        others
        or split.target is not aten.split.Tensor
        or split.args[1:]
        not in (
            (half, -1),
            (half, 1),
        )
    ):
        return None
    halves = {n.args[1]: n for n in split.users if n.target is operator.getitem}
    if set(halves) != {0, 1} or any(len(n.users) != 1 for n in halves.values()):
        return None
    (last,) = halves[1].users
    found: dict[str, Any] = {"gate": halves[0], "up": halves[1]}
    return last if _matches(last, _SWIGLU, found) else None


def _matches(value: Any, pattern: Any, found: dict[str, Any]) -> bool:
    """Whether a node is a pattern: (op, *args), a name to be put into `found`, or a value."""
    if isinstance(pattern, str):
        return found.setdefault(pattern, value) is value
    if not isinstance(pattern, tuple):
        return bool(value is pattern or value == pattern)
    op, *args = pattern
    if not isinstance(value, torch.fx.Node) or value.target is not op or value.kwargs:
        return False
    commutes = op in (aten.mul.Tensor, aten.add.Tensor)
    for order in (args, args[::-1]) if commutes else (args,):
        attempt = dict(found)
        pairs = zip(value.args, order, strict=True) if len(value.args) == len(order) else ()
        if pairs and all(_matches(v, p, attempt) for v, p in pairs):
            found.update(attempt)
            return True
    return False
