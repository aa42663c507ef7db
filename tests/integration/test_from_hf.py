"""`pretrain_qwen35.py --from-hf`: a Hugging Face checkpoint at any parallel sizes, not converted."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from megatron_gdn.__main__ import main
from tests.helpers.hf import load_tensors, save_model, write_tensors
from tests.helpers.pretrain import TINY, check_command_line, losses, pretrain, refusals, words

FLAGS = TINY | {
    "qwen35-size": None,
    "mock-data": True,
    "split": None,
    "vocab-size": None,
    "seq-length": 64,
    "micro-batch-size": 1,
    "train-iters": 1,
    "lr": 0.0,
    "weight-decay": 0.0,
    "spec": "megatron_gdn.layer_specs get_qwen35_chunkwise_cp_spec",
}
"""One step that changes nothing, after which the weights are saved."""
TP2 = {"tensor-model-parallel-size": 2, "sequence-parallel": True}
CASES = {
    # checkpoint, flags; two ranks each
    "dense_mtp_pp2_bf16": (
        {"kind": "dense", "mtp": "dense"},
        {"pipeline-model-parallel-size": 2, "mtp-num-layers": 1, "bf16": True},
    ),
    "moe_packed_tp2_ep2": (
        {"kind": "moe", "dtype": torch.float32, "packed": True, "mtp": "packed"},
        TP2 | {"expert-model-parallel-size": 2, "expert-tensor-parallel-size": 1, "mtp-num-layers": 1},
    ),
    "multimodal_moe_tp2_etp2": (
        {"kind": "multimodal_moe", "dtype": torch.float32},
        TP2 | {"expert-tensor-parallel-size": 2},
    ),
}


def said(folder: Path) -> str:
    return (folder / "output" / "rank-0.txt").read_text()


def train(folder: Path, ranks: int, **flags) -> None:
    """Train from `folder`/hf and save in `folder`/save; what ranks say is in `folder`/output."""
    own = {"from-hf": folder / "hf", "save": folder / "save"}
    pretrain(ranks, words(FLAGS | own | flags), folder / "output", timeout=200)


@pytest.mark.parametrize("case", CASES)
def test_weights_are_the_checkpoints(case, tmp_path):
    """What is trained without moving comes back as it was, every tensor, at any sizes."""
    checkpoint, flags = CASES[case]
    save_model(folder=tmp_path / "hf", **checkpoint)
    train(tmp_path, 2, **flags)
    back = ["--from-megatron", tmp_path / "save", "--to-hf", tmp_path / "back", "--like", tmp_path / "hf"]
    assert main(["convert", *map(str, back)]) == 0
    got, want = load_tensors(tmp_path / "back"), load_tensors(tmp_path / "hf")
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        # Megatron holds norms less 1, which rounds the last bit; in a bf16 model a few more.
        zero_centred = name.endswith("linear_attn.norm.weight")
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=2**-23 if zero_centred else 0, msg=name)


def test_training_goes_on_from_its_own_checkpoint(tmp_path):
    """A checkpoint in --load wins, and the log says so; without one the same command starts anew."""
    save_model("tied", tmp_path / "hf", torch.float32)
    flags = {"load": tmp_path / "save", "lr": 1e-3, "save-interval": 2}
    train(tmp_path, 1, **flags | {"train-iters": 4})
    assert f"{tmp_path / 'hf'}\n" in said(tmp_path)
    whole = losses(tmp_path / "save")
    (tmp_path / "save" / "latest_checkpointed_iteration.txt").write_text("2")  # as if stopped before the end
    (tmp_path / "output").rename(tmp_path / "first")
    train(tmp_path, 2, **flags | {"train-iters": 4, "context-parallel-size": 2})
    assert f"the checkpoint in {tmp_path / 'save'}, not {tmp_path / 'hf'}" in said(tmp_path)
    assert losses(tmp_path / "save") == pytest.approx(whole, rel=1e-5)
    assert whole[4] < whole[1]


REFUSED = {
    "other width": (
        {"hidden-size": 128},
        r"--hidden-size is 128, but .*config.json says 64; leave the flag out",
    ),
    "a router of another function": (
        {"moe-router-score-function": "sigmoid"},
        r"--moe-router-score-function is sigmoid, but .*config.json says softmax; leave the flag out",
    ),
    "other RoPE": ({"rotary-base": 5}, r"--rotary-base is 5, but .*config.json says 10000"),
    "two sizes": (
        {"qwen35-size": "debug"},
        r"--from-hf: not allowed with argument --qwen35-size|not allowed with",
    ),
    "no MTP there": ({"mtp-num-layers": 1}, r"--mtp-num-layers is 1, but .* holds 0 layers"),
    "two starts": ({"pretrained-checkpoint": "x"}, r"--pretrained-checkpoint does not go with --from-hf"),
    "no folder": ({"from-hf": "nowhere"}, r"nowhere/config.json cannot be read"),
}


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tied") / "hf"
    save_model("tied", folder)
    return folder


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case, tied, tmp_path):
    """On every rank, before the first collective."""
    flags, words_of_it = REFUSED[case]
    for line in refusals(2, words(FLAGS | {"from-hf": tied} | flags), tmp_path):
        assert re.search(words_of_it, line), line


def test_refuses_a_checkpoint_that_is_not_whole(tied, tmp_path):
    """Every tensor is accounted for before training starts."""
    shutil.copytree(tied, tmp_path / "hf")
    tensors = load_tensors(tmp_path / "hf")
    del tensors["model.layers.2.linear_attn.A_log"]
    write_tensors(tmp_path / "hf", tensors)
    for line in refusals(2, words(FLAGS | {"from-hf": tmp_path / "hf"}), tmp_path):
        assert "model.layers.2.linear_attn.A_log is missing" in line


def test_flags_of_training_may_differ(tied, tmp_path):
    """Those that are not the model's."""
    flags = {"from-hf": tied, "init-method-std": 0.5, "max-position-embeddings": 4096}
    check_command_line(1, words(FLAGS | flags), tmp_path)
