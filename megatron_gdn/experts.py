"""The experts of an MoE layer as two weights, and the way of tokens to them, without TransformerEngine.

The host's local backend runs one expert after another, moves tokens with atomic additions, and waits for the
GPU to learn how many tokens each expert has.
"""

from collections.abc import Iterator

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.layers import (
    _initialize_affine_weight_cpu,
    _initialize_affine_weight_gpu,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_object_for_checkpoint,
)
from torch import Tensor, nn

from megatron_gdn.ops.grouped_gemm import grouped_linear
from megatron_gdn.ops.swiglu import weighted_swiglu


class GroupedLinear(nn.Module):
    """One linear map for each expert of this rank.

    Attributes:
        weight: [experts, out, in]. Out is cut over the expert-tensor-parallel ranks, or in (`parallel_dim`).
            A rank's gradient is whole for its own experts, so with expert parallelism the host's data
            parallelism sums it over the expert-data-parallel ranks only (`allreduce` False).
    """

    def __init__(self, num_experts: int, in_size: int, out_size: int, parallel_dim: int, stride: int, config):
        super().__init__()
        self.sizes = (out_size, in_size)
        self.parallel_dim, self.stride = parallel_dim, stride
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(
            torch.empty(num_experts, out_size, in_size, dtype=config.params_dtype, device=device)
        )
        set_tensor_model_parallel_attributes(self.weight, True, 1 + parallel_dim, stride)
        etp, tp = config.expert_tensor_parallel_size, config.tensor_model_parallel_size
        self.weight.allreduce = config.expert_model_parallel_size == 1 and etp == tp
        self._register_load_state_dict_pre_hook(_without_extra_state)

    def initialize(self, expert: int, init_method, config, tp_rank: int, tp_size: int) -> None:
        """Start one expert's weight with the random numbers that the host would give it."""
        weight = self.weight.detach()[expert]
        if not config.use_cpu_initialization:
            _initialize_affine_weight_gpu(weight, init_method, self.parallel_dim, self.stride, is_expert=True)
            return
        whole = [size * (tp_size if dim == self.parallel_dim else 1) for dim, size in enumerate(self.sizes)]
        _initialize_affine_weight_cpu(
            weight,
            *whole,
            self.sizes[self.parallel_dim],
            self.parallel_dim,
            init_method,
            stride=self.stride,
            params_dtype=config.params_dtype,
            rank=tp_rank,
            world_size=tp_size,
        )

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """[T, in], sorted by expert, to [T, out]; `ends` as in `grouped_linear`."""
        return grouped_linear(x, self.weight, ends)

    def get_extra_state(self) -> None:
        """Nothing; the host's linears keep such an entry for TransformerEngine and ask checkpoints for it."""

    def set_extra_state(self, state: object) -> None:
        """Nothing to do with it."""


def _without_extra_state(state_dict: dict, prefix: str, *_) -> None:
    state_dict.setdefault(f"{prefix}_extra_state")


class GroupedMLP(MegatronModule):
    """SwiGLU experts: fc2(silu(gate) * up * p) with [gate, up] = fc1(x), p the router's weight of the token.

    Takes the place of the host's `SequentialMLP`, gives the same, starts from the same random weights, and
    has the same checkpoint keys, one shard for each expert.
    """

    def __init__(self, num_local_experts: int, config, pg_collection=None, name: str | None = None):
        """Build the experts of this rank.

        Args:
            num_local_experts: experts of this rank.
            config: TransformerConfig.
            pg_collection: process groups; `ep`, `expt_tp` and `expt_dp` are used.
            name: of the module; not used.

        Raises:
            ValueError: the experts are no SwiGLU, or have biases.
        """
        super().__init__(config=config)
        _check(config)
        self.num_local_experts = num_local_experts
        self.ep_group, self.tp_group = pg_collection.ep, pg_collection.expt_tp
        self.dp_group = pg_collection.expt_dp
        tp_size, tp_rank = self.tp_group.size(), self.tp_group.rank()
        ffn, hidden = config.moe_ffn_hidden_size // tp_size, config.hidden_size
        self.linear_fc1 = GroupedLinear(num_local_experts, hidden, 2 * ffn, 0, 2, config)
        self.linear_fc2 = GroupedLinear(num_local_experts, ffn, hidden, 1, 1, config)
        if config.perform_initialization:
            for expert in range(num_local_experts):
                self.linear_fc1.initialize(expert, config.init_method, config, tp_rank, tp_size)
                self.linear_fc2.initialize(expert, config.output_layer_init_method, config, tp_rank, tp_size)
        selective = config.recompute_granularity == "selective"
        self.recompute_activation = selective and "moe_act" in config.recompute_modules
        self._register_load_state_dict_pre_hook(self._stack_experts)

    def forward(self, x: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Run every expert of this rank on its tokens.

        Args:
            x: [T, hidden], sorted by expert.
            tokens_per_expert: [local experts], integers, on any device. Its sum is T.
            probs: the router's weight of each row of x, [T], fp32.

        Returns:
            [T, hidden], a partial sum over the expert-tensor-parallel ranks; and no bias.
        """
        if tokens_per_expert.device != x.device:  # some of the host's dispatchers count on the CPU
            tokens_per_expert = tokens_per_expert.to(x.device, non_blocking=True)
        ends = tokens_per_expert.cumsum(0, dtype=torch.int32)
        hidden = self.linear_fc1(x, ends)
        if not (self.recompute_activation and self.training):
            return self.linear_fc2(weighted_swiglu(hidden, probs), ends), None
        checkpoint = CheckpointWithoutOutput(fp8=None)  # False would count as fp8
        output = self.linear_fc2(checkpoint.checkpoint(weighted_swiglu, hidden, probs), ends)
        checkpoint.discard_output_and_register_recompute(output)
        return output, None

    def backward_dw(self) -> None:
        """Nothing: weight gradients come with the backward pass, as in the host's local linears."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None):
        """Each expert's weights as the host's `SequentialMLP` stores them.

        Source of the format: megatron-core 0.19.2, `SequentialMLP.sharded_state_dict` and, for the two halves
        of fc1, `apply_swiglu_sharded_factory`.
        """
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        if metadata.get("singleton_local_shards"):
            raise NotImplementedError("experts are not stored under one key each (singleton_local_shards).")
        first = self.ep_group.rank() * self.num_local_experts
        total = self.ep_group.size() * self.num_local_experts
        axis = len(sharded_offsets)
        offsets = [(*sharded_offsets, (axis, first + i, total)) for i in range(self.num_local_experts)]
        replica_id = (0, 0, self.dp_group.rank())
        state = {}
        for name in ("linear_fc1", "linear_fc2"):
            linear, key = getattr(self, name), f"{prefix}experts.{name}."
            state[f"{prefix}{name}.weight"] = self._weight_shards(
                linear, f"{key}weight", offsets, axis + 1, replica_id
            )
            replica = (0, self.tp_group.rank(), self.dp_group.rank())
            state[f"{prefix}{name}._extra_state"] = [
                make_sharded_object_for_checkpoint(None, f"{key}_extra_state", offset, replica)
                for offset in offsets
            ]
        return state

    def _weight_shards(self, linear: GroupedLinear, key: str, offsets, prepended: int, replica_id):
        """A weight that is cut into one shard, or `stride` of them, for each expert when it is stored."""
        rank, size, stride = self.tp_group.rank(), self.tp_group.size(), linear.stride
        dim = linear.parallel_dim

        def parts(weight: Tensor) -> Iterator[tuple[int, int, Tensor]]:
            for expert, matrix in enumerate(weight):
                for i, part in enumerate(matrix.chunk(stride, dim)):
                    yield expert, i, part

        @torch.no_grad()
        def build(key: str, weight: Tensor, replica_id, flattened_range) -> list[ShardedTensor]:
            return [
                ShardedTensor.from_rank_offsets(
                    key,
                    part,
                    *offsets[expert],
                    (prepended + dim, i * size + rank, stride * size),
                    replica_id=replica_id,
                    prepend_axis_num=prepended,
                )
                for expert, i, part in parts(weight)
            ]

        @torch.no_grad()
        def merge(shards: list[Tensor]) -> Tensor:
            experts = [torch.cat(shards[i : i + stride], dim) for i in range(0, len(shards), stride)]
            return torch.stack(experts)

        return ShardedTensorFactory(key, linear.weight, build, merge, replica_id)

    def _stack_experts(self, state_dict: dict, prefix: str, *_) -> None:
        """Take a plain state dict of the host's `SequentialMLP` too."""
        for name in ("linear_fc1", "linear_fc2"):
            keys = [f"{prefix}local_experts.{i}.{name}." for i in range(self.num_local_experts)]
            if all(f"{key}weight" in state_dict for key in keys):
                state_dict[f"{prefix}{name}.weight"] = torch.stack(
                    [state_dict.pop(f"{k}weight") for k in keys]
                )
                for key in keys:
                    state_dict.pop(f"{key}_extra_state", None)


def _check(config) -> None:
    """Refuse what the experts would ignore."""
    if not config.gated_linear_unit or config.activation_func is not nn.functional.silu:
        raise ValueError("experts of the local backend are SwiGLU; pass --swiglu.")
    unsupported = {
        "--add-bias-linear": config.add_bias_linear,
        "--moe-apply-probs-on-input": config.moe_apply_probs_on_input,
        "--activation-func-clamp-value": config.activation_func_clamp_value is not None,
        "--glu-linear-offset": config.glu_linear_offset != 0,
        "--activation-func-fp8-input-store": config.activation_func_fp8_input_store,
        "--fp8-format": config.fp8,
        "--fp4-format": config.fp4,
    }
    for flag, given in unsupported.items():
        if given:
            raise ValueError(
                f"{flag} is not supported by the experts of the local backend; leave it out, or use "
                "--transformer-impl transformer_engine."
            )
