"""README.md and docs/: everything that they show runs, and prints what they show."""

from __future__ import annotations

import importlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

import pcgsvc

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
NOT_RUN = Counter({"cluster": 5, "gpu": 4, "network": 5, "optuna": 1, "processes": 5, "set-up": 1})
"""Blocks that need what no test has; one more is looked at before it is counted here."""
OTHER_HOST = re.compile(r"""<(?:script|img|link|iframe)[^>]*\s(?:src|href)=["']?(?:https?:)?//""")


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that finds blocks and runs them."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("docs_blocks")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_shows_runs_and_prints_that(
    page: Path,
    blocks: ModuleType,
    programs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from cli_helpers import command_line

    monkeypatch.setenv("PCGSVC_CACHE_DIR", str(programs))
    with command_line(tmp_path, monkeypatch, capsys) as call:

        def command(words: Sequence[str], variables: dict[str, str]) -> str:
            with monkeypatch.context() as patch:
                for name, value in variables.items():
                    patch.setenv(name, value)
                done = call(*words)
            assert done.code == 0, f"{words}\n{done.err}"
            return str(done.out)

        outputs = blocks.outputs_of(page, tmp_path / "cwd", command, test=True)
    for block, made in outputs:
        shown, got = (blocks.shape_of(text, part=block.small) for text in (block.text, made))
        assert got == shown, f"{page.name}:{block.line}: run `scripts/docs outputs {page.name}`"


def test_every_block_is_run_or_says_why_not_and_outputs_are_made(blocks: ModuleType) -> None:
    reasons: Counter[str] = Counter()
    for page in PAGES:
        for block in blocks.blocks_of(page):
            place = f"{page.name}:{block.line}"
            assert block.language in (*blocks.RUN, "text", "yaml"), place
            assert block.language != "text" or "output" in block.notes, f"{place}: who printed it?"
            assert block.language != "yaml" or "file" in block.notes, f"{place}: who reads it?"
            if "needs" in block.notes:
                reasons[block.notes["needs"]] += 1
    assert reasons == NOT_RUN


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_figures_are_those_of_the_raw_files(page: Path, blocks: ModuleType) -> None:
    assert page.read_text() == blocks.filled(page.read_text()), "run `scripts/docs outputs`"


def test_readme_is_read_in_two_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_api_page_has_every_public_name() -> None:
    shown = set(re.findall(r"^::: pcgsvc\.(?:\w+\.)*(\w+)$", (DOCS / "api.md").read_text(), re.M))
    errors = {name for name in pcgsvc.__all__ if name.endswith("Error")}
    assert errors <= vars(importlib.import_module("pcgsvc.errors")).keys()  # shown as a module
    assert set(pcgsvc.__all__) - errors - {"__version__"} <= shown


def test_site_is_built_without_a_warning_and_loads_nothing_from_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.environ.get("CI") != "true":
        pytest.importorskip("mkdocs", reason="a GPU machine may lack it; CI may not")
    from click.testing import CliRunner
    from mkdocs.__main__ import cli

    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(cli, ["build", "--strict", "--quiet", "--site-dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    pages = list(tmp_path.rglob("*.html"))
    assert {"index.html", "settings.html", "api.html"} <= {page.name for page in pages}
    assert not [page.name for page in pages if OTHER_HOST.search(page.read_text())]
    settings = (tmp_path / "settings.html").read_text()
    assert 'id="capture.memory_budget"' in settings
