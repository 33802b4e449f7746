"""Models drawn from a grammar, and the comparison of a runner with plain execution.

In: a random generator. Out: a `Drawn` model as Python source, with settings and calls; `try_model`
says whether the runner gives what the model gives by itself. A `Form` is a statement of a forward:
its text, the kinds of values that it takes, the kind that it gives. A kind is a letter for the
dtype (f: float32, h: the model's second floating dtype, i: int64) and a width.

Values stay small, and nothing but the inputs decides a branch: results then differ by roundings
only, where plain execution runs other kernels for another number of rows.
"""

from __future__ import annotations

import copy
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import random
import re
import sys
import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from core_helpers import make_config
from model_helpers import make_context
from torch import nn
from torch.utils import _pytree as pytree

import pcgsvc
from pcgsvc.config import Config, Strategy
from pcgsvc.ops.context import use_context

WIDTH = 4
"""Features per row."""
IDS = 8
"""Values of the integer input, and rows of the embedding."""
MOST_ROWS = 9
"""Of a call; the largest capture size is 8."""


# ---- splitting ops -------------------------------------------------------------------------------


class Planted:
    """A fault of the splitting ops, and what their calls were given and gave while recorded."""

    drops_last_row_under: str | None = None
    """The strategy under which they do."""
    strategy: str | None = None
    """Of the runner that is being built or called; None: plain execution."""
    calls: list[tuple[str, list[torch.Tensor], list[torch.Tensor]]] | None = None


def _op(
    name: str, *, mutates_args: Sequence[str] = (), fake: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a splitting op whose calls can be recorded."""

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        return pcgsvc.splitting_op(f"gr::{name}", mutates_args=mutates_args, fake=fake)(function)

    return declare


def _record(name: str, given: Sequence[torch.Tensor], gave: Sequence[torch.Tensor]) -> None:
    if Planted.calls is not None:
        true = pcgsvc.current_context().num_tokens
        cut = [[t[:true].clone() for t in tensors] for tensors in (given, gave)]
        Planted.calls.append((name, *cut))


def _centred(x: torch.Tensor) -> torch.Tensor:
    """Mix the true rows, as attention does; padding rows are left as they are."""
    true = pcgsvc.current_context().num_tokens
    y = x.clone()
    y[:true] += x[:true].sum(0) % 3 if not x.is_floating_point() else x[:true].mean(0)
    if Planted.strategy is not None and Planted.strategy == Planted.drops_last_row_under:
        y[true - 1] = 0
    return y


@_op("attend", mutates_args=("out",))
def attend(x: torch.Tensor, out: torch.Tensor) -> None:
    given = x.clone()
    out.copy_(_centred(x))
    _record("gr::attend", [given], [out])


@_op("fresh", fake=lambda x: torch.empty_like(x))
def fresh(x: torch.Tensor) -> torch.Tensor:
    y = _centred(x)
    _record("gr::fresh", [x], [y])
    return y


@_op("two", fake=lambda x: (torch.empty_like(x), torch.empty_like(x)))
def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = _centred(x)
    _record("gr::two", [x], [y, x - 1])
    return y, x - 1


@_op("mixed", mutates_args=("out",), fake=lambda x, out: torch.empty_like(x))
def mixed(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    y = _centred(x)
    out.copy_(y)
    _record("gr::mixed", [x], [y])
    return y + 1


@_op("same", fake=lambda x: torch.empty_like(x))
def same(x: torch.Tensor) -> torch.Tensor:
    """Return the argument itself."""
    return x


@_op("maybe", fake=lambda x: torch.empty_like(x))
def maybe(x: torch.Tensor) -> torch.Tensor:
    """Return the argument itself or new memory, as the row count says."""
    return x if pcgsvc.current_context().num_tokens % 2 else x.clone()


@_op("halves", fake=lambda x: (x.new_empty(x.shape[0], 2), x.new_empty(x.shape[0], 2)))
def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a view of the argument, and new memory."""
    return x[:, :2], x[:, 2:] + 1


@_op("scaled", fake=lambda x, n: torch.empty_like(x))
def scaled(x: torch.Tensor, n: int) -> torch.Tensor:
    """Take a number that comes of a size."""
    return x * (n % 3)


@_op("bump", mutates_args=("state",))
def bump(state: torch.Tensor, x: torch.Tensor) -> None:
    true = pcgsvc.current_context().num_tokens
    state.mul_(0.5).add_(x[:true].mean(0))


# ---- statements ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """A statement: `{v}` and `{w}` are new values, `{a}` and `{b}` are known ones."""

    what: str
    text: str
    a: str = "[fhi]4"
    """Regular expression of the kinds of `{a}`."""
    b: str = "="
    """Of `{b}`; `=`: the kind of `{a}`."""
    gives: str = "="
    """Kind of the new values; `=`: that of `{a}`."""
    aliases: bool = False
    """Whether new values are memory of `{a}`."""
    writes: bool = False
    """Whether `{a}` is written to, so that it may not be memory of an input."""


def _forms(what: str, *texts: str, **kinds: Any) -> list[Form]:
    return [Form(what, text, **kinds) for text in texts]


F4, FLOAT, ANY = "f4", "[fh]4", "[fhi][24]"
MASKED = "torch.where(pcgsvc.true_rows({a})[:, None], {a}, 0)"

FORMS = [
    *_forms("pointwise", "{v} = {a} + {b}", "{v} = torch.maximum({a}, {b})", a=ANY),
    *_forms("pointwise", "{v} = ({a} * {b}).clamp(-4, 4)", "{v} = {a} * 2 - {b}", a=ANY),
    *_forms("pointwise", "{v} = {a}.tanh()", "{v} = {a}.sin() * 0.5 + {b}", a="[fh][24]"),
    *_forms("pointwise", "{v} = torch.where(x > 0, {a}, {b})"),
    *_forms("pointwise", "{v} = F.layer_norm({a}, (4,), eps=0.1)", a=F4),
    *_forms("linear", "{v} = F.linear({a}, self.w0, self.bias)", "{v} = self.layer({a})", a=F4),
    *_forms("tied weights", "{v} = {a} @ self.tied", a=F4),
    *_forms("tied weights", "{v} = F.linear({a}, self.emb)[:, 4:]", a=F4),
    *_forms("tied weights", "{v} = F.embedding(ids, self.emb) + {a}", a=F4),
    *_forms("dtypes", "{v} = {a}.to(HALF)", a=F4, gives="h4"),
    *_forms("dtypes", "{v} = {a}.float()", a="h4", gives="f4"),
    *_forms("dtypes", "{v} = ({a} % 7).float()", a="i4", gives="f4"),
    *_forms("dtypes", "{v} = ids[:, None] + (x > 0)", a=F4, gives="i4"),
    *_forms("in-place", "{a}.add_({b})", "{a}.mul_(-1)", "{a}.copy_({b})", a=ANY, writes=True),
    *_forms("in-place", "{a}[:, 0] = 3", "{a}[:, 1] += {b}[:, 0]", a=ANY, writes=True),
    *_forms("in-place", "{a}[:, :2] = {b}[:, 2:]", writes=True),
    *_forms("in-place", "torch.add({a}, {b}, out={a})", "{a}.clamp_(-2, 2)", writes=True),
    *_forms("in-place", "{a}.tanh_().mul_({b})", a=FLOAT, writes=True),
    *_forms("view", "{v} = {a}[:, :2]", "{v} = {a}[:, 2:]", a=F4, gives="f2", aliases=True),
    *_forms("view", "{v} = {a}[:, :2]", "{v} = {a}[:, ::2]", a="h4", gives="h2", aliases=True),
    *_forms("view", "{v} = {a}.view(-1, 2, 2)[:, 1]", a=F4, gives="f2", aliases=True),
    *_forms("view", "{v}, {w} = {a}.chunk(2, -1)", a=F4, gives="f2", aliases=True),
    *_forms("view", "{v} = {a}.unsqueeze(1).squeeze(1)", "{v} = {a}.detach()", aliases=True),
    *_forms("view", "{v} = {a}.view_as({a})", "{v} = {a}.expand(-1, 4)", aliases=True),
    *_forms("view", "{v} = torch.cat([{a}, {b}.flip(1)], -1)", a="f2", gives="f4"),
    *_forms("view", "{v} = {a}.t().clone().t()", "{v} = {a}.clone()"),
    *_forms("view", "{v} = torch.empty_like({a})\n{v}[:] = {b}"),
    *_forms("pointwise", "{v} = {a}.masked_fill({b} > 0, 2)", "{v} = {a}.softmax(-1)", a=F4),
    *_forms("pointwise", "{v} = torch.addcmul({a}, {b}, {b}, value=0.5).clamp(-4, 4)", a=F4),
    *_forms("features", "{v} = {a}.sort(-1).values", "{v} = {a}.topk(4, -1)[0]", a="[fi]4"),
    *_forms("features", "{v} = {a}.cumsum(-1)", "{v} = {a}.roll(1, -1)"),
    *_forms("features", "{v} = F.pad({a}, (1, 1))[:, 1:5]"),
    *_forms("features", "{v} = torch.einsum('ni,nj->nj', {a}, {b}).tanh()", a=F4),
    *_forms("features", "{v} = {a}.unfold(1, 2, 2).sum(-1)", a=F4, gives="f2"),
    *_forms("features", "{v} = {a}.argmax(-1)[:, None] * ({b} > 0)", a=F4, gives="i4"),
    *_forms("gather", "{v} = {a}.gather(1, (ids % 4)[:, None]) + {b}"),
    *_forms("gather", "{v} = {a}.index_select(1, torch.arange(4, device=x.device))"),
    *_forms("gather", "{v} = self.table[ids] + {a}", a=F4),
    *_forms("gather", "{v} = self.cells.index_select(0, ids) + {a}", a=F4),
    *_forms("scatter", "{a}.scatter_(1, (ids % 4)[:, None], 1)", writes=True),
    *_forms("scatter", "{a}.masked_fill_({b} > 0, 0)", writes=True),
    *_forms("scatter", "{a}.index_copy_(1, ids.new_zeros(1), {b}[:, 2:3] * 1)", writes=True),
    *_forms("scatter", "{a}[:, 1:].copy_({b}[:, :3] * 1)", writes=True),
    *_forms("scatter", "{a}[{b} > 1] = 0", "{a}[{b}[:, 0] > 1] = 2", writes=True),
    *_forms("features", "{v} = {a} + F.one_hot(ids % 4, 4)"),
    *_forms("number scattered", "{a}[ids[:1] * 0, ids[:1] % 4] = 1", writes=True),
    *_forms(
        "number scattered",
        "{a}[torch.arange(x.shape[0], device=x.device), ids % 4] = 1",
        writes=True,
    ),
    *_forms("view", "{v} = {a}.narrow(1, 0, 4)", "{v} = {a}[None][0]", aliases=True),
    *_forms("view", "{v} = torch.stack([{a}, {b}], 1)[:, 0]"),
    *_forms("view", "{v} = {a}.movedim(0, 1).movedim(0, 1)", aliases=True),
    *_forms("view", "{v} = {a}.as_strided({a}.size(), {a}.stride())", a=F4, aliases=True),
    *_forms("bits", "{v} = ({a}.view(torch.int32) & 2**31 - 1).view(torch.float32)", a=F4),
    *_forms("bits", "{a}.view(torch.int32).bitwise_and_(2**31 - 1)", a=F4, writes=True),
    *_forms("complex", "{v} = torch.complex({a}, {b})", a=F4, gives="c4"),
    *_forms("complex", "{v} = {a} * (0.5 + 1j)", "{v} = {a}.conj() * 0.5", a="c4"),
    *_forms("complex", "{v} = {a} + {b}.conj()", "{v} = {a}.conj()", a="c4", aliases=True),
    *_forms("complex", "{v} = {a}.real + {a}.imag", a="c4", gives="f4"),
    *_forms("python", "c = [{a}]\nfor _ in range(2):\n    c += [c[-1] + {b}]\n{v} = c[-1]"),
    *_forms("python", "kept = dict(a={a}, b={b})\n{v} = kept.pop('a') - kept['b']"),
    *_forms("python", "scale = (lambda n: n * 2 + len(self.mixes))(3)\n{v} = {a} * 2 - scale"),
    *_forms("split", "{v} = torch.empty_like({a})\ntorch.ops.gr.attend({a}, {v})", a=ANY),
    *_forms("split", "torch.ops.gr.attend({b}, {a})", a=ANY, writes=True),
    *_forms("functional split", "{v} = torch.ops.gr.fresh({a})", a=ANY),
    *_forms("functional split", "{v}, {w} = torch.ops.gr.two({a})", a=ANY),
    *_forms("functional split", "{v} = torch.ops.gr.mixed({b}, {a})", writes=True),
    *_forms("aliasing split", "{v} = torch.ops.gr.same({a})", a=ANY, aliases=True),
    *_forms("aliasing split", "{v} = torch.ops.gr.maybe({a})", a=ANY, aliases=True),
    *_forms(
        "aliasing split", "{v}, {w} = torch.ops.gr.halves({a})", a=F4, gives="f2", aliases=True
    ),
    *_forms("host data", "{v} = {a} + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)", a=F4),
    *_forms("list as index", "{a}[:, [0, 2]] = {b}[:, [1, 3]]", writes=True),
    *_forms("list as index", "{v} = {a}[:, [3, 0, 0, -1]]"),
    *_forms("constants", "{v} = {a} * SCALE + TABLE", "{v} = {a} * self.alpha + self.held", a=F4),
    *_forms("constants", "{v} = {a} + torch.ones(4, device=x.device) * self.mixes[0]", a=F4),
    *_forms("sizes", "{v} = {a}.reshape(x.shape[0], -1)", aliases=True),
    *_forms("sizes", "{v} = {a} + torch.arange(x.shape[0], device=x.device)[:, None]"),
    *_forms("sizes", "{v} = {a} + self.table[: x.shape[0]]", a=F4),
    *_forms("sizes", "{v} = {a}.new_full((x.shape[0], 4), 2) * {a}"),
    *_forms("sizes", "{v} = torch.cat([{a}, {b}])[: x.shape[0] * 2 // 2]"),
    *_forms("sizes", "{v} = torch.cat([{a}, {b}]).view(2, -1, 4)[1]"),
    *_forms("sizes", "{v} = {a}.repeat_interleave(2, 0)[::2]"),
    *_forms("branch on the size", "{v} = {a} + (1 if x.shape[0] > 4 else 2)"),
    *_forms("size to an op", "{v} = torch.ops.gr.scaled({a}, x.shape[0] + 1)"),
    *_forms("transposed", "{v} = {a}.t()", a=F4, gives="t4", aliases=True),
    *_forms("transposed", "{v} = {a}.t()", a="t4", gives="f4", aliases=True),
    *_forms("transposed", "{v} = {a}.relu() + {b}", "{v} = {a} * x.t()", a="t4"),
    *_forms("transposed", "{a}.mul_(2)", "{a}[1:3].add_({b}[1:3])", a="t4", writes=True),
    *_forms("submodule", "{v} = self.block({a})", a=F4),
    *_forms("rows", "{v} = {a} + " + MASKED + ".sum(0)", "{v} = {a}.cumsum(0) % 5", a="i4"),
    *_forms("rows", "{v} = {a} - {b}[:1]"),
    *_forms("rows", "{v} = {a} + self.w0[0, 0].to({a}.dtype) * {b}[0]"),
    *_forms("padding in rows", "{v} = {a} + {a}.sum(0) * 0.125", a=F4),
    *_forms("padding in rows", "{v} = {a} / x.shape[0]", a=F4),
    *_forms("state", "self.count.add_(1)\n{v} = {a} + self.count", a=F4),
    *_forms("state", "{v} = {a} + self.state", a=F4),
    *_forms("number copied", "self.state[0] = 2\n{v} = {a}.clone()", a=F4),
    *_forms("state", "self.cells[0].copy_({a}[0])\n{v} = {a} + self.cells[:2].sum(0)", a=F4),
    *_forms("aliasing split", "{v} = torch.ops.gr.same(self.cells)[: x.shape[0]] + {a}", a=F4),
    *_forms("state", "self.state.copy_(" + MASKED + ".sum(0))\n{v} = {a} + self.state", a=F4),
    *_forms("state", "torch.ops.gr.bump(self.state, {a})\n{v} = {a} * self.state[0]", a=F4),
    *_forms("padding in state", "self.state.add_({a}.mean(0))\n{v} = {a} + self.state", a=F4),
    *_forms("padding in state", "self.cells[: x.shape[0]] = {a}\n{v} = {a}.neg()", a=F4),
    *_forms("input written", "x.add_(1)\n{v} = x.clone()", gives="f4"),
]

RARE = ("padding in rows", "padding in state", "input written", "size to an op")
"""Nearly always refused, and right so."""
HOST_DATA = ("host data", "list as index", "number copied", "number scattered")
"""Lifted out of the graph by a trace; `breakable` has none, and CUDA captures no such copies."""

OFTEN = {"in-place": 3.0, "view": 2.0, "split": 1.5}
"""Weights."""

RETURNING = ("functional split", "aliasing split", "size to an op")
"""Refused by `breakable`, whose breaks return nothing."""

RESULTS = ["{a}.t()", "{a}[:, :1]", "{a}", "x", "self.state + 1", "({a} * {a}).sum(1)"]
STRUCTURES = ["({0},)", "[{0}]", "{{'all': ({0},)}}"]

TORCH_SPLITS = {
    ".tanh()": "aten::tanh",
    ".sin()": "aten::sin",
    "F.linear(": "aten::linear",
    "torch.cat(": "aten::cat",
    ".add_(": "aten::add_",
    "torch.maximum(": "aten::maximum",
}
"""Torch's own operators that may be boundaries too, by the text that calls them."""
SIZES = [[4, 8], [1, 2, 8], [8], [3, 5, 8], [2]]
MODES = ["piecewise", "piecewise", "piecewise", "full", "full_and_piecewise", "none"]


# ---- drawing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One call of a runner."""

    rows: int
    how: str
    """`apart`: inputs of their own; `same`: x is y; `strided`: x is no contiguous tensor."""
    update: bool
    """Whether the weights are updated in place before it."""


@dataclass(frozen=True)
class Drawn:
    """A model with its settings and calls."""

    body: tuple[str, ...]
    result: str
    half: str
    what: frozenset[str]
    """`Form.what` of its statements."""
    strategy: str
    mode: str
    sizes: tuple[int, ...]
    splitting_ops: list[str] | None = field(hash=False)
    extra_splitting_ops: list[str] = field(hash=False)
    outputs: str
    poison: bool
    calls: tuple[Call, ...]

    def __str__(self) -> str:
        settings = (
            f"strategy={self.strategy} mode={self.mode} sizes={list(self.sizes)} "
            f"splitting_ops={self.splitting_ops} extra_splitting_ops={self.extra_splitting_ops} "
            f"outputs={self.outputs} poison={self.poison} calls={list(self.calls)}"
        )
        return f"{settings}\n{self.source}"

    @property
    def source(self) -> str:
        """The model's module."""
        lines = "\n".join([*self.body, f"return {self.result}"])
        return PROLOGUE.format(half=self.half) + textwrap.indent(lines, " " * 8) + "\n"


PROLOGUE = """\
import torch
from torch import nn
from torch.nn import functional as F

import pcgsvc

HALF = torch.{half}
SCALE = 0.5
TABLE = torch.arange(4.0)


class Block(nn.Module):
    # At several places, with one state.

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen.add_(0.5)
        out = torch.empty_like(x)
        torch.ops.gr.attend(x @ self.weight, out)
        return out.sin_() + x * self.seen


class Model(nn.Module):
    alpha = 0.75

    def __init__(self, device) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(5)
        self.w0 = nn.Parameter(torch.randn(4, 4, generator=made) * 0.3)
        self.tied = self.w0
        self.bias = nn.Parameter(torch.randn(4, generator=made))
        self.emb = nn.Parameter(torch.randn(8, 4, generator=made) * 0.3)
        self.layer = nn.Linear(4, 4)
        self.layer.weight = self.w0
        self.layer.bias = self.bias
        self.block = Block(self.w0)
        self.register_buffer("state", torch.zeros(4))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("cells", torch.zeros(16, 4))
        self.register_buffer("table", torch.randn(16, 4, generator=made), persistent=False)
        self.to(device)
        self.held = torch.arange(4.0, device=device) - 1
        self.mixes = [0.25, 3]

    def forward(self, x, y, ids):
"""


def model_of(rng: random.Random, statements: int, strategies: Sequence[str]) -> Drawn:
    """Return the model of a generator, of so many statements."""
    strategy = rng.choice(strategies)
    settings: dict[str, Any] = {
        "strategy": strategy,
        "half": rng.choice(["bfloat16", "float64"]),
        "mode": rng.choice(MODES),
        "sizes": tuple(rng.choice(SIZES)),
        "outputs": rng.choice(["clone", "view"]),
        "poison": rng.random() < 0.5,
        "calls": tuple(_call(rng) for _ in range(rng.randint(3, 5))),
    }
    rare = RARE if strategy != "breakable" else (*RARE, *RETURNING, *HOST_DATA)
    values: dict[str, tuple[str, bool]] = {"x": ("f4", False), "y": ("f4", False)}
    body: list[str] = []
    what: set[str] = set()
    for at in range(statements):
        form = _form(rng, values, rare)
        a = rng.choice(_candidates(values, form))
        kind, owned = values[a]
        wanted = kind if form.b == "=" else form.b
        b = rng.choice([n for n, (k, _) in values.items() if re.fullmatch(wanted, k)])
        body += form.text.format(a=a, b=b, v=f"v{at}", w=f"w{at}").split("\n")
        what.add(form.what)
        for name, slot in ((f"v{at}", "{v}"), (f"w{at}", "{w}")):
            if slot in form.text:
                gives = kind if form.gives == "=" else form.gives
                values[name] = (gives, owned if form.aliases else True)
    made = list(values)[2:] or ["x"]
    rowwise = [name for name in made if not values[name][0].startswith("t")] or ["x"]
    results = rng.sample(made, min(len(made), rng.randint(1, 5)))
    results += [form.format(a=rng.choice(rowwise)) for form in rng.sample(RESULTS, 2)]
    rng.shuffle(results)
    text = "\n".join(body)
    ops = re.findall(r"ops\.gr\.(\w+)", text.replace("self.block(", "ops.gr.attend("))
    own = [f"gr::{name}" for name in dict.fromkeys(ops)]
    others = [name for part, name in TORCH_SPLITS.items() if part in text]
    extra = rng.random() < 0.3 and strategy == "fx"
    return Drawn(
        body=tuple(body),
        result=rng.choice(STRUCTURES).format(", ".join(results)),
        what=frozenset(what),
        splitting_ops=rng.choice([None, own]) if own else None,
        extra_splitting_ops=others if extra else [],
        **settings,
    )


def _call(rng: random.Random) -> Call:
    how = rng.choice(["apart", "apart", "same", "strided"])
    return Call(rows=rng.randint(1, MOST_ROWS), how=how, update=rng.random() < 0.5)


def _form(rng: random.Random, values: Mapping[str, tuple[str, bool]], rare: Sequence[str]) -> Form:
    """Return a statement for which there are values; all of `Form.what` alike, but for `rare`."""
    known: dict[str, list[Form]] = {}
    for form in FORMS:
        if _candidates(values, form):
            known.setdefault(form.what, []).append(form)
    weights = [0.1 if what in rare else OFTEN.get(what, 1.0) for what in known]
    return rng.choice(known[rng.choices(list(known), weights)[0]])


def _candidates(values: Mapping[str, tuple[str, bool]], form: Form) -> list[str]:
    return [
        name
        for name, (kind, owned) in values.items()
        if re.fullmatch(form.a, kind) and (owned or not form.writes)
    ]


# ---- the comparison ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What became of a model: `equal`, `refused`, or `wrong`."""

    kind: str
    why: str = ""
    """The error, or what differs; nothing for `equal`."""

    @property
    def reason(self) -> str:
        """The kind of a refusal, for counts."""
        return next((words for words in REASONS if words in self.why), self.why)


_SPLITS = {"split", "functional split", "aliasing split", "size to an op", "submodule"}

REASONS = {
    "writes to its input": {"input written"},
    "replay differs from plain execution": {
        "padding in rows",
        "padding in state",
        "size to an op",
        "branch on the size",
    },
    "fresh host data": set(HOST_DATA),
    "Cannot copy between CPU and CUDA": set(HOST_DATA),
    "a break returned a tensor": set(RETURNING),
    "Python outside breaks runs once": {"aliasing split"},
    ", at capture it gave ": {"aliasing split"},
    "or a view of it, which the schema does not say": {"aliasing split"},
    "so the compiler left them out": _SPLITS,
    "inductor cannot compile it": {"bits"},
    "The compiler changed the order": _SPLITS,
    " share memory (": {"aliasing split", "in-place", "view", "transposed"},
    "non-contiguous `out=` tensor": {"out="},
}
"""Refusals by a part of their message, with the statements of which one must be in the model.

`out=` is a kind of in-place statement; Dynamo takes none whose tensor is a view with gaps.

That the compiler gets a region wrong is not among them: it is a fault, if not of ours.
"""


def is_explained(drawn: Drawn, outcome: Outcome) -> bool:
    """Whether a model holds what it is refused for."""
    reasons = REASONS.get(outcome.reason, set())
    written = {"out="} if any("out=" in line for line in drawn.body) else set()
    if drawn.strategy != "breakable":  # the trace knows the branch, and lifts the numbers
        reasons = reasons - {"branch on the size", *HOST_DATA}
    return bool(reasons & (drawn.what | written))


def is_right(drawn: Drawn, outcome: Outcome) -> bool:
    return outcome.kind == "equal" or (outcome.kind == "refused" and is_explained(drawn, outcome))


Tried = list[tuple[Drawn, Outcome]]


def reasons_of(tried: Tried) -> Counter[str]:
    """Return how many models were refused, by reason."""
    return Counter(outcome.reason for _, outcome in tried if outcome.kind == "refused")


def record(name: str, command: str, number: int, tried: Tried, begun: float) -> None:
    """Put a seed's row into docs/results/NAME.json, in the place of an earlier one."""
    found = reasons_of(tried)
    row = {
        "seed": number,
        "models": len(tried),
        "equal": len(tried) - found.total(),
        "refused": dict(found.most_common()),
        "seconds": round(time.perf_counter() - begun, 1),
    }
    path = Path(__file__).parents[1] / "docs" / "results" / f"{name}.json"
    folder = os.open(path.parent, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)  # workers share the record
    kept = json.loads(path.read_text())["seeds"] if path.exists() else []
    rows = sorted([row, *(r for r in kept if r["seed"] != number)], key=lambda r: r["seed"])
    whole = {
        "command": command,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "models": sum(r["models"] for r in rows),
        "equal": sum(r["equal"] for r in rows),
        "refused": sum(sum(r["refused"].values()) for r in rows),
        "mismatches": 0,
        "seeds": rows,
    }
    path.write_text(json.dumps(whole, indent=1) + "\n")
    os.close(folder)


def try_model(
    drawn: Drawn,
    folder: Path,
    compiler: str = "eager",
    passes: list[str] | None = None,
    device: str = "cpu",
) -> Outcome:
    """Build a drawn model, call it as drawn, and compare results, inputs and state.

    Args:
        drawn: the model.
        folder: for its source.
        compiler: `eager` or `inductor`.
        passes: `compiler.passes`.
        device: of model and calls.
    """
    with _module(drawn, folder) as module, _under(drawn.strategy), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*(Torchinductor does not|Online softmax is)")
        module.TABLE = module.TABLE.to(device)
        model = module.Model(device).eval().requires_grad_(False)
        alone = copy.deepcopy(model)
        config = _config(drawn, compiler)
        config.compiler.passes = passes
        config.device = device
        try:
            runner = pcgsvc.build_runner(
                model, _inputs(3, 0, device), dynamic_dims={"x": 0, "y": 0, "ids": 0}, config=config
            )
        except pcgsvc.PcgError as error:
            return Outcome("refused", f"{type(error).__name__}: {error}")
        with runner:
            if wrong := _differing(_state(model), _state(alone), "state after the build"):
                return Outcome("wrong", wrong)
            return _compare_calls(drawn, runner, model, alone)


def _compare_calls(
    drawn: Drawn, runner: pcgsvc.Runner, model: nn.Module, alone: nn.Module
) -> Outcome:
    kept: list[tuple[Any, Any]] = []
    device = str(next(model.parameters()).device)
    loose = drawn.half == "bfloat16" and "dtypes" in drawn.what
    for at, call in enumerate(drawn.calls):
        if call.update:
            for each in (model, alone):
                for parameter in each.parameters():
                    parameter.add_(0.0625)
        where = f"call {at} of {call.rows} rows"
        inputs, same = (_called_with(call, at, device) for _ in range(2))
        wanted, boundaries = _run(lambda same=same: _plainly(alone, same))
        before = copy.deepcopy(wanted)
        try:
            got, calls = _run(lambda inputs=inputs: runner(**inputs))
        except pcgsvc.PcgError as error:
            return Outcome("refused", f"{type(error).__name__}: {error}")
        wrong = (
            _differing(got, before, f"{where}: result", loose=loose)
            or _differing(inputs, same, f"{where}: input")
            or _differing(_state(model), _state(alone), f"{where}: state", loose=loose)
        )
        if wrong:
            return Outcome("wrong", f"{wrong}; {_blame(calls, boundaries, runner)}")
        if drawn.outputs == "clone":
            kept.append((got, before))
    for at, (got, before) in enumerate(kept):
        if wrong := _differing(got, before, f"result of call {at} at the end", loose=loose):
            return Outcome("wrong", wrong)
    return Outcome("equal")


def _run(call: Callable[[], Any]) -> tuple[Any, list[Any]]:
    """Return what a call gives, and its calls of splitting ops."""
    Planted.calls = calls = []
    try:
        return call(), calls
    finally:
        Planted.calls = None


def _plainly(model: nn.Module, inputs: dict[str, torch.Tensor]) -> Any:
    context = make_context(None, [len(inputs["x"])], device=inputs["x"].device)
    with torch.no_grad(), use_context(context), _under(None):
        return model(**inputs)


@contextmanager
def _under(strategy: str | None) -> Iterator[None]:
    """Run a block as a strategy's, or as plain execution."""
    before, Planted.strategy = Planted.strategy, strategy
    try:
        yield
    finally:
        Planted.strategy = before


def _blame(calls: Sequence[Any], wanted: Sequence[Any], runner: pcgsvc.Runner) -> str:
    """Say which piece is wrong: the first whose inputs are right and whose results are not.

    Where every recorded call of a splitting op is right, it is a piece behind the last of them.
    """
    steps = [s.name for s in runner.model.program.spec.steps]
    ops = list(runner.model.program.spec.steps)
    for at, (one, other) in enumerate(zip(calls, wanted, strict=False)):
        if _differing(one[1], other[1], "", loose=True):
            return f"the piece before call {at} of a splitting op, {one[0]}, is wrong ({steps})"
        if _differing(one[2], other[2], "", loose=True):
            return f"{_piece_of(ops, at)}: {one[0]}, call {at} of a splitting op, is wrong"
    return f"a piece behind the last splitting op is wrong ({steps})"


def _piece_of(steps: Sequence[Any], at: int) -> str:
    """Return the name of the piece that makes the at-th recorded call."""
    recorded = ("gr::attend", "gr::fresh", "gr::two", "gr::mixed")
    names = [s.name for s in steps for call in s.calls if call.splitting in recorded]
    return names[at] if at < len(names) else "the module"


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _differing(got: Any, wanted: Any, what: str, *, loose: bool = False) -> str:
    """Return what is wrong with a value, or nothing; `loose`: it may come of half precision."""
    (flat, tree), (right, right_tree) = pytree.tree_flatten(got), pytree.tree_flatten(wanted)
    if tree != right_tree:
        return f"{what}: the structure is {tree}, not {right_tree}"
    for at, (one, other) in enumerate(zip(flat, right, strict=True)):
        if one.shape != other.shape or one.dtype != other.dtype:
            kinds = [f"{t.dtype} {tuple(t.shape)}" for t in (one, other)]
            return f"{what} {at}: {kinds[0]}, not {kinds[1]}"
        if other.is_complex():
            one, other = (torch.view_as_real(t.resolve_conj()) for t in (one, other))
        tolerance = (0.05 if loose else 1e-4) if other.is_floating_point() else 0.0
        a, b = one.double(), other.double()
        scale = max(1.0, float(b.nan_to_num().abs().max())) if b.numel() else 1.0
        if not torch.allclose(a, b, rtol=0.0, atol=tolerance * scale, equal_nan=True):
            return f"{what} {at}: off by {float((a - b).abs().max()):.3g} of {scale:.3g}"
    return ""


def _config(drawn: Drawn, compiler: str) -> Config:
    config = make_config(
        drawn.mode,
        drawn.sizes,
        compiler=compiler,
        splitting_ops=drawn.splitting_ops,
        outputs=drawn.outputs,
        poison=drawn.poison,
    )
    config.partition.strategy = Strategy(drawn.strategy)
    config.partition.extra_splitting_ops = drawn.extra_splitting_ops
    return config


def _inputs(rows: int, seed: int, device: str) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, WIDTH, generator=made).to(device) for _ in range(2))
    return {"x": x, "y": y, "ids": torch.randint(0, IDS, (rows,), generator=made).to(device)}


def _called_with(call: Call, seed: int, device: str) -> dict[str, torch.Tensor]:
    inputs = _inputs(call.rows, seed + 1, device)
    if call.how == "same":
        inputs["y"] = inputs["x"]
    elif call.how == "strided":
        inputs["x"] = torch.stack([inputs["x"], inputs["y"]], -1)[..., 0]
    return inputs


@contextmanager
def _module(drawn: Drawn, folder: Path) -> Iterator[ModuleType]:
    """Import the model's source from a file of its own, for as long as it is tried."""
    name = f"drawn_{hashlib.sha256(drawn.source.encode()).hexdigest()[:12]}"
    path = folder / f"{name}.py"
    path.write_text(drawn.source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[name]
