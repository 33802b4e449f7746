"""Collectives as boundaries and in regions: traced, stored, replayed, and processes in step."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import trace_of
from ranks_helpers import launch, outcomes
from torch import distributed
from torch.distributed import _functional_collectives as functional

from pcgsvc import torch_private
from pcgsvc.errors import ConfigError, PcgError, TraceError
from pcgsvc.ops import collectives
from pcgsvc.ops.collectives import check_backend, group_of, group_word, ranks_of

WORKER = str(Path(__file__).with_name("collectives_worker.py"))
X = torch.randn(3, 8)


def calls(forward: Any, x: torch.Tensor = X) -> list[str]:
    """Return the ops of a traced function, in order."""
    graph = trace_of(forward, {"x": x}).graph
    return [getattr(n.target, "__name__", str(n.target)) for n in graph.nodes if n.op == "call_function"]


def reduced(x: torch.Tensor) -> Any:
    return functional.all_reduce(x, "sum", distributed.group.WORLD)


# ---- tracing -------------------------------------------------------------------------------------


def test_a_collective_and_its_wait_are_one_op_in_place_where_nothing_reads_the_operand(
    group: None,
) -> None:
    over = calls(lambda x: reduced(x.relu()) + 1)
    assert over == ["pcgsvc.all_reduce", "add"]
    read_later = calls(lambda x: reduced(h := x * 2) + h)
    assert read_later == ["mul", "clone", "pcgsvc.all_reduce", "add"]
    of_input = calls(lambda x: reduced(x) + 1)
    assert of_input == ["clone", "pcgsvc.all_reduce", "add"]
