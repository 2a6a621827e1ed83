"""Options of `mmfast watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Source = Annotated[
    str, typer.Argument(help="Video file, folder of frames, camera number, or address.")
]
Ask = Annotated[
    list[str] | None,
    typer.Option(help="Question at the end, or all --every seconds; several times if you like."),
]
Every = Annotated[
    float | None, typer.Option(help="Seconds of the stream between two times of --ask.")
]
AskAt = Annotated[
    list[str] | None,
    typer.Option(help="SECONDS:QUESTION, asked when the stream is there; several times."),
]
TellMeWhen = Annotated[
    list[str] | None, typer.Option(help="Be told when this happens; several times.")
]
Probe = Annotated[
    str | None,
    typer.Option(help="How --tell-me-when asks, with {condition} in it; else yes or no."),
]
Yes = Annotated[
    list[str] | None,
    typer.Option(help="Answers to --probe that mean it has happened; several times."),
]
Threshold = Annotated[float, typer.Option(help="Probability from which --tell-me-when speaks.")]
Memory = Annotated[
    str | None,
    typer.Option(help="Cache policies; sink:64+window:4096+retrieve:64 if absent."),
]
HostBytes = Annotated[
    str | None,
    typer.Option(help="Size of the archive, such as 4GB; 1GB and 1,800 frames if absent."),
]
FrameCacheShare = Annotated[
    float | None,
    typer.Option("--frame-cache", help="Share of a frame's patches to encode anew, such as 0.25."),
]
Gate = Annotated[
    float | None, typer.Option(help="Change of colour (0 to 1) under which a frame is skipped.")
]
Fps = Annotated[float, typer.Option(help="Frames to take per second.")]
Latency = Annotated[
    float | None, typer.Option(help="Drop frames that have waited longer, in seconds; count them.")
]
Realtime = Annotated[bool, typer.Option("--realtime", help="Let a file run at its own speed.")]
Network = Annotated[
    bool, typer.Option("--allow-network", help="Open public addresses (rtsp, http).")
]
Save = Annotated[Path | None, typer.Option(help="Save the session here at the end.")]
Restore = Annotated[Path | None, typer.Option(help="Go on with the session saved here.")]
MaxNewTokens = Annotated[int, typer.Option(help="Longest answer in tokens.")]
