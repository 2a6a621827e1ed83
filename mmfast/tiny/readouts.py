"""Read-outs inside the decoder that make it learn motion in minutes; thrown away after training.

One answer a question says little about 288 visual tokens. A label for each of them says a lot.
"""

from torch import Tensor, cat, nn
from torch.nn.functional import cross_entropy

from mmfast.tiny.labels import IGNORE, MOTION, NAMED
from mmfast.tiny.lessons import Lesson
from mmfast.tiny.scene import SAMPLED


class MotionHead(nn.Module):
    """What a visual token's state must say: its frame, and how the thing in it moves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.parts = [SAMPLED, *MOTION.values(), 5]
        self.read = nn.Linear(width, sum(self.parts))

    def loss(self, x: Tensor, lesson: Lesson, kept: Tensor) -> Tensor:
        """Loss on states of the kept tokens and the newline behind them: x [B, M + 1, D]."""
        outs = self.read(x).split(self.parts, -1)
        batch, patches = len(x), lesson.tokens.shape[2]
        frame = kept // patches  # [B, M]
        total = 0.2 * cross_entropy(outs[0][:, :-1].flatten(0, 1), frame.flatten())
        for out, name in zip(outs[1:-1], MOTION, strict=True):
            label = lesson.motion[name].flatten(1).gather(1, kept)
            if (label != IGNORE).any():
                total = total + cross_entropy(out[:, :-1].flatten(0, 1), label.flatten())
        # A token may not have seen the rest of its own frame: it owes the count up to the last.
        before = cat([lesson.count.new_zeros(batch, 1), lesson.count], 1)
        owed = cat([before.gather(1, frame), lesson.count[:, -1:]], 1)
        total = total + 0.3 * cross_entropy(outs[-1].flatten(0, 1), owed.flatten())
        return total + 0.5 * cross_entropy(outs[-1][:, -1], owed[:, -1])


class NameHead(nn.Module):
    """What the state at a name in a question must say: how the thing of that name moves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.read = nn.Linear(width, sum(NAMED.values()))

    def loss(self, x: Tensor, lesson: Lesson) -> Tensor:
        """Loss on the states of the packed questions: x [B, L, D]."""
        total = x.new_zeros(())
        named = lesson.packed.named
        for out, name in zip(self.read(x).split(list(NAMED.values()), -1), NAMED, strict=True):
            label = lesson.things[name].gather(1, named)
            if (label != IGNORE).any():
                total = total + cross_entropy(out.flatten(0, 1), label.flatten())
        return total
