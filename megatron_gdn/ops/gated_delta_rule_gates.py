"""The two gates of the gated delta rule, one Triton kernel forward and one backward on a GPU.

Legend: R rows, s tokens per row, H value heads.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gdn.ops.triton_math import exp, sigmoid

TOKENS = 64
"""Of one program."""


def gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """g = -exp(A_log) softplus(a + dt_bias), the log decay, and beta = sigmoid(b).

    Only the arguments are kept for the backward. The gradients of A_log and dt_bias are added up in a
    fixed order, so that they are the same bits every time.

    Args:
        a: raw decay gate, [R, s, H], any floating dtype; may be a view with other strides.
        b: raw write gate, likewise.
        A_log: [H], fp32.
        dt_bias: [H], fp32.

    Returns:
        (g, beta), each [R, s, H] fp32.
    """
    if a.is_cuda:
        return _TritonGates.apply(a, b, A_log, dt_bias)
    return -A_log.float().exp() * F.softplus(a.float() + dt_bias.float()), b.float().sigmoid()


class _TritonGates(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(a, b, A_log, dt_bias)
        g, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
        if g.numel():
            grid, block = _grid(a)
            _forward_kernel[grid](*_read(a, b, A_log, dt_bias), g, beta, TOKENS, block)
        return g, beta

    @staticmethod
    @once_differentiable
    def backward(ctx, d_g: Tensor, d_beta: Tensor) -> tuple[Tensor, ...]:
        a, b, A_log, dt_bias = ctx.saved_tensors
        d_a, d_b = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (a, b))
        if not a.numel():
            return d_a, d_b, torch.zeros_like(A_log), torch.zeros_like(dt_bias)
        grid, block = _grid(a)
        partial = torch.empty(2, grid[0] * grid[1], a.shape[2], dtype=torch.float32, device=a.device)
        _backward_kernel[grid](
            *_read(a, b, A_log, dt_bias),
            d_g.contiguous(),
            d_beta.contiguous(),
            d_a,
            d_b,
            partial,
            TOKENS,
            block,
        )
        d_A_log, d_dt_bias = partial.sum(1)
        return d_a, d_b, d_A_log.to(A_log.dtype), d_dt_bias.to(dt_bias.dtype)


def _grid(a: Tensor) -> tuple[tuple[int, int], int]:
    """Programs (blocks of tokens, rows), and heads of a tile."""
    num_rows, row_len, heads = a.shape
    return (triton.cdiv(row_len, TOKENS), num_rows), triton.next_power_of_2(heads)


def _read(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor):
    """What both kernels read, in the order of their arguments."""
    return (a, *a.stride(), b, *b.stride(), A_log.contiguous(), dt_bias.contiguous(), a.shape[1], a.shape[2])


@triton.jit
def _softplus(x):
    """log(1 + e^x) to fp32's last digits, also where e^x is far below one."""
    small = exp(-tl.abs(x))
    whole = 1.0 + small
    corrected = tl.log(whole) * (small / tl.where(whole > 1.0, whole - 1.0, 1.0))
    return tl.maximum(x, 0.0) + tl.where(whole > 1.0, corrected, small)


@triton.jit
def _forward_kernel(
    a, a_row, a_token, a_head, b, b_row, b_token, b_head, A_log, dt_bias, row_len, heads,
    g, beta, block_tokens: tl.constexpr, block_heads: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    token = (tl.program_id(0).to(tl.int64) * block_tokens + tl.arange(0, block_tokens))[:, None]
    head = tl.arange(0, block_heads)[None, :]
    inside = (token < row_len) & (head < heads)
    rate = tl.exp(tl.load(A_log + head, mask=head < heads, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + head, mask=head < heads, other=0.0).to(tl.float32)
    raw = tl.load(a + row * a_row + token * a_token + head * a_head, mask=inside, other=0.0).to(tl.float32)
    write = tl.load(b + row * b_row + token * b_token + head * b_head, mask=inside, other=0.0).to(tl.float32)
    at = (row * row_len + token) * heads + head
    tl.store(g + at, -rate * _softplus(raw + bias), mask=inside)
    tl.store(beta + at, sigmoid(write), mask=inside)


@triton.jit
def _backward_kernel(
    a, a_row, a_token, a_head, b, b_row, b_token, b_head, A_log, dt_bias, row_len, heads,
    d_g, d_beta, d_a, d_b, partial, block_tokens: tl.constexpr, block_heads: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    token = (tl.program_id(0).to(tl.int64) * block_tokens + tl.arange(0, block_tokens))[:, None]
    head = tl.arange(0, block_heads)[None, :]
    inside = (token < row_len) & (head < heads)
    rate = tl.exp(tl.load(A_log + head, mask=head < heads, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + head, mask=head < heads, other=0.0).to(tl.float32)
    raw = tl.load(a + row * a_row + token * a_token + head * a_head, mask=inside, other=0.0).to(tl.float32)
    write = tl.load(b + row * b_row + token * b_token + head * b_head, mask=inside, other=0.0).to(tl.float32)
    at = (row * row_len + token) * heads + head
    grad = tl.load(d_g + at, mask=inside, other=0.0)
    raw += bias
    d_raw = -rate * grad * sigmoid(raw)
    tl.store(d_a + at, d_raw.to(d_a.dtype.element_ty), mask=inside)
    beta = sigmoid(write)
    d_write = tl.load(d_beta + at, mask=inside, other=0.0) * beta * (1.0 - beta)
    tl.store(d_b + at, d_write.to(d_b.dtype.element_ty), mask=inside)

    programs = tl.num_programs(0) * tl.num_programs(1)
    program = row * tl.num_programs(0) + tl.program_id(0)
    heads_at = tl.arange(0, block_heads)
    here = heads_at < heads
    sum_log = tl.sum(-rate * grad * _softplus(raw), axis=0)
    tl.store(partial + program * heads + heads_at, sum_log, mask=here)
    tl.store(partial + (programs + program) * heads + heads_at, tl.sum(d_raw, axis=0), mask=here)
