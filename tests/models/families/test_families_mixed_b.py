"""Images, clips and sound mixed in one prompt, eager attention, and encoders that merge."""

from __future__ import annotations

from typing import Any

import model_oracle as oracle
import pytest
import torch
from tiny_models import Tiny, generate, tiny

from mmfast.attach import attach
from mmfast.core.errors import ModelError
from mmfast.models.cache_name import RELEASE
from mmfast.models.reduction.inputs import compress

OMNI = "qwen2_5_omni_thinker"
MISFIT = r"(?i)image features and image tokens do not match"
if RELEASE < (5, 18):  # SmolVLM has words of its own, and Idefics3 says nothing: mmfast does
    MISFIT += r"|\d+ features of kind 'image' do not fit \d+ placeholders"
    MISFIT += "|<image> tokens not divisible by patch_size"


def equals_removal(this: Tiny, inputs: dict[str, Any], spec: str) -> list[int]:
    """The pruned pass against removal by hand; tokens of each item before."""
    whole = oracle.embed(this, inputs)
    with attach(this.model, spec) as trace:
        logits = this.model(**inputs).logits[0]
    keep = oracle.kept_places(whole, trace.reductions)
    assert len(keep) < len(whole.embeds)
    assert torch.equal(logits, oracle.removed(this, whole, keep))
    return [r.n for _, _, r in trace.reductions]


def test_image_clip_and_sound_in_one_prompt() -> None:
    this = tiny(OMNI)
    media = {"images": this.images(2), "videos": this.videos(1), "sounds": this.sounds(2)}
    inputs = this.inputs(["{audio} {image} {video} {audio} on {image}?"], **media)
    sizes = equals_removal(this, inputs, "random:0.4")
    assert sizes == [12, 35, 70, 12, 35]
    stock = this.model(**inputs).logits
    with attach(this.model, "divprune:1.0"):
        assert torch.equal(this.model(**inputs).logits, stock)
    spec = "visionzip:0.5"  # asks both towers for signals
    with attach(this.model, spec) as trace:
        expected = generate(this, inputs, 3)
    assert [r.n for _, _, r in trace.reductions] == sizes
    plain = generate(this, compress(this.model, inputs, spec), 3)
    assert torch.equal(plain.sequences[:, -3:], expected.sequences[:, -3:])
    assert all(map(torch.equal, plain.logits, expected.logits))


def test_audio_in_video_is_two_items_that_alternate() -> None:
    this = tiny(OMNI)
    inputs = this.inputs(["{video} and?"], videos=this.videos(1, frames=8))
    ids = inputs["input_ids"][0].tolist()
    sound = this.inputs(["{audio}"], sounds=this.sounds(1, seconds=1.9))
    video, audio = this.model.config.video_token_id, this.model.config.audio_token_id
    count, extra = ids.count(video), sound["input_ids"][0].tolist().count(audio)
    (steps,) = inputs["video_grid_thw"][:, 0].tolist()
    second = float(inputs["video_second_per_grid"][0])
    # Two seconds are 50 positions: of the clip, then of the sound.
    early = sum(step * second * 25 < 50 for step in range(steps)) * (count // steps)
    assert 0 < early < count
    bos, eos = this.model.config.audio_start_token_id, this.model.config.audio_end_token_id
    mixed = [bos, *[video] * early, *[audio] * extra, *[video] * (count - early), eos]
    first = ids.index(video)
    ids[first : first + count] = mixed
    inputs = {**inputs, "input_ids": torch.tensor([ids]), "use_audio_in_video": True}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs |= {k: sound[k] for k in ("input_features", "feature_attention_mask")}
    assert equals_removal(this, inputs, "random:0.4") == [count, extra]


def test_images_and_clips_of_qwen2_vl() -> None:
    this = tiny("qwen2_vl")
    media = {"images": this.images(2), "videos": this.videos(1)}
    inputs = this.inputs(["{image} {video} on {image}?"], **media)
    assert equals_removal(this, inputs, "random:0.4") == [35, 70, 35]


@pytest.mark.parametrize(
    ("family", "kind"),
    [("qwen2_vl", "video"), (OMNI, "audio"), ("idefics3", "image"), ("smolvlm", "video")],
)
def test_eager_attention(family: str, kind: str) -> None:
    this = tiny(family, "eager")
    inputs = this.inputs([f"on {{{kind}}} what?"], **this.media(kind, 1))
    spec = "visionzip:0.6+fastv@llm2:0.5"
    whole = oracle.embed(this, inputs)
    with attach(this.model, spec) as trace:
        logits = this.model(**inputs).logits[0]
    keep = oracle.kept_places(whole, trace.reductions)
    expected = oracle.masked(this, whole, trace.reductions)[keep]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["qwen2_vl", OMNI, "idefics3", "smolvlm"])
def test_merging_in_the_tower_runs_and_leaves_nothing(family: str) -> None:
    this = tiny(family)
    inputs = this.inputs(["on {image} what?"], images=this.images(1))
    stock = this.model(**inputs).logits
    with attach(this.model, "tome@vit:0.5+random:0.5") as trace:
        logits = this.model(**inputs).logits
    assert logits.shape[1] < stock.shape[1]
    assert [row.stage for row in trace.rows] == ["vit", "pre"]
    assert len([site for site, _, _ in trace.reductions if site == "pre"]) == 1
    assert torch.equal(this.model(**inputs).logits, stock)


@pytest.mark.parametrize("family", ["idefics3", "smolvlm"])
def test_chunked_prefill_reduces_whole_images(family: str) -> None:
    this = tiny(family)
    inputs = this.inputs(["on {image} and {image} what?"], images=this.images(2))
    with attach(this.model, "divprune:20") as whole:
        expected = generate(this, inputs, 3)
    with attach(this.model, "divprune:20") as parts:
        chunked = generate(this, inputs, 3, prefill_chunk_size=30)
    assert torch.equal(chunked.sequences, expected.sequences)
    kept = [[r.keep.tolist() for _, _, r in trace.reductions] for trace in (whole, parts)]
    assert kept[0] == kept[1]
    assert len(kept[0]) == 2


@pytest.mark.filterwarnings("ignore:.*reduced nothing")  # a row without media, on purpose
def test_sound_that_does_not_fit_its_prompt_is_refused() -> None:
    this = tiny(OMNI)
    inputs = this.inputs(["on {audio} what?"], sounds=this.sounds(1))
    stock = this.model(**inputs).logits
    fewer = {**inputs, "input_ids": inputs["input_ids"].clone()}
    place = (inputs["input_ids"][0] == this.model.config.audio_token_id).nonzero()[0]
    fewer["input_ids"][0, place] = 65
    refused = pytest.raises(ModelError, match=r"12 .*audio.*11")
    with refused as error, attach(this.model, "random:0.5"):
        this.model(**fewer)
    assert "\n" not in str(error.value)
    silent = {k: inputs[k] for k in ("input_ids", "attention_mask")}
    with attach(this.model, "random:0.5") as trace:
        this.model(**silent)
    assert not trace.reductions
    assert torch.equal(this.model(**inputs).logits, stock)


@pytest.mark.filterwarnings("ignore:.*reduced nothing")  # a row without media, on purpose
@pytest.mark.parametrize("family", ["qwen2_vl", OMNI, "idefics3", "smolvlm"])
def test_prompts_without_media_and_media_that_do_not_fit(family: str) -> None:
    this = tiny(family)
    inputs = this.inputs(["on {image} what?"], images=this.images(1))
    stock = this.model(**inputs).logits
    text = this.inputs(["no image at all"])
    bare = {
        k: inputs[k] for k in ("input_ids", "attention_mask", "mm_token_type_ids") if k in inputs
    }
    for calm in (text, bare if family in ("idefics3", "smolvlm") else text):
        expected = this.model(**calm).logits
        with attach(this.model, "divprune:0.5+fastv@llm2:0.5") as trace:
            assert torch.equal(this.model(**calm).logits, expected)
        assert not trace.reductions
    few = {**inputs, "input_ids": inputs["input_ids"].clone()}
    place = (few["input_ids"][0] == this.model.config.image_token_id).nonzero()[3]
    few["input_ids"][0, place] = 65
    wrong = pytest.raises(ValueError, match=MISFIT)
    with wrong as error, attach(this.model, "tome:0.5"):
        this.model(**few)
    assert "\n" not in str(error.value)
    assert torch.equal(this.model(**inputs).logits, stock)
    assert not any("_mmfast" in key for m in this.model.modules() for key in m.__dict__)
