"""Causal depthwise convolution + SiLU over rows of tokens, whose taps stop at document borders.

Legend: R rows, s tokens per row, C channels, W taps.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_gdn.ops import causal_conv_triton
from megatron_gdn.rows import Rows


def causal_conv1d_silu(
    x: Tensor,
    weight: Tensor,
    rows: Rows,
    halo: Tensor | None = None,
    *,
    sizes: Sequence[int],
    norm_dims: Sequence[int | None],
) -> tuple[Tensor, ...]:
    """silu(sum_i weight[:, W-1-i] * x[t-i]), taps before the document's first token left out.

    The channels come out as the sections that the gated delta rule reads, each contiguous, some of them
    l2-normalised in heads: y / sqrt(sum y^2 + 1e-6). All of it is computed in fp32 and rounded once.
    On a GPU it is one Triton kernel per section, which reads x and writes the result, and one more for
    the backward, which needs only the arguments. In plain torch elsewhere, in float64, where W is more
    than 4, and for heads that are no power of two.

    Args:
        x: [R, s, C], any floating dtype; may be a view with other strides, as long as channels are next
            to each other.
        weight: [C, W]; the last tap meets the token itself.
        rows: document borders in the rows.
        halo: the W-1 tokens before each row, [R, W-1, C]; None if no row starts inside a document.
        sizes: channels of each section; they add up to C.
        norm_dims: of each section, the size of the heads to be normalised, or None.

    Returns:
        One [R, s, size] per section in x's dtype.
    """
    sections = tuple(zip(sizes, norm_dims, strict=True))
    if backend_name(x.device, x.dtype, weight.shape[1], norm_dims) == "Triton":
        return _TritonConv.apply(x, weight, halo, rows, sections)
    return _torch_conv(x, weight, halo, rows, sections)


def backend_name(
    device: torch.device, dtype: torch.dtype, width: int, norm_dims: Sequence[int | None]
) -> str:
    """Which kernels run on such tensors, with so many taps and heads of these sizes: Triton or torch."""
    heads_fit = all(dim is None or (dim & (dim - 1) == 0 and dim <= 512) for dim in norm_dims)
    fits = heads_fit and width <= causal_conv_triton.MAX_WIDTH and dtype != torch.float64
    return "Triton" if device.type == "cuda" and fits else "torch"


def _torch_conv(x, weight, halo, rows, sections):
    """One shifted product per tap."""
    width, row_len = weight.shape[1], x.shape[1]
    weight32, x32 = weight.float(), x.float()
    before = x32.new_zeros(x.shape[0], width - 1, x.shape[2]) if halo is None else halo.float()
    padded = torch.cat([before, x32], dim=1)
    out = x32 * weight32[:, -1]
    for back in range(1, width):
        tap = padded[:, width - 1 - back : width - 1 - back + row_len] * weight32[:, -1 - back]
        if halo is not None or not rows.whole:
            tap = torch.where((rows.positions >= back).unsqueeze(-1), tap, 0.0)
        out = out + tap
    parts = F.silu(out).split([size for size, _ in sections], dim=-1)
    return tuple(_l2norm(y, dim).to(x.dtype) for y, (_, dim) in zip(parts, sections, strict=True))


def _l2norm(y: Tensor, dim: int | None) -> Tensor:
    if dim is None:
        return y
    heads, eps = y.unflatten(-1, (-1, dim)), causal_conv_triton.L2NORM_EPS.value
    return (heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + eps)).flatten(-2)


class _TritonConv(torch.autograd.Function):
    """All sections, each by its own launch, on parts of the same x and into parts of the same gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, halo: Tensor | None, rows: Rows, sections):
        x, halo = _channels_together(x), None if halo is None else _channels_together(halo)
        positions = rows.positions if halo is not None or not rows.whole else None
        taps = weight.t().contiguous()
        ctx.save_for_backward(x, taps, halo, positions)
        ctx.sections = sections
        outs = tuple(x.new_empty(*x.shape[:2], size) for size, _ in sections)
        parts = zip(
            _cut(x, sections), _cut(taps, sections), _cut(halo, sections), outs, sections, strict=True
        )
        for part, part_taps, part_halo, out, (_, norm_dim) in parts:
            causal_conv_triton.launch_forward(part, part_taps, part_halo, positions, out, norm_dim)
        return outs

    @staticmethod
    @once_differentiable
    def backward(ctx, *d_outs: Tensor):
        x, taps, halo, positions = ctx.saved_tensors
        d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        d_halo = None if halo is None else torch.empty_like(halo, memory_format=torch.contiguous_format)
        read = zip(*(_cut(t, ctx.sections) for t in (x, taps, halo)), strict=True)
        written = zip(*(_cut(t, ctx.sections) for t in (d_x, d_halo)), strict=True)
        d_taps = [
            causal_conv_triton.launch_backward(*parts, positions, d_out.contiguous(), *gradients, norm_dim)
            for parts, gradients, d_out, (_, norm_dim) in zip(
                read, written, d_outs, ctx.sections, strict=True
            )
        ]
        d_weight = torch.cat(d_taps, dim=1).t().to(taps.dtype)
        return d_x, d_weight, d_halo, None, None


def _channels_together(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _cut(x: Tensor | None, sections) -> tuple[Tensor | None, ...]:
    """Views of the sections' channels."""
    return (None,) * len(sections) if x is None else x.split([size for size, _ in sections], dim=-1)
