"""Test every kernel on this machine, and say which versions are installed and what to install.

Each operation of the layers runs forward and backward, on each GPU (or the CPU), on small random input, and
is compared with plain float64.
"""

import argparse
import platform
import warnings
from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

SUFFICES = "nothing here needs it"


class Package(NamedTuple):
    """A package that decides which kernels run."""

    name: str
    without: str
    """What its absence means on a machine with a GPU."""
    required: bool = False


PACKAGES = (
    Package("megatron-core", "nothing runs: pip install -e .", required=True),
    Package("torch", "nothing runs: pip install -e .", required=True),
    Package("triton", "no kernel of ours runs: pip install triton", required=True),
    Package("flash-linear-attention", "no rule in bf16: pip install -e .", required=True),
    Package(
        "flash-qla", "on Hopper the gated delta rule is up to three times slower: pip install -e '.[gpu]'"
    ),
    Package(
        "tilelang", "needed by flash-qla, and by flash-linear-attention on Hopper: pip install -e '.[gpu]'"
    ),
    Package(
        "nvidia-cudnn-frontend",
        "on Hopper attention to packed documents is slower: pip install nvidia-cudnn-frontend",
    ),
    Package("apex", SUFFICES),
    Package("transformer-engine", f"{SUFFICES}; for --transformer-impl transformer_engine"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `doctor`."""
    add = parser.add_argument
    add(
        "--qwen35-size",
        metavar="SIZE",
        help="whose head sizes to test (default: 35b-a3b; without a GPU, debug)",
    )
    add("--tensor-model-parallel-size", type=int, default=1, metavar="N", help="shares out the heads")
    add("--dtype", choices=("bf16", "fp16", "fp32"), help="of the model (default: bf16; without a GPU, fp32)")
    add(
        "--gdn-backend", default="auto", metavar="NAME", help="kernel of the gated delta rule (default: auto)"
    )


def main(args: argparse.Namespace) -> int:
    """Run `doctor`.

    Returns:
        0 if all is right, 1 if a kernel is wrong, cannot run, or a package that every run needs is missing.

    Raises:
        ValueError: a flag that cannot be used.
    """
    with warnings.catch_warnings(action="ignore"):  # the host's, about what is listed below anyway
        sound = print_versions()
        if not sound:
            return 1
        import torch

        devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        if not torch.cuda.is_available():
            print("\nno GPU: torch's own kernels run, on the CPU")
            devices = [torch.device("cpu")]
        wrong = sum([check_device(device, args) for device in devices])
    print(f"\n{wrong} checks FAILED" if wrong else "\nall kernels are right")
    return 1 if wrong else 0


def print_versions() -> bool:
    """One line for each package; whether all that every run needs are there, at versions that suit."""
    print(f"  {'Python':<24}{platform.python_version()}")
    sound = True
    for package in PACKAGES:
        version = installed(package.name)
        problem = None if version is None else misfit(package.name, version)
        told = f"not installed ({package.without})" if version is None else version
        if problem:
            told += f"  FAILED: {problem}"
        sound = sound and not problem and (version is not None or not package.required)
        print(f"  {package.name:<24}{told}")
        if package.name == "torch" and version is not None:
            print(f"  {'cuDNN, CUDA':<24}{_libraries_of_torch()}")
    return sound


def installed(name: str) -> str | None:
    """Version of a package, None without it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def misfit(name: str, version: str) -> str | None:
    """What our own metadata asks for, if `version` is something else."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("megatron-gdn") or []
    except metadata.PackageNotFoundError:  # run from its folder
        return None
    for line in lines:
        wanted = Requirement(line)
        if wanted.name == name and not wanted.specifier.contains(version.partition("+")[0], prereleases=True):
            return (
                f"megatron_gdn is made for {name}{wanted.specifier}: pip install '{name}{wanted.specifier}'"
            )
    return None


def _libraries_of_torch() -> str:
    import torch

    return f"{torch.backends.cudnn.version() or 'none'}, {torch.version.cuda or 'none'}"


def check_device(device, args: argparse.Namespace) -> int:
    """Print what runs on a device and how each kernel does; the number of failures."""
    import torch

    from megatron_gdn.self_test.runner import run_checks

    if device.type == "cuda":
        torch.cuda.set_device(device)
        major, minor = torch.cuda.get_device_capability(device)
        print(f"\n{device}: {torch.cuda.get_device_name(device)}, compute capability {major}.{minor}")
    setup = _setup(device, args)
    print(f"heads and sizes of one rank, {str(setup.dtype).removeprefix('torch.')}; the first run compiles")
    for line in avoided(setup):
        print(f"  avoided  {line}")
    wrong = 0
    for result in run_checks(setup):
        wrong += result.problem is not None
        said = f"ok       {result.name} ({result.kernel}), at {result.error:.0%} of the error that is allowed"
        print(f"  {f'FAILED   {result}' if result.problem else said}, {result.seconds:.1f} s", flush=True)
    return wrong


def avoided(setup) -> Iterator[str]:
    """Faster kernels that the doors leave aside on this machine, why, and what to install."""
    from megatron_gdn.ops import attention, gated_delta_rule

    if not setup.on_gpu:
        return
    dims = setup.key_head_dim, setup.value_head_dim
    for why in gated_delta_rule.choose_backend(setup.device, setup.dtype, dims).passed_over:
        yield f"gated delta rule by {why}"
    name = attention.backend_name(setup.device, setup.dtype, setup.head_dim)
    if "since" in name:
        yield f"attention: {name}"


def _setup(device, args: argparse.Namespace):
    import torch

    from megatron_gdn.config import Qwen35Config
    from megatron_gdn.ops.gated_delta_rule import GDN_BACKENDS
    from megatron_gdn.self_test.cases import Setup

    if args.gdn_backend not in GDN_BACKENDS:
        raise ValueError(
            f"--gdn-backend {args.gdn_backend!r} is unknown; choose one of {', '.join(GDN_BACKENDS)}."
        )
    if args.tensor_model_parallel_size < 1:
        raise ValueError(
            f"--tensor-model-parallel-size must be at least 1, got {args.tensor_model_parallel_size}."
        )
    on_gpu = device.type == "cuda"
    dtype = args.dtype or ("bf16" if on_gpu else "fp32")
    config = Qwen35Config.from_size(
        args.qwen35_size or ("35b-a3b" if on_gpu else "debug"),
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        transformer_impl="local",
        gdn_backend=args.gdn_backend,
        bf16=dtype == "bf16",
        fp16=dtype == "fp16",
        params_dtype={"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype],
    )
    return Setup.of(config, device, gdn_cp_mode=None, packed=None)
