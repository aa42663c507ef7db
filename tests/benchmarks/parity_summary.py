"""The README's table of parity, from results/parity.md: one row per GDN mode, layout and CP size.

python -m tests.benchmarks.parity_summary
"""

from tests.benchmarks.report import RESULTS

BOUNDS = "| bound | | 1e-05 / 1e-03 | 1e-04 / 1e-03 | 1e-05 / 1e-03 | 1e-04 / 1e-03 | 2e-03 |"
HEADINGS = (
    "GDN mode, layout",
    "CP",
    "fp32 dense: loss 10 / 100 it.",
    "grad norm",
    "fp32 packed: loss 10 / 100 it.",
    "grad norm",
    "bf16 dense, packed: loss 10 it.",
)
NOISE = "last bit of the weights changed"


def read_results(text: str) -> dict[str, list[str]]:
    """Case -> its four figures (loss 10, loss 100, grad norm 10, grad norm 100) of a table in Markdown."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    return {case: figures[:4] for case, *figures in rows if case.startswith(("fp32", "bf16"))}


def worst(results: dict[str, list[str]], start: str, part: str) -> list[str]:
    """Largest figure of each column among the cases that start and go on so."""
    found = [figures for case, figures in results.items() if case.startswith(start) and part in case]
    if not found:
        raise ValueError(f"no case {start} ... {part} in the results; run tests.benchmarks.parity first.")
    return [max(column, key=lambda figure: float(figure or 0)) for column in zip(*found, strict=True)]


def summary(text: str) -> str:
    """The table."""
    results = read_results(text)
    cases = [(f"one rank, {NOISE} (noise floor)", 1, NOISE)]
    for mode in ("headwise", "chunkwise"):
        for layout in ("zigzag", "contiguous"):
            cases += [(f"{mode}, {layout}", cp, f"CP {cp}, {mode}, {layout}") for cp in (2, 4)]
    lines = ["| " + " | ".join(HEADINGS) + " |", "|---|--:|---|---|---|---|---|"]
    for title, cp, part in cases:
        cells = [title, str(cp)]
        for documents in ("dense", "packed"):
            loss, loss_all, norm, norm_all = worst(results, f"fp32, {documents}", part)
            cells += [f"{loss} / {loss_all}", f"{norm} / {norm_all}"]
        cells.append(", ".join(worst(results, f"bf16, {kind}", part)[0] for kind in ("dense", "packed")))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, BOUNDS])


if __name__ == "__main__":
    print(summary((RESULTS / "parity.md").read_text()))
