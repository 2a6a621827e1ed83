"""The words of a reply: a small language model over the text rows of the speech model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mmfast.decoding.loop import SingleDecoder
from mmfast.decoding.sampling import Sampling
from mmfast.models.decoder.backbone import Backbone
from mmfast.models.speech.layout import MARKS, SpeechLayout, TextGuide

FOLDER = "reply"
MOST = 48  # words and marks of a reply


class ReplyModel:
    """Words a reply to what was said."""

    def __init__(self, backbone: Backbone, layout: SpeechLayout) -> None:
        self.backbone, self.layout = backbone, layout

    def words(self, past: Sequence[int], sampling: Sampling | None = None) -> Iterator[str]:
        """Yield the reply word by word, each with the blank that precedes it.

        `past` has the ids of the conversation, what is to be answered last. Words are chosen while
        they are asked for.
        """
        guide = TextGuide(self.layout, MOST)
        decoder = SingleDecoder(self.backbone, None, guide, sampling=sampling)
        decoder.feed([*past, self.layout.id("<answer>")])
        word = ""
        for step in decoder:
            for token in step.tokens:
                word += self.layout.text([token])
                if word and self.layout.ends_group(token):
                    yield word if word in MARKS else f" {word}"
                    word = ""
