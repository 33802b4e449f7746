"""Masks as transformers describes them: functions of positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pcgsvc.models.hf.probe import MaskError, mask_window

Mask = Callable[[Any, Any, Any, Any], Any]
CAUSAL: Mask = lambda b, h, q, k: k <= q  # noqa: E731


def sliding(size: int) -> Mask:
    return lambda b, h, q, k: (k <= q) & (k > q - size)


@pytest.mark.parametrize("length", [1, 7, 64, 5000])
def test_causal_masks_have_no_window(length: int) -> None:
    assert mask_window(CAUSAL, length) is None


@pytest.mark.parametrize("size", [1, 4, 63])
def test_windows_are_found_far_beyond_the_first_tokens(size: int) -> None:
    assert mask_window(sliding(size), 64) == size
    assert mask_window(sliding(4096), 5000) == 4096


def test_a_window_as_long_as_the_model_is_none() -> None:
    assert mask_window(sliding(64), 64) is None


MASKS: dict[str, Mask] = {
    "bidirectional": lambda b, h, q, k: torch.ones_like(k, dtype=torch.bool),
    "prefix": lambda b, h, q, k: (k <= q) | (k < 4),
    "chunks": lambda b, h, q, k: (k <= q) & (k // 32 == q // 32),
    "late prefix": lambda b, h, q, k: (k <= q) & ((k > q - 40) | (k < 2)),
    "strided": lambda b, h, q, k: (k <= q) & ((q - k) % 2 == 0),
    "nothing": lambda b, h, q, k: torch.zeros_like(k, dtype=torch.bool),
}


@pytest.mark.parametrize("kind", MASKS)
def test_other_masks_are_refused(kind: str) -> None:
    with pytest.raises(MaskError, match="neither causal nor a sliding window"):
        mask_window(MASKS[kind], 100)


def test_masks_that_depend_on_data_are_refused() -> None:
    padding = torch.ones(1, 8, dtype=torch.bool)
    with pytest.raises(MaskError, match="depends on data"):
        mask_window(lambda b, h, q, k: (k <= q) & padding[b, k], 64)
