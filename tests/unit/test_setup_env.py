"""examples/setup_env.sh with interpreters of our own making: no network, nothing installed."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "setup_env.sh"
TOOLS = "bash cat chmod cksum cp dirname find flock mkdir mv readlink rm sed sleep".split()

# Stands for an interpreter and for the one in the .venv it makes. `-m pip install` writes its arguments
# down and then does what $PIP_DOES says.
FAKE_PYTHON = """#!{bash}
case "$*" in
    "-c import sys"*"import ensurepip, venv") echo "{version} {prefix}"; exit {venv_status} ;;
    "-c "*) echo "{version}" ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "venv {version}" >>"$FAKE_LOG" ;;
    "-m pip --version") [[ ! -e "$0.nopip" ]] ;;
    "-m pip install "*) echo "pip $*" >>"$FAKE_LOG"; eval "${{PIP_DOES:-true}}" ;;
    *) echo "unexpected: $*" >&2; exit 99 ;;
esac
"""


class Checkout:
    """A small copy of the repository with a PATH that holds only tools and the interpreters put there."""

    def __init__(self, folder: Path):
        self.root = folder / "a checkout"  # a path with a space, as some people have
        self.bin, self.home, self.log = folder / "bin", folder / "home", folder / "log"
        for made in (self.root / "examples", self.root / "tests", self.bin, self.home):
            made.mkdir(parents=True)
        shutil.copy(SCRIPT, self.root / "examples")
        (self.root / "setup.py").write_text("# metadata\n")
        (self.root / "tests" / "constraints.txt").write_text("torch==2.11.0\n")
        for tool in TOOLS:
            if found := shutil.which(tool):
                (self.bin / tool).symlink_to(found)

    @property
    def state(self) -> Path:
        return self.root / ".venv" / ".setup_env"

    def python(self, name: str, version: str, *, venv: bool = True) -> Path:
        """Put a fake interpreter at `name`: a command on PATH, or a path under the home folder."""
        path = self.home / name if "/" in name else self.bin / name
        path.parent.mkdir(parents=True, exist_ok=True)
        prefix = f"/fake/{version}"
        path.write_text(
            FAKE_PYTHON.format(
                bash=shutil.which("bash"), version=version, prefix=prefix, venv_status=0 if venv else 1
            )
        )
        path.chmod(0o755)
        return path

    def shim(self, name: str) -> None:
        """Put a command at `name` that is on PATH and fails, as version managers' shims do."""
        path = self.bin / name
        path.write_text(f"#!{shutil.which('bash')}\necho '{name}: command not found' >&2\nexit 127\n")
        path.chmod(0o755)

    def start(self, *args: str, **env: str) -> subprocess.Popen:
        return subprocess.Popen(
            [shutil.which("bash"), str(self.root / "examples" / "setup_env.sh"), *args],
            env={"PATH": str(self.bin), "HOME": str(self.home), "FAKE_LOG": str(self.log), **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *args: str, **env: str) -> tuple[int, str]:
        """(exit status, stderr) of the script."""
        process = self.start(*args, **env)
        _, err = process.communicate(timeout=60)
        return process.returncode, err

    def logged(self) -> list[str]:
        """First two words of each call that changes something: `venv 3.12.4`, `pip -m`."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [" ".join(line.split()[:2]) for line in lines]


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    return Checkout(tmp_path)


def test_find_prefers_312_over_313_over_python3(checkout):
    """The names are tried in order, and the best one wins."""
    checkout.python("python3", "3.12.1")
    checkout.python("python3.13", "3.13.2")
    checkout.python("python3.12", "3.12.4")
    status, err = checkout.run()
    assert status == 0, err
    assert checkout.logged() == ["venv 3.12.4", "pip -m"]


def test_find_passes_failing_shims_and_old_versions(checkout):
    """A name on PATH that does not run, or is too old or too new, is passed over for one in ~/.pyenv."""
    checkout.shim("python3.12")
    checkout.python("python3.13", "3.13.0", venv=False)
    checkout.python("python3", "3.11.7")
    checkout.python(".pyenv/versions/3.11.7/bin/python", "3.11.7")
    checkout.python(".pyenv/versions/3.14.0/bin/python", "3.14.0")
    checkout.python(".pyenv/versions/3.13.0/bin/python", "3.13.0")
    status, err = checkout.run()
    assert status == 0, err
    assert checkout.logged()[0] == "venv 3.13.0"
    assert ".pyenv/versions/3.13.0/bin/python" in err


def test_find_nothing_says_what_to_install(checkout):
    """Without an interpreter there is one line with what was tried and what to install, and no .venv."""
    checkout.shim("python3.12")
    checkout.python("python3", "3.11.7")
    status, err = checkout.run()
    assert status != 0
    assert len(err.splitlines()) == 1
    assert "python3.12 does not run, python3.13 not found, python3 is Python 3.11.7" in err
    assert "versions/" not in err  # the folder of an absent pyenv is no interpreter
    assert "install" in err
    assert "PYTHON=" in err
    assert not (checkout.root / ".venv").exists()


@pytest.mark.parametrize(
    ("version", "venv", "found"),
    [
        ("3.11.7", True, "is Python 3.11.7"),
        ("2.7.18", True, "is Python 2.7.18"),
        ("3.14.0", True, "is Python 3.14.0"),
        ("3.12.1", False, "is Python 3.12.1 without the venv module"),
        ("garbage", True, "does not run"),
        (None, True, "not found"),
    ],
)
def test_python_variable_that_does_not_suit_is_refused(checkout, version, venv, found):
    """$PYTHON is never replaced in silence by another interpreter, though a good one is on PATH."""
    checkout.python("python3.12", "3.12.4")
    path = checkout.home / "other/python"
    if version:
        checkout.python("other/python", version, venv=venv)
    status, err = checkout.run(PYTHON=str(path))
    assert status != 0
    assert len(err.splitlines()) == 1
    assert f"PYTHON={path} {found};" in err
    assert "3.12 or 3.13" in err
    assert checkout.logged() == []


def test_python_variable_wins_and_changing_it_makes_the_venv_anew(checkout):
    """$PYTHON goes before the search; a .venv of another interpreter is not kept for it."""
    checkout.python("python3.12", "3.12.4")
    other = str(checkout.python("other/python", "3.13.1"))
    assert checkout.run()[0] == 0
    status, err = checkout.run(PYTHON=other)
    assert status == 0, err
    assert "PYTHON says 3.13.1" in err
    assert checkout.run(PYTHON=other) == (0, "")
    assert checkout.run() == (0, "")  # unset again: what is there is good
    assert checkout.logged() == ["venv 3.12.4", "pip -m", "venv 3.13.1", "pip -m"]


def test_second_run_does_nothing_until_a_file_changes(checkout):
    """What is installed is remembered by setup.py, the constraints and the extra; dev holds test."""
    checkout.python("python3.12", "3.12.4")
    assert checkout.run()[0] == 0
    assert checkout.run() == (0, "")
    assert checkout.run("dev")[0] == 0
    assert checkout.run("test") == (0, "")
    (checkout.root / "setup.py").write_text("# other metadata\n")
    assert checkout.run("test")[0] == 0
    (checkout.root / "tests/constraints.txt").write_text("torch==2.11.1\n")
    assert checkout.run("test")[0] == 0
    assert checkout.logged() == ["venv 3.12.4"] + ["pip -m"] * 4
    pips = [line for line in checkout.log.read_text().splitlines() if line.startswith("pip")]
    assert f"--editable {checkout.root}[dev] --constraint {checkout.root}/tests/constraints.txt" in pips[1]


def test_failed_install_is_an_error_and_is_repaired(checkout):
    """When pip fails the script fails, remembers nothing, and the next run starts from an empty .venv."""
    checkout.python("python3.12", "3.12.4")
    status, err = checkout.run(PIP_DOES="echo no space left >&2; exit 3")
    assert status != 0
    assert "no space left" in err
    assert "pip failed" in err
    leftover = checkout.root / ".venv" / "leftover"
    leftover.touch()
    status, err = checkout.run()
    assert status == 0, err
    assert "did not finish" in err
    assert not leftover.exists()
    assert checkout.logged() == ["venv 3.12.4", "pip -m"] * 2


def test_killed_install_is_repaired(checkout):
    """The same after a kill that lets nobody clean up."""
    checkout.python("python3.12", "3.12.4")
    process = checkout.start(PIP_DOES="sleep 60")
    deadline = time.monotonic() + 30
    while "pip -m" not in checkout.logged() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    assert checkout.state.read_text() == "installing\n"
    status, err = checkout.run()
    assert status == 0, err
    assert checkout.logged() == ["venv 3.12.4", "pip -m"] * 2


def test_half_made_venv_is_repaired(checkout):
    """A .venv whose interpreter is gone, or without pip, is made anew, and the reason is said."""
    checkout.python("python3.12", "3.12.4")
    (checkout.root / ".venv" / "bin").mkdir(parents=True)
    status, err = checkout.run()
    assert status == 0, err
    assert "interpreter not found" in err
    checkout.state.unlink()
    (checkout.root / ".venv/bin/python.nopip").touch()
    status, err = checkout.run()
    assert status == 0, err
    assert "no pip" in err
    assert checkout.logged() == ["venv 3.12.4", "pip -m"] * 2


def test_venv_made_by_hand_is_kept(checkout):
    """A working .venv of somebody's own gets the packages and loses nothing."""
    checkout.python("python3.12", "3.12.4")
    assert checkout.run()[0] == 0
    checkout.state.unlink()
    own = checkout.root / ".venv" / "own"
    own.touch()
    assert checkout.run()[0] == 0
    assert own.exists()
    assert checkout.logged() == ["venv 3.12.4", "pip -m", "pip -m"]


def test_moved_checkout_makes_the_venv_anew(checkout):
    """Commands in .venv/bin name the folder they were made in, so a moved .venv is not trusted."""
    checkout.python("python3.12", "3.12.4")
    assert checkout.run()[0] == 0
    old = checkout.root
    checkout.root = old.rename(old.with_name("moved"))
    status, err = checkout.run()
    assert status == 0, err
    assert f"made in {old}" in err
    assert checkout.logged() == ["venv 3.12.4", "pip -m"] * 2


def test_venv_of_another_checkout_is_left_alone(checkout):
    """Behind a link there may be one that is in use where it was made: nothing in it changes."""
    checkout.python("python3.12", "3.12.4")
    assert checkout.run()[0] == 0
    other, checkout.root = checkout.root, checkout.root.with_name("second")
    shutil.copytree(other, checkout.root, ignore=shutil.ignore_patterns(".venv"))
    (checkout.root / ".venv").symlink_to(other / ".venv")
    status, err = checkout.run()
    assert status == 1
    assert f"link to {other}/.venv" in err and "remove the link" in err
    assert (other / ".venv" / "bin" / "python").exists()
    assert checkout.logged() == ["venv 3.12.4", "pip -m"]


@pytest.mark.skipif(not shutil.which("flock"), reason="needs the command flock, which keeps set-ups apart")
def test_two_set_ups_at_once_install_once(checkout):
    """The second waits for the first, says so, and finds the work done."""
    checkout.python("python3.12", "3.12.4")
    runs = [checkout.start(PIP_DOES="sleep 1") for _ in range(2)]
    errs = [run.communicate(timeout=60)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], errs
    assert sum("waiting" in err for err in errs) == 1
    assert checkout.logged() == ["venv 3.12.4", "pip -m"]
