"""The order of the rooms: what a room may import, read from the source text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import pcgsvc

PACKAGE = Path(pcgsvc.__file__).parent
ORDER = """
version errors events torch_private cuda_driver config ops sizing forward models trace program
partition compilers cache build capture check serve metrics report pipeline api jobs __main__
"""
ROOMS = ORDER.split()
"""From left to right; a room imports only rooms to its left, and itself."""
DOORS = {"api", "errors", "events", "metrics", "pipeline", "version", "__main__"}
DOORS |= {"torch_private", "cuda_driver"}
ANYWHERE = {"ops", "torch_private", "cuda_driver", "errors", "events"}


def room_of(module: str) -> str:
    """Return the room of a dotted module name."""
    return module.split(".")[1] if "." in module else "__init__"


def name_of(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, package: Path) -> Iterator[str]:
    """Yield the modules of the package that a file imports anywhere, for types alone included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == "pcgsvc")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            if (node.module or "").split(".")[0] == "pcgsvc":
                for alias in node.names:
                    inner = package.parent.joinpath(*str(node.module).split("."), alias.name)
                    is_module = inner.with_suffix(".py").is_file() or inner.is_dir()
                    yield f"{node.module}.{alias.name}" if is_module else str(node.module)


def graph_of(package: Path) -> dict[str, set[str]]:
    """Return what each module imports of the package."""
    return {name_of(path, package): set(imports(path, package)) for path in package.rglob("*.py")}


def climbs(graph: dict[str, set[str]]) -> list[str]:
    """Return the imports that lead to the right."""
    found = []
    for module, targets in graph.items():
        here = room_of(module)
        for target in targets:
            there = room_of(target)
            if here == "__init__" or there in ANYWHERE | {here, "__init__"}:
                continue
            if ROOMS.index(there) > ROOMS.index(here):
                found.append(f"{module} imports {target}")
    return sorted(found)


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the modules that import each other, directly or through others."""
    state: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        state[module] = 1
        path.append(module)
        for target in sorted(graph.get(module, ())):
            if state.get(target) == 1:
                found.append([*path[path.index(target) :], target])
            elif target not in state:
                visit(target)
        path.pop()
        state[module] = 2

    for module in sorted(graph):
        if module not in state and module != "pcgsvc":  # it finds its names when they are used
            visit(module)
    return [cycle for cycle in found if "pcgsvc" not in cycle]


def test_rooms_import_only_rooms_to_their_left() -> None:
    assert climbs(graph_of(PACKAGE)) == []


def test_no_module_imports_itself_through_others() -> None:
    assert cycles(graph_of(PACKAGE)) == []


def test_every_room_is_in_the_order_and_says_what_it_is() -> None:
    rooms = {p.parent.name for p in PACKAGE.glob("*/__init__.py")}
    files = {p.stem for p in PACKAGE.glob("*.py")} - {"__init__"}
    assert rooms | files == set(ROOMS)
    assert files == DOORS
    for init in PACKAGE.glob("*/__init__.py"):
        text = ast.get_docstring(ast.parse(init.read_text())) or ""
        assert "In: " in text, init
        assert "Out: " in text, init


@pytest.mark.parametrize(
    "line", ["from pcgsvc.serve.runner import Runner", "import pcgsvc.jobs.app"]
)
def test_a_climb_is_found_wherever_it_stands(line: str, tmp_path: Path) -> None:
    package = tmp_path / "pcgsvc"
    (package / "trace").mkdir(parents=True)
    (package / "trace" / "graph.py").write_text(
        f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {line}\n"
    )
    assert len(climbs(graph_of(package))) == 1


def test_a_cycle_is_found_also_where_it_is_for_types_alone(tmp_path: Path) -> None:
    room = tmp_path / "pcgsvc" / "serve"
    room.mkdir(parents=True)
    (room / "one.py").write_text("from pcgsvc.serve.two import b\n")
    (room / "two.py").write_text("def b():\n    from pcgsvc.serve import three\n")
    (room / "three.py").write_text("from pcgsvc.serve.one import a\n")
    assert len(cycles(graph_of(tmp_path / "pcgsvc"))) == 1
