"""Language models that read sound as tokens of their own vocabulary: early fusion.

As in Ichigo (Dao et al. 2024, 2410.15316): the codes of a quantiser are further entries behind the
vocabulary of an ordinary causal model, which reads text and sound in one sequence, without an
encoder's features and without an adapter. A checkpoint is a folder with that model, a tokenizer
with `<|sound_start|>`, `<|sound_end|>` and an entry `<|sound_0000|>` for each code, and the codec
in `codec`.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.core.speech import Codec, Turn
from mmfast.models.loading import load_codec
from mmfast.models.speech.sound import LOUDNESS, samples
from mmfast.models.text_chat import TextChat, load_text

FOLDER = "codec"  # in the folder of the model
START, END = "<|sound_start|>", "<|sound_end|>"
CODE = re.compile(r"<\|sound_(\d+)\|>")
KEPT = 256  # turns whose tokens are kept for the conversations that they are of


def is_fused(model: Any) -> bool:
    """Return whether a directory holds a causal model with a codec whose codes it reads."""
    return isinstance(model, str | Path) and (Path(model) / FOLDER).is_dir()


class FusedChat(TextChat):
    """Answers a conversation whose user's turns are text or tokens of sound.

    It is a listener, too: what it "writes down" is the name of a turn, such as
    "(sound 9f03c2d1: 1.2 s)", which stands for the turn's tokens in a conversation. Names are only
    of this object, and of its last 256 turns; an older one is read as text. They are drawn, so that
    nobody can write the name of a turn of another conversation.

    Args:
        model: Causal language model of transformers.
        tokenizer: Its tokenizer, with entries for sound.
        codec: Codec whose first codebook has a code for each entry.

    Raises:
        ModelError: The tokenizer has no chat template, an entry is missing or is not one token, or
            the codec has another number of codes.
    """

    writes = False  # its names are no transcript

    def __init__(self, model: Any, tokenizer: Any, codec: Codec) -> None:
        super().__init__(model, tokenizer)
        known = tokenizer.get_vocab()
        numbers = {int(m[1]): name for name in known if (m := CODE.fullmatch(name))}
        self.names = [numbers[i] for i in sorted(numbers)]
        if lacking := [name for name in (START, END) if name not in known]:
            raise ModelError(f"the tokenizer has no {lacking[0]}, so the model reads no sound")
        if sorted(numbers) != list(range(codec.size)):
            raise ModelError(
                f"the tokenizer has {len(numbers)} entries <|sound_N|>, the codec {codec.size} "
                "codes; give the codec that the model was trained with"
            )
        rows = model.get_input_embeddings().weight.shape[0]
        self.ids = [known[name] for name in (*self.names, START, END)]
        if max(self.ids) >= rows:
            raise ModelError(
                f"the vocabulary goes to {max(self.ids)}, the model has {rows} embeddings; "
                "give the model that was trained with this tokenizer"
            )
        probe = f"{START}{self.names[0]}{END}"
        if len(tokenizer(probe, add_special_tokens=False)["input_ids"]) != 3:
            raise ModelError(f"the tokenizer reads {probe!r} as more than 3 tokens; add them to it")
        self.codec = codec
        self._turns: OrderedDict[str, str] = OrderedDict()
        self._naming = threading.Lock()

    def codes(self, pcm: Tensor, rate: int = 16_000) -> list[int]:
        """Return the codes of sound `[n]`, of the first codebook; MediaError: it is no sound."""
        sound = samples(pcm, rate, self.codec.sample_rate)
        place = next(self.model.parameters()).device
        with torch.inference_mode():
            return [int(code) for code in self.codec.encode(sound[None].to(place))[0, 0]]

    def transcribe(self, pcm: Tensor, rate: int = 16_000) -> str:
        """Return the name of a turn that is sound `[n]`; "" for silence."""
        if not len(pcm) or float(samples(pcm, rate, rate).abs().max()) <= LOUDNESS:
            return ""
        codes = "".join(self.names[code] for code in self.codes(pcm, rate))
        name = f"(sound {secrets.token_hex(4)}: {len(pcm) / rate:.1f} s)"
        with self._naming:
            self._turns[name] = f"{START}{codes}{END}"
            if len(self._turns) > KEPT:
                self._turns.popitem(last=False)
        return name

    def _marked(self, turns: Sequence[Turn]) -> tuple[list[dict[str, str]], Mapping[str, Any]]:
        """Marks are set before sound is: entries for sound in a user's text stay text."""
        chat, marks = super()._marked(turns)
        for message, turn in zip(chat, turns, strict=True):
            sound = self._turns.get(turn.text)
            if turn.role == "user" and sound is not None:
                message["content"] = sound
        return chat, marks

    def _options(self) -> dict[str, Any]:
        """An answer is text: what says it has no mouth for codes."""
        own = self.model.generation_config.suppress_tokens or []
        return {**super()._options(), "suppress_tokens": [*own, *self.ids]}


def load_fused(
    model: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "auto",
    model_kwargs: Mapping[str, Any] | None = None,
) -> FusedChat:
    """Load a directory with its codec; ModelError where files are missing or do not fit."""
    loaded, words = load_text(model, device, dtype, model_kwargs)
    codec = load_codec(Path(model) / FOLDER, device=loaded.device, codebooks=1)
    return FusedChat(loaded, words, codec)
