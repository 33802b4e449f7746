"""Five modes on four attention support levels, with real runners: what serves which batch.

The middle levels are backends that are wrong, or raise, where a full graph of theirs serves a batch
that their level does not name; see `backend_helpers`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_helpers import HostPlanned, SingleToken, UniformBatch
from core_helpers import make_config
from model_helpers import config_of

import pcgsvc
from pcgsvc.config import Mode
from pcgsvc.errors import ConfigError
from pcgsvc.ops import backends
from pcgsvc.ops.backends import BACKENDS, find_backend
from pcgsvc.ops.varlen import VarlenAttention

LEVELS = {
    "ALWAYS": "paged",
    "UNIFORM_BATCH": "toy_uniform_batch",
    "UNIFORM_SINGLE_TOKEN_DECODE": "toy_single_token",
    "NEVER": "varlen",
}
HALVES = {  # what serves uniform decode, and all else
    "none": ("none", "none"),
    "piecewise": ("piecewise", "piecewise"),
    "full": ("full", "full"),
    "full_decode_only": ("full", "none"),
    "full_and_piecewise": ("full", "piecewise"),
}
STEPS = [  # query lengths of one step after the other, on the same growing requests
    [5],  # prefill
    [1, 4, 2],  # mixed
    [1, 1, 1],  # uniform for query length 1
    [2, 2],  # uniform for query length 2
    [2, 1],
    [1, 1, 1, 1],
    [2, 2, 2],
    [1, 1],
    [2],
    [1],
]


def runner_of(
    attention: str,
    mode: str = "none",
    query_len: int = 1,
    device: str = "cpu",
    programs: Path | None = None,
) -> pcgsvc.Runner:
    """Build a small Llama; where a folder of programs is given, only the first of a kind traces."""
    cache = "cache.mode=off" if programs is None else f"cache.dir={programs}"
    words = [
        f"mode={mode}",
        f"attention.name={attention}",
        f"device={device}",
        "dtype=float32",
        f"capture.uniform_query_len={query_len}",
        "model.num_layers=2",
        "model.vocab_size=64",
        "compiler=eager",
        "capture.sizes=[2,4,8]",
        "attention.max_model_len=48",
        cache,
    ]
    return pcgsvc.load_runner(config=config_of(words))


def steps(geometry: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, pcgsvc.Batch]]:
    """Yield inputs and batch of each step; every request has KV blocks of its own."""
    width, first = geometry.blocks_per_request, geometry.first_free_block
    tables = [list(range(first + r * width, first + (r + 1) * width)) for r in range(4)]
    lengths = [0] * 4
    generator = torch.Generator().manual_seed(0)
    for query_lens in STEPS:
        positions: list[int] = []
        for request, query_len in enumerate(query_lens):
            positions += range(lengths[request], lengths[request] + query_len)
            lengths[request] += query_len
        count = len(query_lens)
        batch = pcgsvc.Batch(
            query_lens=query_lens, seq_lens=lengths[:count], block_tables=tables[:count]
        )
        yield (
            torch.randint(64, (len(positions),), generator=generator),
            torch.tensor(positions),
            batch,
        )


@pytest.fixture(scope="module")
def expected(programs: Path) -> list[torch.Tensor]:
    """What plain execution gives, step by step."""
    with runner_of("varlen", programs=programs) as runner:
        geometry = runner.memory.geometry
        return [runner(ids, at, batch=batch) for ids, at, batch in steps(geometry)]


def resolved(mode: str, level: str, query_len: int) -> str:
    """Return the contract's table."""
    if mode in ("none", "piecewise") or level == "ALWAYS":
        return mode
    if level == "NEVER" or (level == "UNIFORM_SINGLE_TOKEN_DECODE" and query_len > 1):
        return "piecewise"
    return "full_and_piecewise" if mode == "full" else mode


@pytest.mark.slow
@pytest.mark.parametrize("query_len", [1, 2])
@pytest.mark.parametrize(
    ("mode", "level"), list(itertools.product([mode.value for mode in Mode], LEVELS))
)
def test_every_mode_on_every_support_level_serves_each_batch_as_the_table_says(
    mode: str,
    level: str,
    query_len: int,
    expected: list[torch.Tensor],
    programs: Path,
    validate_report: Any,
) -> None:
    wanted = resolved(mode, level, query_len)
    decode, mixed = HALVES[wanted]
    with runner_of(LEVELS[level], mode, query_len, programs=programs) as runner:
        validate_report(runner.report)
        said = runner.report["mode"]
        assert (said["requested"], said["resolved"]) == (mode, wanted)
        assert (said["decode"], said["mixed"]) == (decode, mixed)
        assert bool(said["reasons"]) == (wanted != mode)
        for reason in said["reasons"]:
            assert f"{mode} was asked for" in reason
            assert f"attention={LEVELS[level]}" in reason
            assert f"support {level}" in reason or "support NEVER" in reason
            assert ("uniform_query_len is 2" in reason) == (
                level == "UNIFORM_SINGLE_TOKEN_DECODE" and query_len == 2
            )
        served = []
        geometry = runner.memory.geometry
        for (ids, at, batch), plain in zip(steps(geometry), expected, strict=True):
            lens = list(batch.query_lens)
            uniform = set(lens) == {query_len}
            plan = runner.plan(len(ids), lens)
            assert plan.mode.value == (decode if uniform else mixed)
            runner.reset_stats()
            got = runner(ids, at, batch=batch)
            torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-5)
            stats = runner.stats()
            if plan.mode is Mode.NONE:
                assert not stats["hits"]
                assert [f["num_tokens"] for f in stats["fallbacks"]] == [len(ids)]
            else:
                size = plan.descriptor.num_tokens
                assert stats["hits"] == {f"{plan.mode.value}:{size}": 1}
                assert plan.descriptor.uniform == (plan.mode is Mode.FULL and decode != mixed)
                assert size >= len(ids)
            served.append(plan.mode.value)
        assert set(served) == {decode, mixed}
        backend = runner.memory.attention
        if isinstance(backend, (UniformBatch, SingleToken)):
            assert set(backend.captured) == ({query_len} if decode == "full" else set())


@pytest.mark.parametrize("backend", ["toy_uniform_batch", "toy_single_token"])
def test_a_level_that_claims_too_much_is_found_out(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """The table shows nothing unless its backends are wrong in full graphs of other batches."""
    claims = type("Claims", (find_backend(backend),), {"cudagraph_support": pcgsvc.Support.ALWAYS})
    monkeypatch.setitem(BACKENDS, backend, claims)
    with pytest.raises(pcgsvc.PcgError, match="claims support"):
        runner_of(backend, "full").close()


def test_a_single_token_backend_in_full_graphs_of_two_tokens_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    claims = type("Claims", (SingleToken,), {"cudagraph_support": pcgsvc.Support.UNIFORM_BATCH})
    monkeypatch.setitem(BACKENDS, "toy_single_token", claims)
    with pytest.raises(pcgsvc.PcgError, match="claims support"):
        runner_of("toy_single_token", "full_and_piecewise", 2).close()


def test_no_size_that_uniform_batches_could_use_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with runner_of("paged", "full_and_piecewise", 3) as runner:
        (words,) = [w for w in runner.report["warnings"] if "uniform_query_len=3" in w]
        assert "[2, 4, 8]" in words
        assert words in caplog.text
        assert runner.plan(6, [3, 3]).mode is Mode.PIECEWISE
    with pytest.raises(ConfigError, match="uniform_query_len=3"):
        pcgsvc.load_runner(
            ["capture.sizes=[2,4]", "capture.uniform_query_len=3", "strict=true", "cache.mode=off"]
        )


@pcgsvc.splitting_op(
    "levels::uniform", mutates_args=("out",), support="uniform_batch", zeroes_padding=True
)
def uniform(x: torch.Tensor, out: torch.Tensor) -> None:
    """Add to each row the first of its request; full graphs take every request for two rows."""
    context = pcgsvc.current_context()
    if context.in_full_graph:
        out.copy_(x + x.view(-1, 2, x.shape[1])[:, :1].expand(-1, 2, -1).reshape(x.shape))
        return
    out.zero_()
    first = 0
    for length in context.query_lens:
        out[first : first + length] = x[first : first + length] + x[first]
        first += length


@pytest.mark.parametrize("mode", ["full", "full_decode_only", "piecewise"])
def test_levels_of_splitting_ops_are_resolved_as_those_of_backends(mode: str) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.levels.uniform(x * 2, out)
        return out + 1

    wanted = resolved(mode, "UNIFORM_BATCH", 2)
    config = make_config(mode, [4, 8], uniform_query_len=2)
    x = torch.arange(24.0).view(6, 4)
    with pcgsvc.build_runner(forward, x, dynamic_dims={"x": 0}, config=config) as runner:
        said = runner.report["mode"]
        assert said["resolved"] == wanted
        assert all("levels::uniform" in r and "UNIFORM_BATCH" in r for r in said["reasons"])
        for lens in ([2, 2, 2], [3, 1, 2], [2, 2]):
            rows = sum(lens)
            starts = torch.tensor(lens).cumsum(0) - torch.tensor(lens)
            first = x[starts.repeat_interleave(torch.tensor(lens))]
            got = runner(x[:rows], batch=pcgsvc.Batch(query_lens=lens))
            assert torch.equal(got, x[:rows] * 2 + first * 2 + 1)
            mode_ = HALVES[wanted][0 if set(lens) == {2} else 1]
            assert runner.plan(rows, lens).mode.value == mode_


# ---- the plan hook -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["none", "piecewise", "full", "full_and_piecewise"])
def test_a_backend_that_plans_on_the_host_is_right_over_changing_lengths(
    mode: str, expected: list[torch.Tensor], programs: Path
) -> None:
    with runner_of("toy_host_planned", mode, programs=programs) as runner:
        backend = runner.memory.attention
        assert isinstance(backend, HostPlanned)
        geometry = runner.memory.geometry
        for (ids, at, batch), plain in zip(steps(geometry), expected, strict=True):
            backend.plans.clear()
            plan = runner.plan(len(ids), list(batch.query_lens))
            got = runner(ids, at, batch=batch)
            torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-5)
            assert backend.plans == [plan.mode is Mode.FULL]  # once, and told what for


@pytest.mark.parametrize("mode", ["piecewise", "full", "full_and_piecewise"])
def test_each_run_of_a_build_is_planned_once_and_none_while_a_segment_is_captured(
    mode: str,
) -> None:
    with runner_of("toy_host_planned", mode) as runner:
        backend = runner.memory.attention
        assert isinstance(backend, HostPlanned)
        assert backend.in_segment == 0
        # Warm-ups, capture runs, and the plain runs that replays are compared with; replays of a
        # full graph do not come by in Python, so that they have plans without a run.
        runs = backend.steps
        assert len(runs) == len(set(runs)), "two runs had one plan"
        entries = len(runner.table.entries)
        assert len(runs) >= 4 * entries
        without_run = [p for at, p in enumerate(backend.plans, 1) if at not in runs]
        assert all(without_run)
        full = sum(key[0] is Mode.FULL for key in runner.table.entries)
        assert len(without_run) >= full
        assert full or not without_run


def test_a_plan_that_raises_leaves_the_runner_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    with runner_of("toy_host_planned", "full") as runner:
        ids = torch.arange(3)
        before = runner(ids, ids)

        def fails(context: pcgsvc.ForwardContext) -> None:
            raise RuntimeError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(runner.memory.attention, "plan", fails)
            with pytest.raises(RuntimeError, match="no room"):
                runner(ids, ids)
        assert torch.equal(runner(ids, ids), before)


# ---- backends of others --------------------------------------------------------------------------


def test_a_backend_is_registered_once_and_by_one_class() -> None:
    known = dict(BACKENDS)
    pcgsvc.register_attention_backend("toy_uniform_batch", UniformBatch)
    assert known == BACKENDS
    for name, backend, words in (
        ("paged", UniformBatch, r"taken by pcgsvc\.ops\.paged\.PagedAttention"),
        ("a name", UniformBatch, "letters, digits"),
        ("mine", object, "a subclass of pcgsvc.AttentionBackend"),
        ("mine", type("NoForward", (pcgsvc.AttentionBackend,), {}), "lacks forward"),
        (
            "mine",
            type("NoLevel", (VarlenAttention,), {"cudagraph_support": "always"}),
            r"cudagraph_support is 'always'; one of Support\.NEVER",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            pcgsvc.register_attention_backend(name, backend)  # type: ignore[arg-type]
    assert known == BACKENDS


def test_an_unknown_backend_lists_the_choices_and_how_to_add_one() -> None:
    with pytest.raises(ConfigError) as caught:
        find_backend("toy_uniform_bach")
    assert "did you mean 'toy_uniform_batch'?" in str(caught.value)
    assert "paged, varlen, triton" in str(caught.value)
    assert "register_attention_backend" in str(caught.value)


def test_an_installed_package_names_its_backend_by_an_entry_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = backends.ENTRY_POINTS
    points = [
        metadata.EntryPoint("by_package", "backend_helpers:UniformBatch", group),
        metadata.EntryPoint("not_there", "no_such_package:Backend", group),
        metadata.EntryPoint("no_backend", "backend_helpers:torch", group),
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points)
    monkeypatch.setattr(backends, "BACKENDS", dict(BACKENDS))
    assert find_backend("by_package") is UniformBatch
    with pytest.raises(ConfigError, match=r"no_such_package:Backend\) cannot be imported"):
        find_backend("not_there")
    with pytest.raises(ConfigError, match=r"a subclass of pcgsvc\.AttentionBackend"):
        find_backend("no_backend")
    with pytest.raises(ConfigError, match="no_backend, not_there"):
        find_backend("other")


def test_a_registered_backend_is_chosen_by_its_name() -> None:
    with runner_of("toy_uniform_batch", "full_and_piecewise") as runner:
        assert type(runner.memory.attention) is UniformBatch
