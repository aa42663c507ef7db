"""What one GatedDeltaNet layer sends under context parallelism, for the released sizes: arithmetic, no run.

python -m tests.benchmarks.comm_volume      from the root of the repository; writes results/comm_volume.md
"""

from megatron_gdn.comm_volume import all_gather_bytes, chunkwise_bytes, headwise_bytes
from megatron_gdn.config import SIZES
from megatron_gdn.cp_layout import CPLayout
from megatron_gdn.gated_delta_net_cp import Sections
from tests.benchmarks.report import RESULTS, commit, table

TOKENS = 128 * 1024
"""Of one stream."""
CP_SIZES = (2, 4, 8)
LAYOUTS: tuple[CPLayout, ...] = ("zigzag", "contiguous")
MIB = 2**20


def sections_of(size: str) -> Sections:
    """Heads of a GatedDeltaNet layer of a size, at tensor-parallel size 1."""
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    return Sections(*(SIZES[size].fields[f"linear_{name}"] for name in names))


def most_chunkwise_bytes(sections: Sections, cp_size: int, layout: CPLayout) -> int:
    """Sent by the rank that sends most: at the ends of the stream there are fewer spans to tell."""
    return max(chunkwise_bytes(sections, cp_size, rank, layout=layout) for rank in range(cp_size))


def break_even(sections: Sections, cp_size: int, layout: CPLayout) -> int:
    """Least number of tokens per rank with which chunkwise sends less than headwise."""
    sent = most_chunkwise_bytes(sections, cp_size, layout)
    # Headwise bytes of cp tokens are a whole number: no rounding enters.
    return sent * cp_size // headwise_bytes(sections, cp_size, cp_size) + 1


def volume_row(size: str, cp_size: int) -> list[object]:
    """One line of the table."""
    sections, tokens_local = sections_of(size), TOKENS // cp_size
    sent = [
        headwise_bytes(sections, tokens_local, cp_size),
        *(most_chunkwise_bytes(sections, cp_size, layout) for layout in LAYOUTS),
        all_gather_bytes(SIZES[size].fields["hidden_size"], tokens_local, cp_size),
    ]
    tokens = [f"{break_even(sections, cp_size, layout):,}" for layout in LAYOUTS]
    return [size, cp_size, *(f"{n / MIB:,.1f}" for n in sent), *tokens]


def volume_table() -> str:
    """The Markdown table of all released sizes."""
    head = ["size", "CP", "headwise"]
    head += [f"chunkwise, {layout}" for layout in LAYOUTS] + ["all-gather of the input"]
    head += [f"break-even, {layout}" for layout in LAYOUTS]
    return table(head, (volume_row(size, cp) for size in SIZES if size != "debug" for cp in CP_SIZES))


def main() -> None:
    """Print and write the table."""
    text = (
        "# What one GatedDeltaNet layer sends under context parallelism\n\n"
        "MiB that one rank, the one that sends most, sends in one forward pass; in the backward pass all "
        f"ranks together send the same. One stream of {TOKENS:,} tokens, activations in bf16, TP 1. Headwise "
        "sends queries, keys, values, b, a and the output; chunkwise the fp32 summaries of its spans and the "
        "convolution's halo, whatever the number of tokens. Beside them: gathering the layer's input on "
        "every rank, which is often less than headwise sends, but has every rank work through all the "
        "tokens. Break-even: from so many tokens per rank on, chunkwise sends less than headwise.\n\n"
        "The arithmetic is `megatron_gdn/comm_volume.py`; `tests/distributed/test_comm_volume.py` counts the "
        "collectives and finds the same.\n\n"
        f"- command: `python -m tests.benchmarks.comm_volume`, commit {commit()}\n\n{volume_table()}"
    )
    print(text)
    (RESULTS / "comm_volume.md").write_text(text)


if __name__ == "__main__":
    main()
