"""Clips in another language: what is said is translated and spoken over the picture, in its time.

A cascade of a listener, a translator and a talker, sentence by sentence. Pictures are copied as
they are; lips still move for the other words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import MediaError, MmfastError, unknown
from mmfast.core.files import whole_file
from mmfast.core.speech import Listener, Speaker
from mmfast.core.trace import Trace
from mmfast.frontends.audio.reader import load_audio
from mmfast.frontends.audio.turns import TurnCutter
from mmfast.models.translation import AnyTranslator
from mmfast.voice.ear import RATE

FORMATS = {".mp4": "mp4", ".mkv": "matroska", ".mov": "mov"}
FASTEST = 1.5  # of the talker's own pace; what is longer still begins the next sentence later


@dataclass(frozen=True)
class DubbedSentence:
    """A sentence of a clip, in seconds of the clip.

    Attributes:
        start, end: When it is said in the clip.
        heard: What is said.
        text: Its translation.
        at, until: When the translation is spoken.
        tempo: How much faster than by the talker.
    """

    start: float
    end: float
    heard: str
    text: str
    at: float
    until: float
    tempo: float

    def to_dict(self) -> dict[str, Any]:
        """The row that `mmfast translate --json` prints."""
        numbers = {name: round(getattr(self, name), 3) for name in ("start", "end", "at", "until")}
        return {**numbers, "tempo": round(self.tempo, 3), "heard": self.heard, "text": self.text}


def sentences_of(sound: Tensor, silence: float) -> list[tuple[float, float, Tensor]]:
    """Return start and end in seconds and samples of what is said between silences of so long."""
    cutter = TurnCutter(silence_duration_ms=round(1000 * silence))
    state, events = cutter.step(cutter.start(), sound)
    turns = [each for each in (*events, *cutter.finish(state)) if each.kind == "turn"]
    return [(t.start_ms / 1000, t.stop_ms / 1000, t.pcm) for t in turns if t.pcm is not None]


def dub(
    clip: str | Path,
    out: str | Path,
    listener: Listener,
    translator: AnyTranslator,
    talker: Speaker,
    options: Mapping[str, Any] | None = None,
    silence: float = 0.5,
    trace: Trace | None = None,
) -> list[DubbedSentence]:
    """Write a clip with its sentences in the other language, and subtitles beside it.

    Args:
        clip: A file with pictures and sound.
        out: The new file, an mp4, mkv or mov; subtitles have its name with ".srt".
        listener: What hears.
        translator: What translates.
        talker: What speaks.
        options: Of the talker, such as a voice.
        silence: Seconds of silence that end a sentence.
        trace: Notes what of the sound was not heard.

    Raises:
        MediaError: The clip has no pictures or no sound.
        MmfastError: `out` cannot be written, has another suffix, or is the clip itself.
    """
    check_target(Path(clip), Path(out))
    sound = load_audio(str(clip), RATE, trace=trace)
    seconds, rate = len(sound) / RATE, talker.sample_rate
    spoken = list[tuple[float, float, str, str, Tensor]]()
    for start, end, pcm in sentences_of(sound, silence):
        heard = str(listener.transcribe(pcm, RATE)).strip()
        if text := translator.translate([heard])[0] if heard else "":
            parts = [piece.pcm for piece in talker.speak(text, **(options or {}))]
            spoken.append((start, end, heard, text, torch.cat(parts)))
    track, found = placed(spoken, seconds, rate)
    write_dubbed(Path(clip), Path(out), track, rate)
    Path(out).with_suffix(".srt").write_text(srt(found), encoding="utf-8")
    return found


def placed(
    spoken: Sequence[tuple[float, float, str, str, Tensor]], seconds: float, rate: int
) -> tuple[Tensor, list[DubbedSentence]]:
    """Return a track of sentences, each from its own start on if the one before has ended.

    One that is longer than the time to the next is spoken faster, up to `FASTEST` times.
    """
    found, parts, cursor = list[DubbedSentence](), list[Tensor](), 0
    for number, (start, end, heard, text, pcm) in enumerate(spoken):
        begin = max(cursor, round(start * rate))
        last = number + 1 == len(spoken)
        room = max(1, round((seconds if last else spoken[number + 1][0]) * rate) - begin)
        tempo = min(FASTEST, max(1.0, len(pcm) / room))
        voice = faster(pcm, rate, tempo)
        parts += [torch.zeros(begin - cursor), voice]
        cursor = begin + len(voice)
        times = begin / rate, cursor / rate
        found.append(DubbedSentence(start, end, heard, text, *times, tempo))
    parts.append(torch.zeros(max(0, round(seconds * rate) - cursor)))
    return torch.cat(parts), found


def faster(pcm: Tensor, rate: int, tempo: float) -> Tensor:
    """Return speech `[n]` at so many times its pace, at its pitch."""
    if tempo <= 1.001 or not len(pcm):
        return pcm
    import av

    graph = av.filter.Graph()
    source = graph.add_abuffer(sample_rate=rate, format="flt", layout="mono", time_base=None)
    graph.link_nodes(source, graph.add("atempo", f"{tempo:.4f}"), graph.add("abuffersink"))
    graph.configure()
    frame = av.AudioFrame.from_ndarray(pcm.float().numpy()[None], format="flt", layout="mono")
    frame.sample_rate = rate
    graph.push(frame)
    graph.push(None)
    return torch.cat([torch.from_numpy(part.to_ndarray()[0].copy()) for part in _pulled(graph)])


def _pulled(graph: Any) -> Iterator[Any]:
    import av

    while True:
        try:
            yield graph.pull()
        except (av.error.EOFError, av.error.BlockingIOError):
            return


def check_target(clip: Path, out: Path) -> None:
    """Refuse (MmfastError) a file that no clip can be written to, before anything is heard."""
    if out.suffix.lower() not in FORMATS:
        raise MmfastError(f"{out.name!r}: {unknown('format of a clip', out.suffix, FORMATS)}")
    if out.exists() and clip.exists() and out.samefile(clip):
        raise MmfastError(f"{str(out)!r} is the clip itself, which stays as it is; name another")
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise MmfastError(f"{str(out)!r} cannot be written; give a file in an existing folder")


def write_dubbed(clip: Path, out: Path, track: Tensor, rate: int) -> None:
    """Copy the pictures of a clip, packet by packet, and write a track of sound `[n]` beside.

    The file appears when it is whole; a failure leaves what was there before.
    """
    with whole_file(out) as draft:
        _write(clip, draft, FORMATS[out.suffix.lower()], track, rate)


def _write(clip: Path, out: Path, form: str, track: Tensor, rate: int) -> None:
    import av

    with av.open(str(clip)) as source:
        if not source.streams.video:
            raise MediaError(f"{clip.name} has no pictures to speak over; leave --out out")
        pictures = source.streams.video[0]
        with av.open(str(out), "w", format=form) as target:
            try:
                copied = target.add_stream_from_template(pictures)
            except ValueError as error:
                name = pictures.codec_context.name
                text = f"{name} pictures of {clip.name} do not go into {form}; write an .mkv"
                raise MediaError(text) from error
            voice = target.add_stream("aac", rate=rate, layout="mono")
            for packet in source.demux(pictures):
                if packet.dts is not None:
                    packet.stream = copied
                    target.mux(packet)
            for at in range(0, len(track), 1024):
                part = track[at : at + 1024].float().numpy()[None]
                frame = av.AudioFrame.from_ndarray(part, format="fltp", layout="mono")
                frame.sample_rate, frame.pts = rate, at
                target.mux(voice.encode(frame))
            target.mux(voice.encode(None))


def srt(sentences: Iterable[DubbedSentence]) -> str:
    """Return subtitles, each shown while it is spoken."""
    blocks = []
    for number, each in enumerate(sentences, 1):
        times = " --> ".join(clock(at, ",") for at in (each.at, each.until))
        blocks.append(f"{number}\n{times}\n{each.text}\n")
    return "\n".join(blocks)


def clock(seconds: float, mark: str) -> str:
    """Return a time of subtitles, whose milliseconds stand behind the mark: "," or "."."""
    whole, ms = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{mark}{ms:03}"
