"""The layer of multi-token prediction, whose inputs stay in their document in any layout, on any ranks.

The host shifts tokens inside the model, where a rank has only its own spans, and takes every document for
one that was cut into 2 x cp equal parts. Here the data path shifts the whole stream before it is cut
(`microbatch.shift_in_documents`), so no rank needs another's tokens.
"""

from megatron.core.transformer import multi_token_prediction as host
from torch import Tensor

from megatron_gdn.stream import StreamParams, TokensAhead


def tokens_ahead(params: StreamParams | None, config) -> tuple[TokensAhead, ...]:
    """What came with the microbatch for each depth."""
    ahead = getattr(params, "ahead", ())
    if len(ahead) != config.mtp_num_layers:
        raise ValueError(
            f"--mtp-num-layers {config.mtp_num_layers} needs that many depths of shifted tokens with every "
            f"microbatch, got {len(ahead)}; pass packed_seq_params from "
            f"cut_microbatch(..., mtp_num_layers={config.mtp_num_layers})."
        )
    return ahead


class MultiTokenPredictionLayer(host.MultiTokenPredictionLayer):
    """The host's layer, fed with tokens that the data path has shifted.

    Parameters, their names and their checkpoint keys are the host's.
    """

    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        embedding,
        hidden_states: Tensor,
        packed_seq_params: StreamParams | None = None,
        padding_mask: Tensor | None = None,
    ):
        if padding_mask is not None:
            raise NotImplementedError("multi-token prediction takes no padding_mask; pack documents instead.")
        tokens = tokens_ahead(packed_seq_params, self.config)[self.layer_number - 1].tokens

        def embed(**_):
            return embedding(input_ids=tokens, position_ids=None)  # positions are the attention's business

        # The host shifts what it is given; None stays None.
        return super()._get_embeddings(None, None, embed, hidden_states, packed_seq_params)
