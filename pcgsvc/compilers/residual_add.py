"""A compiler pass that takes a residual's addition out of a matrix product again.

In: a graph that Inductor has decomposed and matched its patterns in. Out: the same graph with
`addmm` of a whole matrix as `mm` and `add`. Knows nothing of pieces.

Inductor makes `x + mm(a, b)` one `addmm` when the sum is read by anything but pointwise kernels:
at the end of a piece it is an output. cuBLAS adds in place, so `x` is copied first: one more launch
per product, where the kernel that reads the sum would have added on its way. A bias, which is a
vector, is left alone: cuBLAS adds it for nothing.
"""

from __future__ import annotations

import torch

aten = torch.ops.aten


def split_residual_adds(graph: torch.fx.Graph) -> None:
    """Replace `addmm(x, a, b)` on a GPU by `x + mm(a, b)`, rounded as the two ops are."""
    for node in list(graph.nodes):
        if node.target is aten.addmm.default and _is_residual(node):
            residual, left, right = node.args
            with graph.inserting_before(node):
                product = graph.call_function(aten.mm.default, (left, right))
                total = graph.call_function(aten.add.Tensor, (residual, product))
            product.meta = dict(node.meta)
            total.meta = dict(node.meta)
            node.replace_all_uses_with(total)
            graph.erase_node(node)


def _is_residual(node: torch.fx.Node) -> bool:
    """Whether the first argument is a matrix of the result's shape, and nothing is scaled."""
    residual, made = node.args[0], node.meta["val"]
    if node.kwargs or not isinstance(residual, torch.fx.Node) or made.device.type != "cuda":
        return False
    added = residual.meta["val"]
    return bool(added.shape == made.shape and added.dtype is made.dtype)
