"""The static memory of one runner: input buffers, step metadata, KV cache, stream.

In: a program's bindings and a config. Out: bound values per size, and a filled context per step.
Knows nothing of graphs. Not safe across threads; the runner's lock guards it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from pcgsvc import torch_private
from pcgsvc.config import Config
from pcgsvc.config.devices import dtype_of
from pcgsvc.errors import ConfigError
from pcgsvc.forward.batch import CacheGeometry, CheckedBatch, StepBuffers
from pcgsvc.forward.process import BUILD_LOCK
from pcgsvc.forward.specs import Binding, InputSpec
from pcgsvc.forward.staging import Copied
from pcgsvc.ops.attention import AttentionBackend, AttentionSpec
from pcgsvc.ops.context import ForwardContext


class Load(NamedTuple):
    """How the inputs of a call of one row count get into the buffers of one size."""

    targets: list[torch.Tensor]
    """Views of the true rows, in the order of the inputs."""
    padding: list[torch.Tensor]
    """Views of all other rows."""
    at_once: bool
    """Whether one kernel may copy all inputs."""


_Step = tuple[CheckedBatch, tuple[int, int | None, bool], ForwardContext]
"""A step's batch, kind and context."""


class Workspace:
    """Buffers for steps of up to `max_tokens` rows and `max_reqs` requests."""

    def __init__(
        self,
        *,
        inputs: Sequence[InputSpec],
        bindings: Sequence[Binding],
        tensors: Mapping[str, torch.Tensor],
        max_tokens: int,
        max_reqs: int,
        attention: AttentionBackend | None,
        geometry: CacheGeometry | None,
        device: torch.device,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self.inputs = list(inputs)
        self.bindings = list(bindings)
        self.tensors = dict(tensors)
        self.attention, self.geometry, self.device = attention, geometry, device
        self.max_tokens, self.max_reqs = max_tokens, max_reqs
        self.buffers = {s.name: s.empty(max_tokens, device).zero_() for s in inputs}
        self.step = self.step_buffers(max_tokens, max_reqs)
        self.stream = stream
        """The stream that everything of this runner runs on; None on the CPU."""
        self._views: dict[int, dict[str, torch.Tensor]] = {}
        self._loads: dict[tuple[int, int], Load] = {}
        self._padded: Load | None = None
        """The last load; the padding rows that it left zero are zero still."""
        self._step: _Step | None = None
        """The step whose metadata is in the buffers."""
        self._next_step: _Step | None = None
        """What becomes of it once what is staged has been copied."""
        self.plans = attention is not None and type(attention).plan is not AttentionBackend.plan
        """Whether the attention does something with a step's metadata before its launches."""

    def step_buffers(self, max_tokens: int, max_reqs: int) -> StepBuffers:
        """Return metadata buffers of another size, for a call that fits no captured entry."""
        return StepBuffers(
            max_tokens=max_tokens,
            max_reqs=max_reqs,
            blocks_per_request=self.geometry.blocks_per_request if self.geometry else 0,
            device=self._metadata_device,
        )

    @property
    def _metadata_device(self) -> torch.device:
        return self.device

    def views(self, size: int) -> dict[str, torch.Tensor]:
        """Return the input buffers cut to `size` rows; the same tensors each time."""
        if size not in self._views:
            self._views[size] = {s.name: s.view(self.buffers[s.name], size) for s in self.inputs}
        return self._views[size]

    def values(self, inputs: Mapping[str, torch.Tensor], size: int) -> list[Any]:
        """Return one value per binding of the program."""
        return [
            size if b.kind == "size" else (inputs if b.kind == "input" else self.tensors)[b.name]
            for b in self.bindings
        ]

    def load(self, inputs: Mapping[str, torch.Tensor], num_tokens: int, size: int) -> None:
        """Copy a call's inputs into the static buffers; padding rows become zero."""
        self.copy_in([inputs[s.name] for s in self.inputs], self.plan_load(num_tokens, size))

    def copy_in(self, values: Sequence[torch.Tensor], load: Load) -> None:
        """Copy inputs, in the order of the specs, where `plan_load` said."""
        padded = self._padded
        if load is not padded:
            self._padded = None  # until all of it is there
        if load.at_once:
            torch_private.copy_all(load.targets, values)
        else:
            for target, value in zip(load.targets, values, strict=True):
                target.copy_(value, non_blocking=True)
        if load is not padded:
            self.pad(load)

    def pad(self, load: Load) -> None:
        """Make the padding rows of a load zero, if those that are zero are another's."""
        if load is not self._padded:
            for tail in load.padding:
                tail.zero_()
            self._padded = load

    def plan_load(self, num_tokens: int, size: int) -> Load:
        """Return where the rows of a call go, and which rows are padding then."""
        load = self._loads.get((num_tokens, size))
        if load is None:
            views = self.views(size)
            targets = [s.cut(views[s.name], num_tokens) for s in self.inputs]
            padding = [
                views[spec.name].narrow(dim, num_tokens, size - num_tokens)
                for spec in self.inputs
                for dim in spec.dims
                if num_tokens < size
            ]
            load = Load(targets, padding, torch_private.can_copy_all(targets))
            self._loads[num_tokens, size] = load
        return load

    def context(
        self,
        batch: CheckedBatch,
        size: int,
        uniform_query_len: int | None = None,
        *,
        in_full_graph: bool = False,
        stage: bool = False,
    ) -> ForwardContext:
        """Fill the metadata of one step, have the attention plan it, and return its context.

        Nothing is done anew for the same batch twice in a row, where no attention plans. With
        `stage`, for attention that plans nothing, the caller copies `step.staged` and tells `sent`.
        """
        last, kind = self._step, (size, uniform_query_len, in_full_graph)
        if last is not None and last[0] is batch and last[1] == kind:
            return last[2]
        self._step = self._next_step = None
        if stage:
            self.step.stage(batch, size)
        else:
            self.step.fill(batch, size)
        context = self.step.context(
            batch, size, self.attention, uniform_query_len, in_full_graph=in_full_graph
        )
        if not self.plans:
            self._next_step = batch, kind, context
        if not stage:
            self._step, self._next_step = self._next_step, None
        return self._planned(context)

    @property
    def staged(self) -> Copied | None:
        """What `context` has staged and nobody has copied yet."""
        return None if self._next_step is None else self.step.staged

    def sent(self) -> None:
        """Note that what `context` staged has been copied."""
        if self._next_step is not None:
            self.step.sent()
            self._step, self._next_step = self._next_step, None

    def unpadded_context(self, batch: CheckedBatch) -> ForwardContext:
        """Return a context without padding; buffers of its own if the static ones are short."""
        rows, reqs = batch.num_tokens, len(batch.query_lens)
        step, self._step = self.step, None
        self._next_step = None
        if rows > step.max_tokens or reqs > step.max_reqs:
            step = self.step_buffers(max(rows, step.max_tokens), max(reqs, step.max_reqs))
        step.fill(batch, rows)
        return self._planned(step.context(batch, rows, self.attention))

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run a block on the runner's stream, ordered with the current one."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def bound(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return some of the bound tensors by name."""
        return {name: self.tensors[name] for name in names}

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close the workspace if a block raises."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of all buffers and the KV cache, and hand the stream on; twice is fine."""
        stream, self.stream = self.stream, None
        BUILD_LOCK.give_stream(stream)
        self.attention, self.step = None, None  # type: ignore[assignment]
        self._step = self._next_step = self._padded = None
        for held in (self.tensors, self.buffers, self._views, self._loads):
            held.clear()

    def static_tensors(self) -> dict[str, torch.Tensor]:
        """Return the memory that graphs were captured on, weights aside, by a name for messages."""
        found = {f"input buffer {name}": buffer for name, buffer in self.buffers.items()}
        if self.attention is not None:
            layers = enumerate(self.attention.kv_cache)
            found |= {f"KV cache of layer {at}": cache for at, cache in layers}
        return found

    def _planned(self, context: ForwardContext) -> ForwardContext:
        if self.attention is not None:
            self.attention.plan(context)
        return context


class ShapeWorkspace(Workspace):
    """A workspace whose buffers have no memory, for plans; made inside a block of fake tensors.

    The step metadata is real and on the host: it is small, and filled through numpy.
    """

    _metadata_device = torch.device("cpu")

    def step_buffers(self, max_tokens: int, max_reqs: int) -> StepBuffers:
        """See `Workspace.step_buffers`."""
        with torch_private.real_tensors():
            return super().step_buffers(max_tokens, max_reqs)


def cache_geometry(
    config: Config, spec: AttentionSpec, *, max_tokens: int, max_reqs: int
) -> CacheGeometry:
    """Size the KV cache: null block, scratch blocks, and what the byte budget leaves for callers.

    Raises:
        ConfigError: `attention.num_blocks` is too small for one request of the longest length.
    """
    size = config.attention.block_size
    longest = min(config.attention.max_model_len or spec.max_position, spec.max_position)
    per_request = -(-longest // size)
    scratch = max(max_tokens, per_request)
    head = spec.num_kv_heads * spec.head_dim
    block_bytes = 2 * spec.num_layers * size * head * dtype_of(config).itemsize
    least = 1 + scratch + per_request
    blocks = config.attention.num_blocks
    if blocks is None:
        room = config.attention.max_cache_bytes // block_bytes
        blocks = min(1 + scratch + max_reqs * per_request, max(room, least))
    if blocks < least:
        raise ConfigError(
            f"attention.num_blocks: got {blocks}; 1 null block, {scratch} scratch blocks and "
            f"{per_request} for one request of {longest} tokens make {least}."
        )
    return CacheGeometry(
        block_size=size, num_blocks=blocks, scratch_blocks=scratch, max_model_len=longest
    )


@contextlib.contextmanager
def preserved(state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Put the content of tensors back at the end of a block."""
    saved = {name: tensor.clone() for name, tensor in state.items()}
    try:
        yield
    finally:
        for name, tensor in state.items():
            tensor.copy_(saved[name])
