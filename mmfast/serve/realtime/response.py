"""One response: its pieces as they are made, and how it ends."""

from __future__ import annotations

import asyncio
import logging

from mmfast.core.speech import Sound
from mmfast.serve.realtime.brain import Question
from mmfast.serve.realtime.errors import told
from mmfast.serve.realtime.telling import Status, Telling
from mmfast.streams.voice_run import Run

_log = logging.getLogger("mmfast.serve")


class Response(Telling):
    """One answer.

    A single-threaded value of the event loop: only the model works elsewhere, a piece at a time.
    What is cancelled says so at once, whatever the model is doing; a piece that comes later is
    nobody's.

    Args:
        session: Whose.
        settings: In effect for it; see `Settings.of_response`.
        own: It stands outside of the conversation.
        metadata: Given back as it came.

    Attributes:
        id: Its name.
        item: What it says.
        over: It has said that it is done.
    """

    async def make(self, question: Question) -> None:
        """Answer, unless it is cancelled; every exception ends it as failed."""
        session = self.session
        brain, limits = session.brain, session.service.limits
        run = Run(self.id, self.reply, lambda: brain.answer(question))
        try:
            while await self._ready(limits.ahead):
                self._take(run, await session.service.work(run.pull))
        finally:
            await session.service.work(run.close)

    async def _ready(self, ahead: float) -> bool:
        """Wait while the client has enough to read, or to play; whether more is wanted."""
        session, playback = self.session, self.reply.playback
        await session.outbox.room()
        while playback is not None and not self.over:
            lead = playback.dry_at() - session.now() - ahead
            if lead <= 0:
                break
            await asyncio.sleep(min(lead, 0.25))
        return not self.over

    def _take(self, run: Run, sound: Sound | None) -> None:
        """A piece has come, or the end; too late, it is nobody's."""
        if self.over or sound is None:
            self.end("completed")
            return
        if sound.heard is not None:
            self.session.understanding.heard(self, sound.heard)
        more = self.session.brain.count(sound.text) if sound.text else 0
        limit = self.settings["max_output_tokens"]
        tokens = self.spent.text_out + self.spent.audio_out + more + sound.tokens
        if limit != "inf" and tokens > limit:
            self.end("incomplete", "max_output_tokens")
            return
        self.spent.text_out += more
        self.spent.audio_out += sound.tokens
        if self.aloud:
            run.take(sound, self.session.service.clock, 0.0)
        if sound.text:
            self._text(sound.text)
        if self.aloud and len(sound.pcm):
            self._audio(sound)

    def end(self, status: Status, reason: str = "") -> None:
        """Say that it is done; nothing of it comes afterwards."""
        if self.over:
            return
        cut = status in ("cancelled", "failed")
        if cut:
            self.session.outbox.purge(self.id)
        elif self._out is not None:
            self._sound(self._out.finish(), 0)
        self.over, self.status, self.reason = True, status, reason
        if self.reply.words is not None:
            self.reply.words.finished = not cut
        if cut:
            self.settle()
        if self.shown:
            self._close(cut)
        self._events("response.done", response=self.resource())
        self.session.responder.ended(self)

    @property
    def sounding(self) -> bool:
        """Whether some of it has not been played yet."""
        playback = self.reply.playback
        return playback is not None and playback.played() < playback.arrived

    def settle(self) -> None:
        """It sounds no more: the context keeps what was heard."""
        if self.reply.playback is not None:
            self.reply.settle(self.reply.playback.stop())
        elif self.aloud and self.reply.limit is None and self.over:
            self.reply.limit = 0

    def fail(self, error: BaseException) -> None:
        """The model could not."""
        if self.over:
            return
        known = told(error)
        if known["type"] == "server_error":
            _log.error("a response failed", exc_info=error)
        self.error = {name: known[name] for name in ("type", "code", "message")}
        self.end("failed")
