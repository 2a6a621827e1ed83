"""CompLLM under attach: against a plain loop, its store of segments, and refusals in one line."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import oracles_concepts as oracle
import pytest
import torch
from text_zoo import padded, prompt, text_model, written
from tiny_models import tiny
from torch import Tensor

import mmfast
from mmfast.attach import attach
from mmfast.compressors import base
from mmfast.compressors.compllm import CompLLM, owners
from mmfast.compressors.query_compressor import QueryCompressor
from mmfast.core.errors import ModelError, SpecError
from mmfast.core.registry import get
from mmfast.core.spec import parse
from mmfast.models.decoder.concepts import ConceptReader, SegmentStore, new_compressor
from mmfast.models.reduction.inputs import compress
from mmfast.models.text_chat import load_text
from mmfast.tiny.text.haystack import vocabulary

FAMILIES = ["llama", "qwen2", "qwen3", "mistral"]
SEGMENT, RECENT, LENGTH = 8, 5, 43
HOW = {"segment": SEGMENT, "rate": 2, "scale": 2.0}


def made(name: str, rate: int = 2) -> CompLLM:
    """A compressor that changes everything."""
    model = text_model(name)
    model.config.eos_token_id = 7
    torch.manual_seed(1)
    compressor = new_compressor(model, rate, segment=SEGMENT, rank=4, alpha=8.0)
    model.config.eos_token_id = None
    for value in (*compressor.up.values(), compressor.leave.weight, compressor.leave.bias):
        torch.nn.init.normal_(value, std=0.2)
    return compressor


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("concepts")
    for name in FAMILIES:
        base.save(made(name), folder / f"{name}.safetensors")
    return {name: folder / f"{name}.safetensors" for name in FAMILIES}


def spec_of(path: Path, knobs: str = "") -> str:
    return f"compllm:2?recent={RECENT}{knobs}&path={path}"


def arrays(state: dict[str, Tensor], head: str = "") -> dict[str, Any]:
    return {
        name.removeprefix(head): value.double().numpy()
        for name, value in state.items()
        if name.startswith(head)
    }


@lru_cache
def looped(name: str, path: Path, words: tuple[int, ...]) -> Tensor:
    return by_hand(name, path, torch.tensor([words]), {})


def by_hand(
    name: str, path: Path, ids: Tensor, lora: dict[str, Any] | None = None, **how: Any
) -> Tensor:
    """The prompt `[1, M, D]` that the stock model is to read."""
    if lora is None and not how:
        return looped(name, path, tuple(ids[0].tolist()))
    model = text_model(name)
    embedded = model.get_input_embeddings()(ids)[0].numpy()
    stock = arrays(model.state_dict(), "model.")
    lora = lora or arrays(base.load(path).state_dict())
    settings = {"last": RECENT, "first": 1, **HOW, **how}
    rows = oracle.context(embedded, stock=stock, lora=lora, config=model.config, **settings)
    return torch.from_numpy(rows)[None]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Numbers of segments that the model reads, by batch."""
    found, stock = list[int](), ConceptReader.read

    def read(self: ConceptReader, segments: Tensor) -> Tensor:
        found.append(len(segments))
        return stock(self, segments)

    monkeypatch.setattr(ConceptReader, "read", read)
    yield found


@pytest.mark.parametrize("name", FAMILIES)
def test_the_model_reads_what_a_plain_loop_makes(name: str, files: dict[str, Path]) -> None:
    model, ids = text_model(name), prompt(LENGTH)
    short = by_hand(name, files[name], ids)
    assert short.shape[1] == 1 + 4 * 4 + 3 + RECENT  # the last segment has 5 tokens
    want = model(inputs_embeds=short).logits
    with attach(model, spec_of(files[name])) as trace:
        logits = model(ids).logits
    torch.testing.assert_close(logits, want, atol=2e-5, rtol=0)
    (row,) = trace.rows
    assert (row.stage, row.method, row.tokens_in, row.tokens_out) == ("pre", "compllm", 38, 20)
    stock = model(ids).logits[0, -1]
    assert (logits[0, -1] - stock).abs().max() > 1e-3
    assert torch.equal(model(ids).logits[0, -1], stock)  # nothing stays behind


def test_the_oracle_sees_faults(files: dict[str, Path]) -> None:
    """No LoRA, other segments, another mark, one segment that sees the one before."""
    model, ids, path = text_model("llama"), prompt(LENGTH), files["llama"]
    with attach(model, spec_of(path)):
        logits = model(ids).logits[0, -1]
    lora = arrays(base.load(path).state_dict())
    plain = {key: value for key, value in lora.items() if not key.startswith("down")}
    faults = [
        by_hand("llama", path, ids, plain),
        by_hand("llama", path, ids, lora | {"mark": lora["mark"] + 0.1}),
        by_hand("llama", path, ids, segment=2 * SEGMENT),
        by_hand("llama", path, ids, segment=SEGMENT - 1),
        by_hand("llama", path, ids, scale=1.0),
        by_hand("llama", path, ids, first=0),
    ]
    for wrong in faults:
        assert (model(inputs_embeds=wrong).logits[0, -1] - logits).abs().max() > 1e-4
    right = by_hand("llama", path, ids)
    places = torch.arange(right.shape[1])[None] * 2  # as far apart as the tokens were
    kept = model(inputs_embeds=right, position_ids=places).logits[0, -1]
    assert (kept - logits).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_what_is_written_equals_a_pass_without_a_cache(name: str, files: dict[str, Path]) -> None:
    model, ids = text_model(name), prompt(LENGTH)
    rows, told = by_hand(name, files[name], ids), []
    for _ in range(5):
        logits = model(inputs_embeds=rows).logits[0, -1]
        told.append(int(logits.argmax()))
        rows = torch.cat([rows, model.get_input_embeddings()(torch.tensor([[told[-1]]]))], 1)
    with attach(model, spec_of(files[name])):
        new, _, _ = written(model, {"input_ids": ids}, 5)
        free, _, _ = written(model, {"input_ids": ids}, 5, use_cache=False)
        beams = model.generate(ids, max_new_tokens=5, num_beams=2, do_sample=False)
    assert new[0].tolist() == told == free[0].tolist()
    want = model.generate(
        inputs_embeds=by_hand(name, files[name], ids), max_new_tokens=5, num_beams=2,
        do_sample=False,
    )  # fmt: skip
    assert torch.equal(beams[:, LENGTH:], want)


def test_a_ragged_batch_equals_its_rows(files: dict[str, Path]) -> None:
    model = text_model("mistral")
    prompts = [prompt(LENGTH), prompt(20, 1), prompt(RECENT + 1, 2), prompt(3, 3)]
    with attach(model, spec_of(files["mistral"], "&memory=0")) as trace:
        new, logits, _ = written(model, padded(prompts), 4)
        alone = [written(model, {"input_ids": ids}, 4) for ids in prompts]
    for row, (mine, own, _) in enumerate(alone):
        assert torch.equal(new[row], mine[0])
        torch.testing.assert_close(logits[row], own[0], atol=2e-5, rtol=0)
    sizes = [reduction.m for _, _, reduction in trace.reductions]
    assert sizes[: len(sizes) // 2] == sizes[len(sizes) // 2 :] == [20, 8, 1]


def test_a_later_turn_keeps_no_first_tokens(files: dict[str, Path]) -> None:
    model, first, second = text_model("qwen2"), prompt(30), prompt(24, 1)
    with attach(model, spec_of(files["qwen2"])):
        cache = model(first, use_cache=True).past_key_values
        logits = model(second, past_key_values=cache).logits[0]
    rows = [by_hand("qwen2", files["qwen2"], first)]
    rows.append(by_hand("qwen2", files["qwen2"], second, first=0))
    want = model(inputs_embeds=torch.cat(rows, 1)).logits[0, rows[0].shape[1] :]
    torch.testing.assert_close(logits, want, atol=2e-5, rtol=0)


def test_a_segment_is_read_once(files: dict[str, Path], reads: list[int]) -> None:
    """Other questions, other prompts, rows that share a document, and no ids at all."""
    model, ids = text_model("llama"), prompt(LENGTH)
    other = torch.cat([ids[:, :-RECENT], prompt(RECENT, 5)], 1)
    moved = torch.cat([prompt(1 + SEGMENT, 6), ids[:, 1 : 1 + 2 * SEGMENT], prompt(RECENT, 7)], 1)
    with attach(model, spec_of(files["llama"])):
        model(ids)
        assert reads == [4, 1]  # whole segments side by side, then the rest
        stored = model(other).logits
        assert reads == [4, 1]
        model(moved)
        assert reads == [4, 1, 1]
    reads.clear()
    with attach(model, spec_of(files["llama"])):
        torch.testing.assert_close(model(other).logits, stored, atol=1e-9, rtol=0)
        model(torch.cat([ids, ids]))
        assert reads == [4, 1]
        embedded = model.get_input_embeddings()(other)
        again = model(inputs_embeds=embedded).logits
        assert reads == [4, 1, 4, 1]
        torch.testing.assert_close(again, stored, atol=1e-9, rtol=0)
    reads.clear()
    with attach(model, spec_of(files["llama"], "&memory=0")):
        torch.testing.assert_close(model(other).logits, stored, atol=1e-9, rtol=0)
        model(other)
    assert reads == [4, 1, 4, 1]


@torch.no_grad()
def _other_type(model: Any, path: Path) -> None:
    model.to(torch.bfloat16)


@torch.no_grad()
def _other_weights(model: Any, path: Path) -> None:
    state = {name: 1.5 * value for name, value in model.state_dict().items()}
    model.load_state_dict(state)


def _one_step(model: Any, path: Path) -> None:
    model.train().requires_grad_(True)
    with pytest.warns(UserWarning, match="embeddings that it read are not learned"):
        loss = model(input_ids=prompt(LENGTH), labels=prompt(LENGTH), use_cache=False).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), 1.0).step()
    model.eval()


def _other_file(model: Any, path: Path) -> None:
    torch.manual_seed(9)
    other = base.load(path)
    torch.nn.init.normal_(other.leave.weight)  # type: ignore[arg-type, union-attr]
    base.save(other, path)
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("change", [_other_type, _other_weights, _one_step, _other_file])
def test_segments_that_other_weights_read_are_read_anew(
    change: Callable[[Any, Path], None], files: dict[str, Path], tmp_path: Path
) -> None:
    model, ids, path = copy.deepcopy(text_model("llama")), prompt(LENGTH), tmp_path / "own"
    path.write_bytes(files["llama"].read_bytes())
    with attach(model, spec_of(path)):
        stale = model(ids).logits
        change(model, path)
        found = model(ids).logits
    with attach(model, spec_of(path)):
        expected = model(ids).logits
    assert torch.equal(found, expected) and not torch.equal(found.to(stale), stale)


def test_the_store_forgets_what_was_used_least() -> None:
    store, one = SegmentStore(3 * 32), torch.ones(8)
    for key in "abc":
        store.put(key, one)
    assert store.get("a") is not None and store.bytes == 96
    store.put("d", torch.ones(40)[:8])  # a slice of 160 bytes
    assert [store.get(key) is None for key in "abcd"] == [False, True, False, False]
    assert len(store) == 3 and store.bytes == 96
    held = store.get("d")
    assert held is not None and held.untyped_storage().nbytes() == 32
    store.put("d", one)
    assert store.bytes == 96
    store.put("e", torch.ones(100))
    assert len(store) == 0 and store.bytes == 0


@pytest.mark.parametrize("more", ["fastv@llm2:0.5?tokens=text", "gemfilter:0.5?tokens=text"])
def test_a_later_cut_sees_the_short_prompt(more: str, files: dict[str, Path]) -> None:
    model, ids = text_model("llama"), prompt(LENGTH)
    with attach(model, f"{spec_of(files['llama'])}+{more}", "snapkv:0.5"):
        new, logits, _ = written(model, {"input_ids": ids}, 4)
    short = by_hand("llama", files["llama"], ids)
    with attach(model, more, "snapkv:0.5"):
        want, theirs, _ = written(model, {"inputs_embeds": short, "input_ids": ids[:, :0]}, 4)
    assert torch.equal(new, want)
    torch.testing.assert_close(logits, theirs, atol=1e-5, rtol=0)


def test_a_file_holds_all_of_it(tmp_path: Path, files: dict[str, Path]) -> None:
    mine = made("qwen3", 3)
    path = base.file_of(tmp_path, "compllm", 3)
    base.save(mine, path)
    again = base.load(path)
    assert again.config == mine.config and again.name == "compllm"
    for name, value in mine.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    model = text_model("qwen3")
    before, model.name_or_path = model.name_or_path, str(tmp_path)
    try:  # beside the checkpoint
        with attach(model, f"compllm:3?recent={RECENT}"):
            logits = model(prompt(LENGTH)).logits
        with pytest.raises(ModelError, match=r"no compressors/compllm-2.safetensors \(it has"):
            attach(model, "compllm:2")
    finally:
        model.name_or_path = before
    want = model(inputs_embeds=by_hand("qwen3", path, prompt(LENGTH), rate=3)).logits
    torch.testing.assert_close(logits, want, atol=2e-5, rtol=0)


def test_owners_are_those_of_a_loop() -> None:
    assert owners(12, 1, 5, 2).tolist() == [0, 1, 1, 2, 2, 3, 4, 4, 5, 5, 6, 7]
    for n, first, segment, rate in ((1, 3, 4, 2), (9, 0, 4, 3), (17, 2, 20, 4), (6, 1, 1, 2)):
        owner = owners(n, first, segment, rate)
        assert len(owner) == n and set(owner.diff().tolist()) <= {0, 1} and int(owner[0]) == 0
        tokens = mmfast.Tokens(
            torch.randn(n, 4),
            signals={"concept_owner": owner, "concepts": torch.randn(int(owner[-1]) + 1, 4)},
        )
        found = mmfast.reduce(tokens, "compllm:2")
        assert isinstance(found, mmfast.Reduction)
        assert torch.equal(found.owner, owner) and torch.equal(found.owner[found.keep],
                                                               torch.arange(found.m))  # fmt: skip
        assert torch.equal(found.apply(tokens.x), tokens.signals["concepts"])


def test_a_share_of_one_is_the_stock_model() -> None:
    model, ids = text_model("llama"), prompt(LENGTH)
    with attach(model, "compllm:1.0") as trace:
        assert torch.equal(model(ids).logits, model(ids).logits)
    assert not trace.reductions
    assert get("compllm").learned and get("compllm").example == "compllm:2"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("compllm:2", r"has no compressors/compllm-2.safetensors; train one with `python -m"),
        ("compllm:0.5", r"rate by which text shrinks.*'compllm:2'"),
        ("compllm:2?recent=0&path=x", "recent=0 .* give 1 on"),
        ("compllm:2?first=-1&path=x", "first=-1 .* give 0 on"),
        ("compllm:2?tokens=text", "knob"),
        ("compllm@llm2:2", "cannot run at site"),
        ("compllm:2?path=x", "cannot be read"),
        ("compllm:2?path=x+compllm:2?path=x", "second compressor"),
    ],
)
def test_errors_are_one_line(spec: str, words: str) -> None:
    with pytest.raises((SpecError, ModelError), match=words) as caught:
        attach(text_model("llama"), spec)
    assert "\n" not in str(caught.value)


def test_models_that_cannot(files: dict[str, Path], tmp_path: Path) -> None:
    spec = spec_of(files["llama"])
    with pytest.raises(ModelError, match="not rotary"):
        attach(text_model("opt"), spec)
    with pytest.raises(ModelError, match="reads text alone"):
        attach(tiny("llava_onevision").model, spec)
    with pytest.raises(ModelError, match="trained on another model"):
        attach(text_model("phi3"), spec)
    foreign = tmp_path / "frames.safetensors"
    base.save(QueryCompressor(32, 1, (2, 2), inner=24, heads=2), foreign)
    with pytest.raises(ModelError, match="holds a 'query_compressor'"):
        attach(text_model("llama"), spec_of(foreign))
    peft = pytest.importorskip("peft")
    copied = copy.deepcopy(text_model("llama"))
    learner = peft.get_peft_model(copied, peft.LoraConfig(r=2, target_modules=r".*_proj"))
    with pytest.raises(ModelError, match=r"adapter .* merge_and_unload\(\)"):
        attach(learner, spec)
    with attach(merged := learner.merge_and_unload(), spec):
        merged(prompt(LENGTH))
    with pytest.raises(ModelError, match=r"is a compllm:2 for .*, not a compllm:4"):
        attach(text_model("llama"), spec.replace(":2", ":4"))  # it would shrink to the half
    with pytest.raises(ModelError, match="no token that ends a text"):
        new_compressor(text_model("llama"), 2)
    with pytest.raises(SpecError, match="inside the model"):
        compress(text_model("llama"), {"input_ids": prompt()}, spec)
    with attach(text_model("llama"), spec), pytest.raises(ModelError, match="prefill_chunk_size"):
        written(text_model("llama"), {"input_ids": prompt(LENGTH)}, 2, prefill_chunk_size=16)
    granite = text_model("granite")
    path = tmp_path / "granite.safetensors"
    base.save(made("granite"), path)
    with attach(granite, spec_of(path)), pytest.raises(ModelError, match="scales"):
        granite(prompt(LENGTH))


def test_spec_strings_round_trip() -> None:
    (spec,) = parse("compllm:4?recent=16&first=2")
    assert str(spec) == "compllm@pre:4?recent=16&first=2" and spec.tokens == "text"
    assert spec.count(100, 1) is None and parse(str(spec)) == (spec,)


def test_the_oracle_is_the_stock_model_without_a_lora() -> None:
    """The plain loop computes what transformers computes, so that a difference is ours."""
    for name in FAMILIES:
        model, ids = text_model(name), prompt(12)
        stock = arrays(model.state_dict(), "model.")
        rows = list(model.get_input_embeddings()(ids)[0].numpy())
        mine = oracle.hidden(rows, stock, {}, model.config, 1.0)
        want = model.model(ids).last_hidden_state[0].numpy()
        np.testing.assert_allclose(mine, want, atol=1e-6)


def test_prompts_from_several_threads_are_answered_as_alone() -> None:
    """The weights that ship, beside prompts that are too short to be cut."""
    model, tokenizer = load_text("tiny-text", "cpu", "float32")
    words = vocabulary()
    texts = [" ".join(words[start : start + many]) for start, many in ((0, 90), (9, 50), (3, 12))]

    def answer(text: str) -> list[float]:
        inputs, how = tokenizer(text, return_tensors="pt"), {"return_dict_in_generate": True}
        found = model.generate(**inputs, max_new_tokens=1, output_logits=True, **how)
        return list(found.logits[0][0].tolist())

    stock = [answer(text) for text in texts]
    with attach(model, "compllm:2"):
        alone = [answer(text) for text in texts]
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(answer, texts * 2)) == alone * 2
    assert alone[0] != stock[0] and alone[2] == stock[2]
    assert [answer(text) for text in texts] == stock
