"""What is here and how it is: `/v1/models`, `/health`, `/ready`, `/metrics`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from mmfast.serve.guard.errors import ApiError
from mmfast.serve.http.metrics import CONTENT_TYPE
from mmfast.serve.http.schema import ERRORS, HealthReply, ModelCard, Models
from mmfast.serve.http.service import Service

router = APIRouter()
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: ERRORS[status] for status in (400, 401, 404, 429)
}


def _service(http: HttpRequest) -> Service:
    service: Service = http.app.state.service
    return service


def _models(service: Service) -> list[ModelCard]:
    names = [service.model, *([service.speech_model] if service.config.voice else [])]
    return [ModelCard(id=name, created=service.created) for name in names]


@router.get("/v1/models", responses=_REFUSALS, summary="All models")
async def models(http: HttpRequest) -> Models:
    """All models."""
    return Models(data=_models(_service(http)))


@router.get("/v1/models/{model:path}", responses=_REFUSALS, summary="One model")
async def model(model: str, http: HttpRequest) -> ModelCard:
    """One model."""
    found = _models(_service(http))
    for each in found:
        if each.id == model:
            return each
    names = ", ".join(each.id for each in found)
    raise ApiError(
        404, f"model {model[:80]!r} is not here; choices: {names}", code="model_not_found"
    )


@router.get("/health", summary="Whether the process lives")
async def health() -> HealthReply:
    """Whether the process lives."""
    return HealthReply(status="ok")


@router.get(
    "/ready",
    response_model=HealthReply,
    responses={503: {"model": HealthReply, "description": "Not now."}},
    summary="Whether requests are taken",
)
async def ready(http: HttpRequest) -> Response:
    """Whether requests are taken; 503 while the model is loaded, and where it cannot be."""
    service = _service(http)
    found = service.health()
    if found is None:
        status = "failed" if service.failure() else "loading"
        return JSONResponse({"status": status, "running": 0, "waiting": 0}, 503)
    reply = {
        "status": "ok" if found.ready else "busy",
        "running": found.running,
        "waiting": found.waiting,
    }
    return JSONResponse(reply, 200 if found.ready else 503)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, 404: ERRORS[404]},
    summary="Counters for Prometheus",
)
async def metrics(http: HttpRequest) -> Response:
    """Counters for Prometheus."""
    service = _service(http)
    if not service.config.metrics:
        raise ApiError(404, "this server shows no metrics; start it without --no-metrics")
    return Response(service.metrics.text(), media_type=CONTENT_TYPE)
