"""Methods in front of the decoder that read the question: all of it, and nothing behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attach_runs import logits_close
from tiny_models import Tiny, generate, tiny

from mmfast import ModelError
from mmfast.attach import attach
from mmfast.compressors import base
from mmfast.compressors.query_compressor import QueryCompressor
from mmfast.core.tokens import Tokens
from mmfast.models.reduction.choice import SiteRunner

LEARNED = "query_compressor:4"
SPECS = ["script:6", "cdpruner:6", LEARNED]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    made = QueryCompressor(32, 4, (6, 6), inner=24, heads=3)
    torch.nn.init.normal_(made.change.weight)
    base.save(made, path := tmp_path_factory.mktemp("weights") / "four.safetensors")
    return path


def ask(text: str, weights: Path, spec: str) -> tuple[Tiny, dict[str, Any], str]:
    this = tiny("llava")
    spec = f"{spec}?path={weights}" if spec == LEARNED else spec
    return this, dict(this.inputs([text], images=this.images(text.count("{")))), spec


@pytest.mark.parametrize("policy", [None, "sink:2+window:64"])
@pytest.mark.parametrize("size", [16, 48])
@pytest.mark.parametrize("spec", SPECS)
def test_a_part_of_the_question_is_refused(
    spec: str, size: int, policy: str | None, weights: Path
) -> None:
    """Also where the picture is in one piece, and only the words behind it are in the next."""
    this, inputs, spec = ask("on {image} what is there to be seen?", weights, spec)
    length = inputs["input_ids"].shape[1]
    assert 40 < 48 < length
    with attach(this.model, spec, cache=policy):
        whole = generate(this, inputs, 2)
        with pytest.raises(ModelError, match=r"question .* leave out prefill_chunk_size") as caught:
            generate(this, inputs, 2, prefill_chunk_size=size)
        assert "\n" not in str(caught.value)
        logits_close(generate(this, inputs, 2, prefill_chunk_size=length), whole)


def test_prompts_without_media_and_shares_of_one_come_in_parts(weights: Path) -> None:
    this, inputs, spec = ask("on {image} what?", weights, "script:6")
    stock = generate(this, inputs, 2, prefill_chunk_size=16)
    with attach(this.model, "script:1.0"):
        logits_close(generate(this, inputs, 2, prefill_chunk_size=16), stock)
    text = dict(this.inputs(["no picture at all in here"]))
    stock = generate(this, text, 2, prefill_chunk_size=7)
    with attach(this.model, spec), pytest.warns(UserWarning, match="reduced nothing"):
        logits_close(generate(this, text, 2, prefill_chunk_size=7), stock)


@pytest.mark.parametrize("spec", SPECS)
def test_drafts_are_no_question(spec: str, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    this, inputs, spec = ask("abcabc {image} abcabcab", weights, spec)
    read: list[int] = []
    stock = SiteRunner._tokens

    def tokens(self: SiteRunner, *args: Any) -> Tokens:
        found = stock(self, *args)
        assert found.query is not None
        read.append(len(found.query))
        return found

    monkeypatch.setattr(SiteRunner, "_tokens", tokens)
    with attach(this.model, spec):
        plain = generate(this, inputs, 6)
        drafted = generate(this, inputs, 6, prompt_lookup_num_tokens=3)
    assert torch.equal(plain.sequences, drafted.sequences)
    assert read == [inputs["input_ids"].shape[1] - 36] * 2
    logits_close(drafted, plain)


def test_guidance_reads_its_second_prompt(weights: Path) -> None:
    this, inputs, spec = ask("on {image} what?", weights, "script:6")
    with attach(this.model, spec):
        assert generate(this, inputs, 3, guidance_scale=1.5).sequences.shape[1] > 3
