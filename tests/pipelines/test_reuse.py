"""`pipeline(reuse=)`: media paid for once, the same answers, what does not act is refused."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny

import mmfast
from mmfast.bench.suites.reuse import QUESTIONS

ROOT = Path(__file__).resolve().parents[2]
CLIP = str(ROOT / "assets" / "clips" / "red-circle.mp4")


@pytest.fixture(scope="module")
def stock() -> Any:
    return mmfast.pipeline("video-qa", device="cpu", dtype="float32")


OTHER = Path(CLIP).with_name("four-shapes.mp4")


def test_modules_are_read_once(stock: Any) -> None:
    schema = mmfast.PromptSchema(
        {"rules": ["Answer about ", {"what": 6}, "."], "one": Path(CLIP), "two": OTHER},
        unions=[("one", "two")],
        scaffolds=[("rules", "one")],
    )
    pipe = _pipe(stock, reuse="prefix")
    prompts = [schema.prompt("one"), schema.prompt("rules", "one", what="it"), schema.prompt("two")]
    with _calls(pipe.model.get_encoder("image")) as tower:
        first, again = (pipe(prompts, QUESTIONS[0]) for _ in range(2))
    assert len(tower) == 2 and [a.text for a in first] == [a.text for a in again]
    assert first[0].text == stock(CLIP, QUESTIONS[0]).text  # a module alone is a plain prompt
    assert "".join(pipe.stream(prompts[0], QUESTIONS[0])) == first[0].text
    for answer, fresh in [*((a, True) for a in first), *((a, False) for a in again)]:
        rows = {row.stage: row for row in answer.trace.rows}
        assert (rows["reuse modules"].tokens_out > 0) == fresh
        assert rows["reuse kv"].tokens_out < 20 < rows["reuse kv"].tokens_in
        assert (answer.visual_tokens, answer.kept_tokens) == (288, 288)
    beams = [p(m, QUESTIONS[0], num_beams=2).text for p, m in ((pipe, prompts[0]), (stock, CLIP))]
    assert beams[0] == beams[1]


def test_modules_that_cannot_act_are_refused(stock: Any) -> None:
    prompt = mmfast.PromptSchema({"one": Path(CLIP)}).prompt("one")
    for options, said in (({}, "is not given"), ({"reuse": "encoder"}, "is 'encoder'")):
        with pytest.raises(mmfast.MmfastError, match=said):
            _pipe(stock, **options)(prompt, QUESTIONS[0])
    pipe = _pipe(stock, reuse="prefix")
    with pytest.raises(mmfast.MmfastError, match="leave the target out"):
        pipe(prompt, QUESTIONS[0], target_ttft_ms=100)
    with pytest.raises(mmfast.MediaError, match="does not exist"):
        gone = mmfast.PromptSchema({"one": Path("gone.mp4")}).prompt("one")
        pipe(gone, QUESTIONS[0])


@contextmanager
def _calls(module: Any) -> Iterator[list[int]]:
    """Tokens or pictures that a module sees, a number a call."""
    seen: list[int] = []

    def note(_: Any, args: Any, kwargs: Any) -> None:
        given = args[0] if args else next(iter(kwargs.values()))
        seen.append(given.shape[1] if given.ndim == 3 else len(given))

    handle = module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def _pipe(stock: Any, **options: Any) -> Any:
    return mmfast.pipeline("video-qa", (stock.model, stock.processor), **options)


@pytest.mark.parametrize("spec", ["encoder", "prefix"])
def test_a_clip_asked_five_times_is_paid_for_once(stock: Any, spec: str) -> None:
    expected = [stock(CLIP, question).text for question in QUESTIONS]
    pipe = _pipe(stock, reuse=spec)
    with (
        _calls(pipe.model.get_encoder("image")) as tower,
        _calls(pipe.model.get_decoder().layers[0]) as layer,
    ):
        answers = [pipe(CLIP, question) for question in QUESTIONS]
    assert [answer.text for answer in answers] == expected
    assert len(tower) == 1
    prompts = [n for n in layer if n > 100]  # passes that read the clip
    assert len(prompts) == (5 if spec == "encoder" else 1)
    rows = {row.stage: row for row in answers[1].trace.rows}
    assert rows["reuse encoder"].tokens_out == 0 and rows["encode"].ms == 0
    if spec != "encoder":
        assert rows["reuse kv"].tokens_out < 20 < rows["reuse kv"].tokens_in


@pytest.mark.parametrize("reduce", ["evs:0.5", "tome@vit:0.5"])
def test_beside_reducers(stock: Any, reduce: str) -> None:
    expected = _pipe(stock, reduce=reduce)(CLIP, QUESTIONS[0])
    for spec in ("encoder", "prefix"):
        pipe = _pipe(stock, reduce=reduce, reuse=spec)
        for _ in range(2):
            found = pipe(CLIP, QUESTIONS[0])
            assert (found.text, found.kept_tokens) == (expected.text, expected.kept_tokens)


def test_streams_batches_beams_and_draws(stock: Any) -> None:
    pipe = _pipe(stock, reuse="prefix")
    question = QUESTIONS[0]
    assert "".join(pipe.stream(CLIP, question)) == stock(CLIP, question).text
    texts = [answer.text for answer in pipe(CLIP, list(QUESTIONS[:3]), batch_size=3)]
    assert texts == [answer.text for answer in stock(CLIP, list(QUESTIONS[:3]))]
    for options in ({"num_beams": 3}, {"temperature": 1.5, "seed": 7}):
        assert pipe(CLIP, question, **options).text == stock(CLIP, question, **options).text


def test_pipelines_share_a_store(stock: Any, tmp_path: Path) -> None:
    store = mmfast.ReuseStore(folder=tmp_path)
    _pipe(stock, reuse="prefix", store=store)(CLIP, QUESTIONS[0])
    for given in (store, tmp_path):  # the second as another process would
        pipe = _pipe(stock, reuse="prefix", store=given)
        with _calls(pipe.model.get_encoder("image")) as tower:
            pipe(CLIP, QUESTIONS[1])
        assert not tower


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reuse": "all"}, "choices"),
        ({"store": "."}, "reuse='prefix'"),
        ({"reuse": "prefix", "cache": "snapkv:64"}, "cache policy"),
        ({"reuse": "blend:0.2", "reduce": "fastv@llm2:0.5"}, "reuse='encoder'"),
    ],
)
def test_what_does_not_act_is_refused(stock: Any, options: Any, said: str) -> None:
    with pytest.raises(mmfast.MmfastError, match=said):
        _pipe(stock, **options)


@pytest.mark.parametrize(
    "options", [{"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 3}]
)
def test_options_that_want_a_cache_of_their_own(stock: Any, options: Any) -> None:
    """Stock `generate` refuses the first in words of its own, and answers wrongly by the second."""
    (name,) = options
    for given in ({}, options):  # in a call, and for all calls
        with pytest.raises(mmfast.MmfastError, match=f"leave {name} out"):
            pipe = _pipe(stock, reuse="prefix", **given)
            pipe(CLIP, QUESTIONS[0], **({} if given else options))
    config = stock.model.generation_config
    setattr(config, name, options[name])  # as some checkpoints state it
    try:
        with pytest.raises(mmfast.MmfastError, match=f"{name}=.*generation_config to None"):
            _pipe(stock, reuse="prefix")(CLIP, QUESTIONS[0])
    finally:
        setattr(config, name, None)
    found = _pipe(stock, reuse="encoder")(CLIP, QUESTIONS[0], **options).text
    assert found == stock(CLIP, QUESTIONS[0]).text


def test_what_autocast_rounded_is_not_read_without_it(stock: Any) -> None:
    store = mmfast.ReuseStore()
    cast = torch.autocast("cpu", dtype=torch.bfloat16)
    pipe, other = (_pipe(stock, reuse=spec, store=store) for spec in ("encoder", "prefix"))
    with _calls(stock.model.get_encoder("image")) as tower:
        for where in (cast, nullcontext(), cast, nullcontext()):
            with where:
                assert pipe(CLIP, QUESTIONS[0]).text == stock(CLIP, QUESTIONS[0]).text
        assert len(tower) == 2 + 4  # the stock pipeline's own
    with cast, pytest.raises(mmfast.MmfastError, match=r"torch\.autocast .* reuse='encoder'"):
        other(CLIP, QUESTIONS[0])
    assert other(CLIP, QUESTIONS[0]).text == stock(CLIP, QUESTIONS[0]).text  # nothing is left over


def test_encoder_output_beside_what_acts_inside(stock: Any) -> None:
    options = {"reduce": "fastv@llm2:0.5", "cache": "snapkv:128"}
    pipe, other = _pipe(stock, reuse="encoder", **options), _pipe(stock, **options)
    for question in QUESTIONS[:2]:
        assert pipe(CLIP, question).text == other(CLIP, question).text


@pytest.mark.parametrize("family", ["internvl", "gemma3", "qwen2_5_vl", "smolvlm"])
def test_encoder_outputs_of_every_container(family: str) -> None:
    import torch
    from tiny_models import generate

    from mmfast.streams.reuse.media import MediaReuse
    from mmfast.streams.reuse.plan import ReusePlan

    this = tiny(family)
    reuse = MediaReuse(this.model, this.processor, ReusePlan("encoder"), mmfast.ReuseStore())
    inputs = this.inputs(["a {image} b {image}?"], images=this.images(2))
    stock = generate(this, inputs).sequences
    for _ in range(2):
        assert torch.equal(generate(this, reuse.encoded(inputs)).sequences, stock)
    assert reuse.store.hits


@pytest.mark.filterwarnings("ignore")
def test_what_one_adapter_wrote_is_not_read_under_another() -> None:
    """Setting an adapter of PEFT changes no weight, and turning it off neither."""
    peft = pytest.importorskip("peft")
    import torch
    from tiny_models import generate

    from mmfast.streams.reuse.media import MediaReuse
    from mmfast.streams.reuse.plan import ReusePlan

    this = tiny("llava_onevision")
    model, names = copy.deepcopy(this.model), r".*language_model.*_proj"
    for number, name in enumerate(("one", "two")):
        torch.manual_seed(number)
        config = peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False)
        if number:
            model.add_adapter(name, config)
        else:
            model = peft.get_peft_model(model, config, adapter_name=name)
    own = replace(this, model=model)
    reuse = MediaReuse(model, this.processor, ReusePlan("prefix"), mmfast.ReuseStore())
    inputs = this.inputs(["see {image} what"], images=this.images(1))
    found = []
    for turn in ("one", "two", "one", None):
        hits = reuse.store.hits
        if turn:
            model.set_adapter(turn)
        with nullcontext() if turn else model.disable_adapter():
            stock = generate(own, inputs).sequences
            again = generate(own, reuse.prompt(reuse.encoded(inputs))).sequences
        assert torch.equal(stock, again)
        found.append(reuse.store.hits - hits > 1)
    assert found == [False, False, True, False]


def _ask(folder: Path, *more: str) -> Any:
    command = [sys.executable, "-m", "mmfast", "ask", CLIP, QUESTIONS[0], "--json", *more]
    run: Callable[..., Any] = subprocess.run
    done = run(
        [*command, "--reuse", "prefix", "--reuse-folder", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.slow
def test_ask_finds_what_an_earlier_process_wrote(tmp_path: Path) -> None:
    first, second = (_ask(tmp_path) for _ in range(2))
    assert first["answer"] == second["answer"]
    rows = [{row["stage"]: row for row in each["trace"]} for each in (first, second)]
    assert rows[0]["reuse encoder"]["tokens_out"] > rows[1]["reuse encoder"]["tokens_out"] == 0


def test_sessions_encode_a_clip_once(tmp_path: Path) -> None:
    store = mmfast.ReuseStore(folder=tmp_path)
    plain = mmfast.pipeline("video-stream", device="cpu", fps=4)
    answers = []
    for given in (None, store, store, tmp_path):
        reuse = None if given is None else "encoder"
        pair = plain.model, plain.processor
        pipe = mmfast.pipeline("video-stream", pair, fps=4, reuse=reuse, store=given)
        with (
            _calls(pipe.model.get_encoder("image")) as tower,
            pipe.open(memory=None) as session,
        ):
            session.watch(CLIP).join()
            answers.append((session.ask(QUESTIONS[0], max_new_tokens=4).read(), len(tower)))
    texts, calls = zip(*answers, strict=True)
    assert len(set(texts)) == 1
    assert calls[0] == calls[1] > 0 and calls[2:] == (0, 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reuse": "prefix"}, "give reuse='encoder'"),
        ({"reuse": "encoder", "frame_cache": 0.25}, "frame_cache"),
        ({"store": "."}, "reuse='encoder'"),
    ],
)
def test_what_does_not_act_in_a_session_is_refused(options: Any, said: str) -> None:
    with pytest.raises(mmfast.MmfastError, match=said):
        mmfast.pipeline("video-stream", **options)
