"""Checkpoints of experts that run together and of the host's, which run one by one, are the same."""

import pytest
from megatron.core.models.backends import LocalSpecProvider

from megatron_gdn.layer_specs import LocalBackend
from tests.integration.test_resharding import RESHARDABLE, SP, TP2, assert_equal, train

EP2 = {"expert_model_parallel_size": 2}
SIZES = {
    "ep2": (2, RESHARDABLE, EP2),
    "tp2": (2, SP, TP2),
    "ep2-etp2": (4, SP, TP2 | EP2 | {"expert_tensor_parallel_size": 2}),
    "dp2": (2, RESHARDABLE, {}),
}


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Trains with the host's experts or ours, in a folder of its own."""

    def train_with(name, host, ranks, switches, iterations, **flags):
        experts = (LocalSpecProvider if host else LocalBackend).grouped_mlp_modules
        with monkeypatch.context() as patch:
            patch.setattr(LocalBackend, "grouped_mlp_modules", experts)
            done = train(tmp_path / name, ranks, "headwise", switches, train_iters=iterations, **flags)
        if "load" in flags:  # only then are the parameters' names known
            assert any("local_experts" in name for name in done.dtypes) == host
        return done

    return train_with


@pytest.mark.parametrize(
    ("written", "read", "dtype"), [("dp2", "ep2", "bf16"), ("ep2-etp2", "dp2", "bf16"), ("ep2", "tp2", None)]
)
def test_hosts_checkpoint_loads_and_ours_loads_there(written, read, dtype, run):
    """Host's experts -> ours at other sizes -> the host's again: weights and optimizer states bit for bit."""
    dtypes = () if dtype is None else (dtype,)

    def at(sizes, name, host, iterations, **flags):
        ranks, switches, parallel = SIZES[sizes]
        return run(name, host, ranks, (*switches, *dtypes), iterations, **parallel, **flags)

    first = at(written, "host", True, 2)
    ours = at(read, "ours", False, 3, load=first.folder / "save")
    assert_equal(ours.loaded, first.saved)
    again = at(written, "again", True, 4, load=ours.folder / "save")
    assert_equal(again.loaded, ours.saved)
    straight = at(written, "straight", True, 4)
    tolerance = 1e-5 if dtype is None else 1e-2
    assert ours.losses + again.losses == pytest.approx(straight.losses[2:], rel=tolerance)


def test_states_stored_by_place_are_refused(run):
    """Without fully reshardable states the host would give one weight the states of another, silently."""
    switches = ("use-distributed-optimizer", "bf16")
    first = run("host", True, 2, switches, 2)
    with pytest.raises(AssertionError, match="--dist-ckpt-optim-fully-reshardable"):
        run("ours", False, 2, switches, 3, load=first.folder / "save")
    ours = run("same", False, 2, switches, 2)
    assert run("on", False, 2, switches, 3, load=ours.folder / "save").losses
