"""`convert` when it is stopped, and the memory that it takes."""

import ctypes
import json
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from megatron_gdn.__main__ import main
from megatron_gdn.checkpoint.huggingface import jobs, to_hf, to_megatron
from megatron_gdn.checkpoint.huggingface.config_json import read_model
from megatron_gdn.checkpoint.huggingface.table import Dialect, build_table
from megatron_gdn.config import Qwen35Config
from tests.helpers.distributed import run_ranks
from tests.helpers.hf import (
    DENSE,
    assert_same_tensors,
    load_tensors,
    to_hf_flags,
    to_megatron_flags,
    write_tensors,
)


@pytest.mark.parametrize("hurt", [None, "cut", "changed"])
def test_interrupted_conversion_goes_on(hurt, dense, tmp_path, monkeypatch):
    """Stopped in the middle, nothing looks finished; started again, only what is missing is made."""
    shutil.copytree(dense / "hf", tmp_path / "hf")
    written = []
    write = to_megatron.Writer.write

    def stop_at_third(self, part, advance):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(part)
        return write(self, part, advance)

    flags = [*to_megatron_flags(tmp_path), "--workers", "1"]
    monkeypatch.setattr(to_megatron.Writer, "write", stop_at_third)
    assert main(flags) == 130
    assert not (tmp_path / "megatron").exists()
    partial = tmp_path / "megatron.partial"
    assert not (partial / to_megatron.TRACKER).exists()
    first = sorted((partial / "release").glob("*.distcp"))[0]
    if hurt:
        data = bytearray(first.read_bytes())
        data[len(data) // 2] ^= 1
        first.write_bytes(data[:-1] if hurt == "cut" else data)
    again = []
    monkeypatch.setattr(
        to_megatron.Writer, "write", lambda self, part, a: (again.append(part), write(self, part, a))[1]
    )
    assert main(flags) == 0
    assert not partial.exists()
    assert set(again) & set(written) == ({written[0]} if hurt else set())
    monkeypatch.undo()
    assert main(to_hf_flags(tmp_path)) == 0
    assert_same_tensors(load_tensors(tmp_path / "back"), load_tensors(tmp_path / "hf"))


def test_interrupted_way_back_goes_on(dense, tmp_path, monkeypatch):
    """The same for files of Hugging Face's side."""
    shutil.copytree(dense, tmp_path, dirs_exist_ok=True)
    real, calls = to_hf.write_file, []

    def fail_at_second(path, *rest):
        calls.append(path.name)
        if len(calls) == 2:
            path.write_bytes(b"half")
            raise OSError("disk is gone")
        real(path, *rest)

    monkeypatch.setattr(to_hf, "write_file", fail_at_second)
    flags = [*to_hf_flags(tmp_path), "--workers", "1"]
    assert main(flags) == 2
    assert not (tmp_path / "back").exists()
    assert main(flags) == 0
    assert calls == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 2, 3)]
    assert_same_tensors(load_tensors(tmp_path / "back"), load_tensors(tmp_path / "hf"))


def many_layers(folder: Path) -> None:
    """A dense fp32 checkpoint of 24 layers, three of them per file."""
    settings = {"model_type": "qwen3_5_text", **DENSE, "num_hidden_layers": 24, "hidden_size": 256}
    settings |= {"intermediate_size": 640, "vocab_size": 2048}
    table = build_table(Qwen35Config.from_model(read_model(settings)), 2048, 2048, False, Dialect())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    write_tensors(folder, {name: torch.randn(shape) for name, shape in table.hf.items()}, num_files=8)


def test_memory_is_bounded_by_a_file(tmp_path):
    """Less than 1.5 times the largest file and one layer, there and back, with several threads."""
    many_layers(tmp_path / "hf")
    sizes = [file.stat().st_size for file in (tmp_path / "hf").glob("*.safetensors")]
    bound = 1.5 * max(sizes) + sum(sizes) / 24
    assert sum(sizes) > 4 * bound
    for flags in (to_megatron_flags(tmp_path), to_hf_flags(tmp_path)):
        (grown,) = run_ranks(anonymous_growth, 1, [*flags, "--workers", "4"])
        assert 10**6 < grown < bound, flags


def anonymous_growth(rank: int, world_size: int, flags: list[str]) -> int:
    """Bytes by which this process's memory has grown at most during `main(flags)`, mapped files left out."""
    m_mmap_threshold, small = -3, 2**16
    # The C library keeps freed blocks of up to 32 MiB for itself; here as with large ones it gives them back.
    assert ctypes.CDLL(None).mallopt(m_mmap_threshold, small) == 1
    most, done = 0, threading.Event()

    def held() -> int:
        (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
        return int(line.split()[1]) * 1024

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, held())

    start = held()
    thread = threading.Thread(target=watch)
    thread.start()
    status = main(flags)
    done.set()
    thread.join()
    assert status == 0
    return most - start


def test_threads_share_a_budget():
    """Never more than the budget together; who needs more than all of it runs alone."""
    memory, lock, held = jobs.Memory(10), threading.Lock(), []
    most = []

    def work(need: int) -> None:
        with memory.take(need):
            with lock:
                held.append(min(need, 10))
                most.append(sum(held))
            time.sleep(0.002)
            with lock:
                held.remove(min(need, 10))

    needs = [3, 7, 12, 1, 10, 5, 5, 2, 8, 40]
    threads = [threading.Thread(target=work, args=(need,)) for need in needs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(most) == len(needs) and max(most) <= 10
