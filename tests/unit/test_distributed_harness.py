"""The harness itself: answers, failures, hangs, leftovers, and the count of what is sent."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers import distributed
from tests.helpers.distributed import count_collectives, make_groups, run_ranks


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        # a zombie that nobody has reaped yet has ended: the state follows the name in brackets
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return not Path("/proc").is_dir()


def _wait_gone(pids: list[int]) -> None:
    limit = time.monotonic() + 5
    while any(map(_alive, pids)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not [pid for pid in pids if _alive(pid)]


def test_run_ranks_returns_results_in_rank_order():
    """Every rank runs in its own process with one thread, joined by gloo, and tensors come back."""

    def rank_sum(rank: int, world_size: int, scale: float, *, shift: int):
        total = torch.full((3,), rank * scale + shift)
        dist.all_reduce(total)
        return rank, world_size, os.getpid(), torch.get_num_threads(), total

    results = run_ranks(rank_sum, 3, 10.0, shift=1)
    assert [(r[0], r[1], r[3]) for r in results] == [(0, 3, 1), (1, 3, 1), (2, 3, 1)]
    assert len({r[2] for r in results} | {os.getpid()}) == 4
    assert all(torch.equal(r[4], torch.full((3,), 33.0)) for r in results)
    _wait_gone([r[2] for r in results])


def test_run_ranks_seeds_all_ranks_alike_and_each_run_again():
    """Random numbers are the same on every rank and in every run."""
    first, second = run_ranks(lambda rank, size: torch.randn(4), 2)
    again = run_ranks(lambda rank, size: torch.randn(4), 1)[0]
    assert torch.equal(first, second) and torch.equal(first, again)


def test_run_ranks_reports_failing_rank_while_others_wait(tmp_path):
    """One rank fails, the other waits in a collective: the failure arrives at once, nothing is left."""

    def rank_fails(rank: int, world_size: int):
        (tmp_path / str(rank)).write_text(str(os.getpid()))
        dist.barrier()
        if rank == 1:
            raise ValueError("rank one has had enough")
        dist.all_reduce(torch.ones(1))

    begin = time.monotonic()
    with pytest.raises(
        AssertionError, match=r"(?s)rank 1 of 2 failed.*in rank_fails.*rank one has had enough"
    ):
        run_ranks(rank_fails, 2, timeout=60)
    assert time.monotonic() - begin < 20
    _wait_gone([int((tmp_path / name).read_text()) for name in "01"])


def test_run_ranks_reports_rank_that_dies():
    """A rank that ends without an answer is named with its exit code."""

    def rank_dies(rank: int, world_size: int):
        if rank == 0:
            os._exit(7)
        time.sleep(60)

    with pytest.raises(AssertionError, match="rank 0 died without an answer, exit code 7"):
        run_ranks(rank_dies, 2, timeout=60)


def test_run_ranks_ends_hung_ranks_and_their_children(tmp_path):
    """Out of time: says which rank hangs and where, and ends it together with what it started."""

    def rank_hangs(rank: int, world_size: int):
        if rank == 1:
            child = subprocess.Popen(["sleep", "60"])
            (tmp_path / "pids").write_text(f"{os.getpid()} {child.pid}")
            time.sleep(60)

    begin = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)ranks \[1\] did not answer in 2 s.*in rank_hangs"):
        run_ranks(rank_hangs, 2, timeout=2)
    assert time.monotonic() - begin < 20
    _wait_gone([int(pid) for pid in (tmp_path / "pids").read_text().split()])


def test_run_ranks_ends_ranks_when_their_parent_is_killed(tmp_path):
    """A test process that is killed takes its ranks with it."""
    if sys.platform != "linux":
        pytest.skip("needs Linux: the kernel's parent-death signal")
    script = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from tests.helpers.distributed import run_ranks\n"
        "def hang(rank, world_size):\n"
        "    Path(sys.argv[1], f'{rank}.part').write_text(str(os.getpid()))\n"
        "    Path(sys.argv[1], f'{rank}.part').rename(Path(sys.argv[1], str(rank)))\n"
        "    time.sleep(60)\n"
        "run_ranks(hang, 2, timeout=60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=Path(__file__).parents[2])
    try:
        limit = time.monotonic() + 60
        while not all((tmp_path / name).exists() for name in "01"):
            assert parent.poll() is None and time.monotonic() < limit, "the ranks did not start"
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
    _wait_gone([int((tmp_path / name).read_text()) for name in "01"])


def test_before_ranks_runs_in_the_parent(monkeypatch):
    """What `conftest.py` registers runs before the fork, so every rank inherits it."""
    seen = []
    monkeypatch.setattr(distributed, "before_ranks", [lambda: seen.append(os.getpid())])
    assert run_ranks(lambda rank, size: list(seen), 2) == [[os.getpid()]] * 2


def test_make_groups_gives_host_groups():
    """tp x cp groups of the host, with cp ranks a stride of tp apart, taken down at the end."""

    def rank_groups(rank: int, world_size: int):
        from megatron.core import parallel_state

        with make_groups(tp=2, cp=2) as groups:
            kinds = (groups.tp, groups.cp, groups.dp, groups.tp_cp)
            inside = [dist.get_process_group_ranks(group) for group in kinds]
        return inside, parallel_state.model_parallel_is_initialized()

    results = run_ranks(rank_groups, 4)
    assert results[1] == ([[0, 1], [1, 3], [1], [0, 1, 2, 3]], False)
    assert results[2] == ([[2, 3], [0, 2], [2], [0, 1, 2, 3]], False)


def test_count_collectives_counts_bytes_to_other_ranks():
    """Each function is counted once, by name, with what leaves the rank; also on a sub-group."""

    def rank_counts(rank: int, world_size: int):
        pair = dist.new_group([0, 1])
        with count_collectives() as log:
            dist.all_to_all_single(torch.empty(8), torch.ones(8))
            sent = [[1, 2, 3, 4], [2, 0, 0, 5], [0, 0, 6, 0], [1, 1, 1, 1]]
            got = [row[rank] for row in sent]
            dist.all_to_all_single(torch.empty(sum(got), 3), torch.ones(sum(sent[rank]), 3), got, sent[rank])
            dist.all_gather_into_tensor(torch.empty(20), torch.ones(5))
            dist.reduce_scatter_tensor(torch.empty(5), torch.ones(20))
            dist.all_reduce(torch.ones(8, dtype=torch.float64))
            dist.broadcast(torch.ones(6), src=1)
            dist.all_gather([torch.empty(2) for _ in range(4)], torch.ones(2))
            peers = {"src": (rank - 1) % 4, "dst": (rank + 1) % 4}
            shift = [
                dist.P2POp(dist.isend, torch.ones(7, dtype=torch.bfloat16), peers["dst"]),
                dist.P2POp(dist.irecv, torch.empty(7, dtype=torch.bfloat16), peers["src"]),
            ]
            for work in dist.batch_isend_irecv(shift):
                work.wait()
            if rank < 2:
                dist.all_gather_into_tensor(torch.empty(4), torch.ones(2), group=pair)
                dist.all_to_all_single(torch.empty(4), torch.ones(4), group=pair)
        dist.all_reduce(torch.ones(1))
        return [tuple(call) for call in log], log.sent_bytes(), log.calls("all_gather_into_tensor")

    expected_ragged = [9, 7, 0, 3]
    for rank, (calls, total, gathers) in enumerate(run_ranks(rank_counts, 4)):
        expected = [
            ("all_to_all_single", 6 * 4, 8 * 4, 4),
            ("all_to_all_single", expected_ragged[rank] * 3 * 4, None, 4),
            ("all_gather_into_tensor", 5 * 3 * 4, 20 * 4, 4),
            ("reduce_scatter_tensor", 15 * 4, 20 * 4, 4),
            ("all_reduce", 2 * 8 * 8 * 3 // 4, 8 * 8, 4),
            ("broadcast", 6 * 4 * 3 if rank == 1 else 0, 6 * 4, 4),
            ("all_gather", 2 * 4 * 3, 8 * 4, 4),
            ("batch_isend_irecv", 7 * 2, 2 * 7 * 2, 4),
            *(
                [("all_gather_into_tensor", 2 * 4, 4 * 4, 2), ("all_to_all_single", 2 * 4, 4 * 4, 2)]
                if rank < 2
                else []
            ),
        ]
        assert len(calls) == len(expected)
        for got, want in zip(calls, expected, strict=True):
            assert got == tuple(g if w is None else w for g, w in zip(got, want, strict=True))
        assert total == sum(call[1] for call in calls)
        assert gathers == 1 + (rank < 2)


def test_count_collectives_sees_names_imported_earlier_and_puts_them_back():
    """A function that another module took by name before the count began is counted too."""
    before = dist.all_reduce
    namespace = sys.modules[__name__].__dict__
    namespace["taken_earlier"] = before

    def rank_counts(rank: int, world_size: int):
        with count_collectives() as log:
            namespace["taken_earlier"](torch.ones(4))
        return log.calls("all_reduce"), namespace["taken_earlier"] is before is dist.all_reduce

    try:
        assert run_ranks(rank_counts, 2) == [(1, True)] * 2
    finally:
        del namespace["taken_earlier"]
