"""Who has the floor in one session: responses begin, are cut off, and end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmfast.core.speech import Turn
from mmfast.serve.realtime.brain import Question
from mmfast.serve.realtime.conversation import told, turns
from mmfast.serve.realtime.errors import EventError
from mmfast.serve.realtime.events import ResponseCancel, ResponseCreate
from mmfast.serve.realtime.fitting import fitting
from mmfast.serve.realtime.items import Item, written
from mmfast.serve.realtime.response import Response
from mmfast.serve.realtime.shapes import Reference, Wish

if TYPE_CHECKING:
    from mmfast.serve.realtime.session import Session

HEARD_TOKENS = 25 / 16000  # of the embedded model's tower, a sample


class Responder:
    """Responses of one session: one in the conversation, and a few beside it.

    Attributes:
        running: Tasks by the name of their response, until the model has let go of it.
        current: The response in the conversation, while it is being made.
        last: The one before, whose sound may still be playing.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.running: dict[str, tuple[Response, asyncio.Task[None]]] = {}
        self.current: Response | None = None
        self.last: Response | None = None

    @property
    def busy(self) -> bool:
        """Whether a response is being made."""
        return any(not response.over for response, _ in self.running.values())

    def silent_since(self) -> float:
        """When the last reply will have been played."""
        playback = None if self.last is None else self.last.reply.playback
        return 0.0 if playback is None else playback.dry_at()

    def create(self, event: ResponseCreate) -> None:
        """Answer what was said, or what the event brings along.

        Raises:
            EventError: A response is being made already, or something cannot be had.
        """
        session, wish = self._session, event.response or Wish()
        settings = session.settings.of_response(wish)
        session.check_text([wish.instructions or ""], "response.instructions")
        own = wish.conversation == "none"
        items = self._brought(wish)
        if not own:
            self._check_free()
        self._start(Response(session, settings, own, wish.metadata), items)

    def answer_turn(self) -> None:
        """Answer what was just said, unless a reply must not be interrupted."""
        settings = self._session.settings.of_response(Wish())
        try:
            self._check_free()
            self._start(Response(self._session, settings), self._items())
        except EventError as error:
            self._session.fail(error, None)

    def _check_free(self) -> None:
        if self.current is not None and not self.current.over:
            raise EventError(
                f"response {self.current.id!r} is being made; wait for response.done or cancel it",
                "conversation_already_has_active_response",
            )

    def _items(self) -> list[Item]:
        return list(self._session.conversation.items.values())

    def _brought(self, wish: Wish) -> list[Item]:
        """The items that are to be answered."""
        if wish.input is None:
            return self._items()
        session, found = self._session, []
        for number, each in enumerate(wish.input):
            if isinstance(each, Reference):
                found.append(session.conversation.get(each.id))
                continue
            format, most = session.settings.input_format, session.service.limits.message
            item = written(each, format, most, f"response.input.{number}")
            if any(part.kind == "input_image" for part in item.parts):
                raise EventError(
                    "frames go into the conversation; create an item of the picture first",
                    param=f"response.input.{number}",
                )
            found.append(item)
        return found

    def _start(self, response: Response, items: Sequence[Item]) -> None:
        session = self._session
        if len(self.running) >= session.service.limits.responses:
            raise EventError(
                f"{len(self.running)} responses are being made; wait for one to end",
                "too_many_responses",
            )
        if not response.own:
            self.current = self.last = response
        response.begin()
        frames = session.seeing.counts["came"]
        task = asyncio.get_running_loop().create_task(self._make(response, items, frames))
        self.running[response.id] = response, task

    async def _make(self, response: Response, items: Sequence[Item], frames: int) -> None:
        try:
            await self._session.seeing.settled(frames)
            question = await self._question(response, items)
            if question is not None and not response.over:
                await response.make(question)
            response.end("completed")
        except Exception as error:
            response.fail(error)
        finally:
            self.running.pop(response.id, None)

    async def _question(self, response: Response, items: Sequence[Item]) -> Question | None:
        """What is to be answered; None where nothing was said."""
        session, settings = self._session, response.settings
        pcm: Tensor | None = None
        before = list(items)
        if session.brain.native:
            pcm = self._said(before, response)
        for item in before:
            if item.unheard and not response.over:
                await session.understanding.ask(item)
        found, instructions = turns(before), told(before, settings["instructions"])
        if pcm is None and (not found or found[-1].role != "user"):
            if items and items[-1].spoken:
                return None  # a cough, or nothing for long
            # "greet the user": what nobody asked for is told by the response's own instructions
            found, instructions = (*found, _asked(settings["asked"])), ""
        limit = settings["max_output_tokens"]
        limits, answer = session.service.limits, 1 if limit == "inf" else limit
        if found or instructions:
            found = fitting(found, instructions, session.brain.count, limits, answer)
        self._spend(response, [instructions, *(turn.text for turn in found)], pcm)
        options = self._options(settings["output"])
        most = limits.tokens if limit == "inf" else limit
        if limits.context is not None:
            most = min(most, limits.context - response.spent.text_in)
        return Question(found, pcm, instructions, response.aloud, options, most)

    def _said(self, items: list[Item], response: Response) -> Tensor | None:
        """The sound of the user's last turn, whose items are taken from the list."""
        parts: list[Tensor] = []
        while items and items[-1].spoken:
            item = items.pop()
            response.asks.insert(0, item)
            parts = [part.pcm for part in item.parts if part.pcm is not None] + parts
        return torch.cat(parts) if parts else None

    def _spend(self, response: Response, texts: Sequence[str], pcm: Tensor | None) -> None:
        brain, spent = self._session.brain, response.spent
        spent.text_in = sum(brain.count(text) for text in texts if text)
        spent.audio_in = 0 if pcm is None else round(len(pcm) * HEARD_TOKENS)
        spent.image_in = int(brain.figures().get("tokens", 0))

    def _options(self, output: dict[str, Any]) -> dict[str, Any]:
        """Voice and speed as the speaker knows them."""
        session, found = self._session, dict[str, Any]()
        voice = session.settings.own_voice(output["voice"])
        if voice is not None:
            found["voice"] = voice
        if session.pace is not None and output["speed"] != 1.0:
            least, usual, most = session.pace
            found["speed"] = round(min(max(usual * output["speed"], least), most))
        return found

    def interrupt(self) -> None:
        """Somebody speaks: what is being said, or still played, falls silent."""
        if self.current is not None and not self.current.over:
            self.current.end("cancelled", "turn_detected")
        elif self.last is not None and self.last.sounding:
            self.last.settle()

    def cancel(self, event: ResponseCancel) -> None:
        """Stop a response.

        Raises:
            EventError: None is being made, or none of that name.
        """
        if event.response_id is None:
            found = self.current
        else:
            found = self.running.get(event.response_id, (None, None))[0]
        if found is None or found.over:
            raise EventError(
                "no such response is being made; it may be done already",
                "response_cancel_not_active",
                "response_id" if event.response_id else None,
            )
        found.end("cancelled", "client_cancelled")

    def ended(self, response: Response) -> None:
        """A response has said that it is done."""
        self._session.spend(response.spent.total - response.spent.image_in)
        if response is self.current:
            self.current = None

    async def close(self) -> None:
        """Stop all of them, and wait until the models have let go."""
        for response, _ in list(self.running.values()):
            response.end("cancelled", "client_cancelled")
        await asyncio.gather(*(task for _, task in self.running.values()))


def _asked(instructions: str) -> Turn:
    """Instructions of a response as a question.

    Raises:
        EventError: There are none.
    """
    if not instructions.strip():
        raise EventError(
            "there is nothing to answer; create an item of the user, commit sound, or give "
            "response.instructions",
            "nothing_to_answer",
        )
    return Turn("user", instructions)
