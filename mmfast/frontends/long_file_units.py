"""What a packet's first bytes tell about it: where decoding may begin, what nobody refers to.

Unit types: ITU-T H.264 table 7-1 and D.1.8 (recovery point), H.265 table 7-1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from mmfast.frontends.container import Header

_RECOVERY_POINT = 6  # SEI payload type
_HEVC_PLAIN = frozenset((*range(10), *range(16, 22), 35, 36, 37, 38, 39, 40))
_HEVC_NOT_REFERRED = frozenset((0, 2, 4, 6, 8))
_AVC_ASIDE = frozenset((6, 9, 10, 11, 12))  # messages, delimiters, filler


class Facts(NamedTuple):
    """What is known of one packet.

    Attributes:
        entry: Decoding may begin here and is right from this picture's time on.
        fresh: ... and right for every later packet, whatever its time.
        disposable: No other picture refers to it.
        layer: Temporal sub-layer; pictures of a lower one are referred to by higher ones.
        sets: It holds sequence parameters, which may change the picture size.
        strange: It changes how later packets are decoded, so that none may be left out.
    """

    entry: bool
    fresh: bool
    disposable: bool = False
    layer: int = 0
    sets: bool = False
    strange: bool = False


Reader = Callable[[Any], Facts]


def unit_reader(header: Header) -> Reader | None:
    """A function that looks at a packet; None where the packets of this stream say nothing."""
    extra = header.extradata
    if header.codec == "h264":
        known = extra[:1] == b"\1" and len(extra) > 4
        return _avc(extra, (extra[4] & 3) + 1) if known else None
    if header.codec == "hevc":
        known = extra[:1] == b"\1" and len(extra) > 21
        return _hevc(extra, (extra[21] & 3) + 1) if known else None
    return lambda packet: Facts(packet.is_keyframe, packet.is_keyframe)


def _units(packet: Any, width: int) -> Iterator[memoryview]:
    """Yield the length-prefixed NAL units of a packet."""
    data, position = memoryview(packet), 0
    while position + width < len(data):
        length = int.from_bytes(data[position : position + width], "big")
        position += width
        yield data[position : position + length]
        position += length


def _avc(extra: bytes, width: int) -> Reader:
    def read(packet: Any) -> Facts:
        slices, referred, recovers = set(), False, False
        sets = strange = False
        for unit in _units(packet, width):
            if not len(unit):
                continue
            kind = unit[0] & 31
            if 1 <= kind <= 5:
                slices.add(kind)
                referred = referred or bool(unit[0] & 0x60)
            elif kind == 6:
                recovers = recovers or (packet.is_keyframe and _recovery(bytes(unit)))
            elif kind not in _AVC_ASIDE:
                sets = sets or kind in (7, 15)
                strange = strange or bytes(unit) not in extra  # a repeated one changes nothing
        fresh = slices == {5}
        return Facts(
            entry=fresh or (recovers and slices == {1}),
            fresh=fresh,
            disposable=slices == {1} and not referred,
            sets=sets,
            strange=strange,
        )

    return read


def _recovery(unit: bytes) -> bool:
    """Whether an SEI unit promises exact pictures from this one's time on."""
    data, at = unit.replace(b"\0\0\3", b"\0\0"), 1
    while at + 2 < len(data):
        kind = size = 0
        for value in (0, 1):
            total = 0
            while at < len(data) and data[at] == 255:
                total, at = total + 255, at + 1
            total, at = total + (data[at] if at < len(data) else 0), at + 1
            kind, size = (total, size) if value == 0 else (kind, total)
        if kind == _RECOVERY_POINT and at < len(data):
            return data[at] & 0xC0 == 0xC0  # no frame to wait for (ue 0), exact match (1)
        at += size
    return False


def _hevc(extra: bytes, width: int) -> Reader:
    def read(packet: Any) -> Facts:
        slices, layer = set(), 0
        sets = strange = False
        for unit in _units(packet, width):
            if len(unit) < 2:
                continue
            kind = unit[0] >> 1 & 63
            if kind < 32:
                slices.add(kind)
                layer = max(layer, (unit[1] & 7) - 1)
            if kind not in _HEVC_PLAIN or unit[0] & 1 or unit[1] >> 3:  # or of another layer
                sets = sets or kind == 33
                strange = strange or bytes(unit) not in extra
        fresh = bool(slices) and slices <= {19, 20}
        return Facts(
            entry=packet.is_keyframe and (fresh or slices == {21}),  # 21: clean random access
            fresh=fresh,
            disposable=bool(slices) and slices <= _HEVC_NOT_REFERRED,
            layer=layer,
            sets=sets,
            strange=strange,
        )

    return read
