"""The shared state of all routes: engine, speech model and counters.

Engine and speech model are loaded in the background: the port answers at once, and early requests
wait for the engine.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import PurePath
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mmfast.core.errors import MmfastError
from mmfast.models.image_guard import judge_of
from mmfast.serve.config import ServerConfig, answers_to
from mmfast.serve.engine.base import Executor, Finish, Health
from mmfast.serve.guard.errors import ApiError, bad_request, busy

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)

_M = ("model_name",)
_SERIES: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "mmfast_ttft_seconds": (_FIRST, "Request to first token.", ()),
    "mmfast_inter_token_seconds": (_GAPS, "Between tokens.", ()),
    "mmfast_queue_seconds": (_FIRST, "Wait for a place.", ()),
    "mmfast_stage_seconds": (_GAPS, "Work of a stage.", ("stage",)),
    "mmfast_first_audio_seconds": (_FIRST, "Request or speech to first sound.", ("source",)),
    "mmfast_tokens": (Counter, "Visual tokens.", ("when",)),
    "mmfast_text_tokens": (Counter, "Prompt, answer.", ("kind",)),
    "mmfast_requests": (Counter, "Answered requests.", ("route", "status")),
    "mmfast_rejected": (Counter, "Refused.", ("reason",)),
    # those of vLLM, for its dashboards
    "vllm:time_to_first_token_seconds": (_FIRST, "Request to first token.", _M),
    "vllm:inter_token_latency_seconds": (_GAPS, "Between tokens.", _M),
    "vllm:e2e_request_latency_seconds": (_FIRST, "Request to last token.", _M),
    "vllm:request_queue_time_seconds": (_FIRST, "Wait for a place.", _M),
    "vllm:request_prefill_time_seconds": (_FIRST, "Reading of the prompt.", _M),
    "vllm:request_decode_time_seconds": (_FIRST, "First to last token.", _M),
    "vllm:prompt_tokens": (Counter, "Tokens of prompts.", _M),
    "vllm:generation_tokens": (Counter, "Tokens of answers.", _M),
    "vllm:spec_decode_num_draft_tokens": (Counter, "Drafts proposed.", _M),
    "vllm:spec_decode_num_accepted_tokens": (Counter, "Drafts accepted.", _M),
    "vllm:request_success": (Counter, "Complete answers.", (*_M, "finished_reason")),
}


class Metrics:
    """Counters of one server, in a registry of its own.

    `health` is read for each page, `model` returns the label of the series of vLLM.
    """

    def __init__(self, health: Callable[[], Health | None], model: Callable[[], str]) -> None:
        self._registry = own = CollectorRegistry()
        self._model, self._series = model, dict[str, Any]()
        for name, (kind, text, labels) in _SERIES.items():
            if kind is Counter:
                self._series[name] = Counter(name, text, labels, registry=own)
            else:
                self._series[name] = Histogram(name, text, labels, registry=own, buckets=kind)
        self._sessions = Gauge("mmfast_realtime_sessions", "Open sessions.", registry=own)
        own.register(_EngineGauges(health, model))

    def _note(self, name: str, value: float, *labels: str) -> None:
        """Count a figure; a series of vLLM gets the name of the model."""
        labels = (self._model(), *labels) if name.startswith("vllm:") else labels
        series = self._series[name].labels(*labels) if labels else self._series[name]
        series.observe(value) if isinstance(self._series[name], Histogram) else series.inc(value)

    def ttft(self, seconds: float) -> None:
        """Count a first token."""
        self._note("mmfast_ttft_seconds", seconds)
        self._note("vllm:time_to_first_token_seconds", seconds)

    def gap(self, seconds: float, tokens: int = 1) -> None:
        """Count further tokens, and the seconds since those before."""
        self._note("mmfast_inter_token_seconds", seconds / max(tokens, 1))
        self._note("vllm:inter_token_latency_seconds", seconds / max(tokens, 1))

    def finished(self, finish: Finish, seconds: float = 0.0) -> None:
        """Count the tokens and stages of a complete answer that took these seconds."""
        trace: Mapping[str, Any] = finish.trace
        note = self._note
        note("vllm:e2e_request_latency_seconds", seconds)
        if (waited := trace.get("queue_ms")) is not None:
            note("mmfast_queue_seconds", waited / 1e3)
            note("vllm:request_queue_time_seconds", waited / 1e3)
        note("vllm:request_success", 1, finish.reason)
        note("vllm:prompt_tokens", finish.prompt_tokens)
        note("vllm:generation_tokens", finish.completion_tokens)
        _span(self._model(), finish, seconds)
        note("mmfast_text_tokens", finish.prompt_tokens, "prompt")
        note("mmfast_text_tokens", finish.completion_tokens, "completion")
        note("mmfast_text_tokens", finish.cached_tokens, "cached")
        note("mmfast_tokens", trace.get("visual_tokens") or 0, "before")
        note("mmfast_tokens", trace.get("kept_tokens") or 0, "after")
        for row in trace.get("rows") or ():
            note("mmfast_stage_seconds", max(row["ms"] / 1e3, 0.0), str(row["stage"]))
            if row["stage"] in ("prefill", "decode"):
                note(f"vllm:request_{row['stage']}_time_seconds", max(row["ms"] / 1e3, 0.0))
            if row["stage"] == "draft":
                note("vllm:spec_decode_num_draft_tokens", row["tokens_in"])
                note("vllm:spec_decode_num_accepted_tokens", row["tokens_out"])

    def request(self, route: str, status: int) -> None:
        """Count a reply; `route` is the pattern, never the path of the client."""
        self._note("mmfast_requests", 1, route, str(status))

    def rejected(self, reason: str) -> None:
        """Count a refusal: `busy`, `auth`, `rate`, `body`, `media`, `invalid`, `session`."""
        self._note("mmfast_rejected", 1, reason)

    def first_audio(self, seconds: float, source: str) -> None:
        """Count a first piece of sound; `source` is `speech` or `realtime`."""
        self._note("mmfast_first_audio_seconds", seconds, source)

    def session_opened(self) -> None:
        """Count the start of a realtime session."""
        self._sessions.inc()

    def session_closed(self) -> None:
        """Count the end of a realtime session."""
        self._sessions.dec()

    def value(self, name: str, **labels: str) -> float:
        """Return one figure, 0 where nothing was counted yet."""
        return self._registry.get_sample_value(name, labels) or 0.0

    def text(self) -> bytes:
        """Return the page."""
        return generate_latest(self._registry)


class _EngineGauges(Collector):
    """Gauges of the engine at the time of the request."""

    def __init__(self, health: Callable[[], Health | None], model: Callable[[], str]) -> None:
        self._health, self._model = health, model

    def collect(self) -> Iterator[Metric]:
        found = self._health() or Health(False)
        yield GaugeMetricFamily("mmfast_ready", "Whether requests are taken.", found.ready)
        yield GaugeMetricFamily(
            "mmfast_running", "Requests that are being answered.", found.running
        )
        yield GaugeMetricFamily("mmfast_waiting", "Requests that wait.", found.waiting)
        used = found.gauges.get("kv_bytes", 0.0) / (found.gauges.get("kv_bytes_limit") or 1.0)
        for name, value in (
            ("num_requests_running", found.running),
            ("num_requests_waiting", found.waiting),
            ("kv_cache_usage_perc", used),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", "As in vLLM.", labels=["model_name"])
            gauge.add_metric([self._model()], float(value))
            yield gauge
        more = GaugeMetricFamily("mmfast_engine", "Figures of the engine.", labels=["name"])
        for name, value in sorted(found.gauges.items()):
            more.add_metric([name], float(value))
        yield more

    def describe(self) -> Iterator[Metric]:
        return iter(())


def _span(model: str, finish: Finish, seconds: float) -> None:
    """Send a span of OpenTelemetry with figures alone, where its API is installed."""
    try:
        from opentelemetry import trace
    except ImportError:
        return
    end = time.time_ns()
    named: dict[str, Any] = {
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": finish.prompt_tokens,
        "gen_ai.usage.output_tokens": finish.completion_tokens,
        "gen_ai.response.finish_reasons": [finish.reason],
        "mmfast.ttft_ms": float(finish.trace.get("ttft_ms") or 0.0),
    }
    tracer = trace.get_tracer("mmfast")
    tracer.start_span("chat", start_time=end - int(seconds * 1e9), attributes=named).end(end)


T = TypeVar("T")
EMBEDDED, SPEECH, TRANSLATOR = "mmfast-tiny-scenes", "mmfast-tiny-speech", "tiny-translate"
VOICES = 2  # speeches and recordings processed at once
HEARD = 32  # most recordings that wait for transcription; another one is refused
_log = logging.getLogger("mmfast.serve")


class LazyLoader:
    """A value that is loaded once, in a thread of its own, on first use."""

    def __init__(self, make: Callable[[], Any], value: Any = None) -> None:
        self._make, self._lock = make, threading.Lock()
        self._future: Future[Any] | None = None
        if value is not None:
            self._future = Future()
            self._future.set_result(value)

    def start(self) -> Future[Any]:
        """Begin to load, unless it was begun."""
        with self._lock:
            if self._future is None:
                self._future = Future()
                given, name = (self._future,), "mmfast-load"  # by which __main__ knows it
                threading.Thread(target=self._load, args=given, name=name, daemon=True).start()
            return self._future

    def _load(self, future: Future[Any]) -> None:
        try:
            future.set_result(self._make())
        except BaseException as error:  # for the callers of `get`
            if not isinstance(error, MmfastError):
                _log.error("cannot load", exc_info=error)
            future.set_exception(error)

    def now(self) -> Any:
        """Return the loaded value, or None."""
        future = self._future
        loaded = future is not None and future.done() and future.exception() is None
        return future.result() if future is not None and loaded else None

    def failure(self) -> BaseException | None:
        """Return the error of loading, or None."""
        future = self._future
        return future.exception() if future is not None and future.done() else None

    async def get(self) -> Any:
        """Wait for the value; `ApiError` if it cannot be loaded."""
        try:
            return await asyncio.shield(asyncio.wrap_future(self.start()))
        except Exception as error:
            ours = isinstance(error, MmfastError)
            text = str(error) if ours else "the model cannot be loaded; the server's log says why"
            raise ApiError(503, text, "server_error", "not_loaded") from error


class Service:
    """One server; None as engine or speech model loads the one of `config`.

    `created` is in seconds since 1970; `parts` holds the state of further routes by name.
    """

    def __init__(self, config: ServerConfig, executor: Any = None, voice: Any = None) -> None:
        self.config, self.created = config, int(time.time())
        # options of choosing tokens that the checkpoint states
        self.defaults: dict[str, Any] = {}
        self.stopping = False  # a signal has come; see `stop`
        self._engine = LazyLoader(self._load, executor)
        self._voice = LazyLoader(lambda: _voice(config), voice)
        self._translator = LazyLoader(lambda: _translator(config))
        self._pair = LazyLoader(lambda: _ear_for_two(config))
        self.metrics = Metrics(self.health, lambda: self.model)
        self.parts: dict[str, Any] = {}
        self._threads, self._listening = ThreadPoolExecutor(VOICES, "voice"), 0

    def _load(self) -> Executor:
        self.defaults = generation_defaults(self.config)
        return _engine(self.config)

    def answers_to(self, name: str) -> bool:
        """Return True for the name of the model, and for its aliases on a server that has them."""
        return answers_to(name, self.model, self.config.strict_model)

    def adapter(self, name: str) -> str | None:
        """Return the LoRA adapter of a name, None for the model itself; else raise `ApiError`."""
        known = self.config.adapters()
        if self.answers_to(name) or name in known:
            return name if name in known else None
        asked = " or ".join(repr(each) for each in (self.model, *known))
        text = f"model {name[:80]!r} is not here; ask for {asked} (GET /v1/models)"
        raise ApiError(404, text, code="model_not_found", param="model")

    def start(self) -> Future[Any]:
        """Begin to load the engine, then the speech model; return the future of the engine."""
        future = self._engine.start()
        future.add_done_callback(self._then_voice)
        return future

    def _then_voice(self, engine: Future[Any]) -> None:
        if self.config.voice and not engine.cancelled() and engine.exception() is None:
            self._voice.start()

    async def executor(self) -> Executor:
        """Return the engine when it is loaded; `ApiError` if it cannot be."""
        found: Executor = await self._engine.get()
        return found

    async def voice(self) -> Any:
        """Return the speech model (`speak`, `sample_rate`, perhaps `voices` and `transcribe`).

        `ApiError`: the server offers no speech, or the model cannot be loaded.
        """
        if not self.config.voice:
            raise ApiError(
                404, "this server offers no speech; start it without --no-voice", code="no_voice"
            )
        return await self._voice.get()

    async def translator(self) -> Any:
        """Return the model that translates, loaded on first use; `ApiError` as for `voice`."""
        await self.voice()
        return await self._translator.get()

    async def ear_for_two(self) -> Any:
        """Return the ear for two speakers, loaded on first use; `ApiError` as for `voice`.

        It is 400 where the listener of the server has none.
        """
        await self.voice()
        try:
            return await self._pair.get()
        except ApiError as error:
            raise bad_request(str(error), "unsupported", "speakers") from error

    def spawn_voice(self, work: Callable[[], None]) -> None:
        """Start a speech in one of the threads for speech."""
        self._threads.submit(work)

    async def in_voice_thread(self, work: Callable[[], T]) -> T:
        """Run a transcription in one of the few threads for speech; 429 if too many wait."""
        if self._listening >= HEARD:
            text = f"{HEARD} recordings wait to be written down; try again in a few seconds"
            raise busy(text, 5.0, "recordings")
        self._listening += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._listening -= 1

    def health(self) -> Health | None:
        """Return the state of the engine; None until it is loaded."""
        engine = self._engine.now()
        found: Health | None = None if engine is None else engine.health()
        return replace(found, ready=False) if found is not None and self.stopping else found

    @property
    def model(self) -> str:
        """Name of the model, also before it is loaded."""
        engine = self._engine.now()
        return self.config.name or (engine.model if engine is not None else name_of(self.config))

    @property
    def translator_model(self) -> str:
        """Name of the model that translates."""
        given = self.config.translator
        return TRANSLATOR if given is None else PurePath(given).name

    @property
    def talker_model(self) -> str:
        """Name of the model that speaks."""
        talker = self.config.talker or self.config.speech
        return SPEECH if talker is None else PurePath(talker).name

    @property
    def listener_model(self) -> str:
        """Name of the model that writes speech down."""
        listener = self.config.listener or self.config.speech
        return SPEECH if listener is None else PurePath(listener).name

    def failure(self) -> BaseException | None:
        """Return the error of loading the engine, or None."""
        return self._engine.failure()

    def stop(self) -> None:
        """Take no more requests; those at work have most of `shutdown_seconds` to end."""
        if not self.stopping:
            self.stopping, engine = True, self._engine.now()
            seconds = 0.7 * self.config.shutdown_seconds
            late = threading.Timer(seconds, engine.close if engine is not None else lambda: None)
            late.daemon = True
            late.start()

    def close(self) -> None:
        """Stop the engine and running speeches."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        engine = self._engine.now()
        if engine is not None:
            engine.close()


def generation_defaults(config: ServerConfig) -> dict[str, Any]:
    """Return the options of choosing tokens that `generation_config.json` states, as vLLM reads it.

    A checkpoint that states none answers with the likeliest tokens.
    """
    from transformers import GenerationConfig

    if config.model is None:
        return {}
    try:
        stated = GenerationConfig.from_pretrained(config.model).to_diff_dict()
    except (OSError, ValueError):
        return {}  # there is none
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: stated[name] for name in names if stated.get(name) is not None}


def _engine(config: ServerConfig) -> Executor:
    start = time.monotonic()
    if config.guard is not None:
        judge_of(config.guard, config.device)  # what is wrong with it shows before a picture comes
    engine = load_engine(config)
    _log.info("engine %s ready after %.1f s", config.engine, time.monotonic() - start)
    return engine


def load_engine(config: ServerConfig) -> Executor:
    """Load the engine that `config.engine` names."""
    names = ("reduce", "cache", "device", "dtype", "slots", "context", "chunk", "queue", "memory")
    options = {name: getattr(config, name) for name in (*names, "weights", "attn")}
    options |= {"name": name_of(config), "lora": config.adapters()}
    if config.engine == "inproc":
        from mmfast.serve.engine.scheduler import Scheduler

        if config.reuse:
            from mmfast.streams.reuse.store import ReuseStore

            store = ReuseStore(host=config.reuse_memory, folder=config.reuse_folder)
            options |= {"reuse": config.reuse, "store": store, "modules": config.modules}
        options |= {"prefill": config.prefill, "decode": config.decode}
        return Scheduler(config.model, **options)
    if config.engine == "vllm":
        raise MmfastError("vLLM has a server of its own; start it with mmfast serve --engine vllm")
    options |= {"workers": config.workers, "prefill_spec": config.prefill}
    options["decode_spec"] = config.decode
    for role in ("encode", "prefill", "decode"):
        options[role] = getattr(config, f"{role}_replicas")
    from mmfast.serve.ray.engine import RayEngine

    return RayEngine(config.model, **options, replicas=config.replicas, address=config.ray_address)


def name_of(config: ServerConfig) -> str:
    """Return the name of the model: the one given, else its directory or hub id."""
    if config.name:
        return config.name
    if config.model is None:
        return EMBEDDED
    local = config.model.startswith((".", "/", "~")) or config.model.count("/") != 1
    return PurePath(config.model).name if local else config.model


def _translator(config: ServerConfig) -> Any:
    from mmfast.models.translation import load_translator

    return load_translator(config.translator, config.device)


def _ear_for_two(config: ServerConfig) -> Any:
    from mmfast.models.speech.overlap import load_overlap

    listener = config.listener or config.speech
    return load_overlap(None if listener == SPEECH else listener, config.device)


def _voice(config: ServerConfig) -> Any:
    from mmfast.voice.models import VoiceParts, can, load_voice

    if config.listener is None and config.talker is None:
        return can(load_voice(config.speech, config.device, "auto"), "speak")
    names = [config.listener or config.speech, config.talker or config.speech]
    listener, talker = (load_voice(name, config.device, "auto") for name in names)
    return VoiceParts(listener, talker)
