"""What was measured so far, kept in a JSON file, and its table: predictions beside measurements or "not run".

Parts and numbers of GPUs may be measured one at a time, on different days; each takes the place of what was
measured for it before.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.report import table
from tests.benchmarks.several_gpus.cases import PARTS, Case, Scale, gpu_counts, scaling_cases
from tests.benchmarks.several_gpus.predict import (
    GIB,
    USABLE,
    Prediction,
    Shape,
    longest_stream,
    predict,
)

NOT_RUN = "not run"
TOO_LONG = "out of memory"
MIB = 2**20

_INTRODUCTION = """# Several GPUs

Predicted: from bytes, FLOPs and rates of one H200, see `tests/benchmarks/several_gpus/predict.py`; written
before anything was measured. A column that was not measured says "not run".
"""
_SCALING = """## Strong scaling

One training step (forward and backward, bf16, no optimizer) of layers of {size}, one document in zigzag, no
tensor parallelism. A layer alone, or three GatedDeltaNet and one attention layer (p2p) with their experts,
recomputed in full. "The host's" is megatron-core's own GatedDeltaNet on the same machine. Time is the
slowest rank's, the median of the repeats. Exposed: the difference to the same step with every collective
replaced by copies inside the rank, from and into buffers of the same size; what hides behind computation is
not in it, and where copies cost more than what they replace it is below zero. Sent: by the rank that sends
most. Peak: of the rank that needs most.
"""
_LONGEST = """## Longest stream

Tokens that three headwise GatedDeltaNet layers and one attention layer of {size} with experts can train on:
weights and gradients in bf16, no optimizer state, no vocabulary, documents of {document} tokens. Known to
an eighth; a search stops at {limit} tokens per GPU.
"""
_LOST = """## A rank is lost

The last rank is lost in a backward pass: killed, or stopped so that its connections stay open. The others
must end by themselves and name the cause. A collective's time-out is {time_out:.0f} s here, which
`--distributed-timeout-minutes` sets in training; nothing else, as torchrun, looks after the ranks.
"""
_LOST_PREDICTIONS = {
    "killed": "the time-out and up to a minute for NCCL's watchdog; SIGABRT (-6)",
    "stopped": "the same",
}


class Figures:
    """Measurements by part and number of GPUs, in a file."""

    def __init__(self, file: Path):
        self.file = file
        self.parts: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}

    def add(self, part: str, gpus: int, origin: str, found: Any) -> None:
        """Keep what was found, in the file too.

        Args:
            part: one of `cases.PARTS`.
            gpus: how many took part.
            origin: machine, versions and commit.
            found: what JSON can hold.
        """
        self.parts.setdefault(part, {})[str(gpus)] = {"origin": origin, "found": found}
        self.file.write_text(json.dumps(self.parts, indent=1) + "\n")

    def get(self, part: str, gpus: int) -> Any:
        """What was found, None if it was not run."""
        return self.parts.get(part, {}).get(str(gpus), {}).get("found")

    def origins(self) -> Iterator[str]:
        """A line for each part."""
        for part in PARTS:
            for gpus, entry in sorted(self.parts.get(part, {}).items()):
                yield f"- {part}, {gpus} GPUs: {entry['origin']}"


def render(figures: Figures, scale: Scale, most: int, checks: dict[int, list[str]]) -> str:
    """The whole report.

    Args:
        figures: what was measured.
        scale: sizes.
        most: GPUs, at most.
        checks: names of the checks of correctness, by number of GPUs.
    """
    shape, counts = Shape.of(scale.size), gpu_counts(most)
    limit = f"{scale.search_limit:,}"
    origins = "\n".join(figures.origins()) or "- nothing was measured yet"
    return "\n".join(
        [
            _INTRODUCTION,
            f"- command: `python -m tests.benchmarks.several_gpus`\n{origins}\n",
            "## Correctness\n\nThe checks of tests/distributed, every rank; prediction: all pass.\n",
            _correctness(figures, checks),
            _SCALING.format(size=scale.size),
            *(f"{tokens:,} tokens\n\n{_scaling(figures, scale, counts, tokens)}" for tokens in scale.tokens),
            _LONGEST.format(size=scale.size, document=scale.document, limit=limit),
            _longest(figures, counts, shape),
            _LOST.format(time_out=scale.time_out),
            _lost(figures, [n for n in counts if n > 1]),
        ]
    )


def _correctness(figures: Figures, checks: dict[int, list[str]]) -> str:
    rows = []
    for gpus, names in checks.items():
        found = figures.get("parity", gpus)
        rows += [[name, NOT_RUN if found is None else found.get(name, NOT_RUN)] for name in names]
    return table(["check", "result"], rows)


def _scaling(figures: Figures, scale: Scale, counts: list[int], tokens: int) -> str:
    """One length: predicted and measured columns side by side."""
    kinds = ("time, ms", "tokens/s/GPU", "exposed, ms", "sent, MiB", "peak, GiB")
    head = ["what", "GPUs", *(f"{kind}{end}" for kind in kinds for end in (" predicted", ""))]
    shape, cases = Shape.of(scale.size), [c for n in counts for c in scaling_cases(scale, n)]
    cases = [case for case in cases if case.tokens == tokens]
    works = list(dict.fromkeys(case.work for case in cases))
    rows = []
    for case in sorted(cases, key=lambda case: (works.index(case.work), case.gpus)):
        predicted = predict(case, shape)
        found = figures.get("scaling", case.gpus) or {}
        pairs = zip(_expected(case, predicted), _measured(case, found.get(case.key)), strict=True)
        rows.append([case.work, case.gpus, *(cell for pair in pairs for cell in pair)])
    return table(head, rows)


def _cells(case: Case, seconds: float, exposed: float, sent: float, peak: float) -> list[str]:
    rate = case.tokens / seconds / case.gpus
    return [
        f"{seconds * 1e3:,.1f}",
        f"{rate:,.0f}",
        f"{exposed * 1e3:,.1f}",
        f"{sent / MIB:,.1f}",
        f"{peak / GIB:,.1f}",
    ]


def _expected(case: Case, predicted: Prediction) -> list[str]:
    cells = _cells(case, *predicted)
    if predicted.peak_bytes > USABLE:
        cells[0] = cells[1] = cells[2] = TOO_LONG
    return cells


def _measured(case: Case, found: dict[str, float] | None) -> list[str]:
    if found is None:
        return [NOT_RUN] * 5
    if not found:
        return [TOO_LONG] * 5
    seconds = found["seconds"]
    exposed = seconds - found["without_communication"]
    return _cells(case, seconds, exposed, found["sent_bytes"], found["peak_bytes"])


def _longest(figures: Figures, counts: list[int], shape: Shape) -> str:
    """Tokens of all GPUs."""
    rows = []
    for gpus in counts:
        found = figures.get("longest", gpus)
        for recompute in (False, True):
            cells = [NOT_RUN] * 2
            if found is not None:
                fits, too_long = found["recomputed" if recompute else "kept"]
                cells = [f"{fits * gpus:,}", "none tried" if too_long is None else f"{too_long * gpus:,}"]
            name = "full recomputation" if recompute else "no recomputation"
            rows.append([name, gpus, f"{longest_stream(gpus, recompute, shape):,}", *cells])
    return table(["activations", "GPUs", "predicted tokens", "fits", "too long"], rows)


def _lost(figures: Figures, counts: list[int]) -> str:
    """How the others ended."""
    rows = []
    for gpus in counts:
        for how, predicted in _LOST_PREDICTIONS.items():
            found = (figures.get("lost_rank", gpus) or {}).get(how)
            cells = [NOT_RUN] * 4
            if found is not None:
                seconds = [ending["seconds"] for ending in found]
                late = sum(s is None for s in seconds)
                slowest = f"{late} of {len(found)} NEVER" if late else f"{max(seconds):.1f}"
                codes = sorted({str(ending["exit_code"]) for ending in found})
                silent = sum(not ending["cause"] for ending in found)
                causes = sorted({ending["cause"] for ending in found if ending["cause"]})
                cells = [
                    slowest,
                    ", ".join(codes),
                    f"{len(found) - silent} of {len(found)}",
                    "; ".join(causes),
                ]
            rows.append([how, gpus, predicted, *cells])
    head = ["last rank", "GPUs", "predicted", "slowest ended after, s", "exit codes", "named a cause", "said"]
    return table(head, rows)
