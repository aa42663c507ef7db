"""Optimizer checkpoints that go on at another expert-parallel size.

With expert parallelism the host keeps two optimizers in a chain, the second for the experts, because
their data-parallel groups differ; without it, one. Moments and fp32 weights are stored by parameter, so
they load either way, but what the parameters share (parameter groups with the step, loss scale) is stored
by place in the chain, and the host finds it only where the chain is as long as the one that saved it.
"""

from collections.abc import Callable
from typing import Any

from megatron.core.optimizer.optimizer import ChainedOptimizer, param_group_identifier_keys

from megatron_gdn.checkpoint.host_methods import wrap_method

_EXPERT = "is_expert_parallel"
_IDENTIFIERS = [key for key in param_group_identifier_keys if key != _EXPERT]


def follow_expert_parallel_size() -> None:
    """Let optimizer checkpoints of expert-parallel runs load without expert parallelism, and back.

    Needed whatever the inner optimizer. Changes what is done with a loaded checkpoint, never what is
    saved. A second call does nothing.
    """
    wrap_method(ChainedOptimizer, "load_state_dict", load_state_dict)


def load_state_dict(original: Callable, self: ChainedOptimizer, state_dict: dict | list) -> None:
    """Give each optimizer of this chain what parameters share, wherever the saved chain had it.

    The host looks for it at its own place: from two optimizers to one, KeyError 'optimizer'; from one to
    two, "Expected 2 entries".
    """
    if isinstance(state_dict, dict):
        places = sorted(key for key in state_dict if isinstance(key, int))
        alone = {key: value for key, value in state_dict.items() if not isinstance(key, int)}
        saved = [part for part in (alone, *(state_dict[i] for i in places)) if _saved_groups(part)]
        if saved and len(saved) != len(self.chained_optimizers):
            here = [alone] if len(self.chained_optimizers) == 1 else [state_dict[i] for i in places]
            for optimizer, part in zip(self.chained_optimizers, here, strict=True):
                _share(part, saved, optimizer.param_groups)
            state_dict = alone if len(here) == 1 else dict(enumerate(here))
    original(self, state_dict)


def _inner(part: dict) -> dict:
    """State of torch's optimizer; the host's fp32 optimizer stores nothing else."""
    return part.get("optimizer", part)


def _saved_groups(part: dict) -> list[dict]:
    """Parameter groups as the checkpoint has them; those that only list parameters come from this run."""
    return [group for group in _inner(part).get("param_groups", ()) if group.keys() != {"params"}]


def _share(part: dict, saved: list[dict], param_groups: list[dict]) -> None:
    """Complete what one optimizer loads, in place.

    Args:
        part: what was loaded by parameter.
        saved: every saved optimizer's part.
        param_groups: of the optimizer that loads.
    """
    first = saved[0]
    for key in first.keys() - {"optimizer", "param_groups", "state"}:
        part.setdefault(key, first[key])
    inner = part.setdefault("optimizer", {}) if "optimizer" in first else part
    groups = [group for each in saved for group in _saved_groups(each)]
    listed = inner.get("param_groups") or [{} for _ in param_groups]
    inner["param_groups"] = [
        _find(group, groups) | ids for group, ids in zip(param_groups, listed, strict=True)
    ]
    if "common_step" in _inner(first).get("state", {}):
        inner["state"].setdefault("common_step", _inner(first)["state"]["common_step"])


def _find(wanted: dict, groups: list[dict]) -> dict[str, Any]:
    """The saved group with the same settings, of experts or not, as one of `wanted`'s kind."""

    def identifier(group: dict) -> list:
        return [group.get(key) for key in _IDENTIFIERS]

    for group in groups:
        if identifier(group) == identifier(wanted):
            return group | {_EXPERT: wanted[_EXPERT]}
    settings = {key: wanted.get(key) for key in _IDENTIFIERS}
    raise ValueError(
        f"--load: no parameter group of the checkpoint's optimizer has the settings of this run, {settings}; "
        "use the learning rate and weight decay flags of the run that saved it, or --no-load-optim."
    )
