"""The scripts in examples/: what they start is accepted, and trains; the quick start as a whole."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.pretrain import check_command_line, losses, pretrain

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
DENSE, MOE = "qwen35_dense/pretrain_4b.sh", "qwen35_moe/pretrain_35b_a3b.sh"
OF_A_RUN = ("NNODES", "NODE_RANK", "MASTER_ADDR", "CP", "MODEL", "MODE", "SAVE")
SMALL = (
    "--context-parallel-size 2 --seq-length 64 --train-iters 2 "
    "--lr-warmup-iters 0 --global-batch-size 4 --log-interval 1 --eval-iters 0 --num-workers 0 --split 9,1,0"
).split()


def run(script: str, *flags: str, **env: str) -> subprocess.CompletedProcess:
    """Run a script of examples/, without what this process's own environment says of ranks and runs."""
    clean = {k: v for k, v in os.environ.items() if k not in OF_A_RUN}
    return subprocess.run(
        [EXAMPLES / script, *flags], env=clean | env, capture_output=True, text=True, timeout=240
    )


def command_line(script: str, torchrun: Path, *flags: str, **env: str) -> tuple[list[str], list[str]]:
    """(torchrun's own flags, those of pretrain_qwen35.py) that a script comes to."""
    result = run(script, *flags, TORCHRUN=str(torchrun), **env)
    assert result.returncode == 0, result.stderr
    words = result.stdout.splitlines()
    border = words.index(str(ROOT / "pretrain_qwen35.py"))
    return words[:border], words[border + 1 :]


@pytest.mark.parametrize(
    ("script", "mode", "small"),
    [
        (DENSE, "headwise", ["--tensor-model-parallel-size", "2"]),
        (MOE, "headwise", ["--expert-model-parallel-size", "4"]),
        (MOE, "chunkwise", ["--expert-model-parallel-size", "4"]),
    ],
)
def test_script_trains_small(script, mode, small, torchrun, data, tmp_path):
    env = {"MODEL": "debug", "MODE": mode, "DATA_PATH": data, "TOKENIZER": "byte"}
    env |= {"SAVE": str(tmp_path / "save"), "NGPU": "4"}
    own, flags = command_line(script, torchrun, *SMALL, *small, **env)
    assert own[-2:] == ["--nproc-per-node", "4"]
    assert f"get_qwen35_{mode}_cp_spec" in flags
    pretrain(4, flags, tmp_path / "output")
    assert list(losses(tmp_path / "save")) == [1, 2]
    assert (tmp_path / "save" / "iter_0000002").is_dir()


def test_readme_long_stream(torchrun, data, tmp_path):
    """The README's own sizes for a long stream are accepted."""
    long = re.search(r"--context-parallel-size 32 .*", (EXAMPLES / "README.md").read_text())[0].split()
    env = {"DATA_PATH": data, "TOKENIZER": "byte", "SAVE": str(tmp_path / "save")}
    env |= {"NNODES": "8", "NODE_RANK": "0", "MASTER_ADDR": "node0"}
    flags = command_line(MOE, torchrun, *long, "--split", "9,1,0", **env)[1]
    check_command_line(64, flags, tmp_path)


def test_script_says_what_it_needs(torchrun, data):
    result = run(MOE, TORCHRUN=str(torchrun), DATA_PATH="", TOKENIZER="")
    assert result.returncode == 2 and "error: set DATA_PATH=PREFIX and TOKENIZER" in result.stderr
    result = run(MOE, TORCHRUN=str(torchrun), DATA_PATH=data, TOKENIZER="byte", MODEL="36b")
    assert result.returncode == 2 and "model_debug.sh" in result.stderr and "4b" not in result.stderr


def test_launch_on_several_nodes(torchrun):
    nodes = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "4321", "NGPU": "8"}
    own, flags = command_line("launch.sh", torchrun, "--save", "a folder", **nodes)
    wanted = "--nnodes 2 --node-rank 1 --master-addr node0 --master-port 4321 --nproc-per-node 8"
    assert own == wanted.split()
    assert flags == ["--save", "a folder"]
    for missing in ("NODE_RANK", "MASTER_ADDR"):
        result = run("launch.sh", TORCHRUN=str(torchrun), **nodes | {missing: ""})
        assert result.returncode == 2 and f"error: NNODES=2 needs {missing}" in result.stderr
    result = run("launch.sh", TORCHRUN="no-such-torchrun")
    assert result.returncode == 2 and "examples/setup_env.sh" in result.stderr


needs_own_venv = pytest.mark.skipif(
    Path(sys.prefix) != ROOT / ".venv", reason="needs the .venv of this repository; start with tests/run.sh"
)


@needs_own_venv
def test_quickstart(tmp_path):
    small = "--seq-length 64 --train-iters 12 --eval-interval 8 --eval-iters 1 --lr-warmup-iters 2"
    result = run("quickstart.sh", *small.split(), RUN=str(tmp_path / "run"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "layer spec" in result.stdout
    assert result.stdout.count("step 10 of 12 | loss") == 2
    assert result.stdout.count("held-out text after 12 steps: loss") == 2
    training, held_out = re.findall(r"largest relative difference .*: (\S+) \(", result.stdout)
    assert float(training) < 1e-5 and float(held_out) < 1e-5
    two, one = (losses(tmp_path / "run" / name) for name in ("cp2", "cp1"))
    assert list(two) == list(one) == list(range(1, 13))
    for file in ("both.png", "cp2/loss_curve.png", "cp2/training_log.jsonl", "cp1/output.log"):
        assert (tmp_path / "run" / file).stat().st_size
        assert str(tmp_path / "run" / file) in result.stdout
    assert len(result.stdout.splitlines()) < 70


@needs_own_venv
def test_quickstart_shows_why_it_failed(torchrun, tmp_path):
    result = run("quickstart.sh", "--no-such", TORCHRUN=str(torchrun), STATUS="3", RUN=str(tmp_path / "run"))
    assert result.returncode == 1
    assert "the run with 2 rank(s) failed" in result.stderr
    assert "--no-such" in result.stderr  # the end of the log
    assert "context-parallel-size 1" not in result.stdout


def test_quickstart_keeps_its_own_flags():
    for flag in ("--context-parallel-size=4", "--save"):
        result = run("quickstart.sh", flag, "4")
        assert result.returncode == 2 and f"error: {flag.partition('=')[0]} is what" in result.stderr
