"""`model=hf parallel.tensor=N`: a transformers model shared out as its family declares.

In: a model of transformers with its `tp_plan`, and a rank's place. Out: the same model with this
rank's part of the weights, and a `Cut` per parameter; the plan's words are transformers', the
layers are ours. Knows nothing of checkpoints or attention.

A plan names modules and parameters, `*` standing for a number. Linear layers lose rows (`colwise`)
or columns (`rowwise`, whose products are summed); one whose neighbour needs all of it gathers its
output or takes its columns out of the whole input. Embeddings stay whole on every rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pcgsvc.errors import ConfigError
from pcgsvc.models.hf.source import Source
from pcgsvc.models.sharding import Cut, gather_columns, kv_share, share, sum_over_ranks
from pcgsvc.ops.attention import AttentionSpec
from pcgsvc.ops.expert_group import Place

_WHOLE = ("embedding_rowwise", "replicate", "replicated_with_grad_allreduce")
_GATHERED = ("colwise_gather_output", "colwise_rep")
_SPLIT_INPUT = ("rowwise_split_input", "rowwise_rep")
_KEYS = ("k_proj", "v_proj")


class RowsOfLinear(nn.Module):
    """A linear layer of which each rank has some rows; the output is gathered."""

    def __init__(self, linear: nn.Linear, ranks: int) -> None:
        super().__init__()
        self.weight, self.bias, self.ranks = linear.weight, linear.bias, ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., columns] as [..., rows]."""
        here = functional.linear(x.flatten(0, -2), self.weight, self.bias)
        return gather_columns(here, self.ranks).view(*x.shape[:-1], -1)


class ColumnsOfLinear(nn.Module):
    """A linear layer of which each rank has some columns; the products are summed.

    `stretch`: which features of the whole input these are; None: the input is this rank's.
    """

    def __init__(self, linear: nn.Linear, ranks: int, stretch: slice | None) -> None:
        super().__init__()
        self.weight, self.bias, self.ranks = linear.weight, linear.bias, ranks
        self.stretch = stretch
        self.columns: torch.Tensor | None
        # A tensor, so that the graph is the same on every rank.
        columns = linear.weight.new_empty(linear.weight.shape[1], dtype=torch.int64)
        self.register_buffer("columns", None if stretch is None else columns, persistent=False)
        self.fill_columns()

    def fill_columns(self) -> None:
        """Write `columns`, once it has memory."""
        if self.columns is not None and self.stretch is not None:
            self.columns.copy_(torch.arange(self.stretch.start, self.stretch.stop))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., columns, or all of them] as [..., rows]."""
        x = x if self.columns is None else x.index_select(-1, self.columns)
        summed = sum_over_ranks(functional.linear(x, self.weight), self.ranks)
        return summed if self.bias is None else summed + self.bias


def shard(source: Source, model: Any, spec: AttentionSpec, place: Place) -> dict[str, Cut]:
    """Leave this rank's part of a model, in place; return the cuts of its parameters by name.

    Args:
        source: for messages.
        model: of transformers, whole, with values or without.
        spec: attention of the whole model.
        place: of the rank.

    Raises:
        ConfigError: the family declares no plan, or a style that is not known here, or one for
            which the ranks do not divide the weight.
    """
    plan: dict[str, str] = dict(model.tp_plan or {})
    if not any(style not in _WHOLE for style in plan.values()):
        raise source.refuse(
            f"parallel.tensor={place.world}: transformers declares no tp_plan for it, which says "
            "how its layers are shared out; leave parallel.tensor out."
        )
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is model.get_input_embeddings().weight
    cuts: dict[str, Cut] = {}
    for name, thing in [*model.named_modules(), *model.named_parameters()]:
        style = plan.get(re.sub(r"\d+", "*", name), "replicate")
        if style in _WHOLE or (tied and thing is head):
            continue
        cutter = _Cutter(source, model, name, style, spec, place)
        cuts |= cutter.linear(thing) if isinstance(thing, nn.Linear) else cutter.other(thing)
    return cuts


@dataclass(frozen=True)
class _Cutter:
    """One entry of the plan, applied to one module or parameter."""

    source: Source
    model: Any
    name: str
    style: str
    spec: AttentionSpec
    place: Place

    def linear(self, linear: nn.Linear) -> dict[str, Cut]:
        """Share out a linear layer."""
        style, inputs = self.style, linear.in_features
        if style == "rowwise" or style in _SPLIT_INPUT:
            here = self._halves(1, inputs, 1)
            found = {"weight": here}
            self._keep(linear, found)
            linear.in_features = linear.weight.shape[1]
            stretch = here.parts[0][1] if style in _SPLIT_INPUT else None
            summed = ColumnsOfLinear(linear, self.place.world, stretch)
            self.model.set_submodule(self.name, summed)
        elif style == "colwise" or style == "packed_colwise" or style in _GATHERED:
            here = self._halves(0, linear.out_features, 2 if style == "packed_colwise" else 1)
            found = {"weight": here, "bias": here}
            self._keep(linear, found)
            linear.out_features = linear.weight.shape[0]
            if style in _GATHERED:
                self.model.set_submodule(self.name, RowsOfLinear(linear, self.place.world))
        else:
            raise self._unknown("a linear layer")
        return {f"{self.name}.{k}": c for k, c in found.items() if getattr(linear, k) is not None}

    def other(self, thing: nn.Module | nn.Parameter) -> dict[str, Cut]:
        """Share out a parameter by itself, or sum what a module returns."""
        if isinstance(thing, nn.Module):
            if self.style != "moe_tp_experts":
                raise self._unknown(f"a {type(thing).__name__}")
            thing.register_forward_hook(_SumOutput(self.place.world))
            return {}
        dim = {"colwise": -2, "packed_colwise": -2, "rowwise": -1, "packed_rowwise": -1}.get(
            self.style
        )
        if dim is None or thing.ndim < 2:
            raise self._unknown(f"a parameter of {thing.ndim} dimensions")
        at = thing.ndim + dim
        here = self._halves(at, thing.shape[at], 2 if self.style.startswith("packed") else 1)
        home, _, own = self.name.rpartition(".")
        self._keep(self.model.get_submodule(home), {own: here})
        return {self.name: here}

    def _halves(self, dim: int, length: int, parts: int) -> Cut:
        """Return the cut of `length` features that are so many equal parts."""
        spec, each = self.spec, length // parts
        few = spec.num_kv_heads < self.place.world
        if few and self.style == "colwise" and self.name.endswith(_KEYS):
            head = length // spec.num_kv_heads
            return Cut(dim, ((length, kv_share(spec.num_kv_heads, head, self.place)),))
        if each % self.place.world:
            raise self.source.refuse(
                f"parallel.tensor={self.place.world} does not divide the {each} features of "
                f"{self.name}."
            )
        return Cut(dim, ((each, share(each, self.place)),) * parts)

    def _keep(self, module: nn.Module, cuts: dict[str, Cut]) -> None:
        for name, cut in cuts.items():
            if (whole := getattr(module, name)) is not None:
                setattr(module, name, nn.Parameter(cut.of(whole.data), requires_grad=False))

    def _unknown(self, what: str) -> ConfigError:
        known = ("colwise", *_GATHERED, "rowwise", *_SPLIT_INPUT, "packed_colwise", *_WHOLE)
        return self.source.refuse(
            f"parallel.tensor={self.place.world}: its tp_plan says {self.style!r} of {self.name}, "
            f"{what}; styles known here: {', '.join(known)}, and of experts moe_tp_experts."
        )


@dataclass(frozen=True)
class _SumOutput:
    """A hook on a module whose output is a part of a sum on each rank."""

    ranks: int

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return sum_over_ranks(output.contiguous(), self.ranks)
