"""Every refusal of sizes, shapes and layouts that a user can cause.

A message says which flag, what was got, what is needed and the way out.

All checks read values that are equal on every rank, so that all ranks refuse together, before the first
collective. `config` is an argument namespace of Megatron or a `Qwen35Config`: the names are the same.
"""

import importlib
import os
from collections.abc import Callable, Iterable
from typing import Any

from megatron_gdn.cp_layout import CP_LAYOUTS, span_length

CP_COMM_TYPES = ("all_gather", "p2p")
_SPEC_MODULE = "megatron_gdn.layer_specs"


def check_gdn_shape(config: Any) -> None:
    """Refuse head counts and a layer pattern that no GatedDeltaNet model has.

    Raises:
        ValueError: value heads no multiple of key heads, or a layer pattern of the wrong length.
    """
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if values % keys:
        raise ValueError(
            f"--linear-num-value-heads {values} must be a multiple of --linear-num-key-heads {keys}: each "
            "key head serves the same number of value heads."
        )
    pattern = config.linear_attention_freq
    if pattern is None or (isinstance(pattern, list) and len(pattern) != config.num_layers):
        raise ValueError(
            f"--linear-attention-freq {pattern} must be N (every Nth layer is attention) or a list of "
            f"--num-layers {config.num_layers} ones (GatedDeltaNet) and zeros (attention); Qwen3.5 has 4."
        )


def check_parallel_sizes(config: Any, mode: str) -> None:
    """Refuse parallel sizes that the model's heads cannot be divided by.

    Args:
        config: sizes and head counts.
        mode: GDN context parallelism, "headwise" or "chunkwise".

    Raises:
        ValueError: see the messages.
    """
    _check_cp_choices(config)
    tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    check_tensor_parallel_heads(keys, values, tp)
    if mode == "headwise":
        check_headwise_heads(keys // tp, values // tp, cp)


def check_tensor_parallel_heads(keys: int, values: int, tp: int) -> None:
    """Refuse GatedDeltaNet heads that tensor parallelism cannot share out.

    Raises:
        ValueError: see the message.
    """
    for flag, heads in (("--linear-num-key-heads", keys), ("--linear-num-value-heads", values)):
        if heads % tp:
            raise ValueError(
                f"{flag} {heads} must be a multiple of --tensor-model-parallel-size {tp}; lower "
                f"--tensor-model-parallel-size to a divisor of {heads}."
            )


def check_headwise_heads(key_heads: int, value_heads: int, cp_size: int) -> None:
    """Refuse heads that an all-to-all cannot share out over the context-parallel ranks.

    Args:
        key_heads: of one tensor-parallel rank.
        value_heads: of one tensor-parallel rank.
        cp_size: ranks that share the stream.

    Raises:
        ValueError: see the messages.
    """
    way_out = (
        "lower --context-parallel-size, or use --spec megatron_gdn.layer_specs get_qwen35_chunkwise_cp_spec."
    )
    if value_heads % cp_size:
        raise ValueError(
            f"--context-parallel-size {cp_size} with headwise CP needs the value heads of each "
            f"tensor-parallel rank, {value_heads}, to be a multiple of {cp_size}; {way_out}"
        )
    if key_heads % cp_size and cp_size % key_heads:
        raise ValueError(
            f"--context-parallel-size {cp_size} with headwise CP needs the key heads of each "
            f"tensor-parallel rank, {key_heads}, to be a multiple or a divisor of {cp_size}; {way_out}"
        )


def _check_cp_choices(config: Any) -> None:
    chosen = config.cp_comm_type
    for name in [chosen] if isinstance(chosen, str) else chosen or ():
        check_cp_comm_type(name)
    if config.cp_layout not in CP_LAYOUTS:
        raise ValueError(f"--cp-layout {config.cp_layout} is unknown; use {' or '.join(CP_LAYOUTS)}.")


def check_cp_comm_type(name: str) -> None:
    """Refuse a way of exchanging keys and values that attention does not have.

    Raises:
        ValueError: see the message.
    """
    if name not in CP_COMM_TYPES:
        raise ValueError(
            f"--cp-comm-type {name} is not supported by attention; use all_gather or p2p (the "
            "first has least latency, the second least memory). Neither depends on the number of heads, as "
            "a2a does."
        )


def check_lengths(config: Any, *, seq_length: int, micro_batch_sizes: Iterable[int], packed: bool) -> None:
    """Refuse streams that the ranks cannot share evenly.

    Args:
        config: parallel sizes and layout.
        seq_length: tokens of one sample.
        micro_batch_sizes: samples of a microbatch, in training and in evaluation.
        packed: whether documents are packed, so that a microbatch is one stream.

    Raises:
        ValueError: see the messages.
    """
    cp, tp = config.context_parallel_size, config.tensor_model_parallel_size
    for samples in sorted(set(micro_batch_sizes)):
        stream = seq_length * samples if packed else seq_length
        length = span_length(config.cp_layout, cp, stream)
        if config.sequence_parallel and (stream // cp) % tp:
            multiple = cp * tp * (stream // cp // length)
            raise ValueError(
                f"--sequence-parallel needs the {stream // cp} tokens of each context-parallel rank (stream "
                f"of {stream} / --context-parallel-size {cp}) to be a multiple of "
                f"--tensor-model-parallel-size {tp}; use a --seq-length that is a multiple of {multiple}."
            )


def check_schedule(args: Any) -> None:
    """Refuse learning rates that rise or fall for too long or too far, and --save that never comes.

    Raises:
        ValueError: see the messages.
    """
    for unit in ("iters", "samples"):
        warmup = getattr(args, f"lr_warmup_{unit}")
        total = getattr(args, f"lr_decay_{unit}") or getattr(args, f"train_{unit}")
        if warmup and total and warmup >= total:
            raise ValueError(
                f"--lr-warmup-{unit} {warmup} must be below --lr-decay-{unit} (or --train-{unit}) {total}; "
                "lower the one or raise the other."
            )
    fraction, first = args.lr_warmup_fraction, args.lr_warmup_init
    if fraction is not None and not 0 <= fraction < 1:
        raise ValueError(f"--lr-warmup-fraction {fraction} must be at least 0 and below 1.")
    for flag, rate in (("--lr-warmup-init", first), ("--min-lr", args.min_lr)):
        if rate and rate > args.lr:
            raise ValueError(f"{flag} {rate} is above --lr {args.lr}; lower the one or raise the other.")
    unit = "samples" if args.train_samples else "iters"
    if args.lr_decay_style == "WSD" and not args.skip_train and not getattr(args, f"lr_wsd_decay_{unit}"):
        raise ValueError(
            f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}, the length of the decay at the end."
        )
    if args.phase_transition_iterations and not args.train_samples:
        raise ValueError(
            "--phase-transition-iterations needs --train-samples; use it in place of --train-iters."
        )
    if args.save is not None and args.save_interval is None:
        raise ValueError(
            "--save needs --save-interval, the iterations between checkpoints; one as large as --train-iters "
            "saves at the end only."
        )


def check_documents(args: Any) -> None:
    """Refuse flags that would cut documents without the layers knowing of it.

    Raises:
        ValueError: see the message.
    """
    if args.reset_attention_mask and not packs_documents(args):
        raise ValueError(
            "--reset-attention-mask alone reaches no layer here: document borders go to every layer as "
            "lengths; use --dataloader-inter-document-masking (or --reset-position-ids) instead."
        )


def packs_documents(args: Any) -> bool:
    """Whether the documents of a microbatch are kept apart, one stream of them all."""
    return bool(args.dataloader_inter_document_masking or args.reset_position_ids)


def check_folder(flag: str, folder: str | None) -> None:
    """Refuse an output folder that cannot be made.

    Raises:
        ValueError: a file stands in its way, or its parent cannot be written to.
    """
    parent = folder and os.path.abspath(folder)
    while parent and not os.path.exists(parent):
        parent = os.path.dirname(parent)
    if parent and not (os.path.isdir(parent) and os.access(parent, os.W_OK)):
        raise ValueError(
            f"{flag} {folder} cannot be written: {parent} is no folder that this user may write to."
        )


def resolve_spec(names: list[str] | None) -> Callable:
    """The spec function that `--spec MODULE FUNCTION` names.

    The host would train its default model when the name does not resolve.

    Returns:
        The function; its `gdn_cp_mode` attribute says how GDN uses context parallelism.

    Raises:
        ValueError: missing, not found, or no spec of this project.
    """
    module_name, function_name = names if names and len(names) == 2 else (None, None)
    function = None
    if module_name:
        try:
            function = getattr(importlib.import_module(module_name), function_name, None)
        except ModuleNotFoundError as error:
            # A module that exists but lacks one of its own imports is another fault: let it speak.
            if not f"{module_name}.".startswith(f"{error.name}."):
                raise
    if not callable(function) or not hasattr(function, "gdn_cp_mode"):
        got = f"--spec {' '.join(names)} names no layer spec" if names else "--spec is missing"
        raise ValueError(f"{got}; use --spec {_SPEC_MODULE} with one of {', '.join(_spec_names())}.")
    return function


def _spec_names() -> list[str]:
    return [name for name in dir(importlib.import_module(_SPEC_MODULE)) if name.startswith("get_qwen35_")]
