"""`model.target`: the user's own code, found by an import path or a file.

In: `package.module:Class` or `path/to/file.py:Class`. Out: what it names. The only place where text
of a config becomes code, and only `model.target` ever gets here: it comes from the command line,
the user's own YAML, or a call, never from a stored file.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from pcgsvc.errors import ConfigError, near
from pcgsvc.forward.plain import place_of, words_of


def load_target(target: str) -> Callable[..., Any]:
    """Import and return what `model.target` names.

    A file's folder is put on the import path of this process, as Python does for a script.

    Raises:
        ConfigError: it is malformed, is not there, or cannot be imported; the last names the line.
    """
    home, _, path = target.rpartition(":")
    if not home or not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(
            f"model.target: got {target!r}; 'package.module:Class' or 'path/to/file.py:Class' is "
            "needed."
        )
    module = _of_file(Path(home)) if home.endswith(".py") else _of_name(home)
    found: Any = module
    for part in path.split("."):
        if not hasattr(found, part):
            choices = _callables(found)
            raise ConfigError(
                f"model.target: {home} has no {path!r}{near(part, choices)} "
                f"It has: {', '.join(choices) or 'nothing to call'}."
            )
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(
            f"model.target: {target} is a {type(found).__name__}; a class of modules, or a "
            "function that returns one, is needed."
        )
    function: Callable[..., Any] = found
    return function


def _callables(home: Any) -> list[str]:
    """Return the public names in a module or class that can be called and were defined there."""
    name = getattr(home, "__name__", "")
    return [
        n
        for n, v in vars(home).items()
        if callable(v) and not n.startswith("_") and getattr(v, "__module__", name) == name
    ]


def _of_file(path: Path) -> ModuleType:
    path = path.expanduser().absolute()
    if not path.is_file():
        raise ConfigError(f"model.target: there is no file '{path}'.")
    if "." in path.stem:  # would name a module in a package
        raise ConfigError(
            f"model.target: '{path.name}' is no name that Python can import; rename the file so "
            "that its only dot is that of .py."
        )
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = _import(path.stem)
    there = getattr(module, "__file__", None)
    if there is None or os.path.realpath(there) != os.path.realpath(path):
        raise ConfigError(
            f"model.target: importing {path.stem!r} gives '{there}', not '{path}'; another module "
            "has that name. Rename the file."
        )
    return module


def _of_name(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"model.target: {name!r} is no name that Python can import.")
    return _import(name)


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(_failed(name, error)) from error
        raise ConfigError(
            f"model.target: there is no module {error.name!r} in '{os.getcwd()}' or elsewhere on "
            "the import path. Start in its folder, set PYTHONPATH, or give the file: "
            "path/to/file.py:Class."
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(_failed(name, error)) from error


def _failed(name: str, error: BaseException) -> str:
    return f"model.target: importing {name} failed{place_of(error)}: {words_of(error)}"
