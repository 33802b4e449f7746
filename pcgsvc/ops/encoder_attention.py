"""`pcgsvc::encoder_attention`, the splitting op of encoders: every row sees its whole request.

In: q, k, v of one layer and the forward context. Out: attention written into the output buffer.
There is no KV cache: a request is whole in its step. Knows nothing of models, tracing or graphs.

Support ALWAYS: which rows belong together is read from the device, and shapes depend on the row
count alone, so a captured call serves every batch of its size. The price is a mask of T * T bits
and scores between requests that are thrown away, which at the sizes that are captured is less than
a launch per request would be.

Shapes: T = rows of the step with padding, H = heads, D = head dim.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from pcgsvc.ops.context import current_context
from pcgsvc.ops.registry import register_splitting_op
from pcgsvc.ops.support import Support


def encoder_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, output: torch.Tensor
) -> None:
    """Write softmax(q k / sqrt(D)) v within each request to `output`; all are [T, H, D].

    Padding rows are seen by no true row, whatever they hold, and come out as zero.
    """
    rows, context = q.shape[0], current_context()
    owner = context.token_to_req[:rows]
    padding = torch.arange(rows, device=q.device) >= context.num_tokens_tensor
    hidden = padding[:, None, None]
    k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)  # 0 * NaN is NaN
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))  # [1, H, T, D]
    # Padding rows have an owner of their own, so no row of the mask is empty.
    mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=owner[:, None] == owner)
    output.copy_(mixed[0].transpose(0, 1).masked_fill(hidden, 0))


register_splitting_op(
    "pcgsvc::encoder_attention",
    encoder_attention,
    mutates_args=("output",),
    support=Support.ALWAYS,
    zeroes_padding=True,
)
