"""`model=module`: a user's module in a folder of its own, run by the command line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import Cli, Done
from omegaconf import OmegaConf

import pcgsvc
from pcgsvc.config import from_dict
from pcgsvc.errors import ConfigError
from pcgsvc.jobs.preflight import check
from pcgsvc.models.described import read_inputs

FAST = ["compiler=eager", "capture.sizes=[2,4]", "bench.enabled=false"]
SOURCE = """
import dataclasses
from typing import Any

import torch
from torch import nn

import pcgsvc


@pcgsvc.splitting_op("usermod::attend", mutates_args=("out",))
def attend(x: torch.Tensor, out: torch.Tensor) -> None:
    assert pcgsvc.current_context().query_lens
    out.copy_(x * 2)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    parts: Any = None


class Model(nn.Module):
    def __init__(self, width: int = 8, depth: int = 2, *, name: str = "m") -> None:
        super().__init__()
        if width < 1:
            raise ValueError("no width")  # the check
        self.embed = nn.Embedding(16, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.register_buffer("calls", torch.zeros(1, dtype=torch.long))

    def forward(self, ids, positions, features=None, *, scale: float = 1.0, flags=()):
        self.calls += 1
        x = self.embed(ids) + positions[:, None]
        if features is not None:
            x = x + features
        for layer in self.layers:
            out = torch.empty_like(x)
            torch.ops.usermod.attend(layer(x), out)
            x = out.tanh()
        return Output(x * scale, {"ids": ids, "sum": [x.sum(-1), None]})


class WithExamples(Model):
    def example_inputs(self, rows, generator):
        return {
            "ids": torch.randint(16, (rows,), generator=generator),
            "positions": torch.arange(rows),
            "features": torch.randn(rows, 8, generator=generator),
            "scale": 0.5,
        }


class OneArgument(Model):
    @staticmethod
    def example_inputs(rows):
        return torch.randint(16, (rows,)), torch.arange(rows)


class Wrong(Model):
    def example_inputs(self, rows, generator):
        return torch.zeros(2 * rows, dtype=torch.long), torch.arange(2 * rows)


class Fixed(Model):
    def example_inputs(self, rows, generator):
        return torch.zeros(4, dtype=torch.long), torch.arange(4)


class Varies(Model):
    def example_inputs(self, rows, generator):
        ids = torch.zeros(rows, dtype=torch.long)
        return {"ids": ids, "positions": ids, "scale": float(rows)}


class Fails(Model):
    def example_inputs(self, rows, generator):
        return [][rows]  # the example


class Branches(Model):
    def forward(self, x):
        if x.sum() > 0:  # the branch
            return x
        return x * 2


class Sets(Model):
    def forward(self, x):
        y = x * 2
        self.last = y * 3  # the tensor
        return y


class Counts(Model):
    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, x):
        self.count += 1  # the number
        return x * 2


class Prints(Model):
    def forward(self, x):
        print("x is", x)  # the print
        return x * 2


class Attends(nn.Module):
    attention_spec = pcgsvc.AttentionSpec(
        num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, scale=0.5, max_position=16
    )

    def forward(self, x):
        q, k, v = x.split((8, 4, 4), -1)
        out = torch.empty_like(q).view(-1, 2, 4)
        torch.ops.pcgsvc.attention(q.view(-1, 2, 4), k.view(-1, 1, 4), v.view(-1, 1, 4), out, 0)
        return out


def make(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


def gives_a_number() -> int:
    return 3


class NoModule:
    pass


NUMBER = 3
"""
IDS = "ids: {shape: [tokens], dtype: int64, high: 16}"
POSITIONS = "positions: {shape: [tokens], dtype: int64, fill: arange}"


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a user's module, of a name that no other test has used, and return its file."""
    folder = tmp_path / "users code"
    folder.mkdir()
    name = re.sub(r"\W", "_", f"usermod_{tmp_path.name}")
    file = folder / f"{name}.py"
    file.write_text(SOURCE.replace("usermod::", f"{name}::").replace("ops.usermod", f"ops.{name}"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return file


def line_of(file: Path, comment: str) -> str:
    (at,) = [n for n, line in enumerate(file.read_text().splitlines(), 1) if f"# {comment}" in line]
    return f"{file}:{at}"


def run(cli: Cli, file: Path, target: str, *words: str) -> Done:
    return cli("model=module", f"model.target='{file}:{target}'", *FAST, *words)


# ---- it runs -------------------------------------------------------------------------------------


def test_a_module_with_described_inputs_runs_cold_and_warm(
    cli: Cli,
    user: Path,
    validate_report: Any,
) -> None:
    words = [
        f"model.inputs={{{IDS}, {POSITIONS}, scale: 2.0, flags: {{value: [1, 2]}}}}",
        "model.kwargs={width: 4, depth: 3}",
        "mode=piecewise",
    ]
    done = run(cli, user, "Model", *words)
    assert done.code == 0, done.err
    (report,) = done.reports
    validate_report(report)
    assert report["compile"]["start"] == "cold"
    assert report["partition"]["num_boundaries"] == 3
    assert report["config"]["dtype"] == "float32"
    assert all(row["ok"] for row in report["verify"])
    assert len(report["verify"]) == 2
    assert f"{user.name}:Model" in done.out.replace("\n", "")
    assert "attention" not in done.out
    assert run(cli, user, "Model", *words).reports[-1]["compile"]["start"] == "warm"


@pytest.mark.parametrize("target", ["WithExamples", "OneArgument"])
def test_a_module_that_makes_its_own_examples_runs(cli: Cli, user: Path, target: str) -> None:
    done = run(cli, user, target)
    assert done.code == 0, done.err
    assert all(row["ok"] for row in done.reports[0]["verify"])


def test_a_function_that_returns_a_module_runs_in_the_dtype_asked_for(cli: Cli, user: Path) -> None:
    words = ["model.kwargs={width: 4}", "model.inputs={input: [n, 4]}", "dtype=float64"]
    done = run(cli, user, "make", *words)
    assert done.code == 0, done.err
    assert done.reports[0]["config"]["dtype"] == "float64"


def test_a_module_with_paged_attention_runs(cli: Cli, user: Path) -> None:
    done = run(cli, user, "Attends", "model.inputs={x: [tokens, 16]}", "mode=full_and_piecewise")
    assert done.code == 0, done.err
    assert done.reports[0]["kv_cache"]["max_model_len"] == 16
    assert done.reports[0]["mode"]["resolved"] == "full_and_piecewise"


def test_weights_are_loaded_and_seeds_make_random_ones(user: Path, tmp_path: Path) -> None:
    words = [
        "model=module",
        f"model.target='{user}:make'",
        "model.kwargs={width: 4}",
        "model.inputs={input: [n, 4]}",
        "cache.mode=off",
        *FAST,
    ]

    def result(*more: str) -> torch.Tensor:
        with pcgsvc.load_runner([*words, *more]) as runner:
            assert not runner.model.module.training  # type: ignore[attr-defined]
            out: torch.Tensor = runner(torch.ones(3, 4))
            return out

    state = torch.random.get_rng_state()
    one, again, other = result(), result(), result("seed=1")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    torch.save(module.state_dict(), tmp_path / "state.pt")
    with torch.no_grad():
        wanted = module(torch.ones(3, 4))
    torch.testing.assert_close(result(f"model.weights={tmp_path}/state.pt"), wanted)
    (tmp_path / "bad.pt").write_bytes(b"no state")
    for name, said in (("bad.pt", "cannot be loaded"), ("none.pt", "there is no file")):
        with pytest.raises(ConfigError, match=f"model.weights.*{said}"):
            result(f"model.weights={tmp_path}/{name}")


SCRIPT = "import sys; from pcgsvc.jobs.app import entry; sys.path.remove(''); entry()"


@pytest.mark.slow
def test_a_module_of_the_folder_that_the_command_starts_in_is_found(user: Path) -> None:
    words = ["model=module", f"model.target={user.stem}:make", "model.kwargs={width: 4}"]
    words += ["model.inputs={input: [n, 4]}", "job=plan", "compiler=eager", "report=r.json"]
    # Without the folder that `python -c` and `-m` put on the path: as the console script starts.
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words],
        cwd=user.parent,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(pcgsvc.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    assert (user.parent / "r.json").exists()


# ---- it cannot be traced -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "comment", "words"),
    [
        ("Branches", "the branch", "Data-dependent branching"),
        ("Sets", "the tensor", "sets 'last'"),
        ("Counts", "the number", "sets 'count'"),
        ("Prints", "the print", "print"),
    ],
)
def test_a_module_that_cannot_be_traced_names_file_and_line(
    cli: Cli,
    user: Path,
    target: str,
    comment: str,
    words: str,
) -> None:
    done = run(cli, user, target, "model.inputs={x: [tokens, 8]}")
    assert done.code == 1
    (error,) = re.findall(r"\[ERROR\] - (TraceError: .*)", done.out, re.DOTALL)
    assert words in error
    assert line_of(user, comment) in error
    assert "Traceback" not in error
    assert re.search(r"partition\.strategy=breakable|write into a registered buffer", error)


# ---- bad configuration ---------------------------------------------------------------------------

BAD: dict[str, tuple[list[str], str]] = {
    "no target": (["model.target=null"], "model.target: got null"),
    "no colon": (["model.target=mymod.Model"], "'package.module:Class' or 'path/to/file.py:Class'"),
    "no name": (["model.target='my-mod:Model'"], "no name that Python can import"),
    "no module": (["model.target=no_such_mod.sub:Model"], "there is no module 'no_such_mod' in"),
    "no file": (["model.target=/no/such.py:Model"], "there is no file '/no/such.py'"),
    "no class": (["model.target='{file}:Modle'"], "did you mean 'Model'?"),
    "no callable": (["model.target='{file}:NUMBER'"], "NUMBER is a int"),
    "another class": (["model.target='{file}:NoModule'"], "no torch.nn.Module"),
    "gives a number": (["model.target='{file}:gives_a_number'"], "gave a int"),
    "raises": (["model.kwargs={width: 0}"], "{check} in __init__: ValueError: no width"),
    "argument": (["model.kwargs={widht: 4}"], "(width: int = 8, depth: int = 2, *, name"),
    "input": (
        ["model.inputs={idz: [n]}"],
        "['idz'], which the forward does not take. It takes: ids",
    ),
    "no inputs": (["model.inputs={}"], "has no method example_inputs(rows, generator)"),
    "no rows": (["model.inputs={ids: [3]}"], "no shape has a word for the rows"),
    "two words": (["model.inputs={ids: [n, m]}"], "2 words, ['m', 'n']"),
    "no shape": (["model.inputs={ids: {dtype: int64}}"], "model.inputs.ids.shape: got None"),
    "bad size": (["model.inputs={ids: [n, -1]}"], "model.inputs.ids.shape"),
    "bad dtype": (
        ["model.inputs={ids: {shape: [n], dtype: int63}}"],
        "model.inputs.ids.dtype: got",
    ),
    "bad fill": (["model.inputs={ids: {shape: [n], fill: norml}}"], "did you mean 'normal'?"),
    "no high": (
        ["model.inputs={ids: {shape: [n], dtype: int64}}"],
        "model.inputs.ids.high: got None",
    ),
    "bad field": (["model.inputs={ids: {shpe: [n]}}"], "did you mean 'shape'?"),
    "twice as many": (["model.target='{file}:Wrong'"], "is 6 for 3 rows and 10 for 5"),
    "no rows made": (["model.target='{file}:Fixed'"], "no dimension of any input follows"),
    "constant varies": (["model.target='{file}:Varies'"], "['scale'] differ between 3 and 5 rows"),
    "example fails": (["model.target='{file}:Fails'"], "{example} in example_inputs: IndexError"),
    "prompt": (["prompt=hello"], "no tokenizer"),
    "setting of another": (["model.hidden_size=8"], "model=module does not read it"),
}
OWN_EXAMPLES = {"twice as many", "no rows made", "constant varies", "example fails"}
LATER = {"gives a number", "raises", *OWN_EXAMPLES}
"""What shows only when the module is made: the job's folder is there by then."""
BY_COMMAND_LINE = {"no colon", "no class", "bad fill", *LATER}


def bad_words(case: str, user: Path) -> list[str]:
    (word,) = BAD[case][0]
    start = [f"model.target='{user}:Model'", "device=cpu"]
    if case not in OWN_EXAMPLES and "model.inputs" not in word:
        start.append(f"model.inputs={{{IDS}, {POSITIONS}}}")
    return [*start, word.format(file=user) if "{file}" in word else word]


@pytest.mark.parametrize("case", [case for case in BAD if case not in BY_COMMAND_LINE])
def test_bad_configuration_is_refused_with_what_is_wrong(user: Path, case: str) -> None:
    words = ["model.name=module", "compiler.name=eager", *bad_words(case, user)]
    tree = OmegaConf.to_container(OmegaConf.from_dotlist(words))
    with pytest.raises(ConfigError) as caught:
        check(from_dict(tree))
    assert BAD[case][1] in str(caught.value)


@pytest.mark.parametrize("case", [case for case in BAD if case in BY_COMMAND_LINE])
def test_bad_configuration_is_one_message_and_exit_2(
    cli: Cli,
    user: Path,
    case: str,
) -> None:
    said = BAD[case][1]
    done = cli("model=module", "compiler=eager", *bad_words(case, user))
    assert done.code == 2
    text = done.err + done.out
    for comment in ("check", "example"):
        said = said.replace(f"{{{comment}}}", line_of(user, f"the {comment}"))
    assert said in text.replace("\n", " "), text
    assert "Traceback" not in text
    if case not in LATER:
        assert done.files == []


def test_a_module_that_fails_on_import_names_the_line(cli: Cli, tmp_path: Path) -> None:
    for name, text, said in (
        (
            "brk_error",
            "import torch\nraise ValueError('mine')\n",
            "brk_error.py:2 in <module>: ValueError: mine",
        ),
        ("brk_syntax", "import torch\ndef f(:\n", "brk_syntax.py:2: SyntaxError"),
        (
            "brk_import",
            "\n\nimport no_such_dependency\n",
            "brk_import.py:3 in <module>: ModuleNotFoundError",
        ),
        ("brk_exit", "import sys\nsys.exit(7)\n", "brk_exit.py:2 in <module>: SystemExit: 7"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
        done = cli("model=module", f"model.target={tmp_path}/{name}.py:Model")
        assert done.code == 2
        assert said in done.err
        assert done.files == []


def test_a_file_may_have_any_name_without_another_dot(tmp_path: Path) -> None:
    from pcgsvc.models.targets import load_target

    path = tmp_path / "mö d" / "my own-mod.py"
    path.parent.mkdir()
    path.write_text("class Model: pass\n")
    assert load_target(f"{path}:Model").__name__ == "Model"
    other = path.rename(path.with_name("my.mod.py"))
    with pytest.raises(ConfigError, match=r"'my.mod.py' is no name .* rename the file"):
        load_target(f"{other}:Model")


def test_another_module_of_the_file_s_name_is_told(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("class Model: pass\n")
    with pytest.raises(ConfigError, match="another module has that name"):
        pcgsvc.load_runner(["model=module", f"model.target={tmp_path}/json.py:Model"])


@pytest.mark.parametrize("value", [torch.float32, float("nan"), {1, 2}])
def test_arguments_that_no_report_could_hold_are_refused(value: Any) -> None:
    for name in ("kwargs", "inputs"):
        config = {"model": {"name": "module", "target": "json:dumps", name: {"a": value}}}
        with pytest.raises(ConfigError, match=rf"model\.{name}: got (.|\n)*build_runner"):
            pcgsvc.load_runner(config=config)


# ---- described inputs ----------------------------------------------------------------------------


def made(text: Any, rows: int = 5) -> torch.Tensor:
    tensors, _ = read_inputs({"x": text})
    generator = torch.Generator().manual_seed(0)
    return tensors["x"].make(rows, torch.float16, generator)


FILLS: dict[str, tuple[Any, torch.dtype, Callable[[torch.Tensor], Any]]] = {
    "short": (["n", 4], torch.float16, lambda x: x.std() > 0.5),
    "normal": ({"shape": ["n", 9], "dtype": "float64"}, torch.float64, lambda x: (x < 0).any()),
    "uniform": (
        {"shape": ["n", 40], "dtype": "float32", "fill": "uniform", "low": 2, "high": 3},
        torch.float32,
        lambda x: x.min() >= 2 and x.max() < 3 and x.std() > 0.1,
    ),
    "integers": (
        {"shape": [40, "n"], "dtype": "int32", "low": -2, "high": 2},
        torch.int32,
        lambda x: sorted(set(x.flatten().tolist())) == [-2, -1, 0, 1],
    ),
    "bool": ({"shape": ["n", 9], "dtype": "bool"}, torch.bool, lambda x: x.any() and not x.all()),
    "arange": (
        {"shape": [2, "n"], "dtype": "int64", "fill": "arange"},
        torch.int64,
        lambda x: x.tolist() == [[0, 1, 2, 3, 4]] * 2,
    ),
    "arange, again": (
        {"shape": ["n"], "dtype": "int64", "fill": "arange", "high": 3},
        torch.int64,
        lambda x: x.tolist() == [0, 1, 2, 0, 1],
    ),
    "ones": ({"shape": ["n"], "fill": "ones"}, torch.float16, lambda x: bool((x == 1).all())),
    "zeros": ({"shape": ["n", "n"], "fill": "zeros"}, torch.float16, lambda x: not x.any()),
}


@pytest.mark.parametrize("case", FILLS)
def test_described_inputs_hold_what_was_asked_for(case: str) -> None:
    text, dtype, holds = FILLS[case]
    x = made(text)
    assert x.dtype is dtype
    assert list(x.shape) == [
        5 if n == "n" else n for n in text["shape" if isinstance(text, dict) else slice(None)]
    ]
    assert holds(x)


def test_described_constants_are_what_is_no_shape() -> None:
    _, constants = read_inputs(
        {"x": ["n"], "scale": 2.0, "flag": True, "word": "w", "nothing": None, "l": {"value": [1]}}
    )
    assert constants == {"scale": 2.0, "flag": True, "word": "w", "nothing": None, "l": [1]}
