"""The self-test at the start of training: one rank's wrong kernel ends all ranks, with one message."""

import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist

from megatron_gdn.config import Qwen35Config
from megatron_gdn.ops import norms
from megatron_gdn.self_test import runner
from tests.helpers.distributed import run_ranks


def start(rank: int, world_size: int, broken: tuple[int, ...]) -> tuple[str, str]:
    """What starting says, and how it ends, on a rank whose norm is wrong if it is one of `broken`."""
    import pretrain_qwen35 as script

    said = []
    args = SimpleNamespace(rank=rank, dataloader_inter_document_masking=True, reset_position_ids=False)
    if rank in broken:
        right = norms.rms_norm
        norms.rms_norm = lambda x, weight, *rest: right(x.detach() + 0 * x, weight, *rest)
    names = ("norm", "SwiGLU of experts")
    runner.CHECKS = tuple(check for check in runner.CHECKS if check.name in names)
    script.print = lambda line, **_: said.append(line)
    # Ranks other than the first wait before they speak.
    script.time = SimpleNamespace(sleep=lambda seconds: None)
    script.training.initialize_megatron = lambda word: f"{word} started"
    config = Qwen35Config.from_size("debug", transformer_impl="local", params_dtype=torch.float32)
    script.check_kernels_at_start(args, "headwise", config)
    try:
        ended = script.training.initialize_megatron("host")
    except SystemExit as end:
        ended = f"exit {end.code}"
    dist.barrier()  # nobody is left waiting in the exchange
    return "\n".join(said), ended


def test_a_wrong_kernel_on_one_rank_ends_all():
    """Both ranks say which rank, kernel and tensor; nobody hangs."""
    for said, ended in run_ranks(start, 2, (1,)):
        assert ended == "exit 1"
        assert said.startswith("error: the self-test found")
        assert "rank 1, " in said and "rank 0, " not in said
        assert "norm (torch): FAILED: relative error 1.0e+00 in the gradient of x" in said
        assert "--no-self-test" in said


def test_right_kernels_let_training_start():
    """The host's own start is what is returned; the first rank says so in one line."""
    (said, ended), (other, other_ended) = run_ranks(start, 2, ())
    assert ended == other_ended == "host started"
    assert said.startswith("self-test: 2 kernels right on every rank")
    assert other == ""


def test_flag_turns_it_off(monkeypatch):
    """--no-self-test; without it kernels are tested."""
    import pretrain_qwen35 as script

    for flags, wanted in ((["--no-self-test"], False), ([], True)):
        monkeypatch.setattr(sys, "argv", ["pretrain_qwen35.py", "--qwen35-size", "debug", *flags])
        assert script.parse_args(script.add_arguments).self_test is wanted
