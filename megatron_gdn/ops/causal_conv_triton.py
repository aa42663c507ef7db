"""Triton kernels of the causal depthwise convolution with SiLU and l2norm, forward and backward.

A program holds some channels of `SPAN` consecutive tokens of a row and walks along them: the tokens that
the taps reach back to stay in registers, so that every input is read once (and the few tokens where spans
meet twice) and nothing but the results is written. The next four tokens are loaded while the present four
are computed, since a program has little else to do until memory answers. The backward makes the
convolution again on the way; a token's gradient is complete, and written, three tokens later. Gradients of
the taps are kept in registers, written once per program, and added up after the kernel: no atomics, the
same bits every time.

Legend: R rows, s tokens per row, C channels of a tensor, c those of one section, W taps, at most 4.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_gdn.ops.triton_math import sigmoid

MAX_WIDTH = 4
L2NORM_EPS = tl.constexpr(1e-6)
"""Added to the sum of squares."""
SPAN = 64
"""Tokens of one program in the forward."""
SPAN_BACKWARD = 128
CHANNELS = 512
"""Channels of one program: four, 8 bytes in bf16, for each of 128 threads."""
PLAIN_DIM = 128
"""Width of a tile's rows where there are no heads to normalise."""
WARPS = 4


def launch_forward(
    x: Tensor, taps: Tensor, halo: Tensor | None, positions: Tensor | None, out: Tensor, norm_dim
):
    """silu(convolution) of one section, l2-normalised in heads of `norm_dim` unless that is None.

    Args:
        x: [R, s, c], channels next to each other; any other strides.
        taps: [W, c], likewise.
        halo: [R, W-1, c], likewise; or None.
        positions: [R, s] int64, contiguous; None where every row is one document from its first token on.
        out: [R, s, c], contiguous.
        norm_dim: a power of two, or None.
    """
    if out.numel():
        grid, sizes = _grid(x, norm_dim, SPAN)
        _forward_kernel[grid](
            *_read(x, taps, halo, positions), out, **sizes, normalise=norm_dim is not None, num_warps=WARPS
        )


def launch_backward(
    x: Tensor,
    taps: Tensor,
    halo: Tensor | None,
    positions: Tensor | None,
    d_out: Tensor,
    d_x: Tensor,
    d_halo: Tensor | None,
    norm_dim: int | None,
) -> Tensor:
    """Gradients of one section into `d_x` and `d_halo` (as x and halo, also in strides' freedom).

    `d_out` is [R, s, c], contiguous; every entry of `d_halo` is written. Returns the gradient of the taps,
    [W, c] fp32.
    """
    width = taps.shape[0]
    if not d_out.numel():
        return taps.new_zeros(taps.shape, dtype=torch.float32)
    grid, sizes = _grid(x, norm_dim, SPAN_BACKWARD)
    partial = torch.empty(grid[1] * grid[2], width, x.shape[2], dtype=torch.float32, device=x.device)
    _backward_kernel[grid](
        *_read(x, taps, halo, positions),
        d_out,
        d_x,
        d_x.stride(0),
        d_x.stride(1),
        x if d_halo is None else d_halo,
        *((0, 0) if d_halo is None else d_halo.stride()[:2]),
        partial,
        **sizes,
        normalise=norm_dim is not None,
        num_warps=WARPS,
    )
    return partial.sum(0)


def _grid(x: Tensor, norm_dim: int | None, span: int):
    """Programs (blocks of channels, spans, rows), and the sizes of their tiles."""
    num_rows, row_len, num_channels = x.shape
    head_dim = norm_dim or PLAIN_DIM
    heads = max(min(CHANNELS, triton.next_power_of_2(num_channels)) // head_dim, 1)
    grid = (triton.cdiv(num_channels, heads * head_dim), triton.cdiv(row_len, span), num_rows)
    return grid, {"heads": heads, "head_dim": head_dim, "span": span}


def _read(x: Tensor, taps: Tensor, halo: Tensor | None, positions: Tensor | None):
    """What both kernels read, and the flags that say what of it is there, in the order of their arguments."""
    return (
        x,
        x.stride(0),
        x.stride(1),
        taps,
        taps.stride(0),
        x if halo is None else halo,
        *((0, 0) if halo is None else halo.stride()[:2]),
        x if positions is None else positions,
        x.shape[1],
        x.shape[2],
        taps.shape[0],
        halo is not None,
        positions is not None,
    )


@triton.jit
def _tap(taps, stride, back: tl.constexpr, width: tl.constexpr, channel, inside):
    """What meets the token `back` tokens ago; zero where the convolution does not reach."""
    return tl.load(taps + (width - 1 - back) * stride + channel, mask=inside & (back < width), other=0.0).to(
        tl.float32
    )


@triton.jit
def _earlier(
    x, x_token, halo, halo_token, first, position, back, width: tl.constexpr, inside, has_halo: tl.constexpr
):
    """The token `back` tokens before `first`; zero in another document, or where the taps do not reach."""
    token = first - back
    reached = (position >= back) & (back < width)
    value = tl.load(x + token * x_token, mask=inside & reached & (token >= 0), other=0.0).to(tl.float32)
    if has_halo:
        at = halo + (token + width - 1) * halo_token
        value += tl.load(at, mask=inside & reached & (token < 0), other=0.0).to(tl.float32)
    return value


@triton.jit
def _four(x, stride, first, end, inside):
    """Tokens first .. first + 3, zero from `end` on; all loads before anything waits for them."""
    x += first * stride
    return (
        tl.load(x, mask=inside & (first < end), other=0.0),
        tl.load(x + stride, mask=inside & (first + 1 < end), other=0.0),
        tl.load(x + 2 * stride, mask=inside & (first + 2 < end), other=0.0),
        tl.load(x + 3 * stride, mask=inside & (first + 3 < end), other=0.0),
    )


@triton.jit
def _forward_kernel(
    x,
    x_row,
    x_token,
    taps,
    taps_stride,
    halo,
    halo_row,
    halo_token,
    positions,
    row_len,
    channels,
    width: tl.constexpr,
    has_halo: tl.constexpr,
    documents: tl.constexpr,
    out,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    span: tl.constexpr,
    normalise: tl.constexpr,
):
    row = tl.program_id(2).to(tl.int64)
    first = tl.program_id(1).to(tl.int64) * span
    end = tl.minimum(first + span, row_len)
    head = tl.program_id(0) * heads + tl.arange(0, heads)
    channel = head[:, None] * head_dim + tl.arange(0, head_dim)[None, :]
    inside = channel < channels
    x += row * x_row + channel
    halo += row * halo_row + channel
    positions += row * row_len
    out += row * row_len * channels + channel
    w0 = _tap(taps, taps_stride, 0, width, channel, inside)
    w1 = _tap(taps, taps_stride, 1, width, channel, inside)
    w2 = _tap(taps, taps_stride, 2, width, channel, inside)
    w3 = _tap(taps, taps_stride, 3, width, channel, inside)
    position = tl.load(positions + first) if documents else first
    x1 = _earlier(x, x_token, halo, halo_token, first, position, 1, width, inside, has_halo)
    x2 = _earlier(x, x_token, halo, halo_token, first, position, 2, width, inside, has_halo)
    x3 = _earlier(x, x_token, halo, halo_token, first, position, 3, width, inside, has_halo)

    t0, t1, t2, t3 = _four(x, x_token, first, end, inside)
    for start in range(0, span, 4):
        tokens = t0, t1, t2, t3
        t0, t1, t2, t3 = _four(x, x_token, first + start + 4, end, inside)
        for i in tl.static_range(4):
            token = first + start + i
            x0 = tokens[i].to(tl.float32)
            if documents:
                goes_on = tl.load(positions + token, mask=token < end, other=0) > 0
                x1 = tl.where(goes_on, x1, 0.0)
                x2 = tl.where(goes_on, x2, 0.0)
                x3 = tl.where(goes_on, x3, 0.0)
            y = w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
            y = y * sigmoid(y)
            if normalise:
                y *= tl.rsqrt(tl.sum(y * y, axis=1) + L2NORM_EPS)[:, None]
            tl.store(out + token * channels, y.to(out.dtype.element_ty), mask=inside & (token < end))
            x3 = x2
            x2 = x1
            x1 = x0


@triton.jit
def _backward_kernel(
    x,
    x_row,
    x_token,
    taps,
    taps_stride,
    halo,
    halo_row,
    halo_token,
    positions,
    row_len,
    channels,
    width: tl.constexpr,
    has_halo: tl.constexpr,
    documents: tl.constexpr,
    d_out,
    d_x,
    d_x_row,
    d_x_token,
    d_halo,
    d_halo_row,
    d_halo_token,
    partial,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    span: tl.constexpr,
    normalise: tl.constexpr,
):
    row = tl.program_id(2).to(tl.int64)
    first = tl.program_id(1).to(tl.int64) * span
    end = tl.minimum(first + span, row_len)
    head = tl.program_id(0) * heads + tl.arange(0, heads)
    channel = head[:, None] * head_dim + tl.arange(0, head_dim)[None, :]
    inside = channel < channels
    x += row * x_row + channel
    halo += row * halo_row + channel
    positions += row * row_len
    d_out += row * row_len * channels + channel
    d_x += row * d_x_row + channel
    d_halo += row * d_halo_row + channel
    w0 = _tap(taps, taps_stride, 0, width, channel, inside)
    w1 = _tap(taps, taps_stride, 1, width, channel, inside)
    w2 = _tap(taps, taps_stride, 2, width, channel, inside)
    w3 = _tap(taps, taps_stride, 3, width, channel, inside)
    position = tl.load(positions + first) if documents else first
    x1 = _earlier(x, x_token, halo, halo_token, first, position, 1, width, inside, has_halo)
    x2 = _earlier(x, x_token, halo, halo_token, first, position, 2, width, inside, has_halo)
    x3 = _earlier(x, x_token, halo, halo_token, first, position, 3, width, inside, has_halo)
    # Gradients of the taps, and of the three tokens before the present one as far as they are known.
    dw0 = tl.zeros([heads, head_dim], tl.float32)
    dw1 = tl.zeros([heads, head_dim], tl.float32)
    dw2 = tl.zeros([heads, head_dim], tl.float32)
    dw3 = tl.zeros([heads, head_dim], tl.float32)
    d1 = tl.zeros([heads, head_dim], tl.float32)
    d2 = tl.zeros([heads, head_dim], tl.float32)
    d3 = tl.zeros([heads, head_dim], tl.float32)

    # Four tokens more than the program's own: the first three of the next span reach back into this one.
    t0, t1, t2, t3 = _four(x, x_token, first, row_len, inside)
    u0, u1, u2, u3 = _four(d_out, channels, first, row_len, inside)
    for start in range(0, span + 4, 4):
        tokens = t0, t1, t2, t3
        d_outs = u0, u1, u2, u3
        t0, t1, t2, t3 = _four(x, x_token, first + start + 4, row_len, inside)
        u0, u1, u2, u3 = _four(d_out, channels, first + start + 4, row_len, inside)
        for i in tl.static_range(4):
            token = first + start + i
            x0 = tokens[i].to(tl.float32)
            d = d_outs[i].to(tl.float32)
            if documents:
                position = tl.load(positions + token, mask=token < row_len, other=0)
                x1 = tl.where(position > 0, x1, 0.0)
                x2 = tl.where(position > 0, x2, 0.0)
                x3 = tl.where(position > 0, x3, 0.0)
            y = w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
            gate = sigmoid(y)
            silu = y * gate
            if normalise:
                scale = tl.rsqrt(tl.sum(silu * silu, axis=1) + L2NORM_EPS)
                along = tl.sum(d * silu, axis=1) * scale * scale
                d = (d - silu * along[:, None]) * scale[:, None]
            d *= gate + silu * (1.0 - gate)
            # The taps' gradients of tokens behind the span belong to the next program.
            own = tl.where(token < end, d, 0.0)
            dw0 += own * x0
            dw1 += own * x1
            dw2 += own * x2
            dw3 += own * x3
            if documents:
                d1 += tl.where(position >= 1, w1 * d, 0.0)
                d2 += tl.where(position >= 2, w2 * d, 0.0)
                d3 += tl.where(position >= 3, w3 * d, 0.0)
            else:
                d1 += w1 * d
                d2 += w2 * d
                d3 += w3 * d
            done = token - 3
            at = d_x + done * d_x_token
            tl.store(at, d3.to(d_x.dtype.element_ty), mask=inside & (done >= first) & (done < end))
            if has_halo:
                at = d_halo + (done + width - 1) * d_halo_token
                ours = (done < 0) & (done + width - 1 >= 0)
                tl.store(at, d3.to(d_halo.dtype.element_ty), mask=inside & ours)
            d3 = d2
            d2 = d1
            d1 = w0 * d
            x3 = x2
            x2 = x1
            x1 = x0

    program = row * tl.num_programs(1) + tl.program_id(1)
    partial += program * width * channels + channel
    tl.store(partial + (width - 1) * channels, dw0, mask=inside)
    if width > 1:
        tl.store(partial + (width - 2) * channels, dw1, mask=inside)
    if width > 2:
        tl.store(partial + (width - 3) * channels, dw2, mask=inside)
    if width > 3:
        tl.store(partial, dw3, mask=inside)
