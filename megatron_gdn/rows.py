"""Rows of tokens and the document borders in them: what a recurrent kernel needs to know."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from megatron_gdn import cp_layout


@dataclass(frozen=True, eq=False)
class Rows:
    """R rows of equal length, each a run of consecutive stream positions.

    A row may start and end inside a document, and may hold any number of documents.
    """

    borders: tuple[tuple[int, ...], ...]
    """Per row: 0, the places where a document begins inside the row, and the row length."""
    first_positions: tuple[int, ...]
    """Per row: the position of its first token in its document; 0 if a document begins there."""
    device: torch.device

    @classmethod
    def from_ranges(
        cls,
        cu_seqlens: tuple[int, ...],
        ranges: tuple[tuple[int, int], ...],
        batch: int,
        device: torch.device,
    ) -> "Rows":
        """Rows for stream positions `ranges`, each repeated `batch` times (span-major)."""
        borders, firsts = [], []
        for start, end in ranges:
            row = tuple(b - start for b in cp_layout.borders_in(cu_seqlens, start, end))
            borders += [row] * batch
            firsts += [start - cp_layout.document_start(cu_seqlens, start)] * batch
        return cls(tuple(borders), tuple(firsts), device)

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.borders)

    @property
    def row_len(self) -> int:
        """Tokens per row."""
        return self.borders[0][-1]

    @property
    def whole(self) -> bool:
        """Whether every row is one document from its first token on."""
        return all(len(b) == 2 for b in self.borders) and not any(self.first_positions)

    @cached_property
    def positions(self) -> Tensor:
        """Position of every token in its document, [R, row_len], int64."""
        out = torch.arange(self.row_len).repeat(self.num_rows, 1)
        for row, borders, first in zip(out, self.borders, self.first_positions, strict=True):
            starts = torch.tensor(borders[:-1])
            row -= starts.repeat_interleave(torch.tensor(borders).diff())
            row[: borders[1]] += first
        return out.to(self.device)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Borders of all pieces in the rows laid end to end, [pieces + 1], int32, as varlen kernels want."""
        lengths = [b - a for borders in self.borders for a, b in zip(borders, borders[1:], strict=False)]
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.device)
