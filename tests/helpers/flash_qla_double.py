"""FlashQLA's building blocks in plain torch, token by token, so that what we compose of them runs on a CPU.

Each keeps the contract of the function of that name in flash_qla 0.1.3 as far as we use it, including
what it leaves out (heads that forget by more than exp(-10)) and what it would get wrong (part ends that
are no whole chunk). `A`, which only its kernels read, is empty here.
"""

import sys
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

CHUNK = 64
FORGOTTEN = -10.0
"""Log decay beyond which a head is taken to have forgotten."""


@dataclass
class Context:
    """`FlashQLACPContext`: pieces, and the parts that they are cut into."""

    cu_seqlens: Tensor
    is_intra: bool = False
    intra_cp_cu_seqlens: Tensor | None = None
    seq_map_r2c: Tensor | None = None
    seq_map_c2r: Tensor | None = None


def _context_builder(part_chunks: int):
    def build_cp_context(cu_seqlens, *, enable_intra, num_v_heads, chunk_size, is_train):
        borders, size = cu_seqlens.tolist(), part_chunks * CHUNK
        parts, first_parts, piece_of = [], [0], []
        for piece, (start, end) in enumerate(zip(borders[:-1], borders[1:], strict=True)):
            starts = list(range(start, end, size))
            parts += starts
            piece_of += [piece] * len(starts)
            first_parts.append(len(parts))
        if len(parts) == len(borders) - 1:
            return Context(cu_seqlens)
        tensors = (torch.tensor(x, dtype=torch.int32) for x in ([*parts, borders[-1]], first_parts, piece_of))
        return Context(cu_seqlens, True, *tensors)

    return build_cp_context


def _spans(borders: Tensor) -> list[tuple[int, int]]:
    b = borders.tolist()
    return list(zip(b[:-1], b[1:], strict=True))


def _per_token(g: Tensor) -> Tensor:
    """From sums within chunks of 64 to single tokens, [n, H]."""
    before = g.roll(1, 0) * (torch.arange(len(g)) % CHUNK != 0).unsqueeze(-1)
    return g - before


def _run(q, k, v, g, beta, state):
    """[n, heads, ...] from `state` [H, K, V], all repeated to H heads: outputs and final state."""
    outputs = []
    for q_t, k_t, v_t, g_t, b_t in zip(q, k, v, g, beta, strict=True):
        state = g_t.exp()[:, None, None] * state
        missing = v_t - torch.einsum("hk,hkv->hv", k_t, state)
        state = state + torch.einsum("h,hk,hv->hkv", b_t, k_t, missing)
        outputs.append(torch.einsum("hk,hkv->hv", q_t, state) * k.shape[-1] ** -0.5)
    return torch.stack(outputs), state


def _repeat(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[-2], dim=-2)


def chunk_local_cumsum(g, *, cu_seqlens, chunk_size, reverse=False, zero_last_chunk=False):
    out = torch.empty_like(g)
    for start, end in _spans(cu_seqlens):
        for at in range(start, end, chunk_size):
            chunk = slice(at, min(at + chunk_size, end))
            out[:, chunk] = g[:, chunk].flip(1).cumsum(1).flip(1) if reverse else g[:, chunk].cumsum(1)
    return out


def kkt_solve(*, k, b, cu_seqlens, chunk_size):
    return k.new_empty(1, k.shape[1], b.shape[2], chunk_size)


def get_warmup_chunks_bidi(*, g, cu_seqlens, ht_mask_fwd, ht_mask_bwd, chunk_size):
    spans, heads = _spans(cu_seqlens), g.shape[-1]
    counts = torch.zeros(2, len(spans), heads, dtype=torch.int32)
    through = torch.zeros(2, len(spans), heads, dtype=torch.bool)
    for part, (start, end) in enumerate(spans):
        num = -(-(end - start) // chunk_size)
        ends = [end - 1 - i * chunk_size for i in range(num)]
        starts = [min(start + (i + 1) * chunk_size, end) - 1 for i in range(num)]
        for way, (unused, places) in enumerate(((ht_mask_fwd, ends), (ht_mask_bwd, starts))):
            for head in range(heads):
                if unused[part]:
                    continue
                decay = g[0, places, head].cumsum(0)
                enough = (decay < FORGOTTEN).nonzero().flatten().tolist()
                counts[way, part, head] = enough[0] + 1 if enough else num
                through[way, part, head] = not enough
    return torch.maximum(*counts), counts[1], *through


def tilelang_prepare_h(*_, **settings):
    assert settings["is_cp"] and settings["store_final_state"] and not settings["store_h"]
    assert settings["ht_dtype"] == torch.float32

    def kernel(k, v, a, g, beta, h0, parts, offsets, chunks, h, s, m):
        heads, key_dim = v.shape[2], k.shape[3]
        k = _repeat(k, heads)
        for part, (start, end) in enumerate(_spans(parts)):
            for head in range(heads):
                count = chunks[part, head].item()
                first = max(start, end - count * CHUNK)
                if first == end:
                    s[part, head] = m[part, head] = 0
                    continue
                if (first - start) % CHUNK:  # reads decays across chunks: what comes out is no state
                    s[part, head], m[part, head] = float("nan"), 0
                    continue
                at = (0, slice(first, end), slice(head, head + 1))
                args = (k[at], k[at]), (_per_token(g[at]), beta[at])
                s[part, head] = _run(*args[0], v[at], *args[1], torch.zeros_like(s[:1, 0]))[1]
                identity = torch.eye(key_dim).unsqueeze(0)
                nothing = torch.zeros(end - first, 1, key_dim)
                through = _run(*args[0], nothing, *args[1], identity)[1]
                m[part, head] = through if first == start else 0

    return kernel


def correct_initial_states(raw_h0, ht_buffer, mt_buffer, fallback_mask, seq_map_r2c):
    out = torch.empty_like(ht_buffer)
    for piece, (start, end) in enumerate(_spans(seq_map_r2c)):
        state = raw_h0[piece]
        for part in range(start, end):
            out[part] = state
            state = ht_buffer[part] + mt_buffer[part] @ state * fallback_mask[part][:, None, None]
    return out


def correct_terminal_states(raw_dht, dht_buffer, mt_buffer, fallback_mask, seq_map_r2c):
    out = torch.empty_like(dht_buffer)
    for piece, (start, end) in enumerate(_spans(seq_map_r2c)):
        state = raw_dht[piece]
        for part in reversed(range(start, end)):
            out[part] = state
            state = dht_buffer[part] + mt_buffer[part].mT @ state * fallback_mask[part][:, None, None]
    return out


def aggregate_card_state(
    ht_buffer, mt_buffer, fallback_mask, seq_map_r2c, *, reverse=False, transpose_m=False, compute_m=True
):
    mt_buffer = mt_buffer * fallback_mask[..., None, None]
    maps = mt_buffer.mT if transpose_m else mt_buffer
    states, products = [], []
    for start, end in _spans(seq_map_r2c):
        state, product = torch.zeros_like(ht_buffer[0]), torch.eye(maps.shape[-1]).expand_as(maps[0])
        for part in reversed(range(start, end)) if reverse else range(start, end):
            state, product = ht_buffer[part] + maps[part] @ state, maps[part] @ product
        states.append(state)
        products.append(product)
    return torch.stack(states), torch.stack(products) if compute_m else None


def fused_gdr_fwd(*, q, k, v, a, g, b, initial_state, cu_seqlens, cp_seq_map, raw_cu_seqlens, **wanted):
    assert wanted == {"output_final_state": False, "output_h": False, "output_o": True}
    q, k = _repeat(q, v.shape[2]), _repeat(k, v.shape[2])
    out = torch.empty_like(v)
    for part, (start, end) in enumerate(_spans(cu_seqlens)):
        at = (0, slice(start, end))
        out[at] = _run(q[at], k[at], v[at], _per_token(g[at]), b[at], initial_state[part])[0]
    return out, None, None


def fused_gdr_h(*, k, v, a, g, b, initial_state, output_final_state, output_h, cu_seqlens):
    assert output_h and not output_final_state
    return initial_state, None, None


def fused_gdr_dh(*, q, k, a, g, b, do, output_dh0, output_dh, cu_seqlens, num_warmup_chunks):
    assert output_dh0 and not output_dh
    heads = do.shape[2]
    q, k = _repeat(q, heads), _repeat(k, heads)
    out = torch.zeros(len(cu_seqlens) - 1, heads, k.shape[3], do.shape[3])
    for part, (start, end) in enumerate(_spans(cu_seqlens)):
        for head in range(heads):
            last = min(end, start + num_warmup_chunks[part, head].item() * CHUNK)
            if last == start:
                continue
            at = (0, slice(start, last), slice(head, head + 1))
            with torch.enable_grad():
                state = torch.zeros_like(out[:1, 0]).requires_grad_()
                o, _ = _run(q[at], k[at], torch.zeros_like(do[at]), _per_token(g[at]), b[at], state)
                out[part, head] = torch.autograd.grad(o, state, do[at])[0][0]
    return None, out


def fused_gdr_bwd(*, q, k, v, a, g, b, do, dht, h, cu_seqlens):
    heads = v.shape[2]
    inputs = [_repeat(q, heads), _repeat(k, heads), v, g, b]
    grads = [torch.empty_like(x) for x in inputs]
    for part, (start, end) in enumerate(_spans(cu_seqlens)):
        at = (0, slice(start, end))
        with torch.enable_grad():
            leaves = [x[at].detach().requires_grad_() for x in inputs]
            o, final = _run(*leaves[:3], _per_token(leaves[3]), leaves[4], h[part])
            for grad, g_part in zip(
                grads, torch.autograd.grad([o, final], leaves, [do[at], dht[part]]), strict=True
            ):
                grad[at] = g_part
    return *grads, None


def group_reduce_vector(x, key_heads):
    return x.unflatten(2, (key_heads, -1)).sum(3)


def packed_rule(
    q,
    k,
    v,
    g,
    beta,
    *,
    cu_seqlens,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens_cpu=None,
    initial_state=None,
    output_final_state=False,
):
    """The whole rule on packed documents, as both libraries offer it; differentiable."""
    assert not use_qk_l2norm_in_kernel
    heads = v.shape[2]
    q, k = (_repeat(x, heads) for x in (q, k))
    outs, finals = [], []
    for piece, (start, end) in enumerate(_spans(cu_seqlens)):
        at = (0, slice(start, end))
        first = v.new_zeros(heads, k.shape[3], v.shape[3]) if initial_state is None else initial_state[piece]
        out, final = _run(q[at], k[at], v[at], g[at], beta[at], first)
        outs.append(out)
        finals.append(final)
    return torch.cat(outs).unsqueeze(0), torch.stack(finals) if output_final_state else None


def chunk_gated_delta_rule(q, k, v, g, beta, *, use_qk_l2norm_in_kernel, cp_context):
    return packed_rule(
        q,
        k,
        v,
        g,
        beta,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cp_context.cu_seqlens,
    )


def install(monkeypatch, part_chunks: int) -> None:
    """Let `import flash_qla` find these, with pieces cut into parts of at most `part_chunks` chunks."""
    chunk = "flash_qla.ops.gated_delta_rule.chunk"
    functions = {
        "flash_qla": (chunk_gated_delta_rule,),
        chunk: (
            aggregate_card_state,
            correct_initial_states,
            correct_terminal_states,
            fused_gdr_bwd,
            fused_gdr_dh,
            fused_gdr_fwd,
            fused_gdr_h,
            get_warmup_chunks_bidi,
            kkt_solve,
        ),
        f"{chunk}.cp": (_context_builder(part_chunks),),
        f"{chunk}.hopper.prepare_h": (tilelang_prepare_h,),
        "flash_qla.ops.utils": (chunk_local_cumsum, group_reduce_vector),
        "flash_qla.utils": (),
        "flash_qla.utils.index": (),
    }
    for name, contents in functions.items():
        module = ModuleType(name)
        for function in contents:
            setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, module)
    index = sys.modules["flash_qla.utils.index"]
    index.prepare_varlen_metadata = lambda cu_seqlens, cu_seqlens_cpu: cu_seqlens
    index.prepare_chunk_offsets = lambda cu_seqlens, chunk_size: (torch.zeros_like(cu_seqlens), 0)
    # `import a.b.c` wants every parent.
    for parent in ("flash_qla.ops", "flash_qla.ops.gated_delta_rule", f"{chunk}.hopper"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
