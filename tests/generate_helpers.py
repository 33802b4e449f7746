"""The tiny llama that generates, and the loop without a cache that it is compared with."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from model_helpers import config_of, make_backend, make_context

import pcgsvc
from pcgsvc.ops.context import use_context


def load(programs: Path | None = None, **settings: Any) -> pcgsvc.Runner:
    """Build the tiny llama; `programs`: a cache in which it may be traced already."""
    defaults = {
        "model": "llama",
        "model.num_layers": 2,
        "compiler": "eager",
        "capture.sizes": "[1,2,4,8]",
        "attention.block_size": 4,
        **({"cache.mode": "off"} if programs is None else {"cache.dir": programs}),
    }
    words = [f"{k}={v}" for k, v in (defaults | settings).items()]
    return pcgsvc.load_runner(config=config_of(words))


@functools.cache
def plain_bundle() -> Any:
    from pcgsvc.config import Config, ModelConfig
    from pcgsvc.models.catalog import build_model

    config = Config(model=ModelConfig(num_layers=2))
    return build_model(config, device=torch.device("cpu"), dtype=torch.float32)


@torch.no_grad()
def logits_of(ids: list[int]) -> torch.Tensor:
    """Run one request from position 0 without a pipeline."""
    bundle = plain_bundle()
    backend = make_backend(bundle.attention)
    with use_context(make_context(backend, [len(ids)])):
        result: torch.Tensor = bundle.module(torch.tensor(ids), torch.arange(len(ids)))
    return result


@functools.cache
def recomputed(prompt: tuple[int, ...], new: int) -> list[int]:
    """Continue greedily, the whole sequence at each step."""
    ids = list(prompt)
    for _ in range(new):
        ids.append(int(logits_of(ids)[-1].argmax()))
    return ids[len(prompt) :]


def wanted(prompts: list[list[int]], new: int) -> list[list[int]]:
    return [recomputed(tuple(p), new) for p in prompts]


def generate_ids(
    runner: pcgsvc.Runner,
    prompts: list[list[int]],
    new: int,
    *,
    end_ids: frozenset[int] = frozenset(),
) -> list[list[int]]:
    """Continue greedily, to an end token of these alone."""
    sampling = pcgsvc.Sampling(end_ids=end_ids)
    made: list[list[int]] = runner.generate(prompts, new, sampling=sampling, return_ids=True)
    return made


class Words:
    """A tokenizer of numbers: "5 17" is [5, 17]."""

    eos_token_ids = frozenset({500})

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def encode_chat(self, text: str) -> list[int]:
        return [1, *self.encode(text)]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))
