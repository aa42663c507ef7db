"""Refusals of flags of `pretrain_qwen35.py`: missing, meaningless, or without effect on what it trains.

As in `validation`: a message says which flag, what was got and the way out, on every rank, before the first
collective.
"""

import importlib.util
import re
from typing import Any


def check_required(args: Any) -> None:
    """Refuse a run without the flags that no size sets.

    Raises:
        ValueError: names every missing flag.
    """
    missing = [
        "--" + name.replace("_", "-")
        for name in ("seq_length", "micro_batch_size", "lr")
        if getattr(args, name) is None
    ]
    if not (args.train_iters or args.train_samples or args.skip_train):
        missing.append("--train-iters (or --train-samples)")
    if missing:
        raise ValueError(f"{', '.join(missing)} missing; no --qwen35-size sets what depends on the run.")


def check_unsupported(args: Any) -> None:
    """Refuse what would bypass this script's data or layers, or be ignored by them.

    Raises:
        ValueError: see the messages.
    """
    refused = {
        "--yaml-cfg": args.yaml_cfg,
        "--sft": args.sft,
        "--fim-data": args.fim_data,
        "--hybrid-context-parallel": args.hybrid_context_parallel,
        "--hierarchical-context-parallel-sizes": args.hierarchical_context_parallel_sizes,
        "--hybrid-layer-pattern": args.hybrid_layer_pattern,
        "--multi-latent-attention": args.multi_latent_attention,
        "--perform-rl-step": args.perform_rl_step,
        "--mtp-use-repeated-layer": args.mtp_use_repeated_layer,
        "--overlap-moe-expert-parallel-comm": args.overlap_moe_expert_parallel_comm,
        # It keeps the gradients of all logits, which our loss never has.
        "--defer-embedding-wgrad-compute": args.defer_embedding_wgrad_compute,
        "--fp32-residual-connection": args.fp32_residual_connection,
        "--use-rope-scaling": args.use_rope_scaling,
        "--rotary-seq-len-interpolation-factor": args.rotary_seq_len_interpolation_factor,
        "--rotary-interleaved": args.rotary_interleaved,
        "--qk-l2-norm": args.qk_l2_norm,
        "--window-size": args.window_size,
        "--attention-dropout": args.attention_dropout,
        "--apply-residual-connection-post-layernorm": args.apply_residual_connection_post_layernorm,
        "--dataloader-type external": args.dataloader_type == "external",
        "--tokenizer-type beside --tokenizer": args.tokenizer and args.tokenizer_type,
        # The host reads these only where it builds its own model.
        "--freeze-all-layers": args.freeze_all_layers,
        "--create-all-gather-group": args.create_all_gather_group,
        # Our loss is computed in fp32 always.
        "--fp16-lm-cross-entropy": args.fp16_lm_cross_entropy,
        # Read by TransformerEngine's experts only.
        "--moe-mlp-glu-interleave-size": args.moe_mlp_glu_interleave_size,
        "--moe-shared-expert-glu-interleave-size": args.moe_shared_expert_glu_interleave_size,
        "--moe-latent-size": args.moe_latent_size,
        # The host cannot build a config with it.
        "--init-method-xavier-uniform": args.init_method_xavier_uniform,
        # The host's evaluation fails with the first alone, and does not end with both.
        "--full-validation": args.full_validation,
        "--multiple-validation-sets": args.multiple_validation_sets,
        # It would read the loss on the CPU in every microbatch.
        "--check-for-spiky-loss": args.check_for_spiky_loss,
    }
    for flag, value in refused.items():
        if value:
            raise ValueError(f"{flag} is not supported by pretrain_qwen35.py; leave it out.")
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
    only = {
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "softmax_type": "vanilla",
        "experimental_attention_variant": "gated_delta_net",
    }
    for name, wanted in only.items():
        if getattr(args, name) != wanted:
            raise ValueError(
                f"--{name.replace('_', '-')} {getattr(args, name)} is not Qwen3.5's; use {wanted}, as "
                "--qwen35-size sets."
            )
    if args.transformer_impl == "transformer_engine" and not importlib.util.find_spec("transformer_engine"):
        raise ValueError(
            "--transformer-impl transformer_engine, but TransformerEngine is not installed; install it, or "
            "use --transformer-impl local."
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
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}.")
    if isinstance(args.linear_attention_freq, int) and args.linear_attention_freq < 1:
        raise ValueError(f"--linear-attention-freq must be at least 1, got {args.linear_attention_freq}.")
    if args.num_experts and args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        raise ValueError(
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size} with experts needs "
            "--sequence-parallel; add it."
        )
