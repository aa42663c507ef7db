"""Megatron's calls for a GPU are answered on the CPU, in a process of their own."""

import subprocess
import sys
import textwrap

import pytest


def run_python(code: str) -> str:
    """Output of `code` in a new interpreter: the stand-ins change torch for a whole process."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Hide any GPU from the processes that the tests start."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_enable_places_everything_on_the_cpu():
    """Tensors, streams, random states and devices; a second call changes nothing."""
    run_python(
        """
        import torch
        from megatron_gdn import cpu
        assert cpu.enable()
        zeros = torch.zeros
        assert cpu.enable() and torch.zeros is zeros
        assert not torch.cuda.is_available()

        for make in (torch.zeros, torch.ones, torch.empty, torch.rand):
            assert make(2, device="cuda").device.type == "cpu"
        assert torch.full((2,), 1, device=torch.device("cuda")).device.type == "cpu"
        assert torch.tensor([1.0], device=torch.cuda.current_device()).cuda().device.type == "cpu"
        x = torch.zeros(2)
        assert x.type() == "torch.cuda.FloatTensor" and x.bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert x.type(torch.int64).dtype == torch.int64
        assert x.type("torch.cuda.HalfTensor").dtype == torch.half

        event = torch.cuda.Event()
        with torch.cuda.stream(torch.cuda.Stream()):
            event.record(torch.cuda.current_stream())
        torch.cuda.current_stream().wait_event(event)

        torch.cuda.manual_seed(5)
        state = torch.cuda.get_rng_state()
        first = torch.rand(3)
        torch.cuda.set_rng_state(state)
        assert torch.equal(first, torch.rand(3, device="cuda"))
        """
    )


def test_enable_serves_uneven_shards_on_gloo():
    """Uneven all-gather and reduce-scatter, and all-to-all with split sizes in tensors, on two ranks."""
    run_python(
        """
        import os, sys, tempfile
        import torch, torch.distributed as dist
        from megatron_gdn import cpu
        cpu.enable()
        store = tempfile.mktemp()
        child = os.fork()
        rank = 0 if child else 1
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

        mine = torch.full((rank + 1, 2), float(rank))
        parts = [torch.empty(1, 2), torch.empty(2, 2)]
        dist.all_gather(parts, mine)
        assert torch.equal(torch.cat(parts), torch.tensor([[0.0, 0], [1, 1], [1, 1]]))

        out = torch.empty(rank + 1, 2)
        dist.reduce_scatter(out, [torch.ones(1, 2), torch.full((2, 2), 3.0)])
        assert torch.equal(out, torch.full((rank + 1, 2), 2.0 if rank == 0 else 6.0))

        splits = torch.tensor([1, 2])
        received = torch.empty(2 if rank == 0 else 4)
        dist.all_to_all_single(received, torch.arange(3.0), splits[rank].expand(2), splits)
        want = [0.0, 0.0] if rank == 0 else [1.0, 2.0, 1.0, 2.0]
        assert received.tolist() == want, received
        dist.barrier()
        dist.destroy_process_group()
        if child:
            _, status = os.waitpid(child, 0)
            sys.exit(os.waitstatus_to_exitcode(status))
        os._exit(0)
        """
    )


def test_megatron_seeds_and_runs_a_layer_on_the_cpu():
    """The host's random-state tracker and a tensor-parallel linear, which fail without the stand-ins."""
    run_python(
        """
        import os, tempfile
        from megatron_gdn import cpu
        cpu.enable()
        cpu.skip_helper_compilation()
        from megatron.core.datasets.utils import compile_helpers
        compile_helpers()  # the host's would exit: its wheel has no Makefile

        import torch
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import ColumnParallelLinear, model_parallel_cuda_manual_seed
        from megatron_gdn.config import Qwen35Config

        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1
        )
        parallel_state.initialize_model_parallel()
        config = Qwen35Config.from_size("debug", gradient_accumulation_fusion=False)
        weights = []
        for _ in range(2):
            model_parallel_cuda_manual_seed(3)
            layer = ColumnParallelLinear(
                8, 4, config=config, init_method=config.init_method, bias=False, gather_output=False
            )
            layer(torch.ones(2, 1, 8))[0].sum().backward()
            weights.append(layer.weight)
        assert torch.equal(*weights) and weights[0].grad is not None
        """
    )
