"""The fenced blocks of README.md and docs/: run them, and write down what they print.

A comment on the line before a fence says what is special about the block:

    <!-- file: NAME -->      it is a file of the page's folder
    <!-- needs: WHAT -->     it cannot run here: it needs a gpu, a cluster, the network, ...
    <!-- test: WORDS -->     the test appends these settings to each command, to be quick
    <!-- output -->          what the block before it printed; `<!-- output: REGEX -->`: its lines
                             in which REGEX is found

A page's blocks run from top to bottom in one folder; its Python blocks are one module. As a
program it rewrites the outputs of the pages named, or of all, and their tables of figures.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from docs_figures import filled

ROOT = Path(__file__).parents[1]
RUN = ("python", "bash")
"""Languages whose blocks are run."""
_FENCE = re.compile(
    r"(?P<notes>(?:^<!-- [a-z]+(?:: .*?)? -->\n)*)"
    r"^```(?P<language>[a-z]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_NOTE = re.compile(r"<!-- ([a-z]+)(?:: (.*?))? -->")
_LOGGED = re.compile(r"^\[\d{4}-.*\n", re.MULTILINE)
"""What the log prints between the lines of a job."""
_OURS = (["scripts/run"], ["pcgsvc"], ["python", "-m", "pcgsvc"])
"""What a command line of pcgsvc begins with."""

Command = Callable[[Sequence[str], dict[str, str]], str]
"""Runs pcgsvc with words and further environment variables; returns what it printed."""


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    language: str
    text: str
    line: int
    """Of its first line of text, from 1."""
    span: tuple[int, int]
    """Where the text is in the page."""
    notes: dict[str, str] = field(default_factory=dict)
    """What the comments before it say, by their first word."""

    small: bool = False
    """Whether the test makes the block before it quick, and so another output of the same kind."""

    @property
    def runs(self) -> bool:
        """Whether it is run here."""
        return self.language in RUN and not self.notes.keys() & {"needs", "file"}


def pages() -> list[Path]:
    """Return the README and the pages that are written by hand."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks_of(page: Path) -> list[Block]:
    """Return a page's fenced blocks in order."""
    text, small, blocks = page.read_text(), False, []
    for found in _FENCE.finditer(text):
        notes = {name: words or "" for name, words in _NOTE.findall(found["notes"])}
        line = text.count("\n", 0, found.start("text")) + 1
        language, span = found["language"], found.span("text")
        blocks.append(Block(language, found["text"], line, span, notes, small=small))
        small = "test" in notes or ("output" in notes and small)
    return blocks


# ---- running -------------------------------------------------------------------------------------


def run_page(page: Path, folder: Path, command: Command, *, test: bool) -> Iterator[str]:
    """Run a page in a folder, which is the current one; yield per block what it printed.

    Args:
        page: its blocks are run, or written where they are files.
        folder: an empty one.
        command: runs a command line of pcgsvc.
        test: whether the settings of `test:` comments are appended.
    """
    with _module(page, folder) as module:
        for block in blocks_of(page):
            if name := block.notes.get("file"):
                (folder / name).write_text(block.text)
            if not block.runs:
                yield ""
            elif block.language == "python":
                yield _run_python(block, module)
            else:
                more = shlex.split(block.notes.get("test", "")) if test else []
                yield "".join(_run_line(line, more, command) for line in lines_of(block))


def lines_of(block: Block) -> list[list[str]]:
    """Return the words of each command of a bash block."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def _run_line(words: list[str], more: list[str], command: Command) -> str:
    variables = {}
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words[0].partition("=")
        variables[name], words = value, words[1:]
    for start in _OURS:
        if words[: len(start)] == start:
            return command([*words[len(start) :], *more], variables)
    raise ValueError(f"{shlex.join(words)}: no command that runs here; it needs a `needs` comment")


@contextlib.contextmanager
def _module(page: Path, folder: Path) -> Iterator[ModuleType]:
    """Yield the module of a page's Python blocks, whose source is at the page's own lines."""
    source = [""] * (page.read_text().count("\n") + 1)
    for block in blocks_of(page):
        if block.runs and block.language == "python":
            lines = block.text.splitlines()
            source[block.line - 1 : block.line - 1 + len(lines)] = lines
    module = ModuleType(f"docs_{page.stem.replace('-', '_').lower()}")
    module.__file__ = str(folder / f"{module.__name__}.py")
    Path(module.__file__).write_text("\n".join(source))
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def _run_python(block: Block, module: ModuleType) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(
            compile("\n" * (block.line - 1) + block.text, str(module.__file__), "exec"),
            vars(module),
        )
    return out.getvalue()


# ---- outputs -------------------------------------------------------------------------------------


def selected(output: str, block: Block, folder: Path) -> str:
    """Return what an output block shows of what was printed."""
    wanted = re.compile(block.notes["output"])
    lines = [
        line.rstrip().replace(str(folder), "…") for line in _LOGGED.sub("", output).splitlines()
    ]
    return "".join(f"{line}\n" for line in lines if wanted.search(line)).strip("\n") + "\n"


def shape_of(output: str, *, part: bool) -> list[str]:
    """Return the lines of an output without what another run, or machine, may change.

    Args:
        output: what was printed, or is shown.
        part: it is of a smaller job: what the lines are about counts, not how many there are.
    """
    if part:
        return sorted({line.split()[0] for line in output.splitlines() if line[:1].strip()})
    shape = re.sub(r"^(seconds ).*", r"\1", output, flags=re.MULTILINE)  # by what was imported
    shape = re.sub(r"\b[0-9a-f]{8,}\b", "HASH", shape)
    shape = re.sub(r"\b(launch|boundary|compute)(-bound)?$", "BOUND", shape, flags=re.MULTILINE)
    shape = re.sub(r"\+(cpu|cu\d+)\b", "+BUILD", shape)  # of torch
    shape = re.sub(r"\d[\d.:_-]*(e-?\d+)?\*?", "0", shape)
    shape = re.sub(r"0 [KMG]iB", "0 BYTES", shape)
    return [re.sub(r"[ ─━-]+", " ", line).strip() for line in shape.splitlines()]


def outputs_of(
    page: Path, folder: Path, command: Command, *, test: bool
) -> list[tuple[Block, str]]:
    """Run a page; return its output blocks, each with what it has to show."""
    found, printed, blocks = [], "", blocks_of(page)
    while blocks and not test and "output" not in blocks[-1].notes:
        blocks.pop()  # what is not shown need not run
    ran = run_page(page, folder, command, test=test)
    for block, output in zip(blocks, ran, strict=test):
        if "output" in block.notes:
            found.append((block, selected(printed, block, folder)))
        printed = output if block.runs else printed
    return found


def _rewrite(page: Path) -> None:
    """Run a page and put what its blocks print into it."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        folder = Path(name).resolve()

        def command(words: Sequence[str], variables: dict[str, str]) -> str:
            own = {**os.environ, "PCGSVC_CACHE_DIR": str(folder / "cache"), **variables}
            line = [sys.executable, "-m", "pcgsvc", *words]
            done = subprocess.run(line, env=own, stdout=subprocess.PIPE, text=True, check=True)
            return done.stdout

        os.environ["PCGSVC_CACHE_DIR"] = str(folder / "cache")
        outputs = outputs_of(page, folder, command, test=False)
    text, places = page.read_text(), [b for b in blocks_of(page) if "output" in b.notes]
    for block, (_, output) in reversed(list(zip(places, outputs, strict=True))):
        text = text[: block.span[0]] + output + text[block.span[1] :]
    page.write_text(filled(text))


def main(names: Sequence[str]) -> None:
    """Rewrite the outputs and figures of the pages named, or of all."""
    for page in [Path(name).resolve() for name in names] or pages():
        print(page.relative_to(ROOT), flush=True)
        _rewrite(page)


if __name__ == "__main__":
    main(sys.argv[1:])
