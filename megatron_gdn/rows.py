"""Rows of tokens and the document borders in them: what a recurrent kernel needs to know."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from megatron_gdn import cp_layout


class StateExchange(Protocol):
    """How the recurrent state passes between rows that follow each other in the stream."""

    def __call__(self, summaries: Tensor) -> Tensor:
        """From the summaries [M | S] of this rank's rows to what enters each of them.

        Differentiable. It may hand a row the state of another document: `Rows.continued` says whose
        first document began before it.

        Args:
            summaries: [R, H, K, K + V] fp32.

        Returns:
            [R, H, K, V] fp32.
        """

    def start_reverse(self, summaries: Tensor) -> Callable[[], Tensor]:
        """Begin the same scan from the stream's end, for a caller that has no autograd graph.

        Args:
            summaries: [M^T | dS] of this rank's rows, [R, H, K, K + V] fp32, where dS is the gradient with
                respect to the state that enters a row if none comes from behind it.

        Returns:
            What waits for the gradient with respect to the state that leaves each row, [R, H, K, V] fp32.
            What is launched before it is called runs while summaries travel.
        """


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

    @property
    def cut(self) -> bool:
        """Whether a document begins inside some row."""
        return any(len(b) > 2 for b in self.borders)

    @cached_property
    def longest_piece(self) -> int:
        """Tokens of the longest piece of a document in the rows."""
        return max(b - a for borders in self.borders for a, b in pairwise(borders))

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
    def cu_seqlens_cpu(self) -> Tensor:
        """Borders of all pieces in the rows laid end to end, [pieces + 1], int32, on the CPU."""
        lengths = [b - a for borders in self.borders for a, b in pairwise(borders)]
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """`cu_seqlens_cpu` on the rows' device, as varlen kernels want it."""
        return self.cu_seqlens_cpu.to(self.device)

    @cached_property
    def first_pieces(self) -> Tensor:
        """For each row, which of all pieces is its first, [R], int64."""
        pieces = [len(borders) - 1 for borders in self.borders]
        return torch.tensor([0, *accumulate(pieces)][:-1], device=self.device)

    @cached_property
    def last_pieces(self) -> Tensor:
        """For each row, which of all pieces is its last, [R], int64."""
        pieces = [len(borders) - 1 for borders in self.borders]
        return torch.tensor(list(accumulate(pieces)), device=self.device) - 1

    @cached_property
    def continued(self) -> Tensor:
        """Whether a row's first document began before it, [R], bool."""
        return torch.tensor([first > 0 for first in self.first_positions], device=self.device)

    @cached_property
    def inside(self) -> Tensor:
        """Whether a row lies inside one document that began before it, [R], bool."""
        through = [
            len(b) == 2 and first > 0 for b, first in zip(self.borders, self.first_positions, strict=True)
        ]
        return torch.tensor(through, device=self.device)

    @cached_property
    def tails(self) -> "Rows":
        """The last piece of every row, all laid end to end in one row."""
        lengths = [borders[-1] - borders[-2] for borders in self.borders]
        return Rows(((0, *accumulate(lengths)),), (0,), self.device)

    def extended(self, taps: int) -> "Rows":
        """The rows with the `taps` tokens before each of them put in front; made once per `taps`.

        What is put in front belongs to the row's first document as far as that reaches back. Only the
        borders are right there, as a convolution needs; positions are not.
        """
        cache = self.__dict__.setdefault("_extended", {})
        if taps not in cache:
            borders = tuple(
                tuple(sorted({0, max(taps - first, 0), *(b + taps for b in row[1:])}))
                for row, first in zip(self.borders, self.first_positions, strict=True)
            )
            cache[taps] = Rows(borders, (0,) * self.num_rows, self.device)
        return cache[taps]
