"""Batches and inputs that pcgsvc makes up itself: for capture, verification and timing.

In: a workspace and a source of inputs. Out: valid inputs with a valid batch over scratch KV blocks.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Mapping, Sequence

import torch

from pcgsvc.errors import BatchError
from pcgsvc.forward.arguments import MakeInputs
from pcgsvc.forward.batch import Batch, CheckedBatch, check_batch
from pcgsvc.forward.specs import InputSpec, cut_rows, holds_nan
from pcgsvc.forward.workspace import Workspace


class Samples:
    """A seeded source of steps."""

    def __init__(
        self, workspace: Workspace, make_inputs: MakeInputs, *, seed: int, query_len: int
    ) -> None:
        self._workspace = workspace
        self._make_inputs = make_inputs
        self._query_len = query_len
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)

    def inputs(self, rows: int) -> dict[str, torch.Tensor]:
        """Return fresh valid inputs of `rows` rows on the runner's device, laid out as its own."""
        made, device = self._make_inputs(rows, self._generator), self._workspace.device
        return {s.name: s.laid_out(made[s.name].to(device)) for s in self._workspace.inputs}

    def batch(self, rows: int, *, uniform: bool) -> CheckedBatch:
        """Return a batch of `rows` rows over scratch blocks.

        Raises:
            BatchError: there is no such batch (uniform rows that are no multiple of the query
                length, more requests or blocks than the runner has).
        """
        lens = self._uniform(rows) if uniform else self._mixed(rows)
        if len(lens) > self._workspace.max_reqs:
            raise BatchError(
                f"{len(lens)} requests are more than attention.max_num_reqs="
                f"{self._workspace.max_reqs}"
            )
        geometry = self._workspace.geometry
        seq_lens = None
        if uniform and geometry is not None:  # decode: some past in each request's only block
            room = min(geometry.block_size, geometry.max_model_len)
            seq_lens = [max(n, self._random.randint(n, max(n, room))) for n in lens]
        return check_batch(Batch(query_lens=lens, seq_lens=seq_lens), rows, geometry)

    def _uniform(self, rows: int) -> list[int]:
        if rows % self._query_len:
            raise BatchError(
                f"{rows} rows are no multiple of capture.uniform_query_len={self._query_len}"
            )
        return [self._query_len] * (rows // self._query_len)

    def _mixed(self, rows: int) -> list[int]:
        """Return one to four requests of uneven length, none longer than the model allows."""
        geometry = self._workspace.geometry
        limit = min(rows, geometry.max_model_len if geometry is not None else rows)
        lens: list[int] = []
        left = rows
        while left:
            most = min(left, limit)
            last = len(lens) + 1 >= min(4, self._workspace.max_reqs)
            take = most if last else self._random.randint(1, most)
            lens.append(take)
            left -= take
        return lens


class Padding(enum.Enum):
    """What stands in padding rows."""

    ZEROS = "zeros"
    """As in calls."""
    NAN = "NaN"
    """And other valid values of integers."""
    LARGE = "large values"
    """Of either sign, and other valid values of integers."""
    NAN_AND_LARGE = "NaN and large values"
    """Row by row; for two rows or more."""


def padded(
    specs: Sequence[InputSpec],
    true: Mapping[str, torch.Tensor],
    whole: Mapping[str, torch.Tensor],
    kind: Padding,
) -> dict[str, torch.Tensor]:
    """Return inputs with padding rows behind the true ones.

    Args:
        specs: the inputs; which of their dimensions carry the rows.
        true: inputs of the true rows alone, whose integers may be indices of them.
        whole: valid inputs of all rows; their integers are the valid ones of `kind`.
        kind: what stands in the padding rows.
    """
    copies = {}
    for spec in specs:
        copies[spec.name] = tensor = whole[spec.name].clone()
        counts = [true[spec.name].shape[dim] for dim in spec.dims]
        cut_rows(tensor, spec.dims, counts[0] if counts else 0).copy_(true[spec.name])
        for dim, first_row in zip(spec.dims, counts, strict=True):
            _fill(tensor, dim, first_row, kind)
    return copies


def _fill(tensor: torch.Tensor, dim: int, first_row: int, kind: Padding) -> None:
    rows = tensor.shape[dim]
    tail = tensor.narrow(dim, first_row, rows - first_row)
    if kind is Padding.ZEROS or rows == first_row:
        tail.zero_()
    elif not holds_nan(tensor.dtype):
        by_row = tail.movedim(dim, 0)  # torch indexes all dtypes, and flips or selects only some
        by_row.copy_(by_row[torch.arange(len(by_row) - 1, -1, -1, device=tensor.device)])
    else:
        large, nan = min(_LARGE, torch.finfo(tensor.dtype).max), float("nan")
        first, second, fourth = {
            Padding.NAN: (nan, nan, nan),
            Padding.LARGE: (large, -large, -large),
            Padding.NAN_AND_LARGE: (nan, large, -large),
        }[kind]
        by_row = tail.fill_(first).movedim(dim, 0)
        by_row[1::4].fill_(second)
        by_row[3::4].fill_(fourth)


_LARGE = 1e4
"""Far from what models compute with; its square is finite in all but half precision."""
