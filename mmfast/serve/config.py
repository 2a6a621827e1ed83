"""What a server is told: one value, from flags, environment and a file (`config_sources`)."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from mmfast.core.errors import MmfastError, unknown

ENGINES = ("inproc", "processes", "ray")
HASHED = "sha256:"  # how a key is given by its hash
_HASH = re.compile(HASHED + r"[0-9a-fA-F]{64}")
HIDDEN = ("api_keys",)  # never printed, logged or part of a repr
_QUOTAS = ("requests_per_minute", "bytes_per_minute", "tokens_per_minute", "requests_at_once")
_FROM_ZERO = ("port", *_QUOTAS)  # every other number is above it


@dataclass(frozen=True)
class ServerConfig:
    """Every option of `mmfast serve`.

    A field `max_tokens` is `--max-tokens`, `MMFAST_MAX_TOKENS` and `max_tokens` in the file;
    `api_keys` is `--api-key`, given several times.

    Attributes:
        model: Checkpoint directory or hub id; None is the embedded model.
        reduce: Spec string of reducers for requests that name none.
        cache: Spec string of cache policies for requests that name none.
        device: `cpu`, `cuda`, `cuda:1`; None takes CUDA where there is one.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        name: What the model is called in `/v1/models`; None takes its own name.
        host: Address to listen on; others than this machine only when it is told so.
        port: 0 takes a free one.
        api_keys: Who may call; empty lets everyone who reaches the port.
        engine: `inproc`, `processes` or `ray`.
        slots: Requests that are answered at once.
        context: Longest prompt and answer in tokens; None takes the model's.
        chunk: Tokens of a prompt that are worked on between two steps of the running answers.
        queue: Requests that may wait; one more is refused with 429.
        memory: Bytes of keys and values: `2GB`; None measures what there is.
        encode_replicas: Of engines with several workers.
        prefill_replicas: Of engines with several workers.
        decode_replicas: Of engines with several workers.
        ray_address: Of a cluster, for the engine `ray`; `local` starts one on this machine.
        max_tokens: Longest answer in tokens that a request may ask for.
        default_tokens: Longest answer of a request that does not say.
        frames: Frames sampled from a clip where the request does not say.
        max_frames: Most frames that a request may ask for.
        max_media: Images, clips and sounds of one request.
        max_text: Letters of one request.
        max_pixels: Of one picture or frame.
        max_video_pixels: Of one frame of a clip.
        max_clip_pixels: Of all frames of a clip, also those between the sampled ones.
        max_media_bytes: Of one input when decoded.
        max_media_seconds: Of a clip or a sound.
        held_bytes: Of all decoded media that are in use.
        decode_workers: Inputs that are decoded at once, each in a process of its own.
        decode_seconds: That decoding one input may take.
        decode_bytes: Memory that decoding one input may take.
        max_body_bytes: Of a request.
        bodies_bytes: Of all requests that are being read or answered.
        max_header_bytes: Of all headers of a request.
        max_headers: Of a request.
        header_seconds: In which the headers must have come.
        body_seconds: In which the body must have come.
        max_json_depth: Nesting of a body.
        requests_per_minute: Of one key or address; 0 does not limit.
        bytes_per_minute: Of bodies and messages of one key or address; 0 does not limit.
        tokens_per_minute: Of prompts and answers of one key or address; 0 does not limit.
        requests_at_once: Of one key or address, open sessions with them; 0 does not limit.
        send_seconds: That a client may take nothing of its reply.
        origins: Sites whose pages may call this server from a browser: `https://example.com`.
        metrics_need_key: Whether `/metrics` asks for a key where the rest does.
        remote_hosts: Hosts that media may be fetched from; empty allows `data:` URLs only.
        remote_seconds: That fetching may take.
        remote_bytes: Of one fetched file.
        voice: Whether speech is offered (`/v1/audio/speech`, `/v1/realtime`, `input_audio`).
        speech: Speech model: directory or hub id; None is the embedded one.
        realtime_sessions: Open at once; one more is refused.
        session_seconds: Longest session.
        idle_seconds: Without an event from the client, then the session is closed.
        realtime_message_bytes: Of one event.
        demo: Whether the demo is mounted at `/demo`, where gradio is installed.
        metrics: Whether `/metrics` is offered, to everybody who reaches the port.
        json_logs: One JSON object a line.
        log_text: Whether what is asked and answered is logged; media and keys never are.
        log_level: `debug`, `info`, `warning` or `error`.
        connections: Open at once; one more gets 503.
        keep_alive_seconds: That an idle connection is kept.
        shutdown_seconds: That running requests get to end.
    """

    model: str | None = None
    reduce: str | None = None
    cache: str | None = None
    device: str | None = None
    dtype: str = "auto"
    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    engine: str = "inproc"
    slots: int = 16
    context: int | None = None
    chunk: int = 256
    queue: int = 32
    memory: str | None = None
    encode_replicas: int = 1
    prefill_replicas: int = 1
    decode_replicas: int = 1
    ray_address: str = "local"
    max_tokens: int = 1024
    default_tokens: int = 256
    frames: int = 8
    max_frames: int = 64
    max_media: int = 16
    max_text: int = 200_000
    max_pixels: int = 33_177_600  # a frame of 8K
    max_video_pixels: int = 9_437_184  # 4096 x 2304
    max_clip_pixels: int = 20_000_000_000  # five minutes of 1080p at 30 a second
    max_media_bytes: int = 256 << 20
    max_media_seconds: float = 600.0
    held_bytes: int = 2 << 30
    decode_workers: int = 2
    decode_seconds: float = 20.0
    decode_bytes: int = 1 << 30
    max_body_bytes: int = 64 << 20
    bodies_bytes: int = 512 << 20
    max_header_bytes: int = 32 << 10
    max_headers: int = 100
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    max_json_depth: int = 32
    requests_per_minute: int = 0
    bytes_per_minute: int = 0
    tokens_per_minute: int = 0
    requests_at_once: int = 0
    send_seconds: float = 60.0
    origins: tuple[str, ...] = ()
    metrics_need_key: bool = False
    remote_hosts: tuple[str, ...] = ()
    remote_seconds: float = 10.0
    remote_bytes: int = 64 << 20
    voice: bool = True
    speech: str | None = None
    realtime_sessions: int = 4
    session_seconds: float = 3600.0
    idle_seconds: float = 300.0
    realtime_message_bytes: int = 1 << 20
    demo: bool = True
    metrics: bool = True
    json_logs: bool = False
    log_text: bool = False
    log_level: str = "info"
    connections: int = 512
    keep_alive_seconds: float = 10.0
    shutdown_seconds: float = 10.0

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            MmfastError: One line that names the option, the value and the fix.
        """
        if self.engine not in ENGINES:
            raise MmfastError(unknown("engine", self.engine, ENGINES))
        levels = ("debug", "info", "warning", "error")
        if self.log_level not in levels:
            raise MmfastError(unknown("log level", self.log_level, levels))
        for name, value in vars(self).items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if number and name not in _FROM_ZERO and not value > 0:
                raise MmfastError(f"{name}={value!r} is not allowed; give more than 0")
        if not 0 <= self.port <= 65535:
            raise MmfastError(f"port={self.port} is none; give 1 to 65535, or 0 for a free one")
        for name in _QUOTAS:
            if getattr(self, name) < 0:
                raise MmfastError(f"{name}={getattr(self, name)} is not allowed; 0 does not limit")
        if any(not key.strip() or not key.isascii() for key in self.api_keys):
            raise MmfastError("an API key is empty or has letters beyond ASCII; give another")
        for key in self.api_keys:
            if key.startswith(HASHED) and not _HASH.fullmatch(key):
                raise MmfastError(
                    f"an API key begins with {HASHED} and is no hash; give {HASHED} and 64 "
                    "hexadecimal digits, as sha256sum prints them, or the key itself"
                )
        if self.frames > self.max_frames:
            raise MmfastError(f"frames={self.frames} is more than max_frames={self.max_frames}")

    def public(self) -> dict[str, Any]:
        """All options by name, for `--dry-run` and logs; secrets as how many there are."""
        shown = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in HIDDEN:
            shown[name] = f"<{len(shown[name])} hidden>" if shown[name] else []
        return {k: list(v) if isinstance(v, tuple) else v for k, v in shown.items()}


PREFIX = "MMFAST_"
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def resolve(
    flags: Mapping[str, Any],
    file: str | Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ServerConfig:
    """All options.

    Args:
        flags: Fields of `ServerConfig` that were given on the command line; None was not.
        file: A TOML file of fields; `MMFAST_CONFIG` where None.
        environ: The environment.

    Raises:
        MmfastError: A value that is none, an option that does not exist, a file that is no TOML.
    """
    types, found = types_of(), dict[str, Any]()
    file = file or environ.get(f"{PREFIX}CONFIG") or None
    if file is not None:
        found |= _read(Path(file), types)
    for name, kind in types.items():
        text = environ.get(PREFIX + name.upper(), environ.get(_singular(name)))
        if text is not None:
            found[name] = _parsed(text, kind, PREFIX + name.upper())
    found |= {name: value for name, value in flags.items() if value is not None}
    return ServerConfig(**found)


def types_of() -> dict[str, Any]:
    """The type of every option; `X | None` is `X`."""
    hints = get_type_hints(ServerConfig)
    return {each.name: _plain(hints[each.name]) for each in fields(ServerConfig)}


def helps() -> dict[str, str]:
    """What every option is about, from the docstring of `ServerConfig`."""
    text = (ServerConfig.__doc__ or "").partition("Attributes:")[2]
    found = re.findall(r"^ {8}(\w+): (.*(?:\n {10,}.*)*)", text, re.MULTILINE)
    return {name: " ".join(line.replace("`", "").split()) for name, line in found}


def _plain(hint: Any) -> Any:
    if isinstance(hint, UnionType):
        return next(each for each in get_args(hint) if each is not NoneType)
    return tuple if get_origin(hint) is tuple else hint


def _singular(name: str) -> str:
    return PREFIX + (name[:-1] if name.endswith("s") else name).upper()


def _read(path: Path, types: Mapping[str, Any]) -> dict[str, Any]:
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise MmfastError(f"--config {str(path)!r} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise MmfastError(f"--config {str(path)!r} is no TOML: {error}") from None
    found = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        if name not in types:
            raise MmfastError(f"--config {str(path)!r}: {unknown('option', key, types)}")
        found[name] = _checked(value, types[name], f"{key} in {str(path)!r}")
    return found


def _checked(value: Any, kind: Any, where: str) -> Any:
    """A value of TOML, if it is of the type."""
    if kind is tuple and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return tuple(value)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if kind is float and whole:
        return float(value)
    if isinstance(value, kind) and (kind is not int or whole):
        return value
    raise MmfastError(f"{where} is {value!r}; give {_wanted(kind)}")


def _parsed(text: str, kind: Any, where: str) -> Any:
    """A value of the environment."""
    if kind is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if kind is bool and text.lower() in (*_YES, *_NO):
        return text.lower() in _YES
    if kind is str:
        return text or None
    try:
        if kind in (int, float):
            return kind(text)
    except ValueError:
        pass
    raise MmfastError(f"{where}={text!r} is wrong; give {_wanted(kind)}")


def _wanted(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", tuple: "texts"}
    return names.get(kind, "a text")
