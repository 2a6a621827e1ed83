"""Options of the server, from flags, the environment and a TOML file.

A plain dataclass, so that `mmfast --help` imports no pydantic. Values of the environment are
parsed, values of the file must have the type of the option, and every error names the source.
"""

from __future__ import annotations

import inspect
import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from mmfast.core.errors import MmfastError, unknown
from mmfast.core.spec import DTYPES

# Names that clients of OpenAI send, and the number of the voice that speaks for each.
VOICE_NAMES = {
    "alloy": 0, "ash": 1, "ballad": 0, "cedar": 1, "coral": 2, "echo": 1, "fable": 0,
    "marin": 3, "nova": 2, "onyx": 1, "sage": 3, "shimmer": 3, "verse": 0,
}  # fmt: skip
# Further names of the model that is served; the last was that of the embedded one before.
ALIASES = ("mmfast", "gpt-realtime", "mmfast-tiny-video")
ENGINES = ("inproc", "ray", "vllm")
_REPLICAS = ("replicas", "workers", "encode_replicas", "prefill_replicas", "decode_replicas")
HASHED = "sha256:"  # prefix of a key that is given by its hash
_HASH = re.compile(HASHED + r"[0-9a-fA-F]{64}")
HIDDEN = ("api_keys",)  # never printed, logged or part of a repr
# quotas of one caller, and their defaults on a server that other machines reach
_QUOTAS = {
    "requests_per_minute": 600,
    "bytes_per_minute": 1 << 30,
    "tokens_per_minute": 1_000_000,
    "pixels_per_minute": 2_000_000_000,
    "requests_at_once": 24,
}
_FROM_ZERO = ("port", *_QUOTAS)  # every other number must be above 0


@dataclass(frozen=True)
class ServerConfig:
    """Every option of `mmfast serve`.

    A field `max_tokens` is `--max-tokens`, `MMFAST_MAX_TOKENS` and `max_tokens` in the file;
    `api_keys` is `--api-key`, given several times.

    Attributes:
        model: Checkpoint directory or hub id; None is the embedded model.
        reduce: Spec string of reducers for requests that name none, or `auto`.
        cache: Spec string of cache policies for requests that name none.
        reuse: Keep what media cost for later requests: `encoder`, `prefix`, `blend:0.15`,
            `craft:0.15` or `kvcomm`, the last three at any place of a prompt. In one process
            alone.
        reuse_folder: Where `reuse` keeps it for later processes, 10 GB at most; None keeps nothing
            on disk.
        reuse_memory: Bytes of main memory in which `reuse` keeps it.
        modules: JSON file with a schema of prompt modules (`mmfast.PromptSchema`), which requests
            put together; paths of media start at its folder. Needs `reuse` of keys and values.
        lora: LoRA adapter as `name=FOLDER`; requests that name it as their model are answered by
            it. Several share one copy of the model.
        device: `cpu`, `cuda`, `cuda:1`; None takes CUDA where there is one.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        weights: Packed weights of the decoder on a CPU: `int8`, `int4`, `float16`, `bfloat16`,
            `int8-dynamic` or `fastest`.
        attn: Attention back end: `sdpa`, `eager`, `flash_attention_2`, `flash_attention_3` or
            `flex_attention`.
        prefill: Spec string of sparse prefill for requests that name none.
        decode: Spec string of draft and verify for requests that name none: `self:0.1`, `recycle`,
            `lookup`, or `draft:DIR` or `exit:FILE`, which requests may name, too. In one process,
            or in whole copies on `ray`.
        guard: What refuses harmful pictures: JSON file of an `ImageGuard`, or a CLIP's directory
            or hub id.
        name: Name of the model in `/v1/models`; None takes its own name.
        strict: Refuse unknown parameters and those without effect, instead of naming them in the
            header `x-mmfast-ignored`.
        strict_model: Answer to the name of the model alone, not to `mmfast` and `gpt-realtime`.
        host: Address to listen on; the default admits this machine only.
        port: Port to listen on; 0 takes a free one.
        api_keys: Keys of clients; without one, everyone who reaches the port may ask.
        engine: `inproc`, this process alone, `ray`, processes of this and other machines, or
            `vllm`, vLLM's own server with the reducers of `reduce`.
        slots: Most requests answered at once.
        context: Longest prompt and answer in tokens; None takes the model's.
        chunk: Tokens of prompts between two steps of the running answers; None: 256, or up to
            2,048 as long as they take less than 40 ms.
        queue: Most requests that wait; another one is refused with 429.
        memory: Bytes of keys and values, such as `2GB`; None takes a share of the free memory.
        replicas: Copies of the whole engine on `ray`; None runs encode, prefill and decode apart.
        workers: Processes of the engine `ray` with a copy of the model each, whose roles (encode,
            prefill, decode, or all three) follow the load.
        encode_replicas: Processes of the engine `ray` that encode.
        prefill_replicas: Processes of the engine `ray` that read prompts.
        decode_replicas: Processes of the engine `ray` that decode answers.
        ray_address: Address of a cluster for the engine `ray`; `local` starts one here.
        max_tokens: Longest answer in tokens that a request may ask for.
        default_tokens: Longest answer in tokens of a request without `max_tokens`.
        frames: Frames sampled from a clip of a request without `frames`.
        max_frames: Most frames that a request may ask for.
        max_media: Most images, clips and sounds of one request.
        max_text: Most letters of one request.
        max_pixels: Most pixels of one picture or frame.
        max_video_pixels: Most pixels of one frame of a clip.
        max_clip_pixels: Most pixels of all frames of a clip, also of those not sampled.
        max_media_bytes: Most bytes of one input after decoding.
        max_media_seconds: Longest clip or sound in seconds.
        held_bytes: Most bytes of all decoded media in use.
        request_pixels: Most pixels of all pictures of a request together; each is reduced to its
            share after decoding.
        decode_workers: Inputs decoded at once, each in a process of its own.
        decode_queue: Most media that wait to be decoded; another one is refused with 429.
        decode_seconds: Longest decoding of one input in seconds.
        decode_bytes: Most memory for decoding one input.
        max_body_bytes: Most bytes of a request.
        bodies_bytes: Most bytes of all requests that are being read or answered.
        max_header_bytes: Most bytes of all headers of a request.
        max_headers: Most headers of a request.
        header_seconds: Longest time for the headers to arrive.
        body_seconds: Longest time for the body to arrive.
        max_json_depth: Deepest nesting of a body.
        requests_per_minute: Requests of one key or address; 0 does not limit. None is 600, and
            nothing where `host` is this machine alone.
        bytes_per_minute: Bytes of bodies and messages of one key or address, likewise; 1 GiB.
        tokens_per_minute: Tokens of prompts and answers of one key or address; 1,000,000.
        pixels_per_minute: Decoded pixels of one key or address; 2,000,000,000.
        requests_at_once: Requests and sessions of one key or address; 24.
        send_seconds: Longest time that a client may read nothing of its reply.
        origins: Sites whose pages may call this server from a browser: `https://example.com`.
        metrics_need_key: Ask for a key for `/metrics` also where `host` is this machine alone;
            elsewhere it is always asked for.
        remote_hosts: Hosts that media may be fetched from; empty allows `data:` URLs only.
        remote_seconds: Longest fetch in seconds.
        remote_bytes: Most bytes of one fetched file.
        voice: Offer speech (`/v1/audio/speech`, `/v1/realtime`, `input_audio`).
        speech: Speech model: directory or hub id; None is the embedded one.
        listener: Model that writes speech down, such as Whisper: directory or hub id; None takes
            the speech model.
        talker: Model that speaks: directory or hub id; None takes the speech model.
        translator: Model that translates what is said (`/v1/audio/translations`): directory or hub
            id of an encoder-decoder; None is the embedded one.
        realtime_sessions: Most open sessions; another one is refused.
        session_seconds: Longest session.
        idle_seconds: Time without an event of the client after which a session is closed.
        realtime_message_bytes: Most bytes of one event.
        webrtc_address: Address of this machine as callers over WebRTC see it, where it is behind a
            router that passes UDP on; else its own.
        demo: Mount the demo at `/demo` where gradio is installed.
        metrics: Offer `/metrics`.
        json_logs: Log one JSON object a line.
        log_text: Log questions and answers; media and keys are never logged.
        log_level: `debug`, `info`, `warning` or `error`.
        connections: Most open connections; another one gets 503.
        keep_alive_seconds: Time that an idle connection is kept.
        shutdown_seconds: Time for running requests to end.
    """

    model: str | None = None
    reduce: str | None = None
    cache: str | None = None
    reuse: str | None = None
    reuse_folder: str | None = None
    reuse_memory: str = "1GB"
    modules: str | None = None
    lora: tuple[str, ...] = ()
    device: str | None = None
    dtype: str = "auto"
    weights: str | None = None
    attn: str | None = None
    prefill: str | None = None
    decode: str | None = None
    guard: str | None = None
    name: str | None = None
    strict: bool = False
    strict_model: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    engine: str = "inproc"
    slots: int = 16
    context: int | None = None
    chunk: int | None = None
    queue: int = 32
    memory: str | None = None
    replicas: int | None = None
    workers: int | None = None
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
    request_pixels: int = 67_108_864
    decode_workers: int = 2
    decode_queue: int = 512  # the media of all requests that wait
    decode_seconds: float = 20.0
    decode_bytes: int = 1 << 30
    max_body_bytes: int = 64 << 20
    bodies_bytes: int = 512 << 20
    max_header_bytes: int = 32 << 10
    max_headers: int = 100
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    max_json_depth: int = 32
    requests_per_minute: int | None = None
    bytes_per_minute: int | None = None
    tokens_per_minute: int | None = None
    pixels_per_minute: int | None = None
    requests_at_once: int | None = None
    send_seconds: float = 60.0
    origins: tuple[str, ...] = ()
    metrics_need_key: bool = False
    remote_hosts: tuple[str, ...] = ()
    remote_seconds: float = 10.0
    remote_bytes: int = 64 << 20
    voice: bool = True
    speech: str | None = None
    listener: str | None = None
    talker: str | None = None
    translator: str | None = None
    realtime_sessions: int = 4
    session_seconds: float = 3600.0
    idle_seconds: float = 300.0
    realtime_message_bytes: int = 1 << 20
    webrtc_address: str | None = None
    demo: bool = True
    metrics: bool = True
    json_logs: bool = False
    log_text: bool = False
    log_level: str = "info"
    connections: int = 512
    keep_alive_seconds: float = 10.0
    shutdown_seconds: float = 10.0

    def __post_init__(self) -> None:
        """Refuse impossible values (MmfastError)."""
        if self.engine not in ENGINES:
            raise MmfastError(unknown("engine", self.engine, ENGINES))
        if self.engine != "vllm" and self.dtype not in DTYPES:
            raise MmfastError(unknown("dtype", self.dtype, DTYPES))
        levels = ("debug", "info", "warning", "error")
        if self.log_level not in levels:
            raise MmfastError(unknown("log level", self.log_level, levels))
        for name, value in vars(self).items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if number and name not in _FROM_ZERO and not value > 0:
                raise MmfastError(f"{name}={value!r} is not allowed; give more than 0")
        if self.max_tokens < self.default_tokens != ServerConfig.default_tokens:
            raise MmfastError(
                f"default_tokens={self.default_tokens} is more than max_tokens={self.max_tokens}, "
                "the longest answer; give less, or a larger max_tokens"
            )
        self._check_replicas()
        self._check_reuse()
        self.adapters()
        if not 0 <= self.port <= 65535:
            raise MmfastError(f"port={self.port} is none; give 1 to 65535, or 0 for a free one")
        for name in _QUOTAS:
            if (getattr(self, name) or 0) < 0:
                raise MmfastError(f"{name}={getattr(self, name)} is not allowed; 0 does not limit")
        if self.webrtc_address is not None:
            try:
                ipaddress.ip_address(self.webrtc_address)
            except ValueError:
                text = "give an address such as 203.0.113.7, no name"
                raise MmfastError(f"webrtc_address={self.webrtc_address!r}: {text}") from None
        if any(not key.strip() or not key.isascii() for key in self.api_keys):
            raise MmfastError("an API key is empty or has letters beyond ASCII; give another")
        for key in self.api_keys:
            if key.startswith(HASHED) and not _HASH.fullmatch(key):
                raise MmfastError(
                    f"an API key begins with {HASHED} and is no hash; give {HASHED} and 64 "
                    "hexadecimal digits, as sha256sum prints them, or the key itself"
                )
        if self.decode_queue < self.max_media:
            raise MmfastError(
                f"decode_queue={self.decode_queue} is less than max_media={self.max_media}, so a "
                "request with all its media would be refused; give more"
            )
        if self.frames > self.max_frames:
            raise MmfastError(f"frames={self.frames} is more than max_frames={self.max_frames}")

    def adapters(self) -> dict[str, str]:
        """Return the folders of LoRA adapters by name."""
        found: dict[str, str] = {}
        for given in self.lora:
            name, _, folder = given.partition("=")
            if not (name.strip() and folder.strip()):
                raise MmfastError(f"--lora {given!r} names no adapter; give name=FOLDER")
            if name in found or name == self.name:
                raise MmfastError(f"--lora {given!r}: the name {name!r} is taken; give another")
            found[name] = folder
        return found

    def quota(self, name: str) -> int:
        """Return a quota of one caller; 0 does not limit."""
        given = getattr(self, name)
        local = self.host == "localhost" or self.host.startswith("127.") or self.host == "::1"
        return int(given if given is not None else 0 if local else _QUOTAS[name])

    def _check_replicas(self) -> None:
        many = {name: getattr(self, name) for name in _REPLICAS if (getattr(self, name) or 1) > 1}
        if self.workers == 1:
            raise MmfastError("workers=1 has no roles to share out; give 2 or more, or inproc")
        for name, value in many.items():
            if self.engine != "ray":
                raise MmfastError(
                    f"{name}={value} needs the engine ray, and engine={self.engine!r} is one "
                    'process; give --engine ray, after pip install "mmfast[ray]"'
                )
            if self.replicas is not None and name != "replicas":
                raise MmfastError(
                    f"{name}={value} is not possible with replicas={self.replicas}, each of which "
                    "runs the whole model; leave one of them out"
                )
            if self.workers is not None and name != "workers":
                raise MmfastError(
                    f"{name}={value} is not possible with workers={self.workers}, which take every "
                    "role; leave one of them out"
                )

    def _check_reuse(self) -> None:
        if self.reuse is not None and self.engine != "inproc":
            raise MmfastError(
                f"reuse={self.reuse!r} acts in one process, and engine={self.engine!r} has more; "
                "leave it out, or give --engine inproc"
            )
        if self.reuse is None and self.reuse_folder is not None:
            raise MmfastError(
                f"reuse_folder={self.reuse_folder!r} keeps nothing alone; give --reuse prefix"
            )
        if self.modules is not None and self.reuse in (None, "encoder"):
            raise MmfastError(
                f"modules={self.modules!r} are keys and values that are kept; give --reuse prefix"
            )

    def public(self) -> dict[str, Any]:
        """Return all options by name, for `--dry-run` and logs; of secrets only their number."""
        shown = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in HIDDEN:
            shown[name] = f"<{len(shown[name])} hidden>" if shown[name] else []
        return {k: list(v) if isinstance(v, tuple) else v for k, v in shown.items()}


PREFIX = "MMFAST_"
_PLACES = ("model", "speech", "listener", "talker", "translator", "guard", "reuse_folder")
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def resolve(
    flags: Mapping[str, Any],
    file: str | Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ServerConfig:
    """Collect all options; flags override the environment, which overrides the file.

    `flags` are fields of `ServerConfig`, None where not given; `file` is a TOML file of fields,
    `MMFAST_CONFIG` where None. MmfastError: a wrong type, an unknown option, a file that is not
    TOML.
    """
    types, found = types_of(), dict[str, Any]()
    file = file or environ.get(f"{PREFIX}CONFIG") or None
    if file is not None:
        found |= _read(Path(file), types)
    for name, kind in types.items():
        text = environ.get(
            PREFIX + name.upper(), environ.get(PREFIX + name.removesuffix("s").upper())
        )
        if text is not None:
            found[name] = _parsed(text, kind, PREFIX + name.upper())
    found |= {name: value for name, value in flags.items() if value is not None}
    for name in _PLACES:
        if str(found.get(name) or "").startswith("~"):  # which no shell has replaced
            with suppress(RuntimeError):  # a user that is not known
                found[name] = str(Path(found[name]).expanduser())
    return ServerConfig(**found)


def types_of() -> dict[str, Any]:
    """Return the type of every option; of `X | None`, `X`."""
    hints = get_type_hints(ServerConfig)
    return {each.name: _plain(hints[each.name]) for each in fields(ServerConfig)}


def helps() -> dict[str, str]:
    """Return the description of every option from the docstring of `ServerConfig`."""
    text = (inspect.getdoc(ServerConfig) or "").partition("Attributes:")[2]  # indented alike
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {6,}.*)*)", text, re.MULTILINE)
    return {name: " ".join(line.replace("`", "").split()) for name, line in found}


def _plain(hint: Any) -> Any:
    if isinstance(hint, UnionType):
        return next(each for each in get_args(hint) if each is not NoneType)
    return tuple if get_origin(hint) is tuple else hint


def _read(path: Path, types: Mapping[str, Any]) -> dict[str, Any]:
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # of Windows' editors
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise MmfastError(
            f"--config {str(path)!r} cannot be read: {why}; give a TOML file"
        ) from None
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
    """Return a value of TOML that has the type of the option."""
    if kind is tuple and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return tuple(value)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if kind is float and whole:
        return float(value)
    if isinstance(value, kind) and (kind is not int or whole):
        return value
    raise MmfastError(f"{where} is {value!r}; give {_wanted(kind)}")


def _parsed(text: str, kind: Any, where: str) -> Any:
    """Parse a value of the environment."""
    if kind is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if kind is bool and text.lower() in (*_YES, *_NO):
        return text.lower() in _YES
    if kind is str:
        return text or None
    with suppress(ValueError):
        if kind in (int, float):
            return kind(text)
    raise MmfastError(f"{where}={text!r} is wrong; give {_wanted(kind)}")


def _wanted(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", tuple: "texts"}
    return names.get(kind, "a text")


def answers_to(asked: str | None, model: str, strict: bool, agent: bool = False) -> bool:
    """Return whether the served model answers to a name; None asks for none.

    Unless `strict`, it answers to `ALIASES` as well, and an `agent` on a socket may ask for any
    name: agents have those of other vendors built in; a client of HTTP is told of a wrong one.
    """
    return asked in (None, model) or (not strict and (agent or asked in ALIASES))
