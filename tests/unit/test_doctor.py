"""What `python -m megatron_gdn doctor` says of packages and kernels, and how it ends."""

import pytest
import torch

from megatron_gdn import doctor
from megatron_gdn.__main__ import main
from megatron_gdn.config import Qwen35Config
from megatron_gdn.ops import attention_cudnn, attention_cudnn_packed, gated_delta_rule, norms
from megatron_gdn.self_test import runner
from megatron_gdn.self_test.cases import Setup

GPU = torch.device("cuda", 0)


@pytest.fixture
def quick(monkeypatch):
    """Two checks instead of all."""
    checks = tuple(check for check in runner.CHECKS if check.name in ("norm", "SwiGLU of experts"))
    monkeypatch.setattr(runner, "CHECKS", checks)


@pytest.fixture
def packages(monkeypatch):
    """The versions that are told; a test may change them. None is not installed."""
    versions = {package.name: "1.0" for package in doctor.PACKAGES}
    monkeypatch.setattr(doctor, "installed", versions.get)
    monkeypatch.setattr(doctor, "misfit", lambda name, version: None)
    return versions


@pytest.fixture
def hopper(monkeypatch):
    """A Hopper GPU, as far as the choice of a kernel can see; versions of packages as a test sets them."""
    versions = {"triton": (3, 6, 0), "flash-qla": None, "tilelang": None}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(attention_cudnn, "_is_hopper", lambda device: True)
    monkeypatch.setattr(attention_cudnn_packed, "available", lambda: False)
    monkeypatch.setattr(gated_delta_rule, "_version", versions.get)
    gated_delta_rule.choose_backend.cache_clear()
    yield versions
    gated_delta_rule.choose_backend.cache_clear()


def setup_on_gpu() -> Setup:
    config = Qwen35Config.from_size(
        "35b-a3b", transformer_impl="local", bf16=True, params_dtype=torch.bfloat16
    )
    return Setup.of(config, GPU, None, None)


def test_all_is_right(quick, packages, capsys):
    """One line for each package and each check, exit status 0."""
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for name in packages:
        assert f"  {name} " in said
    assert "no GPU" in said
    assert "ok       norm (torch), at " in said
    assert said.endswith("all kernels are right\n")


def test_a_wrong_kernel_ends_with_1(quick, packages, capsys, monkeypatch):
    """Named in its line; the other checks run all the same."""
    right = norms.rms_norm
    monkeypatch.setattr(
        norms, "rms_norm", lambda x, weight, *rest: right(x, weight.detach() + 0 * weight, *rest)
    )
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "FAILED   norm (torch): FAILED: relative error 1.0e+00 in the gradient of weight" in said
    assert "ok       SwiGLU of experts" in said
    assert said.endswith("1 checks FAILED\n")


@pytest.mark.parametrize("name", ["triton", "megatron-core"])
def test_a_package_that_every_run_needs(quick, packages, capsys, name):
    """Without it no kernel is tried, and the way out is told."""
    packages[name] = None
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert f"{name:<24}not installed (no" in said and "pip install" in said
    assert "norm" not in said


def test_a_package_that_makes_runs_faster(quick, packages, capsys):
    """Its absence is told, and is no failure."""
    packages["flash-qla"] = None
    assert main(["doctor"]) == 0
    assert "flash-qla               not installed (on Hopper" in capsys.readouterr().out


def test_a_version_that_does_not_suit(capsys, monkeypatch):
    """What our own metadata asks for is what counts."""
    wants = ["megatron-core==0.19.2", 'flash-qla==0.1.3; extra == "gpu"', "torch>=2.11"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: wants)
    assert "pip install 'megatron-core==0.19.2'" in doctor.misfit("megatron-core", "0.20.0")
    assert doctor.misfit("flash-qla", "0.1.2") is not None
    assert doctor.misfit("torch", "2.11.0+cu130") is None
    assert doctor.misfit("apex", "0.1") is None
    monkeypatch.setattr(doctor, "installed", lambda name: "0.20.0")
    assert not doctor.print_versions()
    assert "FAILED: megatron_gdn is made for megatron-core==0.19.2" in capsys.readouterr().out


def test_triton_that_fla_cannot_use_on_hopper(hopper):
    """The known case: named with both ways out, and gone with either."""

    def told():
        gated_delta_rule.choose_backend.cache_clear()
        return "\n".join(doctor.avoided(setup_on_gpu()))

    assert (
        "fla: its backward raises on Hopper with Triton 3.6.0; install tilelang or Triton >= 3.7.1" in told()
    )
    assert "flash_qla: it needs flash-qla 0.1.3" in told()
    assert "nvidia-cudnn-frontend is not installed" in told()
    hopper["tilelang"] = (0, 1, 15)
    assert "fla: its backward" not in told()
    hopper["tilelang"], hopper["triton"] = None, (3, 7, 1)
    assert "fla: its backward" not in told()
    hopper["flash-qla"] = (0, 1, 3)
    assert "gated delta rule" not in told()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--qwen35-size", "36b"], "--qwen35-size '36b' is unknown"),
        (["--gdn-backend", "fast"], "--gdn-backend 'fast' is unknown"),
        (["--tensor-model-parallel-size", "0"], "--tensor-model-parallel-size must be at least 1, got 0"),
    ],
)
def test_flags_that_cannot_be_used(packages, capsys, flags, words):
    """One line and exit status 2."""
    assert main(["doctor", *flags]) == 2
    assert f"error: {words}" in capsys.readouterr().err
