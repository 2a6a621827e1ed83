"""Chained draft modules learn on single places what they are asked for while drafting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from speech_fakes import random_speech_model

from mmfast.heads.mtp import packed_mask
from mmfast.tiny.speech import drafts
from mmfast.tiny.speech.bank import SpokenText
from mmfast.tiny.speech.drafts import DraftTrainer, places
from mmfast.tiny.speech.net import BackboneShape, Net, to_llama

WORDS = ("the", "red", "circle", "moves", "left", ".")


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Net, list[SpokenText]]:
    """A random backbone as model and as net, and texts with random sound."""
    model = random_speech_model()
    layout, config = model.layout, model.backbone.config
    torch.manual_seed(1)
    net = Net(BackboneShape(layout.total, config.hidden_size, config.num_hidden_layers, 48))
    for layer in net.layers:
        torch.nn.init.normal_(layer.out, std=0.1)
        torch.nn.init.normal_(layer.down, std=0.1)
    rng = np.random.default_rng(0)
    groups = [layout.group(word) for word in WORDS]
    said = []
    for _ in range(6):
        sounds = [rng.integers(layout.base, layout.total, rng.integers(2, 12)) for _ in groups]
        said.append(SpokenText((0, 1, 1), groups, sounds))
    return model, net, said


def test_places_are_what_the_backbone_says_of_them(parts: Any) -> None:
    model, net, said = parts
    data = places(net, model.layout, said, 0)
    texts = model.layout.texts
    assert len(data.hidden) == len(data.ids) == len(data.chosen) == len(data.run)
    assert torch.equal((data.hidden @ net.head[texts:].T).argmax(-1), data.chosen)
    owing = torch.nonzero(data.run).flatten()
    assert (data.ids[owing + 1] >= texts).all()  # what such a place owes is sound
    going_on = owing[data.run[owing] > 1]
    assert torch.equal(data.run[going_on + 1], data.run[going_on] - 1)
    sounds = sum(len(s) + 1 for each in said for s in each.sounds)
    assert sounds <= len(owing) <= 2 * sounds  # each text once, some once more


def test_modules_learn_what_drafting_computes(parts: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(drafts, "MODULES", 4)
    monkeypatch.setattr(drafts, "INNER", 24)
    model, net, said = parts
    model.backbone.model.load_state_dict(to_llama(net))
    model.backbone.refresh()
    data = places(net, model.layout, said, 0)
    trainer = DraftTrainer(net, model.backbone, model.layout, 0)
    at = int(torch.nonzero(data.run > 5)[0])
    total, right = trainer.loss(data, torch.tensor([at]))
    line = torch.arange(at, at + 7)
    hidden, embeds = data.hidden[line][None], net.embed[data.ids[line]][None]
    head, texts = trainer.head.eval(), model.layout.texts
    mask = packed_mask(torch.zeros(1, 7, dtype=torch.int64), hidden.dtype, 1)
    want = torch.zeros(())
    for k, states in enumerate(head(hidden, embeds, mask)[:4]):
        logits = head.output(k, states[:, 0], slice(texts, None))
        label = data.chosen[at + k + 1][None]
        want += drafts.FADE**k * torch.nn.functional.cross_entropy(logits, label)
        assert right[k] == float(logits.argmax(-1) == label)
    torch.testing.assert_close(total, want, atol=1e-4, rtol=1e-4)


def test_they_get_better_and_are_judged_on_other_texts(parts: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(drafts, "MODULES", 3)
    monkeypatch.setattr(drafts, "BATCH", 64)
    model, net, said = parts
    data, held = (places(net, model.layout, s, 0) for s in (said[1:], said[:1]))
    trainer, rows = DraftTrainer(net, model.backbone, model.layout, 0), list[dict[str, Any]]()
    before = trainer.right(data)
    trainer.train(data, held, 0.04, 5e-3, rows.append)
    assert sum(trainer.right(data)) > sum(before) + 0.3
    assert rows[-1]["held"] is True
    assert rows[-1]["mctp"] == trainer.right(held)
