"""The safety net: does the model compute here what it computes in transformers?

In: a built model and its `AttentionSpec`. Out: nothing, or a `VerifyError`. The probe refuses by
name what it knows; this catches the rest, whatever it is: attention code that is not what it says,
positions that are ignored, state that layers keep outside attention, rows that see each other.

Two token sequences go through transformers' own forward, each whole, with its `eager` attention
and its own experts. Then both go through ours in flat steps: a prefill of both, a chunk beside a
decode, then decoding, over a KV cache of the configured backend. All logits must agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pcgsvc.errors import VerifyError
from pcgsvc.forward.batch import Batch, CacheGeometry, StepBuffers, check_batch
from pcgsvc.models.hf.attention import first_position
from pcgsvc.models.hf.source import Source
from pcgsvc.models.hf.weights import implementation
from pcgsvc.ops.attention import AttentionBackend, AttentionSpec
from pcgsvc.ops.context import use_context

_LENGTHS = (24, 11)
_MOST = 256
"""Longest sequence, so that windows of a few hundred keys are felt."""
TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Largest difference of a row's logits, relative to the largest of all. In the reduced precisions
one row in ten may pass it: an expert chosen otherwise by rounding changes a row altogether."""


@dataclass(frozen=True)
class Reference:
    """Two sequences and the logits that transformers gives them."""

    sequences: list[torch.Tensor]
    """Token ids [L] each."""
    logits: list[torch.Tensor]
    """[L, vocab] each."""


def take(source: Source, model: Any, spec: AttentionSpec, vocab_size: int, seed: int) -> Reference:
    """Run transformers' own forward on random sequences.

    Raises:
        ConfigError: it fails.
    """
    windows = [w for w in spec.sliding_windows or () if w is not None]
    longest = max(_LENGTHS[0], min(windows, default=0) + 8)
    longest = min(longest if longest <= _MOST else _LENGTHS[0], spec.max_position)
    device, first = next(model.parameters()).device, first_position(model)
    generator = torch.Generator().manual_seed(seed)
    sequences = [
        torch.randint(vocab_size, (length,), generator=generator).to(device)
        for length in (longest, min(_LENGTHS[1], longest))
    ]
    if first:  # padding has no position of its own there
        sequences = [ids.where(ids != first - 1, first % vocab_size) for ids in sequences]
    try:
        # Positions are left to transformers: where its own begin is part of what is compared.
        with torch.no_grad(), implementation(model, "eager", "eager"):
            results = [model(input_ids=ids.unsqueeze(0), use_cache=False) for ids in sequences]
            logits = [result.logits.squeeze(0) for result in results]
    except Exception as error:
        raise source.refuse(
            "transformers' own forward, with its eager attention, fails on a sequence of random "
            f"tokens: {type(error).__name__}: {error}. Try another config or another release of "
            "transformers; model.reference_check=false runs it without being compared."
        ) from error
    return Reference(sequences, logits)


def check(
    source: Source,
    reference: Reference,
    module: nn.Module,
    spec: AttentionSpec,
    kind: type[AttentionBackend],
    *,
    dtype: torch.dtype,
) -> float:
    """Return the largest difference of our plain forward from transformers', relative.

    Raises:
        VerifyError: it is above `TOLERANCE`.
    """
    got = flat_logits(reference.sequences, module, spec, kind, dtype)
    want = torch.cat(reference.logits).float()
    rows = (torch.cat(got).float() - want).abs().amax(-1) / want.abs().max()
    share = 1.0 if dtype is torch.float32 else 0.9
    error = float(rows.quantile(share)) if bool(rows.isfinite().all()) else float("nan")
    if not error <= TOLERANCE[dtype]:
        first = int((~(rows <= TOLERANCE[dtype])).nonzero()[0])
        number, row = (0, first) if first < len(got[0]) else (1, first - len(got[0]))
        raise VerifyError(
            f"{source.setting}: '{source.label}' does not compute here what it computes in "
            f"transformers: logits differ by {error:.2g} of the largest, {TOLERANCE[dtype]:g} is "
            f"allowed; first at token {row} of a sequence of {len(got[number])} tokens. Its "
            "attention does something that pcgsvc does not know, its layers keep a state of their "
            "own, or it mixes rows. model.reference_check=false runs it all the same."
        )
    return error


def _schedule(lengths: list[int]) -> Iterator[list[int]]:
    """Yield how many tokens of each sequence the next step has."""
    done = [0] * len(lengths)
    first = [max(1, length // 2) for length in lengths]
    chunk = [max(1, length // 4) if number == 0 else 1 for number, length in enumerate(lengths)]
    for wanted in (first, chunk, *([1] * len(lengths) for _ in range(max(lengths)))):
        step = [
            min(count, length - at) for count, length, at in zip(wanted, lengths, done, strict=True)
        ]
        if not any(step):
            return
        done = [at + count for at, count in zip(done, step, strict=True)]
        yield step


def flat_logits(
    sequences: list[torch.Tensor],
    module: nn.Module,
    spec: AttentionSpec,
    kind: type[AttentionBackend],
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Return our logits [L, vocab] of each sequence, computed in flat steps over a KV cache."""
    device, lengths = sequences[0].device, [len(ids) for ids in sequences]
    block_size, width = 16, -(-max(lengths) // 16)
    blocks = 1 + width * len(sequences)
    backend = kind(spec, num_blocks=blocks, block_size=block_size, device=device, dtype=dtype)
    cache = CacheGeometry(
        block_size=block_size, num_blocks=blocks, scratch_blocks=0, max_model_len=max(lengths)
    )
    buffers = StepBuffers(
        max_tokens=sum(lengths),
        max_reqs=len(sequences),
        blocks_per_request=width,
        device=device,
    )
    tables = [[1 + n * width + b for b in range(width)] for n in range(len(sequences))]
    done, logits = [0] * len(sequences), [[] for _ in sequences]  # type: list[int], list[Any]
    for counts in _schedule(lengths):
        live = [n for n, count in enumerate(counts) if count]
        starts = list(done)
        done = [at + count for at, count in zip(done, counts, strict=True)]
        ids = torch.cat([sequences[n][starts[n] : done[n]] for n in live])
        positions = torch.cat([torch.arange(starts[n], done[n]) for n in live]).to(device)
        batch = check_batch(
            Batch(
                query_lens=[counts[n] for n in live],
                seq_lens=[done[n] for n in live],
                block_tables=[tables[n] for n in live],
            ),
            len(ids),
            cache,
        )
        buffers.fill(batch, len(ids))
        context = buffers.context(batch, len(ids), backend)
        backend.plan(context)
        with torch.no_grad(), use_context(context):
            rows = module(ids, positions).split([counts[n] for n in live])
        for n, part in zip(live, rows, strict=True):
            logits[n].append(part)
    return [torch.cat(parts) for parts in logits]
