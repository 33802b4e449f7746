"""No name of a stored file is ever imported: what code runs is said by the caller alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from core_helpers import toy
from warm_helpers import Starter

from pcgsvc.program import image
from pcgsvc.program.guards import StoredGuard, first_broken
from pcgsvc.program.sources import path_of

EVIL = "pcgsvc_test_evil"


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a package on the import path that raises when it is imported; return its folder."""
    folder = tmp_path / "path" / EVIL
    folder.mkdir(parents=True)
    for name in ("__init__", "sub"):
        (folder / f"{name}.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(folder.parent)
    return folder


def test_a_manifest_that_names_a_module_is_a_miss_and_imports_nothing(
    evil: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Starter(tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(image, "_op_modules", lambda schemas: {EVIL})
        assert not start(toy(1)).warm
    again = start(toy(1))
    assert not again.warm
    assert again.right
    assert f"not imported: ['{EVIL}']" in again.reasons
    assert EVIL not in sys.modules
    assert start(toy(1)).warm  # the sound program has taken its place


def test_a_read_of_a_module_that_is_not_imported_differs(evil: Path) -> None:
    guard = StoredGuard(f"G['__import_{EVIL}'].scale", "CONSTANT_MATCH", 1)
    difference = first_broken([guard], object(), {})
    assert difference is not None
    assert f"module {EVIL} is not imported" in difference
    assert EVIL not in sys.modules


def test_a_source_file_is_found_by_its_module_s_name_without_importing_it(evil: Path) -> None:
    assert path_of(f"{EVIL}.sub") == str(evil / "sub.py")
    assert path_of(EVIL) == str(evil / "__init__.py")
    assert path_of(f"{EVIL}.nothing") is None
    assert path_of("pcgsvc_test_absent.sub") is None
    assert path_of("os.path") == sys.modules["os.path"].__file__
    assert not {EVIL, f"{EVIL}.sub"} & set(sys.modules)
