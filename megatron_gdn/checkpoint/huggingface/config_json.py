"""config.json of Qwen3.5 and Qwen3-Next to the model's settings, and back.

Source of the fields: transformers 5.24, `Qwen3_5TextConfig`, `Qwen3_5MoeTextConfig`, `Qwen3NextConfig`.
"""

from collections.abc import Iterator
from typing import Any

from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern

from megatron_gdn.config import EVERY_MOE, EVERY_SIZE, Model, Qwen35Config, model_arguments

DENSE, MOE, NEXT = "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"
MODEL_TYPES = {DENSE, MOE, NEXT, "qwen3_5", "qwen3_5_moe"}
_RENAMED = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "linear_conv_kernel_dim": "linear_conv_kernel_dim",
    "linear_key_head_dim": "linear_key_head_dim",
    "linear_value_head_dim": "linear_value_head_dim",
    "linear_num_key_heads": "linear_num_key_heads",
    "linear_num_value_heads": "linear_num_value_heads",
    "rms_norm_eps": "layernorm_epsilon",
}
_RENAMED_MOE = {
    "num_experts": "num_moe_experts",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
}
_OPTIONAL = {"initializer_range": "init_method_std", "attention_dropout": "attention_dropout"}
_ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attn_output_gate": True,
    "norm_topk_prob": True,
    "mtp_use_dedicated_embeddings": False,
    "use_sliding_window": False,
}
"""Fields with one value that our layers have; any may be absent, which means that value."""
_OF_TRAINING = {
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "max_position_embeddings",
    "moe_aux_loss_coeff",
    "moe_router_dtype",
    "moe_router_load_balancing_type",
    "moe_token_dispatcher_type",
}
"""Arguments of a model that say how it is trained; a flag may change them."""
_NOT_IN_CONFIG = {
    "moe_router_pre_softmax": (False,),
    "moe_router_score_function": ("softmax",),
    "moe_router_topk_scaling_factor": (1.0, None),
    "use_mup": (False,),
}
"""Arguments that would make another function of the same weights, and their values that do not."""


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config.json."""
    return config.get("text_config", config)


def read_model(config: dict[str, Any]) -> Model:
    """The model that a config.json describes.

    Args:
        config: its content, with or without `text_config`.

    Raises:
        ValueError: a field is missing, or says something that our layers do not do.
    """
    text = text_config(config)
    if text.get("model_type") not in MODEL_TYPES:
        raise ValueError(
            f"config.json: model_type {text.get('model_type')!r} is unknown; it must be one of "
            f"{', '.join(sorted(MODEL_TYPES))}."
        )
    for name, wanted in _ONLY.items():
        if text.get(name, wanted) != wanted:
            raise ValueError(f"config.json: {name} {text[name]!r} is not supported, only {wanted!r} is.")
    moe = bool(text.get("num_experts"))
    fields = EVERY_SIZE | {ours: _get(text, theirs) for theirs, ours in _RENAMED.items()}
    fields |= _rope(text)
    fields["linear_attention_freq"] = _attention_freq(text)
    fields |= {ours: text[theirs] for theirs, ours in _OPTIONAL.items() if theirs in text}
    if moe:
        fields |= EVERY_MOE | {ours: _get(text, theirs) for theirs, ours in _RENAMED_MOE.items()}
        if text["num_experts_per_tok"] > text["num_experts"]:
            raise ValueError(
                f"config.json: num_experts_per_tok {text['num_experts_per_tok']} is more than num_experts "
                f"{text['num_experts']}; copy the file from the model's own folder again."
            )
        fields["moe_layer_freq"] = _moe_freq(text)
        fields["moe_aux_loss_coeff"] = text.get("router_aux_loss_coef", EVERY_MOE["moe_aux_loss_coeff"])
    width = "moe_intermediate_size" if moe and "intermediate_size" not in text else "intermediate_size"
    fields["ffn_hidden_size"] = _get(text, width)
    return Model(
        fields,
        vocab_size=_get(text, "vocab_size"),
        tied=config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)),
        max_position_embeddings=_get(text, "max_position_embeddings"),
    )


def _get(text: dict[str, Any], name: str) -> int | float:
    value = text.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        got = "is missing" if value is None else f"is {value!r}, no number"
        raise ValueError(f"config.json: {name} {got}; copy the file from the model's own folder again.")
    return value


def _rope(text: dict[str, Any]) -> dict[str, float]:
    """Base and share of RoPE; parameters stand in one dict, or at the top in older files."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"config.json: RoPE of type {kind!r} is not supported, only 'default' is.")
    return {
        "rotary_base": _get(text | rope, "rope_theta"),
        "rotary_percent": (text | rope).get("partial_rotary_factor", EVERY_SIZE["rotary_percent"]),
    }


def _attention_freq(text: dict[str, Any]) -> int | list[int]:
    """Every how manieth layer is attention; a list of 1 (linear) and 0 where there is no such number."""
    num_layers = _get(text, "num_hidden_layers")
    kinds = {"linear_attention": 1, "full_attention": 0}
    types = text.get("layer_types")
    if types is None:
        return text.get("full_attention_interval", 4)
    unknown = set(types) - kinds.keys()
    if unknown or len(types) != num_layers:
        raise ValueError(
            f"config.json: layer_types must name {num_layers} layers, each {' or '.join(kinds)}; got "
            f"{len(types)}, {', '.join(sorted(set(types)))}."
        )
    pattern = [kinds[each] for each in types]
    interval = pattern.index(0) + 1 if 0 in pattern else num_layers + 1
    regular = [int((number + 1) % interval != 0) for number in range(num_layers)]
    return interval if regular == pattern else pattern


def _moe_freq(text: dict[str, Any]) -> int | list[int]:
    """1 where every layer has experts; else a list of 1 (experts) and 0."""
    step, dense = text.get("decoder_sparse_step", 1), set(text.get("mlp_only_layers") or ())
    pattern = [
        int(number not in dense and (number + 1) % step == 0) for number in range(text["num_hidden_layers"])
    ]
    return 1 if all(pattern) else pattern


def read_arguments(arguments: dict[str, Any]) -> Model:
    """The model that a checkpoint of the training script holds, from the arguments stored in it.

    Raises:
        ValueError: an argument is missing.
    """
    moe = bool(arguments.get("num_experts"))
    fields = [*EVERY_SIZE, *_RENAMED.values(), "ffn_hidden_size"]
    fields += [*EVERY_MOE, *_RENAMED_MOE.values()] if moe else []
    others = ("vocab_size", "untie_embeddings_and_output_weights", "max_position_embeddings")
    arguments = arguments | ({"num_moe_experts": arguments["num_experts"]} if moe else {})
    missing = [name for name in (*fields, *others) if name not in arguments]
    if missing:
        raise ValueError(
            f"the checkpoint does not say {', '.join(missing)}; name the folder it came from with --like."
        )
    return Model(
        {name: arguments[name] for name in fields},
        vocab_size=arguments["vocab_size"],
        tied=not arguments["untie_embeddings_and_output_weights"],
        max_position_embeddings=arguments["max_position_embeddings"],
    )


def changed_settings(arguments: dict[str, Any], model: Model) -> Iterator[tuple[str, Any, Any]]:
    """Where arguments make another function of the same weights than a model that config.json describes.

    Args:
        arguments: Megatron's, of a run or stored in a checkpoint; what is not there is not looked at.
        model: from config.json.

    Yields:
        (name, value in `arguments`, value of the model).
    """
    for name, value in model_arguments(model).items():
        if name not in _OF_TRAINING and arguments.get(name, value) != value:
            yield name, arguments[name], value
    for name, values in _NOT_IN_CONFIG.items():
        if arguments.get(name, values[0]) not in values:
            yield name, arguments[name], values[0]


def write_config(model: Model, dtype: str, mtp_layers: int) -> dict[str, Any]:
    """config.json of a text-only model.

    Args:
        model: the model.
        dtype: what most of its tensors are, as transformers calls it: "bfloat16".
        mtp_layers: layers of multi-token prediction.
    """
    config = Qwen35Config.from_model(model)
    moe = bool(config.num_moe_experts)
    if moe and config.moe_layer_freq != 1:
        raise ValueError(
            "Qwen3.5 has experts in every layer; --moe-layer-freq must be 1 to write config.json."
        )
    text = {theirs: getattr(config, ours) for theirs, ours in _RENAMED.items()}
    if moe:
        text |= {theirs: getattr(config, ours) for theirs, ours in _RENAMED_MOE.items()}
        text["router_aux_loss_coef"] = config.moe_aux_loss_coeff
    else:
        text["intermediate_size"] = config.ffn_hidden_size
    kinds = ("full_attention", "linear_attention")
    return text | {
        "architectures": ["Qwen3_5MoeForCausalLM" if moe else "Qwen3_5ForCausalLM"],
        "model_type": MOE if moe else DENSE,
        "dtype": dtype,
        "layer_types": [kinds[linear] for linear in get_linear_attention_pattern(config)],
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position_embeddings,
        "tie_word_embeddings": model.tied,
        "initializer_range": config.init_method_std,
        "attention_dropout": config.attention_dropout,
        "hidden_act": "silu",
        "attn_output_gate": True,
        "mtp_num_hidden_layers": mtp_layers,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rotary_base,
            "partial_rotary_factor": config.rotary_percent,
        },
    }
