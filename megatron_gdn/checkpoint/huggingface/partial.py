"""A folder that is complete or not there, and that an interrupted job can go on filling."""

import fcntl
import json
import os
import shutil
import zlib
from pathlib import Path

from megatron_gdn.checkpoint.huggingface.folder import write_json

_DONE = ".done"
_BLOCK = 2**18


class PartialFolder:
    """Collects files in `TARGET.partial`, which becomes TARGET at the end.

    A file counts only with its record, which is written after the file is on the disk and holds its length
    and checksum; files without one, or that differ, are made again.

    Attributes:
        path: where files are to be written.
    """

    def __init__(self, target: Path, job: dict):
        """Make the folder, or go on with it.

        Args:
            target: what it is to become; must not exist, or be an empty folder.
            job: what is being done, as JSON; only the same job may go on.

        Raises:
            ValueError: the target exists, or another job has been or is at work there.
        """
        self.target, self.path = target, target.with_name(target.name + ".partial")
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ValueError(f"{target} exists; remove it, or choose another folder.")
        self._done = self.path / _DONE
        self._done.mkdir(parents=True, exist_ok=True)
        self._lock = open(self._done / "job.lock", "w", encoding="utf-8")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{self.path} is being written by another conversion; wait for it.") from None
        job = json.loads(json.dumps(job))
        about = self._done / "job.json"
        if not about.exists():
            write_json(about, job)
        elif json.loads(about.read_text(encoding="utf-8")) != job:
            raise ValueError(
                f"{self.path} was left by another conversion, or its source has changed since; remove it."
            )

    def finish(self, file: str, notes: str = "") -> None:
        """Record a file, named relative to the folder, as whole; `notes` come back from `finished`."""
        record = {"file": file, "notes": notes, **self._measure(file)}
        write_json(self._record(file).with_suffix(".new"), record)
        os.replace(self._record(file).with_suffix(".new"), self._record(file))

    def finished(self, file: str) -> str | None:
        """The notes of a file that is there and as it was recorded; else None."""
        record = self._record(file)
        if not record.exists() or not (self.path / file).exists():
            return None
        known = json.loads(record.read_text(encoding="utf-8"))
        if known["bytes"] != (self.path / file).stat().st_size:
            return None
        measured = self._measure(file)
        return known["notes"] if all(known[name] == value for name, value in measured.items()) else None

    def publish(self) -> None:
        """Give the folder its name."""
        shutil.rmtree(self._done)
        self._lock.close()
        os.replace(self.path, self.target)

    def close(self) -> None:
        """Let another process go on."""
        self._lock.close()

    def _record(self, file: str) -> Path:
        return self._done / (file.replace("/", "--") + ".json")

    def _measure(self, file: str) -> dict[str, int]:
        checksum, length = 0, 0
        with open(self.path / file, "rb") as stream:
            while block := stream.read(_BLOCK):
                checksum = zlib.crc32(block, checksum)
                length += len(block)
        return {"bytes": length, "crc32": checksum}
