"""Run every GPU table, one after another, each with a time-out; a failure does not stop the others.

python -m tests.benchmarks.run_gpu [--only NAME ...] [--seconds N] [--results FOLDER]

Kernels are compiled once: with KERNEL_CACHE=FOLDER the compilers and autotuners keep their results in that
folder, to be brought back for the next run. Exit status 1 if any table failed, ran out of time or missed a
bound.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.report import RESULTS

TABLES = {
    "warm_kernels": 260,
    "gdn_layer": 100,
    "attention_layer": 60,
    "memory_share": 100,
    "slice": 240,
    "attention": 120,
    "moe_layer": 60,
    "linear_cross_entropy": 100,
    "gated_delta_rule": 300,
    "conv_norms": 60,
}
"""Seconds for each. The first is no table: it compiles, and the others need no more than this after it."""
CACHES = {"TRITON_CACHE_DIR": "triton", "TILELANG_CACHE_DIR": "tilelang"}


def environment(cache: str | None) -> dict[str, str]:
    """This process's, with every kernel cache in the folder `cache`."""
    kept = {"TRITON_CACHE_AUTOTUNING": "1", "FLA_CACHE_RESULTS": "1"}
    if cache:
        kept |= {name: str(Path(cache).resolve() / folder) for name, folder in CACHES.items()}
    return os.environ | kept


def run(command: Sequence[str], seconds: float, environ: dict[str, str]) -> int | None:
    """Exit status of a command, None if its time ran out; what it started ends with it."""
    process = subprocess.Popen(command, env=environ, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def say(status: int | None) -> str:
    """An exit status in words."""
    return {None: "out of time", 0: "done", 1: "bound missed or failed"}.get(status, f"failed ({status})")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tables and say how each ended."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES), metavar="NAME")
    parser.add_argument("--seconds", type=float, help="for each table, in place of its own limit")
    parser.add_argument("--results", type=Path, help="folder to copy all results to after each table")
    arguments = parser.parse_args(argv)
    environ, ends = environment(os.environ.get("KERNEL_CACHE")), {}
    for name in arguments.only:
        print(f"\n=== {name}", flush=True)
        start = time.monotonic()
        limit = arguments.seconds or TABLES[name]
        status = run([sys.executable, "-m", f"tests.benchmarks.{name}"], limit, environ)
        ends[name] = status
        print(f"=== {name}: {say(status)} after {time.monotonic() - start:.0f} s", flush=True)
        if arguments.results:
            shutil.copytree(RESULTS, arguments.results, dirs_exist_ok=True)
    print("\n".join(["", *(f"{name}: {say(status)}" for name, status in ends.items())]))
    return int(any(ends.values()) or None in ends.values())


if __name__ == "__main__":
    sys.exit(main())
