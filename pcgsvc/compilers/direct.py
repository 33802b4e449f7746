"""A piece of Inductor's that runs without Inductor: its generated code and its kernels' binaries.

In: an artifact that has run, or the form that was made of it. Out: a JSON form beside the kernels'
files, and a callable. Importing Inductor takes seconds, more than all else in a warm start.

Only what is understood whole is taken: code that calls torch's own functions and Triton kernels
with one binary each, and an artifact around which torch does nothing. Whatever else there is raises
`NotDirectError`, and the piece is loaded by Inductor, as it was compiled. Knows nothing of stores.

Names in the generated code: torch._inductor.codegen.wrapper; launches: torch's static launcher.
"""

from __future__ import annotations

import ast
import builtins
import dis
import importlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pcgsvc import torch_private
from pcgsvc.torch_private import NotDirectError

_ROOTS = ("torch", "math")
_NEEDS_INDUCTOR = ("torch._inductor", "torch._dynamo", "torch.ops.inductor")
_EXTERN = "extern_kernels"
_ALIGNMENT = 16
"""Bytes; Inductor's code reads vectors from inputs that it found aligned."""


class DirectArtifact:
    """The callable of a form; results as the artifact's own. Kernels stay loaded as long as it."""

    def __init__(self, form: Mapping[str, Any], folder: Path, device: int) -> None:
        self._aligned: list[int] = form["aligned"]
        self.num_kernels: int = form["num_kernels"]
        self.source: str = form["source"]
        names: dict[str, Any] = {name: _resolve(path) for name, path in form["names"].items()}
        extern = {name: getattr(torch, name) for name in form["extern"]}
        names[_EXTERN] = types.SimpleNamespace(**extern)
        for name, kernel in form["kernels"].items():
            names[name] = types.SimpleNamespace(run=_launcher(kernel, folder, device))
        exec(compile(self.source, "<pcgsvc direct piece>", "exec"), names)
        self._call: Callable[[list[Any]], Sequence[Any]] = names["call"]

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Run the piece on the current stream, under no_grad."""
        inputs = list(args)
        for at in self._aligned:
            if inputs[at].data_ptr() % _ALIGNMENT:
                inputs[at] = _copy(inputs[at])
        return self._call(inputs)


def extract(artifact: Any, folder: Path, num_kernels: int) -> tuple[dict[str, Any], set[str]]:
    """Return the form of an artifact, and the files under `folder` that it needs.

    Args:
        artifact: Inductor's, loaded, its kernels chosen.
        folder: where the compilers' files of this build lie.
        num_kernels: for the report.

    Raises:
        NotDirectError: something in it is not understood; the message names it.
    """
    generated = torch_private.inductor_generated(artifact)
    parts = _Parts(generated.source, generated.namespace)
    kernels = {
        name: torch_private.static_kernel(generated.namespace[name])
        for name in sorted(parts.kernels)
    }
    files: set[str] = set()
    for kernel in kernels.values():
        kernel["file"] = _kernel_file(folder, kernel.pop("cache_hash"), kernel["name"])
        files.add(kernel["file"])
    form = {
        "source": parts.source(),
        "names": parts.names,
        "extern": sorted(parts.extern),
        "kernels": kernels,
        "aligned": generated.aligned,
        "num_kernels": num_kernels,
    }
    return form, files


def _kernel_file(folder: Path, cache_hash: str, name: str) -> str:
    path = Path("triton") / cache_hash / f"{name}.cubin"
    if not (folder / path).is_file():
        raise NotDirectError(f"kernel {name}: its binary is not in {folder / path}")
    return path.as_posix()


class _Parts:
    """What `call` of a generated module needs, found from its names."""

    def __init__(self, source: str, namespace: Mapping[str, Any]) -> None:
        self._namespace = namespace
        self.names: dict[str, str] = {}
        self.extern: set[str] = set()
        self.kernels: set[str] = set()
        self._kept: dict[int, ast.stmt] = {}
        self._defined, self._imported = _definitions(ast.parse(source))
        todo, seen = ["call"], set[str]()
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                todo.extend(self._take(name))

    def source(self) -> str:
        """Return the statements that are needed, in their order."""
        return "\n".join(ast.unparse(self._kept[line]) for line in sorted(self._kept)) + "\n"

    def _take(self, name: str) -> Iterator[str]:
        """Find out what a global name stands for; yield the names that it needs."""
        value = self._namespace.get(name)
        if torch_private.is_inductor_kernel(value):
            self.kernels.add(name)
        elif name in self._defined:
            statement = self._defined[name]
            self._kept[statement.lineno] = statement
            self._check(statement)
            yield from _globals_of(statement)
        elif name in self._imported:
            path = self._imported[name]
            if name == _EXTERN:
                return
            if path.partition(".")[0] not in _ROOTS or path.startswith(_NEEDS_INDUCTOR):
                raise NotDirectError(f"the generated code uses {path}")
            if _resolve(path) is not value:
                raise NotDirectError(f"{path} is not what the generated code found there")
            self.names[name] = path
        elif not hasattr(builtins, name):
            raise NotDirectError(f"the generated code uses {name}, which it does not define")

    def _check(self, statement: ast.stmt) -> None:
        """Refuse what only Inductor provides, and collect the library calls."""
        attributes = [n for n in ast.walk(statement) if isinstance(n, ast.Attribute)]
        for node in attributes:
            text = ast.unparse(node)
            if text.startswith(_NEEDS_INDUCTOR):
                raise NotDirectError(f"the generated code uses {text}")
        of_extern = [n for n in attributes if ast.unparse(n.value) == _EXTERN]
        loads = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == _EXTERN]
        if len(loads) != len(of_extern):
            raise NotDirectError(f"the generated code passes {_EXTERN} on")
        for node in of_extern:
            used = getattr(self._namespace[_EXTERN], node.attr, None)
            if used is None or getattr(torch, node.attr, None) is not used:
                raise NotDirectError(f"{_EXTERN}.{node.attr} is no function of torch's own")
            self.extern.add(node.attr)


def _definitions(tree: ast.Module) -> tuple[dict[str, ast.stmt], dict[str, str]]:
    """Return a module's statements by the name that they define, and its imports as paths."""
    defined: dict[str, ast.stmt] = {}
    imported: dict[str, str] = {}
    for statement in tree.body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            defined[statement.name] = statement
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    defined[target.id] = statement
        elif isinstance(statement, ast.Import):
            for alias in statement.names:
                root = alias.name.partition(".")[0]
                imported[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                imported[alias.asname or alias.name] = f"{statement.module}.{alias.name}"
    return defined, imported


def _globals_of(statement: ast.stmt) -> Iterator[str]:
    """Yield the global names that a statement reads, now or when what it defines is called."""
    code = compile(ast.Module([statement], []), "<generated>", "exec")
    own = {statement.name} if isinstance(statement, (ast.FunctionDef, ast.ClassDef)) else set()
    todo = [code]
    while todo:
        code = todo.pop()
        todo.extend(c for c in code.co_consts if isinstance(c, types.CodeType))
        for step in dis.get_instructions(code):
            reads = step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval not in own
            if reads and not str(step.argval).startswith("__"):  # of a class body
                yield step.argval


def _resolve(path: str) -> Any:
    """Return what a dotted path names, modules imported as needed."""
    root, *rest = path.split(".")
    found: Any = importlib.import_module(root)
    for name in rest:
        found = getattr(found, name)
    return found


def _launcher(kernel: Mapping[str, Any], folder: Path, device: int) -> Callable[..., None]:
    """Return a function that works out the grid from its arguments and launches."""
    launch = torch_private.load_static_kernel(
        folder / kernel["file"],
        name=kernel["name"],
        shared=kernel["shared"],
        num_warps=kernel["num_warps"],
        types=kernel["types"],
        num_scratch=kernel["num_scratch"],
        device=device,
    )
    lines = [
        f"def launcher({', '.join(kernel['params'])}, stream):",
        *(f"    {line}" for line in kernel["prefix"]),
        f"    launch({', '.join(kernel['grid'])}, stream, {', '.join(kernel['args'])})",
    ]
    scope: dict[str, Any] = {"launch": launch}
    exec("\n".join(lines), scope)
    found: Callable[..., None] = scope["launcher"]
    return found


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return an aligned copy with the same strides."""
    length = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    flat = torch.as_strided(tensor, (length,), (1,)).clone()
    return torch.as_strided(flat, tensor.shape, tensor.stride())
