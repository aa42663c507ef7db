"""Which rows of which Megatron tensor are which rows of which Hugging Face tensor.

Pure names and integers. Every tensor is seen as rows: [r, c] has r of them, [e, r, c] has e * r, and [n] has
its n numbers. Then every difference between the two sides is one of row order (but for padding at the end of
the vocabulary, and for ZERO_CENTRED), and one table gives both ways.

Sources: transformers 5.24, models/qwen3_5, qwen3_5_moe and qwen3_next; megatron-core 0.19.2, what its own
model of this shape stores, and core/transformer/attention.py, `get_query_key_value_tensors`, for the order
[queries, gates, key, value] of a group; vLLM, model_executor/models/qwen3_next_mtp.py, for the names under
`mtp.` and the order of the two halves of `mtp.fc`.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import NamedTuple

from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_linear_attention_pattern,
    get_moe_layer_pattern,
)

FLOAT32_KEYS = ("self_attention.A_log", "self_attention.dt_bias", "self_attention.out_norm.weight")
"""How the keys end that Megatron holds in fp32, whatever the model's dtype."""

ZERO_CENTRED = "self_attention.out_norm.weight"
"""How the keys end whose tensor is Hugging Face's less 1: there it multiplies by weight, as no other norm
does, and in Megatron by 1 + weight, as all norms do."""


class Rows(NamedTuple):
    """Rows start to stop of a tensor."""

    name: str
    start: int
    stop: int


Shape = tuple[int, ...]


def num_rows(shape: Shape) -> int:
    """Rows of a tensor."""
    return prod(shape[:-1]) if len(shape) > 1 else shape[0]


class RowMap:
    """A tensor as rows of others, in order.

    Attributes:
        parts: those rows.
        length: how many there are.
    """

    def __init__(self, parts: Iterable[Rows]):
        self.parts = tuple(parts)
        self._ends = list(accumulate(part.stop - part.start for part in self.parts))
        self.length = self._ends[-1]

    def cut(self, start: int, stop: int) -> list[Rows]:
        """What makes rows `start` to `stop`; nothing beyond `length`."""
        found = []
        index = bisect_right(self._ends, start)
        while start < min(stop, self.length):
            name, first, last = self.parts[index]
            ahead = self._ends[index] - start
            taken = min(ahead, stop - start)
            found.append(Rows(name, last - ahead, last - ahead + taken))
            start += taken
            index += 1
        return found


@dataclass(frozen=True)
class Dialect:
    """How a Hugging Face checkpoint writes the same model."""

    prefix: str = "model."
    """Before the names of the language model; "model.language_model." in a multimodal wrapper."""
    grouped_in_proj: bool = False
    """Qwen3-Next: in_proj_qkvz and in_proj_ba, grouped by key head; else qkv, z, b, a in sections."""
    packed_experts: bool = True
    """All experts of a layer in two tensors, or three tensors per expert."""
    packed_mtp_experts: bool = True
    """The same for multi-token prediction."""
    mtp_layers: int = 0
    """Layers of multi-token prediction, 0 or 1."""

    @classmethod
    def of(cls, names: Iterable[str]) -> "Dialect":
        """The dialect that a checkpoint with tensors of these names is written in.

        Raises:
            ValueError: no language model, or more than one layer of multi-token prediction, whose norms and
                projection Hugging Face shares between layers and Megatron does not.
        """
        names = set(names)
        prefixes = [p for p in ("model.language_model.", "model.") if f"{p}embed_tokens.weight" in names]
        if not prefixes:
            raise ValueError(
                "no tensor model.embed_tokens.weight or model.language_model.embed_tokens.weight: this is no "
                "checkpoint of a Qwen3.5 or Qwen3-Next language model."
            )
        mtp_names = {name for name in names if name.startswith("mtp.")}
        mtp_layers = {name.split(".")[2] for name in mtp_names if name.startswith("mtp.layers.")}
        if len(mtp_layers) > 1:
            raise ValueError(
                f"multi-token prediction of {len(mtp_layers)} layers (mtp.layers.*) shares one mtp.fc, which "
                "Megatron cannot; only one layer can be converted, or none with --drop-mtp."
            )
        return cls(
            prefix=prefixes[0],
            grouped_in_proj=any(name.endswith("linear_attn.in_proj_qkvz.weight") for name in names),
            packed_experts=not _per_expert(names - mtp_names),
            packed_mtp_experts=not _per_expert(mtp_names),
            mtp_layers=1 if mtp_names else 0,
        )


def _per_expert(names: set[str]) -> bool:
    return any(name.endswith("mlp.experts.0.gate_proj.weight") for name in names)


@dataclass(frozen=True)
class Table:
    """Both sides of a model, tensor by tensor."""

    hf: dict[str, Shape] = field(default_factory=dict)
    megatron: dict[str, Shape] = field(default_factory=dict)
    to_megatron: dict[str, RowMap] = field(default_factory=dict)
    """Megatron key -> rows of Hugging Face tensors. Fewer than the tensor has: the rest is padding."""
    to_hf: dict[str, RowMap] = field(default_factory=dict)
    """Hugging Face name -> rows of Megatron tensors."""
    objects: list[str] = field(default_factory=list)
    """Keys of the states without content that Megatron expects beside the tensors."""
    layers: dict[str, list[str]] = field(default_factory=dict)
    """Megatron keys by the layer, or other part of the model, that they belong to."""


def build_table(config, vocab_size: int, padded_vocab_size: int, tied: bool, dialect: Dialect) -> Table:
    """The table of a model.

    Args:
        config: a `Qwen35Config`; of multi-token prediction the dialect decides.
        vocab_size: rows of Hugging Face's embedding.
        padded_vocab_size: rows of Megatron's.
        tied: whether the output layer is the embedding.
        dialect: how Hugging Face's side is written.
    """
    build = _Builder(config, dialect)
    prefix = dialect.prefix
    columns = config.hidden_size
    build.part = "embedding"
    embedding = build.hf(f"{prefix}embed_tokens.weight", vocab_size, columns)
    build.add("embedding.word_embeddings.weight", (padded_vocab_size, columns), [embedding])
    moe = get_moe_layer_pattern(config) if config.num_moe_experts else [0] * config.num_layers
    for number, linear in enumerate(get_linear_attention_pattern(config)):
        build.part = f"decoder.layers.{number}"
        build.layer(
            f"{build.part}.",
            f"{prefix}layers.{number}.",
            bool(linear),
            bool(moe[number]),
            dialect.packed_experts,
        )
    build.part = "output"
    build.same("decoder.final_layernorm.weight", f"{prefix}norm.weight", columns)
    if not tied:
        head = build.hf("lm_head.weight", vocab_size, columns)
        build.add("output_layer.weight", (padded_vocab_size, columns), [head])
    if dialect.mtp_layers:
        build.part = "mtp.layers.0"
        build.multi_token_prediction(bool(moe[-1]))
    build.invert()
    return build.table


def _sections(name: str, groups: int, sizes: list[int]) -> list[list[Rows]]:
    """Rows of each section of a tensor that repeats sections of `sizes` for every group."""
    block = sum(sizes)
    starts = [0, *accumulate(sizes)][:-1]
    return [
        [Rows(name, group * block + start, group * block + start + size) for group in range(groups)]
        for start, size in zip(starts, sizes, strict=True)
    ]


class _Builder:
    """Fills a table, layer by layer."""

    def __init__(self, config, dialect: Dialect):
        self.config, self.dialect, self.table = config, dialect, Table()
        self.part = ""

    def hf(self, name: str, *shape: int) -> Rows:
        """Enter a Hugging Face tensor; all its rows."""
        self.table.hf[name] = shape
        return Rows(name, 0, num_rows(shape))

    def add(self, key: str, shape: Shape, rows: Iterable[Rows]) -> None:
        """Enter a Megatron tensor."""
        self.table.megatron[key] = shape
        self.table.to_megatron[key] = RowMap(rows)
        self.table.layers.setdefault(self.part, []).append(key)

    def same(self, key: str, name: str, *shape: int) -> None:
        """Enter a tensor that is the same on both sides."""
        self.add(key, shape, [self.hf(name, *shape)])

    def linear(self, key: str, shape: Shape, rows: Iterable[Rows]) -> None:
        """Enter the weight of a Megatron linear, which has a state beside it."""
        self.add(f"{key}.weight", shape, rows)
        self.table.objects.append(f"{key}._extra_state/shard_0_1")

    def layer(self, key: str, name: str, linear: bool, moe: bool, packed: bool) -> None:
        """A transformer layer; `key` and `name` are what its names begin with on either side."""
        hidden = self.config.hidden_size
        mixer = "in_proj" if linear else "linear_qkv"
        self.same(f"{key}self_attention.{mixer}.layer_norm_weight", f"{name}input_layernorm.weight", hidden)
        if linear:
            self.gated_delta_net(f"{key}self_attention.", f"{name}linear_attn.")
        else:
            self.attention(f"{key}self_attention.", f"{name}self_attn.")
        norm = "pre_mlp_layernorm.weight" if moe else "mlp.linear_fc1.layer_norm_weight"
        self.same(key + norm, f"{name}post_attention_layernorm.weight", hidden)
        if moe:
            self.experts(f"{key}mlp.", f"{name}mlp.", packed)
        else:
            self.feed_forward(f"{key}mlp.", f"{name}mlp.", self.config.ffn_hidden_size)

    def gated_delta_net(self, key: str, name: str) -> None:
        config, hidden = self.config, self.config.hidden_size
        key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        keys, values = key_heads * config.linear_key_head_dim, value_heads * config.linear_value_head_dim
        if self.dialect.grouped_in_proj:
            qkvz = self.hf(f"{name}in_proj_qkvz.weight", 2 * keys + 2 * values, hidden)
            ba = self.hf(f"{name}in_proj_ba.weight", 2 * value_heads, hidden)
            sizes = [size // key_heads for size in (keys, keys, values, values)]
            sections = _sections(qkvz.name, key_heads, sizes)
            sections += _sections(ba.name, key_heads, [value_heads // key_heads] * 2)
        else:
            qkv = self.hf(f"{name}in_proj_qkv.weight", 2 * keys + values, hidden)
            single = (("z", values), ("b", value_heads), ("a", value_heads))
            sections = _sections(qkv.name, 1, [keys, keys, values])
            sections += [[self.hf(f"{name}in_proj_{part}.weight", size, hidden)] for part, size in single]
        for part, rows in zip(("query", "key", "value", "z", "beta", "alpha"), sections, strict=True):
            self.add(f"{key}in_proj.weight.{part}", (RowMap(rows).length, hidden), rows)
        width = config.linear_conv_kernel_dim
        conv = self.hf(f"{name}conv1d.weight", 2 * keys + values, 1, width)
        sections = _sections(conv.name, 1, [keys, keys, values])
        for part, rows in zip(("query", "key", "value"), sections, strict=True):
            self.add(f"{key}conv1d.weight.{part}", (RowMap(rows).length, 1, width), rows)
        self.same(f"{key}A_log", f"{name}A_log", value_heads)
        self.same(f"{key}dt_bias", f"{name}dt_bias", value_heads)
        self.same(f"{key}out_norm.weight", f"{name}norm.weight", config.linear_value_head_dim)
        out = self.hf(f"{name}out_proj.weight", hidden, values)
        self.linear(f"{key}out_proj", (hidden, values), [out])
        self.table.objects.append(f"{key}in_proj._extra_state/shard_0_1")

    def attention(self, key: str, name: str) -> None:
        config, hidden = self.config, self.config.hidden_size
        heads, groups, dim = config.num_attention_heads, config.num_query_groups, config.kv_channels
        share = heads // groups
        q = self.hf(f"{name}q_proj.weight", heads * 2 * dim, hidden)
        k = self.hf(f"{name}k_proj.weight", groups * dim, hidden)
        v = self.hf(f"{name}v_proj.weight", groups * dim, hidden)
        queries, gates = _sections(q.name, heads, [dim, dim])
        rows = []
        for group in range(groups):
            own = slice(group * share, (group + 1) * share)
            rows += [*queries[own], *gates[own]]
            rows += [Rows(x.name, group * dim, (group + 1) * dim) for x in (k, v)]
        self.linear(f"{key}linear_qkv", ((2 * heads + 2 * groups) * dim, hidden), rows)
        self.same(f"{key}q_layernorm.weight", f"{name}q_norm.weight", dim)
        self.same(f"{key}k_layernorm.weight", f"{name}k_norm.weight", dim)
        out = self.hf(f"{name}o_proj.weight", hidden, heads * dim)
        self.linear(f"{key}linear_proj", (hidden, heads * dim), [out])

    def feed_forward(self, key: str, name: str, width: int) -> None:
        hidden = self.config.hidden_size
        gate, up, down = self._gated(name, width)
        self.linear(f"{key}linear_fc1", (2 * width, hidden), [gate, up])
        self.linear(f"{key}linear_fc2", (hidden, width), [down])

    def _gated(self, name: str, width: int) -> tuple[Rows, Rows, Rows]:
        hidden = self.config.hidden_size
        gate, up = (self.hf(f"{name}{part}_proj.weight", width, hidden) for part in ("gate", "up"))
        return gate, up, self.hf(f"{name}down_proj.weight", hidden, width)

    def experts(self, key: str, name: str, packed: bool) -> None:
        config, hidden = self.config, self.config.hidden_size
        count, width = config.num_moe_experts, config.moe_ffn_hidden_size
        self.same(f"{key}router.weight", f"{name}gate.weight", count, hidden)
        if packed:
            fc1 = [self.hf(f"{name}experts.gate_up_proj", count, 2 * width, hidden)]
            fc2 = [self.hf(f"{name}experts.down_proj", count, hidden, width)]
        else:
            each = [self._gated(f"{name}experts.{number}.", width) for number in range(count)]
            fc1 = [rows for gate, up, _ in each for rows in (gate, up)]
            fc2 = [down for *_, down in each]
        shapes = {"linear_fc1": (count, 2 * width, hidden), "linear_fc2": (count, hidden, width)}
        for (part, shape), rows in zip(shapes.items(), (fc1, fc2), strict=True):
            self.add(f"{key}experts.experts.{part}.weight", shape, rows)
            state = f"{key}experts.experts.{part}._extra_state"
            self.table.objects.extend(f"{state}/shard_{number}_{count}" for number in range(count))
        if config.moe_shared_expert_intermediate_size:
            shared = config.moe_shared_expert_intermediate_size
            self.feed_forward(f"{key}shared_experts.", f"{name}shared_expert.", shared)
            self.same(f"{key}shared_experts.gate_weight", f"{name}shared_expert_gate.weight", 1, hidden)

    def multi_token_prediction(self, moe: bool) -> None:
        hidden = self.config.hidden_size
        self.same("mtp.layers.0.enorm.weight", "mtp.pre_fc_norm_embedding.weight", hidden)
        self.same("mtp.layers.0.hnorm.weight", "mtp.pre_fc_norm_hidden.weight", hidden)
        fc = self.hf("mtp.fc.weight", hidden, 2 * hidden)
        self.linear("mtp.layers.0.eh_proj", (hidden, 2 * hidden), [fc])
        packed = self.dialect.packed_mtp_experts
        self.layer("mtp.layers.0.transformer_layer.", "mtp.layers.0.", False, moe, packed)
        self.same("mtp.layers.0.final_layernorm.weight", "mtp.norm.weight", hidden)

    def invert(self) -> None:
        """Fill the way back; every row of every Hugging Face tensor must have been used once."""
        found: dict[str, list[tuple[int, Rows]]] = {name: [] for name in self.table.hf}
        for key, rows in self.table.to_megatron.items():
            at = 0
            for name, start, stop in rows.parts:
                found[name].append((start, Rows(key, at, at + stop - start)))
                at += stop - start
        for name, shape in self.table.hf.items():
            at = 0
            for start, rows in sorted(found[name]):
                assert start == at, f"{name}: row {at} is used {'twice' if start < at else 'nowhere'}"
                at += rows.stop - rows.start
            assert at == num_rows(shape), f"{name}: {at} of {num_rows(shape)} rows are used"
            self.table.to_hf[name] = RowMap(rows for _, rows in sorted(found[name]))
