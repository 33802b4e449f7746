"""The warm start: no trace, no compile, and never another program than the module's own.

Eager and stubbed compilers here and in this process; what takes Inductor or a process of its own
is marked slow, and shares one cold Inductor build.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from core_helpers import attended, make_config, rows, toy
from hydra.core.singleton import Singleton
from store_helpers import all_files, sql, stored_files
from torch import nn
from torch.utils import _pytree as pytree
from warm_helpers import Starter

import pcgsvc
from pcgsvc import torch_private
from pcgsvc.cache.store import Kind, Store
from pcgsvc.config import CacheConfig, CacheMode
from pcgsvc.errors import CacheError
from pcgsvc.jobs.app import main

PACKAGE = Path(__file__).parent.parent
TINY = ["device=cpu", "model.num_layers=1", "capture.sizes=[1,2]", "bench.enabled=false"]


@dataclass
class Done:
    """What a command line left behind."""

    code: int
    out: str
    reports: list[dict[str, Any]]
    log: str

    @property
    def start(self) -> tuple[str, int, int]:
        """Start, traces and compiled pieces of the last report."""
        compiled = self.reports[-1]["compile"]
        return compiled["start"], compiled["num_traces"], compiled["num_compiled"]

    @property
    def reasons(self) -> str:
        return "; ".join(self.reports[-1]["cache"]["miss_reasons"])


WARM = ("warm", 0, 0)
Cli = Callable[..., Done]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A cache root that does not exist yet."""
    return tmp_path / "cache"


@pytest.fixture
def start(root: Path) -> Starter:
    return Starter(root)


@pytest.fixture
def cli(
    tmp_path: Path,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> Iterator[Cli]:
    """Return a call of `main` in a new folder each, with a tiny eager model and `root`."""
    singletons, logger = copy.copy(Singleton.get_state()), logging.getLogger()
    handlers, level, threads = list(logger.handlers), logger.level, torch.get_num_threads()
    torch.set_num_threads(1)

    def call(*argv: str) -> Done:
        folder = tmp_path / f"cwd {len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        monkeypatch.chdir(folder)
        caplog.clear()
        flags = [word for word in argv if word.startswith("-")]
        words = [word for word in argv if not word.startswith("-")]
        code = main([*flags, *TINY, f"cache.dir={root}", *words])
        for handler in [h for h in logger.handlers if h not in handlers]:
            logger.removeHandler(handler)
            handler.close()
        found = sorted(folder.rglob("report.json"))
        captured = capsys.readouterr()
        reports = [json.loads(p.read_text()) for p in found]
        return Done(code, captured.out + captured.err, reports, caplog.text)

    yield call
    torch.set_num_threads(threads)
    logger.setLevel(level)
    logger.handlers[:] = handlers
    Singleton.set_state(singletons)


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a warm start traces or compiles")


def forbid_compilers(patch: pytest.MonkeyPatch) -> None:
    for name in ("dynamo_trace", "inductor_compile", "import_compilers"):
        patch.setattr(torch_private, name, refuse)


# ---- the second run ------------------------------------------------------------------------------


def test_the_second_run_is_warm_and_right_and_its_report_says_so(
    cli: Cli, validate_report: Callable[[Any], None]
) -> None:
    first = cli()
    assert (first.code, first.start) == (0, ("cold", 1, 2))
    second = cli()
    assert (second.code, second.start) == (0, WARM)
    (report,) = second.reports
    validate_report(report)
    assert report["compile"]["num_loaded"] == 2
    assert report["cache"]["misses"] == 0
    assert report["cache"]["miss_reasons"] == []
    assert report["cache"]["program_key"] == first.reports[0]["cache"]["program_key"]
    assert report["partition"] == first.reports[0]["partition"]
    assert report["verify"]
    assert all(row["ok"] and row["max_rel_err"] == 0 for row in report["verify"])
    seconds = report["compile"]["seconds"]
    assert (seconds["trace"], seconds["compile"]) == (0, 0)
    assert seconds["load"] > 0


def test_a_warm_start_needs_neither_dynamo_nor_a_compiler(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli().code == 0
    forbid_compilers(monkeypatch)
    again = cli()
    assert (again.code, again.start) == (0, WARM)
    assert cli("model.hidden_size=64").code == 1  # the control: a cold start does need them


def test_job_compile_fills_the_cache_and_captures_nothing(cli: Cli) -> None:
    filled = cli("job=compile")
    assert (filled.code, filled.start) == (0, ("cold", 1, 2))
    assert "graphs" not in filled.reports[0]
    assert cli("cache.require_warm=true").start == WARM


def test_a_sweep_over_sizes_and_modes_compiles_in_its_first_job_only(cli: Cli) -> None:
    done = cli("-m", "capture.sizes=[1],[1,2]", "mode=piecewise,full,none")
    assert done.code == 0
    compiled = [report["compile"]["num_compiled"] for report in done.reports]
    assert sorted(compiled) == [0, 0, 0, 0, 0, 2]
    assert sorted(report["compile"]["num_traces"] for report in done.reports) == [0] * 5 + [1]


IRRELEVANT = [
    "seed=5",
    "strict=false",
    "outputs=view",
    "attention=varlen",
    "capture.warmup_calls=1",
]


def test_settings_that_cannot_matter_are_a_hit(cli: Cli) -> None:
    assert cli().code == 0
    assert cli(*IRRELEVANT).start == WARM


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        ("model.hidden_size=64", "config.model.hidden_size: stored None, wanted 64"),
        ("dtype=float64", "config.dtype: stored 'float32', wanted 'float64'"),
        (
            "partition.splitting_ops=[pcgsvc::attention]",
            "config.partition.splitting_ops: stored None, wanted ['pcgsvc::attention']",
        ),
        ("model.norm_eps=0.5", "config.model.norm_eps: stored None, wanted 0.5"),
        ("compiler=inductor", "config.compiler.name: stored 'eager', wanted 'inductor'"),
    ],
)
def test_a_setting_that_matters_is_a_miss_and_explain_names_exactly_that(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, words: str, fact: str
) -> None:
    assert cli().code == 0
    if "inductor" in words:
        monkeypatch.setattr(torch_private, "inductor_settings", dict)
    told = cli("job=cache", "cache.action=explain", words)
    assert told.code == 0
    assert "miss" in told.out
    sentence = told.out.partition("The nearest program differs in: ")[2].strip()
    assert sentence.partition(" (and ")[0].rstrip(".") == fact
    refused = cli("cache.require_warm=true", words)
    assert refused.code == 1
    assert fact in refused.log + refused.out
    assert not refused.reports


def test_explain_says_hit_for_what_is_stored(cli: Cli) -> None:
    assert "miss: program" in cli("job=cache", "cache.action=explain").out
    assert cli().code == 0
    told = cli("job=cache", "cache.action=explain")
    assert "hit: program" in told.out
    assert "2 pieces" in told.out


def test_presets_of_one_shape_but_another_epsilon_are_told_apart(cli: Cli, root: Path) -> None:
    # As two checkpoints of one architecture: nothing but what tracing read tells them apart.
    from pcgsvc.models import llama

    assert cli().code == 0
    with pytest.MonkeyPatch.context() as patch:
        real = llama.RMSNorm.__init__

        def other(self: Any, width: int, eps: float, **where: Any) -> None:
            real(self, width, eps * 1000, **where)

        patch.setattr(llama.RMSNorm, "__init__", other)
        changed = cli()
    assert changed.code == 0
    assert changed.start[0] == "cold"


def test_a_forward_that_asks_for_the_type_of_a_tensor_starts_warm(start: Starter) -> None:
    # Dynamo reads torch.Tensor through a global whose name holds an address of the process.
    def forward(x: torch.Tensor) -> torch.Tensor:
        return attended(x * 2) if type(x).__name__ == "Tensor" else x

    assert not start(forward).warm
    assert start(forward).warm


# ---- moving --------------------------------------------------------------------------------------


def test_export_clear_import_is_warm(cli: Cli, root: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.tar"
    assert cli().code == 0
    assert cli("job=cache", "cache.action=export", f"cache.file={bundle}").code == 0
    assert cli("job=cache", "cache.action=clear").code == 0
    assert "miss" in cli("job=cache", "cache.action=explain").out
    assert cli("job=cache", "cache.action=import", f"cache.file={bundle}").code == 0
    assert cli("cache.require_warm=true").start == WARM
    assert "sound" in cli("job=cache", "cache.action=check").out


NO_DYNAMO = """
import sys
import torch  # from 2.14 on it asks whether triton is installed, without importing it
torch.set_num_threads(1)
from pcgsvc.jobs.app import main
code = main(sys.argv[1:])
loaded = [n for n in sys.modules if n.startswith(("torch._dynamo", "torch._inductor", "triton"))]
sys.exit(f"imported: {loaded}" if loaded else code)
"""


def in_process(
    code: str, argv: list[str], folder: Path, **environment: str
) -> subprocess.Popen[str]:
    """Start Python in a folder, with nothing of this process's environment but what it needs."""
    kept = {n: v for n, v in os.environ.items() if n in ("PATH", "LD_LIBRARY_PATH")}
    return subprocess.Popen(
        [sys.executable, "-c", code, *argv],
        cwd=folder,
        env=kept | {"PYTHONPATH": str(PACKAGE), "OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=250)
    assert process.returncode == 0, out
    return out


def home(folder: Path) -> dict[str, str]:
    """Make a home of somebody else's."""
    for name in ("home", "tmp", "cwd"):
        (folder / name).mkdir(parents=True)
    return {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "USER": "somebody"}


def test_another_process_home_and_place_is_warm_without_importing_dynamo(
    cli: Cli, root: Path, tmp_path: Path
) -> None:
    assert cli().code == 0
    moved = tmp_path / "moved" / "elsewhere"
    moved.parent.mkdir()
    root.rename(moved)
    environment = home(tmp_path / "other")
    report = tmp_path / "report.json"
    argv = [*TINY, f"cache.dir={moved}", f"report={report}", "cache.require_warm=true"]
    finish(in_process(NO_DYNAMO, argv, tmp_path / "other" / "cwd", **environment))
    compiled = json.loads(report.read_text())["compile"]
    assert (compiled["start"], compiled["num_traces"], compiled["num_compiled"]) == WARM
    assert all(row["ok"] for row in json.loads(report.read_text())["verify"])


def listing(*folders: Path) -> set[str]:
    return {str(p) for folder in folders for p in folder.rglob("*")}


PLAIN = "import sys, torch; torch.set_num_threads(1); from pcgsvc.jobs.app import main\n" + (
    "sys.exit(main(sys.argv[1:]))"
)


def run_off(tmp_path: Path, root: Path, compiler: str) -> set[str]:
    """Run with the cache off; return what new files there are."""
    environment = home(tmp_path / "other")
    argv = [*TINY, f"cache.dir={root}", "cache.mode=off", f"compiler={compiler}", "hydra.run.dir=o"]
    places = (tmp_path / "other", root.parent, Path(os.environ["XDG_CACHE_HOME"]))
    before = listing(*places)
    finish(in_process(PLAIN, argv, tmp_path / "other" / "cwd", **environment))
    output = str(tmp_path / "other" / "cwd" / "o")
    return {p for p in listing(*places) - before if not p.startswith(output)}


def test_off_leaves_no_file_anywhere(tmp_path: Path, root: Path) -> None:
    assert run_off(tmp_path, root, "eager") == set()


# ---- modes ---------------------------------------------------------------------------------------


def test_read_serves_hits_and_stores_nothing(cli: Cli, root: Path) -> None:
    missed = cli("cache.mode=read")
    assert (missed.code, missed.start) == (0, ("cold", 1, 2))
    assert not root.exists()
    assert cli().code == 0
    before = {p: p.read_bytes() for p in stored_files(root)}
    assert cli("cache.mode=read").start == WARM
    assert cli("cache.mode=read", "model.hidden_size=64").start[0] == "cold"
    assert {p: p.read_bytes() for p in stored_files(root)} == before


def test_refresh_compiles_anew_and_stores_it(cli: Cli, root: Path) -> None:
    assert cli().code == 0
    fresh = cli("cache.mode=refresh")
    assert (fresh.code, fresh.start) == (0, ("cold", 1, 2))
    assert cli().start == WARM


def test_refresh_keeps_the_programs_of_other_instances(start: Starter) -> None:
    class Scaled(nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by = by

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return attended(x * self.by)

    assert not start(Scaled(2.0)).warm
    assert not start(Scaled(3.0)).warm
    assert not start(Scaled(3.0), cache="refresh").warm
    assert start(Scaled(3.0)).warm
    assert start(Scaled(2.0)).warm


def test_off_is_cold_each_time_and_says_nothing_of_a_place(cli: Cli) -> None:
    for _ in range(2):
        done = cli("cache.mode=off")
        assert (done.code, done.start) == (0, ("cold", 1, 2))
        assert done.reports[0]["cache"]["dir"] is None


def test_require_warm_on_an_empty_store_says_what_to_do(start: Starter) -> None:
    with pytest.raises(CacheError, match="job=compile") as caught:
        start(toy(1), require_warm=True)
    assert "holds no program" in str(caught.value)


def test_require_warm_refuses_arguments_without_a_form(start: Starter) -> None:
    def forward(x: torch.Tensor, mark: Any) -> torch.Tensor:
        return attended(x)

    with pytest.raises(CacheError):
        start(forward, example={"x": rows(2), "mark": object()}, require_warm=True)


# ---- damage --------------------------------------------------------------------------------------


def test_a_damaged_piece_is_a_named_miss_put_aside_and_compiled_again(
    start: Starter, caplog: pytest.LogCaptureFixture
) -> None:
    assert not start(toy(2)).warm
    pieces = sql(start.root, "SELECT key FROM Cache WHERE key LIKE 'piece%'")
    assert len(pieces) == 3
    name = str(pieces[0][0])
    damage_entry(start.root, name)
    caplog.clear()
    again = start(toy(2))
    assert again.right
    compiled = again.report["compile"]
    assert (compiled["start"], compiled["num_compiled"], compiled["num_loaded"]) == ("cold", 1, 2)
    assert "a miss: " in caplog.text
    assert list((start.root / "store" / "quarantine").iterdir())
    assert start(toy(2)).warm


def damage_entry(root: Path, name: str) -> None:
    """Flip a byte in the middle of an entry's envelope, wherever it lies."""
    ((value, filename),) = sql(root, "SELECT value, filename FROM Cache WHERE key = ?", name)
    data = bytearray(value if filename is None else (root / "store/db" / filename).read_bytes())
    data[len(data) // 2] ^= 1
    if filename is None:
        sql(root, "UPDATE Cache SET value = ? WHERE key = ?", bytes(data), name)
    else:
        (root / "store/db" / filename).write_bytes(data)


def test_a_variant_whose_piece_was_lost_does_not_keep_another_from_being_stored(
    start: Starter,
) -> None:
    class Scaled(nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by = by

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return attended(x * self.by)

    assert not start(Scaled(2.0)).warm
    ((lost,),) = sql(start.root, "SELECT key FROM Cache WHERE key LIKE 'piece%'")
    sql(start.root, "DELETE FROM Cache WHERE key = ?", str(lost))
    assert not start(Scaled(3.0)).warm
    assert start(Scaled(3.0)).warm
    assert not start(Scaled(2.0)).warm
    assert start(Scaled(2.0)).warm
    assert start(Scaled(3.0)).warm


def test_an_entry_of_another_version_of_ours_is_a_miss_and_is_replaced(start: Starter) -> None:
    assert not start(toy(1)).warm
    for manifest in (b"{}", b'{"variants": ["{}"]}', b'{"variants": [3]}', b"\xff", b"[]"):
        with Store.open(str(start.root)) as store:
            (program,) = store.ls()
            entry = store.read(Kind.PROGRAM, program.key)
            assert store.put_program(program.key, manifest, pieces=entry.pieces, facts=entry.facts)
        again = start(toy(1))
        assert again.right
        assert not again.warm
        assert start(toy(1)).warm


def test_a_module_that_cannot_be_imported_any_more_is_a_miss(start: Starter) -> None:
    assert not start(toy(1)).warm
    with Store.open(str(start.root)) as store:
        (program,) = store.ls()
        entry = store.read(Kind.PROGRAM, program.key)
        manifest = json.loads(entry.payload)
        image = json.loads(manifest["variants"][0])
        image["modules"] = ["pcgtest_gone"]
        payload = json.dumps({**manifest, "variants": [json.dumps(image)]}).encode()
        assert store.put_program(program.key, payload, pieces=entry.pieces, facts=entry.facts)
    again = start(toy(1))
    assert again.right
    assert "pcgtest_gone" in again.reasons


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 5))]
)
def test_a_flipped_byte_anywhere_never_gives_a_wrong_result_and_is_mended(
    start: Starter, tmp_path: Path, part: int, caplog: pytest.LogCaptureFixture
) -> None:
    module = toy(2)
    assert not start(module).warm
    good = tmp_path / "good"
    shutil.copytree(start.root, good)
    rng = random.Random(part)
    hit = 0
    for _ in range(10):
        shutil.rmtree(start.root)
        shutil.copytree(good, start.root)
        files = [p for p in all_files(start.root) if p.stat().st_size]
        sizes = [p.stat().st_size for p in files]
        (path,) = rng.choices(files, sizes)
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        caplog.clear()
        again = start(module)
        assert again.right
        if not again.warm:
            hit += 1
            assert again.reasons
            assert "cache:" in caplog.text
            assert start(module).warm
    assert hit  # half of the file is entries


# ---- Inductor, stubbed ---------------------------------------------------------------------------


class StubArtifact:
    """What `inductor_compile` gives, without a compiler."""

    made: dict[bytes, Any] = {}  # noqa: RUF012 - stands for the disk of the compiler

    def __init__(self, module: Any) -> None:
        self.module = module
        self.name = str(len(self.made)).encode()
        self.made[self.name] = self

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)


class Stub:
    """Counts what a stubbed Inductor does."""

    compiled = 0

    def compile(self, module: Any, inputs: Any, options: Any) -> StubArtifact:
        self.compiled += 1
        return StubArtifact(module)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    made = Stub()
    monkeypatch.setattr(torch_private, "inductor_compile", made.compile)
    monkeypatch.setattr(torch_private, "inductor_serialize", lambda artifact: artifact.name)
    monkeypatch.setattr(torch_private, "inductor_deserialize", lambda d: StubArtifact.made[d])
    monkeypatch.setattr(torch_private, "inductor_source", lambda artifact: "")
    return made


def test_inductors_pieces_and_toolchain_are_stored_and_loaded(start: Starter, stub: Stub) -> None:
    first = start(toy(2), compiler="inductor")
    assert first.right
    assert stub.compiled == 3 + 1  # the probe of the toolchain
    assert start(toy(2), compiler="inductor").warm
    assert stub.compiled == 4


def test_the_toolchain_goes_where_the_program_goes(
    start: Starter, stub: Stub, tmp_path: Path
) -> None:
    assert not start(toy(1), compiler="inductor").warm
    with Store.open(str(start.root)) as store:
        (program,) = store.ls()
        assert store.check().orphans == []
        kinds = {
            store.read(Kind.PIECE, key).facts.get("kind")
            for key in store.read(Kind.PROGRAM, program.key).pieces
        }
    assert "toolchain" in kinds


def broken_serialize(artifact: Any) -> bytes:
    raise RuntimeError("no artifacts in this version")


@pytest.mark.parametrize("serialize", [broken_serialize, lambda a: b""], ids=["raises", "nothing"])
def test_what_torch_cannot_write_down_runs_and_is_not_stored(
    start: Starter,
    stub: Stub,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    serialize: Callable[[Any], bytes],
) -> None:
    monkeypatch.setattr(torch_private, "inductor_serialize", serialize)
    for _ in range(2):
        caplog.clear()
        done = start(toy(1), compiler="inductor")
        assert done.right
        assert not done.warm
        assert "cannot be written down" in caplog.text


@pytest.mark.parametrize("serialize", [broken_serialize, lambda a: b""], ids=["raises", "nothing"])
def test_the_report_says_what_torch_could_not_write_down(
    start: Starter, stub: Stub, monkeypatch: pytest.MonkeyPatch, serialize: Callable[[Any], bytes]
) -> None:
    monkeypatch.setattr(torch_private, "inductor_serialize", serialize)
    assert "cannot be written down" in start(toy(1), compiler="inductor").reasons


def test_what_torch_cannot_load_again_is_compiled_again(
    start: Starter, stub: Stub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert not start(toy(1), compiler="inductor").warm

    def broken(data: bytes) -> Any:
        raise EOFError("short pickle")

    with monkeypatch.context() as patch:
        patch.setattr(torch_private, "inductor_deserialize", broken)
        again = start(toy(1), compiler="inductor")
        assert again.right
        assert not again.warm
        assert again.report["compile"]["num_compiled"] == 2
        assert again.report["compile"]["num_loaded"] == 0
        assert "torch cannot load it (EOFError: short pickle)" in again.reasons
        # Neither does it help to compile where nothing can be written down at all.
        patch.setattr(torch_private, "inductor_serialize", broken_serialize)
        assert start(toy(1), compiler="inductor").right
    assert start(toy(1), compiler="inductor").warm


# ---- results with classes of their own -----------------------------------------------------------


class Pair:
    """A result of a class that is registered without a name to write."""

    def __init__(self, one: torch.Tensor, other: torch.Tensor) -> None:
        self.one, self.other = one, other


pytree.register_pytree_node(
    Pair, lambda pair: ([pair.one, pair.other], None), lambda values, _: Pair(*values)
)


class Named(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor


def test_a_named_tuple_comes_out_as_one(start: Starter) -> None:
    def forward(x: torch.Tensor) -> Named:
        return Named(attended(x), x + 1)

    config = make_config(sizes=(2,))
    with pcgsvc.build_runner(forward, rows(2), dynamic_dims={"x": 0}, config=config) as runner:
        result = runner(rows(2))
        assert isinstance(result, Named)
        assert torch.equal(result.other, rows(2) + 1)


def test_a_result_that_torch_cannot_write_down_is_served_uncached(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def forward(x: torch.Tensor) -> Pair:
        return Pair(attended(x), x + 1)

    config = make_config(sizes=(2,))
    config.cache = CacheConfig(dir=str(root), mode=CacheMode.READWRITE)
    for _ in range(2):
        with pcgsvc.build_runner(forward, rows(2), dynamic_dims={"x": 0}, config=config) as runner:
            result = runner(rows(2))
            assert isinstance(result, Pair)
            assert torch.equal(result.other, rows(2) + 1)
            assert runner.report["compile"]["start"] == "cold"
    assert "the result cannot be written down" in caplog.text


# ---- several at once -----------------------------------------------------------------------------


def test_two_threads_that_build_one_program_at_once_compile_it_once(start: Starter) -> None:
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda _: start(toy(2)), range(2)))
    assert all(each.right for each in done)
    assert sum(each.report["compile"]["num_compiled"] for each in done) == 3
    assert sorted(each.warm for each in done) == [False, True]


def test_two_programs_share_their_pieces(start: Starter) -> None:
    assert start(toy(3)).report["compile"]["num_compiled"] == 3
    more = start(toy(4))
    assert more.right
    assert not more.warm
    assert (more.report["compile"]["num_compiled"], more.report["compile"]["num_loaded"]) == (0, 3)


# ---- Inductor ------------------------------------------------------------------------------------

INDUCTOR = ["device=cpu", "model=two_regions", "compiler=inductor", "capture.sizes=[1,2]"]
INDUCTOR += ["bench.enabled=false", "mode=piecewise"]
RAISING = """
import sys
import torch
torch.set_num_threads(1)
from pcgsvc import torch_private
from pcgsvc.jobs.app import main

def refuse(*args, **kwargs):
    raise AssertionError("a warm start traces or compiles")

torch_private.dynamo_trace = refuse
torch_private.inductor_compile = refuse
sys.exit(main(sys.argv[1:]))
"""
# On the PATH without this wrapper: `-v` prints how the compiler was found, and that is compared.
WRAPPER = """#!/bin/bash
echo "$@" >> {log}
for word in "$@"; do
    case "$word" in --version|-v|-dump*) exec env PATH="{path}" {name} "$@";; esac
done
echo "asked for more than its version: $@" >&2
exit 1
"""


@pytest.fixture(scope="module")
def inductor_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with one Inductor program, built in a process of its own: the only cold build."""
    folder = tmp_path_factory.mktemp("inductor")
    argv = [*INDUCTOR, f"cache.dir={folder / 'cache'}", f"report={folder / 'report.json'}"]
    finish(in_process(PLAIN, argv, folder, **home(folder / "builder")))
    compiled = json.loads((folder / "report.json").read_text())["compile"]
    assert (compiled["start"], compiled["num_compiled"]) == ("cold", 2)
    left = [p for p in listing(folder / "builder" / "tmp", folder / "builder" / "home")]
    assert left == []
    return folder / "cache"


def only_versions(folder: Path) -> tuple[str, Path]:
    """Return a PATH on which every C++ compiler tells its version only, and the log of calls."""
    folder.mkdir()
    log = folder / "log"
    log.touch()
    for name in ("g++", "gcc", "c++", "cc", "clang++", "clang"):
        if shutil.which(name) is not None:
            text = WRAPPER.format(log=log, name=name, path=os.environ["PATH"])
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}", log


def start_warm(root: Path, folder: Path, *, code: str = RAISING) -> dict[str, Any]:
    """Start in a process of another home and place, with compilers that only tell their version."""
    environment = home(folder)
    environment["PATH"], log = only_versions(folder / "bin")
    report = folder / "report.json"
    argv = [*INDUCTOR, f"cache.dir={root}", f"report={report}", "cache.require_warm=true"]
    finish(in_process(code, argv, folder / "cwd", **environment))
    assert set(listing(folder / "tmp", folder / "home")) == set()
    calls = log.read_text().splitlines()
    assert all(len(call.split()) <= 2 for call in calls), calls
    return dict(json.loads(report.read_text()))


@pytest.mark.slow
def test_inductor_is_warm_elsewhere_and_asks_the_compiler_for_its_version_only(
    inductor_root: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved" / "deeper"
    shutil.copytree(inductor_root, moved)
    report = start_warm(moved, tmp_path / "other")
    compiled = report["compile"]
    assert (compiled["start"], compiled["num_traces"], compiled["num_compiled"]) == WARM
    assert compiled["num_loaded"] == 2
    assert report["verify"]
    assert all(row["ok"] for row in report["verify"])


@pytest.mark.slow
def test_an_exported_inductor_program_is_warm_on_a_fresh_machine(
    inductor_root: Path, tmp_path: Path
) -> None:
    from pcgsvc.cache.bundle import export_bundle, import_bundle

    with Store.open(str(inductor_root)) as store:
        info = export_bundle(store, tmp_path / "bundle.tar")
    with Store.open(str(tmp_path / "fresh")) as store:
        import_bundle(store, tmp_path / "bundle.tar", expected_sha256=info.sha256)
        assert store.check().ok
    assert start_warm(tmp_path / "fresh", tmp_path / "other")["compile"]["start"] == "warm"


@pytest.mark.slow
def test_off_with_inductor_leaves_no_file_anywhere(tmp_path: Path, root: Path) -> None:
    assert run_off(tmp_path, root, "inductor") == set()


@pytest.mark.slow
def test_flipped_bytes_of_inductor_entries_are_never_loaded(
    inductor_root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [str(k) for (k,) in sql(inductor_root, "SELECT key FROM Cache")]
    assert len(keys) == 4  # program, toolchain, two pieces
    copied = tmp_path / "copy"
    shutil.copytree(inductor_root, copied)
    for key in keys:
        damage_entry(copied, key)
    torch.set_num_threads(1)
    with pcgsvc.load_runner([*INDUCTOR, f"cache.dir={copied}"]) as runner:
        assert runner.report["compile"]["num_compiled"] == 2
        x = torch.randn(2, 32)
        with torch.no_grad():
            assert torch.isfinite(runner(x)).all()
    assert "digest" in caplog.text or "a miss" in caplog.text
    with pcgsvc.load_runner([*INDUCTOR, f"cache.dir={copied}"]) as runner:
        assert runner.report["compile"]["start"] == "warm"
