"""Pipeline stages built on the meta device by one process that stands for any rank of any world.

Nothing is allocated and nothing is sent: the process groups are torch's fake ones. Run these in a process
of their own (`run_ranks(..., 1)`), since they take the place of its process group.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_gdn.gated_delta_net import GatedDeltaNet
from megatron_gdn.model import Qwen35Model, build_model


class Layer(NamedTuple):
    """A decoder layer that was built."""

    number: int
    """1-based, in the whole model."""
    is_gdn: bool
    is_moe: bool


@contextmanager
def standing_for(rank: int, world_size: int, config: TransformerConfig) -> Iterator[ProcessGroupCollection]:
    """The groups of `rank` among `world_size`, with the parallel sizes of `config`; tensors go to meta."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    current_device = torch.cuda.current_device
    torch.cuda.current_device = lambda: torch.device("meta")
    try:
        parallel_state.initialize_model_parallel(
            config.tensor_model_parallel_size,
            config.pipeline_model_parallel_size,
            config.virtual_pipeline_model_parallel_size,
            context_parallel_size=config.context_parallel_size,
            expert_model_parallel_size=config.expert_model_parallel_size,
            expert_tensor_parallel_size=config.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        with torch.device("meta"):
            yield ProcessGroupCollection.use_mpu_process_groups()
    finally:
        torch.cuda.current_device = current_device
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build_chunks(model_config, groups: ProcessGroupCollection) -> list[Qwen35Model]:
    """The model chunks of a rank, one per virtual stage, as `pretrain_qwen35.ModelBuilder` makes them."""
    chunks = model_config.transformer.virtual_pipeline_model_parallel_size
    stages = range(chunks) if chunks else [None]
    return [build_model(model_config, groups, vp_stage=stage) for stage in stages]


def layers_of(chunk: Qwen35Model) -> list[Layer]:
    """What was built, from the modules themselves."""
    return [
        Layer(
            layer.layer_number, isinstance(layer.self_attention, GatedDeltaNet), hasattr(layer.mlp, "router")
        )
        for layer in chunk.decoder.layers
    ]


class Counts(NamedTuple):
    """Parameters of one rank, by who else has the same ones or other parts of the same."""

    dense: int
    """All but experts."""
    experts: int
    whole: int
    """Of the model, if every tensor- and expert-parallel rank has as many as this one."""


def count(chunks: Iterable[nn.Module], groups: ProcessGroupCollection) -> Counts:
    """Count the tensors that a rank holds, each once; a copy of the tied embedding is not counted."""
    dense = experts = whole = 0
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            size = parameter.numel()
            sharded = getattr(parameter, "tensor_model_parallel", False)
            if not getattr(parameter, "allreduce", True):
                experts += size
                whole += size * groups.ep.size() * (groups.expt_tp.size() if sharded else 1)
            elif name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
                dense += size
            else:
                dense += size
                whole += size * (groups.tp.size() if sharded else 1)
    return Counts(dense, experts, whole)
