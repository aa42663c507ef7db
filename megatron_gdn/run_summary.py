"""What is going to run, in words, before it runs."""

import argparse
from pathlib import Path

import torch

from megatron_gdn import validation
from megatron_gdn.checkpoint.huggingface import into_model
from megatron_gdn.config import Qwen35Config, count_parameters
from megatron_gdn.ops import attention, gated_delta_rule


def describe(
    args: argparse.Namespace, mode: str, config: Qwen35Config, device: torch.device, resumes: bool
) -> str:
    """The block that says what is going to run.

    Args:
        args: the host's, after its own checks.
        mode: of the GatedDeltaNet layers.
        config: the model's.
        device: of the kernels.
        resumes: whether there is a checkpoint in --load.

    Raises:
        ValueError: the kernel asked for cannot run here.
    """
    total, active = count_parameters(
        config, args.padded_vocab_size, not args.untie_embeddings_and_output_weights
    )
    rule = rule_backend(args, device)
    core_attention = attention.backend_name(device, args.params_dtype, args.kv_channels)
    name = f"Qwen3.5 {args.qwen35_size}" if args.from_hf is None else Path(args.from_hf).name
    rows = {
        "model": f"{name}, {total:,} parameters, {active:,} active per token",
        "weights": _weights(args, resumes),
        "layer spec": " ".join(args.spec),
        "multi-token prediction": f"{args.mtp_num_layers or 0} tokens further, not counted above",
        "GDN context parallelism": mode,
        "attention context parallelism": " ".join(args.cp_comm_type),
        "token layout": args.cp_layout,
        "documents": "kept apart" if validation.packs_documents(args) else "not kept apart",
        "parallel sizes": f"tp {args.tensor_model_parallel_size}, pp {args.pipeline_model_parallel_size}, "
        f"ep {args.expert_model_parallel_size}, cp {args.context_parallel_size}, "
        f"dp {args.data_parallel_size}",
        "kernels": f"gated delta rule {rule}, attention {core_attention}, layers {args.transformer_impl}, "
        f"{args.params_dtype}",
        "tokens per step": f"{args.global_batch_size * args.seq_length:,}"
        if args.step_batch_size_schedule is None
        else f"by --step-batch-size-schedule {args.step_batch_size_schedule}",
    }
    width = max(map(len, rows))
    return "\n".join(["", *(f"  {name:<{width}}  {value}" for name, value in rows.items()), ""])


def _weights(args: argparse.Namespace, resumes: bool) -> str:
    """Where they come from."""
    if resumes:
        return f"the checkpoint in {args.load}" + (f", not {args.from_hf}" if args.from_hf else "")
    if args.from_hf is None:
        return "random" if args.pretrained_checkpoint is None else str(args.pretrained_checkpoint)
    left_out = not args.mtp_num_layers and any(
        name.startswith("mtp.") for name in into_model.source_of(args).folder.tensors
    )
    return args.from_hf + (" without its multi-token prediction (--mtp-num-layers 1)" if left_out else "")


def rule_backend(args: argparse.Namespace, device: torch.device) -> gated_delta_rule.Backend:
    """The kernel of the gated delta rule; a ValueError if the one asked for cannot run here."""
    head_dims = (args.linear_key_head_dim, args.linear_value_head_dim)
    return gated_delta_rule.choose_backend(device, args.params_dtype, head_dims, args.gdn_backend)
