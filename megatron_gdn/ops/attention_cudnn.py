"""Blocks of attention by cuDNN on rows of one length, as torch brings it.

Shapes, results and gradients are those of `ops.attention.forward` and `ops.attention.backward`.

cuDNN builds a plan for every new size, which takes 0.1 s to more than 1 s: this is for sizes that
come again and again. torch keeps the plans.
"""

import torch
from torch import Tensor

MIN_ROW = 64
"""Rows below this are not worth a plan."""


def takes(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernel takes such tensors and is the fastest for them.

    Hopper only: there it is up to twice as fast as FlashAttention-2 at head dim 256; elsewhere that
    has not been measured, and its backward does not take head dim 256 everywhere.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and half and head_dim % 16 == 0 and head_dim <= 256 and _is_hopper(device)


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, rows) -> tuple[Tensor, Tensor]:
    """One call of the kernel, which takes heads before tokens, strided as they come."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, rows is not None, scale=scale
    )[:2]
    return o.transpose(1, 2), lse.squeeze(-1)


def backward(do, q, k, v, o, lse, scale, rows) -> tuple[Tensor, Tensor, Tensor]:
    """One call of the kernel, which reads lse as if contiguous.

    torch 2.11 keeps plans by the layouts of q, k and v alone, and runs the plan made for the first layouts
    of do and o on all later ones: wrong gradients. So these two are given one layout, that of q.
    """
    m, n = q.shape[1], k.shape[1]
    do, q, k, v, o = (x.transpose(1, 2) for x in (do, q, k, v, o))
    do, o = (_laid_out_as(q, x) for x in (do, o))
    # The random state of dropout, which is off: asked for and not read.
    unused = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, o, lse.contiguous().unsqueeze(-1), *unused, None, None, None, m, n, 0.0,
        rows is not None, scale=scale,
    )  # fmt: skip
    return tuple(grad.transpose(1, 2) for grad in grads)


def _laid_out_as(q: Tensor, x: Tensor) -> Tensor:
    """x in the layout of a new tensor like q; x itself if it is."""
    strides = torch.empty_like(q, device="meta").stride()
    if all(size == 1 or a == b for size, a, b in zip(x.shape, x.stride(), strides, strict=True)):
        return x
    return torch.empty_like(q, dtype=x.dtype).copy_(x)


def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device) == (9, 0)
