"""Every pair of parallel features learns what one process learns: each loss, gradient norm and parameter.

A cell is a pair of FEATURES, a GatedDeltaNet mode and a context-parallel size. It trains for five steps in
fp32 from the parameters that one process began with, and is compared with that process: the same samples in
the same microbatches, and the same model. Two values of one size, as TP2 and TP2 with sequence parallelism
are, are no pair. TP2 PP2 CP2 and TP2 EP2 CP2 are the cells tp2-pp2-cp2, tp2sp-pp2-cp2 and tp2sp-ep2-cp2.

All cells of the same groups run in the same ranks, since starting ranks takes longer than training.
"""

import itertools
from dataclasses import dataclass
from functools import cache, cached_property
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig

from megatron_gdn.gated_delta_net_cp import GDN_CP_MODES, Sections, WholeStream, build_context_parallel
from tests.helpers.distributed import make_groups, run_ranks
from tests.helpers.model import DENSE_MODEL
from tests.helpers.pretrain import arguments, refusals
from tests.helpers.training import Run, Settings, make_stream, train


class Feature(NamedTuple):
    """A way to train."""

    sizes: dict = {}
    """Of the process groups."""
    config: dict = {}
    """Fields of the config."""
    settings: dict = {}
    """Others of the run."""


RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
FEATURES = {
    "tp2": Feature({"tp": 2}, {"sequence_parallel": False}),
    "tp2sp": Feature({"tp": 2}, {"sequence_parallel": True}),
    "pp2": Feature({"pp": 2}),
    "pp2vpp2": Feature({"pp": 2}, settings={"virtual_stages": 2}),
    "ep2": Feature({"ep": 2}),
    "etp2": Feature({"etp": 2}),
    "dp2": Feature({"dp": 2}, settings={"distributed_optimizer": True}),
    "mtp": Feature({}, {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 1.0}),
    "packed": Feature(settings={"packed": True}),
    "mbs2": Feature(settings={"samples": 2}),
    "recompute": Feature({}, RECOMPUTE),
}
REFUSED = {("tp2", "ep2"), ("tp2", "etp2")}
"""Experts with tensor parallelism need sequence parallelism: trained as tp2sp, and tp2 has a dense model."""
ATTENTION = {"headwise": "p2p", "chunkwise": "all_gather"}
"""How keys and values are exchanged, by the mode of the GatedDeltaNet layers beside."""

STEPS, LENGTH = 5, 32
LAYERS = {1: [1, 0], 2: [1, 1, 1, 0]}
"""GatedDeltaNet (1) and attention (0) layers, by virtual stages; a stage has one layer."""
EVERY_MODEL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "kv_channels": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "calculate_per_token_loss": False,
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    # The usual auxiliary loss is one of all samples in a microbatch; this is one of each sample.
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
}
MODELS = {"moe": EVERY_MODEL | EXPERTS, "dense": EVERY_MODEL | DENSE_MODEL | {"ffn_hidden_size": 64}}
OPTIMIZER = {
    "optimizer": "adam",
    "lr": 0.1,
    "adam_eps": 1.0,  # far above any gradient: a step is in proportion to it, and shows a wrong factor
    "clip_grad": 2.6,  # some steps are clipped, others are not
    "weight_decay": 0.0,
}

LOSS, NORM, CHANGE = 1e-5, 1e-4, 1e-4
"""Largest relative difference of a loss, of a gradient norm, and of what five steps did to a parameter."""
ROUNDING = 2**-23
"""And what fp32 may lose of a parameter itself."""
POWER = 100
"""A change shows that is wrong by this part of itself."""
TIE = 1e-5
"""Smallest difference between the scores of the last expert that is chosen and the first that is not;
rounding could send the token elsewhere below a tenth of it."""


@dataclass(frozen=True)
class Cell:
    """One run on several ranks."""

    features: tuple[str, ...]
    mode: str = "headwise"
    cp: int = 1

    def __str__(self) -> str:
        return "-".join((*self.features, f"cp{self.cp}", self.mode))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Of the process groups; `dp` is that of the dense layers, and `world` all ranks."""
        sizes = {"tp": 1, "pp": 1, "dp": 1, "ep": 1, "etp": 1, "cp": self.cp}
        for name in self.features:
            sizes |= FEATURES[name].sizes
        # Experts may need more ranks than the dense layers do: those get more data-parallel ranks.
        ranks = max(sizes["tp"] * sizes["cp"] * sizes["dp"], sizes["ep"] * sizes["etp"])
        return sizes | {"dp": ranks // (sizes["tp"] * sizes["cp"]), "world": ranks * sizes["pp"]}

    @cached_property
    def settings(self) -> Settings:
        """Of the run."""
        dense = "tp2" in self.features
        config, others = dict(MODELS["dense" if dense else "moe"]), {"tied": dense}
        for name in self.features:
            config |= FEATURES[name].config
            others |= FEATURES[name].settings
        stages, samples = others.get("virtual_stages", 1), others.get("samples", 1)
        config |= {"num_layers": len(LAYERS[stages]), "linear_attention_freq": LAYERS[stages]}
        config["cp_comm_type"] = ATTENTION[self.mode]
        batch = max(1, self.sizes["dp"] * samples * self.sizes["pp"])  # a microbatch for every stage
        return Settings(self.mode, config, batch=batch, **others)

    @property
    def reference(self) -> tuple:
        """What the one process must have in common with this run: features, layers and samples in a step."""
        mine = self.settings
        same = [name for name in self.features if name in ("tp2", "mtp", "packed")]
        # Packed samples are one stream, and those with more masked tokens than others weigh less in it.
        same += ["mbs2"] if mine.packed and mine.samples == 2 else []
        return tuple(same), mine.config["num_layers"], mine.batch


def all_cells() -> list[Cell]:
    """Every pair, mode and size; at CP 1 the modes run the same code, so pairs take turns."""
    cells = []
    for number, pair in enumerate(itertools.combinations(FEATURES, 2)):
        if pair in REFUSED or {"tp", "pp"} & FEATURES[pair[0]].sizes.keys() & FEATURES[pair[1]].sizes.keys():
            continue
        cells += [Cell(pair, mode, 2) for mode in ATTENTION]
        cells.append(Cell(pair, list(ATTENTION)[number % 2], 1))
    return cells


def sizes_of_groups(cell: Cell) -> dict:
    """As the host's groups are made of; data-parallel sizes follow from the ranks there are."""
    stages = cell.settings.virtual_stages
    return {
        "tp": cell.sizes["tp"],
        "cp": cell.sizes["cp"],
        "pipeline_model_parallel_size": cell.sizes["pp"],
        "virtual_pipeline_model_parallel_size": stages if stages > 1 else None,
        "expert_model_parallel_size": cell.sizes["ep"],
        "expert_tensor_parallel_size": cell.sizes["etp"],
        "create_gloo_process_groups": False,
    }


def run_settings(groups, settings: Settings, state: dict | None) -> Run:
    """Five steps in this rank."""
    optimizer = OptimizerConfig(**OPTIMIZER, use_distributed_optimizer=settings.distributed_optimizer)
    stream = make_stream(settings.packed, STEPS * settings.batch, LENGTH)
    return train(groups, settings, stream, optimizer, state)


@cache
def references() -> dict[tuple, Run]:
    """The run of one process for every `Cell.reference`."""

    def run(rank, world_size):
        with make_groups() as groups:
            return [run_settings(groups, settings, None) for settings in wanted]

    keys = sorted({cell.reference for cell in all_cells()})
    wanted = []
    for features, layers, batch in keys:
        stages = next(stages for stages, pattern in LAYERS.items() if len(pattern) == layers)
        pattern = {"num_layers": layers, "linear_attention_freq": LAYERS[stages]}
        settings = Cell(features).settings
        config = settings.config | pattern | {"sequence_parallel": False}
        wanted.append(settings._replace(config=config, batch=batch))
    return dict(zip(keys, run_ranks(run, 1)[0], strict=True))


def differences(got: Run, want: Run) -> list[str]:
    """What one rank has that the one process has not, a line each."""
    found = []
    for name, mine, right, close in (
        ("loss", got.losses or want.losses, want.losses, LOSS),
        ("gradient norm", got.norms, want.norms, NORM),
    ):
        worst = (torch.tensor(mine) / torch.tensor(right) - 1).abs().max().item()
        if not worst <= close:
            found.append(f"{name} {mine}, want {right}")
    off, last = [], want.last
    for shard in got.end:
        before, right = want.start[shard.key][shard.place], last[shard.key][shard.place]
        error, change = (shard.data - right).norm(), (right - before).norm()
        if not error <= CHANGE * min(change, right.norm()) + ROUNDING * right.norm():
            off.append((error / change, shard.key))
    if off:
        worst = ", ".join(f"{key} by {error:.1e}" for error, key in sorted(off, reverse=True)[:4])
        found.append(f"{len(off)} of {len(got.end)} shards are off, by parts of their change: {worst}")
    return found


def run_cells(rank, world_size, cells: list[Cell]) -> list[tuple[list[str], set[str]]]:
    """Body of a rank: for every cell what is wrong, and the names of the tensors that it holds parts of."""
    answers = []
    with make_groups(**sizes_of_groups(cells[0])) as groups:
        for cell in cells:
            want = references()[cell.reference]
            got = run_settings(groups, cell.settings, want.start)
            answers.append((differences(got, want), {shard.key for shard in got.end}))
    return answers


def _place(cell: Cell) -> tuple[int, dict]:
    return cell.sizes["world"], sizes_of_groups(cell)


class Outcomes:
    """What is wrong in each cell of a session."""

    def __init__(self, cells: list[Cell]):
        self.cells, self.found = cells, {}

    def of(self, cell: Cell) -> list[str]:
        """Run all cells of its groups at once, or, if any of those ends them all, this one alone.

        Ranks make groups once: every group keeps threads of its own, and the host never ends one.
        """
        references()
        alike = [each for each in self.cells if _place(each) == _place(cell)]
        if alike:
            self.cells = [each for each in self.cells if each not in alike]
            try:
                self._run(alike)
            except AssertionError:
                pass  # and each is run alone
        if cell not in self.found:
            try:
                self._run([cell])
            except AssertionError as error:
                self.found[cell] = [str(error)]
        return self.found[cell]

    def _run(self, cells: list[Cell]) -> None:
        timeout = 60 + 20 * len(cells)
        ranks = run_ranks(run_cells, cells[0].sizes["world"], cells, timeout=timeout)
        for cell, *answers in zip(cells, *ranks, strict=True):
            self.found[cell] = [
                f"rank {rank}: {line}" for rank, (lines, _) in enumerate(answers) for line in lines
            ]
            missing = references()[cell.reference].last.keys() ^ set().union(*(keys for _, keys in answers))
            if missing:
                self.found[cell].append(f"missing or unknown parameters {missing}")


@pytest.fixture(scope="module")
def outcomes(request) -> Outcomes:
    """For the cells that this session runs."""
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    return Outcomes([call.params["cell"] for call in calls if call and "cell" in call.params])


@pytest.mark.timeout(900)  # the first test of a group waits for all cells of the group
@pytest.mark.parametrize("cell", all_cells(), ids=str)
def test_pair_trains_like_one_process(cell, outcomes, request):
    """Five steps: every loss, every gradient norm, and each rank's part of every parameter."""
    found = outcomes.of(cell)
    if found:
        sizes = ", ".join(f"{name} {size}" for name, size in cell.sizes.items())
        command = f"python -m pytest '{request.node.nodeid}'"
        pytest.fail("\n".join([command, f"{sizes}, {cell.settings}", *found]), pytrace=False)


def test_steps_show_a_wrong_gradient():
    """Of the reference runs: every parameter moves, some steps are clipped, no router is near a tie."""
    norms = [norm for run in references().values() for norm in run.norms]
    clipped = sum(norm > OPTIMIZER["clip_grad"] for norm in norms)
    assert len(norms) / 4 < clipped < len(norms) * 3 / 4
    for key, run in references().items():
        assert run.margin > TIE, key
        last = run.last
        for name, before in run.start.items():
            change, size = (last[name] - before).norm(), before.norm()
            assert change > POWER * (CHANGE * change + ROUNDING * size), f"{key}: {name} hardly moves"


@pytest.mark.parametrize("pair", sorted(REFUSED), ids="-".join)
def test_pair_is_refused(pair, tmp_path):
    """Before anything that depends on the mode or on context parallelism."""
    sizes = {"ep2": {"expert-model-parallel-size": 2}, "etp2": {"expert-tensor-parallel-size": 2}}
    flags = {"tensor-model-parallel-size": 2, "context-parallel-size": 2, "mock-data": True} | sizes[pair[1]]
    said = refusals(4, arguments(flags), tmp_path)
    assert all("--tensor-model-parallel-size 2 with experts needs --sequence-parallel" in s for s in said)


@pytest.mark.parametrize("mode", GDN_CP_MODES)
def test_modes_are_one_without_context_parallelism(mode):
    """Why a pair needs one mode only at CP 1."""
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    assert type(build_context_parallel(mode, Sections(4, 8, 16, 16), alone)) is WholeStream
