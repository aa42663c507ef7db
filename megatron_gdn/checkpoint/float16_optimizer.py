"""The host's optimizer of bf16 and fp16 models, not distributed, with fp32 parameters among the others."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from megatron_gdn.checkpoint.host_methods import wrap_method


def repair_float16_optimizer() -> None:
    """Save and load what belongs to each parameter; needed whatever the inner optimizer.

    The host finds a parameter by its place among the 16-bit ones, but torch's optimizer counts all. With
    fp32 parameters in between (`A_log`, `dt_bias`, `out_norm`), it so takes one parameter's state for
    another's: an error where the shapes differ, a wrong checkpoint where they do not. Nothing changes for
    models without fp32 parameters. A second call does nothing.
    """
    for name in ("sharded_state_dict", "load_state_dict"):
        wrap_method(Float16OptimizerWithFloat16Params, name, count_all)


def count_all(original: Callable, self: Float16OptimizerWithFloat16Params, *args: Any, **kwargs: Any) -> Any:
    """Call the host's method with every parameter in the lists of 16-bit ones; fp32 is its own fp32 copy."""
    with _all_parameters(self):
        return original(self, *args, **kwargs)


@contextmanager
def _all_parameters(self: Float16OptimizerWithFloat16Params) -> Iterator[None]:
    model_groups, main_groups = self.float16_groups, self.fp32_from_float16_groups
    pairs = zip(sum(main_groups, []), sum(model_groups, []), strict=True)
    model_of = {id(main): model for main, model in pairs}
    every = [group["params"] for group in self.optimizer.param_groups]
    self.fp32_from_float16_groups = every
    self.float16_groups = [[model_of.get(id(main), main) for main in group] for group in every]
    try:
        yield
    finally:
        self.float16_groups, self.fp32_from_float16_groups = model_groups, main_groups
