"""Blocks of attention by cuDNN on pieces of any lengths, through the package nvidia-cudnn-frontend.

Shapes, results and gradients are those of `ops.attention.forward` and `ops.attention.backward`.

cuDNN runs *graphs*: built for the largest sizes, which takes about 50 ms (the first of a kind 1 s), then
run on any lengths up to those. Sizes are rounded up to powers of two, so that a few graphs serve all
microbatches; the kernels skip what lies beyond the lengths, and it was measured to cost nothing.

Source: NVIDIA's cudnn-frontend, the operations `sdpa` and `sdpa_backward` with ragged offsets.
"""

import threading
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_gdn.rows import Rows

MIN_CUDNN = 90600
"""First cuDNN whose packed backward takes fewer key/value heads than query heads."""

MIN_LONGEST = 512
"""Where all pieces are shorter, FlashAttention-2 is faster: 1.2 times at 256 tokens, 0.8 times at 1024."""


@dataclass(frozen=True, eq=False)
class Pieces:
    """Runs of tokens in rows laid end to end, each a sequence of its own."""

    starts: Tensor
    """First token of each, and the end of the last, [pieces + 1], int64."""
    lengths: Tensor
    """Tokens of each, [pieces], int32. Empty ones fill up to a power of two."""
    longest: int
    """At least the longest, in tokens."""
    total: int
    """At least the tokens of all rows."""
    _offsets: dict[int, Tensor] = field(default_factory=dict)

    def offsets(self, width: int) -> Tensor:
        """`starts` in elements of a tensor with so many of them per token; made once."""
        if width not in self._offsets:
            self._offsets[width] = self.starts * width
        return self._offsets[width]

    @classmethod
    def of_documents(cls, rows: Rows) -> "Pieces":
        """The documents' pieces in the rows; made once for the rows."""
        if "_cudnn_pieces" not in rows.__dict__:
            borders, total = rows.cu_seqlens, rows.num_rows * rows.row_len
            spare = power_of_two(len(borders) - 1, 8) - (len(borders) - 1)
            starts = torch.cat([borders, borders[-1:].expand(spare)]).long()
            longest = power_of_two(rows.longest_piece, 128)
            rows.__dict__["_cudnn_pieces"] = cls(starts, starts.diff().int(), longest, total)
        return rows.__dict__["_cudnn_pieces"]

    @classmethod
    @lru_cache(maxsize=64)
    def of_rows(cls, num_rows: int, row_len: int, device: torch.device) -> "Pieces":
        """Every row as one piece."""
        starts = torch.arange(num_rows + 1, device=device) * row_len
        longest = power_of_two(row_len, 128)
        return cls(starts, starts.diff().int(), longest, num_rows * longest)


class Sizes(NamedTuple):
    """What a graph is built for; the tokens are upper bounds."""

    device: torch.device
    dtype: torch.dtype
    pieces: int
    longest_q: int
    longest_k: int
    total_q: int
    total_k: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    causal: bool
    """From the first query and the first key of each piece on."""
    deterministic: bool
    """Backward adds in a fixed order."""


class Graph(NamedTuple):
    """A graph, its tensors by name and the bytes that it works in."""

    graph: Any
    tensors: dict[str, Any]
    workspace: int


def available() -> bool:
    """Whether the package is installed and torch's cuDNN is new enough for it."""
    return _frontend() is not None and (torch.backends.cudnn.version() or 0) >= MIN_CUDNN


def power_of_two(number: int, least: int) -> int:
    """The smallest power of two that is at least `number` and `least`, itself one."""
    return max(least, 1 << (number - 1).bit_length())


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, rows: Rows | None) -> tuple[Tensor, Tensor]:
    """One run of a graph; lse comes as [R, m, H] and is returned as a view."""
    sizes, lengths = _prepare(q, k, scale, rows)
    q, k, v = (x.contiguous() for x in (q, k, v))
    o, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    _run(_forward_graph(sizes), sizes.device, {"q": q, "k": k, "v": v, "o": o, "lse": lse, **lengths})
    return o, lse.transpose(1, 2)


def backward(do, q, k, v, o, lse, scale, rows) -> tuple[Tensor, Tensor, Tensor]:
    """One run of a graph."""
    sizes, lengths = _prepare(q, k, scale, rows)
    do, q, k, v, o, lse = (x.contiguous() for x in (do, q, k, v, o, lse.transpose(1, 2)))
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    buffers = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    _run(_backward_graph(sizes), sizes.device, buffers | lengths)
    return dq, dk, dv


def _prepare(q: Tensor, k: Tensor, scale: float, rows: Rows | None) -> tuple[Sizes, dict[str, Tensor]]:
    """The sizes of the graph that serves a block, and the lengths and places of its pieces."""
    if rows is None:
        pieces_q, pieces_k = (Pieces.of_rows(*x.shape[:2], q.device) for x in (q, k))
    else:
        pieces_q = pieces_k = Pieces.of_documents(rows)
    heads, kv_heads, head_dim = q.shape[2], k.shape[2], q.shape[3]
    sizes = Sizes(
        q.device,
        q.dtype,
        len(pieces_q.lengths),
        pieces_q.longest,
        pieces_k.longest,
        pieces_q.total,
        pieces_k.total,
        heads,
        kv_heads,
        head_dim,
        scale,
        causal=rows is not None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    lengths = {
        "lengths_q": pieces_q.lengths,
        "lengths_k": pieces_k.lengths,
        "starts_q": pieces_q.offsets(heads * head_dim),
        "starts_k": pieces_k.offsets(kv_heads * head_dim),
        "starts_lse": pieces_q.offsets(heads),
    }
    return sizes, lengths


@lru_cache(maxsize=1)
def _frontend():
    """The package, or None where it is not installed."""
    try:
        import cudnn
    except ImportError:
        return None
    return cudnn


@lru_cache(maxsize=16)
def _handle(device: torch.device, thread: int):
    """cuDNN's handle; two threads may not use one at the same time, and autograd has threads of its own."""
    with torch.cuda.device(device):
        return _frontend().create_handle()


def _run(graph: Graph, device: torch.device, buffers: dict[str, Tensor]) -> None:
    """Run on torch's current stream."""
    workspace = torch.empty(graph.workspace, dtype=torch.uint8, device=device)
    handle = _handle(device, threading.get_ident())
    _frontend().set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    graph.graph.execute({t: buffers[name] for name, t in graph.tensors.items()}, workspace, handle=handle)


class _Builder:
    """A graph in the making: its tensors by name, each ragged along the tokens."""

    def __init__(self, sizes: Sizes):
        self.cudnn, self.sizes = _frontend(), sizes
        types = self.cudnn.data_type
        self.io = types.BFLOAT16 if sizes.dtype == torch.bfloat16 else types.HALF
        self.graph = self.cudnn.pygraph(
            handle=_handle(sizes.device, threading.get_ident()),
            io_data_type=self.io,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
        )
        self.tensors, p = {}, sizes.pieces
        for name, count, dtype in (
            ("starts_q", p + 1, types.INT64),
            ("starts_k", p + 1, types.INT64),
            ("starts_lse", p + 1, types.INT64),
            ("lengths_q", p, types.INT32),
            ("lengths_k", p, types.INT32),
        ):
            self.tensors[name] = self.graph.tensor(
                name=name, dim=[count, 1, 1, 1], stride=[1, 1, 1, 1], data_type=dtype
            )
        self.options = {
            "attn_scale": sizes.scale,
            "use_padding_mask": True,
            "seq_len_q": self.tensors["lengths_q"],
            "seq_len_kv": self.tensors["lengths_k"],
            "use_causal_mask": sizes.causal,
        }

    def _shape(self, name: str):
        """(dim, stride, data type, places of the pieces), heads before tokens."""
        s = self.sizes
        if name == "lse":
            longest, heads, width, dtype, starts = (
                s.longest_q,
                s.heads,
                1,
                self.cudnn.data_type.FLOAT,
                "starts_lse",
            )
        elif name in ("q", "o", "do", "dq"):
            longest, heads, width, dtype, starts = s.longest_q, s.heads, s.head_dim, self.io, "starts_q"
        else:
            longest, heads, width, dtype, starts = s.longest_k, s.kv_heads, s.head_dim, self.io, "starts_k"
        dim = [s.pieces, heads, longest, width]
        return dim, [longest * heads * width, width, heads * width, 1], dtype, self.tensors[starts]

    def inputs(self, *names: str) -> dict[str, Any]:
        """Add tensors that are read."""
        for name in names:
            dim, stride, dtype, starts = self._shape(name)
            self.tensors[name] = self.graph.tensor(name=name, dim=dim, stride=stride, data_type=dtype)
            self.tensors[name].set_ragged_offset(starts)
        return {name: self.tensors[name] for name in names}

    def outputs(self, **tensors: Any) -> None:
        """Say where and how results are written."""
        for name, tensor in tensors.items():
            dim, stride, dtype, starts = self._shape(name)
            tensor.set_output(True).set_dim(dim).set_stride(stride).set_data_type(dtype)
            tensor.set_ragged_offset(starts)
            self.tensors[name] = tensor

    def build(self) -> Graph:
        """The graph, ready to run."""
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([self.cudnn.heur_mode.A])
        self.graph.check_support()
        self.graph.build_plans()
        return Graph(self.graph, self.tensors, self.graph.get_workspace_size())


@lru_cache(maxsize=64)
def _forward_graph(sizes: Sizes) -> Graph:
    builder = _Builder(sizes)
    o, lse = builder.graph.sdpa(
        name="attention", generate_stats=True, **builder.inputs("q", "k", "v"), **builder.options
    )
    builder.outputs(o=o, lse=lse)
    return builder.build()


@lru_cache(maxsize=64)
def _backward_graph(sizes: Sizes) -> Graph:
    builder = _Builder(sizes)
    inputs = builder.inputs("q", "k", "v", "o", "do", "lse")
    dq, dk, dv = builder.graph.sdpa_backward(
        name="attention_backward",
        q=inputs["q"],
        k=inputs["k"],
        v=inputs["v"],
        o=inputs["o"],
        dO=inputs["do"],
        stats=inputs["lse"],
        max_total_seq_len_q=sizes.total_q,
        max_total_seq_len_kv=sizes.total_k,
        use_deterministic_algorithm=sizes.deterministic,
        **builder.options,
    )
    builder.outputs(dq=dq, dk=dk, dv=dv)
    return builder.build()
