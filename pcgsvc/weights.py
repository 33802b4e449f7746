"""The weights of a running model: whether they lie where the graphs read them, and new values.

In: a module and the tensors that its program is bound to. Out: an error when one was replaced; new
values written in place. Knows nothing of graphs.
"""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from pcgsvc.canonical import tensors_of
from pcgsvc.errors import StaleAddressError, StateError

_data_ptr = torch.Tensor.data_ptr
# Not of buffers: a forward may assign those, and Dynamo would trace the hook into another's graph.
_HOOKS = (register_module_module_registration_hook, register_module_parameter_registration_hook)
_TURN = 16
"""Tensors, and places that hold some, that are compared at each call."""


class LoadedState(NamedTuple):
    """What `load_state_dict(strict=False)` left out; as torch's own result."""

    missing_keys: list[str]
    """The module's names that the state has no value for; they are as they were."""
    unexpected_keys: list[str]
    """Names in the state that the module does not have."""


class Weights:
    """Where a module holds the tensors that graphs were captured on.

    Args:
        module: the module, or a function that calls one.
        tensors: parameters, buffers and other tensors that the program is bound to, by name.
        static: says which further tensors must stay where they are now, by name; None: none.
    """

    def __init__(
        self,
        module: Callable[..., Any],
        tensors: Mapping[str, torch.Tensor],
        static: Callable[[], Mapping[str, torch.Tensor]] | None = None,
    ) -> None:
        self._module, self._static = module, static
        self._static_before = {} if static is None else dict(static())
        bound = {id(t) for t in tensors.values()}
        self._values: list[torch.Tensor] = []
        """Every bound tensor that has an address."""
        self._places: list[tuple[dict[str, Any], str, Any, str]] = []
        """Where a module holds a bound tensor, or a submodule below which there is one: its dict,
        key, content and name."""
        self._buffers: list[tuple[dict[str, Any], str, Any, str]] = []
        """Those of buffers, which torch tells nothing of: compared at every call."""
        self._watched: set[int] = set()
        """Identities of the modules that have such places."""
        self._others: list[tuple[Callable[[], Any], Any, str]] = []
        for prefix, root in _modules_behind(module):
            self._note(root, prefix, bound)
        if not isinstance(module, torch.nn.Module):
            self._others += _cells(module)
        dense = {n: t for n, t in tensors.items() if _is_dense(t)} | self._static_before
        self._values, self._value_names = list(dense.values()), list(dense)
        self._addresses = list(map(_data_ptr, self._values))
        self._memory = [t.untyped_storage() for t in self._values]
        """Keeps what the graphs read alive, whatever becomes of the tensors."""
        located = list(zip(self._values, self._addresses, strict=True))
        count = max(len(located), len(self._places), 1)
        self._turns = itertools.cycle(
            [(self._places[at : at + _TURN], located[at : at + _TURN]), (self._buffers, [])]
            for at in range(0, count, _TURN)
        )
        self._whole = [(self._places, located)]
        self._suspect = True
        """Whether all is to be compared: at first, and when torch tells that something was put into
        a watched module."""
        watch = weakref.WeakMethod(self._on_registration)
        for register in _HOOKS:
            handle = register(lambda *args: _tell(watch, args))
            weakref.finalize(self, handle.remove).atexit = False

    def _on_registration(self, module: torch.nn.Module) -> None:
        self._suspect = self._suspect or id(module) in self._watched

    def _note(self, root: torch.nn.Module, prefix: str, bound: set[int]) -> None:
        """Note every place below a module that holds a bound tensor, or a submodule with one."""
        for path, sub in root.named_modules(remove_duplicate=False, prefix=prefix):
            inside = f"{path}." if path else ""
            places = len(self._places)
            for key, child in sub._modules.items():  # a replaced submodule brings other weights
                if child is not None and any(id(t) in bound for t in tensors_of(child).values()):
                    self._places.append((sub._modules, key, child, inside + key))
            for holder in (sub._parameters, sub._buffers, vars(sub)):
                for key, value in holder.items():
                    if isinstance(value, torch.Tensor) and id(value) in bound:
                        place = (holder, key, value, inside + key)
                        self._places.append(place)
                        if holder is sub._buffers:
                            self._buffers.append(place)
            if len(self._places) > places:
                self._watched.add(id(sub))
            for key, value in vars(sub).items():
                if key not in ("_parameters", "_buffers", "_modules"):
                    self._others += _items(value, inside + key, bound)

    def check(self) -> None:
        """Compare where tensors lie, and what holds them, with what was captured.

        All of them at the first call, when torch tells that something was registered in one of the
        modules (`module.weight = …`), and at every call under `debug.check_addresses`; else `_TURN`
        of them, in turn: what changes behind torch's back (`param.data = …`) is noticed some calls
        later. Until then the graphs read the old values, whose memory is kept. Nothing is copied
        and the device is not asked.

        Raises:
            StaleAddressError: naming the tensor that was replaced.
        """
        whole = self._suspect or self._static is not None
        for places, located in self._whole if whole else next(self._turns):
            for holder, key, value, _ in places:
                if holder.get(key) is not value:
                    self._refuse()
            for tensor, address in located:
                if tensor.data_ptr() != address:
                    self._refuse()
        self._suspect = False
        for get, value, _ in self._others:
            if get() is not value:
                self._refuse()
        if self._static is not None and self._moved():
            self._refuse()

    def _moved(self) -> list[str]:
        """Return which static tensors are others than they were."""
        now = {} if self._static is None else self._static()
        return [n for n, t in self._static_before.items() if now.get(n) is not t]

    def _refuse(self) -> None:
        """Find what was replaced and say so."""
        gone = [name for holder, key, value, name in self._places if holder.get(key) is not value]
        gone += [name for get, value, name in self._others if get() is not value]
        now = zip(self._value_names, self._values, self._addresses, strict=True)
        gone += [name for name, tensor, address in now if tensor.data_ptr() != address]
        gone += self._moved()
        raise StaleAddressError(
            f"{', '.join(dict.fromkeys(gone[:4]))}: its memory was replaced after capture; the "
            "graphs read the old memory. Update weights in place (runner.load_state_dict, "
            "param.copy_(…)), or build the runner again."
        )

    # -- new values --

    def load(
        self,
        state: Mapping[str, Any],
        *,
        strict: bool,
        stream: torch.cuda.Stream | None,
    ) -> LoadedState:
        """Write new values into the module's tensors, all of them or none; see `Runner`."""
        module = self._module
        if not isinstance(module, torch.nn.Module):
            raise StateError(
                "load_state_dict: the runner was built from a function; write into the tensors "
                "that it uses in place, while holding runner.lock."
            )
        self._suspect = True
        self.check()
        targets = _targets(module)
        pairs, result = _match(targets, state, strict=strict)
        memory = {t.untyped_storage().data_ptr() for t in targets.values()}
        values = [
            value.clone()  # it lies in a tensor that is written as well
            if value is not target and value.untyped_storage().data_ptr() in memory
            else value
            for target, value in pairs
        ]
        for (target, _), value in zip(pairs, values, strict=True):
            with torch.inference_mode(target.is_inference()), torch.no_grad():
                target.copy_(value)
            if stream is not None and value.is_cuda:
                value.record_stream(stream)
        return result


def _tell(watch: weakref.WeakMethod[Any], args: tuple[Any, ...]) -> None:
    """Pass on which module got something; the hook must not keep the weights alive."""
    listener = watch()
    if listener is not None:
        listener(args[0])


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type != "meta"


# ---- where tensors are held ----------------------------------------------------------------------


def _modules_behind(function: Any, prefix: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules that a callable holds, each with a name."""
    if isinstance(function, torch.nn.Module):
        yield prefix, function
    elif isinstance(function, types.MethodType):
        yield from _modules_behind(function.__self__, prefix)
    elif isinstance(function, functools.partial):
        for value in (function.func, *function.args, *function.keywords.values()):
            yield from _modules_behind(value, prefix)
    elif isinstance(function, types.FunctionType):
        for get, value, name in _cells(function):
            del get
            if isinstance(value, torch.nn.Module):
                yield name, value


def _cells(function: Any) -> list[tuple[Callable[[], Any], Any, str]]:
    """Return the closure cells and globals of a function that hold modules or tensors."""
    if not isinstance(function, types.FunctionType):
        return []
    kinds = (torch.nn.Module, torch.Tensor)
    found: list[tuple[Callable[[], Any], Any, str]] = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        get = functools.partial(getattr, cell, "cell_contents", None)
        if isinstance(get(), kinds):
            found.append((get, get(), name))
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, kinds):
            found.append((functools.partial(function.__globals__.get, name), value, name))
    return found


def _items(value: Any, name: str, bound: set[int]) -> Iterator[tuple[Callable[[], Any], Any, str]]:
    """Yield the bound tensors in a list or dict that a module holds as an attribute."""
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, torch.Tensor) and id(item) in bound:
                yield functools.partial(value.get, key), item, f"{name}[{key!r}]"
    elif isinstance(value, list):
        for at, item in enumerate(value):
            if isinstance(item, torch.Tensor) and id(item) in bound:
                yield functools.partial(_item, value, at), item, f"{name}[{at}]"


def _item(values: Sequence[Any], at: int) -> Any:
    return values[at] if at < len(values) else None


# ---- a state dict --------------------------------------------------------------------------------


def _targets(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that a state dict of the module speaks of, tied ones under every name."""
    own = {id(t) for t in [*module.parameters(), *module.buffers()]}
    targets: dict[str, torch.Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor) or id(value) not in own:
            raise StateError(
                f"load_state_dict: {name!r} of {type(module).__name__}.state_dict() is none of its "
                "parameters and buffers (extra state, or made by a hook), so it cannot be written "
                "in place. Load it into the module yourself, while holding runner.lock."
            )
        targets[name] = value
    return targets


def _match(
    targets: Mapping[str, torch.Tensor], state: Mapping[str, Any], *, strict: bool
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], LoadedState]:
    """Return (target, value) for every tensor, once; StateError lists all that does not fit."""
    if not isinstance(state, Mapping):
        raise StateError(
            f"load_state_dict: got a {type(state).__name__}; a mapping from names to tensors is "
            "needed."
        )
    ties: dict[int, list[str]] = {}
    for name, target in targets.items():
        ties.setdefault(id(target), []).append(name)
    unexpected = [name for name in state if name not in targets]
    missing = [n for names in ties.values() if not set(names) & set(state) for n in names]
    faults = [f"{name}: {fault}" for name in targets if (fault := _fault(targets, state, name))]
    if strict and missing:
        faults.append(f"the state lacks {_some(missing)}")
    if strict and unexpected:
        faults.append(f"the module has no {_some(unexpected)}")
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for names in ties.values() if not faults else ():
        given = [name for name in names if name in state]
        differ = [name for name in given[1:] if not _equal(state[given[0]], state[name])]
        if differ:
            faults.append(
                f"{given[0]} and {differ[0]} are one tensor, and the state has two values"
            )
        pairs += [(targets[given[0]], state[given[0]])] if given else []
    if faults:
        raise StateError(
            f"load_state_dict: nothing was written, since the state does not fit: "
            f"{'; '.join(faults[:8])}{' …' if len(faults) > 8 else ''}."
        )
    return pairs, LoadedState(missing, unexpected)


def _fault(targets: Mapping[str, torch.Tensor], state: Mapping[str, Any], name: str) -> str | None:
    if name not in state:
        return None
    target, value = targets[name], state[name]
    if not isinstance(value, torch.Tensor):
        return f"got a {type(value).__name__}, a tensor is needed"
    if value.shape != target.shape:
        return f"got shape {list(value.shape)}, {list(target.shape)} is needed"
    if value.dtype != target.dtype:
        return f"got {value.dtype}, {target.dtype} is needed (value.to({target.dtype}))"
    if not _is_dense(value):
        return "got a tensor without dense memory"
    return None


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other:
        return True
    return torch.allclose(one, other.to(one.device), rtol=0, atol=0, equal_nan=True)


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:8])}{' …' if len(names) > 8 else ''}"
