"""The flags of `pretrain_qwen35.py` beside Megatron's own, and what they and the machine set of those."""

import argparse
import importlib.util
from pathlib import Path

from megatron_gdn.checkpoint.huggingface import into_model
from megatron_gdn.config import SIZES, model_arguments, size_arguments
from megatron_gdn.cp_layout import CP_LAYOUTS
from megatron_gdn.ops import gated_delta_rule


def add_arguments(parser: argparse.ArgumentParser, runs_on_cpu: bool) -> argparse.ArgumentParser:
    """Add our own flags and set the defaults that the size and the machine ask for."""
    parser.error = _refuse_flags
    group = parser.add_argument_group("Qwen3.5")
    model = group.add_mutually_exclusive_group(required=True)
    model.add_argument("--qwen35-size", choices=SIZES, help="sets every model flag; one given by hand wins")
    model.add_argument(
        "--from-hf",
        metavar="DIR",
        help="start from a Hugging Face checkpoint, whose config.json sets every model flag; a checkpoint in "
        "--load wins over its weights",
    )
    group.add_argument(
        "--cp-layout",
        default="zigzag",
        choices=CP_LAYOUTS,
        help="order of tokens across context-parallel ranks",
    )
    group.add_argument(
        "--gdn-backend",
        default="auto",
        choices=gated_delta_rule.GDN_BACKENDS,
        help="kernel of the gated delta rule; auto takes the fastest that can run",
    )
    group.add_argument(
        "--tokenizer",
        metavar="byte|FOLDER",
        help="what the data was prepared with; without it, the host's --tokenizer-type",
    )
    group.add_argument(
        "--self-test",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="test the kernels on every GPU before training",
    )
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.error = _refuse_flags
    early.add_argument("--qwen35-size")
    early.add_argument("--from-hf")
    known = early.parse_known_args()[0]
    parser.set_defaults(
        apply_rope_fusion=False,  # our attention turns its heads itself
        create_attention_mask_in_dataloader=False,  # document borders reach the layers as lengths
    )
    for arguments in machine_flags(runs_on_cpu).values():
        parser.set_defaults(**arguments)
    if known.from_hf is not None:
        parser.set_defaults(**model_arguments(into_model.model_of(Path(known.from_hf))))
    elif known.qwen35_size in SIZES:
        parser.set_defaults(**size_arguments(known.qwen35_size))
    return parser


def _refuse_flags(message: str) -> None:
    raise ValueError(f"{message} (--help lists every flag)")


def machine_flags(runs_on_cpu: bool) -> dict[str, dict]:
    """Flags set for the user because of what this machine lacks, and the arguments they stand for."""
    flags = {}
    if runs_on_cpu:
        flags["--distributed-backend gloo"] = {"distributed_backend": "gloo"}
    if runs_on_cpu or importlib.util.find_spec("transformer_engine") is None:
        flags |= {
            "--transformer-impl local": {"transformer_impl": "local"},
            "--no-persist-layer-norm": {"no_persist_layer_norm": True},
            "--no-gradient-accumulation-fusion": {"gradient_accumulation_fusion": False},
        }
    return flags
