"""`mmfast watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mmfast.cli_options import Device, Dtype, Json, Model, Reduce


def watch(
    source: Annotated[
        str, typer.Argument(help="Video file, folder of frames, camera number, or address.")
    ],
    ask: Annotated[
        list[str] | None,
        typer.Option(
            help="Question at the end, or all --every seconds; several times if you like."
        ),
    ] = None,
    every: Annotated[
        float | None, typer.Option(help="Seconds of the stream between two times of --ask.")
    ] = None,
    ask_at: Annotated[
        list[str] | None,
        typer.Option(help="SECONDS:QUESTION, asked when the stream is there; several times."),
    ] = None,
    tell_me_when: Annotated[
        list[str] | None, typer.Option(help="Be told when this happens; several times.")
    ] = None,
    threshold: Annotated[
        float, typer.Option(help="Probability from which --tell-me-when speaks.")
    ] = 0.6,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Cache policies, such as sink:64+window:4096+retrieve:64 (which is the default)."
        ),
    ] = None,
    reduce: Reduce = None,
    frame_cache: Annotated[
        float | None, typer.Option(help="Share of a frame's patches to encode anew, such as 0.25.")
    ] = None,
    gate: Annotated[
        float | None,
        typer.Option(help="Change of colour (0 to 1) under which a frame is skipped."),
    ] = None,
    fps: Annotated[float, typer.Option(help="Frames to take per second.")] = 1.0,
    latency: Annotated[
        float | None,
        typer.Option(help="Drop frames that have waited longer, in seconds; count them."),
    ] = None,
    realtime: Annotated[
        bool, typer.Option("--realtime", help="Let a file run at its own speed.")
    ] = False,
    allow_network: Annotated[
        bool, typer.Option("--allow-network", help="Open public addresses (rtsp, http).")
    ] = False,
    save: Annotated[Path | None, typer.Option(help="Save the session here at the end.")] = None,
    restore: Annotated[Path | None, typer.Option(help="Go on with the session saved here.")] = None,
    model: Model = None,
    device: Device = None,
    dtype: Dtype = "auto",
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 64,
    as_json: Json = False,
) -> None:
    """Watch a stream in bounded memory, answer questions on the way; Ctrl-C ends it."""
    from mmfast.cli_output import quiet
    from mmfast.cli_watching import Viewing, camera_or_path, times_of

    quiet()
    questions = times_of(ask or [], every, ask_at or [])
    open_it: dict[str, Any] = {"memory": memory} if memory is not None else {}
    from mmfast.caches.plan import plan_cache
    from mmfast.pipelines import pipeline

    plan_cache(memory)
    pipe = pipeline(
        "video-stream",
        model,
        reduce=reduce,
        frame_cache=frame_cache,
        gate=gate,
        device=device,
        dtype=dtype,
        fps=fps,
    )
    session = pipe.open(**open_it) if restore is None else pipe.restore(restore, **open_it)
    viewing = Viewing(session, questions, max_new_tokens, as_json)
    for condition in tell_me_when or []:
        session.subscribe(condition, viewing.told, threshold=threshold)
    viewing.run(
        camera_or_path(source),
        save,
        latency=latency,
        realtime=realtime,
        allow_network=allow_network,
    )
