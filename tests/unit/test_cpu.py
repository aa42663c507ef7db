"""Megatron's calls for a GPU are answered on the CPU.

The stand-ins are in place for every test (tests/conftest.py); what changes state runs in forked ranks.
"""

import pytest
import torch
import torch.distributed as dist

from megatron_gdn import cpu
from megatron_gdn.config import Qwen35Config
from tests.helpers.distributed import make_groups, run_ranks

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the stand-ins are for machines without a GPU; this one has a GPU"
)


def test_enable_is_honest_and_idempotent():
    """A second call changes nothing, and nobody is told that CUDA is there."""
    zeros = torch.zeros
    assert cpu.enable() and torch.zeros is zeros
    assert not torch.cuda.is_available()
    assert torch.cuda.device_count() == 1


def test_tensors_for_cuda_are_made_on_the_cpu():
    """Factories by name, by device and by the current device; `cuda()`; the optimizers' type names."""
    for make in (torch.zeros, torch.ones, torch.empty, torch.rand):
        assert make(2, device="cuda").device.type == "cpu"
    assert torch.full((2,), 1, device=torch.device("cuda")).device.type == "cpu"
    x = torch.tensor([1.0, 2.0], device=torch.cuda.current_device()).cuda()
    assert x.device.type == "cpu"
    assert x.type() == "torch.cuda.FloatTensor" and x.bfloat16().type() == "torch.cuda.BFloat16Tensor"
    assert x.type(torch.int64).dtype == torch.int64
    assert x.type("torch.cuda.HalfTensor").dtype == torch.half


def test_streams_and_events_do_nothing():
    """The host's overlap code runs through."""
    event = torch.cuda.Event()
    with torch.cuda.stream(torch.cuda.Stream()):
        event.record(torch.cuda.current_stream())
    torch.cuda.current_stream().wait_event(event)
    torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
    torch.cuda.synchronize()
    assert event.query()


def test_cuda_random_states_are_those_of_the_cpu():
    """A state that is put back gives the same numbers again; seeds take effect at once."""
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(3, device="cuda"))
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(3))


def move_uneven_shards(rank: int, world_size: int) -> None:
    """All-gather, reduce-scatter and all-to-all with shards of 1 and 2 rows, splits given as tensors."""
    mine = torch.full((rank + 1, 2), float(rank))
    parts = [torch.empty(1, 2), torch.empty(2, 2)]
    dist.all_gather(parts, mine)
    assert torch.equal(torch.cat(parts), torch.tensor([[0.0, 0], [1, 1], [1, 1]]))

    out = torch.empty(rank + 1, 2)
    dist.reduce_scatter(out, [torch.ones(1, 2), torch.full((2, 2), 3.0)])
    assert torch.equal(out, torch.full((rank + 1, 2), 2.0 if rank == 0 else 6.0))

    splits = torch.tensor([1, 2])
    received = torch.empty(2 * (rank + 1))
    dist.all_to_all_single(received, torch.arange(3.0), splits[rank].expand(2), splits)
    assert received.tolist() == ([0.0, 0.0] if rank == 0 else [1.0, 2.0, 1.0, 2.0])


def test_uneven_shards_on_gloo():
    """What gloo lacks and the host's experts need."""
    run_ranks(move_uneven_shards, 2)


def train_a_linear(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor-parallel linear of the host, seeded by its random-state tracker; weight and gradient."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, model_parallel_cuda_manual_seed

    with make_groups(tp=world_size) as groups:
        model_parallel_cuda_manual_seed(3)
        config = Qwen35Config.from_size(
            "debug", gradient_accumulation_fusion=False, tensor_model_parallel_size=world_size
        )
        layer = ColumnParallelLinear(
            8,
            4,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            tp_group=groups.tp,
        )
        x = torch.ones(2, 1, 8, requires_grad=True)
        layer(x)[0].sum().backward()
        return layer.weight.detach(), x.grad


def test_megatron_runs_a_layer():
    """Seeds give each tensor-parallel rank other weights, and the gradient sums over both ranks."""
    (first, grad), (second, _) = run_ranks(train_a_linear, 2)
    assert first.shape == second.shape == (2, 8) and not torch.equal(first, second)
    torch.testing.assert_close(grad, torch.cat([first, second]).sum(0).expand(2, 1, 8))


def test_skip_helper_compilation(monkeypatch):
    """The host's own would end the process: its wheel has no Makefile."""
    from megatron.core.datasets import utils

    monkeypatch.setattr(utils, "compile_helpers", utils.compile_helpers)
    cpu.skip_helper_compilation()
    utils.compile_helpers()
