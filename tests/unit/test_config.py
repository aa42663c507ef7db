"""The released sizes, and what a config refuses."""

import pytest
import torch.nn.functional as F
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern

from megatron_gdn.config import SIZES, Qwen35Config, count_parameters, size_arguments

# Counted by transformers 5.24 on the meta device (Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM), an
# implementation that shares nothing with ours; the last column is the text model's published size.
COUNTS = {
    "0.8b": (752_393_024, 752_393_024, 0.758e9),
    "2b": (1_881_825_088, 1_881_825_088, 1.89e9),
    "4b": (4_205_751_296, 4_205_751_296, 4.21e9),
    "9b": (8_953_803_264, 8_953_803_264, 8.96e9),
    "27b": (26_895_998_464, 26_895_998_464, 26.9e9),
    "35b-a3b": (34_660_610_688, 3_454_988_928, 34.7e9),
    "122b-a10b": (122_111_526_912, 9_771_288_576, 122e9),
    "397b-a17b": (396_346_350_336, 17_349_040_896, 397e9),
}


@pytest.mark.parametrize("size", COUNTS)
def test_count_parameters_of_released_sizes(size):
    """Totals and active counts are those of an independent implementation, within 1% of the published."""
    total, active, published = COUNTS[size]
    model = SIZES[size]
    assert count_parameters(Qwen35Config.from_size(size), model.vocab_size, model.tied) == (total, active)
    assert abs(total - published) < 0.01 * published


def test_count_parameters_written_out():
    """35B-A3B by hand: 10 attention and 30 GDN layers, 256 experts of 512 and a shared one."""
    h, vocab = 2048, 248_320
    gdn = h * (16 * 128 + 16 * 128 + 32 * 128 + 32 * 128 + 32 + 32)  # q, k, v, z, b, a
    gdn += 4 * (16 * 128 + 16 * 128 + 32 * 128)  # convolution of q, k, v
    gdn += 32 + 32 + 128  # A_log, dt_bias, out_norm
    gdn += 32 * 128 * h  # out_proj
    attention = h * (16 * 256 + 16 * 256 + 2 * 256 + 2 * 256)  # q, its gate, k, v
    attention += 2 * 256  # q and k norms
    attention += 16 * 256 * h  # out
    moe = h * 256 + 256 * 3 * h * 512 + 3 * h * 512 + h  # router, experts, shared expert, its gate
    total = 30 * gdn + 10 * attention + 40 * (moe + 2 * h) + h + 2 * vocab * h
    config = Qwen35Config.from_size("35b-a3b")
    assert count_parameters(config, vocab, tied=False)[0] == total == 34_660_610_688


def test_debug_size_has_every_structure():
    """The debug size leaves out nothing that the MoE sizes have."""
    config = Qwen35Config.from_size("debug")
    assert get_linear_attention_pattern(config) == [1, 1, 1, 0]
    assert config.linear_num_value_heads == 2 * config.linear_num_key_heads
    assert config.num_query_groups < config.num_attention_heads
    assert config.num_moe_experts > config.moe_router_topk > 1
    assert config.moe_shared_expert_intermediate_size and config.moe_shared_expert_gate
    assert config.attention_output_gate and config.qk_layernorm and config.rotary_percent == 0.25
    assert config.gated_linear_unit and config.activation_func is F.silu
    assert set(SIZES["debug"].fields) == set(SIZES["35b-a3b"].fields)


def test_from_size_overrides_win():
    """A field given by hand beats the size's."""
    assert Qwen35Config.from_size("debug", num_layers=8, cp_layout="contiguous").num_layers == 8


def test_size_arguments_speak_the_parsers_names():
    """Fields that the host's parser names otherwise are translated, and dense sizes set no expert."""
    arguments = size_arguments("debug")
    assert arguments["num_experts"] == 8 and "num_moe_experts" not in arguments
    assert arguments["swiglu"] and arguments["group_query_attention"]
    assert arguments["untie_embeddings_and_output_weights"] is True
    assert arguments["vocab_size"] == 257
    assert size_arguments("0.8b")["untie_embeddings_and_output_weights"] is False
    assert "num_experts" not in size_arguments("27b")


@pytest.mark.parametrize("make", [size_arguments, Qwen35Config.from_size])
def test_unknown_size_is_refused(make):
    """The message lists the sizes."""
    with pytest.raises(ValueError, match=r"--qwen35-size '5b' is unknown; choose one of debug, 0.8b"):
        make("5b")


def test_legal_sizes_that_the_host_refuses():
    """Two key heads on cp 4: legal here (replicated or chunkwise), an assertion in the host's config."""
    config = Qwen35Config.from_size("debug", context_parallel_size=4)
    assert config.experimental_attention_variant is None
    from megatron.core.transformer.transformer_config import TransformerConfig

    shape = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_attention_freq": 4}
    with pytest.raises(AssertionError, match="linear_num_key_heads"):
        TransformerConfig(
            num_layers=4,
            hidden_size=128,
            num_attention_heads=4,
            context_parallel_size=4,
            experimental_attention_variant="gated_delta_net",
            **shape,
        )


def test_recomputing_gdn_norm_out_is_allowed():
    """The host allows it for its own variant only, which our config does not name."""
    config = Qwen35Config.from_size(
        "debug", recompute_granularity="selective", recompute_modules=["gdn_norm_out", "core_attn"]
    )
    assert set(config.recompute_modules) == {"gdn_norm_out", "core_attn"}


def test_wrong_gdn_shapes_are_refused():
    """Value heads that key heads cannot share, and a layer pattern of another length."""
    with pytest.raises(ValueError, match="--linear-num-value-heads 5 must be a multiple"):
        Qwen35Config.from_size("debug", linear_num_value_heads=5)
    with pytest.raises(ValueError, match="--linear-attention-freq"):
        Qwen35Config.from_size("debug", linear_attention_freq=[1, 0])
