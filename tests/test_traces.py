"""Request traces: what is read, the steps that a simulated scheduler makes, and their sizes."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import Cli
from test_traffic_files import written

from pcgsvc.config import Arrivals, Config, Mode, SchedulerConfig, from_dict, validate_sizing
from pcgsvc.errors import ConfigError
from pcgsvc.sizing.files import read_traffic
from pcgsvc.sizing.resolve import load_traffic, plan_for
from pcgsvc.sizing.scheduler import Pace, Step, steps
from pcgsvc.sizing.traces import Request, Trace

SAMPLES = Path(__file__).parent / "traffic"
"""The first 150 rows of made traces; BurstGPT's has failed requests among them."""
FILES = [SAMPLES / name for name in ("azure.csv", "burstgpt.csv", "mooncake.jsonl")]


def trace_of(path: Path) -> Trace:
    found = read_traffic(path)
    assert isinstance(found, Trace)
    return found


def config_of(traffic: Path, mode: str = "full_and_piecewise", **sizing: Any) -> Config:
    return from_dict({"traffic": str(traffic), "mode": mode, "job": "sizes", "sizing": sizing})


# ---- files ---------------------------------------------------------------------------------------


def test_the_three_traces_hold_the_same_requests() -> None:
    azure, burstgpt, mooncake = map(trace_of, FILES)
    assert [t.form for t in (azure, burstgpt, mooncake)] == ["Azure", "BurstGPT", "Mooncake"]
    lens = [(r.prompt, r.output) for r in azure.requests]
    assert lens == [(r.prompt, r.output) for r in mooncake.requests]
    assert lens[:3] == [(61, 11), (74, 13), (105, 103)]
    assert len(lens) == 150 == len(burstgpt.requests) + burstgpt.left_out
    assert burstgpt.left_out > 0
    assert any("failed" in note for note in burstgpt.notes)
    assert any("hash_ids" in note for note in mooncake.notes)
    seconds = [r.arrival_s - azure.requests[0].arrival_s for r in azure.requests]
    millis = [r.arrival_s - mooncake.requests[0].arrival_s for r in mooncake.requests]
    assert seconds == pytest.approx(millis, abs=2e-3)


RESULT: dict[str, Any] = {"input_lens": [5, 6, 7], "output_lens": [2, 0, 4], "ttfts": [0.1, 0, 1]}


@pytest.mark.parametrize("name", ["vllm.json", "sglang.jsonl"])
def test_a_benchmarks_result_is_read(name: str, tmp_path: Path) -> None:
    trace = trace_of(written(tmp_path, name, json.dumps(RESULT) + "\n"))
    assert [(r.prompt, r.output) for r in trace.requests] == [(5, 2), (7, 4)]
    assert (trace.left_out, trace.has_times) == (1, False)


def test_a_benchmarks_requests_are_in_the_order_of_their_start_times(tmp_path: Path) -> None:
    result = {**RESULT, "start_times": [9.5, 8, 7.25]}
    trace = trace_of(written(tmp_path, "vllm.json", json.dumps(result)))
    assert trace.requests == [Request(7, 4, 7.25), Request(5, 2, 9.5)]
    assert trace.has_times


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 09:00:00.0978290,61,11\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n4.5,M,61,11,72,API\n"
MOON = '{"timestamp": 97, "input_length": 61, "output_length": 11, "hash_ids": [0]}\n'
BAD = {
    "negative": (
        "a.csv",
        f"{AZURE}2024-01-01 10:00:00,-5,3\n",
        "line 3: got '2024-01-01 10:00:00,",
    ),
    "negative, why": ("a.csv", f"{AZURE}2024-01-01 10:00:00,-5,3\n", "ContextTokens is -5, 1 to"),
    "no prompt": ("a.csv", f"{AZURE}2024-01-01 10:00:00,0,3\n", "ContextTokens is 0, 1 to"),
    "missing": (
        "a.csv",
        f"{AZURE}2024-01-01 10:00:00,,3\n",
        "line 3: got '2024-01-01 10:00:00,,3'",
    ),
    "missing, why": ("a.csv", f"{AZURE}2024-01-01 10:00:00,,3\n", "ContextTokens is '', a whole"),
    "short": ("a.csv", f"{AZURE}2024-01-01 10:00:00,3\n", "2 values for the 3 columns TIMESTAMP,"),
    "blank": ("a.csv", f"{AZURE}\n", "line 3: got '': the row is empty"),
    "word": (
        "a.csv",
        f"{AZURE}2024-01-01 10:00:00,3,x\n",
        "GeneratedTokens is 'x', a whole number",
    ),
    "no date": ("a.csv", f"{AZURE}noon,3,4\n", "TIMESTAMP is 'noon', a date and time is needed"),
    "unordered": (
        "a.csv",
        f"{AZURE}2024-01-01 08:00:00,3,4\n",
        "line 3: got '2024-01-01 08:00:00,3,4': TIMESTAMP is 2024-01-01 08:00:00, before "
        "2024-01-01 09:00:00.0978290 of the row above",
    ),
    "header": (
        "a.csv",
        "TIMESTAMP,ContextToken,GeneratedTokens\n",
        "or Azure's (TIMESTAMP,Context",
    ),
    "no rows": ("a.csv", AZURE.split("\n")[0] + "\n", "no requests with output tokens, 0 without"),
    "all failed": ("b.csv", BURST.replace(",11,", ",0,"), "no requests with output tokens, 1"),
    "burst unordered": (
        "b.csv",
        f"{BURST}4,M,3,3,6,API\n",
        "Timestamp is 4, before 4.5 of the row",
    ),
    "burst time": ("b.csv", f"{BURST}nan,M,3,3,6,API\n", "Timestamp is 'nan', a number is needed"),
    "burst negative": ("b.csv", BURST.replace("4.5", "-4.5"), "line 2: got '-4.5,M,61,11"),
    "moon missing": (
        "m.jsonl",
        MOON + '{"timestamp": 98, "input_length": 5}\n',
        "output_length is",
    ),
    "moon text": ("m.jsonl", MOON.replace("61", '"x"'), 'line 1: got \'{"timestamp": 97, "input'),
    "moon fraction": ("m.jsonl", MOON.replace("61", "6.1"), "input_length is 6.1, a whole number"),
    "moon bool": ("m.jsonl", MOON.replace("97", "true"), "timestamp is True, a number is needed"),
    "moon unordered": ("m.jsonl", MOON + MOON.replace("97", "96"), "timestamp is 96, before 97"),
    "moon no JSON": ("m.jsonl", MOON + "{\n", "line 2: got '{': it is no JSON"),
    "lens": (
        "v.json",
        '{"input_lens": [1, -2], "output_lens": [1, 1]}',
        "request 1: got \"{'input_",
    ),
    "lens, why": ("v.json", '{"input_lens": [1, -2], "output_lens": [1, 1]}', "input_lens is -2"),
    "unequal": ("v.json", '{"input_lens": [1], "output_lens": [1, 1]}', "got lengths 1, 2"),
    "half": ("v.json", '{"input_lens": [1]}', "got lengths 1, none"),
    "no details": ("v.json", '{"completed": 3}', "vLLM: --save-detailed, SGLang: --output-details"),
    "two results": ("s.jsonl", f"{json.dumps(RESULT)}\n" * 2, "the results of 2 benchmarks"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_trace_is_refused_with_the_row_and_what_was_got(case: str, tmp_path: Path) -> None:
    name, text, message = BAD[case]
    path = written(tmp_path, name, text)
    with pytest.raises(ConfigError) as raised:
        read_traffic(path)
    assert str(raised.value).startswith(f"traffic: '{path}'")
    assert message in str(raised.value)


# ---- steps ---------------------------------------------------------------------------------------


def requests_of(*lens: tuple[int, int]) -> list[Request]:
    return [Request(prompt, output, 0.0) for prompt, output in lens]


def test_the_steps_of_ten_requests_are_those_written_by_hand() -> None:
    lens = [(5, 1), (7, 3), (2, 2), (1, 1), (9, 2), (3, 4), (4, 1), (6, 2), (1, 3), (2, 4)]
    scheduler = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=8, chunk=5)
    assert list(steps(requests_of(*lens), scheduler, None)) == [
        Step(0, (5, 3)),  # the third request waits for room
        Step(0, (4, 2, 1)),  # the first one is done, the fourth in its place
        Step(2, (5,)),  # a chunk of 9
        Step(1, (4, 3)),
        Step(2, (4,)),
        Step(1, (5, 1)),  # room for 7
        Step(2, (1,)),
        Step(2, (2,)),
        Step(1, (), 3),  # the last request's tokens 2 to 4
    ]


def test_requests_that_arrive_later_wait_and_join() -> None:
    requests = [Request(4, 6, 10.0), Request(3, 2, 12.5), Request(2, 1, 30.0)]
    assert list(steps(requests, SchedulerConfig(), lambda rows, uniform: 1.0)) == [
        Step(0, (4,)),  # from 10 to 11
        Step(1, (), 2),  # to 13: the second one is there
        Step(1, (3,)),
        Step(2),
        Step(1),  # to 16
        Step(0, (2,)),  # at 30
    ]


def test_drafts_are_rows_of_a_decode_step() -> None:
    scheduler = SchedulerConfig(speculative_len=2)
    made = list(steps(requests_of((4, 8)), scheduler, None))
    assert made == [Step(0, (4,)), Step(1, (), 3)]  # 7 tokens of 3 a step
    assert [step.shape(3) for step in made] == [(4, False), (3, True)]
    assert Step(2, (3,)).shape(3) == (9, True)  # as dispatch takes it


def one_by_one(
    requests: list[Request], scheduler: SchedulerConfig, pace: Pace | None
) -> list[tuple[int, tuple[int, ...]]]:
    """Return decodes and chunks of each step, by going through every request in every step."""
    query_len, now, out = 1 + scheduler.speculative_len, requests[0].arrival_s, []
    waiting, running = list(requests), list[list[int]]()
    while waiting or running:
        while waiting and len(running) < scheduler.max_num_seqs:
            if pace is not None and waiting[0].arrival_s > now:
                break
            request = waiting.pop(0)
            running.append([request.prompt, request.output])
        if not running:
            now = waiting[0].arrival_s
            continue
        decodes = [r for r in running if not r[0]]
        room, chunks = scheduler.max_num_batched_tokens - query_len * len(decodes), []
        for r in decodes:
            r[1] -= query_len
        for r in running:
            rows = min(r[0], room, scheduler.chunk or r[0])
            if rows and r not in decodes:
                r[0], room = r[0] - rows, room - rows
                r[1] -= not r[0]
                chunks.append(rows)
        out.append((len(decodes), tuple(chunks)))
        rows = query_len * len(decodes) + sum(chunks)
        now += 0.0 if pace is None else pace(rows, all(c == query_len for c in chunks))
        running = [r for r in running if r[0] or r[1] > 0]
    return out


@pytest.mark.parametrize("seed", range(60))
def test_equal_steps_at_once_are_the_steps_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    requests, at = [], 0
    for _ in range(rng.randint(1, 25)):
        at += rng.choice((0, 1, 7, 64))
        requests.append(Request(rng.randint(1, 30), rng.randint(1, 20), at / 4))
    drafts, seqs = rng.randint(0, 3), rng.randint(1, 6)
    scheduler = SchedulerConfig(
        speculative_len=drafts,
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs * (1 + drafts) + rng.randint(0, 20),
        chunk=rng.choice((None, 1, 5)),
    )
    pace = rng.choice((None, lambda rows, uniform: (rows + 2 * uniform) / 8))
    made = list(steps(requests, scheduler, pace))
    flat = [(s.decodes, s.chunks) for s in made for _ in range(s.times)]
    assert flat == one_by_one(requests, scheduler, pace)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
@pytest.mark.parametrize("drafts", [0, 3])
def test_simulated_steps_conserve_tokens(path: Path, drafts: int) -> None:
    scheduler = SchedulerConfig(
        max_num_seqs=16, max_num_batched_tokens=256, chunk=100, speculative_len=drafts
    )
    requests, query_len = trace_of(path).requests, 1 + drafts
    prefilled: Counter[str] = Counter()
    for step in steps(requests, scheduler, None):
        assert step.shape(query_len)[0] <= 256
        assert step.decodes + len(step.chunks) <= 16
        assert max(step.chunks, default=0) <= 100
        prefilled["prompt"] += sum(step.chunks) * step.times
        prefilled["decode"] += step.decodes * step.times
    assert prefilled["prompt"] == sum(r.prompt for r in requests)
    assert prefilled["decode"] == sum(-(-(r.output - 1) // query_len) for r in requests)


# ---- sizes ---------------------------------------------------------------------------------------

SMALL = {"max_num_seqs": 24, "max_num_batched_tokens": 512, "chunk": 200}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
@pytest.mark.parametrize("sizing", [{}, {"scheduler": SMALL}, {"fixed_us": 2e4, "row_us": 50}])
def test_sizes_beat_powers_of_two_of_equal_number(path: Path, sizing: dict[str, Any]) -> None:
    plan = plan_for(config_of(path, **sizing), {})
    powers = plan.others["powers of two"]
    equal = plan.points[powers.count - 1]
    assert equal.count == powers.count
    assert equal.padding_share < powers.padding_share
    simulation = plan.traffic.simulation
    assert simulation is not None
    kept = "fixed_us" in sizing
    assert simulation.scheduler.arrivals is (Arrivals.KEPT if kept else Arrivals.CLOSED_LOOP)
    assert plan.cost.unit == ("us" if kept else "rows")
    found = plan.as_json()["traffic"]
    assert sum(kind["rows"] for kind in found["simulation"]["steps"].values()) == found["rows"]
    assert found["rows"] == (
        simulation.prompt_tokens + simulation.output_tokens - simulation.num_requests
    )


@pytest.mark.parametrize(
    ("rows", "asked", "mode"),
    [
        ("1,1\n2,4", "full_and_piecewise", Mode.FULL_AND_PIECEWISE),
        ("1,3\n1,4", "full_and_piecewise", Mode.FULL_DECODE_ONLY),  # prompts of one token
        ("5,1\n6,1", "full_and_piecewise", Mode.PIECEWISE),
        ("5,2", "full", Mode.FULL),
        ("5,2", "full_decode_only", Mode.FULL_DECODE_ONLY),
    ],
)
def test_the_recommended_mode_captures_what_the_steps_use(
    rows: str, asked: str, mode: Mode, tmp_path: Path
) -> None:
    text = "".join(f"0,M,{row},0,API\n" for row in rows.split("\n"))
    path = written(tmp_path, "b.csv", BURST.split("\n")[0] + "\n" + text)
    assert plan_for(config_of(path, asked), {}).as_json()["recommended"]["mode"] == mode.value


@pytest.mark.parametrize(("count", "requests"), [(1, 512), (64, 24)])
def test_the_recommended_requests_include_those_of_the_decode_entry(
    count: int, requests: int
) -> None:
    plan = plan_for(config_of(FILES[0], scheduler=SMALL, count=count), {})
    assert plan.as_json()["recommended"]["max_requests"] == requests


def test_a_file_of_calls_says_that_no_scheduler_is_simulated(tmp_path: Path) -> None:
    path = written(tmp_path, "t.csv", "num_tokens\n5\n7\n")
    found = plan_for(config_of(path, scheduler=SMALL), {}).as_json()
    assert found["traffic"]["simulation"] is None
    assert not {"mode", "max_requests"} & set(found["recommended"])
    assert any("sizing.scheduler.* is not read" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("sizing", "message"),
    [
        (
            {"scheduler": {"speculative_len": 2}},
            r"^capture\.uniform_query_len: got 1 with sizing\.s",
        ),
        ({"scheduler": {"max_num_seqs": 9}}, r"^attention\.max_num_reqs: got 8, but steps of"),
        ({"scheduler": {"max_num_seqs": 2, "arrivals": "kept"}}, "the time of a step is not known"),
        ({"row_us": 2, "scheduler": {"max_num_seqs": 2, "arrivals": "kept"}}, "does not say when"),
    ],
)
def test_a_scheduler_that_does_not_fit_is_refused(
    sizing: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = FILES[0]
    if "does not say" in message:
        path = written(tmp_path, "v.json", json.dumps(RESULT))
    config = config_of(path, **sizing)
    config.attention.max_num_reqs = 8
    with pytest.raises(ConfigError, match=message):
        load_traffic(config, str(path))


def test_a_step_holds_a_decode_step_of_all_requests() -> None:
    scheduler = {"max_num_seqs": 10, "speculative_len": 2, "max_num_batched_tokens": 29}
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens: got 29, at least 30 is needed"):
        validate_sizing(config_of(FILES[0], scheduler=scheduler))


def test_a_run_of_the_recommendation_uses_graphs_as_predicted(
    cli: Cli, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`max_requests` may leave no decode step without its full graph; the runner counts them."""
    monkeypatch.setenv("PCGSVC_CACHE_DIR", str(programs))
    rng = random.Random(3)
    rows = [f"0,M,{rng.randint(1, 30)},{rng.randint(1, 12)},0,API" for _ in range(30)]
    Path("b.csv").write_text("\n".join([BURST.split("\n")[0], *rows, ""]))
    words = ["device=cpu", "traffic=b.csv", "sizing.count=1", "sizing.scheduler.max_num_seqs=7"]
    words += ["sizing.scheduler.max_num_batched_tokens=32"]
    planned = cli("job=sizes", *words)
    assert planned.code == 0, planned.out + planned.err
    (path,) = [p for p in planned.files if p.name == "sizes.json"]
    best = json.loads(path.read_text())["recommended"]
    requests = best["max_requests"]
    assert requests == best["sizes"][0] == 32  # the only decode entry is for as many
    assert f"mode=full_and_piecewise attention.max_num_reqs={requests}" in planned.out
    tiny = ["model.num_layers=1", "compiler=eager", "bench.enabled=false"]
    overrides = [best["override"], f"mode={best['mode']}"]
    done = cli(*words, *tiny, *overrides, f"attention.max_num_reqs={requests}")
    assert done.code == 0, done.out + done.err
    (report,) = done.reports
    used = report["traffic"]
    assert used["padding_share"] == best["padding_share"] == used["expected_padding_share"]
    assert used["fallbacks"] == used["refused"] == []
    steps_of = json.loads(path.read_text())["traffic"]
    full = sum(count for name, count in used["hits"].items() if name.startswith("full:"))
    assert full == steps_of["uniform_calls"] > 0
    assert used["num_calls"] == steps_of["calls"]
