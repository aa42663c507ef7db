"""`convert` converts nothing that it does not understand, and says what that is."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_gdn.__main__ import main
from megatron_gdn.checkpoint.huggingface import jobs, to_megatron
from megatron_gdn.checkpoint.huggingface.folder import read_header
from tests.helpers.hf import load_tensors, save_model, to_hf_flags, to_megatron_flags, write_tensors


def change(folder: Path, **tensors) -> None:
    """Replace tensors, or with None remove them; names have __ for dots."""
    found = load_tensors(folder) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    write_tensors(folder, {name: tensor for name, tensor in found.items() if tensor is not None})


def cut_file(folder: Path) -> None:
    file = folder / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def edit_config(folder: Path, **fields) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


EXPERTS = {
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
A_PROJ = "model.layers.1.linear_attn.in_proj_a.weight"


BAD = {
    "missing": (lambda f: change(f, **{A_PROJ: None}), f"{A_PROJ} is missing"),
    "unknown": (
        lambda f: change(f, **{"model.layers.9.x.weight": torch.ones(1)}),
        "layers.9.x.weight is unknown",
    ),
    "unknown_mtp": (
        lambda f: change(f, **{"mtp.fc.weight": torch.ones(1)}),
        "mtp.layers.0.input_layernorm.weight is missing",
    ),
    "shape": (lambda f: change(f, **{A_PROJ: torch.ones(8, 63)}), f"{A_PROJ} is [8, 63] instead of [8, 64]"),
    "dtype": (lambda f: change(f, **{A_PROJ: torch.ones(8, 64, dtype=torch.int32)}), f"{A_PROJ} is I32"),
    "float8": (
        lambda f: change(f, **{A_PROJ: torch.ones(8, 64).to(torch.float8_e4m3fn)}),
        f"{A_PROJ} is F8_E4M3",
    ),
    "cut": (cut_file, "model-00002-of-00003.safetensors is damaged or cut"),
    "no_file": (
        lambda f: (f / "model-00002-of-00003.safetensors").unlink(),
        "00003.safetensors is missing",
    ),
    "no_index": (
        lambda f: (f / "model.safetensors.index.json").unlink(),
        "has neither",
    ),
    "no_config": (lambda f: (f / "config.json").unlink(), "config.json cannot be read"),
    "sizes": (
        lambda f: edit_config(f, num_hidden_layers=3, layer_types=None),
        "layers.3.input_layernorm",
    ),
    "other_model": (lambda f: edit_config(f, model_type="llama"), "model_type 'llama' is unknown"),
    "bias": (lambda f: edit_config(f, attention_bias=True), "attention_bias True is not supported"),
    "text": (lambda f: edit_config(f, hidden_size="64"), "hidden_size is '64', no number"),
    "more_used_than_there": (
        lambda f: edit_config(f, **EXPERTS | {"num_experts": 2}),
        "num_experts_per_tok 4 is more than num_experts 2",
    ),
    "rope": (lambda f: edit_config(f, rope_parameters={"rope_type": "yarn"}), "RoPE of type 'yarn'"),
    "tied": (
        lambda f: edit_config(f, tie_word_embeddings=True),
        "embed_tokens.weight differ",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses_and_writes_nothing(case, dense, tmp_path, capsys):
    """Whatever does not fit is named, before anything is written."""
    shutil.copytree(dense / "hf", tmp_path / "hf")
    spoil, words = BAD[case]
    spoil(tmp_path / "hf")
    assert main(to_megatron_flags(tmp_path)) == 2
    assert words in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["hf"]


def test_index_that_names_another_file_is_refused(dense, tmp_path, capsys):
    """A tensor in another file than the index says."""
    shutil.copytree(dense / "hf", tmp_path / "hf")
    index = tmp_path / "hf" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = next(iter(content["weight_map"]))
    content["weight_map"][name] = "model-00003-of-00003.safetensors"
    index.write_text(json.dumps(content))
    assert main(to_megatron_flags(tmp_path)) == 2
    assert name in capsys.readouterr().err


def test_another_conversion_in_the_same_place_is_refused(dense, tmp_path, capsys):
    """A target that exists, and what another job or a changed source has left."""
    shutil.copytree(dense, tmp_path, dirs_exist_ok=True)
    assert main(to_megatron_flags(tmp_path)) == 2
    assert "megatron exists; remove it" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "megatron")
    job = {"to": "megatron", "drop_mtp": True, "source": []}
    jobs_folder = to_megatron.PartialFolder(tmp_path / "megatron", job)
    assert main(to_megatron_flags(tmp_path)) == 2
    assert "is being written by another conversion" in capsys.readouterr().err
    jobs_folder.close()
    assert main(to_megatron_flags(tmp_path)) == 2
    assert "was left by another conversion" in capsys.readouterr().err


def test_small_disk_is_refused(dense, tmp_path, monkeypatch, capsys):
    """Before anything is written."""
    usage = shutil.disk_usage(tmp_path)._replace(free=10**5)
    monkeypatch.setattr(jobs.shutil, "disk_usage", lambda _: usage)
    flags = ["convert", "--from-hf", str(dense / "hf"), "--to-megatron", str(tmp_path / "megatron")]
    assert main(flags) == 2
    assert "GB free" in capsys.readouterr().err
    assert not os.listdir(tmp_path)


def test_mtp_that_was_not_trained_is_refused(tmp_path, capsys):
    """The origin has it, the checkpoint has not: --drop-mtp is the way out."""
    save_model("dense", tmp_path / "hf", mtp="dense")
    assert main([*to_megatron_flags(tmp_path), "--drop-mtp"]) == 0
    assert main([*to_hf_flags(tmp_path), "--like", str(tmp_path / "hf")]) == 2
    assert "--mtp-num-layers 1" in capsys.readouterr().err
    assert main([*to_hf_flags(tmp_path), "--like", str(tmp_path / "hf"), "--drop-mtp"]) == 0


def test_damaged_megatron_checkpoints_are_refused(dense, tmp_path, capsys):
    """No checkpoint at all; one of another model."""
    (tmp_path / "megatron").mkdir()
    assert main(to_hf_flags(tmp_path)) == 2
    assert "no torch_dist checkpoint" in capsys.readouterr().err
    shutil.copytree(dense / "megatron", tmp_path / "megatron", dirs_exist_ok=True)
    edit_config(tmp_path / "megatron" / jobs.KEPT, intermediate_size=97)
    assert main(to_hf_flags(tmp_path)) == 2
    assert "linear_fc1.weight is [192, 64] instead of [194, 64]" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["megatron"]


@pytest.mark.parametrize("how", ["cut", "missing"])
def test_cut_files_of_megatron_are_refused(how, dense, tmp_path, capsys):
    """A file of the weights that is shorter than the metadata says, or not there, is named."""
    shutil.copytree(dense / "megatron", tmp_path / "megatron")
    file = sorted((tmp_path / "megatron" / "release").glob("*.distcp"))[1]
    data = file.read_bytes()
    file.unlink()
    if how == "cut":
        file.write_bytes(data[:-1])
    assert main(to_hf_flags(tmp_path)) == 2
    assert f"{file} is {how}" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["megatron"]


def test_flags_that_do_not_go_together(dense, tmp_path, capsys):
    """Both ends of one side, --like on the wrong way, a folder that is none."""
    hf, target = str(dense / "hf"), str(tmp_path / "x")
    for flags, words in (
        (["--from-hf", hf, "--to-hf", target], "convert goes"),
        (["--from-hf", hf, "--to-megatron", target, "--like", hf], "--like goes with --to-hf"),
        (["--from-hf", hf, "--to-megatron", target, "--workers", "0"], "--workers must be at least 1"),
        (["--from-hf", target, "--to-megatron", target], "is no folder"),
    ):
        assert main(["convert", *flags]) == 2
        assert words in capsys.readouterr().err


def test_unknown_type_is_refused(tmp_path):
    """A header with a type that we cannot copy."""
    save_file({"x": torch.zeros(2, dtype=torch.int16)}, tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes().replace(b'"I16"', b'"F4" ')
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match="x.safetensors"):
        read_header(tmp_path / "x.safetensors")
