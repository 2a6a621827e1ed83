"""Pipecat's service of OpenAI's Realtime API against a server: `URL KEY SOUND {audio,text}`.

It runs in pipecat's own environment. `SOUND` is a file of 16-bit PCM at 24 kHz, a spoken question.
The pipeline is that of pipecat's example, with a queue in place of its transport.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from pipecat.frames.frames import (
    ErrorFrame,
    Frame,
    InputAudioRawFrame,
    LLMFullResponseEndFrame,
    LLMRunFrame,
    LLMTextFrame,
    TranscriptionFrame,
    TTSAudioRawFrame,
    TTSTextFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.realtime.events import (
    AudioConfiguration,
    AudioInput,
    InputAudioNoiseReduction,
    InputAudioTranscription,
    SemanticTurnDetection,
    SessionProperties,
)
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.workers.runner import WorkerRunner

RATE, PIECE = 24000, 960  # samples a second, bytes of 20 ms


class Tap(FrameProcessor):
    """Notes what passes, and wakes whoever waits for it."""

    def __init__(self, notes: Notes, spoken: bool, way: FrameDirection) -> None:
        super().__init__()
        self.notes, self.spoken, self.way = notes, spoken, way

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if direction == self.way:
            self.notes.take(frame, self.spoken)
        await self.push_frame(frame, direction)


class Notes:
    """What came so far."""

    def __init__(self) -> None:
        self.sound, self.said, self.heard, self.errors = 0, "", list[str](), list[str]()
        self.ends = 0

    def take(self, frame: Frame, spoken: bool) -> None:
        if isinstance(frame, TTSAudioRawFrame):
            self.sound += len(frame.audio)
        elif isinstance(frame, TTSTextFrame if spoken else LLMTextFrame):
            self.said += frame.text
        elif isinstance(frame, TranscriptionFrame):
            self.heard.append(frame.text)
        elif isinstance(frame, LLMFullResponseEndFrame):
            self.ends += 1
        elif isinstance(frame, ErrorFrame):
            self.errors.append(str(frame.error))

    async def until(self, ends: int, seconds: float = 90.0) -> None:
        async with asyncio.timeout(seconds):
            while self.ends < ends and not self.errors:
                await asyncio.sleep(0.05)
        if self.errors:
            raise SystemExit(f"pipecat reports {self.errors}")


async def speak(worker: Any, sound: bytes) -> None:
    """Send sound as a microphone does, and silence behind it."""
    for at in range(0, len(sound), PIECE):
        piece = sound[at : at + PIECE].ljust(PIECE, b"\0")
        await worker.queue_frames([InputAudioRawFrame(piece, RATE, 1)])
        await asyncio.sleep(0.02)


async def main(url: str, key: str, sound: bytes, kind: str) -> None:
    audio = AudioConfiguration(
        input=AudioInput(
            transcription=InputAudioTranscription(),
            turn_detection=SemanticTurnDetection(),
            noise_reduction=InputAudioNoiseReduction(type="near_field"),
        )
    )
    properties = SessionProperties(audio=audio)
    if kind == "text":
        properties.output_modalities = ["text"]
    llm = OpenAIRealtimeLLMService(
        api_key=key,
        base_url=url,
        settings=OpenAIRealtimeLLMService.Settings(
            system_instruction="You answer in one or two words.", session_properties=properties
        ),
    )
    # what is written comes first: pipecat sends its context once
    first = {"role": "user", "content": "What colour is the circle?"}
    first = first if kind == "text" else {"role": "developer", "content": "Say hello!"}
    context = LLMContext([first])
    user, assistant = LLMContextAggregatorPair(context)
    notes = Notes()
    worker = PipelineWorker(
        # transcripts go against the stream, to whoever keeps the conversation
        Pipeline(
            [
                user,
                Tap(notes, kind == "audio", FrameDirection.UPSTREAM),
                llm,
                Tap(notes, kind == "audio", FrameDirection.DOWNSTREAM),
                assistant,
            ]
        ),
        params=PipelineParams(audio_in_sample_rate=RATE, audio_out_sample_rate=RATE),
        idle_timeout_secs=None,
    )
    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())
    try:
        await worker.queue_frames([LLMRunFrame()])
        await notes.until(1)
        greeting, sounded = notes.said, notes.sound
        assert greeting.strip(), "no greeting"
        assert bool(sounded) == (kind == "audio"), sounded
        await speak(worker, sound + bytes(2 * RATE * 3))
        await notes.until(2)
        answer = notes.said[len(greeting) :]
        assert notes.heard and answer.strip(), (notes.heard, answer)
        assert (notes.sound > sounded) == (kind == "audio"), notes.sound
    finally:
        await worker.cancel()
        await asyncio.wait_for(asyncio.gather(running, return_exceptions=True), 20)
    print(f"ok {greeting!r}, heard {notes.heard!r}, said {answer!r}, {notes.sound} bytes of sound")


if __name__ == "__main__":
    address, secret, path, what = sys.argv[1:]
    asyncio.run(main(address, secret, Path(path).read_bytes(), what))
