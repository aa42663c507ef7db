"""Causal depthwise convolution + SiLU over rows of tokens, whose taps stop at document borders.

Legend: R rows, s tokens per row, C channels, W taps.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_gdn.rows import Rows


def causal_conv1d_silu(x: Tensor, weight: Tensor, rows: Rows, halo: Tensor | None = None) -> Tensor:
    """silu(sum_i weight[:, W-1-i] * x[t-i]), taps before the document's first token left out.

    Args:
        x: [R, s, C], any floating dtype; computed in fp32.
        weight: [C, W]; the last tap meets the token itself.
        rows: document borders in the rows.
        halo: the W-1 tokens before each row, [R, W-1, C]; None if no row starts inside a document.

    Returns:
        [R, s, C] in x's dtype.
    """
    run = _fla_conv if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) else _torch_conv
    return run(x, weight, rows, halo)


def _torch_conv(x, weight, rows, halo):
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
    return F.silu(out).to(x.dtype)


def _fla_conv(x, weight, rows, halo):
    """flash-linear-attention's Triton kernel, all pieces of all rows in one call."""
    from fla.modules.causal_conv1d import causal_conv1d

    num_rows, row_len, channels = x.shape
    taps = 0 if halo is None else halo.shape[1]
    if taps:
        x, rows = torch.cat([halo, x], dim=1), rows.extended(taps)
    out, _ = causal_conv1d(
        x=x.reshape(1, -1, channels),
        weight=weight,
        activation="silu",
        cu_seqlens=rows.cu_seqlens,
        cu_seqlens_cpu=rows.cu_seqlens_cpu,
    )
    return out.view(num_rows, taps + row_len, channels)[:, taps:]
