"""pipeline(): lists in and out, streaming, what an Answer says, and that reducing is attach()."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mmfast
from mmfast.caches.plan import CachePlan, call_plan
from mmfast.core.errors import MmfastError
from mmfast.core.spec import parse
from mmfast.frontends.video.reader import read_video
from mmfast.pipelines.visual_qa import pair_up

CLIPS = Path(__file__).resolve().parents[2] / "assets" / "clips"
CLIP, OTHER = CLIPS / "red-circle.mp4", CLIPS / "four-shapes.mp4"
QUESTION = "Which way does the red circle move?"


@pytest.fixture(scope="module")
def pipe() -> Any:
    return mmfast.pipeline("video-qa", device="cpu")


def test_one_question(pipe: Any) -> None:
    answer = pipe(CLIP, QUESTION)
    assert isinstance(answer, mmfast.Answer)
    assert answer.text in {"left", "right", "up", "down"}
    assert answer.kept_tokens == answer.visual_tokens > 0 and answer.ttft_ms > 0
    stages = [row.stage for row in answer.trace.rows]
    assert stages == ["read", "preprocess", "encode", "prefill", "generate"]
    assert sum(r.ms for r in answer.trace.rows if r.stage != "generate") <= answer.ttft_ms * 1.05


def test_pages_that_are_left_out_are_noted(tmp_path: Path) -> None:
    pages = [Image.new("RGB", (96, 96), colour) for colour in ("red", "blue")]
    for name in ("one.tiff", "two.tiff"):
        pages[0].save(tmp_path / name, save_all=True, append_images=pages[1:])
    ask = mmfast.pipeline("image-qa", device="cpu")
    with pytest.warns(UserWarning) as told:
        answer = ask(tmp_path / "two.tiff", "What colour is it?")
        (both,) = ask([(tmp_path / "one.tiff", tmp_path / "two.tiff")], "What colour is it?")
    notes = [str(each.message) for each in told]
    assert answer.trace.notes == notes[:1] and both.trace.notes == notes[1:] and len(notes) == 3
    assert all("has several pages, of which one is read" in note for note in notes)
    assert answer.to_dict()["notes"] == [*filter(None, [answer.note]), *notes[:1]]
    assert f"\n{notes[0]}" in str(answer.trace)


def test_every_kind_of_media_gives_the_same_answer(pipe: Any) -> None:
    clip = read_video(CLIP, frames=8)
    frames = list(clip.frames)
    same = [
        str(CLIP),
        CLIP,
        CLIP.read_bytes(),
        io.BytesIO(CLIP.read_bytes()),
        clip.frames,
        torch.from_numpy(clip.frames),
        frames,
        iter(frames),
    ]
    assert len({pipe(media, QUESTION).text for media in same}) == 1


def test_clips_of_different_lengths_in_a_batch(pipe: Any) -> None:
    """LLaVA-OneVision takes clips of one length at a time; answers are those of one by one."""
    frames = read_video(CLIP, frames=8).frames
    media = [frames, iter(frames[:1]), frames[:3], OTHER, frames[4:5]]
    one_by_one = [pipe(each, QUESTION) for each in [frames, frames[:1], *media[2:]]]
    together = pipe(media, QUESTION, batch_size=5)
    assert [a.text for a in together] == [a.text for a in one_by_one]
    assert [a.visual_tokens for a in together] == [a.visual_tokens for a in one_by_one]
    parts = [{"type": "video", "video": each} for each in (frames, frames[:1])]
    chat = [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]
    with pytest.raises(MmfastError, match=r"^clips of 1 and 8 frames .*; ask about one at a time"):
        pipe([chat, chat], batch_size=2)


def test_lists_in_lists_out(pipe: Any) -> None:
    questions = [QUESTION, "How many objects are there?"]
    one_by_one = [pipe(CLIP, questions[0]).text, pipe(OTHER, questions[1]).text]
    assert [a.text for a in pipe([CLIP, OTHER], questions)] == one_by_one
    assert pipe(CLIP, questions)[0].text == one_by_one[0]
    assert [a.text for a in pipe([CLIP, OTHER], questions[1])][1] == one_by_one[1]


def test_batches_equal_singles(pipe: Any) -> None:
    media = [CLIP, OTHER, CLIP]
    questions = [QUESTION, "How many objects are there?", "How many shapes can you see?"]
    singles = [a.text for a in pipe(media, questions)]
    both = mmfast.pipeline("video-qa", (pipe.model, pipe.processor), batch_size=3, reduce="evs:0.5")
    alone = mmfast.pipeline("video-qa", (pipe.model, pipe.processor), reduce="evs:0.5")
    pipe.batch_size = 3
    try:
        assert [a.text for a in pipe(media, questions)] == singles
    finally:
        pipe.batch_size = 1
    batched = both(media, questions)
    assert [a.text for a in batched] == [a.text for a in alone(media, questions)]
    assert all(a.kept_tokens == round(0.5 * a.visual_tokens) for a in batched)


def test_reducing_is_what_attach_does(pipe: Any) -> None:
    fast = mmfast.pipeline("video-qa", (pipe.model, pipe.processor), reduce="divprune:0.25")
    answer = fast(CLIP, QUESTION)
    inputs, _ = pipe._inputs([(CLIP, QUESTION)], mmfast.Trace())
    with mmfast.attach(pipe.model, reduce="divprune:0.25") as trace:
        ids = pipe.run(inputs)
    new = ids[:, inputs["input_ids"].shape[1] :]
    text = pipe.processor.batch_decode(new, skip_special_tokens=True)[0]
    assert answer.text == text.strip()
    mine, theirs = answer.trace.reductions[-1][2], trace.reductions[-1][2]
    assert torch.equal(mine.keep, theirs.keep)
    assert answer.kept_tokens == mine.m == round(0.25 * answer.visual_tokens)


@pytest.mark.parametrize("options", [{}, {"check": True}, {"reuse": "encoder"}])
def test_what_the_caller_attached_is_in_the_answer(pipe: Any, options: dict[str, Any]) -> None:
    """Its tokens, rows and picture are those of a pipeline that attached it itself."""
    pair, spec = (pipe.model, pipe.processor), {"reduce": "evs:0.5+fastv@llm2:0.5"}
    spec["cache"] = "snapkv:0.5"
    own, plain = (mmfast.pipeline("video-qa", pair, **more) for more in (spec, options))

    def facts(answers: Any) -> list[Any]:
        return [
            (each.text, each.visual_tokens, each.kept_tokens, each.trace.heatmap(0).tolist())
            for each in answers
        ] + [
            [(r.stage, r.tokens_in, r.tokens_out) for r in each.trace.rows if r.method]
            for each in answers
        ]

    asked = [CLIP, OTHER], [QUESTION, "How many objects are there?"]
    expected = facts(own(*asked))
    with mmfast.attach(pipe.model, **spec) as trace:
        plain(*asked)
        assert facts(plain(*asked)) == expected  # rows of an earlier call are not its own
        streamed = plain.stream(CLIP, QUESTION)
        assert "".join(streamed).strip() and streamed.answer.kept_tokens == 72
    assert len(trace.reductions) == 10
    assert plain(CLIP, QUESTION).kept_tokens == 288


def test_what_the_caller_attached_and_reuse_would_pass_by_is_refused(pipe: Any) -> None:
    kept = mmfast.pipeline("video-qa", (pipe.model, pipe.processor), reuse="prefix")
    with mmfast.attach(pipe.model, "evs:0.5"):
        with pytest.raises(MmfastError, match=r"'evs:0.5' is attached .* reuse='prefix'"):
            kept(CLIP, QUESTION)
        assert pipe(CLIP, QUESTION).kept_tokens == 144
    assert kept(CLIP, QUESTION).text == pipe(CLIP, QUESTION).text


def test_stream_joins_to_the_answer(pipe: Any) -> None:
    assert "".join(pipe.stream(CLIP, QUESTION)).strip() == pipe(CLIP, QUESTION).text
    deltas = pipe.stream(CLIP, QUESTION)
    next(deltas)
    deltas.close()  # leaving early ends the thread
    assert pipe(CLIP, QUESTION).text


def test_stream_raises_what_went_wrong(pipe: Any) -> None:
    fast = mmfast.pipeline("video-qa", (pipe.model, pipe.processor), reduce="evs:100000")
    with pytest.raises(mmfast.SpecError, match="100000"):
        list(fast.stream(CLIP, QUESTION))
    assert pipe(CLIP, QUESTION).text  # the failed one left nothing behind


def test_specs_are_parsed_once_and_handed_on(pipe: Any) -> None:
    """A spec as text and as parsed stages is the same pipeline."""
    pair, found = (pipe.model, pipe.processor), []
    for reduce, cache in (
        ("evs:0.25+fastv@llm2:0.5", "window:64"),
        (parse("evs:0.25+fastv@llm2:0.5"), call_plan("window:64")),
    ):
        made = mmfast.pipeline("video-qa", pair, reduce=reduce, cache=cache)
        assert isinstance(made.reduce, tuple) and isinstance(made.cache, CachePlan)
        found.append(made(CLIP, QUESTION))
    assert found[0].text == found[1].text and found[0].kept_tokens == found[1].kept_tokens > 0


def test_image_qa(pipe: Any) -> None:
    picture = np.full((96, 96, 3), 90, np.uint8)
    pictures = mmfast.pipeline("image-text-to-text", device="cpu")
    answer = pictures(picture, "How many objects are there?")
    assert answer.text and answer.visual_tokens > 0


def test_bad_calls(pipe: Any) -> None:
    with pytest.raises(mmfast.MmfastError, match="video-qa"):
        mmfast.pipeline("video-qq")
    with pytest.raises(mmfast.SpecError, match="did you mean 'evs'"):
        mmfast.pipeline("video-qa", reduce="evz:0.5")
    with pytest.raises(mmfast.MmfastError, match="empty"):
        pipe(CLIP, "")
    with pytest.raises(mmfast.MmfastError, match="2 media and 3 questions"):
        pipe([CLIP, OTHER], ["a", "b", "c"])
    with pytest.raises(mmfast.MediaError, match="nowhere"):
        pipe("nowhere.mp4", QUESTION)
    with pytest.raises(mmfast.ModelError, match="int"):
        mmfast.pipeline("video-qa", 7)


def test_a_pipeline_is_pickled_and_copied_after_it_was_called() -> None:
    """Hooks that transformers leaves on a model cannot be; others on its layers stay."""
    pipe = mmfast.pipeline("video-qa", reduce="divprune:0.5", device="cpu")
    layer = pipe.model.get_decoder().layers[0]
    layer.register_forward_hook(_seen)
    expected = pipe(CLIP, QUESTION)
    assert pipe.planner is not None  # which holds the pipeline
    weight = next(pipe.model.parameters())
    hooks = {name: len(each._forward_hooks) for name, each in pipe.model.named_modules()}
    for made in (pickle.loads(pickle.dumps(pipe)), copy.deepcopy(pipe)):
        own = made.model.get_decoder().layers[0]
        assert _seen in own._forward_hooks.values() and made.planner is not pipe.planner
        assert made(CLIP, QUESTION).text == expected.text
        assert next(made.model.parameters()).data_ptr() != weight.data_ptr()
        assert made.planner.pipe is made
    assert hooks == {name: len(each._forward_hooks) for name, each in pipe.model.named_modules()}
    with pytest.raises(MmfastError, match="parts of this process alone") as error:
        pickle.dumps(
            mmfast.pipeline("video-qa", pipe.model, processor=pipe.processor, reuse="prefix")
        )
    assert "\n" not in str(error.value)


def _seen(*_: Any) -> None:
    """A hook of the caller."""


@pytest.mark.parametrize("task", ["video-qa", "image-qa"])
def test_nothing_asked_is_nothing_answered(pipe: Any, task: str) -> None:
    """As in transformers; what is missing beside something that is there is an error."""
    pipe = mmfast.pipeline(task, pipe.model, processor=pipe.processor)
    for given in ([], ([], QUESTION), ([], []), (CLIP, []), (None, [])):
        assert pipe(*([given] if given == [] else given)) == []
    assert pipe(text=[]) == pipe(**{f"{pipe.kind}s": []}, text=[]) == []
    for wrong in (([CLIP], []), ([], [QUESTION])):
        with pytest.raises(MmfastError):
            pipe(*wrong)
    with pytest.raises(MmfastError):  # one question, about nothing
        pipe(**{f"{pipe.kind}s": []}, text=QUESTION)
    with pytest.raises(MmfastError, match="unknown option 'bogus'"):
        pipe([], bogus=1)


def test_pair_up_tells_frames_from_clips() -> None:
    frame, clip = np.zeros((4, 4, 3)), np.zeros((2, 4, 4, 3))
    assert pair_up([frame, frame, frame], "q")[1] is False
    assert len(pair_up([clip, clip], "q")[0]) == 2
    assert len(pair_up(["a.mp4", b"x"], "q")[0]) == 2
    assert len(pair_up([frame, frame], ["p", "q"])[0]) == 2
    assert len(pair_up("a.mp4", ["p", "q"])[0]) == 2


def test_a_dict_is_no_media(pipe: Any) -> None:
    for arguments in (
        ({"images": str(CLIP)}, QUESTION),
        ({"images": str(CLIP), "text": QUESTION},),
    ):
        with pytest.raises(MmfastError, match=r"takes no dict of 'images'.*videos=…, text=…"):
            pipe(*arguments)
