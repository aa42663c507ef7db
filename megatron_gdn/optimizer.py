"""The host's optimizer step on torch's fused kernels, where TransformerEngine and apex bring none.

The host falls back to `torch.optim.AdamW` then and says nothing of kernels, so that torch takes those that go
over weights, gradients and moments several times. Its own norm and scaling of gradients go parameter by
parameter, and the norm waits for the GPU at each.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from megatron_gdn.checkpoint.host_methods import wrap_method


def fuse_optimizer_step() -> RemovableHandle:
    """Have every Adam of torch in this process, and the host's clipping, run on fused kernels.

    Formulas, state and checkpoints are the same; results differ by rounding. Whatever a loaded
    checkpoint says of kernels, the next step on a GPU puts right. The optimizers and functions of
    TransformerEngine and apex are left alone.

    Returns:
        A handle whose `remove` leaves Adam's choice to torch again.
    """
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _norm
    if clip_grads.multi_tensor_scale_impl is local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = _scale
    wrap_method(MegatronOptimizer, "_extract_common_per_param_step", _step_on_cpu)
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


def _step_on_cpu(original: Callable, self: MegatronOptimizer, state_dict: dict) -> Tensor | int | None:
    """What a checkpoint keeps of the step count, on the CPU: others may have no GPU when they read it."""
    step = original(state_dict)
    return step.cpu() if isinstance(step, Tensor) else step


def _on_gpu(parameters: list[Tensor]) -> bool:
    return bool(parameters) and all(parameter.is_cuda for parameter in parameters)


def _norm(chunk_size: int, flag: Tensor, lists: list[list[Tensor]], per_tensor: bool) -> tuple[Tensor, None]:
    """Norm of all gradients together, [1]; arguments are those of apex's function of this kind."""
    return torch.stack(torch._foreach_norm(lists[0])).norm().view(1), None


def _scale(chunk_size: int, flag: Tensor, lists: list[list[Tensor]], factor: float) -> None:
    """Scale gradients in place: the host names them as what is read and what is written."""
    if lists[1]:
        torch._foreach_mul_(lists[1], factor)
