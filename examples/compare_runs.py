"""Print the loss curves of two runs beside each other, and how far apart they are.

python examples/compare_runs.py CP=2:runs/a CP=1:runs/b [--picture both.png]

A run is LABEL:FOLDER; the folder holds the training_log.jsonl that pretrain_qwen35.py wrote (its --save
folder, or --tensorboard-dir).
"""

import argparse
import os
import sys
from itertools import count

from megatron_gdn.training_log import LOG_NAME, curve, draw_curves, read_log

MAX_ROWS = 12


def main() -> int:
    """Compare; the exit status is 2 when there is nothing to compare."""
    parser = argparse.ArgumentParser(description="Loss curves of two runs beside each other.")
    parser.add_argument(
        "runs", nargs=2, metavar="LABEL:FOLDER", help="the second one is what to compare with"
    )
    parser.add_argument("--picture", metavar="PNG", help="draw both curves there")
    args = parser.parse_args()
    try:
        (label, records), (label_ref, records_ref) = map(read_run, args.runs)
        training, training_ref = curve(records, "lm loss"), curve(records_ref, "lm loss")
        print(side_by_side(label, training, label_ref, training_ref))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    held_out, held_out_ref = curve(records, "validation loss"), curve(records_ref, "validation loss")
    if held_out.keys() & held_out_ref.keys():
        print("\nheld-out loss\n" + side_by_side(label, held_out, label_ref, held_out_ref))
    if args.picture:
        draw_curves({f"{label} training": training, f"{label_ref} training": training_ref}, args.picture)
    return 0


def read_run(run: str) -> tuple[str, list[dict]]:
    """Label and records of LABEL:FOLDER.

    Raises:
        ValueError: no LABEL:FOLDER, or no log in the folder.
    """
    label, colon, folder = run.partition(":")
    if not (label and colon and folder):
        raise ValueError(f"{run!r} is no LABEL:FOLDER, as in CP=2:runs/a.")
    path = os.path.join(folder, LOG_NAME)
    if not os.path.exists(path):
        raise ValueError(f"{run!r}: {path} does not exist; give the folder that the run's --save named.")
    return label, read_log(path)


def side_by_side(label: str, losses: dict[int, float], label_ref: str, reference: dict[int, float]) -> str:
    """A table of a few iterations, and the largest relative difference over all iterations.

    Args:
        label: heading of `losses`.
        losses: iteration -> loss.
        label_ref: heading of `reference`.
        reference: iteration -> loss to compare with.

    Raises:
        ValueError: no iteration is in both.
    """
    common = sorted(losses.keys() & reference.keys())
    if not common:
        raise ValueError(f"{label} and {label_ref} have no logged iteration in common.")
    difference = {i: abs(losses[i] - reference[i]) / abs(reference[i]) for i in common}
    step = next(n * 10**e for e in count() for n in (1, 2, 5) if common[-1] <= n * 10**e * MAX_ROWS)
    shown = sorted({common[0], *(i for i in common if i % step == 0), common[-1]})
    lines = [f"  {'iteration':>9}  {label:>10}  {label_ref:>10}  relative difference"]
    lines += [f"  {i:>9}  {losses[i]:>10.6f}  {reference[i]:>10.6f}  {difference[i]:.1e}" for i in shown]
    worst = max(common, key=difference.__getitem__)
    lines.append(
        f"  largest relative difference in {len(common)} iterations: {difference[worst]:.1e} "
        f"(iteration {worst})"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
