"""Comparisons that say what is wrong, where, and on which rank."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gdn import cp_layout


def relative_rms(got: Tensor, want: Tensor) -> float:
    """Root mean square of got - want over that of want; infinite if want is zero and got is not."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    difference = (got - want).norm().item()
    return 0.0 if difference == 0 else difference / want.norm().item() if want.any() else float("inf")


def assert_close(
    name: str, got: Tensor, want: Tensor, tolerance: float, *, dtype: torch.dtype | None = None
) -> None:
    """Check shape, dtype, finiteness and the relative RMS error; tolerance 0 means bit for bit.

    Args:
        name: of the tensor, for the message.
        got: what the code under test gave.
        want: what is right.
        tolerance: largest relative RMS, from `tests.helpers.cases`.
        dtype: what `got` must have, if not the dtype of `want` (a float64 truth).
    """
    where = f"rank {dist.get_rank()}: {name}" if dist.is_initialized() else name
    assert got is not None, f"{where}: there is no tensor (no gradient reached it)"
    dtype = want.dtype if dtype is None else dtype
    assert got.shape == want.shape, f"{where}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
    assert got.dtype == dtype, f"{where}: {got.dtype}, want {dtype}"
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    assert want.isfinite().all(), f"{where}: the expected value itself is not finite"
    if not got.isfinite().all():
        at = tuple((~got.isfinite()).nonzero()[0].tolist())
        raise AssertionError(f"{where}: not finite, first at {at}: got {got[at].item()}")
    error = relative_rms(got, want)
    if error <= tolerance:
        return
    difference = (got - want).abs()
    bad = (difference > tolerance * want.square().mean().sqrt()).nonzero()
    at = tuple(bad[0].tolist())
    raise AssertionError(
        f"{where}: relative RMS error {error:.3e}, tolerance {tolerance:.1e}; {len(bad)} of {got.numel()} "
        f"elements off by more than that share of the RMS, first at {at}: got {got[at].item():.9g}, "
        f"want {want[at].item():.9g}; largest difference {difference.max().item():.3e}"
    )


def assert_no_worse(name: str, got: Tensor, unsharded: Tensor, truth: Tensor, factor: float) -> None:
    """Check that `got` is at most `factor` times as far from `truth` as the unsharded path is."""
    limit = factor * relative_rms(unsharded, truth)
    assert_close(name, got, truth, limit, dtype=unsharded.dtype)


def summed_grads(
    named_parameters: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """Gradients by name, in float32 or wider, summed over the ranks of `group` (None: as they are).

    Reads `main_grad` where the host's gradient buffer put it, else `grad`.
    """
    sums = {}
    for name, parameter in named_parameters:
        grad = getattr(parameter, "main_grad", None)
        grad = parameter.grad if grad is None else grad
        assert grad is not None, f"no gradient reached {name}"
        grad = grad.detach().to(torch.promote_types(grad.dtype, torch.float32)).clone()
        if group is not None:
            dist.all_reduce(grad, group=group)
        sums[name] = grad
    return sums


def local_part(stream: Tensor, layout: str, cp_size: int, cp_rank: int, dim: int) -> Tensor:
    """The spans of one rank, in the order of its buffer, cut from `dim` of the whole stream."""
    ranges = cp_layout.local_ranges(layout, cp_size, cp_rank, stream.shape[dim])
    return torch.cat([stream.narrow(dim, start, end - start) for start, end in ranges], dim)


def join_parts(parts: Sequence[Tensor], layout: str, dim: int) -> Tensor:
    """The whole stream from the buffers of all ranks; inverse of `local_part`."""
    seq_len = sum(part.shape[dim] for part in parts)
    spans = {}
    for rank, part in enumerate(parts):
        ranges = cp_layout.local_ranges(layout, len(parts), rank, seq_len)
        lengths = [end - start for start, end in ranges]
        spans |= {start: span for (start, _), span in zip(ranges, part.split(lengths, dim), strict=True)}
    return torch.cat([spans[start] for start in sorted(spans)], dim)
