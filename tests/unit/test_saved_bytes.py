"""The count of what autograd keeps, on tensors whose sizes are known."""

import torch
from torch.utils.checkpoint import checkpoint

from tests.benchmarks.recompute_memory import NONE, WAYS, memory_table, missed
from tests.helpers.saved_bytes import watch_saved_bytes

BYTES = 1000 * 4


def test_each_storage_counts_once_and_while_it_is_held():
    weight = torch.ones(1000, requires_grad=True)
    with watch_saved_bytes([weight]) as watch:
        y = (weight * 2).exp()  # exp keeps what it gives
        z = y * y[:]  # keeps the same storage twice
        assert watch.now() == BYTES
        w = z * torch.ones(1000)  # keeps what it multiplies by, which nobody else holds
        assert watch.now() == 2 * BYTES
        w.sum().backward()
        assert watch.now() == 0
    assert watch.peak == 2 * BYTES


def test_recomputed_is_not_kept_but_counts_at_most():
    x = torch.ones(1000, requires_grad=True)
    with watch_saved_bytes() as watch:
        y = checkpoint(lambda x: x.exp().exp().exp(), x, use_reentrant=True)
        assert watch.now() == BYTES  # its input
        y.sum().backward()
    assert watch.peak > 3 * BYTES


def test_emptied_storage_counts_nothing():
    with watch_saved_bytes() as watch:
        y = torch.ones(1000, requires_grad=True).exp()
        y.untyped_storage().resize_(0)
        assert watch.now() == 0


def test_benchmark_misses_what_saves_nothing_or_changes_the_loss():
    good = {name: (1.0, 50, 60) for name in WAYS} | {NONE: (1.0, 100, 100)}
    last = list(WAYS)[-1]
    assert missed({"headwise": good}) == []
    assert missed({"headwise": good | {last: (1.0, 100, 100)}}) == [f"headwise, {last}"]
    assert missed({"headwise": good | {last: (1.5, 50, 60)}}) == [f"headwise, {last}"]
    assert "| 50% |" in memory_table({"headwise": good})
