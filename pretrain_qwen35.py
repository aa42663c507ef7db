"""Pretrain a Qwen3.5 model with context parallelism; Megatron's flags work, or are refused by name.

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
import json
import logging
import os
import time
import traceback

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

from megatron_gdn import arguments, data_checks, flag_checks, validation
from megatron_gdn.checkpoint.huggingface import into_model
from megatron_gdn.checkpoint.repairs import repair_optimizer_checkpoints
from megatron_gdn.config import Qwen35Config
from megatron_gdn.microbatch import Microbatch, cut_microbatch
from megatron_gdn.model import Qwen35Model, build_model
from megatron_gdn.optimizer import fuse_optimizer_step
from megatron_gdn.prepare_data import check_dataset
from megatron_gdn.run_summary import describe, rule_backend
from megatron_gdn.self_test.cases import Setup
from megatron_gdn.self_test.runner import check_all_ranks
from megatron_gdn.tokenizer import build_tokenizer
from megatron_gdn.training_log import TrainingLog

DEVICE_TYPE = "cpu" if RUNS_ON_CPU else "cuda"
read_tokenizer = functools.cache(build_tokenizer)
add_arguments = functools.partial(arguments.add_arguments, runs_on_cpu=RUNS_ON_CPU)


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
    flag_checks.check_tokenizer(args)
    if args.use_checkpoint_args:
        args.use_tokenizer_model_from_checkpoint_args &= args.tokenizer is None
        load_args_from_checkpoint(args)
    flag_checks.check_unsupported(args)
    spec = validation.resolve_spec(args.spec)
    flag_checks.check_required(args)
    if args.from_hf is not None:
        into_model.check_source(args)
    flag_checks.check_positive(args)
    validation.check_schedule(args)
    validation.check_documents(args)
    flag_checks.check_recompute(args)
    flag_checks.check_optimizer(args)
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

    if args.save is None:  # where a NaN turns up the host would save and end, and fail for want of a folder
        args.rerun_mode = "disabled"
    # The host wants 2 x cp to divide the length whatever the layout; it does not ask about this name.
    args.encoder_seq_length, args.seq_length = args.seq_length, None
    validate_args(args)
    rule_backend(args, torch.device(DEVICE_TYPE))
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
        multiple = args.make_vocab_size_divisible_by if args.pad_vocab_size else 1
        padded = -(-args.vocab_size // multiple) * multiple
        if padded % args.tensor_model_parallel_size == 0:
            args.padded_vocab_size = padded
        elif not args.pad_vocab_size:
            raise ValueError(
                f"--no-pad-vocab-size with --vocab-size {padded}, which --tensor-model-parallel-size "
                f"{args.tensor_model_parallel_size} does not divide; leave it out, or use another vocabulary."
            )


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
        flags = arguments.machine_flags(RUNS_ON_CPU)
        if flags:
            lacks = "GPU" if RUNS_ON_CPU else "Transformer Engine"
            print(f"no {lacks} found; set for you unless given: {' '.join(flags)}")
        device, resumes = torch.device(DEVICE_TYPE), checkpoint_exists(args.load)
        text = describe(args, spec.gdn_cp_mode, container.model.transformer, device, resumes)
        print(text, flush=True)
    if RUNS_ON_CPU:
        training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)
        cpu.fork_checkpoint_writer()
        # Warms up compiled functions, of which there are none here, and would move the random state.
        training.set_jit_fusion_options = lambda tp_size=None: None
    if args.self_test and not RUNS_ON_CPU:
        check_kernels_at_start(args, spec.gdn_cp_mode, container.model.transformer)
    repair_optimizer_checkpoints()
    fuse_optimizer_step()
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
