"""Restored sessions: the quotas, the archive and the model they were saved with."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from snapshot_steps import FAMILY, MEMORY, feed, opened
from stream_tools import answer_logits, pipe_of, shared_pipe, watcher

import mmfast
from mmfast.core.errors import MmfastError
from mmfast.streams import stream

QUESTION = "what moves?"


def _saved(root: Path, frames: int = 60, **options: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Save a session whose archive is nearly all on disk; return its answer and its figures."""
    sizes: dict[str, Any] = {"host_bytes": "4KB", "disk_bytes": "100MB", "folder": root / "disk"}
    with shared_pipe(FAMILY).open(MEMORY, **sizes | options) as session:
        feed(session, 0, frames)
        session.save(root / "saved")
        return answer_logits(session, QUESTION), session.stats()["memory"]["archive"]


def test_restore_brings_back_quotas_and_archive(tmp_path: Path) -> None:
    logits, stored = _saved(tmp_path)
    assert stored["blocks"]["disk"] > 20
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = shared_pipe(FAMILY).restore(tmp_path / "saved")
    with again:
        assert again.stats()["memory"]["archive"]["blocks"] == stored["blocks"]
        assert torch.equal(answer_logits(again, QUESTION), logits)
        feed(again, 60, 70)
        assert again.stats()["memory"]["archive"]["blocks"]["disk"] > stored["blocks"]["disk"]
        again.save(tmp_path / "twice")
    with shared_pipe(FAMILY).restore(tmp_path / "twice") as third:
        assert third.stream.quotas == again.stream.quotas


def test_blocks_without_room_are_counted_in_a_warning(tmp_path: Path) -> None:
    _, stored = _saved(tmp_path, 20)
    many = sum(stored["blocks"].values())
    with pytest.warns(UserWarning, match=f"{many} stored blocks of .* found no room") as caught:
        again = shared_pipe(FAMILY).restore(tmp_path / "saved", host_bytes=0, disk_bytes=0)
    assert "\n" not in str(caught[0].message)
    again.close()


def _swap(kept: Path, foreign: Path) -> None:
    """Put the blocks of one session in the place of another's with the same numbers."""
    theirs = {file.name: file.read_bytes() for file in foreign.glob("*/*.block")}
    mine = [file for file in kept.glob("*/*.block") if file.name in theirs]
    assert len(mine) >= 6
    for file in mine:
        assert file.read_bytes() != theirs[file.name]
        file.unlink()  # a saved session has links to it
        file.write_bytes(theirs[file.name])


def test_blocks_of_another_session_are_noticed(tmp_path: Path) -> None:
    """They are whole, and have the right numbers and shapes."""
    with opened(tmp_path / "a") as session, opened(tmp_path / "b") as other:
        feed(session, 0, 14)
        feed(other, 20, 34)
        _swap(tmp_path / "a", tmp_path / "b")
        answer_logits(session, QUESTION)
        stored = session.stats()["memory"]["archive"]
    assert stored["corrupt"] >= 1 and any("another session" in line for line in stored["reports"])


def test_saved_blocks_of_another_session_are_noticed(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 20)):
        with opened(tmp_path / f"disk-{name}") as session:
            feed(session, first, first + 14)
            session.save(tmp_path / name)
    for file in (tmp_path / "a").glob("gen-*/file-*"):
        file.unlink()
        file.write_bytes((tmp_path / "b" / file.parent.name / file.name).read_bytes())
    with shared_pipe(FAMILY).restore(tmp_path / "a") as again:
        answer_logits(again, QUESTION)
        stored = again.stats()["memory"]["archive"]
    assert stored["corrupt"] >= 1 and any("another session" in line for line in stored["reports"])


@pytest.mark.timeout(60)
def test_a_pipe_in_place_of_a_block_does_not_hang(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        feed(session, 0, 14)
        for file in tmp_path.glob("*/*.block"):
            file.unlink()
            os.mkfifo(file)
        assert torch.isfinite(answer_logits(session, QUESTION)).all()
        stored = session.stats()["memory"]["archive"]
    assert any("is no plain file" in line for line in stored["reports"])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["manifest.json", "tensors-00000.safetensors", "file-000000"])
def test_a_pipe_in_a_saved_session_does_not_hang(tmp_path: Path, name: str) -> None:
    with opened(tmp_path / "disk") as session:
        for n in range(2):
            feed(session, 7 * n, 7 * n + 7)
            session.save(tmp_path / "saved")
    file = tmp_path / "saved" / "gen-00000002" / name
    file.unlink()
    os.mkfifo(file)
    with pytest.warns(UserWarning, match="generation 2 is damaged .*; generation 1 is loaded"):
        shared_pipe(FAMILY).restore(tmp_path / "saved").close()


def _copied() -> Any:
    """Return a copy of the shared model."""
    shared = watcher(FAMILY).model
    model = type(shared)(shared.config).eval()
    model.load_state_dict(shared.state_dict())
    return model


def _changed(layer: str) -> Any:
    """Return a pipeline on the shared model with the last number of one layer changed."""
    model = (_copied(), watcher(FAMILY).processor)
    with torch.no_grad():
        dict(model[0].named_parameters())[layer].view(-1)[-1] += 1e-3
    return mmfast.pipeline("video-stream", model=model, fps=2.0, sized_for=8)


def test_a_session_of_other_weights_is_refused(tmp_path: Path) -> None:
    _saved(tmp_path, 2)
    names = [name for name, _ in watcher(FAMILY).model.named_parameters()]
    for layer in (names[0], names[len(names) // 2], names[-1]):
        with pytest.raises(MmfastError, match=r"another model .*\(weights '") as caught:
            _changed(layer).restore(tmp_path / "saved")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [{"reduce": "dtd:0.5"}, {"gate": 0.01}, {"system": "Be brief."}],
    ids=["reduce", "gate", "system"],
)
def test_a_session_of_other_options_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    _saved(tmp_path, 2)
    (name,) = options
    with pytest.raises(MmfastError, match=rf"other options \({name} None, here .*") as caught:
        pipe_of(FAMILY, **options).restore(tmp_path / "saved")
    assert "\n" not in str(caught.value)


def test_weights_are_read_again_only_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = _copied(), list[int]()
    monkeypatch.setattr(stream, "_crc", lambda x, crc=stream._crc: read.append(1) or crc(x))
    weights = stream.WeightChecksum(model)
    first = weights.value()
    many = len(read)
    assert many == len(model.state_dict()) and weights.value() == first and len(read) == many
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1
    changed = weights.value()
    assert changed != first and len(read) == 2 * many
    head = list(model.modules())[-1]
    name, old = next(iter(head.named_parameters(recurse=False)))
    setattr(head, name, torch.nn.Parameter(old.detach() + 1))
    assert weights.value() not in (first, changed)
