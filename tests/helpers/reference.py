"""The truth: per token, unsharded, in the dtype of its inputs (float32 or float64), torch only.

Written to be checked against the paper (Gated Delta Networks, arXiv:2412.06464) and against the
host, not to be fast. Everything is batch first. `positions` [B, S] holds the place of every token
in its document; a document begins wherever it is 0, and nothing crosses that border.

Source of the row orders: megatron-core 0.19.2, core/ssm/gated_delta_net/gdn.py (`in_proj`),
core/transformer/attention.py `SelfAttention.get_query_key_value_tensors` (`linear_qkv`).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus


class GDNSizes(NamedTuple):
    """Head counts and sizes of one GatedDeltaNet layer."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int


class AttentionSizes(NamedTuple):
    """Head counts and sizes of one gated attention layer."""

    num_heads: int
    num_query_groups: int
    head_dim: int


def dense_positions(batch: int, seq_len: int) -> Tensor:
    """Positions of streams that are one document each, [B, S]."""
    return torch.arange(seq_len).repeat(batch, 1)


def packed_positions(cu_seqlens: tuple[int, ...]) -> Tensor:
    """Positions of one packed stream, [1, S], by walking its documents."""
    return torch.cat([torch.arange(b - a) for a, b in zip(cu_seqlens, cu_seqlens[1:], strict=False)])[None]


def l2_normalise(x: Tensor) -> Tensor:
    """x over its length in the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """x over its root mean square, times weight, or 1 + weight when weights are kept around zero."""
    scale = 1 + weight if zero_centered else weight
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale


def gated_delta_rule_reference(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, positions: Tensor
) -> Tensor:
    """S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T and o_t = S_t^T q_t / sqrt(K).

    Args:
        q: queries before normalisation, [B, S, Hk, K].
        k: keys before normalisation, [B, S, Hk, K].
        v: values, [B, S, Hv, V]; value head h uses key head h // (Hv / Hk).
        a: decay input ("alpha"), [B, S, Hv]; g = -exp(A_log) softplus(a + dt_bias).
        b: write strength before the sigmoid, [B, S, Hv].
        A_log: [Hv].
        dt_bias: [Hv].
        positions: [B, S]; the state is zero before every position 0.

    Returns:
        o, [B, S, Hv, V].
    """
    per_key_head = v.shape[2] // k.shape[2]
    q = l2_normalise(q).repeat_interleave(per_key_head, 2) / q.shape[-1] ** 0.5
    k = l2_normalise(k).repeat_interleave(per_key_head, 2)
    decay = (-A_log.exp() * softplus(a + dt_bias)).exp()
    beta = b.sigmoid()
    state = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
    outputs = []
    for t in range(v.shape[1]):
        state = state * (positions[:, t] != 0)[:, None, None, None]
        state = decay[:, t, :, None, None] * state
        erased = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        written = beta[:, t, :, None] * (v[:, t] - erased)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], written)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1)


def causal_conv_reference(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """silu(sum_j weight[:, W-1-j] x_{t-j}), leaving out taps before the document's first token.

    Args:
        x: [B, S, C].
        weight: [C, W]; the last tap multiplies the token itself.
        positions: [B, S].
    """
    width = weight.shape[1]
    total = torch.zeros_like(x)
    for back in range(min(width, x.shape[1])):
        earlier = torch.cat([torch.zeros_like(x[:, :back]), x[:, : x.shape[1] - back]], 1)
        total = total + weight[:, width - 1 - back] * earlier * (positions >= back)[..., None]
    return silu(total)


def gated_delta_net_reference(
    hidden: Tensor,
    params: dict[str, Tensor],
    sizes: GDNSizes,
    *,
    eps: float,
    zero_centered: bool,
    positions: Tensor,
) -> Tensor:
    """The whole GatedDeltaNet layer of the host, without its input norm.

    Args:
        hidden: [B, S, H].
        params: the host's names and layouts: `in_proj.weight` (rows: query, key, value, z, beta,
            alpha), `conv1d.weight` [C, 1, W] over query, key, value, `A_log`, `dt_bias`,
            `out_norm.weight` [V], `out_proj.weight`.
        sizes: head counts and sizes.
        eps: of the output norm.
        zero_centered: whether `out_norm.weight` is kept around zero (1 + w).
        positions: [B, S].

    Returns:
        [B, S, H].
    """
    batch, seq_len, _ = hidden.shape
    qk_dim = sizes.num_key_heads * sizes.key_head_dim
    v_dim = sizes.num_value_heads * sizes.value_head_dim
    projected = hidden @ params["in_proj.weight"].T
    qkv, z, b, a = projected.split(
        [2 * qk_dim + v_dim, v_dim, sizes.num_value_heads, sizes.num_value_heads], -1
    )
    qkv = causal_conv_reference(qkv, params["conv1d.weight"].squeeze(1), positions)
    q, k, v = qkv.split([qk_dim, qk_dim, v_dim], -1)
    o = gated_delta_rule_reference(
        q.reshape(batch, seq_len, -1, sizes.key_head_dim),
        k.reshape(batch, seq_len, -1, sizes.key_head_dim),
        v.reshape(batch, seq_len, -1, sizes.value_head_dim),
        a,
        b,
        params["A_log"],
        params["dt_bias"],
        positions,
    )
    gate = silu(z.reshape(o.shape))
    gated = rms_norm(o, params["out_norm.weight"], eps, zero_centered) * gate
    return gated.reshape(batch, seq_len, v_dim) @ params["out_proj.weight"].T


def attention_reference(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Softmax attention to the same and earlier tokens of the same document.

    Args:
        q: [B, S, Hq, D].
        k: [B, S, Hkv, D]; query head h uses key/value head h // (Hq / Hkv).
        v: [B, S, Hkv, D].
        positions: [B, S].
        scale: factor on q k^T.

    Returns:
        [B, S, Hq, D].
    """
    per_kv_head = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(per_kv_head, 2), v.repeat_interleave(per_kv_head, 2)
    document = (positions == 0).cumsum(1)
    seen = (document[:, :, None] == document[:, None, :]).tril()
    scores = torch.einsum("bshd,bthd->bhst", q, k) * scale
    weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    return torch.einsum("bhst,bthd->bshd", weights, v)


def apply_rope_reference(x: Tensor, positions: Tensor, *, rotary_percent: float, base: float) -> Tensor:
    """Turn the first `rotary_percent` of each head by its token's position, halves paired.

    The angles are rounded to float32, as the host makes them: they are part of the model.

    Args:
        x: [B, S, H, D].
        positions: [B, S].
        rotary_percent: share of D that is turned.
        base: base period.
    """
    rot_dim = int(x.shape[-1] * rotary_percent)
    inv_freq = 1.0 / (base ** (torch.arange(0, rot_dim, 2, dtype=torch.float32) / rot_dim))
    angles = (positions.float()[:, :, None, None] * inv_freq).to(x.dtype)
    first, second, rest = x.split([rot_dim // 2, rot_dim // 2, x.shape[-1] - rot_dim], -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def gated_attention_reference(
    hidden: Tensor,
    params: dict[str, Tensor],
    sizes: AttentionSizes,
    *,
    eps: float,
    zero_centered: bool,
    rotary_percent: float,
    rotary_base: float,
    positions: Tensor,
) -> Tensor:
    """The whole gated self-attention layer of the host, without its input norm.

    Args:
        hidden: [B, S, H].
        params: the host's names and layouts: `linear_qkv.weight` (per query group its query
            heads, as many gate heads, key, value), `q_layernorm.weight` [D], `k_layernorm.weight`
            [D], `linear_proj.weight`.
        sizes: head counts and sizes.
        eps: of the query and key norms.
        zero_centered: whether the norm weights are kept around zero (1 + w).
        rotary_percent: share of the head size that RoPE turns.
        rotary_base: base period of RoPE.
        positions: [B, S].

    Returns:
        [B, S, H].
    """
    batch, seq_len, _ = hidden.shape
    num_heads, num_groups, head_dim = sizes
    per_group = num_heads // num_groups
    projected = (hidden @ params["linear_qkv.weight"].T).reshape(batch, seq_len, num_groups, -1, head_dim)
    q, gate, k, v = projected.split([per_group, per_group, 1, 1], 3)
    q, gate, k, v = (x.reshape(batch, seq_len, -1, head_dim) for x in (q, gate, k, v))
    q = rms_norm(q, params["q_layernorm.weight"], eps, zero_centered)
    k = rms_norm(k, params["k_layernorm.weight"], eps, zero_centered)
    q = apply_rope_reference(q, positions, rotary_percent=rotary_percent, base=rotary_base)
    k = apply_rope_reference(k, positions, rotary_percent=rotary_percent, base=rotary_base)
    o = attention_reference(q, k, v, positions, head_dim**-0.5) * gate.sigmoid()
    return o.reshape(batch, seq_len, -1) @ params["linear_proj.weight"].T
