"""`convert --verify`: says how far apart the two models are, and refuses when that is more than rounding."""

import importlib.util
import io
import json
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch

from megatron_gdn.__main__ import main
from tests.helpers.hf import load_tensors, save_model, write_tensors

KINDS = ("tied", "moe", "multimodal")


def convert(*flags) -> tuple[int, str]:
    """Run `convert --verify`; status and words."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        status = main(["convert", *map(str, flags), "--verify"])
    return status, said.getvalue()


def convert_all(folder: Path) -> dict[str, tuple[int, str]]:
    """All conversions of this file; status and words of each."""
    found = {}
    for kind in KINDS:
        hf, megatron, back = (folder / kind / name for name in ("hf", "megatron", "back"))
        save_model(kind, hf)
        found[f"{kind} in"] = convert("--from-hf", hf, "--to-megatron", megatron)
        found[f"{kind} back"] = convert("--from-megatron", megatron, "--to-hf", back)
    found["changed"] = convert_and_change(folder / "changed")
    return found


def convert_and_change(folder: Path) -> tuple[int, str]:
    """One number of one weight is another after the conversion."""
    from megatron_gdn.checkpoint.huggingface import to_megatron

    save_model("dense", folder / "hf", torch.float32)
    real = to_megatron.convert

    def convert_first(source, *rest):
        words = real(source, *rest)
        tensors = load_tensors(source)
        tensors["model.layers.1.linear_attn.A_log"][3] += 0.3
        write_tensors(source, tensors)
        return words

    to_megatron.convert = convert_first
    return convert("--from-hf", folder / "hf", "--to-megatron", folder / "megatron")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, tuple[int, str]]:
    """From a process without the tests' stand-ins for memory, with which transformers loads wrong weights."""
    folder = tmp_path_factory.mktemp("verify")
    code = (
        "import json, pathlib, sys; from tests.integration.test_convert_verify import convert_all; "
        "folder = pathlib.Path(sys.argv[1]); "
        "(folder / 'outcomes.json').write_text(json.dumps(convert_all(folder)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, folder], capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "outcomes.json").read_text())


@pytest.mark.parametrize("way", [f"{kind} {way}" for kind in KINDS for way in ("in", "back")])
def test_both_sides_agree(way, outcomes):
    """bf16 checkpoints, compared in fp32."""
    status, said = outcomes[way]
    assert status == 0, said
    largest = re.search(r"largest difference of [\d,]+ logits (\S+) .*, at token \d+ of sequence \d", said)
    assert largest and float(largest[1]) < 1e-4, said


def test_another_model_is_refused(outcomes):
    """The line says where it shows."""
    status, said = outcomes["changed"]
    assert status == 2 and "do not compute the same; largest difference" in said, said


def test_says_what_to_install(tmp_path, monkeypatch, capsys):
    """Before anything is converted."""
    save_model("dense", tmp_path / "hf")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name)
    )
    flags = ["--from-hf", tmp_path / "hf", "--to-megatron", tmp_path / "megatron", "--verify"]
    assert main(["convert", *map(str, flags)]) == 2
    assert "pip install 'transformers" in capsys.readouterr().err
    assert not (tmp_path / "megatron").exists()
