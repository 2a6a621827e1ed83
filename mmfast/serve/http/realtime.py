"""`/v1/realtime`: its socket, calls over WebRTC, and the short-lived keys of browsers."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Any, Literal

from fastapi import APIRouter, WebSocket
from pydantic import BaseModel, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mmfast.serve.guard.body import loads
from mmfast.serve.guard.caller import caller_of
from mmfast.serve.guard.errors import ApiError, bad_request
from mmfast.serve.guard.shield import SECRETS
from mmfast.serve.http.exchange import ignoring
from mmfast.serve.http.schema import ERRORS, JsonRoute, Strict

router = APIRouter(route_class=JsonRoute)


@router.websocket("/v1/realtime")
async def realtime(websocket: WebSocket) -> None:
    """Open a session on a socket."""
    from mmfast.serve.realtime.socket import realtime as talk

    await talk(websocket, websocket.app.state.service)


@router.post(
    "/v1/realtime/calls",
    status_code=201,
    response_class=Response,
    include_in_schema=False,  # any text is a body of its form: nothing wrong can be made up
)
async def call(http: HttpRequest, model: str | None = None) -> Response:
    """Answer an offer of WebRTC; the session runs until one side ends it."""
    if find_spec("aiortc") is None:
        text = 'calls need aiortc: pip install "mmfast[webrtc]"; /v1/realtime takes WebSockets'
        raise ApiError(501, text, "server_error", "no_webrtc")
    from mmfast.serve.realtime.call import take_call
    from mmfast.serve.realtime.connection import check_model, settings_asked
    from mmfast.serve.realtime.service import realtime_of

    service = realtime_of(http.app.state.service)
    offer, given = await _offer(http)
    asked = [] if given is None else [settings_asked(loads(given, service.config.max_json_depth))]
    check_model(model or next((each.model for each in asked), None), service)
    name, answer = await take_call(service, http.scope, offer, asked)
    where = {"Location": f"/v1/realtime/calls/{name}"}
    return Response(answer, 201, where, "application/sdp")


async def _offer(http: HttpRequest) -> tuple[str, str | None]:
    """Return the offer of a request and its `session`, as text."""
    if not http.headers.get("content-type", "").startswith("multipart/"):
        return (await http.body()).decode("utf-8", "replace"), None
    found = dict[str, str | None](sdp=None, session=None)
    async with http.form(max_files=2, max_fields=2) as form:
        for name, value in form.multi_items():
            if name not in found:
                text = f"there is no field {name[:80]!r}; send sdp and session"
                raise bad_request(text, "unknown_parameter", name[:80])
            data = (
                value if isinstance(value, str) else (await value.read()).decode("utf-8", "replace")
            )
            found[name] = data
    if (offer := found["sdp"]) is None:
        text = "the form has no sdp; give the offer"
        raise bad_request(text, "missing_required_parameter", "sdp")
    return offer, found["session"]


@router.post(
    "/v1/realtime/calls/{call_id}/hangup",
    response_class=Response,
    include_in_schema=False,
)
@router.delete(
    "/v1/realtime/calls/{call_id}",
    response_class=Response,
    include_in_schema=False,
)
async def hang_up(call_id: str, http: HttpRequest) -> Response:
    """End a call of this caller."""
    from mmfast.serve.realtime.service import realtime_of

    found = realtime_of(http.app.state.service).calls.get(call_id)
    if found is None or found.who != caller_of(http.scope).who:
        text = f"there is no call {call_id[:80]!r}; it may be over already"
        raise ApiError(404, text, code="call_not_found")
    found.hang_up()
    return Response(status_code=200)


class Expiry(Strict):
    """The time for which a client secret is valid."""

    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Field(ge=10, le=7200)] = 600


class SecretRequest(Strict):
    """A key for a browser, and the settings of the sessions that it opens."""

    expires_after: Expiry | None = None
    session: dict[str, Any] | None = None


class SecretReply(BaseModel):
    """A key, and a session as it will be."""

    value: str
    expires_at: int
    session: dict[str, Any]


@router.post(SECRETS, responses=ERRORS, summary="A short-lived key for a browser")
async def client_secret(asked: SecretRequest, http: HttpRequest, reply: Response) -> SecretReply:
    """Make a key that opens realtime sessions for a short time, and nothing else."""
    from mmfast.serve.realtime.connection import made, settings_asked
    from mmfast.serve.realtime.service import realtime_of

    service, caller = realtime_of(http.app.state.service), caller_of(http.scope)
    reply.headers.update(ignoring(asked, service.config))
    given = asked.session or {}
    async with made(service, "realtime", [settings_asked(given)]) as session:
        shown = session.settings.shown
    assert caller.secrets is not None
    seconds = (asked.expires_after or Expiry()).seconds
    value, expires = caller.secrets.make(caller, seconds, given)
    return SecretReply(value=value, expires_at=expires, session=shown)
