"""Losses of the output layer with the vocabulary on one rank and on several, alone and in a model."""

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_gdn.config import Qwen35Config
from megatron_gdn.layer_specs import get_qwen35_headwise_cp_spec
from megatron_gdn.model import Qwen35Model
from megatron_gdn.ops import linear_cross_entropy
from megatron_gdn.output_layer import OutputLayer
from megatron_gdn.stream import StreamParams, StreamPlan
from tests.helpers.cases import BF16_FACTOR, FP32_SHARDED, FP32_TRUTH, PACKINGS
from tests.helpers.compare import assert_close, assert_no_worse, local_part, relative_rms
from tests.helpers.distributed import make_groups, run_ranks

S, B, HIDDEN, VOCAB = 12, 2, 32, 640


def make_layer(groups, weight, *, sequence_parallel, dtype=torch.float32, host=False):
    config = Qwen35Config.from_size(
        "debug",
        tensor_model_parallel_size=groups.tp.size(),
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=dtype,
    )
    layer = (ColumnParallelLinear if host else OutputLayer)(
        HIDDEN,
        VOCAB,
        config=config,
        init_method=None,
        bias=False,
        tp_group=groups.tp,
    )
    with torch.no_grad():
        layer.weight.copy_(weight.chunk(groups.tp.size())[groups.tp.rank()])
    return layer


def use_small_blocks():
    """Blocks of 4 tokens, or 4 rows of the weight."""
    linear_cross_entropy.BLOCK_BYTES, linear_cross_entropy.BLOCK_STEP = 1, 4


def check_layer(rank, world_size, sequence_parallel, dtype, masked):
    use_small_blocks()
    hidden = (torch.randn(S, B, HIDDEN) / HIDDEN**0.5).to(dtype)
    weight, upstream = (4 * torch.randn(VOCAB, HIDDEN)).to(dtype), torch.randn(B, S)
    labels = torch.randint(VOCAB, (B, S))
    loss_mask = None
    if masked:  # not all zeros and ones
        loss_mask = torch.rand(B, S) * (torch.rand(B, S) > 0.3)
        upstream = -0.37 * loss_mask
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    logits = (exact[0] @ exact[1].t()).transpose(0, 1)
    want = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(B, S)
    want.backward(upstream.double())
    with make_groups(tp=world_size) as groups:
        layer = make_layer(groups, weight, sequence_parallel=sequence_parallel, dtype=dtype)
        mine = hidden.chunk(world_size)[rank].clone() if sequence_parallel else hidden.clone()
        losses, best = layer(mine.requires_grad_(), labels=labels, loss_mask=loss_mask, predict=True)
        assert layer(mine, labels=labels, loss_mask=loss_mask)[1] is None
        losses.backward(upstream)
        d_hidden, d_weight = exact[0].grad, exact[1].grad.chunk(world_size)[rank]
        if sequence_parallel:
            d_hidden = d_hidden.chunk(world_size)[rank]
        got = {"losses": losses, "d hidden": mine.grad, "d weight": layer.weight.grad}
        truths = {"losses": want, "d hidden": d_hidden, "d weight": d_weight}
        if dtype == torch.float32:
            for name, truth in truths.items():
                assert_close(name, got[name], truth, FP32_TRUTH, dtype=torch.float32)
            assert torch.equal(best, logits.argmax(-1))
        else:
            host = make_layer(groups, weight, sequence_parallel=sequence_parallel, dtype=dtype, host=True)
            theirs = mine.detach().clone().requires_grad_()
            rows = vocab_parallel_cross_entropy(host(theirs)[0], labels.t().contiguous(), tp_group=groups.tp)
            rows.backward(upstream.t().contiguous())
            hosts = {"losses": rows.t(), "d hidden": theirs.grad, "d weight": host.weight.grad}
            for name, truth in truths.items():
                assert_no_worse(name, got[name], hosts[name], truth, BF16_FACTOR)


@pytest.mark.parametrize("masked", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(("tp", "sequence_parallel"), ((1, False), (2, False), (2, True), (4, True)))
def test_losses_match_reference(tp, sequence_parallel, dtype, masked):
    """Losses, predictions, gradients for random upstream gradients; in bf16 no further off than the host."""
    run_ranks(check_layer, tp, sequence_parallel, dtype, masked)


def check_promises(rank, world_size, upstream_of):
    with make_groups() as groups:
        layer = make_layer(groups, torch.randn(VOCAB, HIDDEN), sequence_parallel=False)
        hidden = torch.randn(S, B, HIDDEN, requires_grad=True)
        loss_mask = (torch.rand(B, S) > 0.5).float()
        losses, _ = layer(hidden, labels=torch.randint(VOCAB, (B, S)), loss_mask=loss_mask)
        losses.backward(upstream_of(loss_mask))
        return hidden.grad.abs().sum().item(), layer.weight.grad.abs().sum().item()


def test_broken_promise_is_an_error():
    """Losses that are weighed otherwise than with loss_mask have no gradient."""
    for upstream_of in (torch.ones_like, lambda mask: mask * torch.arange(S), lambda mask: 1 - mask):
        with pytest.raises(AssertionError, match="no multiple of sum"):
            run_ranks(check_promises, 1, upstream_of)


def test_kept_promise_with_nothing_to_learn():
    """A loss that does not count at all has a gradient, zero."""
    assert run_ranks(check_promises, 1, torch.zeros_like) == [(0.0, 0.0)]
    assert min(run_ranks(check_promises, 1, lambda mask: 3e-9 * mask)[0]) > 0


def check_borders(rank, world_size):
    """The first and last label of each rank, labels of no rank, equal logits on several ranks."""
    with make_groups(tp=world_size) as groups:
        weight = torch.randn(VOCAB, HIDDEN)
        weight[[100, 500]] = 50 * torch.ones(HIDDEN)
        layer = make_layer(groups, weight, sequence_parallel=False)
        hidden = torch.rand(6, 1, HIDDEN, requires_grad=True)
        labels = torch.tensor([[0, VOCAB // 2 - 1, VOCAB // 2, VOCAB - 1, -100, VOCAB]])
        losses, best = layer(hidden, labels=labels, predict=True)
        logits = (hidden @ weight.t()).transpose(0, 1)
        want = F.cross_entropy(logits[0, :4], labels[0, :4], reduction="none")
        assert_close("losses", losses[0, :4], want, FP32_TRUTH)
        assert losses.isfinite().all()
        assert (best == 100).all()
        losses[0, 4:].sum().backward()
        want = torch.autograd.grad(logits[0, 4:].logsumexp(-1).sum(), hidden)[0]
        assert_close("d hidden of labels of no rank", hidden.grad, want, FP32_TRUTH)


def test_labels_at_borders_and_outside():
    """Masked labels may be any number; their loss is finite and their gradient that of the softmax."""
    run_ranks(check_borders, 2)


def build_model(kind, groups, state, tied):
    model_parallel_cuda_manual_seed(7)
    config = Qwen35Config.from_size(
        "debug",
        tensor_model_parallel_size=groups.tp.size(),
        sequence_parallel=groups.tp.size() > 1,
        context_parallel_size=groups.cp.size(),
        cp_comm_type="p2p",
        use_cpu_initialization=True,
        perform_initialization=False,
        transformer_impl="local",
        expert_tensor_parallel_size=1,
    )
    model = kind(
        config,
        get_qwen35_headwise_cp_spec(config),
        256,
        1024,
        position_embedding_type="none",
        share_embeddings_and_output_weights=tied,
        pg_collection=groups,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if state is None:
                parameter.normal_(std=0.1).abs_() if name.endswith("A_log") else parameter.normal_(std=0.1)
            else:
                parameter.copy_(state[name])
    return model


def check_model(rank, world_size, tp, tied, masked):
    """The host's model makes all logits and their cross entropy; ours has the same loss and gradients."""
    use_small_blocks()
    case = PACKINGS["borders_off_spans"]
    with make_groups(tp=tp, cp=world_size // tp) as groups:
        cp, cp_rank = groups.cp.size(), groups.cp.rank()
        tokens, labels = torch.randint(256, (2, 1, case.seq_len))
        parts = [local_part(x, "zigzag", cp, cp_rank, 1) for x in (tokens, labels, case.positions)]
        plan = StreamPlan("zigzag", cp, cp_rank, case.seq_len, 1, case.borders, torch.device("cpu"))
        params = StreamParams(qkv_format="thd", plan=plan)
        upstream = torch.rand(1, parts[0].shape[1])
        host = build_model(GPTModel, groups, None, tied)
        ours = build_model(Qwen35Model, groups, dict(host.named_parameters()), tied)
        assert host.state_dict().keys() == ours.state_dict().keys()
        losses = {}
        for name, model in (("host", host), ("ours", ours)):
            out = model(
                parts[0],
                parts[2],
                None,
                labels=parts[1],
                packed_seq_params=params,
                loss_mask=upstream if masked else None,
            )
            out.backward(upstream)
            losses[name] = out
        assert_close("losses", losses["ours"], losses["host"], FP32_SHARDED)
        for (name, mine), theirs in zip(ours.named_parameters(), host.parameters(), strict=True):
            assert_close(f"d {name}", mine.grad, theirs.grad, FP32_SHARDED)
        with torch.no_grad():
            asked = [m(parts[0], parts[2], None, packed_seq_params=params) for m in (host, ours)]
        assert asked[1].shape == (1, parts[0].shape[1], 256 // tp)
        assert relative_rms(asked[1], asked[0]) == 0


@pytest.mark.parametrize(("tied", "masked"), ((False, False), (True, True)))
@pytest.mark.parametrize(("ranks", "tp"), ((1, 1), (2, 2), (2, 1)))
def test_model_has_the_hosts_loss(ranks, tp, tied, masked):
    """Tensor and sequence parallel, context parallel, tied embeddings; and logits for who asks for them."""
    run_ranks(check_model, ranks, tp, tied, masked)


def hooks_called(rank, world_size):
    with make_groups() as groups:
        model = build_model(Qwen35Model, groups, None, False)
        called = []
        model.output_layer.register_forward_pre_hook(lambda module, inputs: called.append(module))
        case = PACKINGS["one_document"]
        tokens = torch.randint(256, (1, case.seq_len))
        plan = StreamPlan("zigzag", 1, 0, case.seq_len, 1, case.borders, torch.device("cpu"))
        params = StreamParams(qkv_format="sbhd", plan=plan)
        model(tokens, case.positions, None, labels=tokens, packed_seq_params=params)
        return len(called)


def test_losses_wait_for_the_weight():
    """The host's overlapped all-gather of parameters waits in a hook of the module's call."""
    assert run_ranks(hooks_called, 1) == [1]
