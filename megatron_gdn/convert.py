"""Convert checkpoints between Hugging Face (safetensors) and Megatron (torch_dist), bit for bit.

Megatron's side knows whole tensors only, so it has no parallel sizes: any can load it, and a checkpoint that
any wrote can be converted.
"""

import argparse
import os
import warnings
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `convert`."""
    parser.epilog = (
        "Converted checkpoints load at any tensor, pipeline, expert and context parallel sizes (--load of "
        "pretrain_qwen35.py), so none are asked for here. A conversion that was interrupted goes on when "
        "started again."
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--from-hf", type=Path, metavar="DIR", help="config.json and safetensors")
    source.add_argument(
        "--from-megatron", type=Path, metavar="DIR", help="what --save wrote, or an iteration"
    )
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--to-megatron", type=Path, metavar="DIR", help="folder to make")
    target.add_argument("--to-hf", type=Path, metavar="DIR", help="folder to make")
    parser.add_argument(
        "--like",
        type=Path,
        metavar="DIR",
        help="with --to-hf: the Hugging Face or converted checkpoint that training began with; names, types, "
        "tokenizer, and tensors outside the language model come from there (default: what is kept beside "
        "--from-megatron)",
    )
    parser.add_argument("--drop-mtp", action="store_true", help="leave multi-token prediction out")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="afterwards, compare both sides' logits on a few tokens (transformers, CPU, fp32)",
    )
    workers = min(8, len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--workers",
        type=int,
        default=workers,
        metavar="N",
        help="files written at once (default: cores, up to 8)",
    )


def main(args: argparse.Namespace) -> int:
    """Run `convert`.

    Raises:
        ValueError: flags or a checkpoint that cannot be used. Nothing that looks finished is left behind.
    """
    if bool(args.from_hf) != bool(args.to_megatron):
        raise ValueError("convert goes --from-hf --to-megatron, or --from-megatron --to-hf.")
    if args.workers < 1:
        raise ValueError(f"--workers must be at least 1, got {args.workers}.")
    if args.from_hf and args.like:
        raise ValueError("--like goes with --to-hf; leave it out.")
    for flag in ("from_hf", "from_megatron", "like"):
        path = getattr(args, flag)
        if path is not None and not path.is_dir():
            raise ValueError(f"--{flag.replace('_', '-')} {path} is no folder.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # remarks of the host on what is not installed for training
        from megatron_gdn.checkpoint.huggingface import to_hf, to_megatron, verify
    if args.verify:
        verify.check_installed()
    if args.from_hf:
        print(to_megatron.convert(args.from_hf, args.to_megatron, args.workers, args.drop_mtp))
    else:
        print(to_hf.convert(args.from_megatron, args.to_hf, args.workers, args.like, args.drop_mtp))
    if args.verify:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hf, megatron = args.from_hf or args.to_hf, args.from_megatron or args.to_megatron
            print(verify.verify(hf, megatron))
    return 0
