"""`mmfast ask`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mmfast.cli_options import (
    Cache,
    Device,
    Dtype,
    Json,
    Memory,
    Model,
    Quality,
    Reduce,
    TokenTarget,
    Ttft,
)


def ask(
    media: Annotated[str, typer.Argument(help="Video or image file.")],
    question: Annotated[str, typer.Argument(help="What you want to know.")],
    model: Model = None,
    reduce: Reduce = None,
    cache: Cache = None,
    frames: Annotated[int, typer.Option(help="Frames sampled uniformly.")] = 8,
    fps: Annotated[float | None, typer.Option(help="Sample at this rate instead.")] = None,
    device: Device = None,
    dtype: Dtype = "auto",
    target_ttft_ms: Ttft = None,
    target_tokens: TokenTarget = None,
    max_memory: Memory = None,
    quality: Quality = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 64,
    save_overlay: Annotated[
        Path | None,
        typer.Option(help="Picture of the kept, merged and dropped patches: .png, .jpg, .webp."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Answer one question about a video or an image, and say what it cost."""
    from mmfast.cli_output import print_answer, quiet
    from mmfast.frontends.image import kind_of
    from mmfast.models.prompt import check_question

    quiet()
    task = f"{kind_of(media)}-qa"
    check_question(question)
    if save_overlay is not None:
        from mmfast.pipelines.overlay import check_target

        check_target(save_overlay)
    from mmfast.pipelines import pipeline

    options: dict[str, Any] = {"reduce": reduce, "cache": cache, "frames": frames, "fps": fps}
    options |= {"target_ttft_ms": target_ttft_ms, "target_tokens": target_tokens}
    options |= {"max_memory": max_memory, "quality": quality}
    pipe = pipeline(
        task, model, device=device, dtype=dtype, max_new_tokens=max_new_tokens, **options
    )
    answer = pipe(media, question)
    if save_overlay is not None:
        from mmfast.pipelines.overlay import save_sheet

        save_sheet(pipe.overlay(media, answer.trace), save_overlay)
    print_answer(answer, as_json)
