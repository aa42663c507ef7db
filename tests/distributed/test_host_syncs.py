"""The CPU waits for the device equally often in a step of 4 and of 16 layers: integers are made once."""

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_gdn import optimizer as optimizer_module
from megatron_gdn.gated_delta_net import GatedDeltaNet
from tests.helpers.cases import PACKINGS
from tests.helpers.distributed import make_groups, run_ranks
from tests.helpers.host_syncs import HostSyncs, count_host_syncs
from tests.helpers.model import CPU, DENSE_MODEL, cut, make_model, make_samples, train_step

PACKED = "borders_off_spans"
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CONTIGUOUS = {"cp_layout": "contiguous", "cp_comm_type": "all_gather"}
HALF = {"linear_attention_freq": 2}
"""Every second layer is attention, so that two layers have both kinds."""


def of_script(model, groups) -> HostSyncs:
    """One training step, from a sample on the CPU to reduced gradients."""
    samples = make_samples(PACKED)[:1]
    with count_host_syncs() as syncs:
        train_step(model, groups, samples, packed=True)
    return syncs


def of_host_params(model, groups) -> HostSyncs:
    """Forward and backward with the host's own packed parameters, which hold borders on the device only."""
    part = cut(make_samples(PACKED)[0], model.config, groups.cp, True)
    borders = torch.tensor(PACKINGS[PACKED].cu_seqlens, dtype=torch.int32, device=CPU)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders)
    with count_host_syncs() as syncs:
        model(
            part.tokens, part.position_ids, None, labels=part.labels, packed_seq_params=params
        ).sum().backward()
    return syncs


def of_optimizer(model, groups) -> HostSyncs:
    """The optimizer's step, clipping included, as on a GPU."""
    optimizer_module._on_gpu = bool
    handle = optimizer_module.fuse_optimizer_step()
    settings = OptimizerConfig(lr=1e-3, clip_grad=1e-3, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(settings, [model], use_gloo_process_groups=False, pg_collection=groups)
    train_step(model, groups, make_samples(PACKED)[:1], packed=True)
    with count_host_syncs() as syncs:
        done, norm, _ = optimizer.step()
    handle.remove()
    assert done and norm > settings.clip_grad, "nothing was clipped"
    return syncs


def grown(
    rank, world_size, mode: str, overrides: dict, layers=(2, 4), step=of_script
) -> tuple[HostSyncs, HostSyncs]:
    """Syncs of a step of few layers, and what the step of many has more."""
    with make_groups(cp=world_size) as groups:
        many, few = (  # in this order: the host keeps a place for the loss of each expert layer it first sees
            step(make_model(groups, mode, num_layers=number, **HALF | overrides), groups)
            for number in reversed(layers)
        )
    return few, many.grown(few)


CASES = {
    "headwise": ("headwise", {}),
    "chunkwise": ("chunkwise", {}),
    "chunkwise, contiguous, recomputed": ("chunkwise", CONTIGUOUS | RECOMPUTED),
}


@pytest.mark.parametrize("case", CASES)
def test_count_does_not_grow_with_layers(case):
    """Packed, dense feed-forward: 3 and 12 layers of GatedDeltaNet, 1 and 4 of attention."""
    mode, overrides = CASES[case]
    overrides = DENSE_MODEL | {"linear_attention_freq": 4} | overrides
    for few, more in run_ranks(grown, 2, mode, overrides, layers=(4, 16)):
        assert few, "cutting a sample reads its borders, so nothing was counted at all"
        assert not more, f"a step of 16 layers has more than one of 4:\n{more}"


@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
def test_borders_of_the_host_are_read_once(mode):
    """All layers share what the first one reads."""
    for few, more in run_ranks(grown, 2, mode, DENSE_MODEL, step=of_host_params):
        assert sum(count for (name, _), count in few.items() if name == "tolist") == 1, f"{few}"
        assert not more, f"{more}"


def test_experts_ask_nothing():
    """How many tokens an expert gets is known on the device and used there.

    Only the host's router moves a weight that it finds on the CPU, where all of them are here.
    """
    for few, more in run_ranks(grown, 2, "chunkwise", {}):
        others = {place: count for place, count in more.items() if "moe/router.py" not in place[1]}
        assert few and not others, f"{more}"


@pytest.mark.parametrize("overrides", [DENSE_MODEL, {}], ids=["dense", "experts"])
def test_optimizer_waits_once(overrides):
    """For the norm of all gradients of a chain, whatever the number of parameters."""
    settings = overrides | {"distributed_optimizer": True}
    for few, more in run_ranks(grown, 2, "chunkwise", settings, step=of_optimizer):
        assert few and not more, f"{few}\nand with more layers\n{more}"


def planted(rank, world_size):
    forward = GatedDeltaNet.forward

    def asking(self, hidden_states, *args, **kwargs):
        hidden_states.sum().item()
        hidden_states.register_hook(lambda grad: grad.sum().item() and None)
        return forward(self, hidden_states, *args, **kwargs)

    GatedDeltaNet.forward = asking
    return grown(rank, world_size, "headwise", DENSE_MODEL, layers=(2, 6))[1]


def test_layer_that_asks_is_found():
    """The count sees a question in the forward pass of every layer, one in its backward pass, and where."""
    for more in run_ranks(planted, 2):
        assert sorted(more.values()) == [2, 2], f"{more}"
        assert all(name == "_local_scalar_dense" for name, _ in more), f"{more}"
        assert {place.split()[-1] for _, place in more} == {"asking", "<lambda>"}, f"{more}"


X = torch.arange(4.0)
ASKING = {
    "item": lambda: X[0].item(),
    "tolist": lambda: X.tolist(),
    "cpu": lambda: X.cpu(),
    "numpy": lambda: X.numpy(),
    "to": lambda: X.to("cpu"),
    "to a device by name": lambda: X.to(device=CPU),
    "tensor on a device": lambda: torch.tensor([1, 2], device=CPU),
    "tensor of tensors": lambda: torch.tensor([[X[0]]]),
    "bool": lambda: bool(X[0]),
    "if": lambda: 1 if X[0] > 0 else 0,
    "int": lambda: int(X[0]),
    "float": lambda: float(X[0]),
    "index": lambda: [0, 1][X[0].long()],
    "equal": lambda: torch.equal(X, X),
    "nonzero": lambda: X.nonzero(),
    "where": lambda: torch.where(X > 1),
    "mask": lambda: X[X > 1],
    "masked_select": lambda: X.masked_select(X > 1),
    "unique": lambda: X.unique(),
    "repeat_interleave": lambda: X.repeat_interleave(torch.tensor([1, 2, 3, 4])),
}


@pytest.mark.parametrize("name", ASKING)
def test_counted_once(name):
    with count_host_syncs() as syncs:
        ASKING[name]()
    assert list(syncs.values()) == [1], f"{syncs}"


def test_not_counted():
    """What a device does by itself."""
    with count_host_syncs() as syncs:
        X[torch.tensor([0, 2])] + X.to(torch.float64).sum() * torch.where(X > 1, X, 0)[:2].bfloat16()
        X.repeat_interleave(torch.tensor([1, 2, 3, 4]), output_size=10)
    assert not syncs, f"{syncs}"
