"""What a user gets wrong: one clear line on every rank, no hang, nothing left behind."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.pretrain import arguments, refusals

ROOT = Path(__file__).parents[2]
SPECS = "get_qwen35_headwise_cp_spec"

# name: (ranks, flags over TINY, what the line must say)
CASES = {
    "no spec": (2, {"spec": None}, f"--spec is missing.*{SPECS}"),
    "wrong spec module": (2, {"spec": "megatron_gdn.typo get_spec"}, f"--spec megatron_gdn.typo.*{SPECS}"),
    "wrong spec function": (2, {"spec": "megatron_gdn.layer_specs get_typo"}, f"--spec .*typo.*{SPECS}"),
    "attention by a2a": (2, {"cp-comm-type": "a2a"}, "--cp-comm-type a2a .*all_gather.*p2p"),
    "no such attention": (2, {"cp-comm-type": "ring"}, "--cp-comm-type ring .*all_gather.*p2p"),
    "unknown size": (2, {"qwen35-size": "36b"}, "--qwen35-size.*36b.*35b-a3b"),
    "no size": (2, {"qwen35-size": None}, "--qwen35-size"),
    "unknown layout": (2, {"cp-layout": "striped"}, "--cp-layout.*striped.*zigzag.*contiguous"),
    "stream of odd spans": (2, {"seq-length": 130, "micro-batch-size": 1}, r"130.*multiple of 4"),
    "packed stream of odd spans": (
        2,
        {"seq-length": 129, "micro-batch-size": 2, "dataloader-inter-document-masking": True},
        r"258.*multiple of 4",
    ),
    "value heads": (
        8,
        {"context-parallel-size": 8},
        "--context-parallel-size 8 with headwise CP.*value heads.*, 4, .*of 8;.*get_qwen35_chunkwise_cp_spec",
    ),
    "heads that three ranks cannot share": (
        3,
        {"context-parallel-size": 3, "seq-length": 192},
        r"--context-parallel-size 3 with headwise CP.*get_qwen35_chunkwise_cp_spec",
    ),
    "ranks that cp does not divide": (3, {}, "3.*not divisible"),
    "no sequence length": (2, {"seq-length": None}, "--seq-length.*missing"),
    "no data": (2, {"data-path": None}, "--data-path is missing.*prepare-data"),
    "missing data file": (
        2,
        {"data-path": "nowhere/data"},
        r"--data-path nowhere/data: .*\.idx cannot be read",
    ),
    "another norm": (1, {"normalization": "LayerNorm"}, "--normalization LayerNorm.*RMSNorm"),
    "stretched RoPE": (1, {"use-rope-scaling": True}, "--use-rope-scaling is not Qwen3.5"),
    "attention window": (1, {"window-size": "4,0"}, "--window-size is not Qwen3.5"),
    "batch size that grows, said the old way": (
        1,
        {"rampup-batch-size": "2 2 8", "train-iters": None, "train-samples": 16},
        "--rampup-batch-size 2 2 8 .*--step-batch-size-schedule",
    ),
    "no layers": (1, {"num-layers": 0}, "--num-layers must be at least 1, got 0"),
    "TransformerEngine that is not there": (
        1,
        {"transformer-impl": "transformer_engine"},
        "--transformer-impl transformer_engine.*not installed.*local",
    ),
    "norms recomputed without TransformerEngine": (
        2,
        {"recompute-granularity": "selective", "recompute-modules": "gdn_norm_out layernorm"},
        "--recompute-modules layernorm needs TransformerEngine.*not installed.*gdn_norm_out",
    ),
    "nothing to evaluate on": (1, {"split": "1,0,0", "eval-iters": 2}, "--eval-iters 2.*--split 1,0,0"),
    "share of no document": (1, {"split": "999,1,0"}, "--split 999,1,0: the share 1 comes to none"),
    "warm-up without end": (1, {"lr-warmup-iters": 6}, "--lr-warmup-iters 6 must be below"),
    "no tokenizer": (2, {"tokenizer": None}, "--tokenizer is missing"),
    "missing tokenizer": (2, {"tokenizer": "nowhere"}, "--tokenizer 'nowhere' does not exist"),
}


def leave_nothing(data: str, folder: Path) -> dict:
    """Flags of a run that would write to `folder`/save."""
    return {"context-parallel-size": 2, "data-path": data, "save": folder / "save"}


def of_one_rank(ranks: int) -> dict:
    """What a run of one rank needs beside that."""
    return {"context-parallel-size": 1} if ranks == 1 else {}


@pytest.mark.parametrize("case", CASES)
def test_refused_on_every_rank(case, data, tmp_path):
    ranks, flags, says = CASES[case]
    for line in refusals(
        ranks, arguments(leave_nothing(data, tmp_path) | of_one_rank(ranks) | flags), tmp_path
    ):
        assert re.search(says, line), line
    assert not (tmp_path / "save").exists()


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_cut_data_file(data, tmp_path, ending):
    prefix = tmp_path / "cut"
    for each in (".bin", ".idx"):
        shutil.copy(data + each, f"{prefix}{each}")
    os.truncate(f"{prefix}{ending}", os.path.getsize(f"{prefix}{ending}") - 100)
    for line in refusals(2, arguments(leave_nothing(str(prefix), tmp_path)), tmp_path):
        assert re.search(rf"--data-path .*cut{ending} has [\d,]+ bytes .*prepare-data", line), line
    assert not (tmp_path / "save").exists()


def test_save_that_is_a_file(data, tmp_path):
    (tmp_path / "save").write_text("mine")
    for line in refusals(2, arguments(leave_nothing(data, tmp_path)), tmp_path):
        assert re.search("--save .*cannot be written", line), line
    assert (tmp_path / "save").read_text() == "mine"


def test_torchrun_ends_soon_with_one_line(data, tmp_path):
    """The whole way: the launch script, torchrun and two ranks."""
    flags = leave_nothing(data, tmp_path) | {"spec": "megatron_gdn.typo get_spec"}
    start = time.monotonic()
    status, text = launch(arguments(flags))
    assert status == 1, text
    assert time.monotonic() - start < 60
    assert text.count("error: --spec megatron_gdn.typo get_spec") == 1, text
    assert not (tmp_path / "save").exists()


def launch(command_line: list[str]) -> tuple[int, str]:
    """Exit status and output of examples/launch.sh with two ranks and the torchrun of this interpreter."""
    result = subprocess.run(
        [ROOT / "examples" / "launch.sh", *command_line],
        env=os.environ | {"NGPU": "2", "TORCHRUN": str(Path(sys.executable).parent / "torchrun")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return result.returncode, result.stdout


def old_interpreters() -> list[str]:
    """Python 3.6 to 3.11 on this machine, each version once; names on PATH are run, as they may be shims."""
    names = [f"python3.{minor}" for minor in range(6, 12)] + ["python3"]
    paths = [shutil.which(name) for name in names]
    paths += sorted(map(str, Path.home().glob(".pyenv/versions/3.*/bin/python")))
    found = {}
    for path in filter(None, paths):
        asked = [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        answer = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
        if re.fullmatch(r"3\.([6-9]|1[01])", answer):
            found.setdefault(answer, path)
    return list(found.values())


def test_old_python():
    interpreters = old_interpreters()
    if not interpreters:
        pytest.skip("needs a Python from 3.6 to 3.11 on this machine, found none")
    for python in interpreters:
        result = subprocess.run(
            [python, ROOT / "pretrain_qwen35.py"], capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 1, python
        assert re.fullmatch(r"error: Python 3\.\d+\.\S+ is too old.*3\.12.*\n", result.stderr), result.stderr
