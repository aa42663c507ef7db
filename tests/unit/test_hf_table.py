"""The table between Hugging Face's names and Megatron's: every row once, and the right one."""

from functools import cache

import pytest
import torch
from torch import Tensor

from megatron_gdn.checkpoint.huggingface.config_json import read_arguments, read_model, write_config
from megatron_gdn.checkpoint.huggingface.jobs import gather
from megatron_gdn.checkpoint.huggingface.table import Dialect, RowMap, Rows, Table, build_table, num_rows
from megatron_gdn.config import SIZES, Qwen35Config, count_parameters, model_arguments
from tests.helpers.hf import DENSE, KINDS, MOE, transformers_models


@cache
def table_of(moe: bool, **dialect) -> Table:
    settings = {"model_type": "qwen3_5_moe_text", **MOE} if moe else {"model_type": "qwen3_5_text", **DENSE}
    config = Qwen35Config.from_model(read_model(settings))
    return build_table(config, 300, 384, False, Dialect(**dialect))


def convert(table: Table, key: str, tensors: dict[str, Tensor]) -> Tensor:
    """A Megatron tensor made of Hugging Face tensors of 2 dimensions."""
    shape, rows = table.megatron[key], table.to_megatron[key]
    read = lambda cut: tensors[cut.name][cut.start : cut.stop]  # noqa: E731
    return gather(rows, Rows(key, 0, num_rows(shape)), shape, torch.float32, read).view(shape)


def test_row_map_cuts():
    """Any cut of [a 5..8, b 0..2, a 0..1] is what slicing its rows gives; beyond the end there is none."""
    rows = RowMap([Rows("a", 5, 8), Rows("b", 0, 2), Rows("a", 0, 1)])
    flat = [("a", 5), ("a", 6), ("a", 7), ("b", 0), ("b", 1), ("a", 0)]
    for start in range(7):
        for stop in range(start, 9):
            found = [(cut.name, row) for cut in rows.cut(start, stop) for row in range(cut.start, cut.stop)]
            assert found == flat[start:stop]


def test_query_key_value_and_gate_are_where_the_host_takes_them():
    """transformers' view of q_proj [head, (query, gate), dim]; the host's of linear_qkv, group by group."""
    table, name = table_of(False), "model.layers.3.self_attn."
    heads, groups, dim, hidden = 4, 2, 32, 64
    q, k, v = (torch.randn(rows, hidden) for rows in (2 * heads * dim, groups * dim, groups * dim))
    tensors = {f"{name}{part}_proj.weight": tensor for part, tensor in (("q", q), ("k", k), ("v", v))}
    got = convert(table, "decoder.layers.3.self_attention.linear_qkv.weight", tensors)
    share = heads // groups
    query, gate, key, value = got.view(groups, -1, hidden).split([share * dim, share * dim, dim, dim], dim=1)
    want_query, want_gate = q.view(heads, 2 * dim, hidden).chunk(2, dim=1)
    assert torch.equal(query.reshape(heads, dim, hidden), want_query)
    assert torch.equal(gate.reshape(heads, dim, hidden), want_gate)
    assert torch.equal(key.reshape(-1, hidden), k) and torch.equal(value.reshape(-1, hidden), v)


def test_qwen3_next_projection_is_taken_apart_as_transformers_does():
    """in_proj_qkvz and in_proj_ba, grouped by key head, against transformers' own reordering."""
    transformers = transformers_models()
    config = transformers.Qwen3NextConfig(**MOE)
    module = transformers.models.qwen3_next.modeling_qwen3_next.Qwen3NextGatedDeltaNet(config, 0)
    qkvz, ba = torch.randn_like(module.in_proj_qkvz.weight), torch.randn_like(module.in_proj_ba.weight)
    # Their function takes activations [batch, tokens, rows]: each column of the weight is one token.
    want = module.fix_query_key_value_ordering(qkvz.T[None], ba.T[None])
    table, key = table_of(True, grouped_in_proj=True), "decoder.layers.0.self_attention.in_proj.weight."
    name = "model.layers.0.linear_attn.in_proj_"
    tensors = {f"{name}qkvz.weight": qkvz, f"{name}ba.weight": ba}
    for part, tensor in zip(("query", "key", "value", "z", "beta", "alpha"), want, strict=True):
        assert torch.equal(convert(table, key + part, tensors), tensor[0].flatten(1).T), part


def test_sections_of_qwen3_5():
    """in_proj_qkv and conv1d in the order query, key, value; z, b and a whole; gate before up."""
    table, key = table_of(False), "decoder.layers.0.self_attention."
    part = {"query": (0, 64), "key": (64, 128), "value": (128, 320)}
    for name, (start, stop) in part.items():
        attn = "model.layers.0.linear_attn."
        assert table.to_megatron[f"{key}in_proj.weight.{name}"].parts == (
            Rows(f"{attn}in_proj_qkv.weight", start, stop),
        )
        assert table.to_megatron[f"{key}conv1d.weight.{name}"].parts == (
            Rows(f"{attn}conv1d.weight", start, stop),
        )
    for ours, theirs in {"z": "z", "beta": "b", "alpha": "a"}.items():
        (rows,) = table.to_megatron[f"{key}in_proj.weight.{ours}"].parts
        assert rows.name == f"model.layers.0.linear_attn.in_proj_{theirs}.weight"
    parts = table.to_megatron["decoder.layers.0.mlp.linear_fc1.weight"].parts
    assert [rows.name.split(".")[-2] for rows in parts] == ["gate_proj", "up_proj"]


@pytest.mark.parametrize("size", SIZES)
def test_every_size_has_every_parameter_once(size):
    """Both sides of each size have as many numbers as it has parameters; the ways are inverse."""
    model = SIZES[size]
    config = Qwen35Config.from_model(model)
    table = build_table(config, model.vocab_size, model.vocab_size, model.tied, Dialect())
    total, _ = count_parameters(config, model.vocab_size, model.tied)
    for side in (table.hf, table.megatron):
        assert sum(torch.Size(shape).numel() for shape in side.values()) == total
    for name, rows in table.to_hf.items():
        there = [table.to_megatron[part.name].cut(part.start, part.stop) for part in rows.parts]
        found = [cut for cuts in there for cut in cuts]
        assert found[0].start == 0 and {cut.name for cut in found} == {name}
        assert all(a.stop == b.start for a, b in zip(found, found[1:], strict=False))
        assert found[-1].stop == num_rows(table.hf[name])


@pytest.mark.parametrize("size", SIZES)
def test_config_json_there_and_back(size):
    """The settings of a size, written and read again, are the same; transformers reads them too."""
    model = SIZES[size]
    config = write_config(model, "bfloat16", 0)
    again = read_model(config)
    assert again.fields == model.fields | {"ffn_hidden_size": again.fields["ffn_hidden_size"]}
    assert (again.vocab_size, again.tied) == (model.vocab_size, model.tied)
    assert again.max_position_embeddings == model.max_position_embeddings
    kind = "Qwen3_5MoeTextConfig" if "num_moe_experts" in model.fields else "Qwen3_5TextConfig"
    read = getattr(transformers_models(), kind)(**config)
    assert read_model(read.to_dict()) == again


@pytest.mark.parametrize("kind", KINDS)
def test_config_json_of_transformers(kind):
    """What transformers writes is understood; the arguments that a checkpoint stores say the same."""
    _, config_class, settings = KINDS[kind]
    model = read_model(getattr(transformers_models(), config_class)(**settings).to_dict())
    text = settings.get("text_config", settings)
    assert model.fields["linear_attention_freq"] == 4
    assert model.fields["rotary_base"] == 10_000.0 and model.fields["rotary_percent"] == 0.25
    assert model.fields["num_query_groups"] == text["num_key_value_heads"]
    assert model.tied == settings.get("tie_word_embeddings", False)
    assert read_arguments(model_arguments(model)) == model


def test_patterns_of_layers():
    """Layers that follow no interval become lists; so do dense layers among those with experts."""
    settings = {"model_type": "qwen3_next", **MOE, "intermediate_size": 96}
    odd = ["linear_attention", "full_attention", "full_attention", "linear_attention"]
    model = read_model(settings | {"layer_types": odd, "mlp_only_layers": [1]})
    assert model.fields["linear_attention_freq"] == [1, 0, 0, 1]
    assert model.fields["moe_layer_freq"] == [1, 0, 1, 1]
    table = build_table(Qwen35Config.from_model(model), 300, 384, False, Dialect(grouped_in_proj=True))
    assert "model.layers.1.mlp.gate_proj.weight" in table.hf
    assert "model.layers.2.self_attn.q_proj.weight" in table.hf
    only = read_model(settings | {"layer_types": ["linear_attention"] * 4})
    assert Qwen35Config.from_model(only).linear_attention_freq == 5
    with pytest.raises(ValueError, match="layer_types must name 4 layers"):
        read_model(settings | {"layer_types": odd[:3]})


def test_dialect_of_names():
    """The dialect is read off the names; more than one layer of multi-token prediction is refused."""
    embedding = "model.language_model.embed_tokens.weight"
    names = [embedding, "mtp.fc.weight", "mtp.layers.0.mlp.experts.0.gate_proj.weight"]
    assert Dialect.of(names) == Dialect("model.language_model.", False, True, False, 1)
    with pytest.raises(ValueError, match="2 layers"):
        Dialect.of([*names, "mtp.layers.1.mlp.experts.0.gate_proj.weight"])
    with pytest.raises(ValueError, match="no checkpoint of a Qwen3.5"):
        Dialect.of(["transformer.wte.weight"])
