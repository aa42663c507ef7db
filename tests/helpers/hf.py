"""Small random checkpoints as transformers writes them, and as it reads them."""

import json
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SIZES = {
    "vocab_size": 300,  # no multiple of 128: Megatron pads
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
}
DENSE = SIZES | {"intermediate_size": 96}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 48,
}
MOE = SIZES | EXPERTS
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
KINDS = {
    "dense": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", DENSE),
    "tied": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", DENSE | {"tie_word_embeddings": True}),
    "moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", MOE),
    "multimodal": (
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Config",
        {"text_config": DENSE, "vision_config": VISION, "tie_word_embeddings": False},
    ),
    "multimodal_moe": (
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5MoeConfig",
        {"text_config": MOE, "vision_config": VISION, "tie_word_embeddings": False},
    ),
    "next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", MOE | {"intermediate_size": 96}),
}
"""Kind -> class of the model, class of its config, settings."""
FLOAT32 = ("linear_attn.A_log", "linear_attn.norm.weight")
"""What the released checkpoints keep in fp32, whatever their dtype."""


@cache
def transformers_models():
    """transformers, with its models' plain torch code: it would take fla's kernels, which need a GPU."""
    import transformers

    transformers.utils.logging.disable_progress_bar()  # its thread would be there when ranks are forked
    hidden = {name: sys.modules.pop(name, None) for name in ("fla", "causal_conv1d")}
    sys.modules.update(dict.fromkeys(hidden))  # None makes an import fail
    for name in ("qwen3_5", "qwen3_5_moe", "qwen3_next"):
        import_module(f"transformers.models.{name}.modeling_{name}")
    for name, module in hidden.items():
        del sys.modules[name]
        if module is not None:
            sys.modules[name] = module
    return transformers


def save_model(
    kind: str,
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    mtp: str | None = None,
    packed: bool = False,
    num_files: int = 3,
):
    """Save a random model as transformers does.

    Args:
        kind: one of KINDS.
        folder: where.
        dtype: of all tensors but those in FLOAT32.
        mtp: None, or add multi-token prediction with "packed", "per_expert" or "dense" feed-forward, which
            transformers neither writes nor reads.
        packed: experts in two tensors, as in released checkpoints; transformers writes three per expert.
        num_files: 1 means no index.

    Returns:
        The model.
    """
    transformers = transformers_models()
    torch.manual_seed(0)
    model_class, config_class, settings = KINDS[kind]
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if name.endswith("A_log"):
                parameter.uniform_(-5, 0)  # long memories: states that fade at once are not seen to be lost
            elif name.endswith(("norm.weight", "dt_bias")):
                parameter.add_(0.3 * noise)  # not the zeros and ones of the start
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    model.to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith(FLOAT32):
            parameter.data = parameter.data.float() + 1e-4 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_tensors(folder)
    if packed:
        tensors = pack_experts(tensors)
    if mtp:
        text = config.get("text_config", config)
        tensors |= mtp_tensors(text, mtp, dtype)
        text["mtp_num_hidden_layers"] = 1
        (folder / "config.json").write_text(json.dumps(config))
    write_tensors(folder, tensors, num_files)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return model


def write_tensors(folder: Path, tensors: dict[str, Tensor], num_files: int = 3) -> None:
    """Write the weights of a checkpoint anew, with an index if there are several files."""
    for file in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        file.unlink()
    if num_files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for number in range(num_files):
        file = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        names = sorted(tensors)[number::num_files]  # one layer's tensors in different files
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def pack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """All experts of a layer in gate_up_proj [experts, 2 * width, hidden] and down_proj."""
    layers = {name.split(".experts.")[0] for name in tensors if ".experts." in name}
    out = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in layers:
        count = sum(name.startswith(f"{layer}.experts.") for name in tensors) // 3

        def stacked(part, layer=layer, count=count):
            return [tensors[f"{layer}.experts.{number}.{part}_proj.weight"] for number in range(count)]

        pairs = zip(stacked("gate"), stacked("up"), strict=True)
        out[f"{layer}.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        out[f"{layer}.experts.down_proj"] = torch.stack(stacked("down"))
    return out


def mtp_tensors(text: dict, layout: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random tensors under the names that released checkpoints use."""
    hidden, dim = text["hidden_size"], text["head_dim"]
    heads, groups = text["num_attention_heads"], text["num_key_value_heads"]
    shapes = {
        "fc.weight": (hidden, 2 * hidden),
        "norm.weight": (hidden,),
        "pre_fc_norm_embedding.weight": (hidden,),
        "pre_fc_norm_hidden.weight": (hidden,),
        "layers.0.input_layernorm.weight": (hidden,),
        "layers.0.post_attention_layernorm.weight": (hidden,),
        "layers.0.self_attn.q_proj.weight": (2 * heads * dim, hidden),
        "layers.0.self_attn.k_proj.weight": (groups * dim, hidden),
        "layers.0.self_attn.v_proj.weight": (groups * dim, hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, heads * dim),
        "layers.0.self_attn.q_norm.weight": (dim,),
        "layers.0.self_attn.k_norm.weight": (dim,),
    }

    def gated(name: str, width: int) -> dict:
        up = {f"{name}.{part}_proj.weight": (width, hidden) for part in ("gate", "up")}
        return up | {f"{name}.down_proj.weight": (hidden, width)}

    mlp = "layers.0.mlp"
    if layout == "dense":
        shapes |= gated(mlp, text["intermediate_size"])
    else:
        count, width = text["num_experts"], text["moe_intermediate_size"]
        shapes |= {f"{mlp}.gate.weight": (count, hidden), f"{mlp}.shared_expert_gate.weight": (1, hidden)}
        shapes |= gated(f"{mlp}.shared_expert", text["shared_expert_intermediate_size"])
        if layout == "packed":
            shapes[f"{mlp}.experts.gate_up_proj"] = (count, 2 * width, hidden)
            shapes[f"{mlp}.experts.down_proj"] = (count, hidden, width)
        else:
            for number in range(count):
                shapes |= gated(f"{mlp}.experts.{number}", width)
    return {f"mtp.{name}": torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, read with the library."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_tensors(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Same names, types, shapes and bits."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        assert torch.equal(got[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name


def content(folder: Path) -> dict[str, bytes]:
    """Every file and its bytes."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def to_megatron_flags(folder: Path) -> list[str]:
    """Command line: `folder`/hf to `folder`/megatron."""
    return ["convert", "--from-hf", str(folder / "hf"), "--to-megatron", str(folder / "megatron")]


def to_hf_flags(folder: Path) -> list[str]:
    """Command line: `folder`/megatron to `folder`/back."""
    return ["convert", "--from-megatron", str(folder / "megatron"), "--to-hf", str(folder / "back")]
