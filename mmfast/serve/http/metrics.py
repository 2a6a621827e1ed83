"""Counters of the server for Prometheus (`/metrics`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mmfast.serve.engine.base import Finish, Health

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """Counters of one server, in a registry of its own; `health` is read for each page."""

    def __init__(self, health: Callable[[], Health | None]) -> None:
        self._registry = own = CollectorRegistry()
        self._ttft = Histogram(
            "mmfast_ttft_seconds", "Request to first token.", registry=own, buckets=_FIRST
        )
        self._gap = Histogram(
            "mmfast_inter_token_seconds", "Between tokens.", registry=own, buckets=_GAPS
        )
        self._stage = Histogram(
            "mmfast_stage_seconds", "Work of a stage.", ["stage"], registry=own, buckets=_GAPS
        )
        self._first_audio = Histogram(
            "mmfast_first_audio_seconds",
            "Request or end of speech to first sound.",
            ["source"],
            registry=own,
            buckets=_FIRST,
        )
        self._visual = Counter("mmfast_tokens", "Visual tokens.", ["when"], registry=own)
        self._tokens = Counter("mmfast_text_tokens", "Prompt, answer.", ["kind"], registry=own)
        self._requests = Counter(
            "mmfast_requests", "Answered requests.", ["route", "status"], registry=own
        )
        self._rejected = Counter("mmfast_rejected", "Refused.", ["reason"], registry=own)
        self._sessions = Gauge("mmfast_realtime_sessions", "Open sessions.", registry=own)
        own.register(_EngineGauges(health))

    def ttft(self, seconds: float) -> None:
        """Count a first token."""
        self._ttft.observe(seconds)

    def gap(self, seconds: float, tokens: int = 1) -> None:
        """Count further tokens, and the seconds since those before."""
        self._gap.observe(seconds / max(tokens, 1))

    def finished(self, finish: Finish) -> None:
        """Count the tokens and stages of a complete answer."""
        trace: Mapping[str, Any] = finish.trace
        self._tokens.labels("prompt").inc(finish.prompt_tokens)
        self._tokens.labels("completion").inc(finish.completion_tokens)
        self._tokens.labels("cached").inc(finish.cached_tokens)
        self._visual.labels("before").inc(trace.get("visual_tokens") or 0)
        self._visual.labels("after").inc(trace.get("kept_tokens") or 0)
        for row in trace.get("rows") or ():
            self.stage(str(row["stage"]), row["ms"] / 1e3)

    def stage(self, name: str, seconds: float) -> None:
        """Count the work of a stage."""
        self._stage.labels(name).observe(max(seconds, 0.0))

    def request(self, route: str, status: int) -> None:
        """Count a reply; `route` is the pattern, never the path of the client."""
        self._requests.labels(route, str(status)).inc()

    def rejected(self, reason: str) -> None:
        """Count a refusal: `busy`, `auth`, `rate`, `body`, `media`, `invalid`, `session`."""
        self._rejected.labels(reason).inc()

    def first_audio(self, seconds: float, source: str) -> None:
        """Count a first piece of sound; `source` is `speech` or `realtime`."""
        self._first_audio.labels(source).observe(seconds)

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

    def __init__(self, health: Callable[[], Health | None]) -> None:
        self._health = health

    def collect(self) -> Iterator[Metric]:
        found = self._health() or Health(False)
        yield _gauge("mmfast_ready", "Whether requests are taken.", float(found.ready))
        yield _gauge("mmfast_running", "Requests that are being answered.", found.running)
        yield _gauge("mmfast_waiting", "Requests that wait.", found.waiting)
        more = GaugeMetricFamily("mmfast_engine", "Figures of the engine.", labels=["name"])
        for name, value in sorted(found.gauges.items()):
            more.add_metric([name], float(value))
        yield more

    def describe(self) -> Iterator[Metric]:
        return iter(())


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)
