"""The host's own model without TransformerEngine: the rival of the benchmarks of layers and of the model."""

from dataclasses import replace

from tests.benchmarks import runs  # isort: split

import torch
import torch.nn.functional as F
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import nn

from megatron_gdn.config import Qwen35Config
from megatron_gdn.layer_specs import get_qwen35_chunkwise_cp_spec


def config(tiny: bool, **overrides) -> Qwen35Config:
    """The host's torch norm takes no zero-centred weight; its kernels do not run on a CPU."""
    return runs.model_config(
        tiny, layernorm_zero_centered_gamma=False, deterministic_mode=runs.RUNS_ON_CPU, **overrides
    )


def run_here() -> None:
    """On a CPU, give the host's layer a norm of queries and keys that needs no kernel."""
    if runs.RUNS_ON_CPU:
        common.l2norm = lambda x: F.normalize(x.float(), dim=-1).to(x.dtype)


def gdn_spec() -> ModuleSpec:
    """The host's GatedDeltaNet."""
    return ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
        ),
    )


def copy_weights(host: nn.Module, ours: nn.Module, but: str) -> None:
    """Our layer's weights into the host's, `but` those with this in their name."""
    own = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in host.named_parameters():
            if but not in name:
                parameter.copy_(own[name])


def attention_spec() -> ModuleSpec:
    """The host's gated attention."""
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=WrappedTorchNorm,
            k_layernorm=WrappedTorchNorm,
        ),
    )


def block(config: Qwen35Config) -> TransformerBlockSubmodules:
    """The model's block of the host's own parts."""
    moe = get_moe_module_spec_for_backend(LocalSpecProvider(), num_experts=config.num_moe_experts)
    layers = []
    for layer in get_qwen35_chunkwise_cp_spec(config).layer_specs:
        linear = layer.submodules.self_attention.metainfo["input_linear"] == "in_proj"
        parts = replace(
            layer.submodules,
            input_layernorm=WrappedTorchNorm,
            self_attention=gdn_spec() if linear else attention_spec(),
            pre_mlp_layernorm=WrappedTorchNorm,
            mlp=moe,
        )
        layers.append(replace(layer, submodules=parts))
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=WrappedTorchNorm)
