"""`POST /v1/completions`: texts continued without a chat template."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from mmfast.serve.engine import base
from mmfast.serve.guard.caller import caller_of
from mmfast.serve.guard.errors import bad_request
from mmfast.serve.http import events, schema
from mmfast.serve.http.exchange import AnswerSet

router = APIRouter(route_class=schema.JsonRoute)


@router.post(
    "/v1/completions",
    response_model=schema.TextCompletion,
    responses=schema.STREAMED,
    summary="Continue texts",
)
async def completions(asked: schema.CompletionRequest, http: HttpRequest) -> Response:
    """Continue texts."""
    name = f"cmpl-{uuid.uuid4().hex}"
    answers = AnswerSet(http.app.state.service, asked, caller_of(http.scope), name)
    exchange = Completions(answers, asked)
    return await events.while_connected(http.receive, exchange.reply())


class Completions:
    """One request for texts and its answers."""

    def __init__(self, answers: AnswerSet, asked: schema.CompletionRequest) -> None:
        self._answers, self._created = answers, int(time.time())
        self._offsets: dict[int, int] = {}  # where the next token of an answer begins
        self._asked, given = asked, asked.prompt
        one = isinstance(given, str) or isinstance(given[0], int)
        self._prompts: list[Any] = [given] if one else list(given)
        if self._asked.echo and not isinstance(self._prompts[0], str):
            raise bad_request("echo needs prompts that are texts, not tokens", param="echo")
        if asked.mmfast is not None and (asked.mmfast.modules or asked.mmfast.arguments):
            raise bad_request(
                "modules stand before the question of a chat; leave them out",
                param="mmfast.modules",
            )
        for option in ("reuse", "frames", "fps"):
            if getattr(asked.mmfast, option, None) is not None:
                raise bad_request(
                    f"{option} acts on media, and a text to continue has none; leave it out",
                    param=f"mmfast.{option}",
                )
        most = answers.service.config.max_text
        if sum(map(len, self._prompts)) > most or not all(self._prompts):
            raise bad_request(
                f"a prompt is empty, or all are over {most:,} letters", param="prompt"
            )

    async def reply(self) -> Response:
        """Answer with one document, or with a stream."""
        answers, given = self._answers, self._asked.mmfast or schema.MmfastOptions()
        raws = [each if isinstance(each, str) else tuple(each) for each in self._prompts]
        wishes = given.reduce, given.cache, given.target_ttft_ms, given.prefill, given.decode
        asked = base.Options(*wishes)
        prompts = [((), replace(asked, raw=raw)) for raw in raws]
        run = await answers.run(prompts)
        if self._asked.stream:
            return await answers.stream(run, self._chunk, self._end())
        await answers.whole(run)
        choices = [
            self._choice(i, self._echo(i) + answers.texts.get(i, ""), answers.chances.get(i), end)
            for i, end in sorted(answers.ends.items())
        ]
        trace = dict(answers.ends[0].trace) if 0 in answers.ends else {}
        document = {**self._head(), "choices": choices, "usage": answers.usage(), "mmfast": trace}
        return JSONResponse(document, headers=answers.headers)

    def _head(self) -> dict[str, Any]:
        head = {"id": self._answers.name, "object": "text_completion", "created": self._created}
        return {**head, "model": self._asked.model}

    def _echo(self, number: int) -> str:
        return str(self._prompts[number // (self._asked.n or 1)]) if self._asked.echo else ""

    def _choice(
        self, number: int, text: str, chances: Sequence[base.TokenChance] | None, end: Any = None
    ) -> dict[str, Any]:
        chances = chances if self._asked.logprobs is not None else None
        tokens = [each.token.decode("utf-8", "replace") for each in chances or ()]
        if number not in self._offsets:
            self._offsets[number] = len(self._echo(number))
        ends = [*accumulate(map(len, tokens), initial=self._offsets[number])]
        starts, self._offsets[number] = ends[:-1], ends[-1]
        top = [{t.decode("utf-8", "replace"): c for t, c in each.top} for each in chances or ()]
        found = {
            "tokens": tokens,
            "token_logprobs": [each.chance for each in chances or ()],
            "top_logprobs": top,
            "text_offset": starts,
        }
        reason = None if end is None else end.reason
        logprobs = None if chances is None else found
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _chunk(self, number: int, event: base.Event) -> Iterator[bytes]:
        """Yield the event of a piece, or of the end, of an answer; the first one echoes."""
        text = "" if number in self._offsets else self._echo(number)
        if isinstance(event, base.Delta):
            choice = self._choice(number, text + event.text, event.logprobs or None)
        else:
            choice = self._choice(number, text, None, event)
        wants = self._asked.stream_options
        more: dict[str, Any] = {"usage": None} if wants and wants.include_usage else {}
        if isinstance(event, base.Finish) and not number:
            more["mmfast"] = event.trace
        yield events.event({**self._head(), "choices": [choice], **more})

    def _end(self) -> Iterator[bytes]:
        if (wants := self._asked.stream_options) and wants.include_usage:
            yield events.event({**self._head(), "choices": [], "usage": self._answers.usage()})
        yield events.DONE
