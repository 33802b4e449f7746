"""`job=config`: what settings mean, what they are, and who set them; and the presets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_helpers import Cli
from hydra.core.singleton import Singleton

from pcgsvc.config import Compiler, Job, OnUncovered, Outputs, resolve, validate
from pcgsvc.config.compose import compose
from pcgsvc.config.settings import key_reason, unit_of, walk
from pcgsvc.errors import ConfigError
from pcgsvc.jobs.origins import compose_with_origins
from pcgsvc.jobs.preflight import check
from pcgsvc.jobs.run import run_job

CONF = Path(__file__).parents[1] / "conf"
PRESETS = sorted(p.stem for p in (CONF / "preset").glob("*.yaml"))


@pytest.fixture(autouse=True)
def host_state() -> Iterator[None]:
    """Put Hydra's singletons back."""
    before = dict(Singleton.get_state())
    yield
    Singleton.set_state(before)


def set_by(path: str, *overrides: str, config_dir: str | None = None) -> str:
    return compose_with_origins(overrides, config_dir=config_dir)[1][path].set_by


# ---- who set it ----------------------------------------------------------------------------------


def test_every_setting_has_an_origin_and_by_default_it_is_nobodys() -> None:
    _, origins = compose_with_origins(["device=cpu"])
    assert set(origins) == {s.path for s in walk()}
    assert origins["seed"].set_by == "default"
    assert origins["model.name"].set_by == "conf/model/llama.yaml"


def test_what_the_command_line_sets_is_its_own() -> None:
    assert set_by("seed", "seed=3") == "command line (seed=3)"
    assert set_by("compiler.options", "compiler=inductor", "+compiler.options.a=1") == (
        "command line (+compiler.options.a=1)"
    )
    words = set_by("attention.name", "attention=varlen")
    assert words == "conf/attention/varlen.yaml, chosen by attention=varlen on the command line"


def test_the_last_word_of_several_counts() -> None:
    words = ["preset=safe", "on_uncovered=run", "device=cpu"]
    config, origins = compose_with_origins(words)
    assert config.on_uncovered is OnUncovered.RUN
    assert origins["on_uncovered"].set_by == "command line (on_uncovered=run)"
    assert origins["strict"].set_by.startswith("conf/preset/safe.yaml, chosen by preset=safe")


def test_what_resolve_chooses_says_for_which_device() -> None:
    _, origins = compose_with_origins(["device=cpu", "capture.max_size=8"])
    assert origins["capture.sizes"].value == [1, 2, 4, 8]
    assert origins["capture.sizes"].set_by == "pcgsvc, for device=cpu (default: null)"
    assert origins["capture.max_size"].set_by == "command line (capture.max_size=8)"


def test_a_users_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "attention").mkdir()
    (tmp_path / "attention" / "mine.yaml").write_text("name: varlen\nblock_size: 32\n")
    words = set_by("attention.block_size", "attention=mine", config_dir=str(tmp_path))
    assert words == "attention/mine.yaml of user, chosen by attention=mine on the command line"


def test_the_environment_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PCGSVC_CACHE_DIR", str(tmp_path))
    _, origins = compose_with_origins([])
    assert origins["cache.dir"].value == str(tmp_path)
    assert origins["cache.dir"].set_by == "environment (PCGSVC_CACHE_DIR)"
    monkeypatch.setenv("MY_SEED", "5")
    (tmp_path / "config.yaml").write_text(
        "defaults: [pcgsvc_schema, _self_]\nseed: ${oc.decode:${oc.env:MY_SEED}}\n"
    )
    config, origins = compose_with_origins([], config_dir=str(tmp_path))
    assert config.seed == 5
    assert origins["seed"].set_by == "config.yaml of user, from the environment (MY_SEED)"


def test_a_presets_dimensions_are_named() -> None:
    _, origins = compose_with_origins(["model.preset=160m", "model.num_layers=2"])
    assert origins["model.hidden_size"].value == 768
    assert origins["model.hidden_size"].set_by == "model.preset=160m"
    assert origins["model.num_layers"].set_by == "command line (model.num_layers=2)"


# ---- what is printed -----------------------------------------------------------------------------


def test_a_setting_is_explained_in_full_and_nothing_is_written(cli: Cli) -> None:
    done = cli("job=config", "config.explain=capture.sizes", "device=cpu")
    assert done.code == 0
    assert not done.files
    lines = {" ".join(line.split()[:2]): line for line in done.out.splitlines()}
    assert done.out.startswith("capture.sizes\n")
    assert "meaning    Capture sizes in tokens" in done.out
    assert "a list of tokens" in lines["unit a"]
    assert "[1,2,4,8,16,24,32,48,64]" in done.out
    assert "set by     pcgsvc, for device=cpu (default: null)" in done.out
    assert "cache key  not in it: which graphs are captured" in done.out


def test_a_group_is_a_table_of_its_settings(cli: Cli) -> None:
    done = cli("job=config", "config.explain=partition", "partition.strategy=breakable")
    assert done.code == 0
    rows = [line.split()[0] for line in done.out.splitlines() if line.startswith("partition.")]
    assert rows == [s.path for s in walk() if s.path.startswith("partition.")]
    assert "breakable" in done.out
    assert "yes" in done.out


def test_without_a_name_all_settings_are_listed(cli: Cli) -> None:
    done = cli("job=config", "device=cpu")
    for setting in walk():
        assert f"{setting.path} " in done.out


@pytest.mark.parametrize(
    ("name", "hint"),
    [("capture.size", "capture.sizes"), ("sizes", "capture.sizes"), ("captur", "capture")],
)
def test_an_unknown_name_lists_near_ones(cli: Cli, name: str, hint: str) -> None:
    done = cli("job=config", f"config.explain={name}")
    assert done.code == 2
    assert f"config.explain: got '{name}'" in done.err
    assert hint in done.err.split("did you mean")[1].split("?")[0]
    assert not done.files


def test_a_sweep_cannot_be_explained(cli: Cli) -> None:
    done = cli("-m", "job=config", "seed=1,2")
    assert done.code == 2
    assert "one configuration at a time" in done.err
    assert not done.files


def test_a_mistake_elsewhere_is_told_as_ever(cli: Cli) -> None:
    done = cli("job=config", "capture.sizes=[0]")
    assert done.code == 2
    assert "capture.sizes: got [0]" in done.err


def test_explaining_needs_a_command_line(tmp_path: Path) -> None:
    config = compose(["job=config"])
    assert config.job is Job.CONFIG
    with pytest.raises(ConfigError, match="needs a command line"):
        run_job(config, tmp_path / "r.json")


# ---- units and keys ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "unit"),
    [
        ("capture.sizes", "a list of tokens"),
        ("capture.max_size", "tokens"),
        ("cache.max_bytes", "bytes"),
        ("cache.lock_timeout_s", "seconds"),
        ("capture.memory_budget", "bytes"),
        ("model.hidden_size", "features"),
        ("attention.block_size", "tokens"),
        ("max_new_tokens", "tokens"),
        ("compiler.threads", "a count"),
        ("model.rope_theta", "a number"),
        ("strict", "true or false"),
        ("report", "text"),
        ("compiler.options", "names with values"),
        ("outputs", "one of: clone, view"),
    ],
)
def test_units_are_read_from_the_documentation(path: str, unit: str) -> None:
    (setting,) = [s for s in walk() if s.path == path]
    assert unit_of(setting) == unit


def test_a_setting_is_in_the_key_or_has_the_reason_why_not() -> None:
    assert key_reason("partition.strategy") is None
    assert key_reason("capture.sizes") == "which graphs are captured, not what is compiled"
    assert key_reason("config.explain") is not None


# ---- presets -------------------------------------------------------------------------------------


def test_the_presets_are_three() -> None:
    assert PRESETS == ["debug", "fast", "safe"]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_valid_as_it_is(preset: str) -> None:
    check(compose([f"preset={preset}"]))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_valid_on_either_device(preset: str, device: str) -> None:
    on_gpu = ["capture.graphs=auto", "debug.poison=false"] if preset == "debug" else []
    config = compose(
        [f"preset={preset}", f"device={device}", *(on_gpu if device == "cuda" else [])]
    )
    validate(resolve(config, device_type=device), device_type=device)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_line_of_a_preset_has_its_reason_and_yields_to_the_command_line(preset: str) -> None:
    text = (CONF / "preset" / f"{preset}.yaml").read_text()
    values = [line for line in text.splitlines() if ": " in line and not line.startswith("#")]
    assert all("#" in line or line.startswith("device:") or "poison" in line for line in values)
    _, origins = compose_with_origins([f"preset={preset}"])
    paths = [p for p, o in origins.items() if o.set_by.startswith("conf/preset/")]
    assert paths
    defaults = {s.path: s.default for s in walk()}
    words = [f"{p}={'null' if defaults[p] is None else str(defaults[p]).lower()}" for p in paths]
    _, after = compose_with_origins([f"preset={preset}", *words, "device=cpu"])
    for path in paths:
        said = after[path].set_by
        assert said.startswith(("command line", "pcgsvc, for device=cpu (command")), path


def test_a_preset_yields_to_a_group_on_the_command_line() -> None:
    assert compose(["preset=fast"]).compiler.name is Compiler.INDUCTOR
    eager = compose(["preset=fast", "compiler=eager", "compiler.passes=null"])
    assert eager.compiler.name is Compiler.EAGER
    assert eager.outputs is Outputs.VIEW


@pytest.mark.slow
def test_debug_runs_a_model_whole(cli: Cli) -> None:
    done = cli("preset=debug", "model.num_layers=1", "capture.sizes=[2]", "bench.enabled=false")
    assert done.code == 0, done.out + done.err
    (report,) = done.reports
    assert report["config"]["debug"]["poison"] is True
    assert all(row["ok"] for row in report["verify"])
    assert (done.folder / "pcgsvc-debug" / "piece_00.fx.py").is_file()


# ---- completion ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_bash_completes_settings(tmp_path: Path) -> None:
    command = str(Path(sys.executable).with_name("pcgsvc"))
    if not Path(command).exists():
        pytest.skip("the console script is not installed")
    script = (
        f'PATH="{Path(command).parent}:$PATH"; eval "$(pcgsvc -sc install=bash)"; '
        'COMP_LINE="pcgsvc capture.gr" COMP_POINT=17; '
        "COMP_WORDS=(pcgsvc capture.gr); COMP_CWORD=1; "
        "hydra_bash_completion; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "capture.graphs=" in done.stdout, done.stderr
