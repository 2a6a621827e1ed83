"""The parameters that people send: choice of tokens, formats, tools, routes, names."""

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

import jsonschema
from serve_tools import (
    CHAT,
    MODEL,
    Hum,
    app_of,
    client_of,
    data_url,
    events_of,
    image_part,
    saying,
    text,
    user,
    wav,
)

from mmfast.core.errors import MmfastError
from mmfast.serve.engine.base import Delta, Failure, Finish, Message, Request, SamplingOptions
from mmfast.serve.engine.request import checked
from mmfast.serve.engine.rules import byte_tokenizer, json_grammar, matcher
from mmfast.tiny.scenes.evaluate import scene_cases

ANSWER = (Delta("to the"), Delta(" left"), Finish("stop", 70, 3))
QUESTION = "which way does the circle move?"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained("assets/models/tiny-scenes")


def answered(engine: Any, *given: SamplingOptions) -> list[tuple[str, list[Any], Any]]:
    """Text, log-probabilities and end of answers that run side by side."""
    events: list[list[Any]] = [[] for _ in given]
    ends = [threading.Event() for _ in given]

    def emit(i: int, event: Any) -> None:
        events[i].append(event)
        if not isinstance(event, Delta):
            ends[i].set()

    for i, sampling in enumerate(given):
        message = Message("user", (QUESTION,))
        request = Request(f"{id(events)}-{i}", (message,), sampling)
        engine.submit(request, lambda event, i=i: emit(i, event))
    for end in ends:
        assert end.wait(120)
    said = ["".join(e.text for e in own if isinstance(e, Delta)) for own in events]
    told = [[c for e in own if isinstance(e, Delta) for c in e.logprobs] for own in events]
    return list(zip(said, told, [own[-1] for own in events], strict=True))


def post(app: Any, path: str = CHAT, **document: Any) -> Any:
    async def go() -> Any:
        async with client_of(app) as client:
            return await client.post(path, json={"model": MODEL, **document}, timeout=120)

    return asyncio.run(go())


def made_up(dice: random.Random) -> SamplingOptions:
    """Any options of choosing tokens."""
    pick = dice.choice
    return SamplingOptions(
        dice.randint(3, 9),
        temperature=pick([0.0, 0.7, 1.5]),
        top_p=pick([1.0, 0.8]),
        top_k=pick([0, 3]),
        min_p=pick([0.0, 0.2]),
        seed=dice.randint(0, 99),
        repetition_penalty=pick([None, 1.4]),
        presence_penalty=pick([0.0, 1.5]),
        frequency_penalty=pick([0.0, -1.0]),
        logit_bias=pick([(), ((70, 5.0), (99, -5.0))]),
        min_tokens=pick([0, 3]),
        ignore_eos=pick([False, True]),
        stop_token_ids=pick([(), (70, 80)]),
        logprobs=pick([None, 2]),
    )


def test_any_options_answer_alike_alone_and_beside_others(engine: Any) -> None:
    dice = random.Random(7)
    given = [made_up(dice) for _ in range(12)]
    together = answered(engine, *given)
    for sampling, found in zip(given, together, strict=True):
        (alone,) = answered(engine, sampling)
        assert alone[0] == found[0], sampling
        assert [c.token for c in alone[1]] == [c.token for c in found[1]]
        ended = found[2]
        assert isinstance(ended, Finish) and ended.completion_tokens <= sampling.max_tokens
        assert ended.completion_tokens >= sampling.min_tokens


def logits_after(engine: Any, tokens: list[int]) -> torch.Tensor:
    """An independent reading of the model: the whole sequence at once, no cache."""
    model = engine._runner.model
    ids = engine._runner.encoder.prepare(Request("x", (Message("user", (QUESTION,)),)))
    whole = torch.cat([ids.inputs["input_ids"][0], torch.tensor(tokens, dtype=torch.int64)])
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=whole[None]).logits[0, -1].float()
    return found


def test_penalties_and_biases_are_those_of_the_formula(engine: Any, tokenizer: Any) -> None:
    given = SamplingOptions(
        8, presence_penalty=0.9, frequency_penalty=0.7, logit_bias=((80, 1.5),), ignore_eos=True,
        repetition_penalty=1.3, logprobs=3,
    )  # fmt: skip
    ((_, told, _),) = answered(engine, given)
    prompt = engine._runner.encoder.prepare(Request("x", (Message("user", (QUESTION,)),)))
    seen = set(prompt.inputs["input_ids"][0].tolist())
    blocked = engine._runner.chooser._blocked
    tokens: list[int] = []
    for chance in told:
        raw = logits_after(engine, tokens)
        raw[blocked] = -torch.inf
        assert math.isclose(chance.top[0][1], float(raw.log_softmax(-1).max()), abs_tol=1e-3)
        for token in seen | set(tokens):
            raw[token] = raw[token] * 1.3 if raw[token] < 0 else raw[token] / 1.3
        raw[80] += 1.5
        for token, times in Counter(tokens).items():
            raw[token] -= 0.9 + 0.7 * times
        tokens.append(int(raw.argmax()))
        assert byte_tokenizer(tokenizer, (0,)).decode_bytes([tokens[-1]]) == chance.token
    assert len(tokens) == 8


def test_rules_change_logits_by_the_formula(tokenizer: Any) -> None:
    """Every rule at once on random logits, written out token by token."""
    for number in range(40):
        dice = random.Random(number)
        again, once, each = dice.choice([None, 0.7, 1.6]), dice.uniform(-2, 2), dice.uniform(-2, 2)
        bias = {dice.randrange(440): dice.uniform(-9, 9) for _ in range(4)}
        given = SamplingOptions(
            20, repetition_penalty=again, presence_penalty=once, frequency_penalty=each,
            logit_bias=tuple(bias.items()), min_tokens=3, stop_token_ids=(7,),
        )  # fmt: skip
        state = checked(given).rules
        assert state.begin(tokenizer, {0}) == {0, 7}
        prompt = sorted({dice.randrange(440) for _ in range(9)})
        said = Counter[int]()
        for step in range(6):
            logits = torch.randn(440, generator=torch.Generator().manual_seed(99 * number + step))
            expected = logits.double().tolist()
            factor = 1.2 if again is None else again  # 1.2 is the model's
            for token in {*prompt, *said}:
                expected[token] *= factor if expected[token] < 0 else 1 / factor
            for token, times in said.items():
                expected[token] -= once + each * times
            for token, more in bias.items():
                expected[token] += more
            for token in (0, 7) if step < 3 else ():
                expected[token] = -math.inf
            state.row(logits, torch.tensor(prompt) if step == 0 else None, 1.2)
            assert torch.allclose(logits.double(), torch.tensor(expected).double(), atol=1e-5)
            token = dice.choice([dice.randrange(8, 440), *said])
            said[token] += 1
            state.chosen(token)


def test_ends_of_an_answer(engine: Any) -> None:
    plain, longer, on, biased, stopped = answered(
        engine,
        SamplingOptions(40),
        SamplingOptions(40, min_tokens=30),
        SamplingOptions(40, ignore_eos=True),
        SamplingOptions(5, logit_bias=((70, 100.0),)),
        SamplingOptions(5, logit_bias=((70, 100.0),), stop_token_ids=(70,)),
    )
    assert plain[2].completion_tokens < 30 <= longer[2].completion_tokens
    assert (on[2].reason, on[2].completion_tokens) == ("length", 40)
    assert biased[0] == "bbbbb" and stopped[0] == "" and stopped[2].reason == "stop"
    with pytest.raises(MmfastError, match="stop_token_ids names token 1400"):
        answered(engine, SamplingOptions(stop_token_ids=(1400,)))


def test_state_of_an_answer_is_its_own() -> None:
    given = SamplingOptions(frequency_penalty=1.0)
    assert checked(given).rules is not checked(given).rules and given.rules is None
    assert checked(SamplingOptions(top_k=3, min_p=0.1)).rules is None


@pytest.mark.parametrize("penalty", [0.01, 10.0])
def test_extreme_penalty_leaves_finite_logits(penalty: float) -> None:
    """The least and largest penalty are taken; what lies beyond is refused, not computed."""
    rules = checked(SamplingOptions(repetition_penalty=penalty)).rules
    logits = 1e5 * torch.tensor([1.0, -1.0, 1.0])
    rules.row(logits, torch.tensor([0, 1]), 1.0)
    assert logits.isfinite().all() and logits[2] == 1e5 != logits[0]
    for beyond in (5e-324, penalty**3, float("inf"), float("nan")):
        with pytest.raises(MmfastError, match=r"give 0\.01 to 10"):
            checked(SamplingOptions(repetition_penalty=beyond))


# --- formats ------------------------------------------------------------------------------------


def schema_of(dice: random.Random, depth: int = 2) -> dict[str, Any]:
    """A bounded schema: every text, list and number of it ends."""
    kinds = ["string", "integer", "boolean", "enum", "null"] + ["object", "array"] * (depth > 0)
    kind = dice.choice(kinds)
    if kind == "string":
        return {"type": "string", "maxLength": dice.randint(1, 6)}
    if kind == "integer":
        return {"type": "integer", "minimum": -9, "maximum": dice.randint(10, 500)}
    if kind == "enum":
        return {"enum": dice.sample(["left", "RIGHT", 'a"b', 7, None, "Äé"], 3)}
    if kind == "array":
        return {"type": "array", "items": schema_of(dice, depth - 1), "maxItems": 2}
    if kind != "object":
        return {"type": kind}
    names = dice.sample(["Name", "properties", "n", "Größe", "x y"], dice.randint(1, 3))
    fields = {name: schema_of(dice, depth - 1) for name in names}
    return {"type": "object", "properties": fields, "required": names[:2]}


def test_fifty_schemas_are_followed_token_by_token(tokenizer: Any) -> None:
    """Any token that the grammar takes may come next; what comes out is valid."""
    known = byte_tokenizer(tokenizer, (0,))
    for number in range(50):
        dice = random.Random(number)
        schema = schema_of(dice)
        state, tokens = matcher(json_grammar(schema), known), list[int]()
        while not state.is_stopped():
            bits = np.unpackbits(
                np.frombuffer(state.compute_bitmask(), np.uint8), bitorder="little"
            )
            allowed = np.nonzero(bits[: len(tokenizer)])[0].tolist()
            token = 0 if 0 in allowed else dice.choice(allowed)
            assert state.consume_token(token), (schema, tokens)
            tokens.append(token)
            assert len(tokens) < 2000
        whole = known.decode_bytes([token for token in tokens if token]).decode()
        jsonschema.validate(json.loads(whole), schema)
        refused = matcher(json_grammar(schema), known)
        assert not refused.consume_token(tokenizer.encode("x", add_special_tokens=False)[0])


def test_the_engine_follows_a_schema(engine: Any) -> None:
    schemas = [schema_of(random.Random(seed)) for seed in range(100, 108)]
    given = [
        SamplingOptions(400, temperature=t, seed=3, grammar=json_grammar(schema))
        for schema, t in zip(schemas, [0.0, 1.0] * 4, strict=True)
    ]
    for schema, (said, _, end) in zip(schemas, answered(engine, *given), strict=True):
        assert end.reason == "stop", (schema, said)
        jsonschema.validate(json.loads(said), schema)


def tool(name: str = "move") -> dict[str, Any]:
    to = {"type": "object", "properties": {"to": {"enum": ["left", "right"]}}, "required": ["to"]}
    return {"type": "function", "function": {"name": name, "parameters": to}}


def test_formats_and_tools_of_a_chat(engine: Any) -> None:
    app = app_of(engine, max_tokens=160)
    asked = {"messages": user(QUESTION), "max_tokens": 120}
    schema = tool()["function"]["parameters"]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    said = post(app, **asked, response_format=form).json()["choices"][0]["message"]["content"]
    jsonschema.validate(json.loads(said), schema)
    named = {"type": "function", "function": {"name": "turn"}}
    tools = [tool(), tool("turn")]
    for choice in ("required", named):
        for stream in (False, True):
            reply = post(app, **asked, tools=tools, tool_choice=choice, stream=stream)
            if stream:
                chunks = [c["choices"][0] for c in events_of(reply.text)[:-1]]
                calls = [c["delta"]["tool_calls"][0] for c in chunks if "tool_calls" in c["delta"]]
                assert not [c for c in chunks if c["delta"].get("content")]
                (call,), reason = calls, chunks[-1]["finish_reason"]
            else:
                found = reply.json()["choices"][0]
                (call,), reason = found["message"]["tool_calls"], found["finish_reason"]
                assert found["message"]["content"] is None
            jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
            assert reason == "tool_calls" and call["function"]["name"] in ("move", "turn")
            assert choice != named or call["function"]["name"] == "turn"
    refused = post(app, **asked, tools=tools)
    assert refused.status_code == 400 and "tool_choice" in refused.json()["error"]["message"]
    wrong = post(app, **asked, response_format={**form, "json_schema": {"name": "x", "schema": {"type": "bar"}}})  # fmt: skip  # noqa: E501
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "response_format"


CALL = '<tool_call>\n{"name": "move", "arguments": {"to": "left"}}\n</tool_call>'
LEADS = {"Sure. ": "Sure.", "": None, "\n\n": None, '{"a": 1} ': '{"a": 1}'}
SAID = [(lead + CALL, rest) for lead, rest in LEADS.items()]
SAID.append(('{"name": "move", "parameters": {"to": "left"}}', None))


@pytest.mark.parametrize(("said", "rest"), SAID)
def test_calls_of_the_models_own_accord_are_read(said: str, rest: str | None) -> None:
    pieces = [said[i : i + 5] for i in range(0, len(said), 5)]
    app = app_of(saying(*map(Delta, pieces), Finish("stop", 5, 3)))
    asked = {"messages": user("Go"), "tools": [tool()]}
    found = post(app, **asked).json()["choices"][0]
    call = found["message"]["tool_calls"][0]["function"]
    assert call["name"] == "move" and json.loads(call["arguments"]) == {"to": "left"}
    assert found["message"]["content"] == rest and found["finish_reason"] == "tool_calls"
    chunks = [
        c["choices"][0]["delta"] for c in events_of(post(app, **asked, stream=True).text)[:-1]
    ]
    assert "".join(c.get("content") or "" for c in chunks) == (rest or "")
    assert [c for c in chunks if "tool_calls" in c]
    function = {"type": "function", **tool()["function"]}
    told = {"input": "Go", "tools": [function], "stream": True}
    items = events_of(post(app, "/v1/responses", **told).text)
    kinds = [each["type"] for each in items[-1]["response"]["output"]]
    assert kinds == ["message"] * bool(rest) + ["function_call"]
    for step in ("added", "done"):  # nothing is announced that does not come
        steps = [each["item"]["type"] for each in items if each["type"].endswith(f"item.{step}")]
        assert steps == kinds
    other = post(app, messages=user("Go"), tools=[tool("turn")]).json()["choices"][0]
    assert other["message"]["content"] == said and other["finish_reason"] == "stop"


# --- several answers, probabilities, usage -----------------------------------------------------


def test_several_answers_and_their_probabilities(engine: Any) -> None:
    app = app_of(engine, max_tokens=64)
    case = next(each for each in scene_cases(1, ("describe",)) if each.media == "image")
    scene = {"type": "image_url", "image_url": {"url": data_url(case.file, "image/jpeg")}}
    asked = {"messages": user(scene, text(case.turns[0])), "temperature": 2.0, "seed": 5}
    asked["max_tokens"] = 24
    asked |= {"n": 3, "logprobs": True, "top_logprobs": 2}
    whole = post(app, **asked).json()
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2] and len({*texts}) > 1
    written = Counter[int]()  # in bytes: the last token may be a part of a character
    single = [post(app, **{**asked, "n": 1, "seed": 5 + i}).json() for i in range(3)]
    assert [one["choices"][0]["message"]["content"] for one in single] == texts
    usage = [one["usage"] for one in single]
    assert whole["usage"]["completion_tokens"] == sum(each["completion_tokens"] for each in usage)
    assert whole["usage"]["prompt_tokens"] == usage[0]["prompt_tokens"]
    for choice in whole["choices"]:
        entries = choice["logprobs"]["content"]
        written[choice["index"]] = sum(len(e["bytes"]) for e in entries)
        said = b"".join(bytes(e["bytes"]) for e in entries).decode(errors="replace")
        assert said == choice["message"]["content"]
        assert all(len(e["top_logprobs"]) == 2 and e["logprob"] <= 0 for e in entries)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events_of(post(app, **asked, stream=True, stream_options=options).text)
    said = Counter[int]()
    for chunk in chunks[:-1]:
        choice = chunk["choices"][0]
        entries = (choice["logprobs"] or {}).get("content", [])
        said[choice["index"]] += sum(len(e["bytes"]) for e in entries)
    assert said == written and last == "[DONE]"
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == whole["usage"]["completion_tokens"]
    assert chunks[-1]["usage"]["prompt_tokens"] == usage[0]["prompt_tokens"]


# --- names, unknown parameters, conversations ---------------------------------------------------


def test_unknown_parameters_are_named_or_refused() -> None:
    asked = {"messages": [{**user("Hi?")[0], "mood": 1}], "max_tokns": 3, "store": True}
    reply = post(app_of(saying(*ANSWER)), **asked)
    assert reply.status_code == 200
    assert reply.headers["x-mmfast-ignored"] == "max_tokns, messages[0].mood, store"
    evil = post(app_of(saying(*ANSWER)), messages=user("Hi?"), **{"a\r\nset-cookie: é": 1})
    assert evil.status_code == 200 and "set-cookie" not in evil.headers
    spaced = post(app_of(saying(*ANSWER)), messages=user("Hi?"), **{" mood\x02 ": 1})
    assert spaced.headers["x-mmfast-ignored"] == "mood"  # h11 drops a connection for a space
    assert "x-mmfast-ignored" not in post(app_of(saying(*ANSWER)), messages=user("Hi?")).headers
    picture = image_part()
    picture["image_url"]["detail"] = "low"
    shown = post(app_of(saying(*ANSWER)), messages=user(picture, text("Hi?")))
    assert shown.headers["x-mmfast-ignored"] == "messages[0].content[0].image_url.detail"
    strict = post(app_of(saying(*ANSWER), strict=True), **asked)
    assert strict.status_code == 400 and strict.json()["error"]["code"] == "unknown_parameter"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"stop": [*"abcde"]}, "at most 4 items"),
        ({"messages": user()}, "at least 1 item"),
        ({"top_logprobs": 2}, "top_logprobs=2 needs logprobs=true"),
    ],
)
def test_what_is_wrong_is_said_of_the_type_that_was_sent(wrong: Any, words: str) -> None:
    reply = post(app_of(saying(*ANSWER)), **{"messages": user("Hi?"), **wrong})
    assert reply.status_code == 400 and words in reply.json()["error"]["message"]


@pytest.mark.parametrize("name", ["reduce", "cache", "frames"])
def test_a_parameter_of_ours_in_the_wrong_place_is_refused(name: str) -> None:
    reply = post(app_of(saying(*ANSWER)), messages=user("Hi?"), **{name: "evs:0.5"})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == name
    assert f'send "mmfast": {{"{name}": …}}' in reply.json()["error"]["message"]


def test_names_of_the_model() -> None:
    for name in (MODEL, "mmfast", "gpt-realtime"):
        document = {"messages": user("Hi?"), "model": name}
        assert post(app_of(saying(*ANSWER)), **document).status_code == 200
        only = post(app_of(saying(*ANSWER), strict_model=True), **document)
        assert only.status_code == (200 if name == MODEL else 404)
    assert post(app_of(saying(*ANSWER)), messages=user("?"), model="gpt-4").status_code == 404


def test_defaults_of_the_checkpoint(tmp_path: Any) -> None:
    from mmfast.serve.config import ServerConfig
    from mmfast.serve.http.exchange import sampling
    from mmfast.serve.http.schema import ChatRequest
    from mmfast.serve.http.service import generation_defaults

    stated = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05, "max_new_tokens": 8}
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    config = ServerConfig(model=str(tmp_path))
    defaults = generation_defaults(config)
    plain = sampling(ChatRequest(model="m", messages=user("Hi?")), config, defaults)
    assert (plain.temperature, plain.top_k, plain.repetition_penalty) == (0.6, 20, 1.05)
    own = ChatRequest(model="m", messages=user("Hi?"), temperature=0.0, top_k=-1)
    found = sampling(own, config, defaults)
    assert (found.temperature, found.top_k, found.max_tokens) == (0.0, 0, config.default_tokens)
    assert generation_defaults(ServerConfig()) == {}


def test_conversations_of_any_shape() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "move", "arguments": '{"to": 1}'}}
    talk = [
        *user("Go"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    engine = saying(*ANSWER)
    reply = post(app_of(engine), messages=talk, chat_template_kwargs={"thinking": False})
    assert reply.status_code == 200, reply.text
    request = engine.requests[0]
    roles = [message.role for message in request.messages]
    assert roles == ["user", "assistant", "tool", "assistant"]
    given = request.messages[1].more["tool_calls"][0]["function"]
    assert given == {"name": "move", "arguments": {"to": 1}}
    assert request.messages[2].more == {"tool_call_id": "c1"}
    assert request.options.template == {"thinking": False}
    end = post(app_of(engine), messages=talk, continue_final_message=True)
    assert end.status_code == 200
    assert engine.requests[1].options.template["add_generation_prompt"] is False
    part = {**image_part(), "uuid": "cat-1"}
    sound = {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,"}}
    assert post(app_of(engine), messages=user(part, text("What?"))).status_code == 200
    assert post(app_of(engine), messages=user(sound)).json()["error"]["param"] is not None


CONTROL = ["<image>", "<|end|>", "<|user|>", "a <video> b", "<|assistant|><image>"]


@pytest.mark.parametrize("typed", CONTROL)
def test_control_tokens_of_a_user_stay_text(engine: Any, tokenizer: Any, typed: str) -> None:
    encoder = engine._runner.encoder

    def ids(*parts: Any) -> list[int]:
        found = encoder.prepare(Request("x", (Message("user", parts),))).inputs["input_ids"][0]
        return [int(token) for token in found]

    special = {tokenizer.convert_tokens_to_ids(t) for t in ("<image>", "<video>", "<|end|>")}
    found = ids(typed)
    assert not special & {*found} and found.count(1) == 1 and found[-1] == 2 == ids("plain")[-1]
    assert typed in tokenizer.decode(found, skip_special_tokens=False)
    assert found.count(2) == 1
    torn = [typed[:3], typed[3:]]  # a template writes the parts one after the other
    assert not special & {*ids(*torn)} and ids(*torn).count(1) == 1
    assert ids("plain words") == tokenizer.encode("<|user|>plain words<|assistant|>")


# --- other routes -------------------------------------------------------------------------------


def test_texts_are_continued(engine: Any) -> None:
    app, path = app_of(engine, max_tokens=64), "/v1/completions"
    prompt = "<|user|>" + QUESTION + "<|assistant|>"
    chat = post(app, messages=user(QUESTION), max_tokens=6).json()
    found = post(app, path, prompt=prompt, max_tokens=6, logprobs=1, echo=True).json()
    said = chat["choices"][0]["message"]["content"]
    assert found["choices"][0]["text"] == prompt + said
    assert "".join(found["choices"][0]["logprobs"]["tokens"]) == said
    for how in ({"echo": True}, {"n": 2}):  # tokens stand where text_offset says, streamed too
        asked = {"prompt": prompt, "max_tokens": 6, "logprobs": 1, **how}
        whole = post(app, path, **asked).json()["choices"]
        parts = events_of(post(app, path, stream=True, **asked).text)[:-1]
        for choice in whole:
            own = [each for part in parts for each in part["choices"]]
            told = [each["logprobs"] for each in own if each["index"] == choice["index"]]
            starts = choice["logprobs"]["text_offset"]
            assert [at for each in told for at in (each or {}).get("text_offset", ())] == starts
            tokens = zip(starts, choice["logprobs"]["tokens"], strict=True)
            assert all(choice["text"][at:].startswith(token) for at, token in tokens)
    many = post(app, path, prompt=[prompt, "two"], n=2, max_tokens=3).json()
    assert [c["index"] for c in many["choices"]] == [0, 1, 2, 3]
    assert many["choices"][0]["text"] == many["choices"][1]["text"]
    streamed = events_of(post(app, path, prompt=prompt, max_tokens=6, stream=True).text)
    assert "".join(c["choices"][0]["text"] for c in streamed[:-1]) == said
    for trace in (found["mmfast"], streamed[-2]["mmfast"]):
        assert [row["stage"] for row in trace["rows"]][-2:] == ["prefill", "decode"]
    by_ids = engine._runner.processor.tokenizer.encode(prompt)
    assert post(app, path, prompt=by_ids, max_tokens=6).json()["choices"][0]["text"] == said
    for wrong in ({"prompt": ""}, {"prompt": [9999]}, {"prompt": "a", "suffix": "b"}, {}):
        assert post(app, path, **wrong).status_code == 400


def test_responses_are_the_chats_answers(engine: Any) -> None:
    app, path = app_of(engine, max_tokens=64), "/v1/responses"
    said = post(app, messages=user(QUESTION)).json()["choices"][0]["message"]["content"]
    whole = post(app, path, input=QUESTION, reasoning={"effort": "low"})
    assert whole.json()["output"][0]["content"][0]["text"] == said
    assert whole.headers["x-mmfast-ignored"] == "reasoning"
    found = events_of(post(app, path, input=QUESTION, stream=True).text)
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    deltas = [e["delta"] for e in found if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == said == found[-1]["response"]["output"][0]["content"][0]["text"]
    function = {"type": "function", **tool()["function"]}
    forced = post(app, path, input=QUESTION, tools=[function], tool_choice="required").json()
    assert forced["output"][0]["type"] == "function_call"
    call = {"type": "function_call", "call_id": "c", "name": "move", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "ok"}
    assert post(app, path, input=[*user(QUESTION), call, result]).status_code == 200
    cut = post(app, path, input=QUESTION, max_output_tokens=1).json()
    assert cut["status"] == "incomplete"
    assert post(app, path, input=[{"type": "file"}]).status_code == 400
    kept = post(app, path, input="a", previous_response_id="r").json()["error"]
    assert kept["param"] == "previous_response_id" and "send the conversation" in kept["message"]


def test_responses_name_what_has_no_effect() -> None:
    asked = {"input": QUESTION, "top_logprobs": 2}
    for more, header in ({}, "top_logprobs"), ({"include": ["message.output_text.logprobs"]}, None):
        reply = post(app_of(saying(*ANSWER)), "/v1/responses", **asked, **more)
        assert reply.status_code == 200 and reply.headers.get("x-mmfast-ignored") == header


@pytest.mark.parametrize(
    "wrong",
    [
        {"include": 5},
        {"include": [["message.output_text.logprobs"]]},
        {"input": [{"role": "user", "content": [{"type": []}]}]},
        {"input": [{"role": "user", "content": [{"type": {}, "text": "a"}]}]},
        {"text": {"format": 5}},
        {"n": 3},  # one answer would come back, and three be paid
        {"messages": [{"role": "user", "content": "another question"}]},  # in place of the input
    ],
)
def test_responses_refuse_in_one_line(wrong: dict[str, Any]) -> None:
    reply = post(app_of(saying(*ANSWER)), "/v1/responses", **{"input": QUESTION, **wrong})
    assert reply.status_code == 400 and next(iter(wrong)) in reply.json()["error"]["param"]


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ({"type": "input_file", "file_data": "x"}, "unknown input[0].content[1].type 'input_file'"),
        ({"type": "input_image", "file_id": "x"}, "input[0].content[1].image_url"),
        ({"type": "input_text"}, "input[0].content[1].text"),
    ],
)
@pytest.mark.parametrize("more", [{}, {"instructions": "Be brief."}])
def test_responses_name_the_part_that_is_wrong(
    part: dict[str, Any], told: str, more: dict[str, Any]
) -> None:
    words = {"type": "input_text", "text": QUESTION}
    given = [{"role": "user", "content": [words, part]}]
    reply = post(app_of(saying(*ANSWER)), "/v1/responses", input=given, **more)
    error = reply.json()["error"]
    assert reply.status_code == 400 and "\n" not in error["message"]
    assert error["message"].startswith(told), error
    assert error["param"].startswith("input[0].content[1].")


def test_responses_name_what_has_no_effect_in_their_texts_options() -> None:
    app, more = app_of(saying(*ANSWER)), {"text": {"verbosity": "low"}, "include": ["a.b"]}
    reply = post(app, "/v1/responses", input=QUESTION, **more)
    assert reply.headers["x-mmfast-ignored"] == "include, text.verbosity"
    url = image_part()["image_url"]["url"]
    for detail, told in (("original", True), ("auto", False)):
        picture = {"type": "input_image", "image_url": url, "detail": detail}
        asked = [{"role": "user", "content": [picture, {"type": "input_text", "text": "Hi?"}]}]
        reply = post(app, "/v1/responses", input=asked)
        assert reply.status_code == 200 and ("x-mmfast-ignored" in reply.headers) is told


def test_a_recording_is_written_down() -> None:
    app = app_of(saying(*ANSWER), Hum())

    async def go(**form: Any) -> Any:
        async with client_of(app) as client:
            files = {"file": ("a.wav", wav(0.5), "audio/wav")}
            return await client.post("/v1/audio/transcriptions", files=files, data=form)

    found = asyncio.run(go(model="whisper-1")).json()
    assert found["text"] == "Which way does the red circle move?"
    plain = asyncio.run(go(model="whisper-1", response_format="text"))
    assert plain.text.strip() == found["text"]
    assert asyncio.run(go(model="whisper-1", response_format="srd")).status_code == 400
    assert asyncio.run(go(model="gpt-4")).status_code == 404


def test_an_answer_that_is_cut_by_the_end_of_the_server_says_so() -> None:
    app = app_of(saying(Delta("to"), Failure("the engine is closed", 503)))
    service = app.state.service
    service.stopping = True
    assert post(app, messages=user("Hi?")).json()["error"]["code"] == "stopping"
    service.stopping = False
    engine = service._engine.now()

    def say(request: Request, emit: Any) -> None:
        emit(Delta("to"))
        service.stop()
        emit(Failure("the engine is closed", 503))

    engine._say = say
    found = events_of(post(app, messages=user("Hi?"), stream=True).text)
    assert found[-1]["error"]["code"] == "stopping" and "[DONE]" not in found
