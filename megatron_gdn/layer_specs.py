"""The names that `--spec megatron_gdn.layer_specs NAME` can say.

Each function gives the layers of one pipeline stage: GatedDeltaNet layers with every
`linear_attention_freq`-th one gated attention, and a dense or MoE feed-forward.
"""

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider, get_backend
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_linear_attention_pattern,
    get_moe_layer_pattern,
)
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType, LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayerSubmodules,
    get_mtp_num_layers_to_build,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from megatron_gdn.attention import CPCoreAttention, GatedSelfAttention
from megatron_gdn.experts import GroupedMLP
from megatron_gdn.gated_delta_net import GatedDeltaNet
from megatron_gdn.moe_layer import moe_layer_spec
from megatron_gdn.multi_token_prediction import MultiTokenPredictionLayer
from megatron_gdn.norms import GatedRMSNorm, QKNorm, RMSNorm


class LocalBackend(LocalSpecProvider):
    """The host's plain-PyTorch backend with norms that are zero-centred and sequence-parallel.

    Its experts run together.
    """

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        """RMSNorm for every place that asks for a norm."""
        if not rms_norm:
            raise ValueError("Qwen3.5 layer specs need --normalization RMSNorm.")
        return RMSNorm

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> type:
        """All experts at once, with or without --moe-grouped-gemm: nothing is gained by one after another."""
        return GroupedMLP


def get_qwen35_headwise_cp_spec(config, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Layers whose GatedDeltaNet shares its heads out over the context-parallel group (all-to-all)."""
    return _block_spec(config, vp_stage, "headwise")


def get_qwen35_chunkwise_cp_spec(config, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Layers whose GatedDeltaNet passes its recurrent state along the context-parallel group."""
    return _block_spec(config, vp_stage, "chunkwise")


get_qwen35_headwise_cp_spec.gdn_cp_mode = "headwise"
get_qwen35_chunkwise_cp_spec.gdn_cp_mode = "chunkwise"


def _block_spec(config, vp_stage: int | None, cp_mode: str) -> TransformerBlockSubmodules:
    """Layer specs of this pipeline stage, and the final norm.

    Args:
        config: a TransformerConfig, or the host's GPTModelConfig that holds one.
        vp_stage: virtual pipeline stage.
        cp_mode: GDN context-parallel mode.
    """
    config = getattr(config, "transformer", config)
    backend = _backend(config)
    mixers = [_attention_spec(backend), _gated_delta_net_spec(backend, cp_mode)]
    kinds = zip(get_linear_attention_pattern(config), _moe_pattern(config), strict=True)
    specs = [_layer_spec(config, backend, mixers[linear], moe) for linear, moe in kinds]
    return TransformerBlockSubmodules(
        layer_specs=[specs[i] for i in _stage_layers(config, vp_stage)],
        layer_norm=_norm(config, backend),
    )


def mtp_block_spec(config, vp_stage: int | None = None) -> MultiTokenPredictionBlockSubmodules | None:
    """Multi-token prediction of this pipeline stage, or None where there is none.

    Its layers are gated attention with the feed-forward of the model's last layer, whichever layers the
    stage has.

    Args:
        config: a TransformerConfig, or the host's GPTModelConfig that holds one.
        vp_stage: virtual pipeline stage.
    """
    config = getattr(config, "transformer", config)
    if not get_mtp_num_layers_to_build(config, vp_stage=vp_stage):
        return None
    backend = _backend(config)
    norm = _norm(config, backend)
    layer = ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=norm,
            hnorm=norm,
            layer_norm=norm,
            eh_proj=backend.column_parallel_linear(),
            mtp_model_layer=_layer_spec(config, backend, _attention_spec(backend), _moe_pattern(config)[-1]),
        ),
    )
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * config.mtp_num_layers)


def _backend(config: TransformerConfig) -> BackendSpecProvider:
    local = config.transformer_impl == "local"
    return LocalBackend() if local else get_backend(config.transformer_impl)


def _stage_layers(config: TransformerConfig, vp_stage: int | None) -> list[int]:
    """0-based numbers of the decoder layers of this pipeline stage."""
    if config.pipeline_model_parallel_layout is not None:
        layout = config.pipeline_model_parallel_layout
        return layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    start = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return list(range(start, start + get_num_layers_to_build(config, vp_stage=vp_stage)))


def _moe_pattern(config: TransformerConfig) -> list[int]:
    return get_moe_layer_pattern(config) if config.num_moe_experts else [0] * config.num_layers


def _norm(config: TransformerConfig, backend: BackendSpecProvider):
    """The backend's norm of the kind that the config names."""
    return backend.layer_norm(rms_norm=config.normalization == "RMSNorm")


def _column_linear(backend: BackendSpecProvider) -> type:
    """Column-parallel linear, with the norm before it where the backend fuses the two."""
    if backend.fuse_layernorm_and_linear():
        return backend.column_parallel_layer_norm_linear()
    return backend.column_parallel_linear()


def _gated_delta_net_spec(backend: BackendSpecProvider, cp_mode: str) -> ModuleSpec:
    return ModuleSpec(
        module=GatedDeltaNet,
        params={"cp_mode": cp_mode},
        submodules=GatedDeltaNetSubmodules(
            in_proj=_column_linear(backend),
            out_norm=GatedRMSNorm,
            out_proj=backend.row_parallel_linear(),
        ),
        metainfo={"input_linear": "in_proj"},
    )


def _attention_spec(backend: BackendSpecProvider) -> ModuleSpec:
    return ModuleSpec(
        module=GatedSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=_column_linear(backend),
            core_attention=CPCoreAttention,
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=QKNorm,
            k_layernorm=QKNorm,
        ),
        metainfo={"input_linear": "linear_qkv"},
    )


def _layer_spec(
    config: TransformerConfig, backend: BackendSpecProvider, mixer: ModuleSpec, moe: int
) -> ModuleSpec:
    """One TransformerLayer. Checkpoint keys are those of the host's fused layers, fused here or not."""
    norm, fused = _norm(config, backend), backend.fuse_layernorm_and_linear()
    keys = (
        {} if fused else {"input_layernorm.": f"self_attention.{mixer.metainfo['input_linear']}.layer_norm_"}
    )
    if moe:
        mlp = moe_layer_spec(config, backend, local=isinstance(backend, LocalBackend))
    else:
        mlp = get_mlp_module_spec_for_backend(backend)
        if not fused:
            keys["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=IdentityOp if fused else norm,
            self_attention=mixer,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=IdentityOp if fused and not moe else norm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=keys,
        ),
    )
