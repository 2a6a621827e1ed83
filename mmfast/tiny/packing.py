"""Pack many questions about one clip into one row: the visual prefix is computed once.

Each question sees the prefix and itself, and its positions start right after the prefix, so
that a packed row gives the same numbers as asking the questions one at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmfast.tiny.build import ASSISTANT, END

IGNORE = -100


@dataclass(frozen=True)
class Packed:
    """Questions and answers of a batch, one row per clip, padded on the right."""

    ids: Tensor  # [B, L]
    block: Tensor  # [B, L] number of the question, -1 = padding
    within: Tensor  # [B, L] place in its question
    labels: Tensor  # [B, L] next token where it belongs to an answer, else IGNORE
    named: Tensor  # [B, L] 1 + the thing whose name ends here, 0 = none

    def mask(self, prefix: int) -> Tensor:
        """What each question token may look at: bool [B, 1, L, prefix + L]."""
        same = self.block[:, :, None] == self.block[:, None, :]
        own = (same & (self.within[:, :, None] >= self.within[:, None, :])).unsqueeze(1)
        seen = torch.ones(*own.shape[:-1], prefix, dtype=torch.bool, device=own.device)
        return torch.cat([seen, own], -1)

    def correct(self, guesses: Tensor) -> list[list[bool]]:
        """Per row and question, whether every answer token is right: guesses [B, L]."""
        wrong = (guesses != self.labels) & (self.labels != IGNORE)
        return [
            [not bool(w[b == k].any()) for k in range(int(b.max()) + 1)]
            for w, b in zip(wrong, self.block, strict=True)
        ]


def pack(
    rows: Sequence[Sequence[tuple[list[int], list[int]]]],
    marks: Sequence[Sequence[dict[int, int]]] = (),
) -> Packed:
    """Pack rows of (question ids, answer ids).

    Args:
        rows: questions and answers per clip.
        marks: for each of them, which thing (1 + number) is named up to which question token.
    """
    columns: list[list[list[int]]] = [[], [], [], [], []]
    for line, row in enumerate(rows):
        ids: list[int] = []
        block: list[int] = []
        within: list[int] = []
        labels: list[int] = []
        named: list[int] = []
        for number, (question, answer) in enumerate(row):
            text = [*question, ASSISTANT, *answer]
            ids += text
            block += [number] * len(text)
            within += range(len(text))
            labels += [IGNORE] * len(question) + [*answer, END]
            mark = marks[line][number] if marks else {}
            named += [mark.get(place, 0) for place in range(len(text))]
        for column, value in zip(columns, (ids, block, within, labels, named), strict=True):
            column.append(value)
    length = max(len(ids) for ids in columns[0])
    padded = [
        torch.tensor([v + [fill] * (length - len(v)) for v in column])
        for column, fill in zip(columns, (END, -1, 0, IGNORE, 0), strict=True)
    ]
    return Packed(*padded)
