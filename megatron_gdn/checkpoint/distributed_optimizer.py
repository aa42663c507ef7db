"""The host's distributed optimizer saved and loaded: with torch's Adam, and with fp32 parameters among bf16.

torch's Adam keeps `step` as a tensor beside each parameter's moments; the Adam of TransformerEngine and
of apex keeps one integer per parameter group. megatron-core 0.19.2, core/optimizer/distrib_optimizer.py, is
written for the latter, and with the former no checkpoint loads. Each wrapper here takes the place of one
method, calls the host's, and says what it repairs. The format does not change.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor, nn

from megatron_gdn.checkpoint.host_methods import wrap_method

_NO_PARAMETER = "no parameter"
"""Key of the state of an Adam that has no parameter on this rank; torch keeps a key that it does not know."""


def repair_distributed_optimizer() -> None:
    """Make checkpoints of the host's distributed optimizer right; call it before optimizers are built.

    What concerns torch's Adam is left alone where TransformerEngine or apex is installed. A second call
    does nothing.
    """
    wrap_method(DistributedOptimizer, "__init__", number_parameters)
    wrap_method(
        DistributedOptimizer,
        "_set_main_param_and_optimizer_states",
        _set_main_param_and_optimizer_states,
    )
    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    for repair in (state_dict, load_state_dict):
        wrap_method(DistributedOptimizer, repair.__name__, repair)
    wrap_method(ChainedOptimizer, "_synchronize_steps", _synchronize_steps)


def _uses_torch_adam(self: DistributedOptimizer) -> bool:
    return isinstance(self.optimizer, (torch.optim.Adam, torch.optim.AdamW))


def number_parameters(original: Callable, self: DistributedOptimizer, *args: Any, **kwargs: Any) -> None:
    """Number the parameters of a group as torch's optimizer holds them: those in fp32 first.

    The host numbers them as they lie in its buffers. Where a bf16 or fp16 model has fp32 parameters
    (`A_log`, `dt_bias`, `out_norm`), it so takes one parameter's weight and moments for another's: an
    error where the sizes differ, a wrong checkpoint where they do not. Training is not affected.
    """
    original(self, *args, **kwargs)
    for number, group in enumerate(getattr(self, "opt_group_ranges", ())):
        parameters = sorted(group["params"], key=lambda parameter: parameter.dtype != torch.float32)
        self.model_param_group_index_map |= {each: (number, i) for i, each in enumerate(parameters)}


def state_dict(original: Callable, self: DistributedOptimizer) -> dict:
    """Give every parameter its Adam state first: no step taken, zero moments.

    The host reads the step from the parameters' states, and a fresh optimizer has none (its assertion
    that the states agree on one step fails). It also asks fresh optimizers: to load a checkpoint it
    first describes what it would save.
    """
    if _uses_torch_adam(self):
        allocate_state(self.optimizer)
    return original(self)


def load_state_dict(original: Callable, self: DistributedOptimizer, state_dict: dict) -> None:
    """Give every parameter a step of its own afterwards.

    The host hands one step tensor to all of them, and each parameter's update advances it by one.
    """
    original(self, state_dict)
    if _uses_torch_adam(self):
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()


@torch.no_grad()
def _set_main_param_and_optimizer_states(
    original: Callable, self: DistributedOptimizer, model_param: nn.Parameter, tensors: dict[str, Tensor]
) -> None:
    """Copy weights and moments but no step, and without autograd.

    The step has come with the parameter groups. Among these tensors it is either missing (a KeyError,
    format `fully_reshardable`) or that of the fresh optimizer, zero, which would have Adam correct its
    bias as in the first step (format `dp_reshardable`). In that format the host also copies into views
    of fp32 weights with autograd on, which torch refuses.

    That format stores states by their place among all parameters. Where the parameters are others, as with
    experts that run one by one, the host takes one's states for another's without a word if only the sizes
    agree; the weights, which the model has by then loaded by name, tell.
    """
    _check_same_weights(self, model_param, tensors.get("param"))
    if _uses_torch_adam(self):
        tensors = tensors | {"step": None}  # the host skips what is no tensor
    original(self, model_param, tensors)


def _check_same_weights(self: DistributedOptimizer, model_param: nn.Parameter, main_param: Any) -> None:
    """Refuse states whose fp32 weight is not that of the loaded model.

    An fp32 model has no copy of its weights, so there nothing can tell.
    """
    if not isinstance(main_param, Tensor) or self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        return
    place = self._get_model_param_range_map(model_param)["param"]
    weight = model_param.detach().view(-1)[place.start : place.end]
    if not torch.equal(main_param.to(weight), weight):
        raise ValueError(
            "--load: the optimizer's weights are not the model's. Perhaps the optimizer was stored by "
            "place (without --dist-ckpt-optim-fully-reshardable) and its parameters were others, such as "
            "experts one by one; load it with the program that saved it and save it again with "
            "--dist-ckpt-optim-fully-reshardable, or load the weights alone with --no-load-optim."
        )


def _synchronize_steps(original: Callable, self: ChainedOptimizer) -> int | None:
    """Tell an Adam without parameters on this rank the step of the others in the chain.

    A pipeline stage without MoE layers has such an optimizer of experts, and it may be the one whose
    parameter groups are saved. The host calls this method before it saves and after it has loaded.
    """
    step = original(self)
    chain = [each for each in self.chained_optimizers if isinstance(each, DistributedOptimizer)]
    chain = [each.optimizer for each in chain if _uses_torch_adam(each)]
    steps = [each.state[p]["step"] for each in chain for p in _parameters(each) if p in each.state]
    for optimizer in chain:
        if steps and not _parameters(optimizer):
            optimizer.state[_NO_PARAMETER] = {"step": steps[0].clone()}
    return step


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters that torch's Adam has not met yet the state it would start them with.

    Without parameters there is still one state, to hold a step.
    """
    parameters = _parameters(optimizer)
    if not parameters and not optimizer.state:
        optimizer.state[_NO_PARAMETER] = {"step": torch.zeros((), dtype=torch.float32)}
    for parameter in parameters:
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
