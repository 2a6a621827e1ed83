"""Pre-fusion in stock models: prompts, batches, turns, chunks, drafts and the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import Tiny, generate, precise, tiny
from torch import Tensor

from mmfast import ModelError, SpecError
from mmfast.attach import attach
from mmfast.compressors import base
from mmfast.compressors.llava_mini import LlavaMini
from mmfast.models.reduction.inputs import compressed, encoded, positions_of
from mmfast.models.reduction.step import SiteCut
from mmfast.serve.engine.encoder import embedded
from mmfast.streams.reuse.plan import check_beside, parse_reuse

# The kind of its media, rows and columns of a frame, and its frames.
SHAPES = {
    "llava": ("image", (6, 6), 1),
    "llava_onevision": ("video", (3, 3), 4),
    "qwen2_vl": ("video", (5, 7), 2),
    "qwen2_5_vl": ("video", (5, 7), 2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


def spec_of(folder: Path, family: str, tokens: int = 1, fresh: bool = False) -> str:
    """A spec of weights that change vectors and text, or the text not yet."""
    path = folder / f"{family}-{tokens}-{fresh}.safetensors"
    if not path.exists():
        torch.manual_seed(5)
        made = LlavaMini(32, tokens, SHAPES[family][1], inner=12, heads=3)
        if not fresh:
            torch.nn.init.normal_(made.fuse.weight)
        base.save(made, path)
    return f"llava_mini:{tokens}?path={path}"


def prompt(this: Tiny, *texts: str, seed: int = 0) -> dict[str, Any]:
    """Prompts of `{}` for one medium each."""
    kind = SHAPES[this.family][0]
    asked = [text.replace("{}", f"{{{kind}}}") for text in texts]
    media = this.media(kind, sum(text.count("{}") for text in texts), seed)
    inputs = this.inputs(asked, **media)
    wide = {k: v.double() for k, v in inputs.items() if v.is_floating_point()}
    return {**inputs, **wide} if this.model.dtype == torch.float64 else inputs


@torch.no_grad()
def by_hand(this: Tiny, spec: str, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Embeddings `[m, D]` and positions `[…, 1, m]` of one prompt, with all its media of a kind."""
    model, (kind, grid, frames) = this.model, SHAPES[this.family]
    ids = inputs["input_ids"][0]
    shown = ids == getattr(model.config, f"{kind}_token_id")
    call = {name: inputs[name] for name in this.facts.calls[kind] if name in inputs}
    output = getattr(model.model, f"get_{kind}_features")(**call, return_dict=True)
    items = this.facts.items(this, output, kind, inputs)
    words, made = model.get_input_embeddings()(ids), base.load(spec.partition("path=")[2])
    made = made.to(words.dtype)
    patches, keep, rows, changes, at = grid[0] * grid[1], ~shown, words.clone(), [], 0
    places = shown.nonzero()[:, 0]
    for item in items:
        inside = places[at : at + len(item)]
        count = frames * patches  # behind them may be a newline
        out = made(item[:count].view(frames, patches, -1), words[~shown])
        kept = (out.place + patches * torch.arange(frames)[:, None]).flatten()
        rows[inside] = item.to(words)
        rows[inside[kept]] = out.vectors.flatten(0, 1)
        keep[inside[kept]] = True
        keep[inside[count:]] = True
        changes.append(out.text)
        at += len(item)
    rows[~shown] += torch.stack(changes).mean(0)
    return rows[keep], positions_of(model, inputs)[..., keep]


@torch.no_grad()
def logits(this: Tiny, rows: Tensor, places: Tensor) -> Tensor:
    """Logits `[V]` of the last token."""
    text = this.model.model.language_model
    out = text(inputs_embeds=rows[None], position_ids=places).last_hidden_state
    found: Tensor = this.model.lm_head(out)[0, -1]
    return found


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", list(SHAPES))
def test_attach_and_inputs_equal_the_prompt_fed_by_hand(family: str, folder: Path) -> None:
    """Steps of decoding as well, whose tokens are not fused."""
    this = precise(family)
    tokens = 1 if family != "qwen2_vl" else 4
    spec, inputs = spec_of(folder, family, tokens), prompt(this, "on {} what?")
    with attach(this.model, spec) as trace:
        out = generate(this, inputs, 3)
    count = SHAPES[family][2]
    assert [(r.n, r.m) for _, _, r in trace.reductions] == [
        (count * SHAPES[family][1][0] * SHAPES[family][1][1], count * tokens)
    ]
    rows, places = by_hand(this, spec, inputs)
    for step in range(3):
        close(out.logits[step][0], logits(this, rows, places))
        word = out.sequences[0, inputs["input_ids"].shape[1] + step]
        rows = torch.cat([rows, this.model.get_input_embeddings()(word)[None]])
        places = torch.cat([places, places[..., -1:] + 1], -1)
    rest = compressed(this.model, inputs, spec)[0]
    assert "inputs_embeds" in rest and "mm_encoder_outputs" not in rest
    close(generate(this, rest, 1).logits[0], out.logits[0])
    stock = generate(this, inputs, 1).logits[0]
    assert not torch.allclose(stock, out.logits[0], atol=1e-2)  # and all hooks are gone


def test_untrained_only_the_vectors_are_other(folder: Path) -> None:
    this = precise("llava")
    inputs, spec = prompt(this, "on {} what?"), spec_of(folder, "llava", fresh=True)
    words = this.model.get_input_embeddings()(inputs["input_ids"][0])
    rows, _ = by_hand(this, spec, inputs)
    at = int((inputs["input_ids"][0] == this.model.config.image_token_id).nonzero()[0])
    assert torch.equal(rows[:at], words[:at]) and torch.equal(rows[at + 1 :], words[at + 36 :])
    with attach(this.model, spec):
        found = generate(this, inputs, 1).logits[0][0]
    close(found, logits(this, *by_hand(this, spec, inputs)))
    with attach(this.model, spec_of(folder, "llava")):
        assert not torch.allclose(generate(this, inputs, 1).logits[0][0], found, atol=1e-2)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_a_ragged_batch_is_its_rows(family: str, folder: Path) -> None:
    this, spec = precise(family), spec_of(folder, family)
    texts = ["{} a?", "what may this {} be, then?", "no media at all"]
    media = this.media(SHAPES[family][0], 2)
    kind, name = SHAPES[family][0], next(iter(media))
    asked = [text.replace("{}", f"{{{kind}}}") for text in texts]
    with attach(this.model, spec):
        both = generate(this, this.inputs(asked, **media), 2)
        for row in range(2):
            one = generate(this, this.inputs(asked[row : row + 1], **{name: [media[name][row]]}), 2)
            for together, alone in zip(both.logits, one.logits, strict=True):
                close(together[row], alone[0])
    plain = generate(this, this.inputs(asked[2:]), 1).logits[0]
    close(both.logits[0][2:], plain)  # its text is not touched


def test_several_images_change_the_text_by_their_mean(folder: Path) -> None:
    this, spec = precise("llava"), spec_of(folder, "llava", 4)
    inputs = prompt(this, "in {} and {} what is alike?")
    with attach(this.model, f"{spec}+divprune:3") as trace:
        generate(this, inputs, 1)
    assert [r.m for _, _, r in trace.reductions] == [4, 3, 4, 3]
    with attach(this.model, spec):
        found = generate(this, inputs, 1).logits[0][0]
    close(found, logits(this, *by_hand(this, spec, inputs)))


def test_each_turn_fuses_its_own_text_with_its_own_media(folder: Path) -> None:
    this, spec = precise("llava"), spec_of(folder, "llava")
    first, more = prompt(this, "on {} what?"), prompt(this, " and {} here?", seed=4)
    rows, places = by_hand(this, spec, first)
    new, behind = by_hand(this, spec, more)
    text = this.model.get_input_embeddings()(this.inputs([" why?"])["input_ids"][0])
    with attach(this.model, spec), torch.no_grad():
        one = this.model(**first, use_cache=True)
        cache, length = one.past_key_values, first["input_ids"].shape[1]
        names = ("input_ids", "pixel_values")
        two = this.model(**{n: more[n] for n in names}, past_key_values=cache, use_cache=True)
        three = this.model(
            input_ids=this.inputs([" why?"])["input_ids"], past_key_values=two.past_key_values
        )
    close(one.logits[0, -1], logits(this, rows, places))
    rows, places = torch.cat([rows, new]), torch.cat([places, behind + length], -1)
    close(two.logits[0, -1], logits(this, rows, places))
    end = length + more["input_ids"].shape[1]
    last = torch.arange(end, end + len(text))[None]
    close(three.logits[0, -1], logits(this, torch.cat([rows, text]), torch.cat([places, last], -1)))


@pytest.mark.parametrize("size", [8, 64])
def test_a_prompt_in_parts_is_refused(size: int, folder: Path) -> None:
    this, inputs = precise("llava"), prompt(precise("llava"), "on {} what is there to be seen?")
    length = inputs["input_ids"].shape[1]
    assert 36 < length < 72
    spec = spec_of(folder, "llava")
    with attach(this.model, spec):
        with pytest.raises(ModelError, match="leave out prefill_chunk_size") as caught:
            generate(this, inputs, 1, prefill_chunk_size=min(size, length - 4))
        assert "\n" not in str(caught.value)
        whole = generate(this, inputs, 1, prefill_chunk_size=length)
        close(whole.logits[0], generate(this, inputs, 1).logits[0])


def test_drafts_are_not_fused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    this, inputs = precise("llava"), prompt(precise("llava"), "abcabc {} abcabcab")
    noted: list[tuple[int, list[int]]] = []
    stock = SiteCut.__call__

    def cut(self: SiteCut, hidden: Tensor) -> Tensor:
        noted.append((hidden.shape[1], [len(places) for _, places, _ in self.texts]))
        return stock(self, hidden)

    with attach(this.model, spec_of(folder, "llava")):
        plain = generate(this, inputs, 6)
        monkeypatch.setattr(SiteCut, "__call__", cut)
        drafted = generate(this, inputs, 6, prompt_lookup_num_tokens=3)
    assert torch.equal(plain.sequences, drafted.sequences)
    for mine, theirs in zip(plain.logits, drafted.logits, strict=True):
        close(mine, theirs)
    length = inputs["input_ids"].shape[1]
    assert noted[0][0] == length and noted[0][1] == [length - 36] and len(noted) == 1


def test_a_server_shares_the_beginning_of_no_fused_prompt(folder: Path) -> None:
    this, text = tiny("llava"), "the same long text is in front of either {} and behind"

    def blocks(spec: str, seed: int) -> tuple[bytes, ...]:
        inputs = encoded(this.model, prompt(this, text, seed=seed))
        rest = compressed(this.model, inputs, spec)[0]
        found: tuple[bytes, ...] = embedded(this.model, rest, inputs["mm_encoder_outputs"], {})[
            "blocks"
        ]
        return found

    fused, fresh = spec_of(folder, "llava"), spec_of(folder, "llava", fresh=True)
    assert blocks(fused, 0) == blocks(fused, 0)
    assert blocks(fused, 0)[0] != blocks(fused, 1)[0]
    assert blocks(fresh, 0)[0] == blocks(fresh, 1)[0] == blocks("random:1", 2)[0]


def test_keys_of_fused_text_are_not_reused(folder: Path) -> None:
    spec = spec_of(folder, "llava")
    with pytest.raises(SpecError, match="depend on the media behind it") as caught:
        check_beside(parse_reuse("prefix"), spec)
    assert "\n" not in str(caught.value)
    check_beside(parse_reuse("encoder"), spec)
    check_beside(parse_reuse("prefix"), "divprune:4")
