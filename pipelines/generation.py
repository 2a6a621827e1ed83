"""Arguments of a call: media paired with questions, options of `generate`, and seeded draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import GenerationMixin

from mmfast.core.errors import MmfastError, an
from mmfast.frontends.image import library_of
from mmfast.frontends.source import is_encoded
from mmfast.models.decoder.draft_stage import SEED
from mmfast.models.doubt import mend_of
from mmfast.models.prompt import Shot, UnevenClipsError, check_question
from mmfast.pipelines.options import check_names, check_values, named
from mmfast.streams.reuse.schema import ModulePrompt

CALL = ("max_new_tokens", "do_sample", "temperature", "top_p", "generation_config", "seed")
# Loops of `generate` other than that in which a seed repeats the draws.
LOOPS = ("num_beams", "prompt_lookup_num_tokens", "assistant_model", "assistant_early_exit")
DRAWING = ("temperature", "top_p", "top_k", "min_p", "typical_p")
# All but arguments that change the shape of the output, run foreign code, or are set here.
GENERATE = named(GenerationMixin.generate) | {n for n in vars(GenerationConfig()) if n[0] != "_"}
GENERATE -= {"custom_generate", "generation_config", "inputs", "num_return_sequences"}
GENERATE -= {"return_dict_in_generate", "streamer", "transformers_version", "trust_remote_code"}


def merged(pipeline: Mapping[str, Any], call: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `generate`: those of a call above those of its pipeline, each above its config.

    A temperature, `top_p` or the like draws tokens unless `do_sample` is False; a temperature of 0
    takes the likeliest. MmfastError where they contradict each other.
    """
    found = {**_level(pipeline), **_level(call)}
    if "max_length" not in found:
        found.setdefault("max_new_tokens", 128)
    if not found.setdefault("do_sample", False):
        if (call or pipeline).get("seed") is not None:
            raise MmfastError(
                f"seed={found['seed']} acts only where tokens are drawn; give do_sample=True or a "
                "temperature above 0, or leave it out"
            )
        found = {name: value for name, value in found.items() if name not in (*DRAWING, "seed")}
    check_seed(found)
    return found


def _level(given: Mapping[str, Any]) -> dict[str, Any]:
    config = given.get("generation_config") or {}
    if isinstance(config, GenerationConfig):
        config = {k: v for k, v in vars(config).items() if v is not None and k[0] != "_"}
        config.pop("transformers_version", None)
    if not isinstance(config, Mapping):
        kind = type(config).__name__
        raise MmfastError(f"generation_config is {an(kind)}; give a GenerationConfig or a dict")
    check_names("generation_config", config, CALL, GENERATE)
    check_values("generation_config", config)
    both = {**config, **{k: v for k, v in given.items() if v is not None}}
    found = {k: v for k, v in both.items() if v is not None and k != "generation_config"}
    cold = found.get("temperature") == 0
    drawn = [name for name in DRAWING if found.get(name) not in (None, 1.0, 0)]
    if drawn or "temperature" in found:
        found.setdefault("do_sample", not cold)
    if (drawn or cold) and found["do_sample"] == cold:
        name = "temperature" if cold else drawn[0]
        raise MmfastError(
            f"do_sample={found['do_sample']} and {name}={found[name]!r} contradict each other; "
            "give one of them"
        )
    if cold:
        del found["temperature"]
    return found


def beams_of(model: Any, how: Mapping[str, Any]) -> int:
    """Return the beams of a call of `generate`, which a checkpoint may ask for by itself."""
    config = getattr(model, "generation_config", None)
    return int(how.get("num_beams") or getattr(config, "num_beams", None) or 1)


def check_seed(how: Mapping[str, Any], model: Any = None) -> None:
    """Refuse a seed beside beams or drafts of `generate`, whose draws it does not repeat."""
    if how.get("seed") is None:
        return
    if fix := mend_of(LOOPS, how, model) or mend_of(("stop_strings",), {}, model):
        raise MmfastError(
            f"seed={how['seed']} repeats draws of one token a step; {fix}, or call "
            "torch.manual_seed instead"
        )


class _RowDraw(LogitsProcessor):  # type: ignore[misc]
    """Draws a token for each row of scores `[B, V]` with a generator of the row's own."""

    def __init__(self, seed: int, rows: Tensor) -> None:
        self.rows = [torch.Generator(rows.device).manual_seed(seed) for _ in rows]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores of which nothing but the drawn token is left."""
        rows = zip(scores.softmax(-1), self.rows, strict=True)
        drawn = torch.stack([torch.multinomial(row, 1, generator=own) for row, own in rows])
        return torch.full_like(scores, -torch.inf).scatter(1, drawn, 0.0)


def seeded(seed: int, streamer: Any) -> Callable[..., Any]:
    """The stock decoding loop for `generate(custom_generate=)`, in which a seed repeats the draws.

    Every row of a batch draws as it would alone.
    """

    def decode(
        model: Any, input_ids: Tensor, logits_processor: Any, generation_config: Any, **rest: Any
    ) -> Any:
        generation_config.do_sample = False  # the drawn token is the likeliest that is left
        steps = LogitsProcessorList([*logits_processor, _RowDraw(seed, input_ids)])
        rest |= {"generation_config": generation_config, "streamer": streamer}
        return model._sample(input_ids, logits_processor=steps, **rest)

    decode.__dict__[SEED] = seed  # where drafts are verified, the draws are theirs
    return decode


def pair_up(media: Any, question: Any, images: bool = False) -> tuple[list[tuple[Any, str]], bool]:
    """Pair media with questions; says whether the caller asked for a list.

    Of clips, a list of arrays or PIL images with ONE question is one clip given as frames; a list
    of paths or bytes, or a list of questions, means several inputs. Of `images`, a list is always
    several inputs and a tuple one, with all its images in the prompt. MmfastError: lists of
    different lengths, or an empty question.
    """
    many = _many_images(media) if images else _many_clips(media, question)
    if isinstance(question, (list, tuple)):
        items = list(media) if many else [media] * len(question)
        if len(items) != len(question):
            raise MmfastError(
                f"{len(items)} media and {len(question)} questions; give one question per media"
            )
        return [(m, check_question(q)) for m, q in zip(items, question, strict=True)], True
    text = check_question(question)
    if many and media:
        return [(m, text) for m in media], True
    return [(media, text)], False


def several(media: Any, name: str, question: Any = "") -> bool:
    """Tell whether the media given as `images` or `videos` are several inputs."""
    return isinstance(media, (list, tuple)) and (name == "images" or _many_clips(media, question))


def _many_images(media: Any) -> bool:
    """Tell whether each element is an input; rows of numbers are an image written as a list."""
    return isinstance(media, list) and not any(isinstance(m, list) for m in media)


def _many_clips(media: Any, question: Any) -> bool:
    if not isinstance(media, (list, tuple)) or not media:
        return False
    questions = len(question) if isinstance(question, (list, tuple)) else 1
    if all(is_encoded(m) or isinstance(m, ModulePrompt) or library_of(m) for m in media):
        return True
    # Arrays of rank 4 are clips; images and rank-3 arrays are frames of one clip unless there is
    # exactly one question for each.
    return getattr(media[0], "ndim", 3) != 3 or len(media) == questions


def by_length(
    pairs: list[tuple[Any, Any]], ask: Callable[[list[tuple[Any, Any]]], Sequence[Any]]
) -> list[Any]:
    """Answers about pairs of media and question, one pass for each length of clips if need be.

    Where `ask` raises UnevenClipsError it has put what it read, `(chat, None)`, into the list.
    """
    try:
        return [*ask(pairs)]
    except UnevenClipsError:
        groups: dict[frozenset[int], list[int]] = {}
        for i, (chat, _) in enumerate(pairs):
            parts = [part for message in chat for part in message["content"]]
            frames = frozenset(len(part.pixels) for part in parts if isinstance(part, Shot))
            groups.setdefault(frames, []).append(i)
        if len(groups) == 1:
            raise
    found: dict[int, Any] = {}
    for group in groups.values():
        found.update(zip(group, by_length([pairs[i] for i in group], ask), strict=True))
    return [found[i] for i in range(len(pairs))]
