"""What `mmfast say` and `mmfast talk` share: options, where sound goes, what is printed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mmfast.core.errors import MmfastError

Output = Annotated[
    str, typer.Option("--output", "-o", help="WAV file to write; - is standard output.")
]
Voice = Annotated[str | None, typer.Option(help="Voice, for example en-us or en-us+f2.")]
Rate = Annotated[int | None, typer.Option(help="Words per minute.")]
Pitch = Annotated[int | None, typer.Option(help="Pitch, 0 to 99.")]
Mode = Annotated[
    str | None,
    typer.Option(help="When drafts are made: vanilla, balance, boost or turbo (default)."),
]
Verify = Annotated[
    str | None,
    typer.Option(help="exact (default), typical:0.3, or none: fastest, hard to understand."),
]


def check_output(path: str, as_json: bool) -> Any:
    """Where sound is written: a path, or standard output; asked before a model is loaded.

    Raises:
        MmfastError: It is no `.wav` file in a folder that exists, or two things want the output.
    """
    if path == "-":
        if as_json:
            raise MmfastError("--json and -o - both want standard output; name a file for one")
        if sys.stdout.isatty():
            raise MmfastError("-o - would write sound to the terminal; pipe it, or name a file")
        return sys.stdout.buffer
    target = Path(path)
    if target.suffix.lower() != ".wav":
        raise MmfastError(f"--output {path!r} is no WAV file; give a name that ends in .wav")
    if target.is_dir() or not target.parent.is_dir():
        raise MmfastError(f"--output {path!r} cannot be written; give a file in an existing folder")
    return target


class Growing:
    """A WAV file that appears with its first sound: a failure before leaves none behind."""

    def __init__(self, target: Any, rate: int) -> None:
        self._target, self._rate, self._file = target, rate, None

    def write(self, pcm: Any) -> None:
        """Append samples `[n]`."""
        if self._file is None:
            from mmfast.frontends.wav import WavWriter

            self._file = WavWriter(self._target, self._rate)
        self._file.write(pcm)

    def __enter__(self) -> Growing:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    _file: Any


def print_spoken(document: dict[str, Any], as_json: bool, target: Any) -> None:
    """What was said on standard output, what it cost on standard error; or the JSON document."""
    from mmfast.cli_output import _err, print_json

    if as_json:
        return print_json(document)
    if isinstance(target, Path):  # else the sound is there
        if document.get("heard"):
            print(f"> {document['heard']}")
        print(document["text"])
    _err.print(line_of(document), style="dim", highlight=False)


def line_of(document: dict[str, Any]) -> str:
    """The figures on one line."""
    parts = [f"{document['seconds']:.2f} s"]
    named = (
        ("first_audio_ms", "first sound after {:.0f} ms"),
        ("rtf", "real-time factor {:.3f}"),
        ("tokens_per_pass", "{:.2f} tokens a pass"),
        ("tokens_per_second", "{:.0f} tokens a second"),
    )
    parts += [text.format(document[name]) for name, text in named if document.get(name) is not None]
    return " · ".join(parts)
