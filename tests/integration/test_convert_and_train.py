"""Converted checkpoints in the training script: loaded at other parallel sizes, saved, converted back.

Every run is `pretrain_qwen35.py` with its ranks forked from here; it saves at once what it has loaded.
"""

import json
from pathlib import Path

import pytest
import torch

from megatron_gdn.__main__ import main
from megatron_gdn.checkpoint.huggingface.config_json import read_model
from megatron_gdn.checkpoint.huggingface.folder import read_folder
from megatron_gdn.config import SIZES
from tests.helpers.distributed import run_ranks
from tests.helpers.hf import assert_same_tensors, load_tensors, save_model, to_megatron_flags
from tests.helpers.pretrain import train_and_resave, words

FLAGS = {
    "qwen35-size": "debug",
    "spec": "megatron_gdn.layer_specs get_qwen35_chunkwise_cp_spec",
    "mock-data": True,
    "tokenizer": "byte",
    "seq-length": 32,
    "micro-batch-size": 1,
    "global-batch-size": 4,
    "train-iters": 1,
    "lr": 1e-3,
    "lr-warmup-iters": 0,
    "eval-iters": 0,
    "eval-interval": 1000,
    "save-interval": 1000,
    "num-workers": 0,
    "no-save-optim": True,
    "no-save-rng": True,
}
TP2 = {"tensor-model-parallel-size": 2, "sequence-parallel": True}
TP4 = {"tensor-model-parallel-size": 4, "sequence-parallel": True}
PP2_EP2 = {"pipeline-model-parallel-size": 2, "expert-model-parallel-size": 2}
TP2_EP2 = TP2 | {"expert-model-parallel-size": 2, "expert-tensor-parallel-size": 1}
CASES = {
    # checkpoint, ranks, flags
    "tp1_dense_fp32": ({"kind": "dense", "dtype": torch.float32, "mtp": "dense"}, 1, {}),
    "tp4_multimodal_bf16": ({"kind": "multimodal", "mtp": "dense"}, 4, TP4),
    "tp2_tied_fp32": ({"kind": "tied", "dtype": torch.float32}, 2, TP2),
    "pp2_tied_bf16": ({"kind": "tied"}, 2, {"pipeline-model-parallel-size": 2}),
    "pp2_ep2_moe_bf16": ({"kind": "moe", "packed": True, "mtp": "packed"}, 4, PP2_EP2),
    "tp2_ep2_next_fp32": ({"kind": "next", "dtype": torch.float32, "mtp": "per_expert"}, 2, TP2_EP2),
}


def train(folder: Path, ranks: int, **flags) -> None:
    """Train one iteration from `folder`/megatron; writes `folder`/run/loaded and `folder`/run/save."""
    run = folder / "run"
    run.mkdir()
    line = words(FLAGS | {"load": folder / "megatron", "save": run / "save"} | flags)
    run_ranks(train_and_resave, ranks, line, run, timeout=200)


def convert(source: Path, target: Path, like: Path) -> None:
    flags = ["--from-megatron", str(source), "--to-hf", str(target), "--like", str(like)]
    assert main(["convert", *flags]) == 0


@pytest.mark.parametrize("case", CASES)
def test_loads_at_any_sizes_and_comes_back_the_same(case, tmp_path, monkeypatch):
    """What training has loaded and saved, at other sizes, is the source bit for bit; a step changes it."""
    checkpoint, ranks, flags = CASES[case]
    save_model(folder=tmp_path / "hf", **checkpoint)
    source = read_folder(tmp_path / "hf")
    monkeypatch.setitem(SIZES, "debug", read_model(source.config))
    assert main(to_megatron_flags(tmp_path)) == 0
    flags = flags | {"bf16": checkpoint.get("dtype") is None or None}
    flags |= {"mtp-num-layers": 1 if checkpoint.get("mtp") else None}
    train(tmp_path, ranks, **flags)
    want = load_tensors(tmp_path / "hf")
    # From what the conversion keeps, and from the source itself: they know the same.
    convert(tmp_path / "run" / "loaded", tmp_path / "back", tmp_path / "megatron")
    assert_same_tensors(load_tensors(tmp_path / "back"), want)
    convert(tmp_path / "run" / "save", tmp_path / "trained", tmp_path / "hf")
    trained = load_tensors(tmp_path / "trained")
    assert trained.keys() == want.keys()
    same = {name for name in want if torch.equal(trained[name], want[name])}
    outside = {name for name in want if name.startswith("model.visual.")}
    assert outside <= same and len(same) < len(want) / 2


def test_other_functions_of_the_same_weights_are_refused(tmp_path, monkeypatch, capsys):
    """What config.json cannot say, or says otherwise: transformers would run it wrongly."""
    save_model(folder=tmp_path / "hf", kind="moe")
    monkeypatch.setitem(SIZES, "debug", read_model(read_folder(tmp_path / "hf").config))
    assert main(to_megatron_flags(tmp_path)) == 0
    train(tmp_path, 1, **{"bf16": True, "moe-router-topk-scaling-factor": 2.0})
    flags = ["convert", "--from-megatron", str(tmp_path / "run" / "save"), "--to-hf", str(tmp_path / "back")]
    for like in ([], ["--like", str(tmp_path / "hf")]):
        assert main([*flags, *like]) != 0
        assert "trained with --moe-router-topk-scaling-factor 2.0, but" in capsys.readouterr().err

    other = tmp_path / "other"
    save_model(folder=other, kind="moe")
    config = json.loads((other / "config.json").read_text())
    text = config.get("text_config", config)
    text["rms_norm_eps"] = 1e-2
    (other / "config.json").write_text(json.dumps(config))
    flags[2] = str(tmp_path / "run" / "loaded")
    assert main([*flags, "--like", str(other)]) != 0
    assert "trained with --layernorm-epsilon 1e-06, but" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()
