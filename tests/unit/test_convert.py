"""`convert` goes there and back bit for bit."""

import json
import shutil

import pytest
import torch

from megatron_gdn.__main__ import main
from megatron_gdn.checkpoint.huggingface import jobs, to_hf
from megatron_gdn.checkpoint.huggingface.torch_dist import Reader
from tests.helpers.hf import (
    assert_same_tensors,
    content,
    load_tensors,
    save_model,
    to_hf_flags,
    to_megatron_flags,
    write_tensors,
)

CASES = {
    "dense": {"kind": "dense", "num_files": 1},
    "dense_fp32_mtp": {"kind": "dense", "dtype": torch.float32, "mtp": "dense"},
    "tied": {"kind": "tied"},
    "moe_packed": {"kind": "moe", "packed": True, "mtp": "packed"},
    "moe_per_expert": {"kind": "moe", "mtp": "per_expert"},
    "moe_mixed": {"kind": "moe", "packed": True, "mtp": "per_expert"},
    "multimodal": {"kind": "multimodal", "mtp": "dense"},
    "multimodal_moe": {"kind": "multimodal_moe", "packed": True, "mtp": "packed"},
    "next": {"kind": "next", "mtp": "per_expert"},
}


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_is_the_same(case, tmp_path):
    """Every tensor, config.json and other file comes back bit for bit; the source is left alone."""
    save_model(folder=tmp_path / "hf", **CASES[case])
    before = content(tmp_path / "hf")
    assert main(to_megatron_flags(tmp_path)) == 0
    assert main(to_hf_flags(tmp_path)) == 0
    assert content(tmp_path / "hf") == before
    assert_same_tensors(load_tensors(tmp_path / "back"), load_tensors(tmp_path / "hf"))
    weights = (".safetensors", ".index.json")
    others = {name: data for name, data in before.items() if not name.endswith(weights)}
    back = content(tmp_path / "back")
    assert {name: data for name, data in back.items() if not name.endswith(weights)} == others
    if CASES[case].get("num_files") == 1:
        assert back.keys() == before.keys()
    else:
        index = json.loads(back["model.safetensors.index.json"])["weight_map"]
        assert index == json.loads(before["model.safetensors.index.json"])["weight_map"]


def test_back_reads_with_the_library_of_transformers(tmp_path):
    """transformers itself loads what comes back, with no tensor missing or left over."""
    model = save_model("moe", tmp_path / "hf", torch.float32, packed=True)
    assert main(to_megatron_flags(tmp_path)) == 0
    assert main(to_hf_flags(tmp_path)) == 0
    loaded, report = type(model).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    want = model.state_dict()
    assert_same_tensors(loaded.state_dict(), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_bit_of_the_gdn_norm_comes_back(dtype, tmp_path):
    """Megatron holds it less 1, which fp32 cannot undo for every value; what training changes stays."""
    save_model("dense", tmp_path / "hf")
    tensors, name = load_tensors(tmp_path / "hf"), "model.layers.1.linear_attn.norm.weight"
    values = [0.0, -0.0, 1.0, 1e-30, -3e-8, 1 / 3, 0.1, 1 + 2**-23, 1 - 2**-24, 3e4, -7.7, 5e-8, 2**-24]
    values += [float("inf"), float("-inf"), float("nan")]
    weight = torch.cat((torch.tensor(values), torch.randn(24 - len(values)))).to(dtype)
    write_tensors(tmp_path / "hf", tensors | {name: weight})
    assert main(to_megatron_flags(tmp_path)) == 0
    assert main(to_hf_flags(tmp_path)) == 0
    assert_same_tensors(load_tensors(tmp_path / "back"), load_tensors(tmp_path / "hf"))
    undone = weight.float() - 1 + 1
    assert dtype != torch.float32 or not torch.equal(undone, weight)

    centred = weight.float() - 1
    moved = centred + torch.arange(24) % 2 * 0.25  # every other one was trained
    back = to_hf._uncentred(moved, weight)
    assert torch.equal(back[::2].nan_to_num(7), weight.float()[::2].nan_to_num(7))
    assert torch.equal(back[1::2].nan_to_num(7), (moved + 1)[1::2].nan_to_num(7))


def test_megatron_holds_gates_in_fp32_and_pads_with_zeros(tmp_path):
    """A bf16 source: gates and the GDN norm are fp32, the rest bf16; the vocabulary's padding is zero."""
    save_model("dense", tmp_path / "hf")
    assert main(to_megatron_flags(tmp_path)) == 0
    reader = Reader(tmp_path / "megatron" / "release")
    float32 = ("A_log", "dt_bias", "out_norm.weight")
    for key, entry in reader.tensors.items():
        want = torch.float32 if key.endswith(float32) else torch.bfloat16
        assert entry.properties.dtype == want, key
    embedding = reader._plane("embedding.word_embeddings.weight", 0)
    assert embedding.shape == (384, 64)
    assert not embedding[300:].any() and embedding[:300].any(dim=1).all()


def test_tied_head_that_is_stored_comes_back(tmp_path):
    """Some tied checkpoints hold the output layer all the same."""
    save_model("tied", tmp_path / "hf")
    tensors = load_tensors(tmp_path / "hf")
    write_tensors(tmp_path / "hf", tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    assert main(to_megatron_flags(tmp_path)) == 0
    assert main(to_hf_flags(tmp_path)) == 0
    assert_same_tensors(load_tensors(tmp_path / "back"), load_tensors(tmp_path / "hf"))


def test_any_tensor_outside_the_language_model_is_carried(tmp_path):
    """Types that torch has no arithmetic for, scalars and empty tensors too."""
    save_model("multimodal", tmp_path / "hf")
    odd = {
        "model.visual.scale": torch.tensor(3, dtype=torch.int64),
        "model.visual.nothing": torch.empty(0, 4, dtype=torch.float16),
        "model.visual.eighth": torch.randn(5, 3).to(torch.float8_e5m2),
        "something.mask": torch.tensor([True, False, True]),
        "something.double": torch.randn(3, 2, 2, dtype=torch.float64),
    }
    write_tensors(tmp_path / "hf", load_tensors(tmp_path / "hf") | odd)
    assert main(to_megatron_flags(tmp_path)) == 0
    assert main(to_hf_flags(tmp_path)) == 0
    assert_same_tensors(load_tensors(tmp_path / "back"), load_tensors(tmp_path / "hf"))


def test_drop_mtp(tmp_path):
    """Multi-token prediction left out, there or back; config.json says so."""
    save_model("moe", tmp_path / "hf", mtp="packed", packed=True)
    want = {name: x for name, x in load_tensors(tmp_path / "hf").items() if not name.startswith("mtp.")}
    assert main([*to_megatron_flags(tmp_path), "--drop-mtp"]) == 0
    assert not [key for key in Reader(tmp_path / "megatron/release").tensors if key.startswith("mtp.")]
    assert main([*to_hf_flags(tmp_path), "--drop-mtp"]) == 0
    assert_same_tensors(load_tensors(tmp_path / "back"), want)
    shutil.rmtree(tmp_path / "megatron")
    shutil.rmtree(tmp_path / "back")
    assert main(to_megatron_flags(tmp_path)) == 0
    assert main([*to_hf_flags(tmp_path), "--drop-mtp"]) == 0
    assert_same_tensors(load_tensors(tmp_path / "back"), want)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["mtp_num_hidden_layers"] == 0


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_checkpoint_of_unknown_origin(kind, tmp_path):
    """Without an origin the names are Qwen3.5's and the types those stored; transformers loads it."""
    model = save_model(kind, tmp_path / "hf", torch.float32)
    assert main(to_megatron_flags(tmp_path)) == 0
    shutil.rmtree(tmp_path / "megatron" / jobs.KEPT)
    assert main(to_hf_flags(tmp_path)) == 0
    loaded, report = type(model).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    for name, tensor in model.state_dict().items():
        got = loaded.state_dict()[name]
        if name.endswith("linear_attn.norm.weight"):  # less 1 and plus 1 again: its last bit
            torch.testing.assert_close(got, tensor, rtol=0, atol=2**-23)
        else:
            assert torch.equal(got, tensor), name
    for field in ("layer_types", "rope_parameters", "vocab_size", "hidden_size", "head_dim"):
        assert getattr(loaded.config, field) == getattr(model.config, field), field
