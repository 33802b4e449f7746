"""The source files that a program depends on, by names that every process finds again.

In: guards and a module. Out: places and paths of source files. Imports nothing that a stored file
names.
"""

from __future__ import annotations

import importlib.machinery
import inspect
import itertools
import os
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from pcgsvc.forward.objects import is_versioned
from pcgsvc.program.forms import made_of, replaced
from pcgsvc.trace.graph import Guard


def files_of(guards: Sequence[Guard], module: Any) -> list[str]:
    """Return the source files of the classes and functions that tracing entered.

    By the name of the module that they hold, if there is one: a stored program must not depend on
    where a package is installed, and must notice that the name leads to another file. Else by path.
    """
    things: list[Any] = [module]
    if isinstance(module, torch.nn.Module):
        things = [type(sub) for sub in module.modules()]
    for guard in guards:
        value = guard.value
        if isinstance(value, (type, types.FunctionType, types.MethodType)):
            things.append(value)
        elif guard.kind in ("TYPE_MATCH", "ID_MATCH"):  # its methods, or its members
            things.append(type(value))
    found = {place for thing in things for part in _parts(thing) if (place := _place(part))}
    return sorted(found)


def path_of(place: str) -> str | None:
    """Return the path of a file that `files_of` named; None if there is no such file now."""
    if os.sep in place:
        return place
    known = sys.modules.get(place)
    if known is not None:
        return _source_path(getattr(known, "__file__", None))
    spec, folders = None, None
    for end in itertools.accumulate(place.split("."), "{}.{}".format):
        # One by one: importlib.util.find_spec would import the parent packages.
        spec = importlib.machinery.PathFinder.find_spec(end, folders)
        if spec is None:
            return None
        folders = spec.submodule_search_locations
    return None if spec is None else _source_path(spec.origin)


def sources_of(module: Any) -> dict[str, str]:
    """Return the paths of files that are known without tracing, by names without their folder.

    A name is the same in every process, wherever the package is installed.
    """
    found = {}
    for place in files_of([], module):
        path = path_of(place)
        if path is not None:
            above = [] if os.sep in place else place.split(".")[:-1]
            if os.path.basename(path) == "__init__.py":
                above = place.split(".")
            found["/".join([*above, os.path.basename(path)])] = path
    return found


def _parts(thing: Any) -> Iterator[Any]:
    """Yield what a class or callable is made of: base classes, wrappers and the wrapped."""
    if isinstance(thing, type):
        for base in thing.__mro__:
            yield from [base] if not is_versioned(base.__module__) else replaced(base).values()
        return
    if isinstance(thing, types.FunctionType) and not is_versioned(thing.__module__ or "?"):
        yield thing
    for part in made_of(thing):
        yield from _parts(part)


def _place(thing: Any) -> str | None:
    """Return the module's name, or the path, of the file that defines a class or function."""
    try:
        file = inspect.getsourcefile(thing)
    except (TypeError, OSError):  # built in, or typed in
        return None
    if file is None:
        return None
    name = getattr(thing, "__module__", None) or ""
    module = getattr(sys.modules.get(name), "__file__", None)
    return name if _source_path(module) == _source_path(file) else os.path.abspath(file)


def _source_path(file: str | None) -> str | None:
    return None if file is None else os.path.abspath(file)
