"""torch's Adam as one kernel on GPUs, where neither TransformerEngine nor apex brings one.

The host builds `torch.optim.AdamW` then and says nothing of kernels, so that torch takes one that goes over
weights, gradients and moments several times and keeps copies beside them.
"""

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


def fuse_adam() -> RemovableHandle:
    """Have every Adam of torch in this process use its fused kernel on GPUs.

    Formulas, state and checkpoints are the same; results differ by rounding. Whatever a loaded
    checkpoint says of kernels, the next step puts right.

    Returns:
        A handle whose `remove` leaves the choice to torch again.
    """
    return register_optimizer_step_pre_hook(_choose_kernel)


def _choose_kernel(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before a step: for groups of GPU tensors the fused kernel, which wants the step count there too."""
    if not isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        return
    for group in optimizer.param_groups:
        if _on_gpu(group["params"]):
            group.update(fused=True, foreach=False)
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                if state:
                    state["step"] = state["step"].to(parameter.device)


def _on_gpu(parameters: list[torch.Tensor]) -> bool:
    return bool(parameters) and all(parameter.is_cuda for parameter in parameters)
