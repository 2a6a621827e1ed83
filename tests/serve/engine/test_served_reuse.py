"""Media seen before, at any place of a prompt of the engine: the answers of a pipeline."""

from __future__ import annotations

import copy
import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from scheduling import EMBEDDED, Ear, answers, ask, clip, image, model_of, stock, talk, together
from tiny_models import FAMILIES, build

from mmfast.core.errors import MmfastError
from mmfast.models.encoder_names import takes_features
from mmfast.models.prompt import chat_inputs
from mmfast.serve.engine.base import Finish, Request
from mmfast.serve.engine.reuse import ServedReuse
from mmfast.serve.engine.scheduler import Scheduler
from mmfast.serve.engine.slicer import Slicer
from mmfast.streams.reuse.media import MediaReuse
from mmfast.streams.reuse.plan import parse_reuse
from mmfast.streams.reuse.store import ReuseStore
from mmfast.streams.stream import WeightChecksum

MODES = ("prefix", "blend:0.15", "craft:0.3", "kvcomm?least=1")
LONG = 2000  # letters of a text that is read in many chunks


@pytest.fixture(params=[f for f in FAMILIES if f in ("llava_onevision", "qwen2_5_vl", "qwen3_vl")])
def family(request: Any) -> str:
    return str(request.param)


@contextmanager
def engine(family: str, reuse: str | None, **options: Any) -> Iterator[Any]:
    with closing(Scheduler(model_of(family), name=family, reuse=reuse, **options)) as made:
        yield made


class Library:
    """What a pipeline does: a store, filled by the same prompts in the same order."""

    def __init__(self, family: str, spec: str, store: ReuseStore | None = None) -> None:
        model, self.processor = model_of(family)
        self.model = copy.deepcopy(model)
        plan = parse_reuse(spec)
        assert plan is not None
        self.reuse = MediaReuse(self.model, self.processor, plan, store or ReuseStore())

    def answer(self, request: Request) -> tuple[str, int]:
        """Text, and the tokens of the prompt that were computed."""
        from mmfast.core.trace import Trace

        trace, chat = Trace(), [message.chat for message in request.messages]
        given = self.reuse.inputs(chat_inputs(self.processor, [chat], "cpu"), (), None, 1, trace)
        config = self.model.config
        named = (getattr(config, f"{kind}_token_id", None) for kind in ("image", "video", "audio"))
        with torch.inference_mode():
            output = self.model.generate(
                **given,
                max_new_tokens=request.sampling.max_tokens,
                do_sample=False,
                suppress_tokens=[i for i in named if i is not None],
            )
        new = output[:, given["input_ids"].shape[1] :]
        text = self.processor.batch_decode(new, skip_special_tokens=True)[0]
        return text, next(row.tokens_out for row in trace.rows if row.stage == "reuse kv")


def rows_of(end: Any) -> dict[str, tuple[int, int]]:
    assert isinstance(end, Finish), end
    rows = end.trace["rows"]
    return {row["stage"]: (row["tokens_in"], row["tokens_out"]) for row in rows}


def told(made: Any, request: Request) -> tuple[str, int, Finish]:
    """Text, computed tokens and end of one answer."""
    ear = Ear(made, request)
    end = ear.wait()
    computed = rows_of(end)["reuse kv"][1]
    assert isinstance(end, Finish)
    return ear.text, computed, end


def album() -> list[Request]:
    """The same pictures behind other text, swapped, and beside a clip."""
    one, two, film = image(1), image(2), clip(3)
    return [
        ask("first", one, "what is it"),
        ask("moved", "other words stand before it", one, "what is it"),
        ask("both", one, "and", two, "which"),
        ask("swapped", two, "and", one, "which"),
        ask("again", two, "and", one, "or what"),
        ask("film", "now a film", film, "then", two, "which"),
        ask("behind", "see", two, "then the film", film, "which"),
    ]


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("spec", MODES)
def test_answers_are_those_of_a_pipeline_with_the_same_store(family: str, spec: str) -> None:
    library = Library(family, spec)
    with engine(family, spec) as made:
        for request in album():
            expected = library.answer(request)
            text, computed, end = told(made, request)
            assert (text, computed) == expected, request.id
            rows = rows_of(end)
            taken = max(n - m for n, m in (rows["reuse encoder"], rows["reuse kv"]))
            assert end.cached_tokens == taken
            assert taken or request.id in ("first", "film")
        found = made.health().gauges
    assert found["reuse_hits"] == library.reuse.store.hits >= 10
    assert found["reuse_misses"] == library.reuse.store.misses
    assert found["reuse_bytes"] == library.reuse.store.nbytes > 0


@pytest.mark.rest_is_slow(3, 1)
@pytest.mark.parametrize("spec", ["prefix", "blend:1"])
def test_what_is_exact_answers_as_stock(family: str, spec: str) -> None:
    with engine(family, spec) as made:
        for request in album():
            assert told(made, request)[0] == stock(model_of(family), request), request.id


def test_a_moved_picture_is_read_in_part(family: str) -> None:
    requests = album()[:2]
    with engine(family, "blend:0.15") as made, engine(family, "prefix") as other:
        for each in (made, other):
            told(each, requests[0])
        rows = [rows_of(told(each, requests[1])[2]) for each in (made, other)]
    visual = rows[0]["reuse encoder"][0]
    assert rows[1]["reuse kv"][1] - rows[0]["reuse kv"][1] >= 0.8 * visual > 0
    assert rows[0]["reuse encoder"][1] == rows[1]["reuse encoder"][1] == 0


def test_two_at_once_and_others_beside_them(family: str) -> None:
    """Prompts of one moment share the store, text and policies go their own way meanwhile."""
    pair, one, two = model_of(family), image(1), image(2)
    requests = [
        ask("a", "see", one, "what is it"),
        ask("b", "and now", one, "with", two),
        ask("c", "no picture at all"),
        ask("d", two, "then", one, "which"),
    ]
    beside = ask("e", one, "what is it", cache="sink:4+window:8")
    with engine(family, None) as plain:
        whole = answers(plain, [beside])[0][0]
    with engine(family, "blend:1", slots=8) as made:
        ears = together(made, [*requests, beside])
        ends = [ear.wait() for ear in ears]
        assert [ear.text for ear in ears] == [*(stock(pair, each) for each in requests), whole]
        assert made.health().gauges["reuse_hits"] >= 2
    assert ["reuse kv" in rows_of(end) for end in ends] == [True, True, False, True, False]


@pytest.mark.rest_is_slow(3)
def test_slices_of_long_prompts_while_others_answer(family: str) -> None:
    """Calls stop within a prompt, and never while they hold the store."""
    pair = model_of(family)
    longest = [ask(f"l{i}", "a " * LONG, image(i % 2), f"what {i}") for i in range(3)]
    writing = ask("w", "say much", tokens=300)
    with engine(family, "blend:1", slots=8, chunk=32, context=16384) as made:
        ears = [Ear(made, writing), *(Ear(made, each) for each in longest)]
        for ear in ears:
            ear.wait()
    expected = [stock(pair, each) for each in (writing, *longest)]
    assert [ear.text for ear in ears] == expected


def test_no_call_stops_while_it_holds_the_lock_of_the_store() -> None:
    """Another prompt, which is read meanwhile, would wait for it for ever."""
    model, processor = model_of("llava_onevision")
    plan, store, slicer = parse_reuse("prefix"), ReuseStore(), Slicer()
    assert plan is not None
    reuse = ServedReuse(model, processor, plan, store)
    media = reuse.on(copy.deepcopy(model))
    store.put("a", {"x": torch.ones(3)})

    def stops(call: Callable[[], Any]) -> int:
        slicer.allow(0.0, math.inf)
        free = store._lock._lock
        found = [free.acquire(blocking=False) and free.release() for _ in slicer.run(call)]
        assert found == [None] * len(found)  # this thread had it at every stop
        return len(found)

    with closing(slicer), closing(reuse):
        value = {"x": torch.ones(3)}
        assert stops(partial(media.store.put, "b", value)) > 0  # before it takes the lock
        assert stops(partial(media.store.get, "a")) == stops(WeightChecksum(model).value) == 0


def test_little_room_forgets_and_still_answers(family: str) -> None:
    """A store of one picture: what was pushed out is computed anew."""
    with engine(family, "prefix") as made:
        told(made, ask("size", image(0), "a"))
        size = int(made.health().gauges["reuse_bytes"])
    store, spec = ReuseStore(host=int(1.2 * size)), "blend:0.15"
    library = Library(family, spec, ReuseStore(host=int(1.2 * size)))
    requests = [ask(f"{i}", "see", image(i % 3), "what is it") for i in range(6)]
    with engine(family, spec, store=store) as made:
        for request in requests:
            text, computed, _ = told(made, request)
            assert (text, computed) == library.answer(request)
            assert made.health().gauges["reuse_bytes"] <= 1.2 * size
        assert rows_of(told(made, ask("last", "see", image(0), "who"))[2])["reuse encoder"][1] > 0


def test_tenants_specs_and_adapters_have_their_own(family: str) -> None:
    one = image(1)
    requests = [
        ask("0", one, "what is it"),
        ask("1", one, "what is it", tenant="a"),
        ask("2", one, "what is it", tenant="b"),
        ask("3", one, "what is it", reduce="divprune:0.5"),
    ]
    again = [talk(f"{i}+", [each.messages[0].content], tenant=each.tenant,
                  reduce=each.options.reduce) for i, each in enumerate(requests)]  # fmt: skip
    pair = model_of(family)
    with engine(family, None) as plain:
        expected = [answers(plain, [each])[0][0] for each in requests]
    with engine(family, "blend:0.15") as made:
        for these in (requests, again):
            for number, request in enumerate(these):
                text, computed, end = told(made, request)
                assert text == expected[number]
                rows = rows_of(end)
                fresh = rows["reuse kv"][0] == computed
                assert fresh == bool(rows["reuse encoder"][1]) == (these is requests)
    assert expected[0] == stock(pair, requests[0])


@pytest.mark.filterwarnings("ignore")
def test_adapters_never_read_what_another_wrote() -> None:
    peft = pytest.importorskip("peft")
    model, processor = model_of("llava_onevision")
    folders = {}
    for number in (1, 2):
        torch.manual_seed(number)
        made = peft.LoraConfig(
            r=8, lora_alpha=64, target_modules=r".*language_model.*_proj", init_lora_weights=False
        )
        folder = tempfile.mkdtemp(prefix="mmfast-lora-")
        peft.get_peft_model(copy.deepcopy(model), made).save_pretrained(folder)
        folders[f"a{number}"] = folder
    pair = copy.deepcopy(model), processor
    names: Sequence[str | None] = (None, "a1", "a2")

    def requests(mark: str) -> list[Request]:
        return [
            ask(f"{mark}{name}", "see", image(1), f"what {mark}", adapter=name) for name in names
        ]

    with closing(Scheduler(pair, lora=folders)) as plain:
        expected = [answers(plain, [each])[0][0] for each in (*requests("x"), *requests("y"))]
    with closing(Scheduler(pair, lora=folders, reuse="blend:0.15")) as served:
        found = [told(served, each) for each in (*requests("x"), *requests("y"))]
    assert [text for text, _, _ in found] == expected and len(set(expected)) > 2
    fresh = [rows_of(end)["reuse kv"] for _, _, end in found]
    assert all(n == m for n, m in fresh[:3]) and all(n > m for n, m in fresh[3:])
    # adapters of the language model alone share what the tower made
    assert [rows_of(end)["reuse encoder"][1] > 0 for _, _, end in found] == [True] + [False] * 5


def test_a_folder_serves_the_next_process(tmp_path: Path) -> None:
    """An engine finds what an earlier one and a pipeline wrote, and the other way round."""
    requests = album()
    with engine("qwen2_5_vl", "blend:0.15", store=tmp_path) as made:
        told(made, requests[0])
    library = Library("qwen2_5_vl", "blend:0.15", ReuseStore(folder=tmp_path))
    text, computed = library.answer(requests[2])
    assert library.reuse.store.hits > 2
    library.reuse.store.flush()
    with engine("qwen2_5_vl", "blend:0.15", store=str(tmp_path)) as made:
        again, later, _ = told(made, requests[2])
        assert again == text and later < computed
        hits = made.health().gauges["reuse_hits"]
    assert hits > 2


def test_encoder_outputs_alone_beside_any_spec(family: str) -> None:
    if not takes_features(build(family).model):
        pytest.skip("the encoder level of reuse needs transformers 5.18")
    film = clip(3)
    options = {"reduce": "fastv@llm1:0.5", "cache": "sink:4+window:16"}
    requests = [ask(f"{i}", film, f"what {i}", **options) for i in range(2)]
    with engine(family, None) as plain:
        expected = [answers(plain, [each])[0][0] for each in requests]
    with engine(family, "encoder") as made:
        found = [answers(made, [each])[0] for each in requests]
    assert [text for text, _ in found] == expected
    assert [rows_of(end)["reuse encoder"][1] > 0 for _, end in found] == [True, False]


def test_sparse_prefill_reads_as_without_a_store_but_for_the_tower(family: str) -> None:
    """Keys under it depend on the whole prompt; outputs of the tower do not."""
    film, long = clip(3), "what is it? " * 30
    requests = [ask(f"{i}", film, long, prefill="minference:0.3?least=64") for i in range(2)]
    with engine(family, None) as plain:
        expected = [answers(plain, [each])[0] for each in requests]
    for spec in ("encoder", "blend:0.15"):
        with engine(family, spec) as made:
            found = [answers(made, [each])[0] for each in requests]
        assert [text for text, _ in found] == [text for text, _ in expected]
        stages = [rows_of(end) for _, end in found]
        assert all("sparse" in each for each in stages)
        assert ["reuse encoder" in each for each in stages] == [spec == "encoder"] * 2
        assert not any("reuse kv" in each for each in stages)


def test_a_cancelled_prompt_leaves_the_store_whole() -> None:
    request = ask("gone", "a " * LONG, image(1), "what")
    with engine("llava_onevision", "blend:1", slots=4, chunk=32, context=16384) as made:
        writing = Ear(made, ask("w", "say much", tokens=200))
        writing.next()
        gone = Ear(made, request)
        threading.Event().wait(0.02)
        made.cancel("gone")
        gone.wait()
        last = told(made, ask("after", "a " * LONG, image(1), "what"))
        writing.wait()
        until = time.monotonic() + 10
        while made.health().running and time.monotonic() < until:
            time.sleep(0.01)
        assert not made.health().running and made.health().gauges["kv_bytes"] == 0
    assert last[0] == stock(model_of("llava_onevision"), request)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reuse": "all"}, "choices"),
        ({"store": "."}, "reuse='prefix'"),
        ({"reuse": "prefix", "cache": "snapkv:64"}, "cache policy"),
        ({"reuse": "blend:0.2", "reduce": "fastv@llm2:0.5"}, "reuse='encoder'"),
        ({"reuse": "blend:0.2", "prefill": "minference:0.3"}, "leave prefill out"),
    ],
)
def test_what_does_not_act_is_refused_at_the_start(options: Any, said: str) -> None:
    with pytest.raises(MmfastError, match=said):
        Scheduler(model_of(EMBEDDED), **options)
