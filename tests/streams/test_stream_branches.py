"""Branches that read the window of their stream in place: bit for bit what a copy would answer."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from stream_checks import FAMILIES, N_FRAME, frame, model_of, same, state, stream, text
from torch import Tensor

from mmfast.bench.suites.stream import copied
from mmfast.bench.timing import OperationCount
from mmfast.caches.plan import plan_cache
from mmfast.core.errors import MmfastError
from mmfast.ops.stream_cache import RowBuffer
from mmfast.streams.engine import Branch, Engine

RECALLING = "sink:6+window:40+rekv:2"
CHOOSING = "sink:6+window:40+rekv:2?every=1"  # again at every token
SPECS = (None, "sink:6+window:40", RECALLING, CHOOSING, "sink:6+window:40+keynorm:6+rekv:2")


class Rows:
    """Rows of one owner as a list, to which nobody else has access."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows  # [3, n]

    def keep(self, spans: list[tuple[int, int]]) -> None:
        self.rows = torch.cat([self.rows[:, a:b] for a, b in spans], 1)


@pytest.mark.parametrize("seed", range(30))
def test_buffers_of_one_tensor_are_as_if_each_had_its_own(seed: int) -> None:
    random_, fresh = random.Random(seed), iter(range(10**6))
    stream_ = RowBuffer(40, bounded=bool(seed % 2))
    owners: list[tuple[RowBuffer, Rows]] = [(stream_, Rows(torch.zeros(3, 0)))]

    def numbers(n: int) -> Tensor:
        return torch.tensor([next(fresh) for _ in range(3 * n)], dtype=torch.float32).view(3, n)

    for _ in range(120):
        buffer, mine = random_.choice(owners)
        act, n = random_.choice(["write", "write", "revise", "keep", "fork", "end"]), len(owners)
        length = mine.rows.shape[1]
        if act == "write":
            new = numbers(random_.randint(1, 9))
            buffer.write(*new[:, None, :, None])
            buffer.length += new.shape[1]
            mine.rows = torch.cat([mine.rows, new], 1)
        elif act == "revise" and length:
            at = random_.randrange(length)
            new = numbers(random_.randint(1, min(5, length - at)))
            buffer.revise(1, new[1][None, :, None], at)
            mine.rows = mine.rows.clone()
            mine.rows[1, at : at + new.shape[1]] = new[1]
        elif act == "keep" and length > 20 and buffer is stream_:
            spans = [(0, 4), (random_.randint(5, 12), length)]
            buffer.keep(spans)
            mine.keep(spans)
        elif act == "fork" and n < 5:
            owners.append((buffer.fork(random_.choice([0, 8, 64])), Rows(mine.rows)))
        elif act == "end" and buffer is not stream_:
            owners.remove((buffer, mine))
            del buffer
            continue
        some, theirs = random_.choice(owners)
        assert some.length == theirs.rows.shape[1]
        if some.length:
            assert torch.equal(some.read(slice(None))[:, 0, :, 0], theirs.rows)


def asked_while_watching(engine: Engine, family: str, spec: str | None, seed: int) -> list[Any]:
    """Logits of four branches that take turns with frames, one of which is kept; then the state."""
    dice, model = random.Random(seed), engine.model
    memory, found = engine.memory(plan_cache(spec)), list[Any]()
    branches: list[tuple[Branch, list[int]]] = []
    for i, piece in enumerate(stream(family, model, 20, seed)):
        engine.append(memory, piece)
        if i % 5 == 2:
            branch = engine.branch(memory)
            found.append(branch.extend(text(family, model, 6, i)))
            branches.append((branch, [int(found[-1].argmax())]))
        for branch, said in branches:
            for _ in range(dice.randint(0, 2)):
                found.append(branch.token(said[-1]))
                said.append(int(found[-1].argmax()))
        if i == 15:
            branches.pop(0)[0].keep()
        if i == 18:
            branches.pop()
        found.append(engine.branch(memory).extend(text(family, model, 3, 50)))
    return [*found, state(memory)]


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_a_copy(
    family: str, spec: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(model_of(family))
    shared = asked_while_watching(engine, family, spec, 3)
    monkeypatch.setattr(RowBuffer, "fork", copied)
    assert same(shared, asked_while_watching(engine, family, spec, 3))
    engine.close()


@pytest.mark.parametrize("spec", [None, RECALLING, CHOOSING])
def test_answers_in_threads_while_frames_come(
    spec: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = "qwen2_5_vl"
    model = model_of(family)
    engine, pieces = Engine(model), stream(family, model, 24)
    alone, memory = engine.memory(plan_cache(spec)), engine.memory(plan_cache(spec))
    wrong: list[int] = []

    def answer(branch: Branch, logits: Tensor) -> list[Tensor]:
        found = [logits]
        for _ in range(8):
            found.append(branch.token(int(found[-1].argmax())))
        return found

    def compare(branch: Branch, logits: Tensor, expected: list[Tensor], number: int) -> None:
        if not same(answer(branch, logits), expected):
            wrong.append(number)

    threads = []
    for number, piece in enumerate(pieces):
        engine.append(alone, piece)
        engine.append(memory, piece)
        if number % 3 == 2:
            question = text(family, model, 5, number)
            with monkeypatch.context() as patch:
                patch.setattr(RowBuffer, "fork", copied)
                copy = engine.branch(alone)
            branch = engine.branch(memory)
            expected = answer(copy, copy.extend(question))
            args = (branch, branch.extend(question), expected, number)
            thread = threading.Thread(target=compare, args=args)
            threads.append(thread)
            thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and same(state(alone), state(memory))
    engine.close()


def test_who_is_left_alone_may_write_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that leaves a tensor has read all it needs of it when the other one is alone."""
    buffer, rows = RowBuffer(64), torch.arange(30.0)[None, :, None]
    buffer.write(rows)
    buffer.length = 30
    fork, leave = buffer.fork(8), RowBuffer._alone_with

    def then_write(self: RowBuffer, data: Tensor) -> None:
        leave(self, data)
        assert fork.alone
        fork.write(torch.full((1, 4, 1), -1.0), at=10)

    with monkeypatch.context() as patch:
        patch.setattr(RowBuffer, "_alone_with", then_write)
        buffer.keep([(0, 5), (8, 30)])
    assert buffer.read(0).flatten().tolist() == [*range(5), *range(8, 30)]


@pytest.mark.parametrize("who", ["stream", "branch"])
def test_both_go_on_after_an_error_in_the_middle(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = "qwen3_vl"
    model = model_of(family)
    engine, spec = Engine(model), plan_cache(RECALLING)
    pieces, question = stream(family, model, 14), text(family, model, 6, 1)
    alone, memory = engine.memory(spec), engine.memory(spec)
    for piece in pieces[:-1]:
        engine.append(alone, piece)
        engine.append(memory, piece)
    with monkeypatch.context() as patch:
        patch.setattr(RowBuffer, "fork", copied)
        expected = engine.branch(alone)
        said = [expected.extend(question), expected.token(5)]
    branch = engine.branch(memory)
    found = [branch.extend(question)]
    layer = model.get_decoder().layers[2]
    hook = layer.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        if who == "stream":
            engine.append(memory, pieces[-1])
        else:
            branch.token(5)
    hook.remove()
    if who == "stream":
        engine.append(memory, pieces[-1])
        engine.append(alone, pieces[-1])
    found.append(branch.token(5))
    assert same(found, said)
    assert same(state(alone), state(memory))
    engine.close()


def test_a_branch_that_failed_while_it_read_leaves_the_stream_as_it_was() -> None:
    family = "qwen2_5_vl"
    model = model_of(family)
    engine = Engine(model)
    memory = engine.memory(plan_cache(RECALLING))
    for piece in stream(family, model, 14):
        engine.append(memory, piece)
    before = state(memory)
    branch = engine.branch(memory)
    hook = model.get_decoder().layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        branch.extend(text(family, model, 6, 1))
    hook.remove()
    with pytest.raises(MmfastError, match="open another one"):
        branch.token(3)
    assert same(before, state(memory))
    engine.close()


@contextmanager
def copies() -> Iterator[list[int]]:
    """Bytes that the buffers copy meanwhile, besides writing what is new."""
    found, inside = list[int](), list[str]()

    def counting(name: str) -> Any:
        method = getattr(RowBuffer, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if inside:
                return method(*args, **kwargs)
            inside.append(name)
            with OperationCount() as seen:
                result = method(*args, **kwargs)
            found.append(seen.copied)
            inside.clear()
            return result

        return patch.object(RowBuffer, name, call)

    with counting("fork"), counting("keep"), counting("claim"), counting("_grow"):
        yield found


@pytest.mark.parametrize("bounded", [True, False], ids=["window", "unbounded"])
@pytest.mark.parametrize("frames", [0, 1, 3])
def test_what_a_question_copies_does_not_depend_on_the_window(frames: int, bounded: bool) -> None:
    family = "llava_onevision"
    model = model_of(family)
    engine, question = Engine(model), text(family, model, 6, 1)

    def bytes_copied(window: int) -> tuple[int, int]:
        memory = engine.memory(plan_cache(f"sink:6+window:{window}") if bounded else None)
        engine.append(memory, text(family, model, 6, 0))
        for i in range(window // N_FRAME + 2):
            engine.append(memory, frame(family, model, i))
        engine.branch(memory)  # lets a buffer without bound grow
        with copies() as alone:
            for i in range(frames):
                engine.append(memory, frame(family, model, i))
        with copies() as asked:
            branch = engine.branch(memory)
            branch.extend(question)
            for i in range(frames):
                engine.append(memory, frame(family, model, i))
                branch.token(3)
        window = sum(b.read(slice(None)).nbytes for b in memory.buffers)
        return sum(asked) - sum(alone), window

    (small, _), (large, held) = bytes_copied(120), bytes_copied(960)
    own = held / 960 * (len(question.embeds) + frames)
    assert large <= small and large <= own * (1 + 4 * frames)
    assert large < held / 10 and (frames or not large)
    engine.close()


def test_a_window_that_moves_on_is_left_to_the_branch() -> None:
    family = "llava_onevision"
    model = model_of(family)
    engine = Engine(model)
    memory = engine.memory(plan_cache("sink:6+window:40"))
    for piece in stream(family, model, 14):
        engine.append(memory, piece)
    branch = engine.branch(memory)
    branch.extend(text(family, model, 6, 1))
    tensors = [buffer.data for buffer in memory.buffers]
    assert all(a.data is b for a, b in zip(branch.buffers, tensors, strict=True))
    engine.append(memory, frame(family, model, 50))
    assert not any(a.data is b for a, b in zip(memory.buffers, tensors, strict=True))
    assert all(buffer.alone for buffer in (*branch.buffers, *memory.buffers))
    engine.close()
