"""GatedDeltaNet for a megatron-core TransformerLayer, with context parallelism of either mode."""

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet as HostGatedDeltaNet
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import CheckpointWithoutOutput, get_cuda_rng_tracker
from torch import Tensor, nn

from megatron_gdn.float32 import Float32Parameters
from megatron_gdn.gated_delta_net_cp import Sections, WholeStream, build_context_parallel
from megatron_gdn.ops.causal_conv import causal_conv1d_silu
from megatron_gdn.ops.gated_delta_rule import gated_delta_rule
from megatron_gdn.stream import StreamPlan, cp_group_of, plan_of
from megatron_gdn.validation import check_tensor_parallel_heads


class ConvWeight(nn.Module):
    """The convolution's weight, read by calling this.

    Before a module is called the host waits for its parameters (`--overlap-param-gather`). A weight that is
    read without a call may be that of the step before.

    Attributes:
        weight: [channels, 1, W].
    """

    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight

    def forward(self) -> Tensor:
        """[channels, W]."""
        return self.weight.squeeze(1)


class GatedDeltaNet(Float32Parameters, HostGatedDeltaNet):
    """Linear attention with the gated delta rule: y = W_o [rmsnorm(rule(conv(W qkv x))) * silu(z)].

    Parameters, their names, shapes and checkpoint keys are the host's, whatever the CP mode; every CP
    rank holds all of them, and each rank's gradient is the part that its tokens or heads contribute,
    to be summed over the CP group (the host's data-parallel reduction does so).

    Attributes:
        in_proj: column-parallel, output sections query, key, value, z, b ("beta"), a ("alpha").
        conv1d: depthwise, weight [channels of query, key, value, 1, W].
        A_log, dt_bias: [value heads / tp], always fp32.
        out_norm: weight [V], always fp32.
        out_proj: row-parallel.
    """

    float32_parameters = ("A_log", "dt_bias")

    def __init__(
        self,
        config,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int | None = None,
        *,
        cp_mode: str,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,
        cp_comm_type: str | None = None,
        pp_layer_offset: int | None = None,
    ):
        """Build the layer.

        Args:
            config: a `Qwen35Config`, or a TransformerConfig with its `cp_layout`.
            submodules: in_proj, out_norm and out_proj.
            layer_number: 1-based.
            cp_mode: "headwise" or "chunkwise".
            pg_collection: groups; `tp` and `cp` are used.
            name: instance name, handed on by the host.
            cp_comm_type: how attention layers use CP; no concern of this one.
            pp_layer_offset: handed to every attention submodule by the host; not needed here.

        Raises:
            ValueError: heads that tensor or context parallelism cannot share out.
        """
        check_tensor_parallel_heads(
            config.linear_num_key_heads, config.linear_num_value_heads, pg_collection.tp.size()
        )
        super().__init__(config, submodules, layer_number, pg_collection=pg_collection, name=name)
        self.conv1d = ConvWeight(self.conv1d.weight)
        self.cp_mode = cp_mode
        self.sections = Sections(
            self.num_k_heads_local_tp, self.num_v_heads_local_tp, self.key_head_dim, self.value_head_dim
        )
        build_context_parallel(cp_mode, self.sections, pg_collection.cp)  # refuses heads before training

    def reset_parameters(self):
        """Initialise as the host does, but with gates in fp32."""
        for name in self.float32_parameters:
            old = getattr(self, name)
            new = nn.Parameter(torch.empty(old.shape, dtype=torch.float32, device=old.device))
            new.tensor_model_parallel, new.partition_dim = True, 0
            setattr(self, name, new)
        if not self.config.perform_initialization:
            return
        with torch.no_grad(), get_cuda_rng_tracker().fork():
            self.dt_bias.fill_(1.0)
            self.A_log.uniform_(*self.A_init_range).log_()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        inference_context=None,
        packed_seq_params: PackedSeqParams | None = None,
        *,
        rotary_pos_emb=None,
        rotary_pos_cos=None,
        rotary_pos_sin=None,
        rotary_pos_cos_sin=None,
        attention_bias: Tensor | None = None,
        sequence_len_offset: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layer on this rank's tokens.

        Args:
            hidden_states: [s (/ tp with sequence parallelism), B, hidden], in the layout of
                `config.cp_layout`.
            attention_mask: ignored; the rule is causal and documents come with `packed_seq_params`.
            inference_context: must be None.
            packed_seq_params: the microbatch's `StreamParams`, the host's class, or None when dense. Its
                `cp_group`, if there is one, takes the place of the model's CP group.
            rotary_pos_emb: as all below, handed to every mixer by the host; a recurrence has no use for it.
            rotary_pos_cos: likewise.
            rotary_pos_sin: likewise.
            rotary_pos_cos_sin: likewise.
            attention_bias: likewise.
            sequence_len_offset: likewise.

        Returns:
            (output of the same shape, bias of out_proj or None).

        Raises:
            ValueError: a microbatch cut for another layout, length or group; heads that its group cannot
                share out.

        Communication: in_proj's and out_proj's over tp; that of the CP strategy over cp.
        """
        if inference_context is not None:
            raise NotImplementedError("GatedDeltaNet trains only; inference is not supported.")
        cp_group = cp_group_of(packed_seq_params, self.pg_collection.cp)
        cp = build_context_parallel(self.cp_mode, self.sections, cp_group)
        qkvzba, _ = self.in_proj(hidden_states)
        s, batch, _ = qkvzba.shape
        plan = plan_of(
            packed_seq_params,
            layout=self.config.cp_layout,
            cp_group=cp_group,
            seq_len_local=s,
            batch=batch,
            device=qkvzba.device,
        )
        q_dim, k_dim, v_dim, z_dim, b_dim, a_dim = self.in_proj_split_sections
        qkv, z, ba = qkvzba.split([q_dim + k_dim + v_dim, z_dim, b_dim + a_dim], dim=-1)

        z = cp.gate(z)
        qkv, ba = cp.enter(qkv, ba, plan)
        out = self._recurrence(qkv, ba, cp, plan)
        out = cp.leave(out.flatten(2), plan)

        if self.recompute_norm_out:
            # By default the host asks TransformerEngine about fp8, also where there is none.
            self.norm_out_checkpoint = CheckpointWithoutOutput(fp8=self.config.fp8)
            out = self.norm_out_checkpoint.checkpoint(self._gated_norm, out, z)
        else:
            out = self._gated_norm(out, z)
        y, bias = self.out_proj(out)
        if self.recompute_norm_out:
            self.norm_out_checkpoint.discard_output_and_register_recompute(y)
        return y, bias

    def _recurrence(self, qkv: Tensor, ba: Tensor, cp: WholeStream, plan: StreamPlan) -> Tensor:
        """Convolution and rule on rows: [R, s, C], [R, s, 2H] to [R, s, H, V]."""
        rows, sections = cp.rows(plan), cp.sections()
        halo = cp.halo(qkv, self.conv_kernel_dim - 1, plan)
        weight = cp.conv_weight(self.conv1d())
        norm_dims = (sections.key_dim, sections.key_dim, None)
        q, k, v = causal_conv1d_silu(qkv, weight, rows, halo, sizes=sections.sizes[:3], norm_dims=norm_dims)
        b, a = ba.split(sections.sizes[3:], dim=-1)
        return gated_delta_rule(
            q=q.unflatten(-1, (sections.key_heads, -1)),
            k=k.unflatten(-1, (sections.key_heads, -1)),
            v=v.unflatten(-1, (sections.value_heads, -1)),
            a=a,
            b=b,
            A_log=cp.per_head(self.A_log),
            dt_bias=cp.per_head(self.dt_bias),
            rows=rows,
            exchange=cp.exchange(plan),
            backend=self.config.gdn_backend,
        )

    def _gated_norm(self, out: Tensor, z: Tensor) -> Tensor:
        """rmsnorm(out) * silu(z) per value head, [s, B, H*V]."""
        # Each TP rank normalises other heads with the same weight, and the host sums such gradients only
        # under sequence parallelism.
        unsummed = self.tp_size > 1 and not self.config.sequence_parallel
        heads, gate = (x.unflatten(-1, (-1, self.value_head_dim)) for x in (out, z))
        return self.out_norm(heads, gate, self.pg_collection.tp if unsummed else None).flatten(-2)
