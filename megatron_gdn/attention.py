"""Gated self-attention for a megatron-core TransformerLayer, with context parallelism.

Legend: s tokens of this rank, B batch, H query heads and h key/value heads of this tensor-parallel rank,
D head dim.
"""

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_gdn.attention_cp import context_parallel_attention
from megatron_gdn.norms import QKNorm
from megatron_gdn.ops.attention import attention
from megatron_gdn.ops.output_gate import gate_output
from megatron_gdn.ops.qk_norm_rope import split_norm_rope
from megatron_gdn.stream import StreamPlan, cp_group_of, plan_of
from megatron_gdn.validation import check_cp_comm_type


class CPCoreAttention(MegatronModule):
    """softmax(scale q k^T) v, causal inside documents, over a stream shared by the CP ranks.

    A core-attention submodule of the host, without parameters: it stands where the host has
    `DotProductAttention` or `TEDotProductAttention`.
    """

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        *,
        pg_collection: ProcessGroupCollection,
    ):
        """Build the layer.

        Args:
            config: a `Qwen35Config`, or a TransformerConfig with its `cp_layout`.
            layer_number: 1-based.
            attn_mask_type: must be causal.
            attention_type: must be "self".
            cp_comm_type: how keys and values reach other ranks, "p2p" (None means this) or "all_gather".
            softmax_scale: factor on q k^T; 1 / sqrt(D) if None.
            pg_collection: groups; `cp` is used.

        Raises:
            ValueError: a setting that would change the result and that this layer does not implement.
        """
        super().__init__(config=config)
        _refuse(
            "attention",
            ("attn_mask_type", attn_mask_type, AttnMaskType.causal),
            ("attention_type", attention_type, "self"),
            ("--attention-dropout", config.attention_dropout, 0.0),
            ("--softmax-type", config.softmax_type, "vanilla"),
            ("--qk-clip", config.qk_clip, False),
            ("--log-max-attention-logit", config.log_max_attention_logit, False),
        )
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            _refuse("attention", ("--window-size", config.window_size, None))
        self.cp_comm_type = "p2p" if cp_comm_type is None else cp_comm_type
        check_cp_comm_type(self.cp_comm_type)
        self.pg_collection = pg_collection
        self.softmax_scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: [s, B, H, D], tokens in the layout `config.cp_layout`.
            key: [s, B, h, D]; query head i reads key/value head i // (H / h).
            value: [s, B, h, D].
            attention_mask: not read, as by the host's TransformerEngine attention: the mask type is
                causal, and documents come with `packed_seq_params`.
            attn_mask_type: must be causal or None.
            attention_bias: must be None.
            packed_seq_params: the microbatch's `StreamParams`, the host's class, or None when dense. Its
                `cp_group`, if there is one, takes the place of the model's CP group.

        Returns:
            [s, B, H * D] in query's dtype.

        Raises:
            ValueError: a bias or another mask type; a microbatch cut for another layout, length or group.

        Communication: none on one CP rank; else see `attention_keys.fetch_keys`.
        """
        if attn_mask_type is not None:
            _refuse("attention", ("attn_mask_type", attn_mask_type, AttnMaskType.causal))
        _refuse("attention", ("attention_bias", attention_bias, None))
        cp_group = cp_group_of(packed_seq_params, self.pg_collection.cp)
        plan = _plan(query, packed_seq_params, self.config, cp_group)
        if plan.cp_size == 1:
            rows = (x.transpose(0, 1) for x in (query, key, value))
            out = attention(*rows, self.softmax_scale, plan.stream_rows).transpose(0, 1)
        else:
            out = context_parallel_attention(
                query, key, value, plan, self.softmax_scale, cp_group, self.cp_comm_type
            )
        return out.flatten(2)


class GatedSelfAttention(SelfAttention):
    """y = W_o [attention(rope(norm(q)), rope(norm(k)), v) * sigmoid(gate)], q, gate, k, v = W_qkv x.

    Parameters, their names, shapes and checkpoint keys are the host's; every CP rank holds all of them,
    and each rank's gradient is the part that its tokens contribute, to be summed over the CP group.

    The host's `SelfAttention` turns queries and keys by positions that it derives from its own cut of
    each document; this class turns them by the position of each token in its document, from the plan.

    Attributes:
        linear_qkv: column-parallel; per key/value head its query heads, as many gates, key, value.
        q_layernorm, k_layernorm: RMSNorm over the head dim, `QKNorm`.
        linear_proj: row-parallel.
    """

    def __init__(self, config, submodules: SelfAttentionSubmodules, layer_number: int, *args, **kwargs):
        """Build the layer; arguments are those of the host's `SelfAttention`.

        Args:
            config: a `Qwen35Config`, or a TransformerConfig with its `cp_layout`, `rotary_percent` and
                `rotary_base`.
            submodules: linear_qkv, core_attention (`CPCoreAttention`), linear_proj, norms (`QKNorm`).
            layer_number: 1-based.
            *args: as the host's.
            **kwargs: as the host's.

        Raises:
            ValueError: a setting that this layer or `CPCoreAttention` does not implement.
        """
        offloaded = config.offload_modules if config.fine_grained_activation_offloading else ()
        _refuse(
            "gated self-attention",
            ("--rotary-interleaved", config.rotary_interleaved, False),
            ("--no-rope-freq", config.no_rope_freq, None),
            ("--mrope-section", config.mrope_section, None),
            ("--offload-modules", sorted({"qkv_linear", "core_attn", "attn_proj"} & set(offloaded)), []),
        )
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        for name in ("q_layernorm", "k_layernorm"):
            if not isinstance(getattr(self, name), QKNorm):
                raise ValueError(
                    f"{name} of gated self-attention is a {type(getattr(self, name)).__name__}, but norm and "
                    "RoPE are one step here; put megatron_gdn.norms.QKNorm in its place in the layer spec."
                )
        self.rot_dim = int(config.kv_channels * config.rotary_percent)
        if self.rot_dim % 2:
            raise ValueError(
                f"--rotary-percent {config.rotary_percent} of --kv-channels {config.kv_channels} gives "
                f"{self.rot_dim} dimensions to turn, but RoPE turns pairs; choose a share that makes it even."
            )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        key_value_states: Tensor | None = None,
        inference_context=None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        rotary_pos_cos: Tensor | None = None,
        rotary_pos_sin: Tensor | None = None,
        rotary_pos_cos_sin: Tensor | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        sequence_len_offset: int | None = None,
        *,
        inference_params=None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layer on this rank's tokens.

        Args:
            hidden_states: [s (/ tp with sequence parallelism), B, hidden], in the layout of
                `config.cp_layout`.
            attention_mask: not read, see `CPCoreAttention.forward`.
            key_value_states: must be None, as must everything below but the two that say otherwise.
            inference_context: inference is not supported.
            rotary_pos_emb: not needed: RoPE is applied here, by `config.rotary_percent` and
                `config.rotary_base`, to each token's position in its document.
            rotary_pos_cos: inference only.
            rotary_pos_sin: inference only.
            rotary_pos_cos_sin: inference only.
            attention_bias: not supported.
            packed_seq_params: the microbatch's `StreamParams`, the host's class, or None when dense. Its
                `cp_group`, if there is one, takes the place of the model's CP group.
            sequence_len_offset: inference only.
            inference_params: inference only.

        Returns:
            (output of the shape of hidden_states, bias of linear_proj or None).

        Raises:
            ValueError: an argument that must be None is not.

        Communication: linear_qkv's and linear_proj's over tp; that of the core attention over cp.
        """
        _refuse(
            "gated self-attention, which only trains,",
            ("key_value_states", key_value_states, None),
            ("inference_context", inference_context, None),
            ("inference_params", inference_params, None),
            ("rotary_pos_cos", rotary_pos_cos, None),
            ("rotary_pos_sin", rotary_pos_sin, None),
            ("rotary_pos_cos_sin", rotary_pos_cos_sin, None),
            ("attention_bias", attention_bias, None),
            ("sequence_len_offset", sequence_len_offset, None),
        )
        qkv = self._project(hidden_states)
        cp_group = cp_group_of(packed_seq_params, self.pg_collection.cp)
        plan = _plan(qkv, packed_seq_params, self.config, cp_group)
        query, *gate, key, value = split_norm_rope(
            qkv,
            self.hidden_size_per_attention_head,
            (self.q_layernorm(), self.k_layernorm()),
            rope_tables(plan, self.rot_dim, self.config.rotary_base),
            self.config.layernorm_epsilon,
            self.config.layernorm_zero_centered_gamma,
            gated=self.config.attention_output_gate,
        )

        recompute = self.checkpoint_core_attention and self.training
        attend = self._checkpointed_attention_forward if recompute else self._run_core_attention
        out = attend(
            query,
            key,
            value,
            attention_mask,
            attn_mask_type=self.attn_mask_type,
            packed_seq_params=packed_seq_params,
        )
        if gate:
            out = gate_output(out, *gate)
        return self.linear_proj(out)

    def _project(self, hidden_states: Tensor) -> Tensor:
        """[s, B, h, (H/h query heads, as many gates if there are any, key, value) D], this rank's.

        Fewer key/value heads than TP ranks: the ranks that share one gather its projection over tp, and
        each takes its own query heads and gates of it.
        """
        qkv, _ = self.linear_qkv(hidden_states)
        groups, head_dim = self.config.num_query_groups, self.hidden_size_per_attention_head
        if groups >= self.world_size:
            return qkv.unflatten(-1, (self.num_query_groups_per_partition, -1))
        qkv = all_gather_last_dim_from_tensor_parallel_region(qkv, group=self.tp_group)
        ranks_per_group = self.world_size // groups
        group, share = divmod(self.tp_group.rank(), ranks_per_group)
        heads = qkv.unflatten(-1, (groups, -1, head_dim)).select(2, group)
        kinds = 2 if self.config.attention_output_gate else 1
        per_query = heads[:, :, :-2].unflatten(2, (kinds, ranks_per_group, -1))[:, :, :, share].flatten(2, 3)
        return torch.cat([per_query, heads[:, :, -2:]], dim=2).flatten(2).unsqueeze(2)


def rope_tables(plan: StreamPlan, rot_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every local token's angles, [s, 1, 1, rot_dim] fp32.

    Made once per plan and kept with it, so that all layers share them.

    Args:
        plan: gives the position of each token in its document.
        rot_dim: dimensions that are turned; dimension i is paired with i + rot_dim / 2.
        base: base period.
    """
    cache = plan.__dict__.setdefault("_rope_tables", {})
    if (rot_dim, base) not in cache:
        exponents = torch.arange(0, rot_dim, 2, dtype=torch.float32, device=plan.device) / rot_dim
        angles = torch.outer(plan.local_positions.float(), 1.0 / base**exponents)
        angles = torch.cat([angles, angles], dim=-1)[:, None, None]
        cache[rot_dim, base] = angles.cos(), angles.sin()
    return cache[rot_dim, base]


def _plan(x: Tensor, packed_seq_params: PackedSeqParams | None, config, cp_group) -> StreamPlan:
    """The plan of a microbatch that `x`, [s, B, ...], is of."""
    seq_len_local, batch = x.shape[:2]
    return plan_of(
        packed_seq_params,
        layout=config.cp_layout,
        cp_group=cp_group,
        seq_len_local=seq_len_local,
        batch=batch,
        device=x.device,
    )


def _refuse(who: str, *settings: tuple[str, object, object]) -> None:
    """Refuse settings that are not what the layer implements.

    Args:
        who: the layer.
        *settings: (name or flag, what was got, the only thing that is supported).

    Raises:
        ValueError: the first that differs.
    """
    for name, got, supported in settings:
        if isinstance(got, Tensor) or got != supported:
            got = f"a {type(got).__name__}" if isinstance(got, Tensor) else got
            raise ValueError(
                f"{name} {got} is not supported by {who}; leave it out or set it to {supported}."
            )
