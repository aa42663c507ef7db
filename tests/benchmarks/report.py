"""What the benchmarks' reports have in common: Markdown tables, and where the figures come from."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; the first column is text, the others are figures."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def provenance(command: str, *packages: str, made_at: str | None = None) -> list[str]:
    """Lines that say how, on what and from which commit the figures were made.

    Args:
        command: what was run.
        *packages: whose versions matter, beside those of torch and megatron-core.
        made_at: the commit, where it is not the present one.
    """
    versions = {name: importlib.metadata.version(name) for name in ("torch", "megatron-core", *packages)}
    versions = {"Python": platform.python_version()} | versions
    return [
        f"- command: `{command}`, commit {made_at or commit()}",
        f"- {', '.join(f'{name} {version}' for name, version in versions.items())}",
        f"- {platform.system()} {platform.machine()}, {len(os.sched_getaffinity(0))} CPU cores",
    ]


def gpu() -> str:
    """Line that names the GPU and what its kernels come from."""
    import torch
    import triton

    packages = {
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),
        "Triton": triton.__version__,
    }
    try:
        packages["nvidia-cudnn-frontend"] = importlib.metadata.version("nvidia-cudnn-frontend")
    except importlib.metadata.PackageNotFoundError:
        packages["nvidia-cudnn-frontend"] = "not installed"
    return f"- {torch.cuda.get_device_name()}; {', '.join(f'{k} {v}' for k, v in packages.items())}"


def commit() -> str:
    """The commit of the working tree, marked if it has changes."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    done = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
