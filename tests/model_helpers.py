"""Run a model without the pipeline: a hand-built forward context over a KV cache of our own."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from omegaconf import OmegaConf

from pcgsvc.config import Config
from pcgsvc.config.tree import from_tree
from pcgsvc.ops.attention import AttentionBackend, AttentionSpec
from pcgsvc.ops.context import ForwardContext
from pcgsvc.ops.varlen import VarlenAttention


def config_of(words: Sequence[str]) -> Config:
    """Return what words of the command line set, without the 0.1 s that Hydra takes for it."""
    named = [re.sub("^(model|attention|compiler)=", r"\1.name=", word) for word in words]
    return from_tree(OmegaConf.from_dotlist(named))


def make_backend(
    spec: AttentionSpec,
    *,
    num_blocks: int = 32,
    dtype: torch.dtype = torch.float32,
    kind: type[AttentionBackend] = VarlenAttention,
) -> AttentionBackend:
    """Return a backend with an empty KV cache of 16-token blocks on the CPU."""
    device = torch.device("cpu")
    return kind(spec, num_blocks=num_blocks, block_size=16, device=device, dtype=dtype)


def make_context(
    backend: AttentionBackend | None,
    query_lens: list[int],
    *,
    past: list[int] | None = None,
    padding: int = 0,
    device: torch.device | None = None,
) -> ForwardContext:
    """Return the context of one step; request r owns every len(query_lens)-th block from 1 + r."""
    requests = len(query_lens)
    past = past or [0] * requests
    seq_lens = [p + q for p, q in zip(past, query_lens, strict=True)]
    blocks = -(-max(seq_lens) // 16)
    tables = torch.zeros(requests + 1, blocks, dtype=torch.int32)
    for request in range(requests):
        tables[request] = 1 + request + requests * torch.arange(blocks)
    slots, owners, kv_lens = [], [], []
    for request in range(requests):
        for position in range(past[request], seq_lens[request]):
            slots.append(int(tables[request, position // 16]) * 16 + position % 16)
            owners.append(request)
            kv_lens.append(position + 1)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    starts = [sum(query_lens[:r]) for r in range(requests + 1)]
    return ForwardContext(
        padded_tokens=len(slots) + padding,
        num_tokens=len(slots),
        query_lens=query_lens,
        seq_lens_host=seq_lens,
        slot_mapping=ints(slots + [0] * padding),
        token_to_req=ints(owners + [requests] * padding),
        kv_lens=ints(kv_lens + [0] * padding),
        block_tables=tables,
        query_start_loc=ints(starts),
        seq_lens=ints(seq_lens),
        num_tokens_tensor=ints([len(slots)]),
        attention=backend,
    )
