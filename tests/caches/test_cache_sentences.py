"""Sentences of a prompt and an answer: by the tokenizer, by given ids, and of frames."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import oracles_select as oracles
import pytest
import torch
from cache_runs import close, rows, run
from text_zoo import padded, prompt, text_model, written
from tiny_models import tiny
from torch import Tensor

import mmfast
from mmfast.attach import attach
from mmfast.caches.selection.sentencekv import MeanSentences
from mmfast.core.errors import ModelError, SpecError
from mmfast.core.kv import LayerStep, StepChoice
from mmfast.models.kv import notes
from mmfast.models.kv.sentences import Sentences, ends_sentence

ENDS = {3, 5}
SPEC = "sentencekv:0.3?ends=57_71_9_83_36_11"


def numbers_of(layer: Any, row: int = 0) -> list[int]:
    codes: Tensor = layer.notes[notes.SENTENCE][row, 0]
    return [code >> 1 for code in codes.tolist() if code >= 0]


def layer_of(batch: int) -> Any:
    """A cache layer of nothing but notes, whose entries are counted by them."""
    empty = torch.zeros(batch, 1, 0, dtype=torch.int8)
    return SimpleNamespace(
        is_initialized=True, keys=torch.zeros(batch, 1, 0, 1), gone=0, notes={notes.KIND: empty}
    )


def bring(made: Sentences, layer: Any, ids: Tensor, frames: Tensor, kinds: Tensor) -> None:
    layer.keys = torch.zeros(len(ids), 1, layer.keys.shape[2] + ids.shape[1], 1)
    made.arrive(layer, ids, frames, kinds)


@pytest.mark.parametrize("sizes", [(40,), (7, 1, 20, 12), (1,) * 40])
def test_sentences_are_numbered_alike_in_any_parts(sizes: tuple[int, ...]) -> None:
    """Text, two frames that touch, padding in front of one row: against a walk over the tokens."""
    generator = torch.Generator().manual_seed(len(sizes))
    ids = torch.randint(0, 9, (2, 40), generator=generator)
    frames = torch.full((2, 40), -1)
    frames[0, 10:15], frames[0, 15:20], frames[1, 30:33] = 7, 8, 9
    kinds = torch.zeros(2, 40, dtype=torch.int8)
    kinds[1, :6] = notes.PADDING
    made, layer = Sentences(None, "sentencekv", "3_5"), layer_of(2)
    for part in zip(*(each.split(sizes, 1) for each in (ids, frames, kinds)), strict=True):
        bring(made, layer, *part)
    for row, first in ((0, 0), (1, 6)):
        given = ids[row, first:].tolist(), ENDS, frames[row, first:].tolist()
        found = numbers_of(layer, row)
        assert [each - found[0] for each in found] == oracles.sentences(*given)
    assert max(numbers_of(layer)) > 6


@pytest.mark.parametrize(
    ("text", "over"),
    [
        (".", True),
        (" end.", True),
        ('."', True),
        (".)", True),
        ("?\u201d", True),
        ("\u3002", True),
        ("\n\n", True),
        (" word", False),
        (",", False),
        ("3.5", False),
        ("", False),
        (")", False),
    ],
)
def test_ends_of_sentences(text: str, over: bool) -> None:
    assert ends_sentence(text) == over


def test_a_pipeline_reads_sentences_by_its_tokenizer() -> None:
    """Its prompt has 8 frames and text; a budget below one frame fetches one of them per head."""
    pipe = mmfast.pipeline("video-qa", cache="sentencekv:0.2")
    answer = pipe("assets/clips/red-circle.mp4", "Which way does the red circle move?")
    (row,) = [row for row in answer.trace.rows if row.stage == "select"]
    assert 0 < row.tokens_out < row.tokens_in
    assert all(0 < each.fetched == each.awaited < each.nbytes for each in answer.trace.reads)


@pytest.mark.parametrize("family", ["qwen2_5_vl"])
def test_frames_are_sentences(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a frame is read, or none of it; and rows of a batch are rows alone."""
    this, seen = tiny(family), list[tuple[Tensor, Tensor]]()
    choose = MeanSentences.choose

    def look(self: MeanSentences, step: LayerStep) -> StepChoice:
        choice = choose(self, step)
        assert step.sentence is not None
        index, real = choice.entries(step.n)
        mine = index[0, 0] if real is None else index[0, 0][real[0, 0]]
        seen.append((step.sentence[0], mine))
        return choice

    monkeypatch.setattr(MeanSentences, "choose", look)
    together = run(this, rows(this, [0, 1]), SPEC, tokens=5)
    for row in range(2):
        close(together, run(this, rows(this, [row]), SPEC, tokens=5), row)
    for sentence, index in seen:
        sizes, read = sentence.bincount(), sentence[index.unique()].bincount(minlength=1)
        touched = read.nonzero()[:, 0]
        assert torch.equal(read[touched], sizes[touched]) and len(touched) < len(sizes)
    assert max(int(sentence.bincount().max()) for sentence, _ in seen) >= 4


def test_what_a_score_leaves_has_its_sentences() -> None:
    model, prompts = text_model("llama"), [prompt(41), prompt(29, 1)]
    with attach(model, cache=f"snapkv:0.5?window=5+{SPEC}") as trace:
        logits = written(model, padded(prompts), 5)[1]
        alone = [written(model, {"input_ids": ids}, 5)[1] for ids in prompts]
    torch.testing.assert_close(logits, torch.cat(alone), atol=2e-5, rtol=0)
    assert trace.reads[0].read < trace.reads[0].held < 41


def test_what_cannot_act_says_so() -> None:
    model = text_model("llama")
    with pytest.raises(ModelError, match="finds no tokenizer beside the model") as error:
        attach(model, cache="sentencekv:0.1")
    assert "\n" not in str(error.value)
    with pytest.raises(SpecError, match="write ids of tokens, as 'ends=13_30'"):
        attach(model, cache="sentencekv:0.1?ends=stop")
    states = model.get_input_embeddings()(prompt(9))
    with attach(model, cache=SPEC), pytest.raises(ModelError, match="pass input_ids"):
        model(inputs_embeds=states, use_cache=True)
    cache = model(prompt(9), use_cache=True).past_key_values
    with attach(model, cache=SPEC) as trace, pytest.warns(UserWarning, match="attach first"):
        model(prompt(1), past_key_values=cache)
    assert trace.reads[0].read == trace.reads[0].held == 10
