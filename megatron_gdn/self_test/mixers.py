"""Cases of the sequence mixers: the gated delta rule, its convolution, attention.

Source of the rule: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024).

Legend: T tokens, D head dim; for the rule H value heads, h key heads, K and V their sizes.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_gdn.rows import Rows
from megatron_gdn.self_test.cases import Case, Setup, Source, differentiated


def _positions(borders: tuple[int, ...], device: torch.device) -> Tensor:
    """Place of every token in its document, [T]."""
    return torch.cat([torch.arange(b - a, device=device) for a, b in pairwise(borders)])


def _spans(total: int, count: int) -> tuple[tuple[int, int], ...]:
    size = total // count
    return tuple((i * size, (i + 1) * size) for i in range(count))


def _borders(total: int, packed: bool) -> tuple[int, ...]:
    """Documents of very different lengths, one of a single token, one much longer than the others."""
    return (0, total // 10, total // 10 + 1, total - 20, total) if packed else (0, total)


def rule(setup: Setup, source: Source, packed: bool, num_spans: int) -> Case:
    """The stream cut into spans that pass their state on, as chunkwise ranks do, or in one piece."""
    from megatron_gdn.ops.gated_delta_rule import choose_backend, gated_delta_rule

    dims = setup.key_head_dim, setup.value_head_dim
    kernel = choose_backend(setup.device, setup.dtype, dims, setup.gdn_backend).name
    # Plain torch does not care how many heads there are, and is the truth for the other kernels, for which
    # long documents matter: they are cut into parts that run side by side.
    plain = kernel == "torch"
    key_heads = min(setup.key_heads, 2) if plain else setup.key_heads
    heads = key_heads * (setup.value_heads // setup.key_heads)
    total = 198 if plain else 4224
    borders = _borders(total, packed)
    rows = Rows.from_ranges(borders, _spans(total, num_spans), 1, setup.device)
    q, k = (F.normalize(source.normal(1, total, key_heads, dims[0]), dim=-1) for _ in range(2))
    inputs = {
        "q": q,
        "k": k,
        "v": source.normal(1, total, heads, setup.value_head_dim),
        "a": source.normal(1, total, heads),
        "b": source.normal(1, total, heads),
        # From heads that hardly forget to heads that forget at once.
        "A_log": torch.linspace(-4, 2.7, heads, device=setup.device),
        "dt_bias": source.normal(heads, dtype=torch.float32),
    }

    def ours(*x):
        cut = [each.unflatten(1, (num_spans, -1)).flatten(0, 1) for each in x[:5]]
        exchange = ScanRows() if num_spans > 1 else None
        out = gated_delta_rule(*cut, *x[5:], rows, exchange, setup.gdn_backend)
        return out.flatten(0, 1).unsqueeze(0)

    def in_torch(*x):
        return gated_delta_rule(*x, Rows.from_ranges(borders, ((0, total),), 1, setup.device), None, "torch")

    def token_by_token(*x):
        return _rule_token_by_token(*x, _positions(borders, setup.device).tolist())

    truth = differentiated(token_by_token if plain else in_torch)
    return Case(kernel, inputs, differentiated(ours), truth, source.normal(1, total, heads, dims[1]))


def _rule_token_by_token(q, k, v, a, b, A_log, dt_bias, positions: list[int]) -> Tensor:
    """The recurrence as it is defined, [1, T, ...]; its state is zero where a document begins."""
    groups = v.shape[2] // q.shape[2]
    q, k = (x[0].repeat_interleave(groups, 1) for x in (q, k))
    decay = (-A_log.exp() * F.softplus(a[0] + dt_bias)).exp()
    beta, state, out = b[0].sigmoid(), None, []
    for t, position in enumerate(positions):
        if position == 0:
            state = v.new_zeros(v.shape[2], k.shape[2], v.shape[3])
        state = decay[t, :, None, None] * state
        missing = v[0, t] - torch.einsum("hk,hkv->hv", k[t], state)
        state = state + torch.einsum("h,hk,hv->hkv", beta[t], k[t], missing)
        out.append(torch.einsum("hk,hkv->hv", q[t], state) * k.shape[2] ** -0.5)
    return torch.stack(out).unsqueeze(0)


class ScanRows:
    """The `StateExchange` between rows of one process, which follow each other in the stream."""

    def __call__(self, summaries: Tensor) -> Tensor:
        """What enters each row from the row before it."""
        key_dim = summaries.shape[-2]
        state, entering = torch.zeros_like(summaries[0, ..., key_dim:]), []
        for row in summaries:
            entering.append(state)
            state = row[..., :key_dim] @ state + row[..., key_dim:]
        return torch.stack(entering)

    def start_reverse(self, summaries: Tensor) -> Callable[[], Tensor]:
        """What enters each row from the row behind it; nothing has to travel."""
        return lambda: self(summaries.flip(0)).flip(0)


def convolution(setup: Setup, source: Source, packed: bool, num_spans: int) -> Case:
    """With SiLU, q and k normalised. Spans that are told the tokens before them, or the stream whole."""
    from megatron_gdn.ops.causal_conv import backend_name, causal_conv1d_silu

    total, taps = 960, setup.conv_width - 1
    sizes = (setup.key_heads * setup.key_head_dim,) * 2 + (setup.value_heads * setup.value_head_dim,)
    norm_dims = setup.key_head_dim, setup.key_head_dim, None
    borders = _borders(total, packed)
    rows = Rows.from_ranges(borders, _spans(total, num_spans), 1, setup.device)

    def ours(x, weight):
        cut, halo = x.unflatten(1, (num_spans, -1)).flatten(0, 1), None
        if num_spans > 1:
            halo = torch.cat([torch.zeros_like(cut[:1, :taps]), cut[:-1, cut.shape[1] - taps :]])
        sections = causal_conv1d_silu(cut, weight, rows, halo, sizes=sizes, norm_dims=norm_dims)
        return torch.cat(sections, -1).flatten(0, 1).unsqueeze(0)

    def truth(x, weight):
        positions = _positions(borders, setup.device)
        out = x * weight[:, -1]
        for back in range(1, taps + 1):
            earlier = F.pad(x, (0, 0, back, 0))[:, :total] * (positions >= back).unsqueeze(-1)
            out = out + earlier * weight[:, -1 - back]
        q, k, v = (out * out.sigmoid()).split(sizes, -1)
        return torch.cat([_l2norm(q, norm_dims[0]), _l2norm(k, norm_dims[1]), v], -1)

    channels = sum(sizes)
    inputs = {"x": source.normal(1, total, channels), "weight": source.normal(channels, setup.conv_width)}
    kernel = backend_name(setup.device, setup.dtype, setup.conv_width, norm_dims)
    return Case(
        kernel, inputs, differentiated(ours), differentiated(truth), source.normal(1, total, channels)
    )


def _l2norm(x: Tensor, dim: int) -> Tensor:
    heads = x.unflatten(-1, (-1, dim))
    return (heads / (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt()).flatten(-2)


def attention(setup: Setup, source: Source, packed: bool) -> Case:
    """Every token to the earlier ones of its document."""
    from megatron_gdn.ops.attention import attention, backend_name

    total, scale = 1024 if setup.on_gpu else 320, setup.head_dim**-0.5
    borders = _borders(total, packed)
    rows = Rows.from_ranges(borders, ((0, total),), 1, setup.device)

    def ours(q, k, v):
        return attention(q, k, v, scale, rows)

    document = (_positions(borders, setup.device) == 0).cumsum(0)
    visible = (document.unsqueeze(1) == document).tril()
    return Case(
        backend_name(setup.device, setup.dtype, setup.head_dim),
        _attention_inputs(setup, source, total, total),
        differentiated(ours),
        differentiated(lambda q, k, v: _softmax_attention(q, k, v, scale, visible)),
        source.normal(1, total, setup.heads, setup.head_dim),
    )


def attention_to_earlier_spans(setup: Setup, source: Source, packed: bool) -> Case:
    """A span on itself and on the span before it: two blocks, merged, and the gradients of both."""
    from megatron_gdn.ops import attention as ops

    half, scale = 512 if setup.on_gpu else 160, setup.head_dim**-0.5
    rows = Rows.from_ranges((0, 2 * half), ((half, 2 * half),), 1, setup.device)

    def ours(inputs, upstream):
        q, k, v = inputs
        blocks = [(k[:, half:], v[:, half:], rows), (k[:, :half], v[:, :half], None)]
        parts = [ops.forward(q, *keys, scale, block, recurs=not packed) for *keys, block in blocks]
        sums = ops.accumulation_dtype(q.dtype)
        o, lse = parts[0][0].to(sums, copy=True), parts[0][1].contiguous().clone()
        ops.merge_(o, lse, *parts[1])
        o = o.to(q.dtype)
        grads = [
            ops.backward(upstream, q, *keys, o, lse, scale, block, recurs=not packed)
            for *keys, block in blocks
        ]
        (dq, dk, dv), (dq_earlier, dk_earlier, dv_earlier) = grads
        return [o, dq.to(sums) + dq_earlier, torch.cat([dk_earlier, dk], 1), torch.cat([dv_earlier, dv], 1)]

    visible = torch.ones(half, 2 * half, dtype=torch.bool, device=setup.device).tril(half)
    return Case(
        ops.backend_name(setup.device, setup.dtype, setup.head_dim),
        _attention_inputs(setup, source, half, 2 * half),
        ours,
        differentiated(lambda q, k, v: _softmax_attention(q, k, v, scale, visible)),
        source.normal(1, half, setup.heads, setup.head_dim),
    )


def _attention_inputs(setup: Setup, source: Source, queries: int, keys: int) -> dict[str, Tensor]:
    return {
        "q": source.normal(1, queries, setup.heads, setup.head_dim),
        "k": source.normal(1, keys, setup.kv_heads, setup.head_dim),
        "v": source.normal(1, keys, setup.kv_heads, setup.head_dim),
    }


def _softmax_attention(q, k, v, scale: float, visible: Tensor) -> Tensor:
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)
