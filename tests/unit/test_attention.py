"""Which keys a rank's queries meet, RoPE, and what attention refuses; integers and one process."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.enums import AttnMaskType

from megatron_gdn import attention_cp
from megatron_gdn.attention import CPCoreAttention, GatedSelfAttention, rope_tables
from megatron_gdn.attention_keys import key_turns
from megatron_gdn.config import Qwen35Config
from megatron_gdn.ops.qk_norm_rope import apply_rope
from megatron_gdn.stream import StreamPlan, dense_plan
from megatron_gdn.validation import CP_COMM_TYPES
from tests.helpers.cases import EXACT, FP32_TRUTH, PACKINGS
from tests.helpers.compare import assert_close, relative_rms
from tests.helpers.reference import apply_rope_reference

CPU = torch.device("cpu")
LAYOUTS = ("zigzag", "contiguous")


def _plan(packing, layout, cp_size, cp_rank) -> StreamPlan:
    case = PACKINGS[packing]
    return StreamPlan(layout, cp_size, cp_rank, case.seq_len, case.batch, case.borders, CPU)


def _needed_pairs(packing) -> torch.Tensor:
    """[S, S], 1 where the query (row) sees the key (column)."""
    document = (PACKINGS[packing].positions[0] == 0).cumsum(0)
    return (document[:, None] == document[None, :]).tril().int()


@pytest.mark.parametrize("keys_at_once", [10_000, 40])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("packing", PACKINGS)
def test_squares_and_rectangles_meet_every_pair_once(packing, cp_size, layout, keys_at_once, monkeypatch):
    """All ranks together compute what causal attention inside documents needs, no more and not twice."""
    monkeypatch.setattr(attention_cp, "KEYS_AT_ONCE", keys_at_once)
    needed = _needed_pairs(packing)
    for cp_comm_type in CP_COMM_TYPES:
        met = torch.zeros_like(needed)
        for rank in range(cp_size):
            plan = _plan(packing, layout, cp_size, rank)
            for start, end in plan.ranges:
                met[start:end, start:end] += needed[start:end, start:end]
            for turn in key_turns(plan, cp_comm_type):
                key_positions = torch.cat([torch.arange(0), *(torch.arange(a, b) for a, b in turn.ranges)])
                found = list(attention_cp.rectangles(plan, turn.ranges))
                assert len(found) <= len(plan.ranges) or keys_at_once < plan.seq_len or cp_comm_type == "p2p"
                for span, length, keys, recurs in found:
                    first, num_keys = plan.ranges[span][0], keys.stop - keys.start
                    met[first : first + length, key_positions[keys]] += 1
                    whole = num_keys == keys_at_once or num_keys % plan.span_len == 0
                    assert 0 < num_keys <= keys_at_once
                    assert recurs == (length == plan.span_len and whole)
        assert torch.equal(met, needed)


@pytest.mark.parametrize("packing", PACKINGS)
def test_rope_turns_by_position_in_document(packing):
    """Every rank's tokens are turned as those of the whole stream are, in float32."""
    case = PACKINGS[packing]
    x = torch.randn(case.batch, case.seq_len, 3, 32)
    want = apply_rope_reference(x.double(), case.positions, rotary_percent=0.25, base=10_000)
    for layout in LAYOUTS:
        for rank in range(4):
            plan = _plan(packing, layout, 4, rank)
            local = [torch.cat([y[:, a:b] for a, b in plan.ranges], 1).transpose(0, 1) for y in (x, want)]
            got = apply_rope(local[0], *rope_tables(plan, 8, 10_000))
            assert_close(f"{layout} {rank}", got, local[1], FP32_TRUTH, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_is_the_hosts_for_a_dense_stream(monkeypatch, dtype):
    """Bit for bit in float32; in bfloat16 no further from the truth (the host rounds cos and sin first)."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CPU)
    x = torch.randn(96, 2, 3, 32).to(dtype)
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    host = RotaryEmbedding(32, 0.25, rotary_base=10_000, use_cpu_initialization=True, cp_group=group)
    config = Qwen35Config.from_size("debug", apply_rope_fusion=False)
    want = apply_rotary_pos_emb(x, host(96), config=config, cp_group=group)
    got = apply_rope(x, *rope_tables(dense_plan("zigzag", 1, 0, 96, 2, CPU), 8, 10_000))
    if dtype == torch.float32:
        assert_close("x", got, want, EXACT)
    positions = torch.arange(96).repeat(2, 1)
    truth = apply_rope_reference(
        x.double().transpose(0, 1), positions, rotary_percent=0.25, base=10_000
    ).transpose(0, 1)
    assert got.dtype == dtype
    assert relative_rms(got, truth) <= relative_rms(want, truth)


def test_rope_tables_are_made_once_per_plan():
    """All layers of a microbatch share one pair of tensors; another plan has its own."""
    plan, other = (StreamPlan("zigzag", 1, 0, 8, 1, borders, CPU) for borders in ((0, 8), (0, 3, 8)))
    first = rope_tables(plan, 8, 10_000)
    assert all(a is b for a, b in zip(first, rope_tables(plan, 8, 10_000), strict=True))
    assert not torch.equal(first[0], rope_tables(other, 8, 10_000)[0])
    assert not torch.equal(first[0], rope_tables(plan, 8, 20_000)[0])


def _core(**changes) -> CPCoreAttention:
    """A core attention for one rank; `changes` are config fields or arguments."""
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    arguments = {
        "layer_number": 1,
        "attn_mask_type": AttnMaskType.causal,
        "attention_type": "self",
        "cp_comm_type": None,
        "softmax_scale": None,
        "pg_collection": SimpleNamespace(cp=group, tp=group),
    }
    fields = {name: value for name, value in changes.items() if name not in arguments}
    arguments |= {name: value for name, value in changes.items() if name in arguments}
    return CPCoreAttention(config=Qwen35Config.from_size("debug", **fields), **arguments)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cp_comm_type": "a2a"}, ("--cp-comm-type a2a", "all_gather or p2p")),
        ({"cp_comm_type": "a2a+p2p"}, ("--cp-comm-type a2a+p2p", "all_gather or p2p")),
        ({"attn_mask_type": AttnMaskType.padding}, ("attn_mask_type", "padding", "causal")),
        ({"attn_mask_type": AttnMaskType.no_mask}, ("attn_mask_type", "no_mask", "causal")),
        ({"attention_type": "cross"}, ("attention_type cross", "self")),
        ({"attention_dropout": 0.1}, ("--attention-dropout 0.1", "0.0")),
        ({"window_size": (128, 0)}, ("--window-size (128, 0)", "None")),
        ({"softmax_type": "learnable"}, ("--softmax-type learnable", "vanilla")),
        ({"qk_clip": True}, ("--qk-clip True", "False")),
        ({"log_max_attention_logit": True}, ("--log-max-attention-logit True", "False")),
    ],
)
def test_core_attention_refuses(changes, words):
    """What would change the result and is not implemented: flag, what was got, what is supported."""
    with pytest.raises(ValueError, match="is not supported by attention") as error:
        _core(**changes)
    assert all(word in str(error.value) for word in words)


def test_core_attention_refuses_at_the_call():
    """A bias, or a mask type that differs from the one that the layer was built for."""
    x = torch.randn(8, 1, 4, 32)
    with pytest.raises(ValueError, match="attention_bias a Tensor is not supported"):
        _core()(x, x, x, None, attention_bias=torch.zeros(1))
    with pytest.raises(ValueError, match="attn_mask_type .*padding.* is not supported"):
        _core()(x, x, x, None, attn_mask_type=AttnMaskType.padding)


def test_core_attention_takes_windowless_layers_of_a_windowed_model():
    """The host says per layer whether the window holds."""
    assert _core(window_size=(128, 0), window_attn_skip_freq=2, layer_number=2)
    with pytest.raises(ValueError, match="--window-size"):
        _core(window_size=(128, 0), window_attn_skip_freq=2, layer_number=1)


def test_core_attention_settings():
    """The ring is the default; the scale is the given one or that of the head dim."""
    layer = _core()
    assert (layer.cp_comm_type, layer.softmax_scale) == ("p2p", 32**-0.5)
    layer = _core(cp_comm_type="all_gather", softmax_scale=0.5)
    assert (layer.cp_comm_type, layer.softmax_scale) == ("all_gather", 0.5)
    assert not list(layer.parameters())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rotary_interleaved": True, "apply_rope_fusion": False}, "--rotary-interleaved True"),
        ({"no_rope_freq": [0, 0, 0, 1]}, "--no-rope-freq"),
        ({"mrope_section": [2, 1, 1]}, "--mrope-section"),
        (
            {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn", "moe_act"]},
            r"--offload-modules \['core_attn'\]",
        ),
    ],
)
def test_gated_self_attention_refuses_settings(changes, words):
    """Refused before anything is built."""
    config = Qwen35Config.from_size("debug")
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=f"{words}.* is not supported by gated self-attention"):
        GatedSelfAttention(config, None, 1)
