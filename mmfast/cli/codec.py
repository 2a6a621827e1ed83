"""`mmfast codec`: sound to codes, codes to sound, or sound through both."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmfast.cli.options import Device, Json, check_apart
from mmfast.core.errors import MediaError, MmfastError

if TYPE_CHECKING:
    from torch import Tensor

SUFFIX = ".safetensors"  # of a file with codes
Source = Annotated[str, typer.Argument(help="A sound file, or codes in a .safetensors file.")]
Target = Annotated[
    str, typer.Option("--output", "-o", help="A sound file, or .safetensors for the codes.")
]
Model = Annotated[
    str | None, typer.Option(help="Directory or hub id of a codec; the embedded one if left out.")
]
Books = Annotated[int | None, typer.Option(help="Codebooks to encode to; all if left out.")]


def codec(
    source: Source,
    output: Target,
    model: Model = None,
    codebooks: Books = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Encode sound, decode codes, or do both, as the suffixes of the files say."""
    from mmfast.models.quiet import quiet

    quiet()
    check_apart("--output", output, source)
    read, written = (Path(each).suffix.lower() == SUFFIX for each in (source, output))
    if read and written:
        raise MmfastError(f"both files are {SUFFIX}; give a sound file for one of them")
    target: Any = output
    if not written:
        from mmfast.cli.voice import check_output

        target = check_output(output, as_json)
    else:
        from mmfast.cli.output import check_writable

        check_writable("--output", Path(output))
    from mmfast.models.loading import EMBEDDED_CODEC, load_codec

    given: dict[str, Any] = {} if codebooks is None else {"codebooks": codebooks}
    found: Any = load_codec(model or EMBEDDED_CODEC, device=device, **given)
    start = time.perf_counter()
    codes = read_codes(source, found) if read else found.encode(_sound(source, found))[0]
    if written:
        write_codes(output, codes, found)
    else:
        from mmfast.frontends.audio.wav import write_sound

        write_sound(target, found.decode(codes[None])[0].cpu(), found.sample_rate)
    _print(found, codes, time.perf_counter() - start, as_json)


def _sound(source: str, codec: Any) -> Tensor:
    from mmfast.frontends.audio.reader import load_audio

    return load_audio(source, codec.sample_rate)[None]


def write_codes(path: str, codes: Tensor, codec: Any) -> None:
    """Write codes, or latents, `[Q, T]` and the name of their codec."""
    from safetensors.torch import save_file

    from mmfast.core.files import whole_file

    with whole_file(path) as draft:
        save_file({"codes": codes.cpu().contiguous()}, draft, {"codec": codec.name})


def read_codes(path: str, codec: Any) -> Tensor:
    """Read codes `[Q, T]`; MediaError where the file has none, or those of another codec."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            name = (file.metadata() or {}).get("codec")
            codes: Tensor = file.get_tensor("codes")
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        text = f"{path!r} holds no codes: {reason}; give what mmfast codec wrote"
        raise MediaError(text) from error
    if name != codec.name:
        raise MediaError(f"{path!r} holds codes of {name}, not of {codec.name}; name it by --model")
    return codes


def _print(codec: Any, codes: Tensor, seconds: float, as_json: bool) -> None:
    from mmfast.cli.output import print_json, say_dim

    bits = codes.shape[0] * math.log2(codec.size) * codec.frame_rate if codec.size else None
    length = codes.shape[1] / codec.frame_rate
    document = {
        "codec": codec.name,
        "sample_rate": codec.sample_rate,
        "frame_rate": round(codec.frame_rate, 4),
        "codebooks": codes.shape[0],
        "size": codec.size,
        "frames": codes.shape[1],
        "seconds": round(length, 4),
        "bits_per_second": None if bits is None else round(bits, 1),
        "rtf": round(seconds / length, 4) if length else None,
    }
    if as_json:
        return print_json(document)
    rate = f"{document['bits_per_second']} bits a second" if bits else "latents"
    say_dim(f"{codec!r} · {length:.2f} s · {rate}")
