"""Qwen3.5 as a Megatron configuration, and the released sizes, stated once.

Sources of the numbers: transformers 5, models/qwen3_5 and qwen3_5_moe (`Qwen3_5TextConfig`,
`Qwen3_5MoeTextConfig`); NVIDIA/Megatron-LM, examples/multimodal_dev/models/qwen35_vl/configuration.py;
for tied embeddings THUDM/slime, scripts/models/qwen3.5-*.sh and the published parameter counts, which
`count_parameters` meets for every size.
"""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_gdn.cp_layout import CPLayout
from megatron_gdn.validation import check_gdn_shape

EVERY_SIZE = {
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-6,
    "layernorm_zero_centered_gamma": True,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.02,
    "qk_layernorm": True,
    "attention_output_gate": True,
    "kv_channels": 256,
    "rotary_percent": 0.25,
    "rotary_base": 10_000_000,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
}
"""What all sizes share, by the name of the `TransformerConfig` field."""

EVERY_MOE = {
    "moe_layer_freq": 1,
    "moe_shared_expert_gate": True,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-3,
    "moe_router_dtype": "fp32",
    "moe_token_dispatcher_type": "alltoall",
}
"""A softmax router whose top-k probabilities are made to sum to 1 (the host's default order)."""


@dataclass(frozen=True)
class Model:
    """The fields of `TransformerConfig` that make a model, and what makes it beside them."""

    fields: dict[str, Any]
    vocab_size: int = 248_320
    tied: bool = False
    """Whether the output layer shares the embedding's weight."""
    max_position_embeddings: int = 262_144


def _model(layers, hidden, ffn, heads, groups, value_heads, *, tied=False) -> Model:
    return Model(
        EVERY_SIZE
        | {
            "num_layers": layers,
            "hidden_size": hidden,
            "ffn_hidden_size": ffn,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "linear_num_value_heads": value_heads,
        },
        tied=tied,
    )


def _moe_model(layers, hidden, ffn, heads, groups, value_heads, experts, topk) -> Model:
    """Every layer has experts of `ffn` and one shared expert of the same width."""
    dense = _model(layers, hidden, ffn, heads, groups, value_heads)
    moe = {
        "num_moe_experts": experts,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": ffn,
        "moe_shared_expert_intermediate_size": ffn,
    }
    return Model(dense.fields | EVERY_MOE | moe)


_DEBUG = Model(
    _moe_model(4, 128, 64, 4, 2, 4, experts=8, topk=2).fields
    | {
        "kv_channels": 32,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 2,
        "rotary_base": 10_000,
    },
    vocab_size=257,
    max_position_embeddings=32_768,
)
"""Every structure of the MoE sizes on 256 bytes and one end-of-document token."""

SIZES: dict[str, Model] = {
    "debug": _DEBUG,
    "0.8b": _model(24, 1024, 3584, 8, 2, 16, tied=True),
    "2b": _model(24, 2048, 6144, 8, 2, 16, tied=True),
    "4b": _model(32, 2560, 9216, 16, 4, 32, tied=True),
    "9b": _model(32, 4096, 12288, 16, 4, 32),
    "27b": _model(64, 5120, 17408, 24, 4, 48),
    "35b-a3b": _moe_model(40, 2048, 512, 16, 2, 32, experts=256, topk=8),
    "122b-a10b": _moe_model(48, 3072, 1024, 32, 2, 64, experts=256, topk=8),
    "397b-a17b": _moe_model(60, 4096, 1024, 32, 2, 64, experts=512, topk=10),
}

_ARGUMENT_NAMES = {"num_moe_experts": "num_experts"}
"""Config fields that the host's argument parser calls something else."""


@dataclass
class Qwen35Config(TransformerConfig):
    """`TransformerConfig` with what Qwen3.5's layers need beside it."""

    cp_layout: CPLayout = "zigzag"
    """Order of tokens across context-parallel ranks."""
    gdn_backend: str = "auto"
    """Kernel of the gated delta rule: flash_qla, fla, torch, or auto for the fastest that can run."""
    rotary_percent: float = 0.25
    """Share of each attention head that RoPE turns."""
    rotary_base: float = 10_000_000
    """RoPE's theta."""

    def __post_init__(self):
        """Check the GDN shape ourselves and the rest with the host.

        The host wants key heads divisible by tp x cp for its GatedDeltaNet, which none of our CP modes
        does. Its check hangs on `experimental_attention_variant`, which therefore stays None: the layers
        come from our own spec, and the host's multi-token prediction demands None too. So the host must
        not see "gdn_norm_out" among the modules to recompute either, which our layers do know.
        """
        self.experimental_attention_variant = None
        check_gdn_shape(self)
        gdn_modules = [m for m in self.recompute_modules or () if m == "gdn_norm_out"]
        if gdn_modules:
            self.recompute_modules = [m for m in self.recompute_modules if m != "gdn_norm_out"]
        super().__post_init__()
        self.recompute_modules += gdn_modules

    @classmethod
    def from_size(cls, name: str, **overrides: Any) -> "Qwen35Config":
        """The config of a released size, or of `debug`; `overrides` are fields that win.

        Raises:
            ValueError: `name` is no known size.
        """
        return cls.from_model(_find(name), **overrides)

    @classmethod
    def from_model(cls, model: Model, **overrides: Any) -> "Qwen35Config":
        """The config of a model; `overrides` are fields that win."""
        fields = {"gated_linear_unit": True, "activation_func": F.silu} | model.fields
        return cls(**fields | overrides)


def _find(name: str) -> Model:
    if name not in SIZES:
        raise ValueError(f"--qwen35-size {name!r} is unknown; choose one of {', '.join(SIZES)}.")
    return SIZES[name]


def size_arguments(name: str) -> dict[str, Any]:
    """Every model setting of a size by the name Megatron's argument parser gives it.

    For `parser.set_defaults`, so that a flag given by hand wins.

    Raises:
        ValueError: `name` is no known size.
    """
    return model_arguments(_find(name))


def model_arguments(model: Model) -> dict[str, Any]:
    """Every setting of a model by the name Megatron's argument parser gives it."""
    arguments = {_ARGUMENT_NAMES.get(field, field): value for field, value in model.fields.items()}
    return arguments | {
        "swiglu": True,
        "group_query_attention": True,
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": not model.tied,
        "max_position_embeddings": model.max_position_embeddings,
        "vocab_size": model.vocab_size,
    }


def count_parameters(config: TransformerConfig, vocab_size: int, tied: bool) -> tuple[int, int]:
    """Parameters of the whole model (no multi-token prediction): all of them, and those one token uses."""
    hidden = config.hidden_size
    gdn_layers = sum(get_linear_attention_pattern(config))
    attention_layers = config.num_layers - gdn_layers

    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    gdn = hidden * (2 * keys + 2 * values + 2 * config.linear_num_value_heads)  # q k, v z, b a
    gdn += config.linear_conv_kernel_dim * (2 * keys + values)
    gdn += 2 * config.linear_num_value_heads + config.linear_value_head_dim  # A_log dt_bias, out_norm
    gdn += values * hidden

    queries = config.num_attention_heads * config.kv_channels
    gates = queries if config.attention_output_gate else 0
    attention = hidden * (queries + gates + 2 * config.num_query_groups * config.kv_channels)
    attention += queries * hidden + (2 * config.kv_channels if config.qk_layernorm else 0)

    def mlp(width: int) -> int:
        return 3 * hidden * width

    shared = config.num_layers * 2 * hidden + hidden  # norms
    shared += gdn_layers * gdn + attention_layers * attention
    shared += vocab_size * hidden * (1 if tied else 2)
    if not config.num_moe_experts:
        total = shared + config.num_layers * mlp(config.ffn_hidden_size)
        return total, total

    shared += config.num_layers * hidden * config.num_moe_experts  # router
    if config.moe_shared_expert_intermediate_size:
        shared_expert = mlp(config.moe_shared_expert_intermediate_size)
        shared += config.num_layers * (shared_expert + (hidden if config.moe_shared_expert_gate else 0))
    expert = config.num_layers * mlp(config.moe_ffn_hidden_size)
    return shared + config.num_moe_experts * expert, shared + config.moe_router_topk * expert
