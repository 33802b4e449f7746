"""Pieces: what every partition strategy turns a traced graph into.

In: nothing. Out: the types `Piece` and `Partition`.
"""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass, field
from typing import Any

import torch

from pcgsvc.trace.rows import Document

logger = logging.getLogger(__name__)


class Kind(enum.Enum):
    """What becomes of a piece."""

    REGION = "region"
    """Captured: one graph per capture size."""
    BOUNDARY = "boundary"
    """Splitting ops: run eagerly between graphs at every replay."""
    INLINE = "inline"
    """Allocations and views only: run once at capture, no step of a replay."""


@dataclass(kw_only=True)
class Piece:
    """A stretch of the traced graph. Values cross its border as tensors and ints only."""

    index: int
    kind: Kind
    reason: str
    """Why the graph is cut here."""
    nodes: list[torch.fx.Node]
    """In original order, autocast enter and exit nodes that hold here added."""
    inputs: list[torch.fx.Node] = field(default_factory=list)
    """In the order of first use."""
    outputs: list[torch.fx.Node] = field(default_factory=list)
    """What later pieces or the result read."""
    document: Document | None = None
    """Regions only: the canonical form; equal documents are one unique piece."""
    hash: str | None = None
    """sha256 of the document."""
    splitting: dict[torch.fx.Node, str] = field(default_factory=dict)
    """Boundaries only: the name under which each splitting node was matched."""

    @property
    def name(self) -> str:
        """`piece_03`, by which files, ranges and tables call it."""
        return f"piece_{self.index:02d}"


@dataclass(kw_only=True)
class Partition:
    """A traced graph cut into pieces, in order."""

    pieces: list[Piece]
    matched: dict[str, int]
    """How many nodes each splitting op matched, by its name."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why it is a boundary, where that is more than being registered."""
    warnings: list[str] = field(default_factory=list)

    def count(self, kind: Kind) -> int:
        """Return how many pieces are of a kind."""
        return sum(p.kind is kind for p in self.pieces)

    def unique(self) -> dict[str, Piece]:
        """Return the first region of each hash."""
        found: dict[str, Piece] = {}
        for piece in self.pieces:
            if piece.kind is Kind.REGION and piece.hash is not None:
                found.setdefault(piece.hash, piece)
        return found


@dataclass(kw_only=True)
class PieceCounts:
    """How the compiled pieces of a program came about."""

    compiled: int = 0
    loaded: int = 0
    unsaved: list[str] = field(default_factory=list)
    """What was compiled and cannot be written down, with the reason."""
    problems: list[str] = field(default_factory=list)
    """What custom passes were to do and did not, as warnings."""

    def not_saved(self, what: str, why: str) -> None:
        """Count and log something that cannot be written down."""
        self.unsaved.append(f"{what} cannot be written down: {why}")
        logger.warning("cache: %s cannot be written down: %s", what, why)


def graph_module(piece: Piece) -> torch.fx.GraphModule:
    """Return a region as a graph of its own, with the metas that Inductor needs."""
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, Any] = {}
    for node in piece.inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta["example_value"] = node.meta["example_value"]
    for node in piece.nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[n] for n in piece.outputs))
    graph.lint()
    return torch.fx.GraphModule(torch.nn.Module(), graph)
