"""Pretrain a Qwen3.5 model with context parallelism; every Megatron flag works.

torchrun --nproc-per-node 2 pretrain_qwen35.py --qwen35-size debug \
    --spec megatron_gdn.layer_specs get_qwen35_headwise_cp_spec \
    --context-parallel-size 2 --cp-comm-type all_gather --cp-layout zigzag \
    --data-path PREFIX --tokenizer byte \
    --seq-length 512 --micro-batch-size 1 --train-iters 100 --lr 1e-3
"""
# Two things must come before other imports: the version check and the CPU stand-ins.
# ruff: noqa: E402, UP036

import sys

if sys.version_info < (3, 12):
    sys.exit(
        f"error: Python {sys.version.split()[0]} is too old, megatron-core 0.19 needs 3.12 or newer; run "
        "with python3.12, or set PYTHON for the example scripts."
    )

import argparse
import functools
import importlib.util
import json
import logging
import os
import time
import traceback
from pathlib import Path

# The host asks for it with tensor or context parallelism on GPUs; read when CUDA starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

from megatron_gdn import cpu

RUNS_ON_CPU = cpu.enable()

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.training import get_args, get_timers, get_tokenizer, training
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_args, validate_args
from megatron.training.checkpointing import checkpoint_exists, load_args_from_checkpoint
from megatron.training.global_vars import set_global_variables
from megatron.training.models.gpt import GPTModelBuilder, GPTModelConfig
from megatron.training.utils import get_blend_and_blend_per_split
from torch import Tensor

from megatron_gdn import data_checks, validation
from megatron_gdn.checkpoint.huggingface import into_model
from megatron_gdn.checkpoint.repairs import repair_optimizer_checkpoints
from megatron_gdn.config import SIZES, Qwen35Config, count_parameters, model_arguments, size_arguments
from megatron_gdn.cp_layout import CP_LAYOUTS
from megatron_gdn.microbatch import Microbatch, cut_microbatch
from megatron_gdn.model import Qwen35Model, build_model
from megatron_gdn.ops import attention, gated_delta_rule
from megatron_gdn.prepare_data import check_dataset
from megatron_gdn.self_test.cases import Setup
from megatron_gdn.self_test.runner import check_all_ranks
from megatron_gdn.tokenizer import build_tokenizer
from megatron_gdn.training_log import TrainingLog

DEVICE_TYPE = "cpu" if RUNS_ON_CPU else "cuda"
read_tokenizer = functools.cache(build_tokenizer)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
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
    for arguments in machine_flags().values():
        parser.set_defaults(**arguments)
    if known.from_hf is not None:
        parser.set_defaults(**model_arguments(into_model.model_of(Path(known.from_hf))))
    elif known.qwen35_size in SIZES:
        parser.set_defaults(**size_arguments(known.qwen35_size))
    return parser


def _refuse_flags(message: str) -> None:
    raise ValueError(f"{message} (--help lists every flag)")


def machine_flags() -> dict[str, dict]:
    """Flags set for the user because of what this machine lacks, and the arguments they stand for."""
    flags = {}
    if RUNS_ON_CPU:
        flags["--distributed-backend gloo"] = {"distributed_backend": "gloo"}
    if RUNS_ON_CPU or importlib.util.find_spec("transformer_engine") is None:
        flags |= {
            "--transformer-impl local": {"transformer_impl": "local"},
            "--no-persist-layer-norm": {"no_persist_layer_norm": True},
            "--no-gradient-accumulation-fusion": {"gradient_accumulation_fusion": False},
        }
    return flags


def starts_from_hf(args: argparse.Namespace) -> bool:
    """Whether the weights are those of --from-hf: a checkpoint in --load would be further on."""
    return args.from_hf is not None and not checkpoint_exists(args.load)


class ModelBuilder(GPTModelBuilder):
    """Builds our model where the host's builder would build its own."""

    def build_model(self, *places, **options) -> Qwen35Model:
        """One pipeline stage, with the weights of --from-hf unless --load has some."""
        model = build_model(self._model_config, *places, **options)
        if starts_from_hf(get_args()):
            into_model.load_weights(model, into_model.source_of(get_args()))
        return model


class ModelConfig(GPTModelConfig):
    """The host's, which names its builder by a path to import."""

    builder = f"{__name__}.ModelBuilder"


def prepare():
    """Read the flags, refuse what cannot work, build every configuration. No collective happens here.

    Returns:
        The host's configuration container, and the function that makes the layer spec.

    Raises:
        ValueError: a flag, a size or a file that cannot be used.
    """
    args = parse_args(add_arguments)
    if args.logging_level is None:  # by itself the host tells of every parameter and every index file
        for part in ("datasets", "distributed", "optimizer", "optimizer_param_scheduler"):
            logging.getLogger(f"megatron.core.{part}").setLevel(logging.WARNING)
    validation.check_unsupported(args)
    if args.use_checkpoint_args:
        load_args_from_checkpoint(args)
    spec = validation.resolve_spec(args.spec)
    validation.check_required(args)
    if args.from_hf is not None:
        into_model.check_source(args)
    validation.check_positive(args)
    validation.check_schedule(args)
    validation.check_documents(args)
    validation.check_recompute(args)
    validation.check_parallel_sizes(args, spec.gdn_cp_mode)
    validation.check_lengths(
        args,
        seq_length=args.seq_length,
        micro_batch_sizes={args.micro_batch_size, args.eval_micro_batch_size or args.micro_batch_size},
        packed=validation.packs_documents(args),
    )
    validation.check_folder("--save", args.save)
    validation.check_folder("--tensorboard-dir", args.tensorboard_dir)
    _choose_tokenizer(args)
    if not args.mock_data:
        # A tokenizer of the host brings its own vocabulary, which the host knows only later.
        vocab_size = sys.maxsize if args.tokenizer is None else args.vocab_size
        if args.data_path is not None and args.split is None:
            args.split = "969, 30, 1"  # the host's own default, which it would set later
        prefixes = _data_prefixes(args)
        data_checks.check_data(prefixes, check_dataset, vocab_size, args.split)
        data_checks.check_evaluation(args.split, args.eval_iters, len(prefixes))

    # The host wants 2 x cp to divide the length whatever the layout; it does not ask about this name.
    args.encoder_seq_length, args.seq_length = args.seq_length, None
    validate_args(args)
    rule_backend(args)
    set_global_variables(args)
    transformer = core_transformer_config_from_args(args, Qwen35Config)
    # A packed microbatch is one long row, not the rows that pipeline stages otherwise expect.
    samples = max(args.micro_batch_size, args.eval_micro_batch_size or 0)
    transformer.variable_seq_lengths = validation.packs_documents(args) and samples > 1
    model = gpt_config_from_args(args, transformer, ModelConfig)
    return pretrain_cfg_container_from_args(args, model), spec


def _choose_tokenizer(args: argparse.Namespace) -> None:
    """Let the host build a stand-in that knows the vocabulary; the data set gets the real tokenizer."""
    if args.tokenizer is None:
        if args.tokenizer_type is None:
            raise ValueError("--tokenizer is missing; pass 'byte', a tokenizer folder, or --tokenizer-type.")
        return
    tokenizer = read_tokenizer(args.tokenizer)
    data_checks.check_vocabulary(args.tokenizer, tokenizer.vocab_size, args.vocab_size)
    args.tokenizer_type = "NullTokenizer"
    args.null_tokenizer_eod_id = tokenizer.eod
    if args.padded_vocab_size is None:
        # The host pads to a multiple of 128 x tp, which changes the model with tp; 128 is often enough.
        padded = -(-args.vocab_size // args.make_vocab_size_divisible_by) * args.make_vocab_size_divisible_by
        if padded % args.tensor_model_parallel_size == 0:
            args.padded_vocab_size = padded


def _data_prefixes(args: argparse.Namespace) -> list[str]:
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    blends = [blend, *(blend_per_split or ())]
    return [prefix for each in blends if each is not None for prefix in each[0]]


def build_datasets(num_samples: list[int], vp_stage: int | None = None):
    """Training, validation and test data, built on every rank, so that no rank has to send samples."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path) as file:
            sequences = json.load(file)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        object_storage_cache_path=args.object_storage_cache_path,
        sequences_per_dataset=sequences,
        tokenizer=get_tokenizer() if args.tokenizer is None else read_tokenizer(args.tokenizer),
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
        inter_document_masking=args.dataloader_inter_document_masking,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, num_samples, lambda: True, config).build()


build_datasets.is_distributed = True


def forward_step(data_iterator, model):
    """One microbatch through one model chunk: its output, and the loss function for it."""
    args, timers = get_args(), get_timers()
    timers("batch-generator", log_level=2).start()
    microbatch = cut_microbatch(
        next(data_iterator),
        packed=validation.packs_documents(args),
        layout=args.cp_layout,
        cp_size=mpu.get_context_parallel_world_size(),
        cp_rank=mpu.get_context_parallel_rank(),
        device=torch.device(DEVICE_TYPE, None if RUNS_ON_CPU else torch.cuda.current_device()),
        mtp_num_layers=args.mtp_num_layers or 0,
    )
    timers("batch-generator").stop()
    output = model(
        microbatch.tokens,
        microbatch.position_ids,
        None,
        labels=microbatch.labels,
        loss_mask=microbatch.loss_mask,
        packed_seq_params=microbatch.params,
    )
    return output, functools.partial(loss_func, microbatch)


def loss_func(microbatch: Microbatch, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss of this rank's tokens, so scaled that ranks with different numbers of masked tokens add up.

    The host divides the first value by the second and averages over data- and context-parallel ranks.
    Dividing by this rank's own tokens would weigh tokens by their rank, so the second is that of the
    whole stream, and the first is multiplied by the ranks that the average divides by. With
    --calculate-per-token-loss the host sums both over all ranks instead.

    Args:
        microbatch: this rank's part.
        losses: loss per token, [B, s].

    Returns:
        Loss to differentiate, tokens to divide by, and (loss sum, tokens) of this rank for the log.
    """
    total = (losses.float() * microbatch.loss_mask).sum()
    local = torch.full((1,), microbatch.num_tokens_local, dtype=torch.float32, device=total.device)
    report = {"lm loss": torch.cat([total.detach().view(1), local])}
    if get_args().calculate_per_token_loss:
        return total, local[0].int(), report
    whole = torch.full((), microbatch.num_tokens, dtype=torch.int, device=total.device)
    return total * microbatch.params.plan.cp_size, whole, report


def rule_backend(args: argparse.Namespace) -> gated_delta_rule.Backend:
    """The kernel of the gated delta rule; a ValueError if the one asked for cannot run here."""
    head_dims = (args.linear_key_head_dim, args.linear_value_head_dim)
    device = torch.device(DEVICE_TYPE)
    return gated_delta_rule.choose_backend(device, args.params_dtype, head_dims, args.gdn_backend)


def describe(args: argparse.Namespace, mode: str, config: Qwen35Config) -> str:
    """The block that says what is going to run."""
    total, active = count_parameters(
        config, args.padded_vocab_size, not args.untie_embeddings_and_output_weights
    )
    device = torch.device(DEVICE_TYPE)
    rule = rule_backend(args)
    core_attention = attention.backend_name(device, args.params_dtype, args.kv_channels)
    name = f"Qwen3.5 {args.qwen35_size}" if args.from_hf is None else Path(args.from_hf).name
    rows = {
        "model": f"{name}, {total:,} parameters, {active:,} active per token",
        "weights": _weights(args),
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
        "tokens per step": f"{args.global_batch_size * args.seq_length:,}",
    }
    width = max(map(len, rows))
    return "\n".join(["", *(f"  {name:<{width}}  {value}" for name, value in rows.items()), ""])


def _weights(args: argparse.Namespace) -> str:
    """Where they come from."""
    if checkpoint_exists(args.load):
        return f"the checkpoint in {args.load}" + (f", not {args.from_hf}" if args.from_hf else "")
    if args.from_hf is None:
        return "random" if args.pretrained_checkpoint is None else str(args.pretrained_checkpoint)
    left_out = not args.mtp_num_layers and any(
        name.startswith("mtp.") for name in into_model.source_of(args).folder.tensors
    )
    return args.from_hf + (" without its multi-token prediction (--mtp-num-layers 1)" if left_out else "")


def refuse(error: BaseException) -> None:
    """End this rank with one line that says what is wrong.

    Every rank refuses, but one per node speaks: the others wait for torchrun to end them, and speak
    only if it does not.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)
    message = " ".join(str(error).split())
    if not message:  # an assertion of the host without words: show what it asserts
        message = "Megatron refuses: " + (traceback.extract_tb(error.__traceback__)[-1].line or repr(error))
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(1)


def check_kernels_at_start(args: argparse.Namespace, mode: str, config: Qwen35Config) -> None:
    """Have the host's start end with the self-test: on each rank's own GPU, before the model is built.

    A failure ends all ranks with one message. On a CPU there is nothing to test: torch's own kernels run.
    """
    start = training.initialize_megatron

    @functools.wraps(start)
    def start_and_test(*places, **options):
        started = start(*places, **options)
        device = torch.device(DEVICE_TYPE, None if RUNS_ON_CPU else torch.cuda.current_device())
        setup = Setup.of(config, device, mode, validation.packs_documents(args))
        try:
            say = print if args.rank == 0 else lambda line: None
            check_all_ranks(setup, torch.distributed.group.WORLD, say)
        except RuntimeError as error:
            refuse(error)
        return started

    training.initialize_megatron = start_and_test


def main() -> None:
    """Check everything, say what will run, train, draw the loss."""
    cpu.skip_helper_compilation()
    try:
        container, spec = prepare()
    except (ValueError, AssertionError, NotImplementedError, OSError, RuntimeError) as error:
        refuse(error)
    args = get_args()
    if args.rank == 0:
        if machine_flags():
            lacks = "GPU" if RUNS_ON_CPU else "Transformer Engine"
            print(f"no {lacks} found; set for you unless given: {' '.join(machine_flags())}")
        print(describe(args, spec.gdn_cp_mode, container.model.transformer), flush=True)
    if RUNS_ON_CPU:
        training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)
        cpu.fork_checkpoint_writer()
        # Warms up compiled functions, of which there are none here, and would move the random state.
        training.set_jit_fusion_options = lambda tp_size=None: None
    if args.self_test and not RUNS_ON_CPU:
        check_kernels_at_start(args, spec.gdn_cp_mode, container.model.transformer)
    repair_optimizer_checkpoints()
    log = None
    if args.rank == args.world_size - 1:  # the one that knows the loss, on the last pipeline stage
        log = TrainingLog(args.save or args.tensorboard_dir, args.seq_length)
        log.watch(training, args)
    try:
        training.pretrain(container, build_datasets, ModelType.encoder_or_decoder, forward_step)
    finally:
        picture = log and log.finish()
        if picture:
            print(f"loss curve: {picture}", flush=True)


if __name__ == "__main__":
    main()
