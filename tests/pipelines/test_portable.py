"""Pipelines of speech go to another process; what belongs to its process says what to do there."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import mmfast
from mmfast.core.errors import MmfastError
from mmfast.core.locks import WholeLock
from mmfast.decoding.simultaneous import write_policy
from mmfast.streams.reuse.store import ReuseStore


def sent(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def test_pipelines_of_speech_go_to_another_process_after_a_call() -> None:
    say, chat = mmfast.pipeline("text-to-speech"), mmfast.pipeline("speech-chat")
    spoken = say("what is two plus two")
    assert torch.equal(sent(say)("what is two plus two").pcm, spoken.pcm)
    answer = chat(spoken)
    assert torch.equal(sent(chat)(spoken).pcm, answer.pcm) and answer.text
    for task, model in (("speech-to-text", None), ("speech-translation", None),
                        ("speech-translation", "tiny-interleaved")):  # fmt: skip
        pipe = mmfast.pipeline(task, model)
        found = pipe(spoken)
        assert sent(pipe)(spoken).text == found.text != "" and sent(found).text == found.text


@pytest.mark.parametrize("spec", ["wait:2", "confidence:0.9", "agreement:2", "learned:0.9"])
def test_policies_of_writing_are_the_same_in_another_process(spec: str) -> None:
    policy, found = write_policy(spec), [["a", "b", "c"], ["a", "b", "d"]]
    mine = [policy.count(found, [0.95, 0.91, 0.2], read, 0) for read in range(5)]
    theirs = [sent(policy).count(found, [0.95, 0.91, 0.2], read, 0) for read in range(5)]
    assert mine == theirs and any(mine)


def test_what_belongs_to_its_process_says_what_to_do(tmp_path: Path) -> None:
    watching = mmfast.pipeline("video-stream")
    with watching.open() as session, mmfast.pipeline("speech-chat").open() as talk:
        for thing, told in (
            (watching, "make it in the other one"),
            (session, r"save\(\) it and restore\(\) it"),
            (talk, r"open\(\) another one"),
            (ReuseStore(folder=tmp_path), r"open its folder in the other one"),
        ):
            with pytest.raises(TypeError, match=told):
                pickle.dumps(thing)
    asking = mmfast.pipeline("video-qa", reuse="prefix")
    with pytest.raises(MmfastError, match="leave reuse= out of copies"):
        pickle.dumps(asking)


def test_a_copy_of_a_lock_is_free() -> None:
    lock = WholeLock()
    with lock:
        assert all(other._lock is not lock._lock for other in (sent(lock), copy.deepcopy(lock)))
