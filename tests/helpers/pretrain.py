"""pretrain_qwen35.py run as a user runs it, but in ranks forked from a process that has imported it."""

import multiprocessing
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from megatron_gdn.training_log import LOG_NAME, curve, read_log
from tests.helpers.distributed import run_ranks

TINY = {
    "qwen35-size": "debug",
    "spec": "megatron_gdn.layer_specs get_qwen35_headwise_cp_spec",
    "tokenizer": "byte",
    "split": "9,1,0",
    "seq-length": 128,
    "micro-batch-size": 2,
    "global-batch-size": 4,
    "train-iters": 6,
    "lr": 1e-3,
    "log-interval": 1,
    "eval-iters": 0,
    "eval-interval": 1000,
    "save-interval": 1000,
    "num-workers": 0,
}
"""A run of a few seconds; flags by name, without dashes."""


def words(flags: dict) -> list[str]:
    """A command line: True is a bare flag, None leaves one out, text is cut at its spaces."""
    line = []
    for name, value in flags.items():
        if value is not None:
            line += [f"--{name}", *([] if value is True else str(value).split())]
    return line


def arguments(flags: dict) -> list[str]:
    """The command line of TINY with `flags` over it."""
    return words(TINY | flags)


def pretrain(world_size: int, command_line: list[str], folder: Path, timeout: float = 120) -> None:
    """Train with `world_size` ranks; what each says goes to `folder`/rank-N.txt.

    Raises:
        AssertionError: a rank failed, with its traceback.
    """
    folder.mkdir(parents=True)
    run_ranks(train_rank, world_size, command_line, folder, timeout=timeout)


def losses(folder: Path) -> dict[int, float]:
    """Iteration -> loss, from the log in the folder that --save named."""
    return curve(read_log(str(folder / LOG_NAME)), "lm loss")


def train_rank(rank: int, world_size: int, command_line: list[str], folder: Path) -> None:
    """Body of one rank: train, and send all that is said to `folder`/rank-N.txt."""
    import pretrain_qwen35

    _talk_to(folder / f"rank-{rank}.txt")
    sys.argv = ["pretrain_qwen35.py", *command_line]
    pretrain_qwen35.main()


def train_and_resave(
    rank: int, world_size: int, command_line: list[str], folder: Path
) -> dict[str, set[torch.dtype]]:
    """Body of one rank: train, but first save what was loaded to `folder`/loaded.

    Returns:
        By the name of every parameter of this rank, the dtypes of it and of its gradient's buffer.
    """
    import pretrain_qwen35

    training, dtypes = pretrain_qwen35.training, {}
    load_checkpoint = training.load_checkpoint

    def load_and_save(model, optimizer, scheduler, *inputs, **options):
        answer = load_checkpoint(model, optimizer, scheduler, *inputs, **options)
        args = pretrain_qwen35.get_args()
        before = args.save, args.async_save
        args.save, args.async_save = str(folder / "loaded"), False
        training.save_checkpoint(answer[0], model, optimizer, scheduler, answer[1])
        args.save, args.async_save = before
        for chunk in model:
            dtypes.update({name: {p.dtype, p.main_grad.dtype} for name, p in chunk.named_parameters()})
        return answer

    training.load_checkpoint = load_and_save
    train_rank(rank, world_size, command_line, folder)
    return dtypes


def check_command_line(world_size: int, command_line: list[str], folder: Path, timeout: float = 120) -> None:
    """Do all that training does before the first collective, as the first rank of `world_size`.

    Raises:
        AssertionError: refused, with the output.
    """
    process = multiprocessing.get_context("fork").Process(
        target=_prepare, args=(world_size, command_line, folder / "rank-0.txt")
    )
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
    assert process.exitcode == 0, (folder / "rank-0.txt").read_text()


def _prepare(world_size: int, command_line: list[str], file: Path) -> None:
    import pretrain_qwen35

    _talk_to(file)
    _set_environment(0, world_size)
    sys.argv = ["pretrain_qwen35.py", *command_line]
    pretrain_qwen35.prepare()


def refusals(world_size: int, command_line: list[str], folder: Path, timeout: float = 60) -> list[str]:
    """Start the first and the last rank of `world_size` with a command line that must not train.

    The ranks are not joined, so a rank that waits for another before it refuses would be late here.

    Returns:
        The error line of each rank.

    Raises:
        AssertionError: a rank is late, does not exit with 1, or says anything but one error line.
    """
    context = multiprocessing.get_context("fork")
    ranks = sorted({0, world_size - 1})
    files = [folder / f"rank-{rank}.txt" for rank in ranks]
    processes = [
        context.Process(target=_refuse, args=(rank, world_size, command_line, file))
        for rank, file in zip(ranks, files, strict=True)
    ]
    for process in processes:
        process.start()
    found = []
    for process, file in zip(processes, files, strict=True):
        process.join(timeout)
        late = process.exitcode is None
        if late:
            process.kill()
            process.join()
        text = file.read_text()
        assert not late, f"still running after {timeout} s\n{text}"
        assert process.exitcode == 1, f"exit status {process.exitcode}\n{text}"
        assert "Traceback" not in text, text
        lines = re.findall(r"^error: .*", text, re.MULTILINE)
        assert len(lines) == 1 and text.endswith(lines[0] + "\n"), text
        found += lines
    return found


def _refuse(rank: int, world_size: int, command_line: list[str], file: Path) -> None:
    import pretrain_qwen35

    _talk_to(file)
    # Ranks other than the first wait before they speak, for torchrun to end them.
    pretrain_qwen35.time = SimpleNamespace(sleep=lambda seconds: None)
    _set_environment(rank, world_size)
    sys.argv = ["pretrain_qwen35.py", *command_line]
    pretrain_qwen35.main()


def _set_environment(rank: int, world_size: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))


def _talk_to(file: Path) -> None:
    """Send everything this process says to a file; pytest has its own sys.stdout and sys.stderr."""
    output = file.open("w", buffering=1)
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    sys.stdout = sys.stderr = output
