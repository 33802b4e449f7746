"""`model=two_regions`: the smallest program that shows the technique.

Region A computes h = tanh(x / 2); the boundary is causal self-attention within each request, with
q = k = v = h, written into a bridge buffer; region B computes y = b + sigmoid(b). No weights.

The boundary reads the requests' lengths on the host, as most attention kernels do, so it stays
outside every CUDA graph (`support="never"`) while the regions around it are captured.

Shapes: T = rows of the step with padding, E = width.
"""

from __future__ import annotations

import torch
from torch import nn

from pcgsvc.config import Config
from pcgsvc.errors import ConfigError
from pcgsvc.forward.bundle import ModelBundle
from pcgsvc.ops.context import current_context
from pcgsvc.ops.registry import splitting_op

DEFAULT_WIDTH = 32
"""Features per row when `model.hidden_size` is None."""


@splitting_op("pcgsvc::two_regions_attend", mutates_args=("bridge",), support="never")
def two_regions_attend(h: torch.Tensor, bridge: torch.Tensor) -> None:
    """Write causal self-attention of h [T, E] into bridge [T, E], request by request.

    Only true rows are written; each row attends to itself and the rows of its request before it.
    """
    first = 0
    for length in current_context().query_lens:
        rows = slice(first, first + length)
        request = h[rows].float()
        scores = request @ request.T * h.shape[1] ** -0.5
        hidden = torch.ones(length, length, dtype=torch.bool, device=h.device).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        bridge[rows] = (weights @ request).to(h.dtype)
        first += length


class TwoRegions(nn.Module):
    """See the module docstring."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return y [T, E] of x [T, E]."""
        h = torch.tanh(x / 2)
        bridge = torch.empty_like(h)
        torch.ops.pcgsvc.two_regions_attend(h, bridge)
        return bridge + torch.sigmoid(bridge)


def validate(config: Config) -> None:
    """Check `model.hidden_size`, the one dimension that this model has."""
    width = config.model.hidden_size
    if width is not None and width < 1:
        raise ConfigError(f"model.hidden_size: got {width}, at least 1 is needed.")


def build(config: Config, device: torch.device, dtype: torch.dtype) -> ModelBundle:
    """Return the model with its maker of inputs: normally distributed rows x [T, E]."""
    validate(config)
    width = config.model.hidden_size or DEFAULT_WIDTH

    def make_inputs(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        x = torch.randn(rows, width, generator=generator, device=generator.device)
        return {"x": x.to(device, dtype)}

    return ModelBundle(module=TwoRegions().eval(), make_inputs=make_inputs, dynamic_dims={"x": 0})
