"""Refusals of flags of `pretrain_qwen35.py`: missing, meaningless, or without effect on what it trains.

As in `validation`: a message says which flag, what was got and the way out, on every rank, before the first
collective.
"""

import importlib.util
import math
import re
from collections.abc import Iterator
from typing import Any

from megatron.core.transformer.enums import AttnBackend

from megatron_gdn.validation import packs_documents


def check_required(args: Any) -> None:
    """Refuse a run without the flags that no size sets.

    Raises:
        ValueError: names every missing flag.
    """
    missing = [
        _flag(name) for name in ("seq_length", "micro_batch_size", "lr") if getattr(args, name) is None
    ]
    if not (args.train_iters or args.train_samples or args.skip_train):
        missing.append("--train-iters (or --train-samples)")
    if missing:
        raise ValueError(f"{', '.join(missing)} missing; no --qwen35-size sets what depends on the run.")


_REFUSED = {
    "is not Qwen3.5's": """
        activation_func_clamp_value apply_residual_connection_post_layernorm attention_dropout
        fp32_residual_connection glu_linear_offset hybrid_layer_pattern hybrid_override_pattern
        is_hybrid_model moe_apply_probs_on_input moe_latent_size mrope_section mtp_hybrid_override_pattern
        mtp_use_repeated_layer multi_latent_attention no_rope_freq qk_l2_norm rotary_interleaved
        rotary_seq_len_interpolation_factor use_rope_scaling window_size
        """,
    "would bypass this script's data": """
        encoder_seq_length fim_data hierarchical_context_parallel_sizes hybrid_context_parallel
        perform_rl_step sft yaml_cfg
        """,
    "is read by megatron-core's own scripts only": """
        create_all_gather_group freeze_all_layers inprocess_restart logits_load_dir logits_save_dir
        """,
    "does nothing here, where layers and loss bring kernels of their own": """
        cross_entropy_loss_fusion flash_attention_version fp16_lm_cross_entropy fused_residual_rmsnorm
        moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size use_grouped_gemm_for_dense_mlp
        use_kitchen_attention use_te_activation_func use_transformer_engine_op_fuser
        """,
    "does not work with these layers": """
        check_for_spiky_loss defer_embedding_wgrad_compute enable_cuda_graph external_cuda_graph
        fp8_output_proj overlap_moe_expert_parallel_comm use_megatron_fsdp use_torch_fsdp2
        """,
    "fails in megatron-core 0.19 itself": """
        config_logger_dir full_validation init_method_xavier_uniform lazy_mpu_init moe_use_upcycling
        multiple_validation_sets test_mode
        """,
}
"""Why arguments are refused, whatever their value, if any is given."""
_NEEDS_TRANSFORMER_ENGINE = """
    cpu_offloading_num_layers fp4 fp8 moe_router_fusion optimizer_cuda_graph save_activations_interval
    save_dgrads_interval save_tokens_per_expert_interval te_precision_config_file tp_comm_overlap
    use_grouped_gemm_for_shared_expert
    """
_OF_HOST_TOKENIZERS = """
    chat_template merge_file null_tokenizer_eod_id tokenizer_model tokenizer_type trust_remote_code vocab_file
    """
_FLAGS = {"fp4": "--fp4-format", "fp8": "--fp8-format"}


def _flag(name: str) -> str:
    """An argument's name as it is given on the command line."""
    return _FLAGS.get(name, "--" + name.replace("_", "-"))


def _given(args: Any, names: str) -> Iterator[str]:
    """Flags of those arguments that are set."""
    for name in names.split():
        if getattr(args, name):
            yield _flag(name)


def check_tokenizer(args: Any) -> None:
    """Refuse flags of the host's tokenizers beside ours; call it before a checkpoint's arguments are read.

    Raises:
        ValueError: names the flag.
    """
    for flag in _given(args, _OF_HOST_TOKENIZERS if args.tokenizer else ""):
        raise ValueError(f"{flag} beside --tokenizer {args.tokenizer} has no effect; leave one of them out.")


def check_unsupported(args: Any) -> None:
    """Refuse what would bypass this script's data or layers, or be ignored by them.

    Raises:
        ValueError: see the messages.
    """
    for reason, names in _REFUSED.items():
        for flag in _given(args, names):
            raise ValueError(f"{flag} {reason}; leave it out.")
    for flag in _given(args, _NEEDS_TRANSFORMER_ENGINE if args.transformer_impl == "local" else ""):
        raise ValueError(
            f"{flag} needs TransformerEngine; leave it out, or install that and use --transformer-impl "
            "transformer_engine."
        )
    _check_values(args)
    _check_pairs(args)


def _check_values(args: Any) -> None:
    """Refuse values that Qwen3.5, this script or this machine does not have."""
    only = {
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "softmax_type": "vanilla",
        "experimental_attention_variant": "gated_delta_net",
    }
    for name, wanted in only.items():
        if getattr(args, name) != wanted:
            raise ValueError(
                f"{_flag(name)} {getattr(args, name)} is not Qwen3.5's; use {wanted}, as --qwen35-size sets."
            )
    if args.dataloader_type == "external":
        raise ValueError("--dataloader-type external would bypass this script's data; use single or cyclic.")
    if args.attention_backend not in (None, AttnBackend.auto):
        raise ValueError(
            f"--attention-backend {args.attention_backend.name} is for the attention of TransformerEngine, "
            "which is not used; leave it out."
        )
    if args.cuda_graph_impl not in (None, "none"):
        raise ValueError(
            f"--cuda-graph-impl {args.cuda_graph_impl} cannot record layers that are told a microbatch's "
            "documents; leave it out."
        )
    if args.transformer_impl == "transformer_engine" and not importlib.util.find_spec("transformer_engine"):
        raise ValueError(
            "--transformer-impl transformer_engine, but TransformerEngine is not installed; install it, or "
            "use --transformer-impl local."
        )


def _check_pairs(args: Any) -> None:
    """Refuse flags that go wrong together, or beside something that they need."""
    if args.rampup_batch_size:
        raise ValueError(
            f"--rampup-batch-size {' '.join(map(str, args.rampup_batch_size))} is ignored by megatron-core "
            "0.19; use --step-batch-size-schedule."
        )
    layout = args.pipeline_model_parallel_layout
    if args.mtp_num_layers and isinstance(layout, str) and re.search(r"m[^L]*\|", layout):
        raise ValueError(
            f"--pipeline-model-parallel-layout {layout}: with multi-token prediction in a stage before the "
            "loss gradients of embedding and output layer would be summed wrongly; put m and L into one "
            "stage, as in Et*3|t*3|t*2mL."
        )
    if args.per_split_data_args_path and args.data_path:
        raise ValueError(
            "--per-split-data-args-path beside --data-path would be ignored; leave one of them out."
        )
    if args.padded_vocab_size and args.vocab_size and args.padded_vocab_size < args.vocab_size:
        raise ValueError(
            f"--padded-vocab-size {args.padded_vocab_size} is below --vocab-size {args.vocab_size}; raise or "
            "drop it."
        )
    if args.num_experts and args.dump_param_to_param_group_map:
        raise ValueError(
            "--dump-param-to-param-group-map cannot name experts that are one tensor on a rank; leave it out."
        )
    balancing = args.moe_router_load_balancing_type or ()
    balancing = [balancing] if isinstance(balancing, str) else balancing
    if "seq_aux_loss" in balancing and packs_documents(args) and (args.micro_batch_size or 1) > 1:
        raise ValueError(
            f"--moe-router-load-balancing-type seq_aux_loss with packed documents and --micro-batch-size "
            f"{args.micro_batch_size}: the microbatch is one stream, whose samples the loss would not tell "
            "apart; use --micro-batch-size 1, or aux_loss."
        )
    coefficients = args.moe_aux_loss_coeff
    coefficients = coefficients if isinstance(coefficients, list) else [coefficients] * len(balancing)
    for kind, coefficient in zip(balancing, coefficients, strict=False):
        if kind == "sinkhorn" and coefficient:
            raise ValueError(
                "--moe-router-load-balancing-type sinkhorn has no auxiliary loss, but its "
                f"--moe-aux-loss-coeff is {coefficient}; add --moe-aux-loss-coeff 0."
            )


def check_recompute(args: Any) -> None:
    """Refuse modules of --recompute-modules that would not be recomputed, or end in an error of the host.

    The host recomputes norms and expert activations by a function that asks TransformerEngine about fp8.

    Raises:
        ValueError: see the messages.
    """
    modules, granularity = args.recompute_modules or [], args.recompute_granularity
    if args.recompute_activations:  # the host reads it as selective, whatever else is said
        granularity = "selective"
    if modules and granularity != "selective":
        raise ValueError(
            f"--recompute-modules {' '.join(modules)} needs --recompute-granularity selective, got "
            f"{granularity}; add that, or leave the modules out."
        )
    needs = [name for name in modules if name in ("layernorm", "moe_act")]
    if needs and not importlib.util.find_spec("transformer_engine"):
        raise ValueError(
            f"--recompute-modules {' '.join(needs)} needs TransformerEngine, which is not installed; install "
            "it, or use core_attn, gdn_norm_out, mlp, moe, shared_experts, or --recompute-granularity full."
        )
    if (
        args.mtp_num_layers
        and granularity == "full"
        and args.recompute_method == "uniform"
        and args.recompute_num_layers not in (None, 1)
    ):
        raise ValueError(
            f"--recompute-num-layers {args.recompute_num_layers} with multi-token prediction must be 1 for "
            "--recompute-method uniform; set it so."
        )


def check_optimizer(args: Any) -> None:
    """Refuse optimizers of matrices where the weights are not matrices, and those that are not installed.

    Raises:
        ValueError: see the messages.
    """
    name = args.optimizer.removeprefix("dist_")
    if name in ("adam", "sgd"):
        return
    if not importlib.util.find_spec("emerging_optimizers"):
        raise ValueError(
            f"--optimizer {args.optimizer} needs the package emerging-optimizers, which is not installed; "
            "install it, or use --optimizer adam."
        )
    if name != "lion" and args.num_experts and args.transformer_impl == "local":
        raise ValueError(
            f"--optimizer {args.optimizer} with --num-experts {args.num_experts}: the experts of a rank are "
            "one tensor, whose matrices the optimizer would not see, and would leave to Adam; use "
            "--optimizer adam or lion."
        )


def check_positive(args: Any) -> None:
    """Refuse sizes of zero or less, which the host divides by.

    Raises:
        ValueError: names the flag.
    """
    names = (
        "num_layers hidden_size num_attention_heads kv_channels linear_num_key_heads linear_num_value_heads "
        "linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim seq_length micro_batch_size "
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size"
    )
    for name in names.split():
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"{_flag(name)} must be at least 1, got {getattr(args, name)}.")
    if isinstance(args.linear_attention_freq, int) and args.linear_attention_freq < 1:
        raise ValueError(f"--linear-attention-freq must be at least 1, got {args.linear_attention_freq}.")
    if args.num_experts:
        _check_expert_ranks(args)
    if args.num_experts and args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        raise ValueError(
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size} with experts needs "
            "--sequence-parallel; add it."
        )


def _check_expert_ranks(args: Any) -> None:
    """Refuse a number of ranks that the experts cannot be shared out over."""
    flags = {
        "--expert-tensor-parallel-size": args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
        "--expert-model-parallel-size": args.expert_model_parallel_size,
        "--pipeline-model-parallel-size": args.pipeline_model_parallel_size,
    }
    if args.world_size % math.prod(flags.values()):
        raise ValueError(
            f"{' x '.join(f'{flag} {size}' for flag, size in flags.items())} must divide the number of "
            f"processes, {args.world_size}; lower one of them (without --expert-tensor-parallel-size it is "
            "--tensor-model-parallel-size), or start more processes."
        )
