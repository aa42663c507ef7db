"""The host's MoE layer, whose tokens reach their experts without atomic additions and without waiting."""

import dataclasses
from functools import partial

import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer.moe import moe_layer as host
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megatron_gdn.ops.router_logits import router_logits
from megatron_gdn.ops.row_sums import sum_rows


class AlltoAllTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """The host's all-to-all dispatcher for routers that give every token the same number of experts.

    Rows reach the experts in the host's order. What is different: a token's outputs are added up in fp32 in
    the order of its experts, and its input gradients too, which makes them the same in every run; counts of
    tokens stay on the GPU; and where a rank has all experts, nothing is sorted or copied a second time and
    the host program never waits for the GPU.

    Communication: that of the host's dispatcher.
    """

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Tokens for each expert of this rank, on the GPU."""
        self.local_counts = super().preprocess(routing_map)
        if self._has_all_experts:
            self.cuda_sync_point = "no_sync"
        return self.local_counts

    @property
    def _has_all_experts(self) -> bool:
        return self.ep_size == 1 and self.tp_size == 1

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Sort this rank's tokens by expert, a copy for each expert that wants one.

        Args:
            hidden_states: [s, B, hidden].
            routing_map: whether a token goes to an expert, [s * B, experts], bool; the same number of times
                for every token.
            probs: the router's weights, [s * B, experts], fp32.

        Returns:
            [s * B * k, hidden], and the weight of each of these rows.
        """
        self.hidden_shape = hidden_states.shape
        self.probs, self.routing_map = probs, routing_map
        self.tokens_per_expert = self.preprocess(routing_map)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize(
            "before_permutation_1", self.tokens_per_expert
        )
        hidden_states = hidden_states.view(-1, self.hidden_shape[-1])
        token, expert, self.rows_of_token = sort_by_expert(routing_map, self.config.moe_router_topk)
        self.token_of_row = token.unsqueeze(1)
        weights = probs.reshape(-1).index_select(0, token * probs.shape[1] + expert)
        return sum_rows(hidden_states, self.token_of_row, self.rows_of_token), weights

    def dispatch_postprocess(self, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What came from all ranks, sorted by this rank's experts."""
        if not self._has_all_experts:
            tokens, _, weights = super().dispatch_postprocess(tokens, weights)
        return tokens, self.local_counts, weights

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Back to the order of the ranks."""
        return hidden_states if self._has_all_experts else super().combine_preprocess(hidden_states)

    def combine_postprocess(self, rows: Tensor) -> Tensor:
        """Add up what the experts of each token gave, and the shared expert's output where it overlaps."""
        output = sum_rows(rows, self.rows_of_token, self.token_of_row).view(self.hidden_shape)
        return output if self.shared_experts is None else output + self.shared_experts.get_output()

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Tensor:
        if self._has_all_experts:
            return tokens_per_expert
        return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)


def sort_by_expert(routing_map: Tensor, topk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows for the experts: one for each token and expert, sorted by expert and then by token.

    Args:
        routing_map: [T, experts], bool, `topk` of each row set.
        topk: experts of a token.

    Returns:
        token of each row, [T * topk]; its expert; and the rows of each token, rising, [T, topk]. All int64.
    """
    token, expert = torch.nonzero_static(routing_map, size=len(routing_map) * topk).t()
    expert, order = torch.sort(expert, stable=True)
    rows = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return token[order], expert, rows.view(-1, topk)


class Router(TopKRouter):
    """The host's router; parameters and keys are the host's."""

    def gating(self, input: Tensor) -> Tensor:
        """Logits in the router's dtype; in fp32 from a bf16 model on tensor cores, as exact as in fp32."""
        model_dtype = {input.dtype, self.weight.dtype}
        if self.config.moe_router_dtype != "fp32" or model_dtype != {torch.bfloat16} or self.bias is not None:
            return super().gating(input)
        return router_logits(input, self.weight)


class SharedExpert(SharedExpertMLP):
    """The host's shared expert, called as a module also where it overlaps with the dispatcher.

    The host calls its parts then, and reads the gate's weight without having waited for it
    (`--overlap-param-gather`): it may be that of the step before.
    """

    def forward(self, hidden_states: Tensor, *, first_part: bool = False, **options) -> Tensor | None:
        """The whole, [s, B, hidden]; or what comes before communication, kept for the parts that follow."""
        if first_part:
            return super().pre_forward_comm(hidden_states, **options)
        return super().forward(hidden_states)

    def pre_forward_comm(self, hidden_states: Tensor, **options) -> None:
        """The first part, by a call of the module."""
        self(hidden_states, first_part=True, **options)


class MoELayer(host.MoELayer):
    """The host's MoE layer with our dispatcher where it applies.

    Token dropping, padding and CUDA graphs keep the host's dispatcher.
    """

    def __init__(self, config, *args, pg_collection=None, **kwargs):
        """Build the layer; arguments are those of the host's."""
        super().__init__(config, *args, pg_collection=pg_collection, **kwargs)
        same_number = (
            config.moe_expert_capacity_factor is None and not config.moe_router_padding_for_quantization
        )
        if (
            config.moe_token_dispatcher_type == "alltoall"
            and same_number
            and config.cuda_graph_impl == "none"
        ):
            self.token_dispatcher = AlltoAllTokenDispatcher(
                self.num_local_experts, self.local_expert_indices, config, pg_collection
            )
            if self.shared_expert_overlap:
                self.token_dispatcher.set_shared_experts(self.shared_experts)


def moe_layer_spec(config, backend: BackendSpecProvider, local: bool) -> partial:
    """The builder of an MoE layer: the host's with TransformerEngine, ours without.

    Args:
        config: TransformerConfig.
        backend: what linears and experts are made of.
        local: whether the backend is that without TransformerEngine.
    """
    spec = get_moe_module_spec_for_backend(
        backend, num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
    )
    if not local:
        return spec
    submodules = dataclasses.replace(spec.keywords["submodules"], router=Router)
    if not config.use_grouped_gemm_for_shared_expert:  # the host says what that needs
        mlp = submodules.shared_experts.keywords["submodules"]
        submodules = dataclasses.replace(submodules, shared_experts=partial(SharedExpert, submodules=mlp))
    return partial(MoELayer, submodules=submodules)
