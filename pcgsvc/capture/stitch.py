"""Stitched replay: captured segments and the boundaries between them, joined into one graph.

In: the steps of a captured piecewise entry, and what is known of its boundaries. Out: fewer steps
that do the same: each joins a run of segments and boundaries, whose kernels get this step's
parameters before one launch. Knows nothing of CUDA: a `Composer` joins, patches and launches.

A step whose launches do not fit runs as its pieces.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from pcgsvc.capture.sources import (
    Boundary,
    Comparison,
    Composed,
    Composer,
    Copying,
    Member,
    Source,
    Step,
    UnstitchableError,
)
from pcgsvc.cuda_driver import DriverError, Launch
from pcgsvc.events import log_event
from pcgsvc.ops.context import current_context

logger = logging.getLogger(__name__)


class Stitched:
    """A step that replays some segments and boundaries of an entry by one launch.

    Args:
        parts: segments, given as what replays them alone, and boundaries.
        sources: of the boundaries' launches.
        composer: joins them.
        fallbacks: is counted up, by reason, where a step runs as its pieces.
    """

    def __init__(
        self,
        parts: Sequence[Step | Boundary],
        sources: Sequence[Source],
        composer: Composer,
        fallbacks: Counter[str],
    ) -> None:
        self.parts, self.composer, self._fallbacks = parts, composer, fallbacks
        self.sources = sources
        self._asked = [source for source in sources if not source.is_fixed]
        self._captures = any(source.is_captured for source in sources)
        self._broken = False
        """Whether an op could not be captured at a later step: its pieces replay from then on."""
        self._composed: Composed | None = None
        """None while nodes may be of two compositions: the next step joins them anew."""
        self._before: Copying | None = None
        self._behind: Copying | None = None
        self._compose()

    def __call__(self) -> None:
        """Run the parts alone, without copies."""
        for copying in (self._before, self._behind):
            if copying is not None:
                copying.clear()
        self.run()

    def enclose(self, before: Copying | None, behind: Copying | None) -> None:
        """Have `run` make copies as well, before its parts and behind them."""
        self._before, self._behind = before or self._before, behind or self._behind
        self._compose()

    def run(self) -> None:
        """Patch, and launch; or run as pieces, no op's Python twice but one whose capture fails."""
        if self._broken:
            return self._in_pieces({})
        context, launches = current_context(), []
        ran: dict[int, Step] = {}
        """Of the boundaries whose Python has run in this step: what executes their kernels."""
        source = None
        try:
            with self.composer.aside() if self._captures else nullcontext():
                for source in self._asked:
                    found = source.ask(context)
                    launches.append(found)
                    if source.is_captured:
                        ran[id(source.first)] = partial(self.composer.launch, found)
            pairs = zip(self._asked, launches, strict=True)
            more = [asked for asked, found in pairs if len(found) > len(asked.slots)]
            if more or self._composed is None:
                source = (more or self.sources)[0]
                self._grow(launches)
            patched = False
            for source, found in zip(self._asked, launches, strict=True):
                patched |= source.patch(found)
        except (UnstitchableError, DriverError) as error:
            assert source is not None
            if isinstance(error, UnstitchableError) and error.run is not None:
                ran[id(source.first)] = error.run
            self._broken = source.is_captured and id(source.first) not in ran
            self._note(f"{source.first.name}: {error}")
            return self._in_pieces(ran)
        assert self._composed is not None, "the parts are joined"
        self._composed.replay(patched=patched)
        return None

    def forget(self) -> None:
        """Have the next step set every node anew."""
        for source in self._asked:
            source.forget()

    def _compose(self) -> None:
        """Join the parts, with as many nodes per boundary as its source has slots."""
        owners = {at: source for source in self.sources for at in source.members}
        before, behind = self._before, self._behind
        parts: list[Step | Launch] = [] if before is None else [before.launch]
        runs: list[tuple[Member, int, int]] = []
        count = len(parts)
        for part in self.parts:
            if isinstance(part, Boundary):
                source = owners[id(part)]
                member = source.members[id(part)]
                parts += [member.launch(launch) for launch in source.slots]
                runs.append((member, count, count + len(source.slots)))
                count += len(source.slots)
            else:
                parts.append(part)
        parts += [] if behind is None else [behind.launch]
        composed = self.composer.compose(parts)
        ends = Copying.ends(composed, before, behind)
        self._composed = None
        for copying, node in ends:
            copying.bind(composed, node)
        for member, begin, end in runs:
            member.nodes = composed.nodes[begin:end]
        for source in self.sources:
            source.composed()
        self._composed = composed

    def _grow(self, launches: Sequence[list[Launch]]) -> None:
        """Compose anew, with as many nodes as each boundary launches kernels now, or ever has."""
        before = [source.slots for source in self._asked]
        for source, found in zip(self._asked, launches, strict=True):
            if len(found) > len(source.slots):
                source.slots = list(found)
        try:
            self._compose()
        except BaseException:
            for source, slots in zip(self._asked, before, strict=True):
                source.slots = slots
            raise

    def _in_pieces(self, ran: dict[int, Step]) -> None:
        if self._before is not None and self._before.is_on:
            self.composer.launch([self._before.launch])
        for part in self.parts:
            if isinstance(part, Boundary):
                ran.get(id(part), part.step)()
            else:
                part()
        if self._behind is not None and self._behind.is_on:
            self.composer.launch([self._behind.launch])

    def _note(self, reason: str) -> None:
        self._fallbacks[reason] += 1
        if self._fallbacks[reason] == 1:
            then = "from now on it always does" if self._broken else "others are only counted"
            words = "a stitched step runs as its pieces, since %s (%s)"
            fields = {"reason": reason}
            log_event(logger, logging.WARNING, "in_pieces", words, reason, then, **fields)


@dataclass(kw_only=True)
class Joined:
    """How the pieces of an entry are replayed."""

    steps: list[Step] = field(default_factory=list)
    """What replays them all; empty: they are replayed one by one."""
    stitched: list[Stitched] = field(default_factory=list)
    """Those of the steps that stand for several pieces."""
    outside: dict[str, str] = field(default_factory=dict)
    """Splitting ops that stay steps between graphs, with the reason."""
    why: str | None = None
    """Why they are replayed one by one."""
    comparison: Comparison | None = None
    """By which `capture.replay=auto` chose."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Stitched steps that ran as their pieces, by reason."""

    def refuse(self, why: str) -> None:
        """Have the pieces replayed one by one."""
        self.steps, self.stitched, self.why = [], [], why

    @property
    def missing(self) -> str | None:
        """What of a stitched replay is missing, in words."""
        stay = "; ".join(f"{op} stays outside: {why}" for op, why in self.outside.items())
        return self.why or stay or None


def join(
    pieces: Sequence[Step], parts: Sequence[Step | Boundary], composer: Composer, *, auto: bool
) -> Joined:
    """Join the pieces of an entry; called under the context of its capture run, after it.

    Args:
        pieces: what replays them one by one.
        parts: the same, with what is known of splitting ops.
        composer: joins them.
        auto: whether they shall be joined only where every op has a plan, so that nobody's Python
            runs in another way than it is used to, and where it is as fast.
    """
    joined = Joined()
    if auto and not composer.is_timed:
        joined.refuse("recorded graphs gain nothing by it")
        return joined
    try:
        _stitch(joined, parts, composer, planned=auto)
    except DriverError as error:
        joined.refuse(f"the device refuses to join them: {error}")
    stay = joined.missing
    if not joined.stitched or (auto and stay is not None):
        joined.refuse(stay or "nothing lies between graphs")
    elif auto:
        anew = partial(_forget, joined.stitched)
        joined.comparison = composer.compare(pieces, joined.steps, anew)
        if not joined.comparison.favours_stitched:
            joined.refuse("timed, and not as fast")
    return joined


def _forget(stitched: Sequence[Stitched]) -> None:
    for one in stitched:
        one.forget()


def _stitch(
    joined: Joined, parts: Sequence[Step | Boundary], composer: Composer, *, planned: bool
) -> None:
    """Join runs of parts, which boundaries that must stay outside divide."""
    run = _Run()
    for part in [*parts, None]:
        try:
            if part is not None:
                run.add(part, composer, planned=planned)
                continue
        except UnstitchableError as error:
            assert isinstance(part, Boundary)
            joined.outside.setdefault(part.name, str(error))
            if error.run is not None:
                error.run()  # as in `Source`
        if run.sources:
            one = Stitched(run.parts, run.sources, composer, joined.fallbacks)
            joined.steps.append(one)
            joined.stitched.append(one)
        else:
            joined.steps += [piece for piece in run.parts if not isinstance(piece, Boundary)]
        if part is not None:
            joined.steps.append(part.step)
        run = _Run()


class _Run:
    """Parts that are replayed by one launch."""

    def __init__(self) -> None:
        self.parts: list[Step | Boundary] = []
        self._sources: dict[str, list[Source]] = {}

    @property
    def sources(self) -> list[Source]:
        """Of its boundaries' launches."""
        return [source for alike in self._sources.values() for source in alike]

    def add(self, part: Step | Boundary, composer: Composer, *, planned: bool) -> None:
        """Add a part; UnstitchableError for a boundary that must stay outside."""
        if isinstance(part, Boundary):
            alike = self._sources.setdefault(part.kind(), [])
            if not any(source.adopt(part) for source in alike):
                alike.append(Source(part, composer, planned=planned))
        self.parts.append(part)
