"""What packets tell, on packets made by hand, and plans over made-up streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest

from mmfast.frontends.container import Header
from mmfast.frontends.source import Mismatch
from mmfast.frontends.video.packets import (
    Facts,
    PacketGroup,
    all_groups,
    groups,
    jobs,
    slices,
    unit_reader,
    with_wanted,
)

SPS, PPS, OTHER_PPS = b"\x67sequence", b"\x68picture", b"\x68another"
AVCC = b"\1\x64\0\x1f\xff\xe1" + b"\0\x09" + SPS + b"\1\0\x08" + PPS
HVCC = b"\1" + bytes(20) + b"\xff" + b"\x42\x01sequence"


class Made(bytes):
    """A packet: bytes with a key frame flag."""

    is_keyframe = False


def packet(*units: bytes, key: bool = False) -> Any:
    made = Made(b"".join(len(u).to_bytes(4, "big") + u for u in units))
    made.is_keyframe = key
    return made


def header(codec: str, extra: bytes) -> Header:
    return Header(codec, "yuv420p", Fraction(1, 30), Fraction(30), 0, True, True, extra)


def avc(*units: bytes, key: bool = False) -> Facts:
    look = unit_reader(header("h264", AVCC))
    assert look is not None
    return look(packet(*units, key=key))


def hevc(*units: bytes, key: bool = False) -> Facts:
    look = unit_reader(header("hevc", HVCC))
    assert look is not None
    return look(packet(*units, key=key))


IDR, P, B, PART = b"\x65slice", b"\x41slice", b"\x01slice", b"\x22slice"
RECOVERY = b"\x06\x06\x01\xc4\x80"


def test_avc_pictures() -> None:
    assert avc(IDR, IDR, key=True) == Facts(entry=True, fresh=True)
    assert avc(P) == avc(b"\x09\xf0", P) == Facts(entry=False, fresh=False)
    assert avc(B, B).disposable and not avc(B, P).disposable and not avc(PART).disposable
    assert not avc(RECOVERY).disposable and not avc().disposable
    assert not avc(IDR, P, key=True).entry


def test_avc_recovery_points() -> None:
    assert avc(RECOVERY, P, key=True) == Facts(entry=True, fresh=False)
    assert not avc(RECOVERY, P).entry  # the file does not call it a key frame
    text = b"\x06\x05\xff\x03" + b"x" * 258 + RECOVERY[1:]  # behind a message of 258 bytes
    escaped = b"\x06\x05\x05\0\0\3\1ab" + RECOVERY[1:]  # five bytes, one more to keep them apart
    assert avc(text, P, key=True).entry and avc(escaped, P, key=True).entry
    for wait in (
        b"\x06\x06\x01\x44\x80",
        b"\x06\x06\x01\x84\x80",
        b"\x06\x04\x01\xc4\x80",
        b"\x06",
    ):
        assert not avc(wait, P, key=True).entry, wait  # frames to wait for, inexact, another kind


def test_parameters_in_the_stream() -> None:
    assert avc(SPS, PPS, IDR, key=True) == Facts(entry=True, fresh=True, sets=True)
    assert avc(OTHER_PPS, B).strange and not avc(OTHER_PPS, B).sets
    assert avc(b"\x6fsubset", P).sets and avc(b"\x74extension", P).strange
    assert not hevc(b"\x42\x01sequence", b"\x26\x01s").strange and hevc(b"\x42\x01other").strange
    assert hevc(b"\x03\x01s").strange and hevc(b"\x02\x09s").strange  # of another layer


def test_hevc_pictures() -> None:
    assert hevc(b"\x26\x01s", key=True) == hevc(b"\x28\x01s", key=True) == Facts(True, True)
    assert hevc(b"\x2a\x01s", key=True) == Facts(entry=True, fresh=False)
    assert hevc(b"\x00\x01s").disposable and hevc(b"\x10\x01s").disposable
    assert not hevc(b"\x02\x01s").disposable and not hevc(b"\x12\x01s").disposable
    assert hevc(b"\x00\x02s").layer == 1


def test_other_streams() -> None:
    assert unit_reader(header("h264", b"\0\0\0\1\x67")) is None  # start codes: nothing is known
    assert unit_reader(header("hevc", b"")) is None
    look = unit_reader(header("vp9", b""))
    assert look is not None and look(packet(b"x", key=True)) == Facts(True, True)
    assert avc(b"") == avc() and not avc(b"\x41"[:0], P).strange


KEY, OPEN = Facts(True, True), Facts(True, False)
REF, SPARE = Facts(False, False), Facts(False, False, disposable=True)


def stream(*parts: tuple[int | None, Facts]) -> list[tuple[int | None, bool, Facts]]:
    return [(pts, True, facts) for pts, facts in parts]


CLOSED = stream((0, KEY), (3, REF), (1, SPARE), (2, SPARE), (4, KEY), (6, REF), (5, SPARE))
OPENED = stream(
    (0, KEY), (3, REF), (1, SPARE), (2, SPARE), (6, OPEN), (4, REF), (5, SPARE), (7, REF)
)


def plan(packets: Sequence[tuple[int | None, bool, Facts]], *wanted: int) -> list[Any]:
    found = deque(groups(packets))
    return [
        (job.first, [p for p, s in zip(job.pts.tolist(), job.send.tolist(), strict=True) if s])
        for job in jobs(with_wanted(iter(wanted), found))
    ]


def test_only_what_is_needed_is_sent() -> None:
    assert plan(CLOSED, 0) == [(0, [0])]
    assert plan(CLOSED, 1) == [(0, [0, 3, 1])]
    assert plan(CLOSED, 2, 5) == [(0, [0, 3, 2]), (4, [4, 6, 5])]
    assert plan(CLOSED, 6) == [(4, [4, 6])]
    assert plan(CLOSED) == []


def test_pictures_before_an_open_entry_are_decoded_with_the_group_before() -> None:
    assert plan(OPENED, 6) == [(4, [6])]
    assert plan(OPENED, 7) == [(4, [6, 7])]  # the leading reference is not touched
    assert plan(OPENED, 5) == [(0, [0, 3, 6, 4, 5])]
    assert plan(OPENED, 4, 7) == [(0, [0, 3, 6, 4]), (4, [6, 7])]


def test_layers_are_referred_to_from_above() -> None:
    upper = Facts(False, False, disposable=True, layer=1)
    flat, layered = (
        stream((0, KEY), (1, SPARE), (2, SPARE)),
        stream((0, KEY), (1, SPARE), (2, upper)),
    )
    assert plan(flat, 2) == [(0, [0, 2])] and plan(layered, 2) == [(0, [0, 1, 2])]


@pytest.mark.parametrize(
    "packets",
    [
        stream((0, REF), (1, KEY)),
        stream((0, OPEN), (1, REF)),
        stream((0, KEY), (None, REF)),
        stream((0, KEY), (1, Facts(False, False, strange=True))),
        stream((0, KEY), (1, REF), (1, REF)),
        stream((0, KEY), (5, REF), (4, KEY)),
        stream((0, KEY), (5, REF), (6, OPEN), (4, REF)),
    ],
)
def test_what_cannot_be_planned_is_refused(packets: Any) -> None:
    with pytest.raises(Mismatch):
        list(groups(packets))
    assert all_groups(packets) is None


def test_hidden_packets_are_sent_and_never_wanted() -> None:
    packets = [(0, False, KEY), (1, False, REF), (2, True, REF), (3, True, KEY)]
    found = list(groups(packets))
    assert [g.ticks.tolist() for g in found] == [[2], [3]]
    assert plan(packets, 2) == [(0, [0, 1, 2])]


def test_slices_are_worth_a_thread_and_hold_few_frames() -> None:
    packets = stream(*((n, KEY if n % 4 == 0 else REF) for n in range(40)))

    def cut(cost: int, frames: int, *wanted: int) -> list[list[int]]:
        found = jobs(with_wanted(iter(wanted), deque(groups(packets))))
        return [[job.first for job in part] for part in slices(found, cost, frames)]

    every = range(0, 40, 4)
    assert cut(1, 99, *every) == [[n] for n in every]
    assert cut(3, 99, *every) == [[0, 4, 8], [12, 16, 20], [24, 28, 32], [36]]
    assert cut(99, 4, *every) == [[0, 4, 8, 12], [16, 20, 24, 28], [32, 36]]
    assert cut(99, 1, 0, 1, 2, 4) == [[0], [4]]  # a group is never divided


def test_a_stream_without_entries_is_not_listed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmfast.frontends.video.packets._LONGEST", 10)
    listed: list[int] = []

    def endless() -> Any:
        for n in range(1000):
            listed.append(n)
            yield n, True, KEY if n == 0 else REF

    with pytest.raises(Mismatch):
        list(groups(endless()))
    assert len(listed) == 11
    late = stream(*((n, KEY if n in (0, 5) else REF) for n in range(50)))
    assert [g.first for g in groups(late)] == [0, 5]  # later on it is better to go on


def test_too_many_groups_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmfast.frontends.video.packets._MOST_GROUPS", 3)
    packets = stream(*((n, KEY) for n in range(4)))
    assert all_groups(packets) is None
    found = all_groups(packets[:3])
    assert found is not None and all(isinstance(g, PacketGroup) for g in found) and len(found) == 3
