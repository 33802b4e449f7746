"""Splitting ops: custom op, fake implementation and boundary in one declaration.

In: a Python function that works in place on buffers it is given. Out: a `torch.ops` op that every
partition strategy splits at, and an `OpSpec` that says how it may be captured. Knows nothing of
graphs or models.

The registry is as global as torch's own op registry, of which it is the counterpart.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from pcgsvc import torch_private
from pcgsvc.cuda_driver import Launch
from pcgsvc.errors import ConfigError
from pcgsvc.ops.support import Support

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
PlanLaunches = Callable[..., Sequence[Launch | None] | None]


@dataclass(frozen=True)
class OpSpec:
    """What is known of one splitting op."""

    name: str
    """`ns::op`."""
    kernel: Callable[..., Any]
    """What runs on replay, called directly: no dispatcher between."""
    fake: Callable[..., Any] | None
    """Shape function; None for an op that returns nothing."""
    schema: str
    """Full schema string, as torch prints it."""
    mutates_args: tuple[str, ...]
    """Arguments that the op writes to."""
    support: Support | None
    """Capture support; None: as the runner's attention backend says."""
    zeroes_padding: bool
    """Whether the op itself leaves padding rows of its outputs zero; else the boundary does."""
    stands_for: str | None = None
    """The splitting op that a compiler pass may replace by this one."""
    bind: Callable[..., Callable[[], None] | None] | None = None
    """Called like the kernel, right after it, over the buffers of a captured entry: returns the
    same call with everything looked up, or None. It runs on the runner's stream at each replay;
    the session keeps the buffers."""
    reason: str | None = None
    """Why it cannot be captured, for reports; None: it is registered, no more is known."""
    plan_launches: PlanLaunches | None = None
    """Called with the step's context and the op's arguments: the kernels that the op would launch
    now, in order, or None for what it cannot tell. It launches nothing, and reads of a tensor what
    it is made of, not what it holds: boundaries whose tensors are alike share one plan a step."""


class _Declaration(NamedTuple):
    """How an op was declared to torch."""

    signature: str
    tags: tuple[torch.Tag, ...]
    library: torch.library.Library
    """A Library that dies takes its ops along."""


_SPECS: dict[str, OpSpec] = {}
_DECLARATIONS: dict[str, _Declaration] = {}


def splitting_op(
    name: str,
    *,
    mutates_args: Iterable[str] = (),
    support: str | Support = "never",
    fake: Callable[..., Any] | None = None,
    zeroes_padding: bool = False,
    tags: Iterable[torch.Tag] = (),
    plan_launches: PlanLaunches | None = None,
) -> Callable[[F], F]:
    """Declare a function as custom op, fake implementation and graph boundary in one.

    Args:
        name: `namespace::op`.
        mutates_args: arguments that the function writes to. Row-wise ones (first dimension = the
            step's rows) get their padding rows zeroed after each call.
        support: which batches may be captured with the op inside (`never`,
            `uniform_single_token_decode`, `uniform_batch`, `always`). The default keeps it outside,
            so that no host value that it reads is ever frozen.
        fake: shape function, needed when the op returns tensors.
        zeroes_padding: the function leaves padding rows zero by itself.
        tags: further torch tags.
        plan_launches: tells which kernels the function would launch, so that `capture.replay` can
            make them part of one graph; see `OpSpec`. The function must zero padding rows.

    The same definition may be run again, changed or not (a module reloaded, a notebook's cell): the
    op is then declared anew. Runners that were built before go on with what they were built with.

    Returns:
        A decorator that gives a function back that calls the op, as `torch.ops.<ns>.<op>` does.

    Raises:
        ConfigError: the op mutates nothing and returns nothing (torch's dead-code removal would
            silently delete it), it returns tensors but has no `fake`, or the name is taken
            by another function.
    """

    def decorate(function: F) -> F:
        function = getattr(function, "op_kernel", function)  # of a function that is decorated twice
        register_splitting_op(
            name,
            function,
            mutates_args=mutates_args,
            support=Support.parse(support),  # None is not for callers
            fake=fake,
            zeroes_padding=zeroes_padding,
            tags=tags,
            plan_launches=plan_launches,
        )

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            namespace, _, op = name.partition("::")
            return getattr(getattr(torch.ops, namespace), op)(*args, **kwargs)

        call.op_kernel = function  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return decorate


def register_splitting_op(
    name: str,
    kernel: Callable[..., Any],
    *,
    mutates_args: Iterable[str] = (),
    support: Support | None = Support.NEVER,
    fake: Callable[..., Any] | None = None,
    zeroes_padding: bool = False,
    tags: Iterable[torch.Tag] = (),
    stands_for: str | None = None,
    bind: Callable[..., Callable[[], None] | None] | None = None,
    reason: str | None = None,
    plan_launches: PlanLaunches | None = None,
) -> OpSpec:
    """Register `kernel` as splitting op `name`; see `splitting_op`. `support=None`: the backend's.

    `stands_for`: the splitting op that a compiler pass may replace by this one. `bind` and
    `plan_launches`: see `OpSpec`. `reason`: why it is a boundary, in the words of reports.

    `torch.library.custom_op` is not used: it costs 4 to 7 times as much per call as
    `Library.define` and `impl` (measured on torch 2.11, 2.13 and 2.14).
    """
    namespace, _, op = name.partition("::") if isinstance(name, str) else ("", "", "")
    if not (namespace.isidentifier() and op.isidentifier()):
        raise ConfigError(f"splitting op name: got {name!r}, 'namespace::op' is needed: {_CALL}.")
    if not inspect.isroutine(kernel):
        raise ConfigError(f"splitting op {name}: got {kernel!r}, a function is needed: {_CALL}.")
    mutated = _words(name, "mutates_args", mutates_args, str)
    for what, given in (("fake", fake), ("bind", bind), ("plan_launches", plan_launches)):
        if given is not None and not callable(given):
            raise ConfigError(f"splitting op {name}: got {what}={given!r}, a function is needed.")
    try:
        signature = torch.library.infer_schema(kernel, mutates_args=mutated, op_name=op)
    except ValueError as error:  # an annotation that is missing, or that no op can have
        raise ConfigError(f"splitting op {name}: {error}") from error
    returns_nothing = signature.endswith("-> ()")
    if returns_nothing and not mutated:
        raise ConfigError(
            f"splitting op {name}: it mutates nothing and returns nothing, so dead-code removal "
            "would delete its calls. Name the buffers it writes in mutates_args."
        )
    if not returns_nothing and fake is None:
        raise ConfigError(
            f"splitting op {name}: it returns tensors, so it needs a shape function: fake=…"
        )
    if plan_launches is not None and not (zeroes_padding and returns_nothing):
        raise ConfigError(
            f"splitting op {name}: got plan_launches; such an op returns nothing and zeroes "
            "padding rows itself (zeroes_padding=True): nothing but these launches would run."
        )
    known = _SPECS.get(name)
    if known is not None and not _same_function(known.kernel, kernel):
        raise ConfigError(
            f"splitting op {name}: already registered by {where_defined(known.kernel)}; "
            f"{where_defined(kernel)} needs another name."
        )
    _declare(name, signature, _words(name, "tags", tags, torch.Tag))
    schema = str(getattr(getattr(torch.ops, namespace), op).default._schema)
    spec = OpSpec(
        name=name,
        kernel=kernel,
        fake=fake,
        schema=schema,
        mutates_args=mutated,
        support=None if support is None else Support.parse(support),
        zeroes_padding=zeroes_padding,
        stands_for=stands_for,
        bind=bind,
        reason=reason,
        plan_launches=plan_launches,
    )
    _SPECS[name] = spec
    return spec


_CALL = "@pcgsvc.splitting_op('mine::op', mutates_args=('out',)) over def op(x: torch.Tensor, …)"


def _words(name: str, what: str, given: Any, kind: type[T]) -> tuple[T, ...]:
    """Return what a list of one kind holds; ConfigError if it is no such list."""
    is_list = isinstance(given, Iterable) and not isinstance(given, (str, torch.Tensor))
    found = tuple(given) if is_list else ()
    if not is_list or not all(isinstance(value, kind) for value in found):
        raise ConfigError(
            f"splitting op {name}: got {what}={given!r}, a list of {kind.__name__} is needed: "
            f"{_CALL}."
        )
    return found


def _declare(name: str, signature: str, tags: tuple[torch.Tag, ...]) -> None:
    """Declare an op to torch; once more if its module was reloaded with another declaration.

    Kernel and fake are looked up when they are called, so that those of a reloaded module count.
    """
    known = _DECLARATIONS.get(name)
    if known is not None and (known.signature, known.tags) == (signature, tags):
        return
    if known is not None:
        torch_private.undeclare_ops(known.library)
    namespace, _, op = name.partition("::")
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(signature, tags=tags)

    def implementation(*args: Any) -> Any:
        return _SPECS[name].kernel(*args)

    def fake(*args: Any) -> Any:
        function = _SPECS[name].fake
        return None if function is None else function(*args)

    library.impl(op, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=library)
    _DECLARATIONS[name] = _Declaration(signature, tags, library)


def _same_function(a: Callable[..., Any], b: Callable[..., Any]) -> bool:
    """Whether two functions are one definition (a module imported twice, or reloaded).

    Each run of a notebook's cell has a file of its own.
    """
    if a is b or getattr(a, "__qualname__", None) != getattr(b, "__qualname__", ""):
        return a is b
    return a.__module__ == b.__module__ or inspect.getsourcefile(a) == inspect.getsourcefile(b)


def where_defined(thing: Callable[..., Any]) -> str:
    """Return the qualified name of a function or class, for messages."""
    return f"{thing.__module__}.{getattr(thing, '__qualname__', thing)}"


def find_spec(name: str) -> OpSpec | None:
    """Return the splitting op called `ns::op`, or None if none has that name."""
    return _SPECS.get(name)


def stand_ins(names: Iterable[str]) -> set[str]:
    """Return the ops by which a compiler pass may have replaced some of `names`."""
    wanted = set(names)
    return {name for name, spec in _SPECS.items() if spec.stands_for in wanted}


def traced_name(name: str) -> str:
    """Return the name by which the trace knows an op that was called."""
    spec = _SPECS.get(name)
    return name if spec is None or spec.stands_for is None else spec.stands_for


def why_boundary(name: str, otherwise: str) -> str:
    """Return why an op is a boundary by default, or `otherwise` if its spec gives no reason."""
    spec = _SPECS.get(name)
    return otherwise if spec is None or spec.reason is None else spec.reason


def registered_names() -> list[str]:
    """Return the names of all registered splitting ops, sorted."""
    return sorted(_SPECS)


def default_boundaries(splitting_ops: Sequence[str] | None) -> frozenset[str]:
    """Return the ops that are boundaries without being named.

    Every registered splitting op is one, unless `partition.splitting_ops` names the boundaries
    (`splitting_ops` is not None): then none is.
    """
    return frozenset(_SPECS) if splitting_ops is None else frozenset()
