"""`job=sizes`, and `job=run` with `traffic`: which capture sizes a traffic wants and uses.

In: a config with `traffic`. Out: of `job=sizes`, which builds no model, a table, `sizes.json` and
`sizes.png` in the output folder; of a replay through a runner, the report's `traffic`: hits,
padding, fall-backs, graphs that were never used. Results of its calls are thrown away.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from pcgsvc.config import Config, Graphs, Mode
from pcgsvc.errors import UncoveredError
from pcgsvc.events import Progress
from pcgsvc.forward.batch import Batch, CheckedBatch, check_batch
from pcgsvc.report.plots import has_matplotlib, not_drawn
from pcgsvc.report.report import write_report
from pcgsvc.report.sizes_plot import draw_sizes
from pcgsvc.report.sizes_table import show_sizes
from pcgsvc.report.tables import show_place
from pcgsvc.serve.runner import Runner
from pcgsvc.sizing.cost import modelled
from pcgsvc.sizing.expect import Forecast, Service
from pcgsvc.sizing.resolve import load_traffic, plan_for, with_sizes
from pcgsvc.sizing.traffic import Traffic

logger = logging.getLogger(__name__)

Call = tuple[int, bool]
"""Row count, and whether it is a uniform decode batch."""


def sizes_job(config: Config, report_path: Path, out: Console) -> None:
    """Choose capture sizes for `config.traffic`; those that are set are judged beside them.

    Args:
        config: as composed.
        report_path: where `report` points, or `report.json` in the output folder.
        out: where the table goes.

    Raises:
        ConfigError: a file cannot be used.
    """
    named = with_sizes(config)[0].capture.sizes
    plan = plan_for(config, {"capture.sizes": named} if isinstance(named, list) else {})
    path = report_path if config.report is not None else report_path.with_name("sizes.json")
    picture = path.with_suffix(".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    warnings = []
    if has_matplotlib():
        draw_sizes(plan, picture)
    else:
        warnings.append(not_drawn(picture.name))
        logger.warning("%s", warnings[0])
    write_report({**plan.as_json(), "warnings": warnings}, path)
    show_sizes(out, plan)
    show_place(out, path.absolute())
    if not warnings:
        show_place(out, picture.absolute(), "picture")


# ---- replay --------------------------------------------------------------------------------------


def replay(runner: Runner, config: Config, progress: Progress) -> dict[str, Any]:
    """Call a runner as `config.traffic` says; its counts are reset first.

    Every row of the file is called `count` times, in an order shuffled by `config.seed`. Of more
    than `config.max_traffic_calls` calls that many are taken evenly: by row count, the calls at
    equal distances. A general call is one request, or as few as `attention.max_model_len` allows;
    requests of uniform calls have some past. They use the runner's KV blocks, whose contents are
    lost.

    Returns:
        The report's `traffic`: `runner.stats()` of these calls and what the sizes were expected to
        do. A call that was refused (`on_uncovered=error`) is among `refused`.

    Raises:
        ConfigError: the traffic file cannot be used.
    """
    assert config.traffic is not None
    query_len = runner.request.config.capture.uniform_query_len
    traffic = load_traffic(config, config.traffic).as_dispatched(query_len)
    calls = sample(traffic, config.max_traffic_calls)
    rng, generator = random.Random(config.seed), torch.Generator().manual_seed(config.seed)
    rng.shuffle(calls)
    refused: Counter[tuple[int, str]] = Counter()
    runner.reset_stats()
    progress.start("traffic", len(calls))
    seconds = 0.0
    for rows, uniform in calls:
        made = runner.request.bundle.make_inputs(rows, generator)
        inputs = {name: tensor.to(runner.memory.device) for name, tensor in made.items()}
        batch = make_batch(runner, rows, uniform, rng)
        started = time.perf_counter()
        try:
            runner(**inputs, batch=batch)
        except UncoveredError as error:
            refused[rows, str(error)] += 1
        seconds += time.perf_counter() - started
        progress.advance()
    progress.stop()
    stats = runner.stats()
    del stats["calls"]  # known from the file
    return {
        "file": config.traffic,
        "calls_in_file": traffic.num_calls,
        "num_calls": len(calls),
        "expected_padding_share": _expected(runner, traffic),
        "host_us": 1e6 * seconds / len(calls),
        **stats,
        "refused": [
            {"num_tokens": n, "reason": reason, "count": count}
            for (n, reason), count in sorted(refused.items())
        ],
    }


def sample(traffic: Traffic, most: int) -> list[Call]:
    """Return the calls of a traffic, ordered by kind and row count; of too many, some evenly."""
    kinds = [(n, u) for u, p in ((False, traffic.general), (True, traffic.uniform)) for n in p]
    counts = [(traffic.uniform if u else traffic.general)[n] for n, u in kinds]
    total = sum(counts)
    taken = min(total, most)
    # The middle of each of `taken` equal stretches; all of them where nothing is left out.
    at = (np.arange(taken) + 0.5) * (total / taken)
    return [kinds[i] for i in np.searchsorted(np.cumsum(counts), at, side="right").tolist()]


def _expected(runner: Runner, traffic: Traffic) -> float:
    """Return the padding share that the sizes that were asked for have with the whole traffic."""
    config, mode = runner.request.config, runner.report["mode"]
    service = Service(
        decode=Mode(mode["decode"]),
        mixed=Mode(mode["mixed"]),
        query_len=config.capture.uniform_query_len,
        max_reqs=runner.memory.max_reqs,
        max_padding=config.capture.max_padding,
    )
    sizes = [] if config.capture.graphs is Graphs.OFF else config.capture.final_sizes
    return Forecast(traffic, service, modelled(0.0, 1.0)).of(sizes).padding_share


# ---- batches -------------------------------------------------------------------------------------


def make_batch(runner: Runner, rows: int, uniform: bool, rng: random.Random) -> CheckedBatch:
    """Return a batch of `rows` rows of the wanted kind.

    KV blocks are dealt out in turn from all there are, so requests that need more share some; what
    is computed from them is thrown away.
    """
    query_len, cache = runner.request.config.capture.uniform_query_len, runner.memory.geometry
    longest = rows if cache is None else cache.max_model_len
    uniform_lens = [query_len] * (rows // query_len)
    lens = uniform_lens if uniform else general_lens(rows, query_len, longest)
    if cache is None:
        return check_batch(Batch(query_lens=lens), rows, None)
    seq_lens = lens
    if uniform:
        seq_lens = [rng.randint(n, max(n, longest)) for n in lens]
    needed = np.array([-(-n // cache.block_size) for n in seq_lens])
    first = np.cumsum(needed) - needed
    column = np.arange(needed.max())
    tables = 1 + (first[:, None] + column) % (cache.num_blocks - 1)
    batch = Batch(query_lens=lens, seq_lens=seq_lens, block_tables=tables)
    return check_batch(batch, rows, cache, for_timing=True)


def general_lens(rows: int, query_len: int, longest: int) -> list[int]:
    """Return as few requests as `longest` allows that make no uniform batch of `rows` rows.

    There is none of one row with `query_len` 1; see `Traffic.as_dispatched`.
    """
    lens = [longest] * (rows // longest) + [rows % longest] * (rows % longest > 0)
    if query_len > 1 and all(n == query_len for n in lens):
        lens[:1] = [1, query_len - 1]
    return lens
