"""`convert --verify`: says how far apart the two models are, and refuses when that is more than rounding."""

import importlib.util
import inspect
import multiprocessing
import re
from pathlib import Path

import pytest
import torch

from megatron_gdn.__main__ import main
from tests.helpers.hf import load_tensors, save_model, write_tensors
from tests.helpers.pretrain import _talk_to


def convert(folder: Path, *flags, spoil=None) -> tuple[int, str]:
    """Run `convert` in a process of its own, which --verify makes a world of one rank; status and words."""
    output = folder / "words.txt"

    def body():
        _talk_to(output)
        # transformers' loading does not get on with the tests' stand-ins that fill new memory with NaN.
        torch.empty_like = inspect.unwrap(torch.empty_like)
        torch.Tensor.new_empty = inspect.unwrap(torch.Tensor.new_empty)
        if spoil:
            spoil()
        raise SystemExit(main(["convert", *map(str, flags)]))

    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    process.join(120)
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode, output.read_text()


@pytest.mark.parametrize("kind", ["tied", "moe", "multimodal"])
def test_both_directions_agree(kind, tmp_path):
    """bf16 checkpoints, compared in fp32."""
    hf, megatron, back = (tmp_path / name for name in ("hf", "megatron", "back"))
    save_model(kind, hf)
    for flags in (
        ("--from-hf", hf, "--to-megatron", megatron),
        ("--from-megatron", megatron, "--to-hf", back),
    ):
        status, said = convert(tmp_path, *flags, "--verify")
        assert status == 0, said
        largest = re.search(
            r"largest difference of [\d,]+ logits (\S+) .*, at token \d+ of sequence \d", said
        )
        assert largest and float(largest[1]) < 1e-4, said


def test_another_model_is_refused(tmp_path):
    """One number of one weight differs: the line says where it shows."""
    from megatron_gdn.checkpoint.huggingface import to_megatron

    hf, megatron = tmp_path / "hf", tmp_path / "megatron"
    save_model("dense", hf, torch.float32)
    real = to_megatron.convert

    def convert_and_change(source, *rest):
        words = real(source, *rest)
        tensors = load_tensors(source)
        tensors["model.layers.1.linear_attn.A_log"][3] += 0.3
        write_tensors(source, tensors)
        return words

    def spoil():
        to_megatron.convert = convert_and_change

    status, said = convert(tmp_path, "--from-hf", hf, "--to-megatron", megatron, "--verify", spoil=spoil)
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
