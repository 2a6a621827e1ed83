"""The detector of made-up words: its features and labels against loops, its recipe, its option."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import oracles_compressors as oracle
import pytest
import torch
from tiny_models import build, tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mmfast import MmfastError, ModelError, pipeline
from mmfast.attach import attach
from mmfast.cli.output import made_up
from mmfast.compressors.base import save
from mmfast.models.doubt import (
    AnswerSteps,
    Doubt,
    StepRecorder,
    TokenDoubt,
    check_plain,
    detector_of,
    doubts,
    file_of,
    load,
    pieces,
)
from mmfast.tiny import training
from mmfast.tiny.scenes import doubts as recipe
from mmfast.tiny.scenes.scoring import facts_of

TRUTH = (
    "there are 2 objects on a plain background. the red circle moves left, is there from the start "
    "and stays until the end. the white cross moves down, appears at second 4 and leaves at second "
    "6. number 42 appears at second 3."
)


def make(width: int = 16, seed: int = 0) -> TokenDoubt:
    torch.manual_seed(seed)
    made = TokenDoubt(width, inner=12)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    return made.eval().requires_grad_(False)


def odds(judge: TokenDoubt, state: Tensor, word: Tensor, signals: list[float]) -> float:
    """Log-odds of one token by its written rule, in float64."""
    weights = {name: each.double().numpy() for name, each in judge.state_dict().items()}
    seen = oracle.norm(state.double().numpy(), weights, "state")
    named = oracle.norm(word.double().numpy(), weights, "word")
    inside = oracle.linear(np.concatenate([seen, named, signals]), weights, "enter")
    act = np.array([0.5 * h * (1 + math.erf(h / math.sqrt(2))) for h in inside])
    return float(oracle.linear(act, weights, "leave")[0])


@torch.no_grad()
def test_the_head_is_that_of_loops() -> None:
    judge, (state, word) = make(), torch.randn(2, 2, 3, 16)
    steps = AnswerSteps(state, torch.rand(2, 3), torch.rand(2, 3))
    found = judge(steps, word)
    for row in range(2):
        for at in range(3):
            signals = [float(steps.surprise[row, at]), float(steps.entropy[row, at])]
            known = odds(judge, state[row, at], word[row, at], signals)
            assert math.isclose(float(found[row, at]), known, rel_tol=1e-4, abs_tol=1e-5)
    swapped = AnswerSteps(state, steps.entropy, steps.surprise)  # a planted fault
    assert not torch.allclose(judge(swapped, word), found, 1e-3)


@torch.no_grad()
def test_steps_are_those_of_a_pass_over_the_whole_answer() -> None:
    """Also under a reduction: what was read is what a second pass reads at the same places."""
    this = tiny("llava")
    picture = np.random.default_rng(0).integers(0, 255, (30, 30, 3), np.uint8)
    inputs = this.inputs(["a {image} what?", "some more {image} what?"], images=[picture, picture])
    start = inputs["input_ids"].shape[1]
    how = {"max_new_tokens": 4, "do_sample": False, "suppress_tokens": this.blocked()}
    with attach(this.model, "uniform:4"):
        with StepRecorder().on(this.model) as recorder:
            out = this.model.generate(**inputs, **how)
        whole = {**inputs, "input_ids": out, "attention_mask": torch.ones_like(out)}
        whole["attention_mask"][:, :start] = inputs["attention_mask"]
        again = this.model(**whole, output_hidden_states=True)
    steps, ids = recorder.steps(out[:, start:]), out[:, start:]
    states, logits = again.hidden_states[-1][:, -5:-1], again.logits[:, -5:-1].double()
    torch.testing.assert_close(steps.state, states.float(), rtol=1e-4, atol=1e-4)
    log = logits - logits.exp().sum(-1, keepdim=True).log()
    for row in range(2):
        for at in range(4):
            line = log[row, at]
            assert math.isclose(
                float(steps.surprise[row, at]), -float(line[ids[row, at]]), abs_tol=1e-3
            )
            entropy = -sum(math.exp(p) * p for p in line.tolist())
            assert math.isclose(float(steps.entropy[row, at]), entropy, abs_tol=1e-3)
    with pytest.raises(ModelError, match="4 steps were seen for 3 tokens"):
        recorder.steps(ids[:, 1:])
    assert not this.model.get_output_embeddings()._forward_hooks


def test_claims_are_the_facts_of_a_description() -> None:
    found = list(recipe.claims(TRUTH))
    known = {fact for fact in facts_of(TRUTH) if fact[0] != "order"}
    assert {fact for fact, _, _ in found} == known and len(known) == 12
    for fact, start, end in found:
        assert TRUTH[start:end] == (fact[-1] if fact != ("there", fact[-1]) else fact[1])


@pytest.mark.parametrize(
    ("right", "said", "marked"),
    [
        ("2 objects", "3 objects", {"3"}),
        ("plain", "striped", {"striped"}),
        ("circle moves left", "circle moves up", {"up"}),
        ("white cross", "blue cross", {"blue", "cross", "down", "appears", "leaves"}),
        ("at second 6", "at second 5", {"leaves", "5"}),
        ("number 42", "number 47", {"47"}),
    ],
)
def test_what_is_changed_is_marked(right: str, said: str, marked: set[str]) -> None:
    text = TRUTH.replace(right, said)
    parts = [word for token in text.split(" ") for word in (token, " ")][:-1]
    stated, wrong = recipe.labels(TRUTH, parts)
    found = {part.strip(".,") for part, mark in zip(parts, wrong, strict=True) if mark}
    assert marked <= found and "red" not in found and "circle" not in found
    assert all(s for s, w in zip(stated, wrong, strict=True) if w) and sum(stated) > sum(wrong)
    assert not any(recipe.labels(TRUTH, [TRUTH])[1])


def test_the_area_is_the_share_of_pairs_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "RESAMPLES", 100)
    rng = np.random.default_rng(0)
    score, truth = rng.integers(0, 8, 60).astype(float), rng.random(60) < 0.3
    pairs = [(a > b) + 0.5 * (a == b) for a in score[truth] for b in score[~truth]]
    values, marks = torch.from_numpy(score), torch.from_numpy(truth)
    assert math.isclose(recipe.auroc(values, marks), np.mean(pairs), rel_tol=1e-9)
    assert math.isclose(recipe.auroc(-values, marks), 1 - np.mean(pairs), rel_tol=1e-9)
    assert math.isnan(recipe.auroc(values, torch.zeros(60, dtype=torch.bool)))
    low, high = recipe.auroc_interval(values, marks, torch.arange(60) // 3)
    assert low < np.mean(pairs) < high


def described(rows: int = 40, seed: int = 0) -> recipe.Described:
    """Tokens of which those with a large third number are made up, four times in five."""
    rng, n = torch.Generator().manual_seed(seed), 20 * rows
    state, word = torch.randn(2, n, 16, generator=rng)
    wrong = (state[:, 2] > 0.8) & (torch.rand(n, generator=rng) < 0.8)
    flat = torch.rand(2, n, generator=rng)
    stated = torch.rand(n, generator=rng) < 0.7
    steps = AnswerSteps(state, flat[0], flat[1])
    return recipe.Described(steps, word, stated, wrong & stated, torch.arange(n) // 20)


def test_sixty_steps_teach_which_words_are_made_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "RESAMPLES", 100)
    options = recipe.arguments(["--out", str(tmp_path), "--steps", "60", "--rate", "5e-3"])
    log = training.Log(tmp_path / "detectors")
    judge = recipe.train_one(options, log, described())
    lines = (tmp_path / "detectors" / "training.jsonl").read_text().splitlines()
    rows = {row["stage"]: row for row in map(json.loads, lines)}
    assert rows["untrained"]["auroc"] < 0.7 and rows["held-out"]["auroc"] > 0.85
    figures = recipe.examine(load(file_of(tmp_path)), described(seed=1), "all")
    area, low, high = figures["auroc stated"]
    assert low > 0.8 and low < area < high and figures["n"] == 40
    assert figures["surprise stated"][1] < 0.5 < figures["surprise stated"][2]  # it knows nothing
    other = described(seed=1)
    other.wrong = other.wrong.roll(1)  # a planted fault: marks of the words beside
    assert recipe.examine(judge, other, "all")["auroc all"][0] < 0.65


class Words:
    """A tokenizer of one word a number."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return " ".join(f"w{i}" for i in ids if i > 1)


@torch.no_grad()
def test_doubts_are_told_word_by_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llava").model
    monkeypatch.setattr(model, "name_or_path", str(tmp_path))
    with pytest.raises(ModelError, match=r"no '.*doubt\.safetensors'.*tiny\.scenes\.doubts"):
        detector_of(model)
    save(make(8), file_of(tmp_path))
    with pytest.raises(ModelError, match="states of width 8"):
        detector_of(model)
    width = model.get_input_embeddings().weight.shape[1]
    judge = make(width)
    save(judge, file_of(tmp_path))
    ids, head = torch.tensor([[5, 6, 1], [7, 1, 1]]), model.get_output_embeddings()
    states = torch.randn(3, 2, 1, width)
    with StepRecorder().on(model) as recorder:
        logits = [head(each) for each in states]
    found = doubts(model, Words(), recorder, ids)
    assert [[each.text for each in row] for row in found] == [["w5", " w6"], ["w7"]]
    line = logits[1][0, 0].double().log_softmax(-1)
    best = line.topk(16).values[-1]
    signals = [-float(max(line[6], best)), -float((line.exp() * line).sum())]
    known = odds(judge, states[1, 0, 0], model.get_input_embeddings().weight[6], signals)
    assert math.isclose(found[0][1].chance, 1 / (1 + math.exp(-known)), rel_tol=1e-3)
    assert "".join(pieces(Words(), [5, 1, 6])) == "w5 w6"


@pytest.mark.parametrize(
    ("drafts", "how", "word"),
    [
        (True, {}, "decode="),
        (False, {"num_beams": 3}, "num_beams="),
        (False, {"guidance_scale": 1.5}, "guidance_scale="),
        (False, {"prefill_chunk_size": 16}, "prefill_chunk_size="),
        (False, {"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens="),
        (False, {"prompt_lookup_num_tokens": 1}, "prompt_lookup_num_tokens="),
        (False, {"assistant_early_exit": 1}, "assistant_early_exit="),
    ],
)
def test_what_is_not_step_by_step_is_refused(drafts: bool, how: dict[str, Any], word: str) -> None:
    with pytest.raises(MmfastError, match=word):
        check_plain(True, drafts, how)
    check_plain(False, drafts, how)
    stated = SimpleNamespace(generation_config=SimpleNamespace(num_beams=4, guidance_scale=1))
    check_plain(True, False, {"num_beams": 1, "guidance_scale": None}, stated)
    with pytest.raises(MmfastError, match="generation_config has num_beams=4: give num_beams=1"):
        check_plain(True, False, {}, stated)
    looked = SimpleNamespace(generation_config=SimpleNamespace(prompt_lookup_num_tokens=3))
    with pytest.raises(MmfastError, match="prompt_lookup_num_tokens=3: set that to None"):
        check_plain(True, False, {}, looked)  # 1 would be refused, too


def test_a_character_of_several_tokens_is_a_piece() -> None:
    """Byte-level tokenizers write letters beyond ASCII as several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made = Tokenizer(models.BPE({each: i for i, each in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = split, decoders.ByteLevel()
    words = PreTrainedTokenizerFast(tokenizer_object=made)
    ids = words("né 🙂!")["input_ids"]
    assert pieces(words, ids) == ["n", "", "é", " ", "", "", "", "🙂", "!"]
    assert pieces(words, ids[:6])[3:] == [" ", "", "\ufffd"] and words.decode(ids[:2]) != "né"


def test_the_command_names_no_word_that_is_probably_so() -> None:
    said = [Doubt(" left", 0.2), Doubt(" 4", 0.7), Doubt("red", 0.51), Doubt(".", 0.5)]
    assert made_up(said) == "probably made up: 4 0.70, red 0.51"
    assert made_up(said[:1]) == "no word is probably made up"


@pytest.mark.slow
def test_the_pipeline_tells_doubts_under_a_reduction(tmp_path: Path) -> None:
    root = Path(__file__).parents[2] / "assets"
    shutil.copytree(root / "models" / "tiny-scenes", tmp_path / "scenes", dirs_exist_ok=True)
    save(make(load_width(tmp_path / "scenes")), file_of(tmp_path / "scenes"))
    pipe = pipeline("video-qa", str(tmp_path / "scenes"), check=True, reduce="evs:0.5")
    plain = pipeline("video-qa", (pipe.model, pipe.processor), reduce="evs:0.5")
    clip = root / "clips" / "red-circle.mp4"
    answer = pipe(clip, "Describe the video.")
    assert "".join(each.text for each in answer.doubts).strip() == answer.text
    assert answer.text == plain(clip, "Describe the video.").text
    assert answer.to_dict()["doubts"][0][0] == answer.doubts[0].text
    deltas = pipe.stream(clip, "Describe the video.")
    assert deltas.answer is None and "".join(deltas) == answer.text
    assert deltas.answer is not None and deltas.answer.doubts == answer.doubts
    assert [row.label for row in deltas.answer.trace.rows] == [r.label for r in answer.trace.rows]
    with pytest.raises(MmfastError, match="unknown option 'check'"):
        pipeline("omni-chat", check=True)
    with pytest.raises(MmfastError, match="num_beams"):
        pipe(clip, "Describe the video.", num_beams=2)


def load_width(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["text_config"]["hidden_size"])


@pytest.mark.parametrize("text", ["--scenes 2", "--exam none", "--step"])
def test_wrong_arguments_are_refused(text: str) -> None:
    with pytest.raises(SystemExit):
        recipe.arguments(text.split())
