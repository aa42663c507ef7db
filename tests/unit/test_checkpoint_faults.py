"""What the host's optimizer checkpoints do wrong without our repairs, fault by fault, and right with them.

Every case trains two linear layers, the second like an expert's, saves after two of three steps, loads into a
new model and takes the third step, in one forked rank: repairs live as long as that rank.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megatron_gdn import cpu
from tests.helpers.distributed import make_groups, run_ranks

FULL, BUCKETS = "fully_reshardable", "dp_reshardable"
STEPS, SAVED = 3, 2


def build(*, distributed: bool, bf16: bool, experts: bool, names: tuple[str, ...] = ("dense", "expert")):
    """(model inside the host's data parallelism, the host's optimizer); the same weights every time.

    `experts`: whether the layer "expert" is one of expert parallelism, which gives it its own optimizer.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    model = MegatronModule(config)
    torch.manual_seed(5)
    for name in names:
        layer = nn.Linear(8, 8, dtype=torch.bfloat16 if bf16 else torch.float32)
        model.add_module(name, layer)
        for parameter in layer.parameters():
            parameter.allreduce = not (experts and name == "expert")
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=distributed), model
    )
    options = OptimizerConfig(
        "adam", lr=0.01, bf16=bf16, use_distributed_optimizer=distributed, clip_grad=0.0
    )
    return model, get_megatron_optimizer(options, [model])


def train(model, optimizer, steps: range) -> None:
    """Steps with gradients that depend on the step and the parameter only."""
    for step in steps:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        for number, parameter in enumerate(model.parameters()):
            values = torch.arange(parameter.numel()) + number + 10 * step
            parameter.main_grad.copy_(values.sin().view_as(parameter))
        optimizer.step()


def moments(model, optimizer) -> dict[str, dict[str, Tensor]]:
    """Weight in fp32, moments and step of every parameter, by its name."""
    found = {}
    for name, parameter in model.module.named_parameters():
        for each in optimizer.chained_optimizers:
            if parameter in getattr(each, "model_param_group_index_map", ()):
                found[name] = each._get_main_param_and_optimizer_states(parameter)
            elif parameter in each.optimizer.state:
                found[name] = each.optimizer.state[parameter] | {"param": parameter}
    return {n: {k: tensor.detach().clone() for k, tensor in state.items()} for n, state in found.items()}


def equal(got: dict[str, dict[str, Tensor]], want: dict[str, dict[str, Tensor]]) -> bool:
    """Whether all states are those wanted, bit for bit."""
    keys = {"param", "exp_avg", "exp_avg_sq", "step"}
    assert all(state.keys() == keys for state in want.values())
    return got.keys() == want.keys() and all(torch.equal(got[n][k], want[n][k]) for n in want for k in keys)


def sharded(model, optimizer, sharding: str, *, is_loading: bool) -> dict:
    """What is saved, or asked for."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {
        "dp_cp_group": group,
        "chained_optim_avoid_prefix": True,
        "distrib_optim_sharding_type": sharding,
    }
    weights = model.module.sharded_state_dict(metadata=metadata)
    states = optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)
    return {"model": weights, "optimizer": states}


def save(model, optimizer, sharding: str, folder: Path) -> None:
    """Write a checkpoint."""
    from megatron.core import dist_checkpointing

    cpu.fork_checkpoint_writer()
    folder.mkdir(exist_ok=True)
    dist_checkpointing.save(sharded(model, optimizer, sharding, is_loading=False), str(folder))


def load(model, optimizer, sharding: str, folder: Path) -> None:
    """Read a checkpoint into model and optimizer."""
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load(sharded(model, optimizer, sharding, is_loading=True), str(folder))
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def resume(
    rank: int,
    world_size: int,
    folder: Path,
    sharding: str | None,
    *,
    without: str = "",
    bf16: bool = False,
    experts: tuple[bool, bool] = (False, False),
) -> str:
    """What comes of going on from a checkpoint: "equal" (bit for bit), "different" or the error.

    Args:
        rank: of this process.
        world_size: number of processes.
        folder: for the checkpoint.
        sharding: how the distributed optimizer is saved; None: not distributed.
        without: host's class and method that keeps the host's behaviour.
        bf16: whether the model is in bf16.
        experts: whether experts have an optimizer of their own when saving, and when loading.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    from megatron_gdn.checkpoint.chained_optimizer import follow_expert_parallel_size
    from megatron_gdn.checkpoint.distributed_optimizer import repair_distributed_optimizer

    owner, _, method = without.partition(".")
    owner = {"DistributedOptimizer": DistributedOptimizer, "ChainedOptimizer": ChainedOptimizer}.get(owner)
    host = owner and getattr(owner, method)
    assert repair_distributed_optimizer()
    follow_expert_parallel_size()
    if host:
        assert getattr(owner, method) is not host
        setattr(owner, method, host)
    with make_groups():
        kind = {"distributed": sharding is not None, "bf16": bf16}
        model, optimizer = build(**kind, experts=experts[0])
        train(model, optimizer, range(SAVED))
        save(model, optimizer, sharding, folder)
        train(model, optimizer, range(SAVED, STEPS))
        truth = moments(model, optimizer)
        model, optimizer = build(**kind, experts=experts[1])
        assert len(optimizer.chained_optimizers) == 1 + experts[1]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))  # so that what is not loaded shows
        try:
            load(model, optimizer, sharding, folder)
        except (AssertionError, KeyError, RuntimeError) as error:
            return repr(error)
        train(model, optimizer, range(SAVED, STEPS))
        return "equal" if equal(moments(model, optimizer), truth) else "different"


def outcome(*args, **kwargs) -> str:
    """`resume` in one forked rank."""
    return run_ranks(resume, 1, *args, **kwargs)[0]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sharding", [FULL, BUCKETS, None])
def test_resume_is_exact(tmp_path, sharding, bf16):
    """With the repairs a resumed run takes the step that the uninterrupted run takes, bit for bit."""
    assert outcome(tmp_path, sharding, bf16=bf16) == "equal"


@pytest.mark.parametrize(
    ("without", "sharding", "bf16", "fault"),
    [
        # A fresh optimizer has no step that the host could ask for.
        ("DistributedOptimizer.state_dict", FULL, False, "AssertionError()"),
        ("DistributedOptimizer.state_dict", BUCKETS, True, "AssertionError()"),
        # The step is no part of what is stored by parameter.
        ("DistributedOptimizer._set_main_param_and_optimizer_states", FULL, False, "KeyError('step')"),
        # Copies into a leaf with autograd on; in bf16, where leaves are no views, step 0 over the loaded one.
        ("DistributedOptimizer._set_main_param_and_optimizer_states", BUCKETS, False, "leaf"),
        ("DistributedOptimizer._set_main_param_and_optimizer_states", BUCKETS, True, "different"),
        # All parameters advance one step tensor.
        ("DistributedOptimizer.load_state_dict", FULL, False, "different"),
        ("DistributedOptimizer.load_state_dict", BUCKETS, True, "different"),
    ],
)
def test_resume_shows_the_fault(tmp_path, without, sharding, bf16, fault):
    """Each repair is needed: with the host's own method in its place, the resumed run fails or differs."""
    assert fault in outcome(tmp_path, sharding, without=without, bf16=bf16)


@pytest.mark.parametrize("sharding", [FULL, None])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("experts", [(True, True), (True, False), (False, True)])
def test_resume_is_exact_across_chains(tmp_path, experts, sharding, bf16):
    """Two optimizers' checkpoint loads into one and back, as when expert parallelism is turned off or on."""
    assert outcome(tmp_path, sharding, experts=experts, bf16=bf16) == "equal"


@pytest.mark.parametrize(
    ("experts", "sharding", "fault"),
    [
        ((True, False), FULL, "KeyError('optimizer')"),
        ((False, True), FULL, "Expected 2 entries"),
        ((False, True), None, "Expected 2 entries"),
    ],
)
def test_resume_across_chains_shows_the_fault(tmp_path, experts, sharding, fault):
    """The host looks for the parameter groups at their place in the chain."""
    without = "ChainedOptimizer.load_state_dict"
    assert fault in outcome(tmp_path, sharding, without=without, experts=experts)


def save_without_experts(rank: int, world_size: int, folder: Path, method: str) -> list[float] | str:
    """Rank 0 is a pipeline stage without experts, rank 1 has some: the steps that rank 1's checkpoint says."""
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    from megatron_gdn.checkpoint import distributed_optimizer

    host = ChainedOptimizer._synchronize_steps
    if method != "state_dict":
        distributed_optimizer.repair_distributed_optimizer()
    if method == "_synchronize_steps":
        ChainedOptimizer._synchronize_steps = host
    with make_groups(pipeline_model_parallel_size=2):
        names = [("dense",), ("other", "expert")][rank]
        model, optimizer = build(distributed=True, bf16=False, experts=True, names=names)
        train(model, optimizer, range(SAVED))
        try:
            states = sharded(model, optimizer, FULL, is_loading=False)["optimizer"]
        except AssertionError as error:
            return repr(error)
        return [group["step"] for state in states.values() for group in state["optimizer"]["param_groups"]]


def test_stage_without_experts_saves_the_step(tmp_path):
    """A rank whose expert optimizer has no parameters saves all the same, and with the step of the others."""
    for steps in run_ranks(save_without_experts, 2, tmp_path, ""):
        assert set(steps) == {float(SAVED)}


def test_stage_without_experts_shows_the_fault(tmp_path):
    """The host fails; without the step of the others, the one that is saved would be zero."""
    assert run_ranks(save_without_experts, 2, tmp_path, "state_dict")[0] == "AssertionError()"
    assert 0 in run_ranks(save_without_experts, 2, tmp_path, "_synchronize_steps")[0]
