"""RMSNorm modules that megatron-core's local backend lacks."""

import torch
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_gdn.float32 import Float32Parameters
from megatron_gdn.ops.norms import gated_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """RMSNorm as a megatron-core norm submodule.

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
        self.weight = nn.Parameter(start(hidden_size, dtype=self.weight_dtype(config), device=device))
        self.weight.sequence_parallel = config.sequence_parallel

    def weight_dtype(self, config) -> torch.dtype:
        """The model's parameter dtype."""
        return config.params_dtype

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis of `x`; same shape and dtype."""
        return rms_norm(x, self.weight, self.eps, self.zero_centered)


class QKNorm(RMSNorm):
    """The weight of the RMSNorm of queries or of keys; the norm itself is one step with RoPE.

    The weight is read by calling this, because the host waits for a module's parameters
    (`--overlap-param-gather`) before it is called.
    """

    def forward(self) -> Tensor:
        """[D]."""
        return self.weight


class Float32RMSNorm(Float32Parameters, RMSNorm):
    """RMSNorm whose weight stays fp32 in a bf16 or fp16 model, as the released models keep it."""

    float32_parameters = ("weight",)

    def weight_dtype(self, config) -> torch.dtype:
        """fp32, whatever the model's."""
        return torch.float32


class GatedRMSNorm(Float32RMSNorm):
    """The norm of each head of a GatedDeltaNet's output, times silu of a gate."""

    def forward(self, x: Tensor, gate: Tensor, tp_group: ProcessGroup | None = None) -> Tensor:
        """rmsnorm(x) * silu(gate).

        Args:
            x: [..., heads, V], any floating dtype.
            gate: as x.
            tp_group: ranks that normalise other heads with the same weight, if they are to sum its gradient
                here; None if there are none, or the host sums it (as it does under sequence parallelism).

        Returns:
            [..., heads, V] in x's dtype.

        Communication: with `tp_group`, an all-reduce of the weight's gradient in backward.
        """
        weight = self.weight
        if tp_group is not None:
            weight = copy_to_tensor_model_parallel_region(weight, group=tp_group)
        return gated_rms_norm(x, gate, weight, self.eps, self.zero_centered)
