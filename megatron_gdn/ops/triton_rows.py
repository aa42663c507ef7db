"""How Triton kernels that work on rows, as norms do, share them out and read them.

Legend: N rows of D numbers. A tensor's rows lie in groups of H that follow each other without a gap (the
heads of a token), the groups at any stride, so that parts of a projection's output need not be copied.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048
"""Numbers that a program holds of each tensor at a time, unless one row has more."""
MAX_DIM = 16384
PROGRAMS_PER_SM = 8


def grouped_rows(x: Tensor) -> tuple[Tensor, int, int]:
    """(x, H, stride between groups); x is a copy where its rows are not as the legend says."""
    dim, heads, axes = x.shape[-1], 1, [i for i in range(x.ndim - 1) if x.shape[i] > 1]
    if x.stride(-1) == 1:
        while axes and x.stride(axes[-1]) == heads * dim:
            heads *= x.shape[axes.pop()]
        if not axes:
            return x, 1, dim
        stride = expected = x.stride(axes[-1])
        for axis in reversed(axes):
            if x.stride(axis) != expected:
                break
            expected *= x.shape[axis]
        else:
            return x, heads, stride
    return x.contiguous(), 1, dim


def tile_of(x: Tensor) -> tuple[int, dict[str, int]]:
    """Number of rows, and how many of them a program holds, with how many warps."""
    block_dim = triton.next_power_of_2(x.shape[-1])
    numbers = max(TILE, block_dim)
    warps = min(max(numbers // 256, 1), 16)
    return x.numel() // x.shape[-1], {
        "block_rows": numbers // block_dim,
        "block_dim": block_dim,
        "num_warps": warps,
    }


def num_programs(blocks: int, device: torch.device) -> int:
    """How many programs share out so many blocks of rows where each adds up over its own."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return min(blocks, PROGRAMS_PER_SM * sms)


@triton.jit
def load_rows(x, heads: tl.constexpr, stride, row, column, dim, inside):
    """[rows, columns] in fp32, zeros where not inside; heads and stride as given by `grouped_rows`."""
    at = x + (row // heads) * stride + (row % heads) * dim + column
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)
