"""Sequences of reading and writing, from sentences whose words are aligned.

Source and target share one sequence with marks of reading and writing, as in interleaved
simultaneous translation (2504.09570); a joint sequence writes the transcript in front of the words
of the translation that it decides, with marks of the task, as joint t-SOT does (2307.03354).
"""

from __future__ import annotations

from collections.abc import Sequence

from mmfast.decoding.serialised import HEARD, SAID, serialise
from mmfast.models.interleaved import END, JOINT, READ, WRITE, late_mark
from mmfast.tiny.translation.grammar import AlignedPair

LATES = range(7)  # words read beyond those needed
LAST = "</s>"
MARKS = (WRITE, READ, END, JOINT, HEARD, SAID, *(late_mark(n) for n in LATES))


def interleaved(pair: AlignedPair, late: int, joint: bool = False) -> list[str]:
    """Return a sentence as one sequence of words and marks.

    Args:
        pair: Sentence with the number of source words that each target word needs.
        late: Further source words to read before a word is written.
        joint: Whether the transcript is written, too.
    """
    source, target = pair.english.split(), pair.velda.split()
    found = [late_mark(late), *([JOINT] if joint else [])]
    heard = said = 0

    def written(read: int, due: int) -> list[str]:
        nonlocal heard, said
        words = target[said:due]
        told = serialise([(HEARD, source[heard:read]), (SAID, words)]) if joint else words
        heard, said = read, due
        return told

    for read, word in enumerate(source, 1):
        found.append(word)
        due = sum(need + late <= read for need in pair.needs)
        if due > said:
            found += [WRITE, *written(read, due), READ]
    return [*found, END, *written(len(source), len(target)), LAST]


def own_places(words: Sequence[str]) -> list[bool]:
    """Tell which entries of a sequence a model writes, and not the speaker."""
    found, mine = list[bool](), False
    for word in words:
        found.append(mine or word == WRITE)
        mine = word in (WRITE, END) or (mine and word != READ)
    return found
