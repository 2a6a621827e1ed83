"""Training of CompLLM: the loss of a plain loop, one that falls, and the recipe."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from text_zoo import text_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from mmfast.attach import attach
from mmfast.compressors import base
from mmfast.models.decoder.concepts import AnsweredText, ConceptReader, distillation, new_compressor
from mmfast.tiny.text import concepts as recipe
from mmfast.tiny.text.evaluate import needle_rows
from mmfast.tiny.text.train import make_tokenizer

WORDS = make_tokenizer()


def small(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1,
        eos_token_id=12, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def examples() -> list[AnsweredText]:
    """Two texts of unlike lengths, over the words of the zoo."""
    made = torch.Generator().manual_seed(2)

    def ids(n: int) -> Tensor:
        return torch.randint(3, 96, (n,), generator=made)

    writes = [torch.tensor([0, 0, 1, 1, 0]), torch.tensor([0, 1, 0])]
    return [
        AnsweredText(ids(n), ids(len(w)), w.bool()) for n, w in zip((14, 9), writes, strict=True)
    ]


def zoo_compressor(model: Any) -> Any:
    model.config.eos_token_id = 7
    torch.manual_seed(1)
    compressor = new_compressor(model, 2, segment=4, rank=3).double()
    model.config.eos_token_id = None
    for value in compressor.up.values():
        torch.nn.init.normal_(value, std=0.2)
    return compressor


@torch.no_grad()
def by_hand(model: Any, compressor: Any, texts: list[AnsweredText], first: int = 1) -> float:
    """One text, one layer, one number after the other."""
    reader = ConceptReader(model.model, compressor)
    layers: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in model.model.layers]
    for text in texts:
        whole = model.get_input_embeddings()(torch.cat([text.context, text.rest]))
        n, rows = len(text.context), [whole[:first]]
        rows += [reader.read(whole[None, at : min(at + 4, n)])[0] for at in range(first, n, 4)]
        short = torch.cat([*rows, whole[n:]])
        passes = [
            model.model(inputs_embeds=x[None], output_hidden_states=True).hidden_states[1:]
            for x in (short, whole)
        ]
        ends = [i for i, writes in enumerate(text.writes.tolist()) if writes]
        for found, mine, stock in zip(layers, *passes, strict=True):
            found += [
                (mine[0, len(short) - len(text.rest) + i].numpy(),
                 stock[0, n + i].numpy()) for i in ends
            ]  # fmt: skip
    losses = []
    for pairs in layers:
        gaps = [abs(a - b) for mine, stock in pairs for a, b in zip(mine, stock, strict=True)]
        costs = [gap * gap / 2 if gap < 1 else gap - 0.5 for gap in gaps]
        stock = np.concatenate([stock for _, stock in pairs])
        losses.append(np.mean(costs) / stock.std(ddof=1))
    return float(np.mean(losses))


def test_the_loss_is_that_of_a_plain_loop() -> None:
    model, texts = text_model("llama"), examples()
    compressor = zoo_compressor(model)
    loss, states = distillation(model, compressor, texts)
    want = by_hand(model, compressor, texts)
    assert abs(loss.item() - want) < 1e-5 * want and states.shape == (3, 32)
    moved = [AnsweredText(t.context, t.rest, t.writes.roll(1)) for t in texts]
    faults = [by_hand(model, compressor, moved), by_hand(model, compressor, texts, first=2)]
    faults.append(by_hand(model, compressor, texts[:1]))
    compressor.scale *= 2
    faults.append(by_hand(model, compressor, texts))
    assert min(abs(fault - want) for fault in faults) > 1e-3 * want


def test_gradients_reach_the_compressor_alone() -> None:
    model, texts = small(), examples()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    compressor = new_compressor(model, 2, segment=4, rank=3)
    optimiser = torch.optim.SGD(compressor.parameters(), 0.1)
    for _ in range(2):  # an `up` of zeros passes nothing on to its `down`
        optimiser.zero_grad()
        distillation(model, compressor, texts)[0].backward()
        optimiser.step()
    dead = [n for n, p in compressor.named_parameters() if p.grad is None or not p.grad.any()]
    assert not dead
    assert all(value.grad is None for value in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_recipe_lowers_its_loss() -> None:
    model = small()
    source = recipe.DocumentExamples(WORDS, "cpu", 0, 64)
    compressor = new_compressor(model, 2, segment=8, rank=4)
    task = recipe.ConceptTask(model, compressor, source, rate=1e-2, batch=2)
    before = task.look()["loss"]
    rows: list[dict[str, Any]] = []
    recipe.training.train(task, recipe.training.Course("x", None, 30, every=10), rows.append)
    after = task.look()["loss"]
    assert after < 0.85 * before
    assert rows[-1]["stage"] == "held-out" and rows[-1]["loss"] == pytest.approx(after)


def test_an_example_marks_the_tokens_that_write_its_answer() -> None:
    made = recipe.example(
        WORDS, "key bati castle.", [("question bati? bati", "castle."), ("question? a", "red.")],
        "cpu",
    )  # fmt: skip
    assert WORDS.decode(made.context) == "<s> key bati castle ."
    words = [WORDS.decode(token) for token in made.rest]
    assert " ".join(words) == "question bati ? bati castle . question ? a red ."
    written = [words[i + 1] for i, writes in enumerate(made.writes.tolist()) if writes]
    assert written == ["castle", ".", "red", "."]


def test_the_command_trains_on_lines_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small().save_pretrained(tmp_path)
    WORDS.save_pretrained(tmp_path)
    row = {"context": "the red river stands. key bati castle.", "question": "bati?"}
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({**row, "answer": "castle."}) + "\n" for _ in range(6)))
    told = ["train", "--compressor", "compllm", "--model", str(tmp_path), "--data", str(data)]
    told += ["--out", str(tmp_path), "--steps", "2", "--segment", "6", "--rank", "2"]
    monkeypatch.setattr("sys.argv", told)
    runpy.run_path(str(Path(base.__file__).with_name("train.py")), run_name="__main__")
    log = (tmp_path / "compressors" / "training.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in log]
    stages = [row["stage"] for row in rows]
    assert stages[-2:] == ["saved", "end"]
    made = base.load(base.file_of(tmp_path, "compllm", 2))
    assert made.config["segment"] == 6 and made.config["rank"] == 2
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    with attach(model, "compllm:2?recent=2") as trace:  # found beside the checkpoint
        model(torch.randint(3, 90, (1, 15)))
    assert trace.rows[0].tokens_out == 1 + 3 + 3

    def fails() -> str:
        with pytest.raises(SystemExit, match=r"^2$"):
            runpy.run_path(str(Path(base.__file__).with_name("train.py")), run_name="__main__")
        return capsys.readouterr().err.splitlines()[-1]

    monkeypatch.setattr("sys.argv", [*told, "--rank", "99999"])
    assert fails().startswith("error: a LoRA of rank 99999 is wider than all layers; give up to ")
    monkeypatch.setattr("sys.argv", told)
    data.write_text(json.dumps(row) + "\n")
    assert "has 1 examples; give over 4 lines" in fails()


def test_the_shipped_compressor_keeps_what_a_text_says() -> None:
    """Half as many embeddings; dropping half of the tokens loses nearly all."""
    halves = ("compllm:2?recent=4", "random@llm0:0.5?tokens=text")
    whole, mine, dropped = needle_rows(halves, (), 19, 4000, 512, aware=True)
    assert whole["accuracy"] > 0.9 and mine["accuracy"] > 0.7 and dropped["accuracy"] < 0.3
    assert (mine["reduce"], mine["cache"]) == (halves[0], None)
    assert mine["kept"] == pytest.approx(0.5, abs=0.01)
