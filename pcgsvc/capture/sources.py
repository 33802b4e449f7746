"""What the boundaries between captured segments launch, step by step.

In: splitting ops over the buffers of a captured entry. Out: the kernels that each would launch now,
and nodes of a composed graph that are set to them. Knows nothing of CUDA: a `Composer` has the
device's part.

The launches come from the plan that an op describes or, without one, from its Python, which runs
while a stream is captured and so executes nothing. Only what changed since the last step is set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from pcgsvc.cuda_driver import Launch
from pcgsvc.ops.context import ForwardContext, current_context
from pcgsvc.ops.registry import PlanLaunches
from pcgsvc.program.program import tensors_in

Step = Callable[[], Any]


class UnstitchableError(Exception):
    """The launches of a boundary cannot be part of a graph; the message says why.

    Args:
        why: in words that follow the op's name.
        run: executes what the op would launch now, whose Python has run; None: it must run again.
    """

    def __init__(self, why: str, run: Step | None = None) -> None:
        super().__init__(why)
        self.run = run


class Node(Protocol):
    """A kernel in a composed graph; what is said holds from the next launch of the graph on."""

    def set(self, launch: Launch) -> None:
        """Make this launch."""

    def pack(self, args: Sequence[tuple[int, Any]]) -> Any:
        """Return arguments at some positions as `change` takes them, of nodes of one kernel."""

    def pack_words(self, words: Sequence[int]) -> Any:
        """Return the first arguments likewise, which are addresses and sizes."""

    def change(self, grid: tuple[int, int, int] | None, packed: Any) -> None:
        """Use another grid (None: the same), and other arguments at some positions."""

    def enable(self, enabled: bool) -> None:
        """Launch the kernel, or leave it out."""


class Composed(Protocol):
    """An executable that replays segments and kernels, one after the other."""

    @property
    def nodes(self) -> Sequence[Node]:
        """The kernels, in their order."""

    def replay(self, *, patched: bool) -> None:
        """Execute it once; `patched`: nodes were told something since the last time."""


class Composer(Protocol):
    """Joins segments and kernels, and launches what it joined on the current stream."""

    is_timed: bool
    """Whether the time that a replay takes says anything."""

    def address(self, tensor: torch.Tensor) -> Any:
        """Return what an argument of a launch is for a tensor that may be another next time."""

    def copy_launch(self, size: int) -> Launch | None:
        """Return a launch that copies up to so many bytes; None: as a part it gains nothing.

        Its first arguments are target, source and bytes of each piece of memory.
        """

    def compose(self, parts: Sequence[Step | Launch]) -> Composed:
        """Join segments, given as what replays them alone, and kernels.

        Raises:
            DriverError: the device refuses a part; as nodes do when they are patched.
        """

    def aside(self) -> AbstractContextManager[None]:
        """Return a block in which calls are captured."""

    def capture(self, run: Step) -> Sequence[Launch]:
        """Return what a call would launch, inside `aside`; its Python runs, its kernels do not.

        Raises:
            UnstitchableError: it cannot be captured, or does more than launch kernels.
        """

    def launch(self, launches: Sequence[Launch]) -> None:
        """Launch kernels one by one."""

    def compare(self, pieces: Sequence[Step], stitched: Sequence[Step], anew: Step) -> Comparison:
        """Time two ways to replay an entry; `anew` has the next stitched step set every node."""


class Copying:
    """A part of a composed graph that copies pieces of memory; see `Composer.copy_launch`."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._bound: tuple[Composed, Node] | None = None
        """Its node, and what it lies in, which must not be freed while the node may be set."""
        self._words: tuple[int, ...] | None = launch.args
        """What it copies; None: not known."""
        self.is_on: bool | None = False
        """Whether the next replay makes the copies; None: not known."""

    @property
    def launch(self) -> Launch:
        """What it launches now, for the composition that it is to be a part of."""
        words = self._words or ()
        return self._launch._replace(args=(*words, *self._launch.args[len(words) :]))

    def set(self, words: tuple[int, ...]) -> None:
        """Have the replays from now on copy pieces of memory: target, source and bytes of each.

        They are as many at each call; those of no bytes are left out.

        Raises:
            DriverError: the driver refuses; it is set anew next time.
        """
        assert self._bound is not None, "it is a part of nothing"
        node = self._bound[1]
        if words != self._words:
            self._words = None
            node.change(None, node.pack_words(words))
            self._words = words
        if not self.is_on:
            self.is_on = None
            node.enable(True)
            self.is_on = True

    @staticmethod
    def ends(
        composed: Composed, before: Copying | None, behind: Copying | None
    ) -> list[tuple[Copying, Node]]:
        """Return copies at the ends of a new composition with their nodes there, for `bind`."""
        found = [] if before is None else [(before, composed.nodes[0])]
        found += [] if behind is None else [(behind, composed.nodes[-1])]
        for copying, node in found:
            node.enable(bool(copying.is_on))
        return found

    def bind(self, composed: Composed, node: Node) -> None:
        """Take its node in a new composition, which launches what `launch` gave."""
        self._bound = composed, node

    def clear(self) -> None:
        """Have the replays from now on copy nothing."""
        if self.is_on is not False and self._bound is not None:
            self.is_on = None
            self._bound[1].enable(False)
            self.is_on = False


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a step takes, in microseconds; in pieces, and stitched with every node set anew."""

    pieces_us: float
    """Per step of a run back to back."""
    stitched_us: float
    pieces_host_us: float
    """Until everything is enqueued."""
    stitched_host_us: float

    @property
    def favours_stitched(self) -> bool:
        """Whether stitched is as fast in both, within what a few steps can tell."""
        return (
            self.stitched_us <= 1.05 * self.pieces_us
            and self.stitched_host_us <= 1.1 * self.pieces_host_us
        )


@dataclass(kw_only=True)
class Boundary:
    """A splitting op between segments, over the buffers of a captured entry."""

    name: str
    step: Step
    """Runs it eagerly."""
    run: Step
    """The same by the op's own Python, which is captured where there is no plan."""
    args: list[Any]
    kwargs: dict[str, Any]
    plan: PlanLaunches | None
    """See `OpSpec.plan_launches`."""
    why_not: str | None
    """Why it must stay a step between graphs, in words that follow its name."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Its tensor arguments."""
        return tensors_in([self.args, self.kwargs])

    def planned(self, context: ForwardContext) -> list[Any] | None:
        """Return its launches in this step; None: nothing but its Python can tell."""
        found = self.plan(context, *self.args, **self.kwargs) if self.plan is not None else None
        return None if found is None or None in found else list(found)

    def kind(self) -> str:
        """Return, as text, what a plan may depend on besides the context."""
        ids = [id(v) for v in self.tensors]
        about = [
            (v.shape, v.stride(), v.dtype, v.data_ptr() % 16, ids.index(id(v)))
            if isinstance(v, torch.Tensor)
            else v
            for v in pytree.tree_leaves([self.args, self.kwargs])
        ]
        return f"{self.name} {about}"


class Member:
    """One of the boundaries that share a source: its nodes, and its tensors for the first's."""

    def __init__(self, boundary: Boundary, first: Boundary) -> None:
        self.nodes: Sequence[Node] = ()
        pairs = zip(first.tensors, boundary.tensors, strict=True)
        self._own = {id(theirs): mine for theirs, mine in pairs} if boundary is not first else {}

    def args(self, args: Sequence[tuple[int, Any]]) -> Sequence[tuple[int, Any]]:
        """Return arguments of the first boundary's launch, by position, as this one has them."""
        own = self._own
        return [(at, own.get(id(v), v)) for at, v in args] if own else args

    def launch(self, launch: Launch) -> Launch:
        """Return a launch of the first boundary as this one makes it."""
        own = self._own
        return launch._replace(args=tuple(own.get(id(v), v) for v in launch.args))


class Source:
    """Where the launches of some boundaries come from, and what their nodes are set to.

    It is one plan, made once a step for boundaries whose arguments are alike but for addresses, or
    the capture of one op.

    Args:
        first: the boundary that is asked.
        composer: captures its Python, where it has no plan.
        planned: whether it must have one.

    Raises:
        UnstitchableError: it cannot be part of a graph.
    """

    def __init__(self, first: Boundary, composer: Composer, *, planned: bool) -> None:
        if first.why_not is not None:
            raise UnstitchableError(first.why_not)
        self.first, self._composer = first, composer
        self._lasting = set(map(id, first.tensors))
        self.members = {id(first): Member(first, first)}
        context = current_context()
        self.is_captured = first.planned(context) is None
        """Whether the op's Python runs at each step, for want of a plan."""
        if self.is_captured and planned:
            raise UnstitchableError("it has no launch plan")
        with composer.aside() if self.is_captured else nullcontext():
            self.slots = self.ask(context)
        """What each member's nodes launched last; some of the last ones may be left out now."""
        if self.is_captured:
            composer.launch(self.slots)  # what the op set up for the new stream must have happened
        self.is_fixed = bool(self.slots) and all(launch.fixed for launch in self.slots)
        self._now: list[Launch] | None = None
        """What the nodes are set to; None: not known."""

    def adopt(self, boundary: Boundary) -> bool:
        """Have a boundary share the plan, if it makes the same launches on tensors of its own."""
        if self.is_captured:
            return False
        member = Member(boundary, self.first)
        mine = boundary.planned(current_context())
        theirs = [member.launch(launch) for launch in self.slots]
        lasting = {*self._lasting, *map(id, boundary.tensors)}
        if mine is None or not _same(theirs, self._plain(mine, lasting)):
            return False
        self.members[id(boundary)] = member
        return True

    def ask(self, context: ForwardContext) -> list[Launch]:
        """Return this step's launches.

        Raises:
            UnstitchableError: they cannot be told, or be part of a graph.
        """
        if self.is_captured:
            return self._plain(self._composer.capture(self.first.run), self._lasting)
        found = self.first.planned(context)
        if found is None:
            raise UnstitchableError("its plan cannot tell its launches")
        return self._plain(found, self._lasting)

    def _plain(self, launches: Sequence[Launch], lasting: set[int]) -> list[Launch]:
        """Return launches without those that launch nothing.

        Tensors other than the op's arguments, which last, become what they are at this step.
        """
        address = self._composer.address
        return [
            launch._replace(
                args=tuple(
                    address(v) if isinstance(v, torch.Tensor) and id(v) not in lasting else v
                    for v in launch.args
                )
            )
            for launch in launches
            if 0 not in launch.grid
        ]

    def composed(self) -> None:
        """Note that there are new nodes, which launch what is in `slots`."""
        self._now = list(self.slots)

    def forget(self) -> None:
        """Have the next patch set every node anew."""
        self._now = None

    def patch(self, launches: list[Launch]) -> bool:
        """Set what differs from the last step; return whether anything did.

        Raises:
            DriverError: the device refuses; the nodes are set anew next time.
        """
        before, self._now = self._now, None
        if before is not None and _same(before, launches):
            self._now = before
            return False
        spare = self.slots[len(launches) :] if before is None else []
        for at, launch in enumerate([*launches, *spare]):
            self._set(at, launch, None if before is None else self.slots[at])
            self.slots[at] = launch
        for at in range(len(self.slots)):
            if before is None or (at < len(launches)) != (at < len(before)):
                for member in self.members.values():
                    member.nodes[at].enable(at < len(launches))
        self._now = launches
        return True

    def _set(self, at: int, launch: Launch, before: Launch | None) -> None:
        members = self.members.values()
        if before is None or not _alike(before, launch):
            for member in members:
                member.nodes[at].set(member.launch(launch))
            return
        pairs = enumerate(zip(before.args, launch.args, strict=True))
        args = [(n, new) for n, (old, new) in pairs if not _equal(old, new)]
        grid = None if before.grid == launch.grid else launch.grid
        if args or grid is not None:
            has_own, packed = any(isinstance(value, torch.Tensor) for _, value in args), None
            for member in members:
                node = member.nodes[at]
                if packed is None or has_own:
                    packed = node.pack(member.args(args))
                node.change(grid, packed)


def _alike(a: Launch, b: Launch) -> bool:
    """Whether two launches differ in grid and arguments alone."""
    same = a.function == b.function and a.block == b.block and a.shared == b.shared
    return same and len(a.args) == len(b.args) and _is_open(a) == _is_open(b)


def _is_open(launch: Launch) -> bool:
    """Whether its last parameters are zero without being named."""
    return bool(launch.args) and launch.args[-1] is ...


def _equal(a: Any, b: Any) -> bool:
    """Whether two arguments are the same bytes for a kernel (nan is, 0.0 and -0.0 are not)."""
    if a is b or type(a) is not type(b) or isinstance(a, torch.Tensor):
        return a is b
    return repr(a) == repr(b) if isinstance(a, float) else bool(a == b)


def _same(a: Sequence[Launch], b: Sequence[Launch]) -> bool:
    return len(a) == len(b) and all(
        x is y or (x.grid == y.grid and _alike(x, y) and all(map(_equal, x.args, y.args)))
        for x, y in zip(a, b, strict=True)
    )
