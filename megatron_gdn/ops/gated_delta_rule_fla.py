"""The gated delta rule on flash-linear-attention's Triton kernels.

Every argument passed here is one that fla's signature names: what it does not know, its `**kwargs`
would swallow.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_gdn.rows import Rows, StateExchange


def run(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rows: Rows, exchange: StateExchange | None
) -> Tensor:
    """All pieces of all rows in one call; args and result as for `gated_delta_rule_torch.run`."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def laid_out(x):
        return x.flatten(0, 1).unsqueeze(0).contiguous()

    state = None
    if exchange is not None:
        entering = exchange(_summaries(q, k, v, g, beta, rows)) * rows.continued.view(-1, 1, 1, 1)
        pieces = rows.cu_seqlens_cpu.numel() - 1
        state = entering.new_zeros(pieces, *entering.shape[1:]).index_copy(0, rows.first_pieces, entering)
    out, _ = chunk_gated_delta_rule(
        q=laid_out(q),
        k=laid_out(k),
        v=laid_out(v),
        g=laid_out(g),
        beta=laid_out(beta),
        initial_state=state,
        cu_seqlens=rows.cu_seqlens,
        cu_seqlens_cpu=rows.cu_seqlens_cpu,
    )
    return out.view_as(v)


def _summaries(q, k, v, g, beta, rows):
    """[M | S] of every row, [R, H, K, K + V] fp32: the rule run on V' = K + V value channels.

    Started from [I | 0], with zeros for the first K values of every token, it ends in [M | S].
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def tails(x):
        ends = [row[borders[-2] :] for row, borders in zip(x, rows.borders, strict=True)]
        return torch.cat(ends).unsqueeze(0)

    heads, key_dim = v.shape[2], k.shape[3]
    start = torch.eye(key_dim, key_dim + v.shape[3], device=v.device)
    _, summaries = chunk_gated_delta_rule(
        q=tails(q),
        k=tails(k),
        v=F.pad(tails(v), (key_dim, 0)),
        g=tails(g),
        beta=tails(beta),
        initial_state=start.expand(rows.num_rows, heads, -1, -1).contiguous(),
        output_final_state=True,
        cu_seqlens=rows.tails.cu_seqlens,
        cu_seqlens_cpu=rows.tails.cu_seqlens_cpu,
    )
    m, s = summaries.tensor_split([key_dim], dim=-1)
    return torch.cat([m * rows.inside.view(-1, 1, 1, 1), s], dim=-1)
