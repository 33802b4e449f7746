"""The weights of a running model: whether they lie where the graphs read them, and new values.

In: a module and the tensors that its program is bound to. Out: an error when one was replaced, or
when training mode or hooks are no longer as they were; new values written in place. Knows nothing
of graphs.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from pcgsvc import torch_private
from pcgsvc.errors import ConfigError, StaleAddressError, StateError
from pcgsvc.forward.objects import global_places, places_of

# Not of buffers: a forward may assign those, and Dynamo would trace the hook into another's graph.
_HOOKS = (register_module_module_registration_hook, register_module_parameter_registration_hook)
_TURN = 4
"""Addresses of tensors that are compared at each call, each of them memory that the host has not
read for a while. How a tensor's elements are laid out, and a place that holds some, change without
torch's telling even more rarely: one of each."""


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
        places = places_of(module, lambda t: id(t) in bound)
        places += global_places(bound - {id(p.value) for p in places})
        self._places = [(p.get, p.key, p.value, p.name) for p in places if p.get is not None]
        """Where a bound tensor lies, or something that holds one."""
        self._switches = _switches(module, [p.module for p in places if p.module is not None])
        """What else the graphs took from the module; the root's training mode comes first."""
        hooks = [switch[:3] for switch in self._switches if switch[0] in (_newest, _newest_global)]
        self._unhooked = [key for get, key, newest in hooks if get is _newest and newest is None]
        """Hooks of modules that had none; any() asks thousands of them in microseconds."""
        self._hooked = [hook for hook in hooks if hook[0] is _newest_global or hook[2] is not None]
        self._handles = -1
        """How many hooks torch had registered when those of the modules were compared last."""
        compared = [place[:3] for place in [*self._places, *self._switches]]
        always = [(p.get, p.key, p.value) for p in places if p.get is not None and not p.has_hook]
        """Buffers, attributes, items of lists and the like: compared at every call."""
        always += [switch[:3] for switch in self._switches[:1]]
        self._watched = {id(p.module) for p in places if p.module is not None}
        """Identities of the modules that have such places."""
        dense = {n: t for n, t in tensors.items() if _is_dense(t)} | self._static_before
        self._located = [(n, (t, *_where(t))) for n, t in dense.items()]
        """Every bound tensor that has an address."""
        self._memory = [t.untyped_storage() for t in dense.values()]
        """Keeps what the graphs read alive, whatever becomes of the tensors."""
        located = [where for _, where in self._located]
        addresses = [(tensor, address) for tensor, address, _, _ in located]
        parts = _chunks(compared, 1), _chunks(addresses, _TURN), _chunks(located, 1)
        turns = [[part[at % len(part)] for part in parts] for at in range(max(map(len, parts)))]
        self._turns = itertools.cycle([(always + held, *others) for held, *others in turns])
        self._whole = compared, addresses, located
        self._suspect = True
        """Whether all is to be compared: at first, and when torch tells that something was put into
        a watched module."""
        watch = weakref.WeakMethod(self._on_registration)
        for register in _HOOKS:
            handle = register(lambda *args: _tell(watch, args))
            weakref.finalize(self, handle.remove).atexit = False

    def _on_registration(self, module: torch.nn.Module) -> None:
        self._suspect = self._suspect or id(module) in self._watched

    def check(self) -> None:
        """Compare where tensors lie, and what holds them, with what was captured.

        All of them at the first call, when torch tells that something was registered in one of the
        modules (`module.weight = …`), and at every call under `debug.check_addresses`; else what
        torch tells nothing of, the module's own training mode, and some of all, in turn: what
        changes behind torch's back (`param.data = …`) is noticed some calls later. Until then the
        graphs read the old values, whose memory is kept. Hooks are compared when one was
        registered anywhere. Nothing is copied and the device is not asked.

        Raises:
            StaleAddressError: naming the tensor that was replaced.
            ConfigError: training mode or hooks are no longer those of the build.
        """
        handles = torch_private.hooks_registered()
        if handles != self._handles and (
            any(self._unhooked) or any(get(key) is not value for get, key, value in self._hooked)
        ):
            self._refuse()
        whole = self._suspect or self._static is not None
        compared, addresses, located = self._whole if whole else next(self._turns)
        for get, key, value in compared:
            if get(key) is not value:
                self._refuse()
        for tensor, address in addresses:
            if tensor.data_ptr() != address:
                self._refuse()
        for tensor, _, stride, shape in located:
            if tensor.stride() != stride or tensor.shape != shape:
                self._refuse()
        self._suspect, self._handles = False, handles
        if self._static is not None and self._moved():
            self._refuse()

    def _moved(self) -> list[str]:
        """Return which static tensors are others than they were."""
        now = {} if self._static is None else self._static()
        return [n for n, t in self._static_before.items() if now.get(n) is not t]

    def _refuse(self) -> None:
        """Find what was replaced and say so."""
        switched = [name for get, key, value, name in self._switches if get(key) is not value]
        if switched:
            raise ConfigError(
                f"module: {', '.join(switched[:4])}: no longer as at the build, and the graphs do "
                "what the module did then. Put it back (module.eval(), handle.remove()), or build "
                "the runner again."
            )
        gone = [name for get, key, value, name in self._places if get(key) is not value]
        gone += [name for name, (t, *where) in self._located if where != [*_where(t)]]
        gone += self._moved()
        raise StaleAddressError(
            f"{', '.join(dict.fromkeys(gone[:4]))}: its memory was replaced after capture; the "
            "graphs read the old memory. Update weights in place (runner.load_state_dict, "
            "param.copy_(…)), or build the runner again."
        )

    # -- new values --

    def load(self, state: Mapping[str, Any], *, strict: bool) -> LoadedState:
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
        return result


def _tell(watch: weakref.WeakMethod[Any], args: tuple[Any, ...]) -> None:
    """Pass on which module got something; the hook must not keep the weights alive."""
    listener = watch()
    if listener is not None:
        listener(args[0])


def _switches(
    module: Callable[..., Any], others: Sequence[torch.nn.Module]
) -> list[tuple[Callable[[Any], Any], Any, Any, str]]:
    """Return training mode and hooks of a module, what it holds, and others, as places.

    Of several hooks the newest stands for all; attributes of the user's own are not among them.
    """
    named = {id(m): (type(m).__name__, m) for m in others}
    if isinstance(module, torch.nn.Module):
        inner = {id(m): (name or "the module itself", m) for name, m in module.named_modules()}
        named = inner | {key: value for key, value in named.items() if key not in inner}
    found: list[tuple[Callable[[Any], Any], Any, str]] = []
    for name, m in named.values():
        found.append((vars(m).get, "training", f"training mode of {name}"))
        found.append((_newest, m._forward_hooks, f"forward hooks of {name}"))
        found.append((_newest, m._forward_pre_hooks, f"forward pre-hooks of {name}"))
    found.append((_newest_global, None, "forward hooks of all modules"))
    return [(get, key, get(key), name) for get, key, name in found]


def _newest(hooks: Mapping[int, Any]) -> int | None:
    return next(reversed(hooks), None)


def _newest_global(_: None) -> Any:
    return (torch_private.global_hooks() or [None])[-1]


def _chunks(items: list[Any], count: int) -> list[list[Any]]:
    return [items[at : at + count] for at in range(0, len(items), count)] or [[]]


def _where(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], torch.Size]:
    """Return what graphs know of a tensor: its address, and how its elements lie there."""
    return tensor.data_ptr(), tensor.stride(), tensor.shape


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type != "meta"


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
        targets[name] = torch_private.local_tensor(value)
    return targets


def _match(
    targets: Mapping[str, torch.Tensor], state: Mapping[str, Any], *, strict: bool
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], LoadedState]:
    """Return (target, value) for every tensor, once; StateError lists all that does not fit."""
    if not isinstance(state, Mapping):
        raise StateError(
            f"load_state_dict: got a {type(state).__name__}; a mapping from names to tensors is "
            "needed: runner.load_state_dict(model.state_dict())."
        )
    if not isinstance(strict, bool):
        raise StateError(f"load_state_dict: got strict={strict!r}; true or false is needed.")
    state = {name: torch_private.local_tensor(value) for name, value in state.items()}
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
    return f"{', '.join(map(str, names[:8]))}{' …' if len(names) > 8 else ''}"
