"""The benchmarks' own arithmetic and tables, on tiny inputs."""

import math

import pytest
import torch

from tests.benchmarks import comm_volume, hf_loss_curve, parity, parity_summary, rule_speed, training_runs
from tests.benchmarks.parity import Case, Run
from tests.benchmarks.report import RESULTS, table

LONG = parity.ITERATIONS["fp32"]


def a_run(
    *, loss_factors: dict[int, float] | None = None, norm_factors: dict[int, float] | None = None
) -> Run:
    """A run whose loss and grad norm are those of all others but for factors at some iterations (from 0)."""
    losses = [6.0 - 0.03 * i for i in range(LONG)]
    norms = [2.0 + 0.01 * i for i in range(LONG)]
    for values, factors in ((losses, loss_factors), (norms, norm_factors)):
        for i, factor in (factors or {}).items():
            values[i] *= factor
    return Run(losses, norms, digest="weights", seconds=1.0)


def test_table_is_markdown():
    """Head, rule and rows have the same number of columns."""
    assert table(["a", "b"], [["x", 1], ["y", 2]]).splitlines() == [
        "| a | b |",
        "| --- | ---: |",
        "| x | 1 |",
        "| y | 2 |",
    ]


def test_parity_cases_cover_every_pair():
    """Every attention mode meets every GDN mode, layout, size, kind of stream and dtype; none runs twice."""
    cases = parity.all_cases()
    assert len(set(cases)) == len(cases)
    parallel = [case for case in cases if case.cp > 1]
    for dtype in ("fp32", "bf16"):
        chosen = {(c.mode, c.layout, c.cp, c.packed) for c in parallel if c.dtype == dtype}
        assert len(chosen) == 16
        for name in ("mode", "layout", "cp", "packed"):
            assert len({(getattr(c, name), c.comm) for c in parallel if c.dtype == dtype}) == 4
    for number, case in enumerate(cases):
        assert case.reference in cases[: number + 1]


def test_parity_misses_what_is_beyond_a_bound():
    """Each bound is met just inside it and missed just outside it, in its own iterations only."""
    case, reference = Case(cp=2), a_run()

    def faults(**factors):
        return parity.missed(case, parity.differences(a_run(**factors), reference))

    assert faults() == []
    assert faults(loss_factors={9: 1 + 0.9e-5}, norm_factors={9: 1 - 0.9e-4}) == []
    assert faults(loss_factors={9: 1 + 1.1e-5}) == ["loss_early"]
    assert faults(norm_factors={0: 1 - 1.1e-4}) == ["norm_early"]
    assert faults(loss_factors={10: 1 + 0.9e-3}, norm_factors={99: 1 + 0.9e-3}) == []
    assert faults(loss_factors={10: 1 - 1.1e-3}) == ["loss"]
    assert faults(norm_factors={99: 1 + 1.1e-3}) == ["norm"]
    assert faults(loss_factors={50: math.nan}) == ["loss"]


def test_parity_table_and_verdicts():
    """References have no line, the noise floor has no bounds, a missed bound is named."""
    floor, good, bad = Case(coin=1), Case(cp=2), Case("chunkwise", cp=4)
    far = a_run(loss_factors={3: 1.01})
    runs = {Case(): a_run(), floor: far, good: a_run(), bad: far}
    lines = parity.parity_table(runs).splitlines()[2:]
    assert [line.split("|")[-2].strip() for line in lines] == [
        "noise floor",
        "pass",
        "FAIL (loss_early, loss)",
    ]


def test_parity_refuses_other_weights():
    """A run that loaded other weights than its reference is an error; so is a noise floor that did not."""
    parity.check_digests({Case(): a_run(), Case(cp=2): a_run()})
    other = Run([], [], digest="other weights", seconds=1.0)
    with pytest.raises(RuntimeError, match="CP 2.*wrong weights"):
        parity.check_digests({Case(): a_run(), Case(cp=2): other})
    with pytest.raises(RuntimeError, match="last bit.*wrong weights"):
        parity.check_digests({Case(): a_run(), Case(coin=1): a_run()})


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_parity_nudge_changes_the_last_bit(dtype):
    """Every number becomes a neighbour of what it was, some up and some down, and the digest shows it."""
    layer = torch.nn.Linear(16, 16, dtype=dtype)
    before, digest = layer.weight.detach().clone(), training_runs.digest([layer])
    assert digest == training_runs.digest([layer])
    with torch.no_grad():
        training_runs.nudge([layer], coin=1)
    infinity = torch.tensor(math.inf, dtype=dtype)
    up, down = (layer.weight == torch.nextafter(before, sign * infinity) for sign in (1, -1))
    assert (up ^ down).all() and up.any() and down.any()
    assert digest != training_runs.digest([layer])


def test_parity_memory_lasts():
    """The decay per token, softplus(dt_bias), is between 0.001 and 0.1 and differs between heads."""
    layer = torch.nn.Module()
    layer.dt_bias = torch.nn.Parameter(torch.ones(64))
    layer.other = torch.nn.Parameter(torch.ones(64))
    with torch.no_grad():
        parity.lengthen_memory([layer])
    step = torch.nn.functional.softplus(layer.dt_bias)
    assert 0.001 <= step.min() < 0.005 and 0.02 < step.max() <= 0.1
    assert (layer.other == 1).all()


def curves(**factors: float) -> dict[str, dict[str, dict]]:
    """fp32 runs of the loss curve that are alike, but for a factor on a run's losses from step 60 on."""
    losses = [6.0 - 0.01 * i for i in range(120)]
    later = {name.replace("_", " "): factor for name, factor in factors.items()}
    runs = {}
    for name, (_, _, coin) in hf_loss_curve.RUNS.items():
        factor = next((f for part, f in later.items() if part in name), 1.0)
        changed = losses[:60] + [loss * factor for loss in losses[60:]]
        runs[name] = {"losses": changed, "digest": f"weights {coin}", "seconds": 1.0}
    return {"fp32": runs}


def test_loss_curve_verdicts():
    """The bound is on every run, above and below the reference; NaN keeps none."""
    text, kept = hf_loss_curve.results_table(curves())
    assert kept and text.count("pass (") == 2 and text.count("floor, below") == 2
    for factor in (1 - 9e-6, 1 + 9e-6):
        assert hf_loss_curve.results_table(curves(chunkwise=factor))[1]
    for factor in (1 - 1.1e-5, 1 + 1.1e-5, math.nan):
        text, kept = hf_loss_curve.results_table(curves(chunkwise=factor))
        assert not kept and text.count("FAIL") == 1 and text.count("pass (") == 1
        text, kept = hf_loss_curve.results_table(curves(changed=factor))
        assert not kept and text.count("NOT below") == 2 and text.count("pass (") == 2


def test_loss_curve_refuses_other_weights():
    """Runs that did not begin with the reference's weights, and a noise floor that did."""
    for name, digest in (("CP 2, headwise", "others"), (list(hf_loss_curve.RUNS)[1], "weights 0")):
        runs = curves()["fp32"]
        hf_loss_curve.check_digests("fp32", runs)
        runs[name]["digest"] = digest
        with pytest.raises(RuntimeError, match="wrong weights"):
            hf_loss_curve.check_digests("fp32", runs)


@pytest.mark.parametrize("layout", comm_volume.LAYOUTS)
@pytest.mark.parametrize("cp", comm_volume.CP_SIZES)
def test_comm_volume_break_even(cp, layout):
    """One token fewer than the break-even, and chunkwise sends no less."""
    sections = comm_volume.sections_of("35b-a3b")
    chunkwise = comm_volume.most_chunkwise_bytes(sections, cp, layout)
    tokens = comm_volume.break_even(sections, cp, layout)
    assert comm_volume.headwise_bytes(sections, tokens, cp) >= chunkwise
    assert comm_volume.headwise_bytes(sections, tokens - 1, cp) <= chunkwise


def test_comm_volume_table_has_every_released_size():
    """Three sizes of the group for each released size; one line by hand."""
    lines = comm_volume.volume_table().splitlines()[2:]
    assert len(lines) == 3 * 8
    line = next(line for line in lines if line.startswith("| 35b-a3b | 2 |"))
    headwise, zigzag, contiguous, gathered = [float(f) for f in line.split("|")[3:7]]
    assert headwise == 12352.0 * 2 * 65536 / 2 / 2**20
    assert (zigzag, contiguous) == (8.0, 4.0)
    assert gathered == 2048 * 2 * 65536 / 2**20


def test_rule_speed_table():
    """Both rules run and agree at a small size, packed too, and their times make a table."""
    pytest.importorskip("transformers")
    shape = rule_speed.Shape(1, 70, 1, 2, 8)
    times = rule_speed.compare(shape, torch.float32, repeats=1)
    assert all(0 < t.forward < t.both for t in times.values())
    assert [
        len(line.split("|")) for line in rule_speed.speed_table({(shape, torch.float32): times}).splitlines()
    ] == [12] * 3


def test_rule_speed_refuses_different_results():
    """Speed is not compared when the results differ."""
    right = torch.randn(8, 8)
    rule_speed.check_same(right, right)
    with pytest.raises(RuntimeError, match="differ by"):
        rule_speed.check_same(right * 1.01, right)


def test_rule_speed_documents_fill_the_row():
    """Borders rise from 0 to the row's length."""
    for length in (1, 8, 499, 500, 501, 4096):
        borders = rule_speed.packed_borders(length)
        assert borders[0] == 0 and borders[-1] == length
        assert list(borders) == sorted(set(borders))


def test_readme_has_the_table_of_the_results():
    """What the README shows is what the last run of the benchmark wrote."""
    shown = parity_summary.summary((RESULTS / "parity.md").read_text())
    assert shown in (RESULTS.parents[2] / "README.md").read_text()
    assert shown.count("\n") == 11  # head, rule, noise floor, 2 x 2 x 2 cases, bound
