"""Build a module against a disk cache of the test's own, and say where its program came from."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from core_helpers import make_config, rows
from model_helpers import make_context

import pcgsvc
from pcgsvc.config import CacheConfig, CacheMode
from pcgsvc.ops.context import use_context
from pcgsvc.trace import dynamo as trace


@dataclass
class Start:
    """How a runner started, and whether it gave what the module gives."""

    report: dict[str, Any]
    right: bool

    @property
    def warm(self) -> bool:
        """Whether nothing was traced and nothing compiled; half of each is a fault."""
        compiled = self.report["compile"]
        warm = bool(compiled["start"] == "warm")
        assert warm == (compiled["num_traces"] == 0)
        assert not warm or compiled["num_compiled"] == 0
        return warm

    @property
    def reasons(self) -> str:
        """Why it was a miss."""
        return "; ".join(self.report["cache"]["miss_reasons"])


class Starter:
    """Builds one runner after the other in one cache directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(
        self,
        module: Callable[..., Any],
        *,
        example: Any = None,
        dims: Mapping[str, int] | None = None,
        cache: str = "readwrite",
        require_warm: bool = False,
        **settings: Any,
    ) -> Start:
        """Build, call, compare, close."""
        config = make_config(sizes=(1, 2), **settings)
        if isinstance(module, torch.nn.Module):
            module.eval()
        config.cache = CacheConfig(
            dir=str(self.root), mode=CacheMode(cache), require_warm=require_warm
        )
        x = rows(2) if example is None else example
        with pcgsvc.build_runner(module, x, dynamic_dims=dims or {"x": 0}, config=config) as runner:
            arguments = x if isinstance(x, dict) else {"x": x}
            tensors = {k: v for k, v in arguments.items() if isinstance(v, torch.Tensor)}
            with torch.no_grad(), use_context(make_context(None, [2])):
                wanted = module(**arguments)
            right = torch.equal(runner(**tensors), wanted)
            return Start(runner.report, right)


class Sources:
    """Model files that change between two imports, as they do between two processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names: set[str] = set()

    def load(self, name: str, text: str, **others: str) -> ModuleType:
        """Write modules and import the first one anew; the others are for it to import."""
        for each, content in {**others, name: text}.items():
            (self.folder / f"{each}.py").write_text(content)
            self._names.add(each)
        return self.again(name)

    def again(self, name: str) -> ModuleType:
        """Import a module as a new process would."""
        self.forget()
        importlib.invalidate_caches()
        return importlib.import_module(name)

    def forget(self) -> None:
        """Drop all modules."""
        for each in self._names:
            sys.modules.pop(each, None)
            # Dynamo's own alias of the module, among the globals of the function that is traced.
            vars(trace).pop(f"__import_{each}", None)
        convert = sys.modules.get("torch._dynamo.symbolic_convert")
        if convert is not None:  # it keeps the modules that it has imported
            convert._import_module.cache_clear()


@contextlib.contextmanager
def source_folder(folder: Path) -> Iterator[Sources]:
    """Put a new folder on the import path for a block."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr(sys, "dont_write_bytecode", True)  # two versions within one second
        made = Sources(folder)
        yield made
        made.forget()
