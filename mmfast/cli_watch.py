"""`mmfast watch`."""

from __future__ import annotations

from typing import Any

from mmfast import cli_watch_options as options
from mmfast.cli_options import Device, Dtype, Json, Model, Reduce


def watch(
    source: options.Source,
    ask: options.Ask = None,
    every: options.Every = None,
    ask_at: options.AskAt = None,
    tell_me_when: options.TellMeWhen = None,
    probe: options.Probe = None,
    yes: options.Yes = None,
    threshold: options.Threshold = 0.6,
    memory: options.Memory = None,
    host_bytes: options.HostBytes = None,
    reduce: Reduce = None,
    frame_cache: options.FrameCacheShare = None,
    gate: options.Gate = None,
    fps: options.Fps = 1.0,
    latency: options.Latency = None,
    realtime: options.Realtime = False,
    allow_network: options.Network = False,
    save: options.Save = None,
    restore: options.Restore = None,
    model: Model = None,
    device: Device = None,
    dtype: Dtype = "auto",
    max_new_tokens: options.MaxNewTokens = 64,
    as_json: Json = False,
) -> None:
    """Watch a stream in bounded memory, answer questions on the way; Ctrl-C ends it."""
    from mmfast.caches.plan import plan_cache
    from mmfast.cli_output import quiet
    from mmfast.cli_watching import Viewing, camera_or_path, times_of
    from mmfast.pipelines import pipeline
    from mmfast.streams.quotas import parse_bytes

    quiet()
    questions = times_of(ask or [], every, ask_at or [])
    plan_cache(memory)  # before any weight is read
    parse_bytes(host_bytes)
    given: dict[str, Any] = {"reduce": reduce, "frame_cache": frame_cache, "gate": gate}
    pipe = pipeline("video-stream", model, device=device, dtype=dtype, fps=fps, **given)
    kept: dict[str, Any] = {} if memory is None else {"memory": memory}
    kept |= {} if host_bytes is None else {"host_bytes": host_bytes, "host_blocks": None}
    session = pipe.open(**kept) if restore is None else pipe.restore(restore, **kept)
    viewing = Viewing(session, questions, max_new_tokens, as_json)
    looks: dict[str, Any] = {"threshold": threshold}
    looks |= {"probe": probe} if probe else {}
    looks |= {"yes": yes, "no": None} if yes else {}
    for condition in tell_me_when or []:
        session.subscribe(condition, viewing.told, **looks)
    way = {"latency": latency, "realtime": realtime, "allow_network": allow_network}
    viewing.run(camera_or_path(source), save, **way)
