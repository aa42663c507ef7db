"""What the host's optimizer checkpoints do wrong without our repairs, fault by fault, and right with them.

Every case trains two linear layers, the second like an expert's, saves after two of three steps, loads into a
new model and takes the third step, in one forked rank: repairs live as long as that rank.
"""

from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_gdn import cpu
from megatron_gdn import optimizer as optimizer_module
from megatron_gdn.checkpoint.repairs import repair_optimizer_checkpoints
from tests.helpers.distributed import make_groups, run_ranks

FULL, BUCKETS = "fully_reshardable", "dp_reshardable"
STEPS, SAVED = 3, 2
DTYPES = ["fp32", "mixed"]
HOST = (DistributedOptimizer, ChainedOptimizer, Float16OptimizerWithFloat16Params)


def build(*, distributed: bool, dtype: str, experts: bool, names: tuple[str, ...] = ("dense", "expert")):
    """(model inside the host's data parallelism, the host's optimizer); the same weights every time.

    Args:
        distributed: whether the optimizer is the distributed one.
        dtype: "fp32", "bf16", or "mixed": bf16, but the first layer's bias fp32, as in GatedDeltaNet.
        experts: whether layer "expert" is one of expert parallelism, which gives it its own optimizer.
        names: of the layers.
    """
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    model = MegatronModule(config)
    torch.manual_seed(5)
    for name in names:
        layer = nn.Linear(8, 8, dtype=torch.float32 if dtype == "fp32" else torch.bfloat16)
        model.add_module(name, layer)
        for parameter in layer.parameters():
            parameter.allreduce = not (experts and name == "expert")
    if dtype == "mixed":
        model.get_submodule(names[0]).bias.data = model.get_submodule(names[0]).bias.float()
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=distributed), model
    )
    options = OptimizerConfig(
        lr=0.01, bf16=dtype != "fp32", use_distributed_optimizer=distributed, clip_grad=0.0
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
            main = getattr(parameter, "main_param", parameter)
            if main in each.optimizer.state:
                found[name] = each.optimizer.state[main] | {"param": main}
    assert found.keys() == dict(model.module.named_parameters()).keys()
    return {n: {k: tensor.detach().clone() for k, tensor in state.items()} for n, state in found.items()}


def equal(got: dict[str, dict[str, Tensor]], want: dict[str, dict[str, Tensor]]) -> bool:
    """Whether all states are those wanted, bit for bit."""
    keys = {"param", "exp_avg", "exp_avg_sq", "step"}
    assert all(state.keys() == keys for state in want.values())
    return got.keys() == want.keys() and all(torch.equal(got[n][k], want[n][k]) for n in want for k in keys)


def sharded(model, optimizer, sharding: str | None, *, is_loading: bool) -> dict:
    """What is saved, or asked for."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"dp_cp_group": group, "chained_optim_avoid_prefix": True}
    metadata |= {"distrib_optim_sharding_type": sharding} if sharding else {}
    weights = model.module.sharded_state_dict(metadata=metadata)
    states = optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)
    return {"model": weights, "optimizer": states}


def save(model, optimizer, sharding: str | None, folder: Path) -> None:
    """Write a checkpoint."""
    cpu.fork_checkpoint_writer()
    folder.mkdir(exist_ok=True)
    dist_checkpointing.save(sharded(model, optimizer, sharding, is_loading=False), str(folder))


def load(model, optimizer, sharding: str | None, folder: Path) -> None:
    """Read a checkpoint into model and optimizer."""
    state = dist_checkpointing.load(sharded(model, optimizer, sharding, is_loading=True), str(folder))
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def repair_all_but(without: str) -> None:
    """All repairs, with the host's own method `without` ("class.method") back in its place; or "all"."""
    if without == "all":
        return
    owners = {each.__name__: each for each in HOST}
    owner, _, method = without.partition(".")
    host = vars(owners[owner])[method] if without else None
    repair_optimizer_checkpoints()
    if without:
        assert vars(owners[owner])[method] is not host
        setattr(owners[owner], method, host)


def resume(
    rank: int,
    world_size: int,
    folder: Path,
    sharding: str | None,
    *,
    without: str = "",
    dtype: str = "fp32",
    experts: tuple[bool, bool] = (False, False),
    fused: bool = False,
) -> str:
    """What comes of going on from a checkpoint: "equal" (bit for bit), "different" or the error.

    Args:
        rank: of this process.
        world_size: number of processes.
        folder: for the checkpoint.
        sharding: how the distributed optimizer is saved; None: not distributed.
        without: host's class and method that keeps the host's behaviour.
        dtype: of the model, see `build`.
        experts: whether experts have an optimizer of their own when saving, and when loading.
        fused: whether Adam runs as on a GPU.
    """
    repair_all_but(without)
    if fused:
        optimizer_module._on_gpu = bool
        optimizer_module.fuse_optimizer_step()
    with make_groups():
        kind = {"distributed": sharding is not None, "dtype": dtype}
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sharding", [FULL, BUCKETS, None])
@pytest.mark.parametrize("fused", [False, True])
def test_resume_is_exact(tmp_path, sharding, dtype, fused):
    """With the repairs a resumed run takes the step that the uninterrupted run takes, bit for bit."""
    assert outcome(tmp_path, sharding, dtype=dtype, fused=fused) == "equal"


@pytest.mark.parametrize(
    ("without", "sharding", "dtype", "fault"),
    [
        # A fresh optimizer has no step that the host could ask for.
        ("DistributedOptimizer.state_dict", FULL, "fp32", "AssertionError()"),
        ("DistributedOptimizer.state_dict", BUCKETS, "bf16", "AssertionError()"),
        # The step is no part of what is stored by parameter.
        ("DistributedOptimizer._set_main_param_and_optimizer_states", FULL, "fp32", "KeyError('step')"),
        # Copies into a leaf with autograd on; in bf16, where leaves are no views, step 0 over the loaded one.
        ("DistributedOptimizer._set_main_param_and_optimizer_states", BUCKETS, "fp32", "leaf"),
        ("DistributedOptimizer._set_main_param_and_optimizer_states", BUCKETS, "bf16", "different"),
        # All parameters advance one step tensor.
        ("DistributedOptimizer.load_state_dict", FULL, "fp32", "different"),
        ("DistributedOptimizer.load_state_dict", BUCKETS, "bf16", "different"),
    ],
)
def test_resume_shows_the_fault(tmp_path, without, sharding, dtype, fault):
    """Each repair is needed: with the host's own method in its place, the resumed run fails or differs."""
    assert fault in outcome(tmp_path, sharding, without=without, dtype=dtype)


@pytest.mark.parametrize("sharding", [FULL, None])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts", [(True, True), (True, False), (False, True)])
def test_resume_is_exact_across_chains(tmp_path, experts, sharding, dtype):
    """Two optimizers' checkpoint loads into one and back, as when expert parallelism is turned off or on."""
    assert outcome(tmp_path, sharding, experts=experts, dtype=dtype) == "equal"


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


def misplaced(rank: int, world_size: int, sharding: str | None, without: str) -> list[str] | str:
    """Parameters that would be saved with another's fp32 weight, or the error."""
    repair_all_but(without)
    with make_groups():
        model, optimizer = build(distributed=sharding is not None, dtype="mixed", experts=False)
        train(model, optimizer, range(SAVED))
        try:
            states = sharded(model, optimizer, sharding, is_loading=False)["optimizer"]
        except (AssertionError, ValueError) as error:
            return repr(error)
    kind = "optimizer.state.param." if sharding else "optimizer.state.fp32_param."
    saved = {each.key: each.data for each in nested_values(states) if isinstance(each, ShardedTensor)}
    parameters = dict(model.module.named_parameters())
    return [n for n, p in parameters.items() if not torch.equal(saved[kind + n].to(p.dtype).view_as(p), p)]


@pytest.mark.parametrize("sharding", [FULL, None])
def test_fp32_parameters_among_bf16(sharding):
    """What is saved under a parameter's name is that parameter's, also where dtypes are mixed."""
    assert run_ranks(misplaced, 1, sharding, "") == [[]]


@pytest.mark.parametrize(
    ("sharding", "without", "fault"),
    [
        (FULL, "DistributedOptimizer.__init__", "['dense.bias', 'expert.bias']"),
        (
            None,
            "Float16OptimizerWithFloat16Params.sharded_state_dict",
            "does not match",
        ),
    ],
)
def test_fp32_parameters_among_bf16_show_the_fault(sharding, without, fault):
    """The host exchanges two parameters silently, or fails where the optimizer is not distributed."""
    assert fault in str(run_ranks(misplaced, 1, sharding, without)[0])


def other_rate(rank: int, world_size: int, folder: Path) -> str:
    """Load across chains with another learning rate, which is part of what a parameter group is known by."""
    repair_optimizer_checkpoints()
    with make_groups():
        model, optimizer = build(distributed=True, dtype="fp32", experts=True)
        train(model, optimizer, range(SAVED))
        save(model, optimizer, FULL, folder)
        model, optimizer = build(distributed=True, dtype="fp32", experts=False)
        for group in optimizer.param_groups:
            group["max_lr"] = 1.0
        with pytest.raises(ValueError) as refusal:
            load(model, optimizer, FULL, folder)
        return str(refusal.value)


def test_other_settings_across_chains_are_refused(tmp_path):
    """No saved parameter group with this run's settings: said so, with the way out."""
    message = run_ranks(other_rate, 1, tmp_path)[0]
    assert "--load" in message and "'max_lr': 1.0" in message and "--no-load-optim" in message


def save_without_experts(rank: int, world_size: int, without: str) -> list[float] | str:
    """Rank 0 is a pipeline stage without experts, rank 1 has some: the steps that a rank would save."""
    repair_all_but(without)
    with make_groups(pipeline_model_parallel_size=2):
        names = [("dense",), ("other", "expert")][rank]
        model, optimizer = build(distributed=True, dtype="fp32", experts=True, names=names)
        train(model, optimizer, range(SAVED))
        try:
            states = sharded(model, optimizer, FULL, is_loading=False)["optimizer"]
        except AssertionError as error:
            return repr(error)
        return [group["step"] for state in states.values() for group in state["optimizer"]["param_groups"]]


def test_stage_without_experts_saves_the_step():
    """A rank whose expert optimizer has no parameters saves all the same, and with the step of the others."""
    for steps in run_ranks(save_without_experts, 2, ""):
        assert set(steps) == {float(SAVED)}


def test_stage_without_experts_shows_the_fault():
    """The host fails; without the step of the others, the one that is saved would be zero."""
    assert run_ranks(save_without_experts, 2, "all")[0] == "AssertionError()"
    assert 0 in run_ranks(save_without_experts, 2, "ChainedOptimizer._synchronize_steps")[0]
