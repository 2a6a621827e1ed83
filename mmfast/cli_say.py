"""`mmfast say`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mmfast import cli_voice as options
from mmfast.cli_options import Device, Dtype, Json, Model


def say(
    text: Annotated[str, typer.Argument(help="What to say; - reads standard input.")],
    output: options.Output,
    voice: options.Voice = None,
    rate: options.Rate = None,
    pitch: options.Pitch = None,
    mode: options.Mode = None,
    verify: options.Verify = None,
    model: Model = None,
    device: Device = None,
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Say a text, written to a WAV file as it is made, and say what it cost."""
    from mmfast.cli_output import quiet

    quiet()
    target = options.check_output(output, as_json)
    given = _standard_input() if text == "-" else text
    from mmfast.pipelines import pipeline
    from mmfast.pipelines.spoken import check_text, collect
    from mmfast.streams.voice_metrics import Meter

    check_text(given)
    pipe = pipeline("text-to-speech", model, device=device, dtype=dtype, voice=voice)
    how = {"rate": rate, "pitch": pitch, "mode": mode, "verify": verify}
    meter, speaker_rate = Meter(), pipe.speaker.sample_rate
    with options.Growing(target, speaker_rate) as wav:
        spoken = collect(pipe.stream(given, **how), speaker_rate, meter, wav.write)
    options.print_spoken(spoken.to_dict(), as_json, target)


def _standard_input() -> str:
    from mmfast.core.errors import MmfastError

    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise MmfastError("standard input is no text; pipe UTF-8") from error
