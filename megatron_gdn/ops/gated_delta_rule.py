"""The gated delta rule over rows of tokens: the one door to its kernels.

Per value head, S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T and
o_t = S_t^T q_t / sqrt(K), with q, k l2-normalised, g = -exp(A_log) softplus(a + dt_bias) and
beta = sigmoid(b). A row is an affine map of the state that enters it, X_out = M X_in + S; the pair
[M | S] is the row's *summary*, which is all that another rank needs to know of it.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024).

Legend: R rows, s tokens per row, H value heads, h key heads, G = H / h, K key and V value head dim.
"""

from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from megatron_gdn.ops import gated_delta_rule_fla, gated_delta_rule_flash_qla, gated_delta_rule_torch
from megatron_gdn.ops.gated_delta_rule_gates import gates
from megatron_gdn.rows import Rows, StateExchange

_BACKENDS = {
    "flash_qla": gated_delta_rule_flash_qla,
    "fla": gated_delta_rule_fla,
    "torch": gated_delta_rule_torch,
}
"""Fastest first. Each has `run`."""
GDN_BACKENDS: tuple[str, ...] = ("auto", *_BACKENDS)


@dataclass(frozen=True)
class Backend:
    """A kernel that was chosen, and why the faster ones were not."""

    name: str
    passed_over: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name + "".join(f" (not {why})" for why in self.passed_over)


def _version(package: str) -> tuple[int, ...] | None:
    """Installed release of a package, None without it."""
    try:
        release = version(package).partition("+")[0].split(".")[:3]
    except PackageNotFoundError:
        return None
    return tuple(int(part) for part in release if part.isdigit())


def _why_not_a_gpu_kernel(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA device, got {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it needs --bf16 or --fp16, got {dtype}"
    return None


def _why_not_fla(device: torch.device, dtype: torch.dtype) -> str | None:
    if why := _why_not_a_gpu_kernel(device, dtype):
        return why
    triton = _version("triton") or ()
    hopper = torch.cuda.get_device_capability(device) == (9, 0)
    if hopper and (3, 4) <= triton < (3, 7, 1) and _version("tilelang") is None:
        shown = ".".join(map(str, triton))
        return f"its backward raises on Hopper with Triton {shown}; install tilelang or Triton >= 3.7.1"
    return None


def _why_not_flash_qla(device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int]) -> str | None:
    if why := _why_not_a_gpu_kernel(device, dtype):
        return why
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"it is tested on compute capability 9.0 only, got {'.'.join(map(str, capability))}"
    if head_dims != (128, 128):
        return f"it needs --linear-key-head-dim and --linear-value-head-dim 128, got {head_dims}"
    tested = gated_delta_rule_flash_qla.TESTED_VERSION
    if _version("flash-qla") != tested:
        return f"it needs flash-qla {'.'.join(map(str, tested))} installed: pip install 'megatron_gdn[gpu]'"
    return None


@lru_cache(maxsize=64)
def choose_backend(
    device: torch.device, dtype: torch.dtype, head_dims: tuple[int, int], requested: str = "auto"
) -> Backend:
    """Which kernel runs for tensors of this device, dtype and head dims (key, value).

    Raises:
        ValueError: `requested` is unknown or cannot run here.
    """
    if requested not in GDN_BACKENDS:
        raise ValueError(f"--gdn-backend {requested!r} is unknown; choose one of {', '.join(GDN_BACKENDS)}.")
    reasons = {
        "flash_qla": _why_not_flash_qla(device, dtype, head_dims),
        "fla": _why_not_fla(device, dtype),
        "torch": None,
    }
    if requested == "auto":
        names = list(reasons)
        name = next(n for n in names if reasons[n] is None)
        return Backend(name, tuple(f"{n}: {reasons[n]}" for n in names[: names.index(name)]))
    if reasons[requested]:
        raise ValueError(
            f"--gdn-backend {requested} cannot run here: {reasons[requested]}; use --gdn-backend auto."
        )
    return Backend(requested)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    rows: Rows,
    exchange: StateExchange | None = None,
    backend: str = "auto",
) -> Tensor:
    """Run the rule over every row, state set to zero where a document begins.

    Args:
        q: [R, s, h, K], any floating dtype; l2-normalised, as `causal_conv1d_silu` gives it.
        k: [R, s, h, K]; likewise.
        v: [R, s, H, V]; value head i reads key head i // G.
        a: raw decay gate, [R, s, H].
        b: raw write gate, [R, s, H].
        A_log: [H], fp32.
        dt_bias: [H], fp32.
        rows: document borders in the rows.
        exchange: turns the rows' summaries into the states that enter them; None when every row
            starts with a zero state.
        backend: one of `GDN_BACKENDS`.

    Returns:
        o, [R, s, H, V] in v's dtype.

    Raises:
        ValueError: value heads are no multiple of key heads, or a backend that cannot run here.

    Communication: none but what `exchange` does, called once; on flash_qla once more in backward.
    """
    if v.shape[2] % q.shape[2]:
        raise ValueError(
            f"--linear-num-value-heads must be a multiple of --linear-num-key-heads; "
            f"this rank has {v.shape[2]} and {q.shape[2]}."
        )
    chosen = choose_backend(v.device, v.dtype, (k.shape[3], v.shape[3]), backend)
    g, beta = gates(a, b, A_log, dt_bias)
    return _BACKENDS[chosen.name].run(q, k, v, g, beta, rows, exchange)
