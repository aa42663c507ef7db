"""A whole small model on any parallel sizes, and its gradients, tensor by tensor, in the host's own sharding.

What a rank holds of a tensor is read from the model's `sharded_state_dict`, which knows tensor, expert and
replicated parameters alike. So one table of whole tensors starts every run, and every gradient on every
rank has its place in the one-rank gradient of the same name.
"""

import functools
from types import SimpleNamespace
from typing import NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import import_module
from torch import Tensor

import pretrain_qwen35
from megatron_gdn.config import Qwen35Config
from megatron_gdn.microbatch import cut_microbatch
from megatron_gdn.model import build_model
from tests.helpers.cases import FP32_SHARDED, PACKINGS
from tests.helpers.compare import assert_close

VOCAB = 96
CPU = torch.device("cpu")
SPECS = {mode: f"get_qwen35_{mode}_cp_spec" for mode in ("headwise", "chunkwise")}
DENSE_MODEL = {
    "num_moe_experts": None,
    "moe_ffn_hidden_size": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
}


class Shard(NamedTuple):
    """This rank's part of one whole tensor."""

    key: str
    """Name of the whole tensor in a checkpoint."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    place: tuple[slice, ...]
    """Where the part lies in it."""
    data: Tensor
    """The part, a view of the parameter or of its gradient."""


def small_fields(groups) -> dict:
    """Fields of a `TransformerConfig` that fit these groups and leave one layer of each kind."""
    return {
        "num_layers": 2,
        "linear_attention_freq": [1, 0],
        "hidden_size": 64,
        "num_moe_experts": 4,
        "tensor_model_parallel_size": groups.tp.size(),
        "pipeline_model_parallel_size": groups.pp.size(),
        "context_parallel_size": groups.cp.size(),
        "expert_model_parallel_size": groups.ep.size(),
        "expert_tensor_parallel_size": groups.expt_tp.size(),
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "gradient_accumulation_fusion": False,
        # Experts accept tensor parallelism with sequence parallelism only.
        "sequence_parallel": groups.tp.size() > 1,
    }


def make_model(
    groups,
    mode: str,
    state: dict[str, Tensor] | None = None,
    *,
    tied: bool = False,
    vp_stage: int | None = None,
    distributed_optimizer: bool = False,
    **overrides,
):
    """The model as `--spec` names it, in the host's gradient buffers.

    Args:
        groups: process groups.
        mode: of GDN context parallelism.
        state: whole tensors by checkpoint key; random if None.
        tied: the output layer shares the embedding's weight.
        vp_stage: virtual pipeline stage to build.
        distributed_optimizer: lay the buffers out for the host's distributed optimizer.
        **overrides: fields of the config.
    """
    ours = {"cp_comm_type": "p2p", "transformer_impl": "local"}
    config = Qwen35Config.from_size("debug", **small_fields(groups) | ours | overrides)
    whole = SimpleNamespace(
        transformer=config,
        transformer_layer_spec=import_module(("megatron_gdn.layer_specs", SPECS[mode])),
        vocab_size=VOCAB,
        seq_length=128,
        fp16_lm_cross_entropy=False,
        parallel_output=True,
        share_embeddings_and_output_weights=tied,
    )
    model = build_model(whole, groups, vp_stage=vp_stage)
    model_parallel_cuda_manual_seed(
        1
    )  # asked for by sequence parallelism; nothing here is random after _start
    if state is None:
        randomize(model)
    else:
        for shard in shards(model):
            shard.data.copy_(state[shard.key][shard.place])
    buffers = DistributedDataParallelConfig(use_distributed_optimizer=distributed_optimizer)
    return DistributedDataParallel(config, buffers, model, pg_collection=groups)


def randomize(model) -> None:
    """Random parameters; routers far from ties, so that rounding sends no token to another expert; and long
    memories, since states that fade within tokens would hide one that is not passed on."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-5, 0)
            else:
                parameter.normal_(std=1.0 if "router" in name or "embedding" in name else 0.05)


def make_samples(packing: str) -> list[dict[str, Tensor]]:
    """Two microbatches with the documents of a case; more labels count the later they stand,
    so that ranks differ in how many they hold."""
    case, random = PACKINGS[packing], torch.Generator().manual_seed(7)
    shape = (case.batch, case.seq_len)
    samples = []
    for _ in range(2):
        tokens = torch.randint(VOCAB, (case.batch, case.seq_len + 1), generator=random)
        counts = torch.rand(shape, generator=random) < torch.linspace(0.2, 1, case.seq_len) ** 3
        counts[:, 0] = True  # a label that is no target, so the two are not equally many
        samples.append(
            {
                "tokens": tokens[:, :-1],
                "labels": tokens[:, 1:],
                "loss_mask": counts.float(),
                "position_ids": case.positions,
            }
        )
    return samples


def cut(sample: dict[str, Tensor], config, cp_group, packed: bool):
    """This rank's part of a sample."""
    return cut_microbatch(
        sample,
        packed=packed,
        layout=config.cp_layout,
        cp_size=cp_group.size(),
        cp_rank=cp_group.rank(),
        device=CPU,
        mtp_num_layers=config.mtp_num_layers or 0,
    )


def logits_of(model, cp_group, sample: dict[str, Tensor], packed: bool) -> Tensor:
    """This rank's logits, [B, s, VOCAB], without gradients, as in evaluation."""
    part = cut(sample, model.config, cp_group, packed)
    with torch.no_grad():
        return model(part.tokens, part.position_ids, None, packed_seq_params=part.params)


def train_step(
    model, groups, samples: list[dict[str, Tensor]], packed: bool, cp_group=None, two_values=False
) -> Tensor:
    """Forward, backward and the host's reduction of gradients, by its schedule and the script's loss.

    Args:
        model: from `make_model`; its `main_grad`s are then what an optimizer would read.
        groups: process groups; data-parallel ranks share the samples out.
        samples: microbatches of all data-parallel ranks.
        packed: keep documents apart.
        cp_group: ranks that share a stream in this step, if not those of the model.
        two_values: a loss function that gives the host (loss, report), the host's older form.

    Returns:
        Mean loss over all labels.
    """
    config = model.config
    per_token = config.calculate_per_token_loss
    pretrain_qwen35.get_args = lambda: SimpleNamespace(calculate_per_token_loss=per_token)
    config.finalize_model_grads_func = finalize_model_grads
    model.zero_grad_buffer()

    def loss_func(part, losses):
        loss, tokens, report = pretrain_qwen35.loss_func(part, losses)
        return (loss / tokens / groups.cp.size(), report) if two_values else (loss, tokens, report)

    def forward_step(data, model):
        part = cut(next(data), config, cp_group or groups.cp, packed)
        part.params.cp_group = cp_group
        extra = {"labels": part.labels, "loss_mask": part.loss_mask, "packed_seq_params": part.params}
        output = model(part.tokens, part.position_ids, None, **extra)
        return output, functools.partial(loss_func, part)

    mine = samples[groups.dp.rank() :: groups.dp.size()]
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(mine),
        model=model,
        num_microbatches=len(mine),
        seq_length=samples[0]["tokens"].shape[1],
        micro_batch_size=1,
        forward_only=False,
    )
    total = torch.stack([report["lm loss"] for report in reports]).sum(0)
    torch.distributed.all_reduce(total, group=groups.dp_cp)
    return total[0] / total[1]


def shards(model, grads: bool = False) -> list[Shard]:
    """This rank's parameters, or the gradients in their buffers, as parts of whole tensors."""
    module = getattr(model, "module", model)
    parameters = list(module.parameters())
    kept = [parameter.data for parameter in parameters]
    if grads:
        for parameter in parameters:
            parameter.data = parameter.main_grad
    state = module.sharded_state_dict(metadata={"dp_cp_group": module.pg_collection.dp_cp})
    apply_factories(state)
    found = [_shard(entry) for entry in nested_values(state) if isinstance(entry, ShardedTensor)]
    for parameter, data in zip(parameters, kept, strict=True):
        parameter.data = data
    return found


def _shard(entry: ShardedTensor) -> Shard:
    # detach() makes a tensor of its own, so that it stays when a parameter is given other data.
    data = entry.data.detach().view(entry.prepend_axis_num * (1,) + entry.local_shape)
    sizes = zip(entry.global_offset, data.shape, strict=True)
    place = tuple(slice(start, start + size) for start, size in sizes)
    return Shard(entry.key, entry.global_shape, place, data)


def whole_tensors(model, grads: bool = False) -> dict[str, Tensor]:
    """Every tensor of a model on one rank, a copy, by checkpoint key."""
    whole = {}
    for shard in shards(model, grads):
        whole.setdefault(shard.key, shard.data.new_empty(shard.shape))[shard.place] = shard.data
    return whole


def check_grads(where: str, model, want: dict[str, Tensor]) -> None:
    """Compare this rank's gradients with the whole ones, and all norms over the ranks.

    The norms are those by which the host's optimizer clips: of every tensor it must count each element once,
    which it does if every parameter says truly which ranks hold copies or other parts of it.
    """
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3), [model])
    optimizer.prepare_grads()
    counted = [each.get_grads_for_grad_norm() for each in optimizer.chained_optimizers]
    sums = torch.zeros(len(counted), 2, len(want), dtype=torch.float64)  # squares and elements
    numbers = {key: number for number, key in enumerate(want)}
    for shard in shards(model, grads=True):
        whole = want[shard.key].clone()
        whole[shard.place] = shard.data
        assert_close(f"{where} d {shard.key} {shard.place}", whole, want[shard.key], FP32_SHARDED)
        for grads, (squares, elements) in zip(counted, sums, strict=True):
            if any(_is_part(shard.data, grad) for grad in grads):
                squares[numbers[shard.key]] += shard.data.double().square().sum()
                elements[numbers[shard.key]] += shard.data.numel()
    for each, part in zip(optimizer.chained_optimizers, sums, strict=True):
        torch.distributed.all_reduce(part, group=each.get_grad_stats_parallel_group())
    squares, elements = sums.sum(0)
    for key, square, count in zip(want, squares, elements, strict=True):
        assert count == want[key].numel(), f"{where}: the norm counts {int(count)} elements of {key}"
        assert_close(f"{where} norm of d {key}", square.sqrt(), want[key].double().norm(), FP32_SHARDED)
    norm = torch.tensor(optimizer.get_grad_norm(), dtype=torch.float64)
    assert_close(f"{where} norm of all", norm, squares.sum().sqrt(), FP32_SHARDED)
    optimizer.zero_grad()  # it made the buffers the parameters' own grad, which the next backward adds to


def _is_part(part: Tensor, whole: Tensor) -> bool:
    """Whether one tensor is a view of memory that belongs to the other."""
    return whole.data_ptr() <= part.data_ptr() < whole.data_ptr() + whole.nbytes
