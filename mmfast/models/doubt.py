"""Detection of made-up words: a small head beside generation judges every token of an answer.

HalLoc (Park et al., CVPR 2025, arXiv 2506.10286) labels the tokens of answers that state what a
picture does not show and runs a light detector beside the model. Here the detector reads what the
decoder holds when it writes a token; the answer itself stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from mmfast.compressors.base import placed, read_module
from mmfast.core.errors import MmfastError, ModelError

FOLDER = "detectors"  # beside the weights of a checkpoint
NAME = "doubt"
TRAINING = "python -m mmfast.tiny.scenes.doubts --out DIR"
KNOWN = 16  # likeliest tokens of a step that are kept; others count as the last of them
UNFINISHED = "\ufffd"  # what a tokenizer makes of some bytes of a character
# Arguments of `generate` with which a token takes several passes, or a pass several tokens
STEPS: tuple[str, ...] = ("num_beams", "guidance_scale", "prefill_chunk_size")
STEPS += ("prompt_lookup_num_tokens", "assistant_model", "assistant_early_exit")
ONE = STEPS[:2]  # of these, 1 is plain decoding
SIGNALS = 2  # beside states: surprise at the token, and entropy of the step


@dataclass(frozen=True)
class AnswerSteps:
    """Decoder at every token of answers: B rows of L tokens.

    Attributes:
        state: Output of the last layer that the token was read off, `[B, L, D]` float32.
        surprise: Negative logarithm of the token's probability, `[B, L]`, in nats.
        entropy: That of the distribution it was taken from, `[B, L]`, in nats.
    """

    state: Tensor
    surprise: Tensor
    entropy: Tensor


class TokenDoubt(nn.Module):
    """Log-odds that a token states what is not there.

    One hidden layer reads the decoder's state at the token, the embedding of the token, how much it
    surprised, and the entropy of the step.
    """

    name = NAME

    def __init__(self, width: int, *, inner: int = 96) -> None:
        super().__init__()
        self.config = {"width": width, "inner": inner}
        self.state, self.word = nn.LayerNorm(width), nn.LayerNorm(width)
        self.enter = nn.Linear(2 * width + SIGNALS, inner)
        self.leave = nn.Linear(inner, 1)

    def forward(self, steps: AnswerSteps, word: Tensor) -> Tensor:
        """Judge tokens with embeddings `word` `[B, L, D]`: `[B, L]` float32."""
        signals = torch.stack([steps.surprise, steps.entropy], -1)
        read = torch.cat([self.state(steps.state), self.word(word.float()), signals], -1)
        found: Tensor = self.leave(gelu(self.enter(read)))[..., 0]
        return found


def load(path: str | Path) -> TokenDoubt:
    """Read the weights, on the CPU in float32; ModelError where the file holds none."""
    found: TokenDoubt = read_module(path, "detector", TokenDoubt)
    return found


def file_of(folder: str | Path) -> Path:
    """The file of a detector beside a checkpoint."""
    return Path(folder) / FOLDER / f"{NAME}.safetensors"


def check_plain(check: bool, drafts: bool, how: Mapping[str, Any], model: Any = None) -> None:
    """Refuse what writes tokens that a detector does not see step by step (MmfastError).

    A `model` may ask for it in its generation config, too.
    """
    if check and (fix := "leave out decode=" if drafts else mend_of(STEPS, how, model)):
        raise MmfastError(f"check=True reads plain decoding, one step a token; {fix}")


def mend_of(names: Sequence[str], how: Mapping[str, Any], model: Any) -> str:
    """Return what rids a call of the first argument of `names` that acts in it, or ""."""
    own = getattr(model, "generation_config", None)
    for name in names:
        given = how.get(name)
        value = getattr(own, name, None) if given is None else given
        if value is None or (value == 1 and name in ONE):
            continue
        if given is not None:
            return f"leave out {name}="
        mend = f"give {name}=1" if name in ONE else "set that to None"
        return f"the checkpoint's generation_config has {name}={value!r}: {mend}"
    return ""


def detector_of(model: Any) -> TokenDoubt:
    """Return the detector beside a model's checkpoint.

    ModelError with the command that trains one, or where it is for another width.
    """
    path = file_of(str(getattr(model, "name_or_path", "") or ""))
    if not path.is_file():
        raise ModelError(
            f"check= needs a detector beside the weights, and there is no {str(path)!r}; "
            f"train one for the embedded model with `{TRAINING}`"
        )
    embed = model.get_input_embeddings().weight
    found: TokenDoubt = placed(str(path), embed.device, torch.float32, load)
    if found.config["width"] != embed.shape[-1]:
        raise ModelError(
            f"{str(path)!r} is for states of width {found.config['width']}, and this model has "
            f"{embed.shape[-1]}; train one for it"
        )
    return found


class StepRecorder:
    """Notes what the output layer reads and says at every step of one greedy or sampled answer."""

    def __init__(self) -> None:
        self._steps: list[tuple[Tensor, ...]] = []

    def note(self, module: Any, given: tuple[Any, ...], logits: Tensor) -> None:
        """Take the last position of a call, as a hook behind the output layer."""
        last = logits[:, -1].detach().float()
        log = last.log_softmax(-1)
        best, ids = log.topk(min(KNOWN, log.shape[-1]), -1)
        entropy = -(log.exp() * log).nan_to_num().sum(-1)
        self._steps.append((given[0][:, -1].detach().float(), best, ids, entropy))

    @contextmanager
    def on(self, model: Any) -> Iterator[StepRecorder]:
        """Record the calls of a model."""
        with model.get_output_embeddings().register_forward_hook(self.note):
            yield self

    def steps(self, ids: Tensor) -> AnswerSteps:
        """Return the steps of the tokens `[B, L]` that were written; ModelError if others ran."""
        if len(self._steps) != ids.shape[1] or len(self._steps[0][0]) != len(ids):
            raise ModelError(
                f"{len(self._steps)} steps were seen for {ids.shape[1]} tokens: check= reads plain "
                "decoding, one step a token; leave out arguments of generate that change that"
            )
        state, best, known, entropy = (
            torch.stack(part, 1) for part in zip(*self._steps, strict=True)
        )
        same = known == ids.to(known.device)[..., None]
        chosen = best.masked_fill(~same, -torch.inf).amax(-1)
        return AnswerSteps(state, -torch.maximum(chosen, best[..., -1]), entropy)


@dataclass(frozen=True)
class Doubt:
    """A piece of an answer and the probability, in [0, 1], that it is made up."""

    text: str
    chance: float


@torch.no_grad()
def doubts(
    model: Any, tokenizer: Any, recorder: StepRecorder, ids: Tensor
) -> list[tuple[Doubt, ...]]:
    """Judge the tokens `[B, L]` of answers; special tokens are left out."""
    judge = detector_of(model)
    word = model.get_input_embeddings()(ids)
    chances = judge(recorder.steps(ids), word).sigmoid().tolist()
    return [
        tuple(
            Doubt(text, chance)
            for text, chance in zip(pieces(tokenizer, row), mine, strict=True)
            if text
        )
        for row, mine in zip(ids.tolist(), chances, strict=True)
    ]


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Text that each token adds to an answer, "" for special ones; joined they are the answer.

    Of several tokens that write one character, the last has it.
    """
    found, before = [], ""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end], skip_special_tokens=True)
        if end < len(ids):
            text = text.rstrip(UNFINISHED)
        found.append(text[len(before) :])
        before = text
    return found
