"""Piecewise CUDA graphs for PyTorch: a model in, a callable that replays captured graphs out.

A model of your own, in eval mode, where its inputs are:

    import pcgsvc

    runner = pcgsvc.compile(model, (x,))      # traces, splits, compiles, captures, verifies
    y = runner(x)                             # any number of rows; padded to a captured size
    print(runner)                             # model, modes, sizes, graphs, warm or cold
    runner.close()                            # frees graphs and buffers; `with` does it as well

A model that pcgsvc brings or reads, by name or by overrides as on the command line:

    runner = pcgsvc.load("llama", mode="piecewise", capture={"max_size": 32})
    runner = pcgsvc.load(["model=hf", "model.path=models/mine"])

Settings go by name; a group is a dict: `capture={"max_size": 32}`, `cache={"dir": "/tmp/graphs"}`.
`python -m pcgsvc --help` lists them all. A setting or an argument that is wrong is a `ConfigError`.

Code that cannot be in a graph (it waits for the device, prints, depends on data) goes into an op of
its own, at which the graph is split:

    @pcgsvc.splitting_op("mine::route", mutates_args=("out",))
    def route(x: torch.Tensor, out: torch.Tensor) -> None: ...

or, in a model that is not traced (`partition={"strategy": "breakable"}`), into a function marked
with `@pcgsvc.eager_break`. What runs there may ask `pcgsvc.current_context()` about the step.

All errors are `PcgError`s: ConfigError, TraceError (ForwardError: the model itself fails),
SplitError, CompileError, CaptureError, BatchError, UncoveredError, StaleAddressError, StateError,
PeerError, CacheError, VerifyError.

Importing the package is cheap: no torch or compiler is imported, no global state touched, no thread
started, no logging configured. Public names are imported when they are first used.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from typing import Any


def _public_names() -> dict[str, str]:
    """Return the public names with their modules, as `__init__.pyi` says to type checkers."""
    stub = ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or b"")
    return {
        alias.name: str(node.module)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


_HOMES = _public_names()
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name's module when the name is first used."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pcgsvc' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
