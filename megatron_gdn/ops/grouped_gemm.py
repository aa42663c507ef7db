"""One matrix product per expert, over tokens sorted by expert: the one door to its kernels."""

import torch.nn.functional as F
from torch import Tensor


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`x[i] @ weight[e].T` for every token i of every expert e, differentiable in `x` and `weight`.

    Runs as one grouped kernel in bf16 on GPUs (compute capability 8.0 and newer, sums in fp32) and as one
    product after another elsewhere, both inside `torch.nn.functional.grouped_mm`. Nothing waits for the
    GPU: how many tokens an expert has is read there.

    Args:
        x: [T, K], the tokens of expert 0, then those of expert 1, and so on; fp32, bf16 or fp16.
        weight: [E, N, K], x's dtype.
        ends: tokens of experts 0 to e, [E], int32, on x's device; ends[-1] is T. An expert may have none.

    Returns:
        [T, N] in x's dtype. The gradient of an expert without tokens is zero.

    Raises:
        ValueError: K or N is a size that the GPU's kernel cannot take.
    """
    if x.is_cuda and (weight.shape[1] * x.element_size() % 16 or weight.shape[2] * x.element_size() % 16):
        raise ValueError(
            f"experts of {weight.shape[1]} x {weight.shape[2]} in {x.dtype} have rows that are no multiple "
            "of 16 bytes; choose --hidden-size and --moe-ffn-hidden-size (divided by "
            "--expert-tensor-parallel-size) accordingly."
        )
    if not x.shape[0]:  # torch refuses the gradient of nothing
        return x @ weight[0].t()
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
