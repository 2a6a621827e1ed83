"""Drafts of the first layers and an adapter, over the model's own cache (Kangaroo)."""

from __future__ import annotations

import contextlib
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_models import tiny as small
from tiny_models import generate, tiny
from torch import Tensor

from mmfast.attach import attach
from mmfast.compressors.base import save
from mmfast.core.errors import ModelError, SpecError
from mmfast.models.decoder import early_exit
from mmfast.models.decoder.early_exit import ExitAdapter, ExitReader, new_adapter
from mmfast.models.decoder.reader import SequenceReader

FIXED = "adapt=0&least=0&most=4"
VARIED = {"repetition_penalty": 1.3}


def _random(model: Any, layer: int) -> ExitAdapter:
    torch.manual_seed(2)
    adapter = new_adapter(model, layer)
    torch.nn.init.normal_(adapter.out.weight, std=0.2)
    return adapter


def _alone(adapter: ExitAdapter, states: Tensor) -> Tensor:
    """The adapter at the last of states `[T, D]` without padding, by complex numbers."""

    def norm(module: Any, x: Tensor) -> Tensor:
        return module.weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def turned(x: Tensor, place: int) -> Tensor:
        half = len(x) // 2
        angles = [place * 10_000.0 ** (-i / half) for i in range(half)]
        turn = torch.polar(torch.ones(half), torch.tensor(angles))
        found = torch.complex(x[:half], x[half:]) * turn
        return torch.cat([found.real, found.imag])

    x, heads = norm(adapter.before, states), adapter.config["heads"]
    place, parts = len(x) - 1, []
    for head in range(heads):
        rows = slice(head * x.shape[1] // heads, (head + 1) * x.shape[1] // heads)
        q = turned(adapter.query.weight[rows] @ x[place], place)
        keys = [turned(adapter.key.weight[rows] @ each, i) for i, each in enumerate(x)]
        scores = torch.stack([q @ k for k in keys]) / math.sqrt(len(q))
        parts.append(scores.softmax(0) @ (x @ adapter.value.weight[rows].T))
    return norm(adapter.behind, states[place] + adapter.out.weight @ torch.cat(parts))


def test_drafts_are_those_of_the_first_layers_and_the_adapter_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small("qwen2", num_hidden_layers=3)
    adapter = _random(model, 2)
    save(adapter, tmp_path / "exit.safetensors")
    seen: list[tuple[int, list[list[int]], Tensor]] = []
    stock = ExitReader.read

    def noted(self: ExitReader, tokens: Tensor, *more: Any) -> Tensor:
        held, logits = self.held, stock(self, tokens, *more)
        seen.append((held, tokens.tolist(), logits))
        return logits

    monkeypatch.setattr(ExitReader, "read", noted)
    ids = torch.tensor([[0, 0, 3, 4, 5, 9], [7, 2, 8, 1, 1, 3]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    inputs = {"input_ids": ids, "attention_mask": mask}
    how = {"max_new_tokens": 7, "do_sample": False, **VARIED}
    want = model.generate(**inputs, **how)
    with attach(model, decode=f"exit:{tmp_path}/exit.safetensors?{FIXED}") as trace:
        found = model.generate(**inputs, **how)
    assert torch.equal(found, want)
    (row,) = [row for row in trace.rows if row.stage == "draft"]
    assert row.tokens_in > 6 and len(seen) > 6
    lines: list[list[int]] = [[], []]
    for held, tokens, logits in seen:
        for each in range(2):
            lines[each] = lines[each][:held] + tokens[each]
        # What is read behind `held` begins with what stands of the answer.
        for each, pads in enumerate((2, 0)):
            text = torch.tensor([*ids[each, pads:].tolist(), *lines[each]])
            with torch.no_grad():
                out = model(input_ids=text[None], output_hidden_states=True)
                wanted = model.lm_head(_alone(adapter, out.hidden_states[2][0]))
            torch.testing.assert_close(logits[each, -1], wanted, atol=2e-3, rtol=1e-3)


@pytest.mark.slow
def test_greedy_tokens_of_a_model_that_sees(tmp_path: Path) -> None:
    this = tiny("llava_onevision")
    layers = this.model.config.get_text_config().num_hidden_layers
    save(new_adapter(this.model, layers - 1), tmp_path / "exit.safetensors")
    inputs = this.inputs(["a {video} b", "{video} c?"], **this.media("video", 2, 0))
    want = generate(this, inputs, 10, **VARIED)
    with attach(this.model, decode=f"exit:{tmp_path}/exit.safetensors?{FIXED}") as trace:
        found = generate(this, inputs, 10, **VARIED)
        assert torch.equal(found.sequences, want.sequences)
        for mine, stock in zip(
            found.past_key_values.layers, want.past_key_values.layers, strict=True
        ):
            torch.testing.assert_close(mine.keys, stock.keys, atol=1e-4, rtol=0)
    (row,) = [row for row in trace.rows if row.stage == "draft"]
    assert row.tokens_in > 0
    assert not this.model.get_decoder().layers[layers - 2]._forward_hooks


@pytest.mark.slow
def test_drafts_that_stay_in_the_cache_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small("llama", num_hidden_layers=3)
    save(_random(model, 1), tmp_path / "exit.safetensors")
    how = {"max_new_tokens": 10, "do_sample": False, "no_repeat_ngram_size": 1}
    ids = torch.tensor([[3, 4, 5, 9]])
    want = model.generate(ids, **how)
    spec = f"exit:{tmp_path}/exit.safetensors?{FIXED}"
    with attach(model, decode=spec):
        assert torch.equal(model.generate(ids, **how), want)

    def stay(self: ExitReader) -> None:
        self.held = self._main.held

    monkeypatch.setattr(ExitReader, "leave", stay)
    # Layers of two lengths may also not fit.
    with attach(model, decode=spec), contextlib.suppress(RuntimeError):
        assert not torch.equal(model.generate(ids, **how), want)


def test_what_it_does_not_do_is_refused(tmp_path: Path) -> None:
    model = small("llama", num_hidden_layers=3)
    save(new_adapter(model, 1), tmp_path / "exit.safetensors")
    other = small("llama", num_hidden_layers=3, hidden_size=64)
    spec = f"exit:{tmp_path}/exit.safetensors"
    for target, how, words in (
        (model, {"decode": f"exit:{tmp_path}/none"}, "names no file"),
        (model, {"decode": "exit"}, "names no adapter"),
        (model, {"decode": spec, "cache": "snapkv:8"}, "whole cache"),
        (other, {"decode": spec}, "width 32"),
    ):
        with pytest.raises((SpecError, ModelError), match=words):
            attach(target, **how)
    for layer in (0, 3):
        with pytest.raises(ModelError, match="choose 1 to 2"):
            new_adapter(model, layer)
    assert early_exit.TRAINING.startswith("python -m mmfast.")


@pytest.mark.slow
def test_training_makes_more_drafts_stand(tmp_path: Path) -> None:
    from mmfast.models.text_chat import load_text
    from mmfast.tiny.text import exits

    file = tmp_path / "exit.safetensors"
    argv = ["--steps", "50", "--prompts", "40", "--context", "48", "--length", "24"]
    argv += ["--layer", "2"]  # heads of the second layer find what follows
    options = exits.arguments([*argv, "--out", str(file)])
    model, words = load_text(options.model, "cpu", "float32")
    lessons = exits.gather(model, words, exits.arguments([*argv, "--seed", "5"]))
    head, losses, shares = model.get_output_embeddings(), list[float](), list[float]()
    untrained = tmp_path / "untrained.safetensors"
    save(new_adapter(model, options.layer), untrained)
    exits.main([*argv, "--out", str(file)])
    ids = torch.tensor([words(next(exits.texts(options))).input_ids[:48]])
    how = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": 409}  # past full stops
    want = model.generate(ids, **how)
    for each in (untrained, file):
        adapter = early_exit.read_exit(each)
        with torch.no_grad():
            pairs = [exits.divergence(adapter, head, lesson) for lesson in lessons[:10]]
        losses.append(float(torch.stack([loss for loss, _ in pairs]).mean()))
        with attach(model, decode=f"exit:{each}?{FIXED}") as trace:
            assert torch.equal(model.generate(ids, **how), want)
        (row,) = [row for row in trace.rows if row.stage == "draft"]
        shares.append(row.tokens_out / row.tokens_in)
    assert losses[1] < 0.7 * losses[0] and shares[1] > 1.5 * shares[0]


def test_a_later_turn_has_the_padding_of_its_own_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, known = small("llama", num_hidden_layers=3), list[Tensor]()
    save(_random(model, 1), tmp_path / "exit.safetensors")
    how = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    ids = torch.tensor([[0, 0, 3, 4], [7, 2, 8, 1]])
    turn = {"input_ids": ids, "attention_mask": torch.tensor([[0, 0, 1, 1], [1] * 4])}
    stock = ExitAdapter.forward

    def noted(self: ExitAdapter, states: Tensor, past: Any, mask: Tensor) -> Any:
        known.append(mask)
        return stock(self, states, past, mask)

    monkeypatch.setattr(ExitAdapter, "forward", noted)
    with attach(model, decode=f"exit:{tmp_path}/exit.safetensors?{FIXED}"):
        first = model.generate(**turn, **how)
        assert not known[0][0, :2].any()
        known.clear()
        more = torch.tensor([[5, 6, 9], [3, 3, 4]])
        again = torch.cat([first.sequences, more], 1)
        mask = torch.cat([turn["attention_mask"], torch.ones(2, 7, dtype=torch.long)], 1)
        model.generate(again, attention_mask=mask, past_key_values=first.past_key_values, **how)
    assert known and all(each.all() for each in known)


def test_calls_of_several_threads_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, gate = small("llama", num_hidden_layers=3), threading.Barrier(2, timeout=20)
    save(_random(model, 1), tmp_path / "exit.safetensors")
    how = {"max_new_tokens": 8, "do_sample": False}
    asked = [torch.tensor([[3, 4, 5, 9]]), torch.tensor([[7, 2, 8, 1, 1]])]
    want = [model.generate(ids, **how) for ids in asked]
    stock = SequenceReader.run

    def together(self: SequenceReader, *given: Any) -> Tensor:
        with contextlib.suppress(threading.BrokenBarrierError):
            gate.wait()  # a pass of one call begins while the other drafts
        return stock(self, *given)

    monkeypatch.setattr(SequenceReader, "run", together)

    def ask(ids: Tensor) -> Tensor:
        try:
            return model.generate(ids, **how)
        finally:
            gate.abort()

    spec = f"exit:{tmp_path}/exit.safetensors?{FIXED}"
    with attach(model, decode=spec), ThreadPoolExecutor(2) as pool:
        found = list(pool.map(ask, asked))
    assert all(map(torch.equal, found, want))
