"""Questions, streams and stores on a device: the answers of the CPU, on every path of a user."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from devices import DEVICE, LIKE, MARKS
from PIL import Image
from stream_tools import answer_logits, seconds, watcher
from torch import Tensor
from typer.testing import CliRunner

import mmfast
from mmfast.models.loading import load
from mmfast.models.vision.frames.cache import FrameCache
from mmfast.tiny.video import scene

pytestmark = MARKS

ON = str(DEVICE)
QUESTIONS = ("Which way does the circle move?", "How many objects are there?", "What color is it?")
CLIPS = Path(__file__).parents[2] / "assets" / "clips"
files = pytest.mark.skipif("library_versions" not in vars(av), reason="needs PyAV to read a file")


@functools.cache
def clip(index: int = 0) -> Any:
    """Frames of a clip that `tiny-video` was not trained on."""
    return scene.draw(scene.make_scene(scene.EVAL, 7, index)).frames


@functools.cache
def pair(device: str, dtype: str = "float32") -> tuple[Any, Any]:
    found: tuple[Any, Any] = load("tiny-video", device, dtype)
    return found


def pipe(device: str, task: str = "video-qa", **options: Any) -> Any:
    return mmfast.pipeline(task, pair(device), **{"max_new_tokens": 12, **options})


def both(task: str = "video-qa", **options: Any) -> tuple[Any, Any]:
    """The pipeline on the CPU and on the device."""
    return pipe("cpu", task, **options), pipe(ON, task, **options)


def same_answers(options: dict[str, Any], task: str = "video-qa", **call: Any) -> None:
    here, far = both(task, **options)
    for index, question in enumerate(QUESTIONS[:2]):
        media = clip(index) if task == "video-qa" else clip(index)[0]
        want, found = here(media, question, **call), far(media, question, **call)
        assert found.text == want.text
        assert (found.visual_tokens, found.kept_tokens) == (want.visual_tokens, want.kept_tokens)
        assert [r.stage for r in found.trace.rows] == [r.stage for r in want.trace.rows]
        assert found.ttft_ms > 0


REDUCE = (
    "evs:0.25", "dtd:0.25", "divprune:0.25", "script:0.25", "visionzip:0.25", "holitom:0.25",
    "fastv@llm2:0.5", "tome@vit:0.5", "divprune:0.5+fastv@llm2:0.5", "downsample@pixel:0.5",
    "holitom_inner@llm2:0.25", "random:0.25", "query_compressor:1",
)  # fmt: skip
CACHES = (
    "snapkv:64", "sink:4+window:64", "quant:4", "quant:8", "keynorm:64", "snapkv:64+quant:4",
    "quest:64", "h2o:64", "tova:64", "random:64", "expected_attention:64", "keyformer:64",
    "infinipot_v:64", "adakv:64",
)  # fmt: skip


def known(spec: str) -> str:
    """A spec, or a skip where no method has that name."""
    from mmfast.core.registry import listed

    names = {method.name for method in listed()}
    for stage in spec.split("+"):
        name = stage.split(":")[0].split("@")[0]
        if name not in names:
            pytest.skip(f"there is no {name}")
    return spec


@pytest.mark.parametrize("spec", REDUCE)
def test_reduced(spec: str) -> None:
    if spec.startswith("query") and not any((_home() / "compressors").glob("*.safetensors")):
        pytest.skip("the learned compressors were not carried")
    same_answers({"reduce": known(spec)})


def _home() -> Path:
    from mmfast.models.loading import embedded_path

    return embedded_path("tiny-video")


@pytest.mark.parametrize("spec", CACHES)
def test_cached(spec: str) -> None:
    same_answers({"cache": known(spec)})


OPTIONS: dict[str, dict[str, Any]] = {
    "stock": {},
    "self draft": {"decode": "self:0.5"},
    "recycle": {"decode": "recycle"},
    "lookup": {"decode": "lookup"},
    "sparse prefill": {"prefill": "sample_attention:0.95"},
    "sparse prefill minference": {"prefill": "minference:0.5"},
    "fast tower": {"encoder": "fast"},
    "folded tower": {"encoder": "riformer:2"},
    "eager": {"reduce": "fastv@llm2:0.5", "cache": "snapkv:64"},
    "both": {"reduce": "evs:0.5", "cache": "snapkv:64", "decode": "self:0.5"},
    "target tokens": {"target_tokens": 100},
    "quality": {"quality": "balanced"},
    "auto": {"reduce": "auto"},
    "memory": {"max_memory": "2GB"},
}


@pytest.mark.parametrize("name", [*OPTIONS])
def test_options(name: str) -> None:
    options = OPTIONS[name]
    planned = {"target_tokens", "quality", "max_memory"} & {*options} or "auto" in options.values()
    if not planned:
        same_answers(options)
        return
    answer = pipe(ON, **options)(clip(), QUESTIONS[0])  # what is fastest differs between devices
    assert answer.text and answer.plan is not None and answer.plan.to_dict(answer.ttft_ms)


def test_a_target_in_milliseconds() -> None:
    answer = pipe(ON)(clip(), QUESTIONS[0], target_ttft_ms=500.0)
    assert answer.text and answer.plan is not None


@pytest.mark.parametrize("encoder", ["graph", "compile"])
def test_captured_towers(encoder: str) -> None:
    if DEVICE.type != "cuda":
        pytest.skip("graphs are captured on CUDA alone")
    found = pipe(ON, encoder=encoder)
    want = pipe("cpu")
    for index in range(3):  # captured, then replayed
        assert found(clip(index), QUESTIONS[1]).text == want(clip(index), QUESTIONS[1]).text


def test_questions_in_a_batch() -> None:
    clips, questions = [clip(i) for i in range(3)], [*QUESTIONS]
    texts = [[a.text for a in p(clips, questions, batch_size=3)] for p in both(reduce="evs:0.25")]
    assert texts[0] == texts[1]
    texts = [[a.text for a in p(clips, questions, batch_size=3)] for p in both(cache="snapkv:64")]
    assert texts[0] == texts[1]


def test_text_in_deltas() -> None:
    for options in ({}, {"reduce": "divprune:0.25"}, {"cache": "sink:4+window:64"}):
        texts = ["".join(p.stream(clip(), QUESTIONS[0])) for p in both(**options)]
        assert texts[0] == texts[1] == pipe(ON, **options)(clip(), QUESTIONS[0]).text


def test_beams() -> None:
    texts = [p(clip(), QUESTIONS[0], num_beams=3).text for p in both(cache="snapkv:64")]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("options", [{}, {"decode": "self:0.5"}], ids=["plain", "drafted"])
def test_a_seed_repeats_its_draws(options: dict[str, Any]) -> None:
    found = pipe(ON, **options)
    texts = [found(clip(), QUESTIONS[0], temperature=1.5, seed=s).text for s in (1, 1, 2, 3, 4)]
    assert texts[0] == texts[1]


def test_conversations_and_pictures() -> None:
    content = [{"type": "video", "video": clip()}, {"type": "text", "text": QUESTIONS[1]}]
    chat = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": QUESTIONS[0]},
    ]
    assert len({p(chat).text for p in both()}) == 1
    same_answers({}, "image-qa")
    same_answers({"reduce": "divprune:0.25"}, "image-qa")
    two = (clip(0)[0], clip(1)[0])
    assert len({p(two, QUESTIONS[1]).text for p in both("image-qa")}) == 1


def test_pictures_of_what_was_kept() -> None:
    found = pipe(ON, reduce="tome@vit:0.5+divprune:0.5")
    answer = found(clip(), QUESTIONS[0])
    assert all(isinstance(sheet, Image.Image) for sheet in found.overlay(clip(), answer.trace))
    assert json.dumps(answer.to_dict())


def test_media_as_tensors_of_the_device() -> None:
    frames = torch.as_tensor(clip()).to(DEVICE)
    assert pipe(ON)(frames, QUESTIONS[0]).text == pipe("cpu")(clip(), QUESTIONS[0]).text


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
def test_loaded_in_a_type(dtype: str) -> None:
    for reduce, cache in ((None, None), ("evs:0.25", "snapkv:64"), ("fastv@llm2:0.5", "quant:4")):
        options = {"device": ON, "dtype": dtype, "reduce": reduce, "cache": cache}
        found = mmfast.pipeline("video-qa", "tiny-video", max_new_tokens=12, **options)
        assert next(found.model.parameters()).device.type == DEVICE.type
        answer = found(clip(), QUESTIONS[0])
        assert answer.text and answer.kept_tokens > 0


@pytest.mark.parametrize("form", ["int8", "fastest"])
def test_packed_weights_are_refused_or_left(form: str) -> None:
    if DEVICE.type == "cpu":
        pytest.skip("weights are packed on a CPU")
    if form == "fastest":
        found = mmfast.pipeline("video-qa", "tiny-video", device=ON, weights=form)
        assert found(clip(), QUESTIONS[0]).text
        return
    with pytest.raises(mmfast.MmfastError) as error:
        mmfast.pipeline("video-qa", "tiny-video", device=ON, weights=form)
    assert "\n" not in str(error.value)


def test_the_device_that_is_there_is_taken() -> None:
    found = mmfast.pipeline("video-qa", "tiny-video")
    have = "cuda" if torch.cuda.is_available() else "cpu"
    assert found.model.device.type == have
    with pytest.raises(mmfast.MmfastError, match="not here"):
        mmfast.pipeline("video-qa", "tiny-video", device="cuda:99")


def test_two_models_on_two_devices() -> None:
    """In turn, in threads, and beside one cache of angles: neither leads the other astray."""
    from concurrent.futures import ThreadPoolExecutor

    pipes = [pipe(d, reduce="divprune:0.25", cache="snapkv:64") for d in ("cpu", ON)]
    want = [pipes[0](clip(i), q).text for i, q in enumerate(QUESTIONS)]
    for _ in range(2):
        for each in pipes:
            assert [each(clip(i), q).text for i, q in enumerate(QUESTIONS)] == want
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(lambda p=p: p(clip(), QUESTIONS[0]).text) for p in pipes]
        assert {job.result() for job in jobs} == {want[0]}


def test_attached_to_a_stock_model() -> None:
    from mmfast.models.prompt import Shot, chat_inputs

    found = []
    for device in ("cpu", ON):
        model, processor = pair(device)
        facts = {"total_num_frames": 16, "fps": 8.0, "duration": 2.0}
        shot = Shot("video", clip()[::2], {**facts, "frames_indices": [*range(0, 16, 2)]})
        inputs = chat_inputs(
            processor, [[{"role": "user", "content": [shot, QUESTIONS[0]]}]], device
        )
        with mmfast.attach(model, reduce="evs:0.25", cache="snapkv:64") as trace, torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=8)
        found.append((output.cpu().tolist(), trace.to_dict()["rows"][0]["tokens_out"]))
    assert found[0] == found[1]


# --- stores ---------------------------------------------------------------------------------------

REUSE = ("encoder", "prefix", "blend:0.15", "craft:0.15", "kvcomm?least=1")


@pytest.mark.parametrize("tier", ["host", "device", "disk"])
@pytest.mark.parametrize("spec", REUSE)
def test_reused(spec: str, tier: str, tmp_path: Path) -> None:
    stores: dict[str, Any] = {
        "host": {"host": "500MB"},
        "device": {"device": "500MB", "host": 0},
        "disk": {"host": 0, "disk": "500MB", "folder": tmp_path},
    }
    texts = []
    for place, one in (("cpu", "a"), (ON, "b")):
        options = dict(stores[tier])
        if "folder" in options:
            options["folder"] = tmp_path / one
        found = pipe(place, reuse=spec, store=mmfast.ReuseStore(**options))
        texts.append([found(clip(i % 2), q).text for i, q in enumerate((*QUESTIONS, *QUESTIONS))])
        assert found.reuse.store.hits > 0
    assert texts[0] == texts[1]


@pytest.mark.parametrize("ways", [("cpu", ON), (ON, "cpu"), (ON, ON)], ids=["in", "out", "again"])
def test_a_folder_is_read_on_another_device(ways: tuple[str, str], tmp_path: Path) -> None:
    texts = []
    for place in ways:
        store = mmfast.ReuseStore(host="500MB", disk="500MB", folder=tmp_path)
        found = pipe(place, reuse="prefix", store=store)
        texts.append([found(clip(), q).text for q in QUESTIONS])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("bits", [4, (3, 4, 8)], ids=["one form", "by bandwidth"])
def test_stores_of_few_bits(bits: Any, tmp_path: Path) -> None:
    more = {"deadline_ms": 500} if isinstance(bits, tuple) else {}
    for _ in range(2):
        store = mmfast.ReuseStore(disk="500MB", folder=tmp_path, bits=bits, **more)
        found = pipe(ON, reuse="prefix", store=store)
        assert found(clip(), QUESTIONS[0]).text
    assert "".join(found.stream(clip(), QUESTIONS[1]))


@pytest.mark.parametrize("spec", ["prefix", "blend:0.15"])
def test_albums(spec: str) -> None:
    """A picture seen elsewhere is moved to its new place."""
    here, far = both("image-qa", reuse=spec)
    albums = [(clip(0)[0], clip(1)[0]), (clip(2)[0], clip(0)[0]), (clip(1)[0], clip(2)[0])]
    for album in albums:
        assert far(album, QUESTIONS[1]).text == here(album, QUESTIONS[1]).text


def test_modules_of_prompts() -> None:
    schema = mmfast.PromptSchema(
        {"rules": ["Answer about ", {"what": 6}, "."], "one": _video(0), "two": _video(1)},
        unions=[("one", "two")],
        scaffolds=[("rules", "one")],
    )
    prompts = [schema.prompt("one"), schema.prompt("rules", "one", what="it"), schema.prompt("two")]
    texts = [[a.text for a in p(prompts, QUESTIONS[0])] for p in both(reuse="prefix") for _ in "ab"]
    assert all(each == texts[0] for each in texts)
    assert "".join(pipe(ON, reuse="prefix").stream(prompts[0], QUESTIONS[0])) == texts[0][0]


def _video(index: int) -> Any:
    return clip(index)


# --- streams --------------------------------------------------------------------------------------

FAMILIES = ("llava_onevision", "qwen2_5_vl", "qwen3_vl")
MEMORIES: dict[str, Any] = {
    "all": None,
    "window": "sink:8+window:64",
    "retrieve": "sink:8+window:64+retrieve:2",
    "rekv": "sink:8+window:64+rekv:2",
    "again": "sink:8+window:64+retrieve:2?every=1",
    "groups": "sink:8+window:64+retrieve:2?group=4",
    "clusters": "livevlm:64",
    "scores": "sink:8+keynorm:64",
    "scores found": "sink:8+window:40+keynorm:24+rekv:2",
    "infinipot": "sink:8+infinipot_v:64",
    "expected": "sink:8+expected_attention:64",
    "streammem": "sink:8+streammem:64",
    "packed": "sink:8+window:96+retrieve:2+quant:4",
    "packed 8": "sink:8+window:96+quant:8",
    "auto": "auto",
}
ASK = "what moves?"


@functools.cache
def moved(family: str, device: str) -> tuple[Any, Any]:
    this = watcher(family)
    return copy.deepcopy(this.model).to(device), this.processor


def watch_pipe(family: str, device: str, **options: Any) -> Any:
    model = moved(family, device)
    return mmfast.pipeline("video-stream", model, **{"fps": 2.0, "sized_for": 8, **options})


def frames_of(family: str, count: int, seed: int = 0) -> Any:
    return watcher(family).clip(count, seed)


def close(one: Tensor, two: Tensor) -> None:
    torch.testing.assert_close(one.cpu().float(), two.cpu().float(), atol=2e-3, rtol=2e-3)


def seen(session: Any, family: str, count: int = 14) -> tuple[Tensor, Any]:
    """Logits behind a question, and what it recalled, once frames have been watched."""
    session.push(frames_of(family, count), seconds(count))
    logits = answer_logits(session, ASK)
    reply = session.ask(ASK, max_new_tokens=4)
    assert isinstance(reply.read(), str)
    return logits, sorted((found.number, found.layers) for found in reply.recalled)


@pytest.mark.parametrize("memory", [*MEMORIES])
@pytest.mark.parametrize("family", FAMILIES)
def test_streams(family: str, memory: str) -> None:
    if family == "qwen3_vl" and memory.startswith("scores"):
        pytest.skip(LIKE)
    found = []
    for device in ("cpu", ON):
        with watch_pipe(family, device).open(MEMORIES[memory]) as session:
            found.append((*seen(session, family), session.stats()["memory"]["live_tokens"]))
    if memory == "auto":  # by the free bytes of each
        return
    close(found[0][0], found[1][0])
    assert found[0][2] == found[1][2]
    if memory != "again":
        assert found[0][1] == found[1][1]


TIERS: dict[str, dict[str, Any]] = {
    "device": {"device_bytes": "1GB", "host_bytes": 0},
    "host": {"host_bytes": "1GB"},
    "device, then host": {"device_bytes": "8KB", "host_bytes": "1GB"},
    "disk": {"host_bytes": 0, "disk_bytes": "1GB"},
    "all": {"device_bytes": "8KB", "host_bytes": "8KB", "disk_bytes": "1GB"},
}


@pytest.mark.parametrize(
    "memory", ["sink:8+window:64+retrieve:3", "sink:8+window:64+rekv:3+quant:8"]
)
@pytest.mark.parametrize("tier", [*TIERS])
def test_tiers(tier: str, memory: str, tmp_path: Path) -> None:
    family, found = "qwen3_vl", []
    for device, name in (("cpu", "a"), (ON, "b")):
        sizes = {
            **TIERS[tier],
            **({"folder": tmp_path / name} if "disk_bytes" in TIERS[tier] else {}),
        }
        with watch_pipe(family, device).open(memory, **sizes) as session:
            found.append(
                (*seen(session, family, 24), session.stats()["memory"]["archive"]["blocks"])
            )
    close(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]


WAYS = [("cpu", ON), (ON, "cpu"), (ON, ON)]
SAVED = (
    "sink:8+window:64+retrieve:3",
    "sink:8+window:64+retrieve:3+quant:4",
    "sink:8+infinipot_v:64",
    "sink:8+expected_attention:64",
)


@pytest.mark.parametrize("memory", SAVED)
@pytest.mark.parametrize("ways", WAYS, ids=["in", "out", "again"])
@pytest.mark.parametrize("family", ["llava_onevision", "qwen3_vl"])
def test_saved_and_restored(
    family: str, ways: tuple[str, str], memory: str, tmp_path: Path
) -> None:
    with watch_pipe(family, ways[0]).open(memory, device_bytes="8KB") as session:
        want = seen(session, family, 20)
        session.save(tmp_path)
    with watch_pipe(family, ways[1]).restore(tmp_path) as again:
        close(answer_logits(again, ASK), want[0])
        again.push(frames_of(family, 2, 5), [30.0, 30.5])
        assert again.ask(ASK, max_new_tokens=3, remember=True).read() is not None
        again.push(frames_of(family, 2, 6), [40.0, 40.5])
        assert torch.isfinite(answer_logits(again, ASK)).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_while_frames_come(family: str) -> None:
    """Two branches take turns with frames; one is remembered, and nothing else stays."""
    found = []
    for device in ("cpu", ON):
        with watch_pipe(family, device).open("sink:8+window:64+retrieve:2") as session:
            clip_ = frames_of(family, 16)
            session.push(clip_[:6], seconds(6))
            one = session.ask(ASK, max_new_tokens=6)
            next(iter(one), None)
            session.push(clip_[6:10], seconds(4, start=3.0))
            session.ask("why?", max_new_tokens=3, temperature=1.0, seed=1).read()
            one.read()
            session.ask("and now?", remember=True, max_new_tokens=3).close()
            session.push(clip_[10:], seconds(6, start=5.0))
            found.append(answer_logits(session, ASK))
    close(*found)


@pytest.mark.parametrize("family", FAMILIES)
def test_subscriptions(family: str) -> None:
    always = {"threshold": 1e-9, "release": 1e-9, "every": 0.0, "pause": 0.0}
    for device in ("cpu", ON):
        with watch_pipe(family, device).open("sink:8+window:64+retrieve:2") as session:
            told = session.subscribe("a", yes=["y"], no=["n"], reply="what?", **always)
            session.push(frames_of(family, 6), seconds(6))
            events = list(told.waiting())
            assert events and all(0 <= event.probability <= 1 for event in events)


@pytest.mark.parametrize("reduce", ["dtd:0.5", "evs:0.5", "stc_pruner:0.5", "divprune:0.5"])
def test_reduced_streams(reduce: str) -> None:
    found = []
    for device in ("cpu", ON):
        with watch_pipe("llava_onevision", device, reduce=reduce, gate=0.001).open(
            "sink:8+window:64+retrieve:2"
        ) as session:
            found.append(seen(session, "llava_onevision"))
    close(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("goal", [None, 0.98], ids=["share", "goal"])
def test_frame_caches(family: str, goal: float | None) -> None:
    found = []
    for device in ("cpu", ON):
        kept = FrameCache(moved(family, device)[0], 0.5, goal=goal)
        with watch_pipe(family, device, frame_cache=kept).open(None) as session:
            found.append(seen(session, family, 8)[0])
    close(*found)


def test_the_frame_cache_of_the_embedded_model() -> None:
    logits = []
    for device in ("cpu", ON):
        made = mmfast.pipeline("video-stream", pair(device), frame_cache=0.25, fps=2.0)
        with made.open("sink:64+window:1152+retrieve:4") as session:
            session.push(clip(), seconds(len(clip())))
            logits.append(answer_logits(session, QUESTIONS[1]))
    torch.testing.assert_close(logits[1].cpu(), logits[0], atol=0.05, rtol=0.05)


def test_features_are_shared_between_sessions(tmp_path: Path) -> None:
    for device in (ON, "cpu", ON):
        made = watch_pipe("llava_onevision", device, reuse="encoder", store=tmp_path)
        with made.open("sink:8+window:64") as session:
            assert torch.isfinite(seen(session, "llava_onevision", 6)[0]).all()


def test_history_of_the_embedded_model() -> None:
    made = mmfast.pipeline("video-stream", pair(ON), fps=2.0)
    with made.open("sink:64+window:1152+retrieve:4") as session:
        session.push(clip(), seconds(len(clip())))
        assert session.history("How many times was the red circle shown?").text
        assert session.stats()["frames"] == len(clip())


@files
def test_watching_a_file() -> None:
    texts = []
    for device in ("cpu", ON):
        made = mmfast.pipeline("video-stream", pair(device), fps=2.0)
        with made.open("sink:64+window:1152+retrieve:4") as session:
            session.watch(CLIPS / "four-shapes.mp4", fps=4)
            texts.append(session.ask(QUESTIONS[1]).read())
    assert texts[0] == texts[1]


# --- commands -------------------------------------------------------------------------------------


def command(*words: str) -> Any:
    """The document that a command prints with --json."""
    from mmfast.cli import app

    result = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def picture(tmp_path: Path) -> str:
    Image.fromarray(clip()[0]).save(tmp_path / "picture.png")
    return str(tmp_path / "picture.png")


PLACE = ("--model", "tiny-video", "--device", ON)


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--reduce", "divprune:0.25", "--cache", "snapkv:64"),
        ("--dtype", "bfloat16"),
        ("--reuse", "prefix"),
        ("--quality", "balanced"),
        ("--compare", "divprune:0.25"),
    ],
    ids=["plain", "reduced", "bfloat16", "reuse", "quality", "compare"],
)
def test_ask(picture: str, more: tuple[str, ...]) -> None:
    assert command("ask", picture, QUESTIONS[1], *PLACE, *more)


@files
def test_ask_about_a_file() -> None:
    where = str(CLIPS / "red-circle.mp4")
    texts = [
        command("ask", where, QUESTIONS[0], "--model", "tiny-video", "--device", d)["answer"]
        for d in ("cpu", ON)
    ]
    assert texts[0] == texts[1]


def test_profile(picture: str, tmp_path: Path) -> None:
    flame = tmp_path / "flame.svg"
    assert command("profile", picture, QUESTIONS[1], *PLACE, "--flame", str(flame))
    assert flame.stat().st_size


def test_plan(picture: str) -> None:
    assert command("plan", picture, QUESTIONS[1], *PLACE, "--target-ttft-ms", "200", "--check")


def test_plan_of_a_shape() -> None:
    assert command("plan", "--preset", "tiny", "--device", ON, "--quality", "fast")


@pytest.mark.parametrize("stages", ["llm", "vit,llm,decode,ttft"])
def test_bench(stages: str) -> None:
    more = ("--reduce", "evs", "--reduce", "divprune", "--keep", "0.25", "--iters", "2")
    assert command("bench", "--preset", "tiny", "--device", ON, "--stages", stages, *more)["ok"]


KERNELS = ["max-min-select", "segment-merge", "selected-attention", "temporal-difference"]


@pytest.mark.parametrize("kernel", KERNELS)
def test_bench_of_kernels(kernel: str) -> None:
    assert command("bench", "--kernels", kernel)


def test_eval() -> None:
    found = command("eval", "--n", "4", "--model", "tiny-video", "--reduce", "evs:0.25")
    assert found


def test_calibrate(tmp_path: Path) -> None:
    assert command("calibrate", "tiny-video", "--out", str(tmp_path), "--count", "1")["reach"]


def test_doctor() -> None:
    from mmfast.cli import app

    assert CliRunner().invoke(app, ["doctor"]).exit_code in (0, 1)


def test_arrays_of_any_kind() -> None:
    """Half-precision frames, grey ones and one frame alone are read as on the CPU."""
    for frames in (clip()[:1], np.repeat(clip()[..., :1], 3, -1)):
        assert len({p(frames, QUESTIONS[1]).text for p in both()}) == 1
