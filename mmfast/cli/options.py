"""Options that several commands share, and what completes them."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from mmfast.core.errors import MmfastError
from mmfast.core.spec import WEIGHTS


def complete_spec(incomplete: str) -> list[str]:
    """Spec strings that end in a method whose name begins as typed."""
    return _complete(incomplete, "reducer")


def complete_cache(incomplete: str) -> list[str]:
    """Cache specs that end in a policy whose name begins as typed."""
    return _complete(incomplete, "cache")


def complete_decode(incomplete: str) -> list[str]:
    """Kinds of draft and verify that begin as typed."""
    own = ("self:0.1", "self?weights=", "self?reduce=")
    kinds = (*own, "draft:", "exit:", "recycle", "lookup", "bild:")
    return [kind for kind in kinds if kind.startswith(incomplete)]


def complete_weights(incomplete: str) -> list[str]:
    """Forms of weights that begin as typed."""
    return [kind for kind in (*WEIGHTS, "fastest") if kind.startswith(incomplete)]


def complete_prefill(incomplete: str) -> list[str]:
    """Methods of sparse prefill that begin as typed."""
    return _complete(incomplete, "prefill")


def complete_attn(incomplete: str) -> list[str]:
    """Attention back ends that begin as typed."""
    from mmfast.models.attention import BACKENDS

    return [name for name in BACKENDS if name.startswith(incomplete)]


def _complete(incomplete: str, kind: str) -> list[str]:
    from mmfast.core.registry import methods

    head, plus, last = incomplete.rpartition("+")
    return [head + plus + m.name for m in methods(kind) if m.name.startswith(last)]


def complete_preset(incomplete: str) -> list[str]:
    """Model shapes of `mmfast bench` that begin as typed."""
    from mmfast.bench.presets import PRESETS

    return [name for name in PRESETS if name.startswith(incomplete)]


def silent(*_: object) -> None:
    """Report no progress, beside a JSON document."""


Reduce = Annotated[
    str | None,
    typer.Option(
        help="Spec, for example evs:0.25 or divprune:0.5+fastv@llm3:0.5; or auto.",
        autocompletion=complete_spec,
    ),
]
Reduces = Annotated[
    list[str] | None,
    typer.Option(
        "--reduce",
        help="Spec; give it several times.",
        autocompletion=complete_spec,
    ),
]
Cache = Annotated[
    str | None,
    typer.Option(
        help="KV policy spec, for example snapkv:1024 or sink:4+window:512+quant:8.",
        autocompletion=complete_cache,
    ),
]
Decode = Annotated[
    str | None,
    typer.Option(
        help="Draft and verify: self:0.1, draft:DIR, exit:FILE, recycle, lookup or bild:DIR.",
        autocompletion=complete_decode,
    ),
]
Prefill = Annotated[
    str | None,
    typer.Option(
        help="What a long prompt reads: sample_attention:0.95, minference:0.3, hip:0.25 and so on.",
        autocompletion=complete_prefill,
    ),
]
Attn = Annotated[
    str | None,
    typer.Option(
        help="Attention: sdpa, eager, flash_attention_2, flash_attention_3 or flex_attention.",
        autocompletion=complete_attn,
    ),
]
Caches = Annotated[
    list[str] | None,
    typer.Option(
        "--cache",
        help="KV policy; give it several times.",
        autocompletion=complete_cache,
    ),
]
Reuse = Annotated[
    str | None,
    typer.Option(
        help="Keep what media cost for later questions: encoder, prefix, blend:0.15, or kvcomm.",
    ),
]
ReuseFolder = Annotated[
    Path | None,
    typer.Option(help="Where --reuse keeps it, 10 GB at most; the user's cache if absent."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Model = Annotated[
    str | None, typer.Option(help="Checkpoint directory or hub id; embedded if absent.")
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1; CUDA where there is one if absent.")
]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Weights = Annotated[
    str | None,
    typer.Option(
        help="Packed weights (CPU): int8, int4, float16, bfloat16, int8-dynamic or fastest.",
        autocompletion=complete_weights,
    ),
]
Ttft = Annotated[
    float | None,
    typer.Option("--target-ttft-ms", help="Milliseconds to the first token: plan for it."),
]
TokenTarget = Annotated[
    int | None,
    typer.Option("--target-tokens", help="Visual tokens in a decoder layer, on average."),
]
Memory = Annotated[
    str | None, typer.Option("--max-memory", help="Weights, KV and activations: 2GB, 800MB.")
]
Quality = Annotated[str | None, typer.Option("--quality", help="high, balanced or fast.")]

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
    list[str] | None, typer.Option(help="Report when this happens; several times.")
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
StreamMemory = Annotated[
    str | None,
    typer.Option(help="Cache policies or auto; sink:64+window:4096+retrieve:64 if absent."),
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
Network = Annotated[bool, typer.Option("--allow-network", help="Open an address (rtsp, http).")]
Save = Annotated[Path | None, typer.Option(help="Save the session here at the end.")]
Restore = Annotated[Path | None, typer.Option(help="Go on with the session saved here.")]
MaxNewTokens = Annotated[int, typer.Option(help="Longest answer in tokens.")]


def check_apart(option: str, target: str | Path | None, *inputs: str | None) -> None:
    """Refuse (MmfastError) to write over a file that the command reads, which would be lost."""
    for given in filter(None, inputs if target is not None else ()):
        same = False
        with suppress(OSError, ValueError):  # one of them is no file
            same = Path(str(target)).samefile(given)
        if same:
            raise MmfastError(
                f"{option} {str(target)!r} is the file that is read, which would be lost; name "
                "another"
            )


def given_by(context: typer.Context, name: str) -> bool:
    """Return True for an option or argument that stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def check_sampling(context: typer.Context) -> list[str]:
    """Return the options that sample a clip; MmfastError where two ways to do so are given."""
    given = [f"--{name}" for name in ("frames", "fps") if given_by(context, name)]
    if len(given) > 1:
        raise MmfastError("--frames and --fps are two ways to sample a clip; leave one of them out")
    return given


def task_of(context: typer.Context, media: str) -> str:
    """Return the task for a file, and note an option that samples a picture."""
    from mmfast.cli.output import say_note
    from mmfast.frontends.image import kind_of

    kind, given = kind_of(media), check_sampling(context)
    if given and kind == "image":
        say_note(f"{given[0]} samples clips; a picture is taken as it is")
    return f"{kind}-qa"


def check_taken(context: typer.Context, way: str, taken: Collection[str]) -> None:
    """Refuse (MmfastError) options and arguments that a way to run a command would ignore."""
    for param in context.command.params:
        name = str(param.name)
        if given_by(context, name) and context.params.get(name) is not None and name not in taken:
            off = context.params[name] is False and param.secondary_opts  # --no-speed
            shown = (off or param.opts)[0] if param.param_type_name == "option" else name.upper()
            raise MmfastError(f"{way} does not use {shown}; leave it out")


def check_answer(max_new_tokens: int) -> None:
    """Refuse (MmfastError) answers without a token, before a stream is watched or a plan made."""
    if max_new_tokens < 1:
        raise MmfastError(f"--max-new-tokens {max_new_tokens} answers nothing; give at least 1")


def check_threads(threads: int | None) -> None:
    """Refuse (MmfastError) a number of threads that computes nothing or exhausts the machine."""
    most = max(256, os.cpu_count() or 1)
    if threads is not None and not 1 <= threads <= most:
        raise MmfastError(f"--threads {threads} is out of reach; give a number from 1 to {most}")
