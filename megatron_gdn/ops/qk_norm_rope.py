"""From the projection of an attention layer to its queries and keys: RMSNorm and RoPE in one pass.

Legend: s tokens, B batch, g key/value heads, r query heads to each, D head dim.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gdn.ops import qk_norm_rope_triton
from megatron_gdn.ops.norms import torch_norm
from megatron_gdn.ops.triton_rows import MAX_DIM


def split_norm_rope(
    qkv: Tensor,
    head_dim: int,
    weights: tuple[Tensor, Tensor],
    tables: tuple[Tensor, Tensor],
    eps: float,
    zero_centered: bool,
    *,
    gated: bool,
) -> tuple[Tensor, ...]:
    """rope(rmsnorm(q)), rope(rmsnorm(k)), and what is neither; computed in fp32 and rounded once.

    On a GPU one Triton kernel for q and one for k read the projection and write the result; the backward
    needs only the arguments and writes the projection's whole gradient, with no copies put together. Plain
    torch elsewhere and in float64.

    Args:
        qkv: [s, B, g, (r + 2) D] or, with output gates, [s, B, g, (2r + 2) D]: per key/value head its query
            heads, their gates if any, key, value. Any floating dtype.
        head_dim: D.
        weights: of the norm of queries and of keys, [D].
        tables: cosine and sine of each token's angles, [s, 1, 1, rot_dim] fp32; dimension i of the first
            rot_dim is turned with i + rot_dim / 2.
        eps: added to the mean square.
        zero_centered: whether the weights are stored as their difference from one.
        gated: whether there are output gates.

    Returns:
        Queries [s, B, g r, D]; if gated, the gates [s, B, g, r, D]; keys [s, B, g, D]; values [s, B, g, D].
        Gates and values are views of `qkv`.
    """
    query_size = (qkv.shape[-1] - 2 * head_dim) // (2 if gated else 1)
    sizes = *[query_size] * (2 if gated else 1), head_dim, head_dim
    if qkv.is_cuda and qkv.dtype != torch.float64 and head_dim <= MAX_DIM:
        return _TritonSplitNormRope.apply(qkv, sizes, *weights, *tables, eps, zero_centered)
    query, *gate, key, value = heads_of(qkv, sizes)
    turned = []
    for x, weight in zip((query, key), weights, strict=True):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        turned.append(apply_rope(torch_norm(wide, weight, eps, zero_centered), *tables).to(x.dtype))
    query, key = turned
    return query.flatten(2, 3), *gate, key, value


def heads_of(qkv: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """Views of queries and gates, if any, [s, B, g, r, D], and of keys and values, [s, B, g, D]."""
    *per_query, key, value = qkv.split(sizes, dim=-1)
    return [*(x.unflatten(-1, (-1, sizes[-1])) for x in per_query), key, value]


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first rot_dim dimensions of every head; computed in fp32, returned in x's dtype.

    Args:
        x: [s, B, heads, D] or [s, B, g, r, D], any floating dtype.
        cos: [s, 1, 1, rot_dim] fp32.
        sin: likewise.
    """
    if x.ndim > cos.ndim:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned, kept = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    turned = turned.to(torch.promote_types(x.dtype, cos.dtype))
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned.to(x.dtype), kept], dim=-1)


class _TritonSplitNormRope(torch.autograd.Function):
    """`split_norm_rope` in Triton."""

    @staticmethod
    def forward(ctx, qkv, sizes, q_weight, k_weight, cos, sin, eps: float, zero_centered: bool):
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(qkv, q_weight, k_weight, cos, sin)
        ctx.settings = sizes, eps, zero_centered
        query, *gate, key, value = heads_of(qkv, sizes)
        query, key = (
            qk_norm_rope_triton.launch_forward(x, weight, cos, sin, eps, zero_centered)
            for x, weight in ((query, q_weight), (key, k_weight))
        )
        return query.flatten(2, 3), *gate, key, value

    @staticmethod
    @once_differentiable
    def backward(ctx, d_query: Tensor, *d_others: Tensor):
        qkv, q_weight, k_weight, cos, sin = ctx.saved_tensors
        sizes, eps, zero_centered = ctx.settings
        *d_gate, d_key, d_value = d_others
        d_qkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
        query, *_, key, _ = heads_of(qkv, sizes)
        query_out, *gate_out, key_out, value_out = heads_of(d_qkv, sizes)
        for written, d in zip([*gate_out, value_out], [*d_gate, d_value], strict=True):
            written.copy_(d)
        d_weights = [
            qk_norm_rope_triton.launch_backward(
                d.contiguous(), x, weight, cos, sin, eps, zero_centered, written
            ).to(weight.dtype)
            for d, x, weight, written in (
                (d_query, query, q_weight, query_out),
                (d_key, key, k_weight, key_out),
            )
        ]
        return d_qkv, None, *d_weights, None, None, None, None
