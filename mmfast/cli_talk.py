"""`mmfast talk`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mmfast import cli_voice as options
from mmfast.cli_options import Device, Dtype, Json, Model


def talk(
    recording: Annotated[str, typer.Argument(help="What is said: any sound file, or - for one.")],
    output: options.Output,
    clip: Annotated[
        str | None, typer.Option(help="Video that the questions are about; answered by voice.")
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="The file is one question; do not look for turns.")
    ] = False,
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
    """Answer a recording by voice: every turn in it, cut off where the next one begins."""
    from mmfast.cli_output import quiet

    quiet()
    target = options.check_output(output, as_json)
    from mmfast.cli_talking import Talking, read_recording, video_pipe, voice_pipe

    source = read_recording(recording)
    how = {"voice": voice, "speed": rate, "pitch": pitch, "mode": mode, "verify": verify}
    place: dict[str, Any] = {"device": device, "dtype": dtype}
    pipe = video_pipe(clip, model, how, place) if clip else voice_pipe(model, how, place)
    talking = Talking(pipe, whole)
    document = talking.run(source, target)
    options.print_spoken(document, as_json, target)
