"""Batches for attention tests, and what they must give: one request at a time, in float64.

Shared by the interpreter tests and the GPU tests of the Triton backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pcgsvc.ops.attention import AttentionBackend, AttentionSpec
from pcgsvc.ops.context import ForwardContext


@dataclass
class Step:
    """One step's inputs. Rows beyond the true ones are padding and hold NaN."""

    context: ForwardContext
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    seq_lens: list[int]
    query_lens: list[int]

    @property
    def num_tokens(self) -> int:
        """True rows."""
        return sum(self.query_lens)


def spec(
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    layers: int = 1,
    windows: Sequence[int | None] | None = None,
    softcap: float | None = None,
) -> AttentionSpec:
    """Return a spec with a scale that is not the usual one, so that it is seen to be used."""
    return AttentionSpec(
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        scale=0.9 * dim**-0.5,
        max_position=1 << 16,
        sliding_windows=None if windows is None else tuple(windows),
        softcap=softcap,
    )


def make_step(
    backend: AttentionBackend,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    rows: int | None = None,
    max_reqs: int | None = None,
    max_blocks: int | None = None,
    uniform_query_len: int | None = None,
    seed: int = 0,
) -> Step:
    """Return a step over shuffled blocks, and put random past keys (dead slots: NaN) in all layers.

    Args:
        backend: its cache is filled; its device and dtype are used.
        query_lens: new tokens of each request.
        seq_lens: length of each request after the step.
        rows: padded rows; None: no padding.
        max_reqs: R; None: two more than there are.
        max_blocks: B; None: two more than the longest request needs.
        uniform_query_len: as in the context.
        seed: of everything random.
    """
    generator = torch.Generator().manual_seed(seed)
    cache = backend.kv_cache[0]
    device, dtype, size = cache.device, cache.dtype, backend.block_size
    num_tokens = sum(query_lens)
    rows, max_reqs = rows or num_tokens, max_reqs or len(seq_lens) + 2
    needed = [-(-length // size) for length in seq_lens]
    max_blocks = max_blocks or max(needed) + 2
    pool = (torch.randperm(backend.num_blocks - 1, generator=generator) + 1).tolist()
    assert sum(needed) <= len(pool), "the test's cache is too small"
    tables = torch.zeros(max_reqs + 1, max_blocks, dtype=torch.int32)
    slots, owner, kv_lens = (torch.zeros(rows, dtype=torch.int32) for _ in range(3))
    owner.fill_(max_reqs)
    starts = torch.full((max_reqs + 1,), num_tokens, dtype=torch.int32)
    for layer in backend.kv_cache:
        layer[:, 1:] = float("nan")
        layer[:, 0] = 0
    row = 0
    for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        starts[request] = row
        blocks = torch.tensor([pool.pop() for _ in range(needed[request])])
        tables[request, : len(blocks)] = blocks
        where = torch.arange(seq_len)
        mine = blocks[where // size] * size + where % size
        past = mine[: seq_len - query_len]
        for layer in backend.kv_cache:
            noise = torch.randn(2, len(past), *layer.shape[3:], generator=generator)
            layer.flatten(1, 2)[:, past.to(device)] = noise.to(device, dtype)
        slots[row : row + query_len] = mine[seq_len - query_len :]
        owner[row : row + query_len] = request
        kv_lens[row : row + query_len] = where[seq_len - query_len :] + 1
        row += query_len

    def tensor(heads: int) -> torch.Tensor:
        out = torch.full((rows, heads, backend.spec.head_dim), float("nan"))
        out[:num_tokens] = torch.randn(num_tokens, *out.shape[1:], generator=generator)
        return out.to(device, dtype)

    lengths = torch.zeros(max_reqs, dtype=torch.int32)
    lengths[: len(seq_lens)] = torch.tensor(seq_lens, dtype=torch.int32)
    context = ForwardContext(
        padded_tokens=rows,
        num_tokens=num_tokens,
        query_lens=list(query_lens),
        seq_lens_host=list(seq_lens),
        slot_mapping=slots.to(device),
        token_to_req=owner.to(device),
        kv_lens=kv_lens.to(device),
        block_tables=tables.to(device),
        query_start_loc=starts.to(device),
        seq_lens=lengths.to(device),
        num_tokens_tensor=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        attention=backend,
        uniform_query_len=uniform_query_len,
    )
    kv_heads = backend.spec.num_kv_heads
    q, k, v = tensor(backend.spec.num_heads), tensor(kv_heads), tensor(kv_heads)
    return Step(context, q, k, v, list(seq_lens), list(query_lens))


def copy_metadata(source: ForwardContext, target: ForwardContext) -> None:
    """Rewrite the static buffers of `target`, as a runner does before a replay."""
    for name in (
        "slot_mapping",
        "token_to_req",
        "kv_lens",
        "block_tables",
        "query_start_loc",
        "seq_lens",
        "num_tokens_tensor",
    ):
        getattr(target, name).copy_(getattr(source, name))


def expected(
    backend: AttentionBackend,
    step: Step,
    layer: int = 0,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [T, H, D] in float64 and the cache after the step.

    Call it before the backend runs: it starts from the cache as it is.
    """
    cache, context, spec = backend.kv_cache[layer].clone(), step.context, backend.spec
    flat = cache.flatten(1, 2)
    slots = context.slot_mapping[: step.num_tokens].long()
    flat[0, slots] = step.k[: step.num_tokens]
    flat[1, slots] = step.v[: step.num_tokens]
    output = torch.zeros_like(step.q, dtype=torch.float64)
    first = 0
    for request, (query_len, seq_len) in enumerate(
        zip(step.query_lens, step.seq_lens, strict=True)
    ):
        where = torch.arange(seq_len, device=cache.device)
        blocks = context.block_tables[request].long()[where // backend.block_size]
        past = flat[:, blocks * backend.block_size + where % backend.block_size].double()
        keys, values = past.repeat_interleave(spec.num_heads // spec.num_kv_heads, 2)
        rows = slice(first, first + query_len)
        scores = torch.einsum("qhd,lhd->hql", step.q[rows].double(), keys) * spec.scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        ago = where[seq_len - query_len :, None] - where  # [Q, L]
        hidden = (ago < 0) | (ago >= (window or seq_len))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        output[rows] = torch.einsum("hql,lhd->qhd", weights, values)
        first += query_len
    return output, cache


def run(backend: AttentionBackend, step: Step, layer: int = 0) -> torch.Tensor:
    """Return the backend's output; it starts as NaN, so that what was not written is seen."""
    output = torch.full_like(step.q, float("nan"))
    backend.forward(step.q, step.k, step.v, output, layer, step.context)
    return output


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the relative error of a whole tensor; NaN anywhere makes it NaN."""
    got, want = got.double().cpu(), want.double().cpu()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def same_cache(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether two caches are equal bit for bit, NaN included."""
    return torch.equal(got.cpu().nan_to_num(777.0), want.cpu().nan_to_num(777.0))
