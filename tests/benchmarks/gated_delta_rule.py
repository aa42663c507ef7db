"""How fast is the gated delta rule on a GPU, with and without context parallelism, beside its rivals?

python -m tests.benchmarks.gated_delta_rule    on a GPU with `pip install '.[gpu]'`, from the root of the
repository; writes results/gated_delta_rule.md

Exit status 1 if a result differs from FlashQLA's, or a ratio is over its limit.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.benchmarks import runs  # isort: split

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_gdn.ops.gated_delta_rule import gated_delta_rule
from megatron_gdn.rows import Rows
from tests.benchmarks.gpu import fla_with_flash_qla, milliseconds

TOKENS = (131072, 32768)
KEY_HEADS, VALUE_HEADS, DIM = 16, 32, 128
"""Qwen3.5-35B-A3B at tensor parallel size 1."""
CP = 4
"""Of the chunkwise rank: so many ranks' summaries are scanned, all but its own given."""
DECAYS = {
    "forgets": "as initialised: A_log = log(1..16), dt_bias 1, a state lasts for a token or two",
    "lasts": "A_log and dt_bias such that heads keep their state for 10 to 100,000 tokens",
}
LIMITS = {
    "ours, CP 1": ("FlashQLA", 1.05),
    "ours, headwise share of CP 2": ("FlashQLA, heads / 2", 1.05),
    "ours, headwise share of CP 4": ("FlashQLA, heads / 4", 1.05),
    "ours, chunkwise rank, contiguous": ("ours, CP 1", 1.5),
    "ours, chunkwise rank, zigzag": ("ours, chunkwise rank, contiguous", 1.15),
}
"""What each may take at most, as a multiple of another, forward and backward."""


def make_inputs(tokens: int, decay: str, share: int = 1) -> list[Tensor]:
    """q, k, v, a, b, A_log, dt_bias, as a layer makes them; `share`: ranks among which heads are dealt."""
    h, H = KEY_HEADS // share, VALUE_HEADS // share
    q, k, v = (torch.randn(1, tokens, n, DIM, device=runs.DEVICE, dtype=torch.bfloat16) for n in (h, h, H))
    a, b = (torch.randn(1, tokens, H, device=runs.DEVICE, dtype=torch.bfloat16) for _ in range(2))
    if decay == "forgets":
        A_log, dt_bias = torch.linspace(1, 16, H, device=runs.DEVICE).log(), torch.ones(H, device=runs.DEVICE)
    else:
        # softplus(a - 3) is about 0.08 for a around 0
        A_log, dt_bias = (
            torch.linspace(-9, 0, H, device=runs.DEVICE),
            torch.full((H,), -3.0, device=runs.DEVICE),
        )
    return [x.requires_grad_() for x in (q, k, v, a, b, A_log, dt_bias)]


@torch.compile
def compiled_gates(a, b, A_log, dt_bias):
    """As megatron-core compiles them."""
    return -A_log.exp() * F.softplus(a.float() + dt_bias), b.sigmoid()


def host(q, k, v, a, b, A_log, dt_bias) -> Tensor:
    """What megatron-core 0.19.2 does around fla's kernel: norm outside, key heads repeated."""
    from fla.modules.l2norm import l2norm
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    heads, groups = q.shape[2], v.shape[2] // q.shape[2]
    q, k = l2norm(torch.cat([q, k], dim=2)).split(heads, dim=2)
    q, k = (x.repeat_interleave(groups, dim=2).contiguous() for x in (q, k))
    g, beta = compiled_gates(a, b, A_log, dt_bias)
    return chunk_gated_delta_rule(q, k, v, g=g, beta=beta)[0]


def fla_fused(q, k, v, a, b, A_log, dt_bias) -> Tensor:
    """Everything that fla can do in its kernels."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(
        q,
        k,
        v,
        g=a,
        beta=b,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        A_log=A_log,
        dt_bias=dt_bias,
    )[0]


def flash_qla(context=None, own_norm: bool = False) -> Callable[..., Tensor]:
    """FlashQLA itself, gates given: less work than all others here do.

    `own_norm`: of queries and keys, compiled by torch; else fla's, which is the faster.
    """

    def run(q, k, v, g, beta) -> Tensor:
        from fla.modules.l2norm import l2norm
        from flash_qla import chunk_gated_delta_rule

        if not own_norm:
            q, k = l2norm(q), l2norm(k)
        options = {"use_qk_l2norm_in_kernel": own_norm, "cp_context": context}
        return chunk_gated_delta_rule(q, k, v, g, beta, **options)[0]

    return run


def inter_and_intra(tokens: int):
    """FlashQLA's own context parallelism on a group of one."""
    from flash_qla.ops.gated_delta_rule.chunk.cp import build_cp_context

    return build_cp_context(
        torch.tensor([0, tokens], device=runs.DEVICE, dtype=torch.int32),
        enable_inter=True,
        enable_intra=True,
        group=torch.distributed.group.WORLD,
        num_v_heads=VALUE_HEADS,
        chunk_size=64,
        is_train=True,
    )


class OtherRanks:
    """The exchange of one rank of `CP`, the other ranks' summaries given; no network."""

    def __init__(self, mine: tuple[int, ...], spans: int):
        self._mine, self._spans = mine, spans
        self._given = torch.randn(1, VALUE_HEADS, DIM, 2 * DIM, device=runs.DEVICE) / DIM

    def __call__(self, summaries: Tensor) -> Tensor:
        return self._scan(summaries)

    def start_reverse(self, summaries: Tensor) -> Callable[[], Tensor]:
        return lambda: self._scan(summaries, reverse=True)

    def _scan(self, summaries: Tensor, reverse: bool = False) -> Tensor:
        own = dict(zip(self._mine, summaries.split(1), strict=True))
        state, entering = torch.zeros_like(summaries[:1, ..., DIM:]), {}
        for span in reversed(range(self._spans)) if reverse else range(self._spans):
            entering[span] = state
            m, s = own.get(span, self._given).split(DIM, dim=-1)
            state = torch.matmul(m, state) + s
        return torch.cat([entering[span] for span in self._mine])


def ours(tokens: int, spans_per_rank: int | None = None) -> Callable[..., Tensor]:
    """Our door on the whole stream, or on the spans of one chunkwise rank in a document of CP * tokens."""
    if spans_per_rank is None:
        rows, exchange = Rows.from_ranges((0, tokens), ((0, tokens),), 1, runs.DEVICE), None
    else:
        length, spans = tokens // spans_per_rank, CP * spans_per_rank
        mine = (1,) if spans_per_rank == 1 else (1, spans - 2)
        ranges = tuple((span * length, (span + 1) * length) for span in mine)
        rows = Rows.from_ranges((0, CP * tokens), ranges, 1, runs.DEVICE)
        exchange = OtherRanks(mine, spans)

    def run(q, k, v, a, b, A_log, dt_bias) -> Tensor:
        from fla.modules.l2norm import l2norm

        # In a layer the convolution does this on its way.
        q, k = l2norm(q), l2norm(k)
        cut = [x.view(rows.num_rows, rows.row_len, *x.shape[2:]) for x in (q, k, v, a, b)]
        return gated_delta_rule(*cut, A_log, dt_bias, rows, exchange, "flash_qla").view_as(v)

    return run


@dataclass(frozen=True)
class Times:
    """Medians in milliseconds, and MiB beyond the inputs at the peak of forward and backward."""

    forward: float
    both: float
    peak: float


def measure(function: Callable[..., Tensor], inputs: list[Tensor]) -> Times:
    """Forward without a graph; forward and backward to every input."""
    upstream = torch.randn_like(inputs[2])

    def both():
        torch.autograd.grad(function(*inputs), inputs, upstream)

    def forward():
        with torch.no_grad():
            function(*inputs)

    both()
    return Times(milliseconds(forward), milliseconds(both), runs.peak_gib(both) * 1024)


def gates_made(inputs: list[Tensor]) -> list[Tensor]:
    """q, k, v, g, beta: what FlashQLA is given."""
    q, k, v, a, b, A_log, dt_bias = inputs
    g = -A_log.exp() * F.softplus(a.float() + dt_bias)
    return [q, k, v, *(x.detach().requires_grad_() for x in (g, b.float().sigmoid()))]


def check_same(name: str, got: Tensor, want: Tensor) -> None:
    """Refuse to compare the speed of different results."""
    error = runs.relative_error(got, want)
    if not error <= 1e-2:
        raise RuntimeError(f"{name} differs from FlashQLA by {error:.1e}")


def compare(tokens: int, decay: str) -> dict[str, Times]:
    """All paths on the same stream; headwise shares on the same number of tokens, with fewer heads."""
    torch.manual_seed(1234)
    inputs = make_inputs(tokens, decay)
    given = gates_made(inputs)
    want = flash_qla()(*given).detach()
    results = {}
    whole = {
        "megatron-core": host,
        "fla": fla_fused,
        "FlashQLA with its own l2norm": flash_qla(own_norm=True),
        "FlashQLA": flash_qla(),
        "ours, CP 1": ours(tokens),
    }
    with fla_with_flash_qla(False):
        for name, function in whole.items():
            used = given if name.startswith("FlashQLA") else inputs
            check_same(name, function(*used).detach(), want)
            results[name] = measure(function, used)
    del want
    results["FlashQLA, inter and intra"] = measure(flash_qla(inter_and_intra(tokens)), given)
    results["ours, chunkwise rank, contiguous"] = measure(ours(tokens, 1), inputs)
    results["ours, chunkwise rank, zigzag"] = measure(ours(tokens, 2), inputs)
    for share in (2, 4):
        inputs = make_inputs(tokens, decay, share)
        results[f"FlashQLA, heads / {share}"] = measure(flash_qla(), gates_made(inputs))
        results[f"ours, headwise share of CP {share}"] = measure(ours(tokens), inputs)
    return results


def floor(tokens: int, rate: float) -> float:
    """Milliseconds to read what forward and backward must read and write what they must write, once."""
    qk, v, gates = 2 * KEY_HEADS * DIM * 2, VALUE_HEADS * DIM * 2, 2 * VALUE_HEADS * 2
    forward = qk + v + gates + v
    backward = qk + v + gates + v + qk + v + gates
    return tokens * (forward + backward) / rate


def rows_of(results: dict[str, Times], tokens: int, rate: float) -> list[list[str]]:
    """The table's rows; `rate`: bytes per millisecond."""
    rows = []
    for name, times in results.items():
        than, limit = LIMITS.get(name, ("FlashQLA", None))
        of_it = f"{times.both / results[than].both:.2f} of {than}" + (f" (limit {limit:g})" if limit else "")
        shortest = "" if "heads" in name else f"{floor(tokens, rate):.2f}"
        rows.append(
            [name, f"{times.forward:.2f}", f"{times.both:.2f}", of_it, f"{times.peak:,.0f}", shortest]
        )
    return rows


def missed_limits(results: dict[str, Times], where: str) -> list[str]:
    """Which limits are not kept, in words."""
    missed = []
    for name, (than, limit) in LIMITS.items():
        ratio = results[name].both / results[than].both
        if ratio > limit:
            missed.append(f"{name}, {where}: {ratio:.2f} of {than}, limit {limit}")
    return missed


def gather_stacked() -> None:
    """FlashQLA gathers into a stacked tensor, which gloo does not take."""
    gather = torch.distributed.all_gather_into_tensor
    torch.distributed.all_gather_into_tensor = lambda out, x, **kw: gather(
        out.view(-1, *x.shape[1:]), x, **kw
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write the tables."""
    arguments = runs.read_arguments(__doc__, argv, tiny=False)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    gather_stacked()
    ceilings = runs.Ceilings.measure()
    report = runs.LiveReport(
        arguments.results,
        "gated_delta_rule",
        "# The gated delta rule on a GPU",
        "",
        f"Forward and backward with raw gates, l2norm and rule, bf16, {KEY_HEADS} key, {VALUE_HEADS} value "
        f"heads of {DIM}; medians by CUDA events, launches hidden behind other work. FlashQLA is given its "
        f"gates. A chunkwise rank holds its tokens in a document of {CP} times as many, and scans the "
        f"summaries of {CP} ranks, those of the others given. Headwise shares see the whole stream with "
        "heads / CP. Floor: every input and gradient read once, every output written once, at the rate of a "
        "device copy.",
        "",
        *(f"- {name}: {what}" for name, what in DECAYS.items()),
        "",
        ceilings.text(),
    )
    missed = []
    for tokens in TOKENS:
        for decay in DECAYS:
            where = f"{tokens:,} tokens, {decay}"
            results = compare(tokens, decay)
            torch.cuda.empty_cache()
            report.table(where, ["path", "fwd, ms", "fwd+bwd, ms", "fwd+bwd is", "peak, MiB", "floor, ms"])
            for row in rows_of(results, tokens, ceilings.terabytes * 1e9):
                report.row(*row)
            missed += missed_limits(results, where)
    return report.verdict(missed, "every limit is kept")


if __name__ == "__main__":
    sys.exit(main())
