"""Attention specs, and the plain-torch backends against a float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import error, expected, make_step, run, same_cache, spec

from pcgsvc.errors import ConfigError
from pcgsvc.ops import paged
from pcgsvc.ops.attention import AttentionBackend
from pcgsvc.ops.paged import PagedAttention
from pcgsvc.ops.varlen import VarlenAttention

BACKENDS = [PagedAttention, VarlenAttention]
MIXED = ([5, 1, 9, 1], [5, 33, 30, 16])


def backend(
    kind: type[AttentionBackend], heads: int = 4, kv_heads: int = 2, dim: int = 16, **options: Any
) -> AttentionBackend:
    options.setdefault("layers", len(options.get("windows") or [None]))
    return kind(
        spec(heads, kv_heads, dim, **options),
        num_blocks=40,
        block_size=16,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


def check(attention: AttentionBackend, layer: int = 0, **options: Any) -> torch.Tensor:
    step = make_step(attention, *MIXED, rows=20)
    want, cache = expected(attention, step, layer, **options)
    got = run(attention, step, layer)
    assert error(got, want) < 1e-6
    assert not got[step.num_tokens :].any(), "padding rows are not zero"
    assert same_cache(attention.kv_cache[layer], cache)
    return got


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 4, 16, 21])
def test_window_and_softcap(
    kind: type[AttentionBackend], window: int | None, softcap: float | None
) -> None:
    attention = backend(kind, windows=[window], softcap=softcap)
    check(attention, window=window, softcap=softcap)


@pytest.mark.parametrize("kind", BACKENDS)
def test_windows_are_per_layer(kind: type[AttentionBackend]) -> None:
    attention = backend(kind, windows=[3, None])
    windowed, whole = check(attention, 0, window=3), check(attention, 1)
    assert error(windowed, whole) > 1e-2


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("heads", [(1, 1, 80), (6, 2, 24), (8, 1, 256)], ids=str)
def test_heads_and_their_dimensions(
    kind: type[AttentionBackend], heads: tuple[int, int, int]
) -> None:
    check(backend(kind, *heads))


def test_paged_chunks_that_the_window_hides_whole_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paged, "_CHUNK_ELEMENTS", 1)  # one block of keys at a time
    check(backend(PagedAttention, windows=[4], softcap=0.5), window=4, softcap=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "3 query heads over 2 KV heads"),
        ({"windows": [4], "layers": 2}, "for each of 2 layers"),
        ({"windows": [4, 0]}, "at least 1 key"),
        ({"softcap": 0.0}, "a positive number"),
        ({"softcap": float("inf")}, "a positive number"),
    ],
)
def test_what_no_backend_could_serve_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        backend(PagedAttention, **options)
