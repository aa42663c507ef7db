"""RMSNorm with an optional zero-centred weight, in plain PyTorch."""

import torch
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """x / rms(x) * weight, or * (1 + weight) when zero-centred; computed in fp32, returned in x's dtype.

    Args:
        x: [..., D], any floating dtype.
        weight: [D].
        eps: added to the mean square.
        zero_centered: whether the weight is stored as its difference from one.
    """
    scale = weight.float() + 1.0 if zero_centered else weight.float()
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * scale).to(x.dtype)


class RMSNorm(nn.Module):
    """RMSNorm as a megatron-core norm submodule, for backends that lack it.

    The host's `WrappedTorchNorm` refuses both a zero-centred weight and sequence parallelism.

    Attributes:
        weight: [hidden_size]; zeros at start when `config.layernorm_zero_centered_gamma`, else ones.
            Under sequence parallelism each rank sees part of the tokens, so it is marked for the
            host's all-reduce of such gradients over the tensor-parallel group.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        start = torch.zeros if self.zero_centered else torch.ones
        self.weight = nn.Parameter(start(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis of `x`; same shape and dtype."""
        return rms_norm(x, self.weight, self.eps, self.zero_centered)
