"""What is measured: layers of one released size on a number of GPUs and of tokens."""

from collections.abc import Iterator
from typing import NamedTuple


class Work(NamedTuple):
    """A module, and how it uses context parallelism."""

    module: str
    way: str
    backend: str = ""
    """Kernels of the gated delta rule, where two are compared; else the fastest that can run."""

    def __str__(self) -> str:
        return ", ".join(filter(None, self))


PARTS = ("parity", "scaling", "longest", "lost_rank")
"""Of the benchmark, in the order they are run."""

GDN, ATTENTION, SLICE = "GatedDeltaNet layer", "attention layer", "4 layers"
HOST = "the host's headwise"

WORKS = (
    Work(GDN, "headwise"),
    Work(GDN, "chunkwise", "flash_qla"),
    Work(GDN, "chunkwise", "fla"),
    Work(GDN, HOST),
    Work(ATTENTION, "p2p"),
    Work(ATTENTION, "all_gather"),
    Work(SLICE, "headwise"),
    Work(SLICE, "chunkwise"),
)
"""The 4 layers are three GatedDeltaNet and one attention (p2p), with feed-forwards, recomputed in full."""


class Scale(NamedTuple):
    """How large the whole benchmark is."""

    size: str
    """Of `Qwen35Config.from_size`."""
    tokens: tuple[int, ...]
    """Of one stream, over all GPUs."""
    search_start: int
    """Tokens per GPU from which the longest stream is searched."""
    search_limit: int
    """Tokens per GPU beyond which it is not."""
    document: int
    """Tokens per document in that search: attention's time then grows with the stream, not its square."""
    step_seconds: float
    """To spend on repeats of one step."""
    search_seconds: float
    """To spend on one search."""
    time_out: float
    """Of a collective where a rank is lost, in seconds."""


GPU_SCALE = Scale("35b-a3b", (2**15, 2**17, 2**19), 2**15, 2**22, 50_000, 5.0, 120.0, 60.0)
CPU_SCALE = Scale("debug", (2**6,), 2**6, 2**6, 50, 0.0, 60.0, 3.0)


class Case(NamedTuple):
    """One line of the table of strong scaling."""

    work: Work
    tokens: int
    gpus: int

    @property
    def key(self) -> str:
        """Its name among those of one number of GPUs."""
        return f"{self.work}, {self.tokens} tokens"


MOST_GPUS = 8
"""Up to which there are predictions."""


def gpu_counts(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [2**i for i in range(most.bit_length())]


def scaling_cases(scale: Scale, gpus: int) -> Iterator[Case]:
    """All works on `gpus` GPUs, short streams first."""
    for tokens in scale.tokens:
        for work in WORKS:
            yield Case(work, tokens, gpus)
