"""`mmfast say`, `talk`, `transcribe` and `translate`: options, output and the commands."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmfast.cli.options import Cache, Device, Dtype, Json, Model, Reduce, check_apart
from mmfast.core.errors import MediaError, MmfastError

if TYPE_CHECKING:
    from torch import Tensor

    from mmfast.core.speech import Turn
    from mmfast.pipelines.speech import SpeechChat
    from mmfast.voice.channel import VoiceEvent

Output = Annotated[
    str,
    typer.Option(
        "--output",
        "-o",
        help="A .wav, .flac, .mp3, .ogg or .opus file; - is standard output.",
    ),
]
Voice = Annotated[str | None, typer.Option(help="Voice, for example en-us or en-us+f2.")]
Rate = Annotated[int | None, typer.Option(help="Words per minute.")]
Pitch = Annotated[int | None, typer.Option(help="Pitch, 0 to 99.")]
Mode = Annotated[
    str | None,
    typer.Option(help="exact (default: as one token per pass), fast or turbo; all verified."),
]
Verify = Annotated[
    str | None,
    typer.Option(help="Another rule than the mode's: exact, typical:0.3, or none (raw drafts)."),
]

Listener = Annotated[
    str | None,
    typer.Option(help="Model that writes speech down, such as Whisper: directory or hub id."),
]
Policy = Annotated[
    str | None,
    typer.Option(
        help="agreement:N, wait:K, confidence:P, learned:P, interleaved:N, joint:N, greedy, offline"
    ),
]
Speakers = Annotated[
    int, typer.Option(help="2 parts two people who may speak at once: a line for each.")
]
Dubbed = Annotated[
    str | None, typer.Option(help="Write a clip: translation spoken over it, subtitles beside.")
]
Talker = Annotated[
    str | None, typer.Option(help="Model that speaks, such as CSM: directory or hub id.")
]


def check_output(path: str, as_json: bool) -> Any:
    """Return the target of sound: a path or standard output. Loads no model."""
    if path == "-":
        if as_json:
            raise MmfastError("--json and -o - both want standard output; name a file for one")
        if sys.stdout.isatty():
            raise MmfastError("-o - would write sound to the terminal; pipe it, or name a file")
        return sys.stdout.buffer
    from mmfast.frontends.source import sound_suffix

    target = Path(path)
    sound_suffix(target)
    if target.is_dir() or not target.parent.is_dir():
        raise MmfastError(f"--output {path!r} cannot be written; give a file in an existing folder")
    return target


class GrowingSound:
    """A sound file that appears with its first sound: a failure before leaves none behind.

    WAV grows as it is made; other formats are encoded at the end, also of what was cut off.
    """

    def __init__(self, target: Any, rate: int) -> None:
        self._target, self._rate, self._file = target, rate, None
        self._encoded = isinstance(target, Path) and target.suffix.lower() not in ("", ".wav")
        self._parts: list[Any] = []

    def write(self, pcm: Any) -> None:
        """Append samples `[n]`."""
        if self._encoded:
            return self._parts.append(pcm)
        if self._file is None:
            from mmfast.frontends.audio.wav import WavWriter

            self._file = WavWriter(self._target, self._rate)
        self._file.write(pcm)

    def __enter__(self) -> GrowingSound:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        if self._parts:
            import torch

            from mmfast.frontends.audio.wav import write_sound

            write_sound(self._target, torch.cat(self._parts), self._rate)

    _file: Any


def print_spoken(document: dict[str, Any], as_json: bool, target: Any) -> None:
    """Print the text on standard output and its figures on standard error, or the JSON document."""
    from mmfast.cli.output import print_json, say_dim

    if as_json:
        return print_json(document)
    if isinstance(target, Path):  # else the sound is there
        if document.get("heard"):
            print(f"> {document['heard']}")
        print(document["text"])
    say_dim(line_of(document))


def line_of(document: dict[str, Any]) -> str:
    """Return the figures on one line."""
    parts = [f"{document['seconds']:.2f} s"]
    named = (
        ("first_audio_ms", "first sound after {:.0f} ms"),
        ("rtf", "real-time factor {:.3f}"),
        ("tokens_per_pass", "{:.2f} tokens a pass"),
        ("tokens_per_second", "{:.0f} tokens a second"),
    )
    parts += [text.format(document[name]) for name, text in named if document.get(name) is not None]
    return " · ".join(parts)


def say(
    text: Annotated[str, typer.Argument(help="What to say; - reads standard input.")],
    output: Output,
    voice: Voice = None,
    rate: Rate = None,
    pitch: Pitch = None,
    mode: Mode = None,
    verify: Verify = None,
    model: Model = None,
    device: Device = None,
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Say a text, written to a sound file as it is made, and say what it cost."""
    from mmfast.models.quiet import quiet

    quiet()
    target = check_output(output, as_json)
    given = _standard_input() if text == "-" else text
    from mmfast.cli.output import say_note
    from mmfast.pipelines import pipeline
    from mmfast.pipelines.speech import check_text, collect
    from mmfast.voice.playback import ReplyMeter

    check_text(given)
    pipe = pipeline("text-to-speech", model, device=device, dtype=dtype, voice=voice)
    how = {"rate": rate, "pitch": pitch, "mode": mode, "verify": verify}
    meter, talker_rate = ReplyMeter(), pipe.talker.sample_rate
    with GrowingSound(target, talker_rate) as file:
        spoken = collect(pipe.stream(given, **how), talker_rate, meter, file.write)
    say_note(spoken.note)
    print_spoken(spoken.to_dict(), as_json, target)


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise MmfastError("standard input is no text; pipe UTF-8") from error


def talk(
    recording: Annotated[str, typer.Argument(help="What is said: any sound file, or - for one.")],
    output: Output,
    clip: Annotated[
        str | None, typer.Option(help="Video that the questions are about; answered by voice.")
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="The file is one question; do not look for turns.")
    ] = False,
    voice: Voice = None,
    rate: Rate = None,
    pitch: Pitch = None,
    mode: Mode = None,
    verify: Verify = None,
    model: Model = None,
    listener: Listener = None,
    talker: Talker = None,
    device: Device = None,
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Answer a recording by voice: every turn in it, cut off where the next one begins."""
    from mmfast.frontends.source import DEFAULT_LIMITS, open_source
    from mmfast.models.quiet import quiet

    quiet()
    target = check_output(output, as_json)
    check_apart("--output", output, recording, clip)
    for path in filter(None, (recording if recording != "-" else None, clip)):
        open_source(path, DEFAULT_LIMITS, lambda name, head: "")  # is there, before torch is
    if clip is not None:
        from mmfast.frontends.image import kind_of

        if kind_of(clip) == "image":
            raise MmfastError(f"--clip {clip!r} is a still picture; give a video to be asked about")
    source, notes = read_recording(recording)
    how: dict[str, Any] = {"voice": voice, "speed": rate, "pitch": pitch}
    how |= {"mode": mode, "verify": verify}
    place: dict[str, Any] = {"device": device, "dtype": dtype}
    how |= {"listener": listener, "talker": talker}
    from mmfast.pipelines.speech import SpeechChat

    pipe = video_pipe(clip, model, how, place, notes) if clip else SpeechChat(model, **how, **place)
    print_spoken(Talking(pipe, whole, notes).run(source, target), as_json, target)


def transcribe(
    recordings: Annotated[list[str], typer.Argument(help="Sound files, or - for one.")],
    listener: Listener = None,
    language: Annotated[
        str | None, typer.Option(help="Language of the speech, where the model takes one.")
    ] = None,
    reduce: Reduce = None,
    cache: Cache = None,
    speakers: Speakers = 1,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print words as they are heard, of one recording.")
    ] = False,
    device: Device = None,
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Write recordings down, a line each, with the embedded model or a stock one."""
    from mmfast.cli.output import print_json
    from mmfast.models.quiet import quiet

    quiet()
    if stream and (as_json or len(recordings) > 1):
        raise MmfastError("--stream prints the words of one recording; leave --json and others out")
    check_recordings(recordings)
    from mmfast.pipelines import pipeline

    options = {"language": language, "reduce": reduce, "cache": cache}
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    given |= {"speakers": speakers} if speakers != 1 else {}
    pipe = pipeline("speech-to-text", listener, device=device, dtype=dtype, **given)
    read = [read_recording(path) for path in recordings]
    sounds = [sound for sound, _ in read]
    if stream and speakers > 1:
        return print_speakers(pipe.stream(sounds[0].split(1600)))
    if stream:
        for text in pipe.stream(sounds[0].split(1600)):
            print(text, end="", flush=True)
        return print()
    transcripts = zip(recordings, read, pipe(sounds), strict=True)
    found = [_row(path, notes, each) for path, (_, notes), each in transcripts]
    if as_json:
        return print_json(found if len(found) > 1 else found[0])
    for each in found:
        print(each["text"])


def print_speakers(words: Iterable[Any]) -> None:
    """Print words as they come, or pieces of text, on a new line where another speaks."""
    before = None
    for word in words:
        if not word.text:  # a sentence whose words had all come
            continue
        turn = f"{word.speaker + 1}:"
        line = [] if word.speaker == before else [turn] if before is None else ["\n" + turn]
        print(*line, word.text.strip(), end=" ", flush=True)
        before = word.speaker
    print()


def translate(
    recordings: Annotated[
        list[str] | None, typer.Argument(help="Sound files, or - for one.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="A text instead of recordings.")] = None,
    model: Model = None,
    listener: Listener = None,
    policy: Policy = None,
    speakers: Speakers = 1,
    source: Annotated[
        str | None, typer.Option(help="Language, where the tokenizer has codes: eng_Latn.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Language to translate into.")] = None,
    prefix: Annotated[str, typer.Option(help="Text in front of every source, as T5 wants.")] = "",
    out: Dubbed = None,
    talker: Talker = None,
    voice: Voice = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print words as they are written, of one source.")
    ] = False,
    device: Device = None,
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Translate recordings as if they were said now, or a text; a line each."""
    from mmfast.decoding.simultaneous import write_policy
    from mmfast.models.quiet import quiet

    quiet()
    files = recordings or []
    if text is not None and not text.strip():
        raise MmfastError(f"there is nothing to translate in --text {text!r}; give words")
    if text is not None:
        from mmfast.models.prompt import check_characters

        check_characters("--text", text)
    if bool(files) == (text is not None):
        raise MmfastError("translate takes recordings or --text; give one of them")
    if stream and (as_json or len(files) > 1):
        raise MmfastError("--stream prints the words of one source; leave --json and others out")
    if speakers != 1 and (out is not None or text is not None):
        raise MmfastError("--speakers parts the voices of recordings; leave --text and --out out")
    check_clip(files, out, talker or voice, bool(stream or policy))
    check_recordings(files)
    if policy is not None:
        write_policy(policy)
    from mmfast.pipelines import pipeline

    options: dict[str, Any] = {"source": source, "target": target, "prefix": prefix}
    options |= {"policy": policy, "speakers": speakers, "device": device, "dtype": dtype}
    pipe = pipeline("speech-translation", model, listener=listener, **options)
    if out is not None:
        return print_dubbed(pipe, files[0], out, talker, voice, as_json)
    if not stream:
        return print_translated(pipe, files, text, as_json)
    if text:
        _unknown(pipe.translator.unknown(text))
    pieces = pipe.stream_text([text]) if text else pipe.stream(read_recording(files[0])[0])
    return print_speakers(pieces) if speakers > 1 else print_pieces(pieces)


def print_pieces(pieces: Iterable[Any]) -> None:
    """Print pieces of text as they come."""
    for piece in pieces:
        print(piece.text, end="", flush=True)
    print()


def check_clip(files: Sequence[str], out: str | None, spoken: str | None, while_said: bool) -> None:
    """Refuse options of a clip without one, and a clip with those of speech that goes on."""
    if out is None and spoken:
        raise MmfastError("--talker and --voice speak a translated clip; give --out CLIP.mp4, too")
    if out is not None and (len(files) != 1 or while_said or files[0] == "-"):
        raise MmfastError("--out takes one clip, by whole sentences; leave --policy, --stream out")


def print_translated(pipe: Any, files: Sequence[str], text: str | None, as_json: bool) -> None:
    """Translate files or a text and print a line each, or one document."""
    from mmfast.cli.output import print_json

    if text is not None:
        unknown = pipe.translator.unknown(text)
        found = [{"text": pipe.translate(text), "source": text, "unknown": unknown}]
    else:
        read = ((path, *read_recording(path)) for path in files)
        found = [_row(path, notes, pipe(sound)) for path, sound, notes in read]
    for each in found:
        if not as_json:
            print(each["text"])
        if noted := _unknown(each["unknown"]):
            each["notes"] = [*each.get("notes", ()), *noted]
    if as_json:
        print_json(found if len(found) > 1 else found[0])


def _row(path: str, notes: Sequence[str], found: Any) -> dict[str, Any]:
    """Return the document of a recording with all that was noted of it; say where it is silent."""
    document = {"file": path, **found.to_dict()}
    noted = [*notes, *document.pop("notes", ()), *_silent(path, document["text"])]
    return document | ({"notes": noted} if noted else {})


def _silent(path: str, heard: str) -> list[str]:
    return _said("" if heard.strip() else f"nothing is heard in {path!r}")


def _unknown(words: Sequence[str]) -> list[str]:
    return _said(f"the translator does not know: {', '.join(words)}" if words else "")


def _said(note: str) -> list[str]:
    """Say a line, and return it where there is one."""
    from mmfast.cli.output import say_note

    say_note(note)
    return [note] if note else []


def print_dubbed(
    pipe: Any, clip: str, out: str, talker: str | None, voice: str | None, as_json: bool
) -> None:
    """Write a clip in another language, and print its sentences and what is noted of them."""
    from mmfast.cli.output import print_json
    from mmfast.core.trace import Trace
    from mmfast.voice.dubbing import clock

    trace, given = Trace(), {} if voice is None else {"voice": voice}
    rows = [each.to_dict() for each in pipe.dub(clip, out, talker, trace, **given)]
    heard = " ".join(row["heard"] for row in rows)
    notes = [*trace.notes, *_silent(clip, heard), *_unknown(pipe.translator.unknown(heard))]
    if as_json:
        noted = {"notes": notes} if notes else {}
        return print_json({"file": clip, "out": out, "sentences": rows, **noted})
    for row in rows:
        print(f"{clock(row['at'], '.')}  {row['text']}")


def check_recordings(paths: Sequence[str]) -> None:
    """Refuse files that are not there, before torch is."""
    from mmfast.frontends.source import DEFAULT_LIMITS, open_source

    for path in paths:
        if path != "-":
            open_source(path, DEFAULT_LIMITS, lambda name, head: "")


def read_recording(path: str) -> tuple[Tensor, list[str]]:
    """Read a file, or standard input, as samples `[n]` at 16 kHz; and what is noted of it."""
    from mmfast.core.trace import Trace
    from mmfast.frontends.audio.reader import load_audio
    from mmfast.voice.ear import RATE

    trace = Trace()
    sound = load_audio(sys.stdin.buffer.read() if path == "-" else path, RATE, trace=trace)
    return sound, trace.notes


def video_pipe(
    clip: str, model: str | None, how: dict[str, Any], place: dict[str, Any], notes: list[str]
) -> SpeechChat:
    """Let a video model answer about a clip; the embedded speech model listens and speaks.

    `notes` gets what is noted of its answers.
    """
    from mmfast.pipelines.omni_chat import written
    from mmfast.pipelines.speech import SpeechChat
    from mmfast.pipelines.visual_qa import VideoQA
    from mmfast.voice.models import given_options

    pipe = VideoQA(model, **place)

    def chat(turns: Sequence[Turn]) -> Iterator[str]:
        answer = pipe.stream(clip, written(turns[-1].text))
        yield from answer
        noted = answer.answer.noted if answer.answer else {}
        notes.extend(note for note in noted.get("notes", ()) if note not in notes)

    return SpeechChat(chat=chat, **given_options(how))


class Talking:
    """One run of `mmfast talk`; with `whole`, the recording is one question.

    `notes` are those of recording and clip, some of which come with the answers.
    """

    def __init__(self, pipe: SpeechChat, whole: bool, notes: list[str]) -> None:
        from mmfast.voice.ear import ManualEar, VoiceEar

        self.session = pipe.open(ManualEar(longest=600.0) if whole else VoiceEar())
        self.rate = pipe.chatter.sample_rate
        self.turns: dict[str, dict[str, Any]] = {}
        self.notes = notes

    def run(self, pcm: Tensor, target: Any) -> dict[str, Any]:
        """Converse, write the played part of the replies, and print a summary."""
        sounds: dict[str, list[Tensor]] = {}
        with self.session as session:
            for event in session.run([pcm]):
                self._note(event)
                if event.pcm is not None:
                    sounds.setdefault(event.reply, []).append(event.pcm)
            stats = session.stats()
        if not self.turns:
            raise MediaError(
                "nobody speaks in the recording; give one with speech, or take it as it is: --whole"
            )
        import torch

        from mmfast.frontends.audio.wav import write_sound

        played = [torch.zeros(0)]
        for reply, turn in self.turns.items():
            limit = turn.pop("_samples", None)
            played.append(torch.cat([torch.zeros(0), *sounds.get(reply, ())])[:limit])
        pcm = torch.cat(played)
        if not len(pcm):
            raise MediaError(
                "nothing is heard in the recording, so there is no reply; give one with speech"
            )
        write_sound(target, pcm, self.rate)
        return self._document(len(pcm) / self.rate, stats)

    def _note(self, event: VoiceEvent) -> None:
        if event.kind == "error":
            raise MediaError(f"no reply: {event.text}")
        if event.kind == "reply_started":
            self.turns[event.reply] = {"heard": "", "text": "", "interrupted": False}
        turn = self.turns.get(event.reply, {})
        if event.kind == "heard":
            turn["heard"] = event.text
        elif event.kind == "text":
            turn["text"] += event.text
        elif event.kind == "interrupted":
            turn |= {"text": event.text, "interrupted": True}
            turn["_samples"] = round(event.audio_ms * self.rate / 1e3)
        elif event.kind == "done":
            turn |= event.stats

    def _document(self, seconds: float, stats: dict[str, Any]) -> dict[str, Any]:
        from mmfast.cli.output import say_note
        from mmfast.pipelines.speech import KEYS, said_otherwise

        turns = list(self.turns.values())
        for note in filter(None, map(said_otherwise, turns)):
            say_note(note)
            self.notes.append(note)
        text, heard = (" ".join(t[key].strip() for t in turns).strip() for key in ("text", "heard"))
        first = next((t["first_audio_ms"] for t in turns if t.get("first_audio_ms")), None)
        figures = {**stats, "seconds": round(seconds, 4), "turns": turns, "first_audio_ms": first}
        figures |= {"notes": self.notes} if self.notes else {}
        return {"text": text, **{key: figures[key] for key in KEYS}, "heard": heard, **figures}
