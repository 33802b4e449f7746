"""Facts and keys: everything counts that is not excused, and nothing that differs by accident."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import WIDTH, toy
from torch import nn

from pcgsvc.compilers import environment as facts_module
from pcgsvc.compilers.environment import environment_facts
from pcgsvc.config import Compiler, Config, from_dict, resolve, settings, to_dict
from pcgsvc.config.settings import NOT_IN_KEY
from pcgsvc.forward.specs import InputSpec
from pcgsvc.program.facts import piece_facts, program_facts
from pcgsvc.program.keys import config_facts, key_of

CPU = torch.device("cpu")
PATHS = [s.path for s in settings.walk()]


# ---- settings ------------------------------------------------------------------------------------


def other_value(setting: settings.Setting) -> Any:
    """Return a value that is not the default."""
    if setting.choices:
        return next(c for c in setting.choices if c != setting.default)
    kinds: dict[Any, Any] = {bool: not setting.default, int: 12345, float: 0.125, str: "other"}
    if setting.kind in kinds:
        return kinds[setting.kind]
    return {"k": 1} if setting.kind == dict[str, Any] else [7] if "sizes" in setting.path else ["x"]


def excused(path: str) -> str | None:
    """Return the reason why a setting is not in the key."""
    parts = path.split(".")
    names = [".".join(parts[: n + 1]) for n in range(len(parts))]
    return next((NOT_IN_KEY[name] for name in names if name in NOT_IN_KEY), None)


@pytest.mark.parametrize("path", PATHS)
def test_every_setting_changes_the_key_or_is_excused_with_a_reason(path: str) -> None:
    (setting,) = [s for s in settings.walk() if s.path == path]
    tree: dict[str, Any] = {}
    place = tree
    *groups, name = path.split(".")
    for group in groups:
        place = place.setdefault(group, {})
    place[name] = other_value(setting)
    before, after = config_facts(Config()), config_facts(from_dict(tree))
    assert to_dict(Config()) != to_dict(from_dict(tree))
    if excused(path) is None:
        assert key_of(before) != key_of(after)
        changed = {n for n in {*before, *after} if before.get(n) != after.get(n)}
        assert all(n.startswith(f"config.{path}") for n in changed)
    else:
        assert len(str(excused(path))) > 5
        assert before == after


def test_no_name_is_excused_that_no_setting_has() -> None:
    groups = {".".join(p.split(".")[:n]) for p in PATHS for n in range(1, p.count(".") + 1)}
    assert set(NOT_IN_KEY) <= groups | set(PATHS)


def test_what_changes_the_code_is_not_excused() -> None:
    for path in ("compiler.name", "compiler.options", "partition.splitting_ops", "dtype"):
        assert excused(path) is None
    for path in ("partition.strategy", "partition.extra_splitting_ops", "model.norm_eps"):
        assert excused(path) is None


# ---- environment ---------------------------------------------------------------------------------


def resolved(compiler: str = "eager") -> Config:
    config = resolve(Config(), device_type="cpu")
    config.compiler.name = Compiler(compiler)
    return config


def environment_key(compiler: str) -> str:
    return key_of(environment_facts(resolved(compiler), CPU))


def as_attribute(target: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(target, name, value)


class Restored:
    """Calls a setter of torch's, and again with the old value at the end."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], None], value: Any) -> None:
        self._get, self._put, self._value = get, put, value

    def __call__(self, patch: pytest.MonkeyPatch) -> None:
        old = self._get()
        patch.setattr(self, "_undo", lambda: self._put(old), raising=False)
        self._put(self._value)

    def undo(self) -> None:
        self._undo()


def autocast_dtype() -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


ENVIRONMENT: dict[str, Any] = {
    "torch": as_attribute(torch, "__version__", "9.9"),
    "torch's commit": as_attribute(torch.version, "git_version", "abc"),
    "CUDA": as_attribute(torch.version, "cuda", "99"),
    "numpy": as_attribute(facts_module.numpy, "__version__", "9"),
    "Python": as_attribute(facts_module.platform, "python_version", lambda: "3.99"),
    "machine": as_attribute(facts_module.platform, "machine", lambda: "m68k"),
    "our version": as_attribute(facts_module, "version_facts", lambda: {"pcgsvc": "9"}),
    "default dtype": Restored(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "deterministic": Restored(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "autocast": Restored(
        lambda: torch.is_autocast_enabled("cpu"),
        lambda on: torch.set_autocast_enabled("cpu", on),
        True,
    ),
    "autocast's dtype": Restored(
        autocast_dtype, lambda dtype: torch.set_autocast_dtype("cpu", dtype), torch.float16
    ),
    "tf32 of cuDNN": Restored(
        lambda: torch.backends.cudnn.allow_tf32,
        lambda on: setattr(torch.backends.cudnn, "allow_tf32", on),
        False,
    ),
    "attention kernels": Restored(
        torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False
    ),
    "reduced precision": Restored(
        lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        lambda on: setattr(
            torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", on
        ),
        False,
    ),
}


@pytest.mark.parametrize("what", ENVIRONMENT)
def test_every_fact_of_the_environment_changes_the_key(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    before = environment_key("eager")
    change = ENVIRONMENT[what]
    change(monkeypatch)
    try:
        after = environment_key("eager")
    finally:
        if isinstance(change, Restored):
            change.undo()
    assert before != after
    monkeypatch.undo()
    assert environment_key("eager") == before


INDUCTOR: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "CPU capability": as_attribute(torch.backends.cpu, "get_cpu_capability", lambda: "AVX9"),
    "C++ compiler": as_attribute(facts_module, "_cpp_compiler", lambda: "cc 1"),
    "threads": as_attribute(torch, "get_num_threads", lambda: 99),
    "Inductor's settings": as_attribute(
        facts_module.torch_private, "inductor_settings", lambda: {"max_autotune": "True"}
    ),
    "Inductor's environment": lambda patch: patch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1"),
    "compiler by name": lambda patch: patch.setenv("CXX", "g++"),
}


@pytest.mark.parametrize("what", INDUCTOR)
def test_what_only_inductor_depends_on_changes_only_its_keys(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    real = facts_module.torch_private.inductor_settings
    monkeypatch.setattr(facts_module.torch_private, "inductor_settings", dict)  # no slow import
    eager, inductor = environment_key("eager"), environment_key("inductor")
    assert real is not dict
    INDUCTOR[what](monkeypatch)
    assert environment_key("eager") == eager
    assert environment_key("inductor") != inductor


def test_all_that_the_cpp_compiler_says_of_itself_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Inductor hashes all of `-v`; of one version, another build finds none of the stored kernels.
    found = []
    for number, words in enumerate(["", "Configured with: a", "Configured with: b"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        text = f"#!/bin/sh\n[ $1 = -v ] || exit 1\necho '{words}' >&2\necho gcc version 9 >&2\n"
        (folder / "g++").write_text(text)
        (folder / "g++").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")
        found.append(facts_module._cpp_compiler())
    assert len(set(found)) == 3
    assert all(text.startswith("gcc version 9, ") for text in found)


def test_where_the_compilers_caches_lie_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_module.torch_private, "inductor_settings", dict)
    before = environment_key("inductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("CCACHE_DIR", "/elsewhere")
    assert environment_key("inductor") == before


def test_every_setting_of_float32_precision_counts_and_none_makes_the_facts_fail() -> None:
    # Torch raises on reading allow_tf32 once the new ones are used. In a process of its own, since
    # the defaults of some cannot be set again.
    code = (
        "import torch\n"
        "from pcgsvc.config import Config, resolve\n"
        "from pcgsvc.compilers.environment import environment_facts\n"
        "from pcgsvc.program.keys import key_of\n"
        "config, cpu = resolve(Config(), device_type='cpu'), torch.device('cpu')\n"
        "print(key_of(environment_facts(config, cpu)))\n"
        "torch.set_float32_matmul_precision('high')\n"
        "print(key_of(environment_facts(config, cpu)))\n"
        "for word in ('ieee', 'tf32'):\n"
        "    torch.backends.cuda.matmul.fp32_precision = word\n"
        "    print(key_of(environment_facts(config, cpu)))\n"
    )
    keys = python(code).split()
    assert len(set(keys)) == 3
    assert keys[1] == keys[3]  # two ways to say one thing


# ---- programs ------------------------------------------------------------------------------------


def module_key(module: Callable[..., Any], *inputs: InputSpec, **constants: Any) -> str:
    given = inputs or (spec(),)
    environment = environment_facts(resolved(), CPU)
    return key_of(program_facts(resolved(), module, given, constants, environment))


def spec(shape: tuple[int, ...] = (2, WIDTH), dim: int | None = 0, **kind: Any) -> InputSpec:
    dims = () if dim is None else (dim,)
    return InputSpec(name=kind.pop("name", "x"), example=torch.zeros(shape, **kind), dims=dims)


def test_the_input_signature_counts_but_not_the_number_of_rows() -> None:
    module = toy(1)
    keys = [
        module_key(module),
        module_key(module, spec((2, WIDTH + 1))),
        module_key(module, spec((2, WIDTH, 1))),
        module_key(module, spec(dim=1)),
        module_key(module, spec(dim=None)),
        module_key(module, spec(dtype=torch.float64)),
        module_key(module, spec(name="y")),
        module_key(module, spec(), spec(name="y")),
        module_key(module, spec(), scale=1),
        module_key(module, spec(), scale=True),
        module_key(module, spec(), scale=1.0),
    ]
    assert len(set(keys)) == len(keys)
    assert module_key(module, spec((7, WIDTH))) == keys[0]


class Tree(nn.Module):
    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.a = nn.ReLU()
        self.b = self.a if shared else nn.ReLU()


def test_the_module_tree_counts_but_not_the_values_in_it() -> None:
    module = toy(1)
    keys = [module_key(module), module_key(toy(2))]
    assert module_key(toy(1, seed=5)) == keys[0]
    module.blocks[0].register_buffer("more", torch.zeros(1))
    keys.append(module_key(module))
    keys += [module_key(Tree(True)), module_key(Tree(False))]
    tied = toy(1)
    tied.blocks[0].down = tied.blocks[0].up  # type: ignore[union-attr]
    keys.append(module_key(tied))
    keys += [module_key(toy(1).double()), module_key(toy(1).requires_grad_(False))]
    assert len(set(keys)) == len(keys)


def test_a_sparse_buffer_has_a_signature() -> None:
    module = toy(1)
    module.register_buffer("sparse", torch.eye(2).to_sparse())
    assert module_key(module) != module_key(toy(1))


def test_the_key_of_a_piece_holds_the_identities_of_its_ops() -> None:
    def key(**ops: str) -> str:
        return key_of(piece_facts("abc", resolved(), {}, num_outputs=1, ops=ops))

    assert len({key(), key(a="1"), key(a="2"), key(b="1")}) == 4


def test_facts_are_json_and_survive_it() -> None:
    found = program_facts(resolved(), toy(1), [spec()], {"scale": {1, 2}}, {})
    assert json.loads(json.dumps(found)) == found


# ---- places and people ---------------------------------------------------------------------------

FACTS = """
import json, sys, torch
sys.path.insert(0, {tests!r})
from core_helpers import toy
from test_keys import CPU, resolved, spec
from pcgsvc.compilers.environment import environment_facts
from pcgsvc.program.facts import program_facts
kinds = ("eager", "inductor")
configs = [resolved(kind) for kind in kinds]
found = [
    program_facts(c, toy(1), [spec()], {{}}, environment_facts(c, CPU)) for c in configs
]
print(json.dumps(found))
"""


def python(code: str, folder: Path | None = None, **environment: str) -> str:
    """Run code in a new process and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def homes(tmp_path: Path) -> list[dict[str, Any]]:
    """Two folders and environments that have nothing in common."""
    found = []
    for name in ("ann", "bob"):
        folder = tmp_path / name
        (folder / "tmp").mkdir(parents=True)
        place = {"HOME": folder, "TMPDIR": folder / "tmp", "XDG_CACHE_HOME": folder / "xdg"}
        place |= {"PCGSVC_CACHE_DIR": folder / "c", "TORCHINDUCTOR_CACHE_DIR": folder / "i"}
        words = {key: str(path) for key, path in place.items()}
        words |= {"USER": name, "LOGNAME": name, "HOSTNAME": name, "PYTHONHASHSEED": "0"}
        found.append({"folder": folder, **words})
    found[1]["PYTHONHASHSEED"] = "1"
    return found


@pytest.mark.slow
def test_facts_of_either_compiler_hold_no_path_user_host_or_process(
    homes: list[dict[str, Any]], tmp_path: Path
) -> None:
    code = FACTS.format(tests=str(Path(__file__).parent))
    one, other = (json.loads(python(code, **home)) for home in homes)
    assert one == other
    text = json.dumps(one)
    for word in (str(tmp_path), str(Path.home()), str(Path(__file__).parent), "ann", os.uname()[1]):
        assert f"{word}" not in text.replace("tanh", ""), word
