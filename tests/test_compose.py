"""From overrides and YAML to plain settings, in a process whose Hydra state is not ours."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.singleton import Singleton
from hydra.version import VersionBase
from model_helpers import config_of
from omegaconf import OmegaConf
from packaging.specifiers import SpecifierSet

import pcgsvc
from pcgsvc.config import CacheMode, Compiler, Config, Mode
from pcgsvc.config.compose import SCHEMA, compose, compose_command
from pcgsvc.config.settings import walk
from pcgsvc.errors import ConfigError

CONF = Path(__file__).parents[1] / "conf"
OPTIONS = sorted(str(p.relative_to(CONF)) for p in CONF.glob("*/*.yaml"))


@pytest.fixture(autouse=True)
def host_state() -> Iterator[None]:
    """Put Hydra's singletons back, so that no test sees another's."""
    before = copy.copy(Singleton.get_state())
    yield
    Singleton.set_state(before)


@pytest.fixture
def yaml_dir(tmp_path: Path) -> Callable[..., str]:
    """Return a writer of YAML files (`name.yaml` or `group/name.yaml`) into one config folder."""

    def write(**files: str) -> str:
        for name, text in files.items():
            path = tmp_path / f"{name.replace('__', '/')}.yaml"
            path.parent.mkdir(exist_ok=True)
            path.write_text(textwrap.dedent(text))
        return str(tmp_path)

    return write


# ---- what is shipped -----------------------------------------------------------------------------


def test_shipped_options_are_found() -> None:
    assert {"model/llama.yaml", "attention/varlen.yaml", "compiler/auto.yaml"} <= set(OPTIONS)


@pytest.mark.parametrize("option", [o for o in OPTIONS if not o.startswith("preset/")])
def test_each_shipped_option_composes_and_picks_its_name(option: str) -> None:
    group, _, name = option.removesuffix(".yaml").partition("/")
    picked = getattr(compose([f"{group}={name}"]), group).name
    if isinstance(picked, Compiler):
        picked = picked.value
    assert picked == (None if option == "compiler/auto.yaml" else name)


def test_nothing_given_composes_to_the_defaults_of_the_dataclasses() -> None:
    assert compose([]) == Config()


def test_each_setting_can_be_set_on_the_command_line_to_its_default() -> None:
    # One override each, so that a setting that Hydra's struct mode or grammar refuses is found.
    words = {"None": "null", "True": "true", "False": "false"}
    overrides = [
        f"{s.path}={words.get(str(s.default), s.default)}"
        for s in walk()
        if not isinstance(s.default, (list, dict, int)) or isinstance(s.default, bool)
    ]
    assert len(overrides) > 25
    assert compose(overrides) == Config()


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("capture.sizes=[1,2,4]", "capture.sizes", [1, 2, 4]),
        ("capture.sizes=[1, 2, 4]", "capture.sizes", [1, 2, 4]),
        ('capture.sizes="1,2,4"', "capture.sizes", [1, 2, 4]),
        ('capture.sizes="1:16:8"', "capture.sizes", [1, 8, 16]),
        ("capture.sizes=1:16:8", "capture.sizes", [1, 8, 16]),
        ("capture.sizes=null", "capture.sizes", None),
        ("cache.mode=off", "cache.mode", CacheMode.OFF),
        ("cache.mode=false", "cache.mode", CacheMode.OFF),
        ("mode=none", "mode", Mode.NONE),
        ("partition.splitting_ops=[aten::mm,a.b]", "partition.splitting_ops", ["aten::mm", "a.b"]),
        ("compiler.options={max_autotune: true}", "compiler.options", {"max_autotune": True}),
        ("compiler.options.x=1", "compiler.options", {"x": 1}),
        ("+compiler.options.x=1", "compiler.options", {"x": 1}),
        ("device=cuda:0", "device", "cuda:0"),
        ("capture.memory_budget=256MiB", "capture.memory_budget", 256 << 20),
        (
            "prompt=Name three colours of the rainbow.",
            "prompt",
            "Name three colours of the rainbow.",
        ),
        ('prompt="one, two"', "prompt", "one, two"),
        ("model.rope_theta=500000", "model.rope_theta", 500000.0),
        ("model.preset=1b", "model.preset", "1b"),
    ],
)
def test_command_line_forms(override: str, path: str, value: Any) -> None:
    found: Any = compose([override])
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value


def test_the_tests_own_reading_of_plain_words_gives_what_hydra_gives() -> None:
    words = ["model=encoder", "model.num_layers=2", "attention=varlen", "compiler=inductor"]
    words += ["cache.mode=off", "mode=none", "capture.sizes=[2,4]", "strict=true", "dtype=float32"]
    words += ["partition.splitting_ops=null", "cache.dir=/a b/c", "model.inputs={x: {value: 1}}"]
    assert config_of(words) == compose(words) != Config()


# ---- a user's own YAML ---------------------------------------------------------------------------


def test_a_users_option_joins_the_shipped_ones(yaml_dir: Callable[..., str]) -> None:
    folder = yaml_dir(model__mine="name: llama\nnum_layers: 2\n")
    assert compose(["model=mine"], config_dir=folder).model.num_layers == 2
    assert compose(["model=llama"], config_dir=folder).model.num_layers is None


def test_a_users_option_comes_before_a_shipped_one_of_that_name(
    yaml_dir: Callable[..., str],
) -> None:
    folder = yaml_dir(model__llama="name: llama\nnum_layers: 3\n")
    assert compose([], config_dir=folder).model.num_layers == 3


def test_a_users_primary_config_builds_on_the_shipped_one(yaml_dir: Callable[..., str]) -> None:
    folder = yaml_dir(
        mine="""
        defaults: [config, {override model: two_regions}, _self_]
        mode: piecewise
        cache: {mode: off}
        capture: {sizes: "1:16:8", graphs: off}
        report: ${oc.env:PWD}/${mode}.json
        """
    )
    config = compose(["seed=3"], config_dir=folder, config_name="mine")
    assert (config.model.name, config.mode, config.seed) == ("two_regions", Mode.PIECEWISE, 3)
    assert config.cache.mode is CacheMode.OFF
    assert config.capture.graphs.value == "off"
    assert config.capture.sizes == [1, 8, 16]
    assert config.report is not None
    assert config.report.endswith("/piecewise.json")


def test_a_users_primary_config_without_ours_keeps_the_defaults(
    yaml_dir: Callable[..., str],
) -> None:
    folder = yaml_dir(bare="mode: none\n")
    assert compose([], config_dir=folder, config_name="bare") == Config(mode=Mode.NONE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("defaults: [config, _self_]\ncapture: {sizes: 1:32:8}", r"^capture\.sizes: got 5528"),
        ("defaults: [config, _self_]\ncapture: {siezs: [1]}", r"mine.*\n?.*'siezs' not in|siezs"),
        ("capture: {siezs: [1]}", r"^capture\.siezs: there is no such setting; did you mean"),
        ("defaults: [config, _self_]\nmode: [", r"mine\.yaml"),
        ("mode: ???", r"(?i)missing mandatory value: mode"),
        ("defaults: [config, _self_]\nreport: ${nothing.there}", r"nothing\.there"),
        ("defaults: [config, _self_]\nreport: ${hydra:runtime.cwd}/x", r"only while a job runs"),
        ("defaults: [config, _self_]\nreport: ${oc.env:PCG_NOPE}", r"'PCG_NOPE' not found"),
        ("defaults: [config, {model: lama}]", r"model"),
        ("- a\n- b\n", r"mine"),
    ],
)
def test_a_users_mistake_in_yaml_is_one_config_error(
    yaml_dir: Callable[..., str], text: str, message: str
) -> None:
    folder = yaml_dir(mine=text)
    with pytest.raises(ConfigError, match=message):
        compose([], config_dir=folder, config_name="mine")


def test_a_config_folder_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^config_dir: '/no/such' is no folder"):
        compose([], config_dir="/no/such")


def test_a_primary_config_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothere"):
        compose([], config_name="nothere")


# ---- mistakes on the command line ----------------------------------------------------------------

BAD = [
    (
        "mode=piecewse",
        r"^mode: got 'piecewse'; did you mean 'piecewise'\? Choices: none, piecewise",
    ),
    ("mod=piecewise", r"^mod: there is no such setting; did you mean 'mode'\?"),
    ("x=1", r"^x: there is no such setting"),
    ("+x=1", r"^x: there is no such setting"),
    ("++x=1", r"^x: there is no such setting"),
    ("capture.size=[1]", r"^capture\.size: .*did you mean 'capture\.sizes'\?"),
    ("+capture.size=[1]", r"^capture\.size: .*did you mean 'capture\.sizes'\?"),
    ("sizes=[1]", r"^sizes: .*did you mean capture\.sizes\?"),
    ("~zzz", r"zzz"),
    ("mode.x=1", r"^mode\.x: there is no such setting|mode"),
    ("capture.sizes=1,2,4", r"Ambiguous value .*\n.*capture\.sizes='\[1,2,4\]'.*-m"),
    ("capture.sizes=[1,2", r"\[1,2"),
    ("prompt=what, when", r"prompt"),
    ("prompt=3", r"""^prompt: got 3, text is needed; write prompt='"3"'"""),
    (
        "model=lama",
        r"^model: got 'lama'; did you mean 'llama'\? Choices: encoder, .*two_regions\.$",
    ),
    ("preset=q", r"^preset: got 'q'\. Choices: debug, fast, safe\.$"),
    ("plan", r"^plan: a setting is written name=value; did you mean job=plan\?"),
    ("zzz", r"^zzz: a setting is written name=value\. pcgsvc -h"),
    ("capture.sizes=[1,", r"\nQuote lists"),  # what a space in a list makes of it
    ("strict=maybe", r"^strict: got 'maybe', true or false is needed"),
    ("seed=1.5", r"^seed: got 1\.5, a whole number is needed"),
    ("report=${hydra:runtime.output_dir}/r.json", r"only while a job runs"),
    ("hydra.nope=1", r"hydra\.nope"),
]


@pytest.mark.parametrize(("override", "message"), BAD, ids=[b[0] for b in BAD])
def test_a_mistake_on_the_command_line_is_one_config_error(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose([override])


@pytest.mark.parametrize("override", [b[0] for b in BAD])
def test_a_mistake_is_answered_without_hydras_insides_or_the_plus_sign_that_is_refused_as_well(
    override: str,
) -> None:
    with pytest.raises(ConfigError) as raised:
        compose([override])
    if not override.startswith("hydra."):
        assert "use +" not in str(raised.value)
    assert "pkg://" not in str(raised.value)


# ---- sweeps --------------------------------------------------------------------------------------


def modes_and_sizes(jobs: list[Config]) -> list[tuple[str, list[int] | None]]:
    return [(job.mode.value, job.capture.sizes) for job in jobs]


def test_a_sweep_is_the_product_of_its_values_in_hydras_order() -> None:
    words = ["capture.sizes=[1],[1,2]", "mode=full,none", "seed=5"]
    command = compose_command([*words, "hydra.verbose=true"], multirun=True)
    jobs = command.jobs
    assert modes_and_sizes(jobs) == [
        ("full", [1]),
        ("none", [1]),
        ("full", [1, 2]),
        ("none", [1, 2]),
    ]
    assert {job.seed for job in jobs} == {5}
    assert command.multirun
    assert command.overrides is not None
    assert command.overrides[1] == ["capture.sizes=[1]", "mode=none", "seed=5"]


def test_one_job_without_a_sweep() -> None:
    one = compose_command(["mode=none"], multirun=False)
    swept = compose_command(["mode=none"], multirun=True)
    assert one.jobs == swept.jobs == [Config(mode=Mode.NONE)]
    assert (one.multirun, swept.multirun) == (False, True)


def test_hydra_mode_multirun_is_a_sweep_as_well() -> None:
    command = compose_command(["mode=full,none", "hydra.mode=MULTIRUN"], multirun=False)
    jobs = command.jobs
    assert command.multirun
    assert [job.mode for job in jobs] == [Mode.FULL, Mode.NONE]


def test_a_sweep_over_a_group_and_a_glob() -> None:
    jobs = compose_command(["attention=glob(*)", "seed=range(2)"], multirun=True).jobs
    assert sorted({job.attention.name for job in jobs}) == sorted(
        Path(o).stem for o in OPTIONS if o.startswith("attention/")
    )
    assert [job.seed for job in jobs[:2]] == [0, 1]


def test_sweep_parameters_in_a_users_yaml_are_jobs(yaml_dir: Callable[..., str]) -> None:
    folder = yaml_dir(
        mine="""
        defaults: [config, _self_]
        hydra: {mode: MULTIRUN, sweeper: {params: {mode: "full,none", seed: 1}}}
        """
    )
    jobs = compose_command([], multirun=False, config_dir=folder, config_name="mine").jobs
    assert [(job.mode, job.seed) for job in jobs] == [(Mode.FULL, 1), (Mode.NONE, 1)]
    with pytest.raises(ConfigError, match=r"^mode: got 'nope'"):
        compose_command(["mode=full,nope"], multirun=False, config_dir=folder, config_name="mine")


def test_what_another_sweeper_keeps_fixed_is_composed(yaml_dir: Callable[..., str]) -> None:
    folder = yaml_dir(
        mine="""
        defaults: [config, _self_]
        hydra: {sweeper: {_target_: some.other.Sweeper}}
        """
    )
    there: dict[str, Any] = {"multirun": True, "config_dir": folder, "config_name": "mine"}
    command = compose_command(["mode=full,none", "seed=4"], **there)
    assert [job.seed for job in command.jobs] == [4]
    assert command.overrides is None
    with pytest.raises(ConfigError, match=r"^strict: got 'maybe'"):
        compose_command(["mode=full,none", "strict=maybe"], **there)


@pytest.mark.parametrize(
    "overrides",
    [
        ["mode=full,nope"],
        ["mode=full", "capture.sizes=[1],x"],
        ["hydra.run.dir=a,b"],
        ["hydra.sweeper.params={mode: full}"],  # Hydra itself cannot
        ["seed=interval(0,1)"],
    ],
)
def test_a_bad_value_anywhere_in_a_sweep_is_one_config_error(overrides: list[str]) -> None:
    with pytest.raises(ConfigError):
        compose_command(overrides, multirun=True)


# ---- habits --------------------------------------------------------------------------------------


def test_variables_of_ones_own_go_into_the_user_group() -> None:
    words = ["user.width=64", "model.num_layers=3", "model.hidden_size=${user.width}"]
    config = pcgsvc.load_config([*words, "seed=${model.num_layers}"])
    assert (config.user, config.model.hidden_size, config.seed) == ({"width": 64}, 64, 3)
    config = pcgsvc.load_config(config={"user": {"deep": {"n": 2}}, "mode": "none"})
    assert config.user == {"deep": {"n": 2}}


@pytest.fixture
def own_groups(tmp_path: Path) -> str:
    (tmp_path / "exp").mkdir()
    for name in ("one", "two"):
        (tmp_path / "exp" / f"{name}.yaml").write_text("# @package _global_\nseed: 3\n")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("given", "answer"), [("exp=two", r"\+exp=two"), ("exp=tow", r"\+exp=one\. Options: one, two")]
)
def test_an_option_of_a_group_without_its_plus_is_answered_with_the_plus(
    own_groups: str, given: str, answer: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^exp: no defaults list names .* plus: {answer}"):
        pcgsvc.load_config([given], config_dir=own_groups)
    assert pcgsvc.load_config(["+exp=two"], config_dir=own_groups).seed == 3


@pytest.mark.parametrize("path", ["model", "attention", "seed", "capture.sizes", "user"])
def test_a_setting_is_not_removed(path: str) -> None:
    with pytest.raises(ConfigError, match=rf"^~{path}: .* {path}=… gives it another value"):
        pcgsvc.load_config([f"~{path}"])


def test_what_is_ones_own_is_removed() -> None:
    config = pcgsvc.load_config(["user.a=1", "user.b=2", "~user.a", "~preset"])
    assert config.user == {"b": 2}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("bench=off", "bench.enabled=false"),
        ("bench=true", "bench.enabled=true"),
        ("cache=off", "cache.mode=off"),
        ("partition=breakable", "partition.strategy=breakable"),
        ("capture=off", "capture.graphs=off"),
    ],
)
def test_a_word_in_place_of_a_group_is_answered_with_the_setting(given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {meant}\\?"):
        pcgsvc.load_config([given])
    pcgsvc.load_config([meant])


# ---- a host that uses Hydra ----------------------------------------------------------------------


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Any]:
    """A process that has itself initialised Hydra, with a config and a stored node of its own."""
    (tmp_path / "host.yaml").write_text("mine: 1\n")
    ConfigStore.instance().store(name="hosts_node", node={"a": 1})
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.2"):
        yield GlobalHydra.instance().hydra


def store_and_global() -> tuple[list[str], Any, Any]:
    return (
        sorted(ConfigStore.instance().repo),
        GlobalHydra.instance().hydra,
        VersionBase.instance().getbase(),
    )


def test_loading_leaves_a_hosts_hydra_as_it_was(host: Any) -> None:
    before = store_and_global()
    assert pcgsvc.load_config(["mode=none"]).mode is Mode.NONE
    with pytest.raises(ConfigError):
        pcgsvc.load_config(["mode=nope"])
    assert store_and_global() == before
    assert GlobalHydra.instance().hydra is host
    assert hydra.compose("host").mine == 1


def test_loading_in_a_process_without_hydra_leaves_no_trace() -> None:
    GlobalHydra.instance().clear()
    before = store_and_global()
    pcgsvc.load_config(["mode=none"])
    assert store_and_global() == before
    assert not GlobalHydra.instance().is_initialized()
    assert f"{SCHEMA}.yaml" not in ConfigStore.instance().repo


def test_loading_from_three_threads_at_once_gives_each_its_own(host: Any) -> None:
    def load(seed: int) -> Config:
        return pcgsvc.load_config([f"seed={seed}", f"model.num_layers={seed + 1}"])

    before = store_and_global()
    with ThreadPoolExecutor(3) as pool:
        configs = list(pool.map(load, range(12)))
    assert [(c.seed, c.model.num_layers) for c in configs] == [(i, i + 1) for i in range(12)]
    assert store_and_global() == before


def test_runners_load_from_three_threads_at_once_in_a_process_that_uses_hydra(host: Any) -> None:
    words = ["device=cpu", "compiler=eager", "model.num_layers=1", "capture.sizes=[1,2]"]

    def load_and_call(seed: int) -> torch.Tensor:
        with pcgsvc.load_runner([*words, f"seed={seed}", "cache.mode=off"]) as runner:
            first, again = (runner(torch.tensor([1, 2]), torch.tensor([0, 1])) for _ in "ab")
            assert torch.equal(first, again)
            return typing.cast(torch.Tensor, first)

    before = store_and_global()
    # First here: where torch 2.11 is built for CUDA and finds no GPU, a process crashes at a trace
    # after the thread of its first one has ended.
    alone = load_and_call(0)
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(load_and_call, (0, 1, 0)))
    assert torch.equal(results[0], alone)
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], results[1])
    assert store_and_global() == before


def test_a_hosts_node_is_read_and_left_as_it_was() -> None:
    host_config = OmegaConf.create(
        {"seed": 7, "pcg": {"seed": "${seed}", "mode": "full", "hydra": {"x": "${nope:}"}}}
    )
    twin = copy.deepcopy(host_config)
    assert pcgsvc.load_config(config=host_config.pcg) == Config(seed=7, mode=Mode.FULL)
    assert host_config == twin


def test_a_config_may_be_a_dict_or_a_config_and_comes_back_as_a_copy() -> None:
    assert pcgsvc.load_config(config={"mode": "none"}) == Config(mode=Mode.NONE)
    sizes = {"capture": {"sizes": OmegaConf.create([1, 2])}}
    assert pcgsvc.load_config(config=sizes).capture.sizes == [1, 2]
    given = Config(mode=Mode.FULL)
    loaded = pcgsvc.load_config(config=given)
    assert loaded == given
    assert loaded is not given


@pytest.mark.parametrize("bad", [3, "mode=full", ["mode=full"], OmegaConf.create([1])])
def test_a_config_of_another_kind_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match=r"^config: got \w+; a Config, a mapping or a DictConfig"):
        pcgsvc.load_config(config=bad)


def test_a_config_with_overrides_is_refused() -> None:
    with pytest.raises(ConfigError, match="pass one"):
        pcgsvc.load_config(["mode=full"], config=Config())


# ---- import --------------------------------------------------------------------------------------

IMPORT = """
import logging, sys, threading
root = logging.getLogger()
before = (list(root.handlers), root.level, threading.active_count())
import pcgsvc
light = sorted(m for m in ("torch", "hydra", "omegaconf", "rich", "diskcache") if m in sys.modules)
assert not light, light
for name in pcgsvc.__all__:
    getattr(pcgsvc, name)
heavy = sorted(m for m in sys.modules if m.startswith(("torch._inductor", "torch._dynamo.")))
assert not heavy, heavy
assert not {"hydra", "omegaconf"} & set(sys.modules), "only overrides need them"
from hydra.core.global_hydra import GlobalHydra
from hydra.core.config_store import ConfigStore
assert not GlobalHydra.instance().is_initialized()
assert "pcgsvc_schema.yaml" not in ConfigStore.instance().repo
assert (list(root.handlers), root.level, threading.active_count()) == before
assert not logging.getLogger("pcgsvc").handlers
"""


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("mode=piecewise", r"^overrides: got 'mode=piecewise'; a list of them is needed"),
        (None, r"^overrides: got None; a list"),
        ({"mode": "none"}, r"^overrides: got \{'mode': 'none'\}; .*config="),
        (["mode=none", 3], r"^overrides: got 3 among them; text is needed"),
    ],
)
def test_overrides_that_are_no_list_of_text_are_refused(bad: Any, words: str) -> None:
    for load in (pcgsvc.load_config, pcgsvc.load_runner):
        with pytest.raises(ConfigError, match=words):
            load(bad)


def test_import_is_cheap_and_touches_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_a_target_in_the_settings_is_refused_and_not_run() -> None:
    with pytest.raises(ConfigError, match="_target_"):
        pcgsvc.load_config(["+model._target_=pytest.fail"])
    with pytest.raises(ConfigError, match="_target_"):
        pcgsvc.load_config(config={"model": {"_target_": "pytest.fail", "msg": "run"}})


def test_pythons_on_which_hydra_s_parser_fails_are_excluded() -> None:
    supported = SpecifierSet(str(metadata.metadata("pcgsvc")["Requires-Python"]))
    assert supported.contains("3.13.9")
    assert not supported.contains("3.14.0")
