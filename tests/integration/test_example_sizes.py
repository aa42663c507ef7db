"""The example scripts at full size: accepted, built on the meta device, and as large as released."""

import contextlib
import io
import os
import re
import sys

import pytest

from tests.helpers.distributed import run_ranks
from tests.helpers.pretrain import check_command_line
from tests.helpers.stages import Counts, build_chunks, count, standing_for
from tests.integration.test_examples import EXAMPLES, command_line
from tests.unit.test_config import COUNTS

SCRIPTS = {
    "qwen35_dense/pretrain_4b.sh": (8,),
    "qwen35_moe/pretrain_35b_a3b.sh": (8, 16),
    "qwen35_moe/pretrain_122b_a10b.sh": (32, 64),
    "qwen35_moe/pretrain_397b_a17b.sh": (128,),
}
"""GPUs that the README tells of."""
GIB = 2**30
WEIGHT_AND_GRADIENT, OPTIMIZER = 2 + 4, 4 + 4 + 4
"""Bytes: bf16 weight and fp32 gradient on every rank; fp32 weight and Adam's moments, shared out."""


def size_of(script: str) -> str:
    return re.search(r"pretrain_(\w+)\.sh", script)[1].replace("_", "-")


def flags_of(script: str, gpus: int, mode: str, torchrun, data: str, tmp_path) -> list[str]:
    env = {"DATA_PATH": data, "TOKENIZER": "byte", "SAVE": str(tmp_path / "save"), "MODE": mode}
    if gpus > 8:
        env |= {"NNODES": str(gpus // 8), "NODE_RANK": "0", "MASTER_ADDR": "node0"}
    # Of the few documents here, the script's share for validation comes to none.
    return command_line(script, torchrun, "--split", "9,1,0", **env)[1]


@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
@pytest.mark.parametrize(
    ("script", "gpus"), [(script, gpus) for script, numbers in SCRIPTS.items() for gpus in numbers]
)
def test_flags_are_accepted(script, gpus, mode, torchrun, data, tmp_path):
    """In both modes and with all numbers of GPUs that the README names."""
    check_command_line(gpus, flags_of(script, gpus, mode, torchrun, data, tmp_path), tmp_path)
    assert not (tmp_path / "save").exists()


def build_ranks(rank: int, _: int, gpus: int, flags: list[str]) -> tuple[list[Counts], Counts, list[int]]:
    """Read the flags, then build the first rank of every pipeline stage, and the last rank of all.

    Returns:
        Counts of the stages and of that last rank; CP x DP and expert DP, which share out the optimizer.
    """
    import pretrain_qwen35

    os.environ.update(RANK="0", WORLD_SIZE=str(gpus), LOCAL_RANK="0")
    # Nothing can be drawn on meta; experts are quicker built without asking for it.
    sys.argv = ["pretrain_qwen35.py", *flags, "--no-initialization"]
    with contextlib.redirect_stdout(io.StringIO()):
        model = pretrain_qwen35.prepare()[0].model
    stages = model.transformer.pipeline_model_parallel_size
    counts = []
    for number in [*range(0, gpus, gpus // stages), gpus - 1]:
        with standing_for(number, gpus, model.transformer) as groups:
            counts.append(count(build_chunks(model, groups), groups))
            replicas = [groups.dp_cp.size(), groups.expt_dp.size()]
    return counts[:-1], counts[-1], replicas


@pytest.mark.parametrize("script", SCRIPTS)
def test_built_model_has_the_published_size(script, torchrun, data, tmp_path):
    """The tensors of all ranks together, each counted once, are the released model's, to the last one."""
    gpus, mode = SCRIPTS[script][-1], "chunkwise"
    flags = flags_of(script, gpus, mode, torchrun, data, tmp_path)
    stages, last, replicas = run_ranks(build_ranks, 1, gpus, flags)[0]
    total, _, published = COUNTS[size_of(script)]
    whole = sum(stage.whole for stage in stages)
    assert abs(whole - published) < 0.01 * published
    assert whole == total
    assert last == stages[-1]  # another tensor- and expert-parallel rank holds as many

    readme = (EXAMPLES / "README.md").read_text()
    for number in SCRIPTS[script]:
        row = re.search(rf"\| `{script}` \| {number} \|.*\| (\d+) \|$", readme, re.MULTILINE)
        assert row, f"{script} with {number} GPUs is missing from examples/README.md"
        dense_replicas, expert_replicas = (n * number // gpus for n in replicas)
        need = max(
            s.dense * (WEIGHT_AND_GRADIENT + OPTIMIZER / dense_replicas)
            + s.experts * (WEIGHT_AND_GRADIENT + OPTIMIZER / max(expert_replicas, 1))
            for s in stages
        )
        assert round(need / GIB) == int(row[1]), f"{script}, {number} GPUs: {need / GIB:.1f} GiB"
