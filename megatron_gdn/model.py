"""The model: the host's GPT with Qwen3.5's layers and a loss of multi-token prediction."""

from megatron.core.config_logger import has_config_logger_enabled
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper
from torch import Tensor

from megatron_gdn.layer_specs import mtp_block_spec
from megatron_gdn.multi_token_prediction import tokens_ahead
from megatron_gdn.output_layer import OutputLayer
from megatron_gdn.stream import StreamParams, TokensAhead, cp_group_of


class Qwen35Model(GPTModel):
    """The host's GPT model with losses that need no logits of the whole vocabulary in memory.

    The loss of multi-token prediction does not change with the number of CP ranks.
    Each depth adds `mtp_loss_scaling_factor / mtp_num_layers` times its mean loss over the targets of the
    microbatch. The host takes each rank's own mean, so that a target weighs more on a rank with fewer.

    With --calculate-per-token-loss the loss function must give the host three values (loss, tokens,
    report), as that of pretrain_qwen35.py does; without, two (mean loss over the stream, report) do too.

    `loss_mask` given to the model makes the loss cheaper, and must be what the losses are then weighed with
    (`OutputLayer.forward`).
    """

    def __init__(self, *args, **kwargs):
        """Build a pipeline stage; arguments are those of the host's `GPTModel`."""
        super().__init__(*args, **kwargs)
        if self.mtp_process and self.post_process and self.share_embeddings_and_output_weights:
            # The embedding is here for multi-token prediction and serves as output weight. On a stage other
            # than the first the host makes one more, which nothing trains and its checkpoints refuse.
            self.output_layer.weight = None
        if self.post_process:
            # The host names its class in the constructor; ours has the same state.
            self.output_layer.__class__ = OutputLayer

    def _postprocess(self, hidden_states: Tensor, *, labels: Tensor | None = None, **options) -> Tensor:
        """Loss per token [B, s]; logits [B, s, vocabulary] without labels; hidden states between stages."""
        wants_logits = options.get("output_processor") is not None or has_config_logger_enabled(self.config)
        if not self.config.mtp_num_layers and (labels is None or wants_logits):
            return super()._postprocess(hidden_states, labels=labels, **options)
        return self._postprocess_losses(hidden_states, labels=labels, **options)

    def _postprocess_losses(
        self,
        hidden_states: Tensor,
        *,
        labels: Tensor | None = None,
        mtp_in_postprocess: bool | None = None,
        attention_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
        packed_seq_params: StreamParams | None = None,
        loss_mask: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        extra_block_kwargs: dict | None = None,
        output_processor=None,
        **_,
    ) -> Tensor:
        """In training, the gradient of the loss of every depth joins that of the main loss."""
        if output_processor is not None:
            raise NotImplementedError("multi-token prediction takes no output_processor.")
        if mtp_in_postprocess and labels is not None:
            hidden_states = self.mtp(
                input_ids=None,  # the layers read `packed_seq_params.ahead`
                position_ids=None,
                hidden_states=hidden_states,
                attention_mask=attention_mask,
                padding_mask=padding_mask,
                packed_seq_params=packed_seq_params,
                embedding=self.embedding,
                **(extra_block_kwargs or {}),
            )
        if not self.post_process:
            return hidden_states
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight

        if labels is None:
            logits, _ = self.output_layer(
                hidden_states, weight=weight, runtime_gather_output=runtime_gather_output
            )
            return self._scale_logits(logits).transpose(0, 1).contiguous()
        num_depths = self.config.mtp_num_layers or 0
        hidden_states, *predictions = hidden_states.chunk(1 + num_depths)
        mtp_weight = weight.detach() if self.config.mtp_detach_heads else weight
        cp_size = cp_group_of(packed_seq_params, self.pg_collection.cp).size()
        aheads = tokens_ahead(packed_seq_params, self.config) if num_depths else ()
        for depth, ahead in enumerate(aheads):
            losses, predicted = self._losses(
                predictions[depth], mtp_weight, ahead.labels, ahead.loss_mask, predict=self.training
            )
            losses = losses * ahead.loss_mask
            if self.training:
                self._log_mtp(depth, ahead, cp_size, losses, predicted)
            losses = losses * self._mtp_loss_scale(ahead, cp_size)
            hidden_states = MTPLossAutoScaler.apply(hidden_states, losses)
        return self._losses(hidden_states, weight, labels, loss_mask)[0]

    def _losses(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        labels: Tensor,
        loss_mask: Tensor | None,
        predict: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Loss per token and, if wanted, most likely token, [B, s]."""
        # A factor of the logits may as well be one of the hidden states.
        hidden_states = self._scale_logits(hidden_states)
        return self.output_layer(
            hidden_states, weight=weight, labels=labels, loss_mask=loss_mask, predict=predict
        )

    def _mtp_loss_scale(self, ahead: TokensAhead, cp_size: int) -> float:
        """Makes the sum over this rank's targets a share of the mean over the microbatch's.

        The host averages gradients over CP ranks, or with --calculate-per-token-loss divides their sum by
        the labels of the main prediction.
        """
        config = self.config
        divided_by = ahead.num_labels if config.calculate_per_token_loss else cp_size
        share = config.mtp_loss_scaling_factor / config.mtp_num_layers
        return share * divided_by / max(ahead.num_targets, 1)

    def _log_mtp(
        self, depth: int, ahead: TokensAhead, cp_size: int, losses: Tensor, predicted: Tensor
    ) -> None:
        """Tell the host's log the loss and the hits; it averages and sums them over DP and CP ranks."""
        is_target = ahead.loss_mask.bool()
        correct, total = ((predicted == ahead.labels) & is_target).sum().float(), is_target.sum().float()
        mean = losses.detach().sum() * (cp_size / max(ahead.num_targets, 1))
        MTPLossLoggingHelper.save_metrics_to_tracker(
            mean,
            correct,
            total,
            depth,
            self.config.mtp_num_layers,
            avg_group=self.pg_collection.dp_cp,
        )


def build_model(config, pg_collection, pre_process=None, post_process=None, vp_stage=None) -> Qwen35Model:
    """One pipeline stage of the model, as the host's `GPTModelBuilder.build_model` builds its own.

    Args:
        config: the host's `GPTModelConfig`, with a spec function of this project.
        pg_collection: process groups.
        pre_process: whether the stage holds the embedding; by default the first one does.
        post_process: whether the stage holds the output layer; by default the last one does.
        vp_stage: virtual pipeline stage.
    """
    vp_size = config.transformer.virtual_pipeline_model_parallel_size
    if pre_process is None:
        pre_process = is_vp_first_stage(vp_stage, vp_size) and is_pp_first_stage(pg_collection.pp)
    if post_process is None:
        post_process = is_vp_last_stage(vp_stage, vp_size) and is_pp_last_stage(pg_collection.pp)
    return Qwen35Model(
        config.transformer,
        config.transformer_layer_spec(config, vp_stage=vp_stage),
        config.vocab_size,
        config.seq_length,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=config.fp16_lm_cross_entropy,
        parallel_output=config.parallel_output,
        share_embeddings_and_output_weights=config.share_embeddings_and_output_weights,
        position_embedding_type="none",  # our attention knows each token's position from the plan
        mtp_block_spec=mtp_block_spec(config, vp_stage),
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )
