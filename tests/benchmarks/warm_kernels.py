"""Compile the gated delta rule's kernels for every number of heads that the GPU tables need, all at once.

KERNEL_CACHE=FOLDER python -m tests.benchmarks.warm_kernels    on a GPU, from the root of the repository

A compiler uses one core and takes one to two minutes for each number of heads; in the tables they would come
one after another. Nothing is timed here and no autotuner's choice is kept, since the processes disturb each
other. Exit status 1 if one of them failed or took too long.
"""

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from tests.benchmarks.run_gpu import environment, run

SHARES = (1, 2, 4, 8)
"""Ranks among which headwise deals out the heads."""
TOKENS = (4096, 32_768)
"""Few, whose documents are run in one part, and many, which are cut."""
SECONDS = 240


def jobs() -> dict[str, dict[str, str]]:
    """Name of each process -> what it has in its environment."""
    return {f"heads / {share}": {} for share in SHARES} | {
        "host": {"FLA_FLASH_QLA": "0"},
        "host with flash-qla": {"FLA_FLASH_QLA": "1"},
    }


def functions(name: str, tokens: int) -> list[tuple[Callable[..., Tensor], list[Tensor]]]:
    """What one process runs, each forward and backward, and its inputs."""
    from tests.benchmarks import gated_delta_rule as rule

    if name.startswith("host"):
        inputs = rule.make_inputs(tokens, "lasts")
        return [(rule.host, inputs), (rule.fla_fused, inputs)]
    inputs = rule.make_inputs(tokens, "lasts", int(name.rpartition("/")[2]))
    found = [(rule.ours(tokens), inputs), (rule.flash_qla(), rule.gates_made(inputs))]
    if name == "heads / 1":
        found += [(rule.ours(tokens, spans), inputs) for spans in (1, 2)]
    return found


def compile_for(name: str) -> None:
    """Body of one process."""
    for tokens in TOKENS:
        for function, inputs in functions(name, tokens):
            out = function(*inputs)
            torch.autograd.grad(out, inputs, torch.randn_like(out))
    torch.cuda.synchronize()


def main(argv: Sequence[str] = ()) -> int:
    """Start a process for each job, or be one."""
    if argv:
        compile_for(argv[0])
        return 0
    # A choice made while others use the GPU is not worth keeping.
    kept = environment(os.environ.get("KERNEL_CACHE")) | {
        "TRITON_CACHE_AUTOTUNING": "0",
        "FLA_CACHE_RESULTS": "0",
    }
    command = [sys.executable, "-m", "tests.benchmarks.warm_kernels"]
    with ThreadPoolExecutor(len(jobs())) as pool:
        ends = {
            name: pool.submit(run, [*command, name], SECONDS, kept | more) for name, more in jobs().items()
        }
    failed = 0
    for name, end in ends.items():
        status = end.result()
        failed += status != 0
        print(f"{name}: {'out of time' if status is None else status or 'compiled'}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
