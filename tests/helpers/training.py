"""A few training steps of a small model by the host's schedules and optimizers, many runs per process."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor

import pretrain_qwen35
from tests.helpers.model import VOCAB, Shard, cut, make_model, shards


class Settings(NamedTuple):
    """What a run is, apart from its process groups."""

    mode: str = "headwise"
    config: dict = {}
    """Fields of the config."""
    tied: bool = False
    virtual_stages: int = 1
    distributed_optimizer: bool = False
    packed: bool = False
    samples: int = 1
    """In a microbatch."""
    batch: int = 2
    """Samples in a step, of all data-parallel ranks together."""


class Run(NamedTuple):
    """What training did on one rank."""

    losses: list[float] | None
    """Mean over all labels in each step; None on pipeline stages that do not know it."""
    norms: list[float]
    """Gradient norm of each step, before clipping."""
    start: dict[str, Tensor]
    """Whole tensors; parts that other ranks hold are NaN."""
    end: list[Shard]
    """Shards of every chunk after the last step."""
    margin: float
    """Smallest difference between the scores of the last expert chosen and the first that was not."""

    @property
    def last(self) -> dict[str, Tensor]:
        """Whole tensors after the last step, NaN where this rank holds nothing."""
        return join(self.end)


def make_stream(packed: bool, samples: int, length: int) -> list[dict[str, Tensor]]:
    """Samples of one row. In each equally many labels count, but not in each half of it.

    Packed ones have documents of 1 to 12 tokens, whose last label does not count.
    """
    random, rows = torch.Generator().manual_seed(11), []
    for _ in range(samples):
        tokens = torch.randint(VOCAB, (1, length + 1), generator=random)
        mask = torch.ones(1, length)
        # The first and the last one always count, so a shifted mask has equally many in each sample as well.
        mask[:, 1 + torch.randperm(length - 2, generator=random)[: length // 4]] = 0
        positions = torch.arange(length)[None].clone()
        if packed:
            begin = 0
            while begin < length:
                size = int(torch.randint(1, 13, (), generator=random))
                positions[:, begin : begin + size] -= begin
                begin += size
                mask[:, begin - 1 : begin] = 0
        rows.append(
            {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask, "position_ids": positions}
        )
    return rows


@contextmanager
def smallest_margin() -> Iterator[Callable[[], float]]:
    """Watch every router; yields a function that tells how near to a tie any of them came."""
    routing, margins = TopKRouter.routing, [float("inf")]

    def watched(self, logits, *inputs, **options):
        best = logits.detach().topk(self.topk + 1).values
        margins.append((best[..., -2] - best[..., -1]).min().item())
        return routing(self, logits, *inputs, **options)

    TopKRouter.routing = watched
    try:
        yield lambda: min(margins)
    finally:
        TopKRouter.routing = routing


def train(
    groups,
    settings: Settings,
    stream: list[dict[str, Tensor]],
    optimizer: OptimizerConfig,
    state: dict[str, Tensor] | None = None,
) -> Run:
    """Train on every sample once.

    Args:
        groups: process groups.
        settings: of the run.
        stream: samples of one row; each step takes `settings.batch` of them, whatever the ranks.
        optimizer: its config.
        state: whole tensors to start from, by checkpoint key; random if None.
    """
    pretrain_qwen35.get_args = lambda: SimpleNamespace(calculate_per_token_loss=False)
    # Sums for the host's log, which the runs before left behind.
    MTPLossLoggingHelper.tracker.clear()
    get_moe_metrics_tracker().metrics.clear()  # its own clear() keeps the number of layers
    chunks = make_chunks(groups, settings, state)
    start = join(_parts(chunks))
    stepper = get_megatron_optimizer(optimizer, chunks, use_gloo_process_groups=False)
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = finalize_model_grads
        chunk.config.grad_scale_func = stepper.scale_loss
    losses, norms = [], []
    with smallest_margin() as margin:
        for first in range(0, len(stream), settings.batch):
            microbatches = _share(stream[first : first + settings.batch], settings.samples, groups.dp)
            for chunk in chunks:
                chunk.zero_grad_buffer()
            stepper.zero_grad()
            losses.append(_step(chunks, groups, settings, microbatches))
            _, norm, _ = stepper.step()
            norms.append(float(norm))
    known = None if losses[0] is None else losses
    return Run(known, norms, start, _parts(chunks), margin())


def _parts(chunks: list) -> list[Shard]:
    """This rank's part of every parameter, copied."""
    return [shard._replace(data=shard.data.clone()) for chunk in chunks for shard in shards(chunk)]


def make_chunks(groups, settings: Settings, state: dict[str, Tensor] | None) -> list:
    """The virtual stages of this rank."""
    options = {"distributed_optimizer": settings.distributed_optimizer, "tied": settings.tied}
    fields = {"deallocate_pipeline_outputs": True, "pipeline_dtype": torch.float32} | settings.config
    # A packed microbatch is one long row, not the rows that pipeline stages otherwise expect.
    fields["variable_seq_lengths"] = settings.packed and settings.samples > 1
    if settings.virtual_stages > 1:
        fields["virtual_pipeline_model_parallel_size"] = settings.virtual_stages
        stages = range(settings.virtual_stages)
    else:
        stages = [None]
    return [make_model(groups, settings.mode, state, vp_stage=s, **options, **fields) for s in stages]


def _share(batch: list[dict[str, Tensor]], samples: int, dp_group) -> list[dict[str, Tensor]]:
    """This data-parallel rank's microbatches of a step."""
    rows = [batch[i : i + samples] for i in range(0, len(batch), samples)]
    whole = [{name: torch.cat([row[name] for row in each]) for name in each[0]} for each in rows]
    return whole[dp_group.rank() :: dp_group.size()]


def _step(chunks: list, groups, settings: Settings, microbatches: list[dict[str, Tensor]]) -> float | None:
    """Forward and backward by the host's schedule; the mean loss on the last pipeline stage."""

    def forward_step(data, model):
        part = cut(next(data), chunks[0].config, groups.cp, settings.packed)
        output = model(
            part.tokens, part.position_ids, None, labels=part.labels, packed_seq_params=part.params
        )
        return output, functools.partial(pretrain_qwen35.loss_func, part)

    iterators = [iter(microbatches) for _ in chunks]
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(microbatches),
        seq_length=microbatches[0]["tokens"].shape[1],
        micro_batch_size=settings.samples,
        forward_only=False,
    )
    if not reports:
        return None
    total = torch.stack([report["lm loss"] for report in reports]).sum(0)
    torch.distributed.all_reduce(total, group=groups.dp_cp)
    return (total[0] / total[1]).item()


def join(parts: list[Shard]) -> dict[str, Tensor]:
    """Whole tensors of shards, NaN where there is none."""
    whole = {}
    for part in parts:
        whole.setdefault(part.key, torch.full(part.shape, float("nan")))[part.place] = part.data
    return whole
