"""LiveKit's own suite of realtime models (livekit/agents, tests/test_realtime), on this server.

MMFAST_LIVEKIT names a checkout, and MMFAST_LIVEKIT_PYTHON the interpreter of an environment that
has its packages and its plugins `openai` and `xai`, by default the checkout's `.venv`. The suite
runs in a process of its own, as an agent would: by an address, a key and default names of models.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from realtime_client import listening
from tone_models import HumSpeaker
from torch import Tensor

from mmfast.core.speech import Turn
from mmfast.serve.config import ServerConfig
from mmfast.serve.http.service import load_engine
from mmfast.serve.realtime.brain import ChatterVoices
from mmfast.serve.realtime.engine import EngineVoices
from mmfast.serve.realtime.service import RealtimeService
from mmfast.voice.models import Cascade, load_voice

CHECKOUT = os.environ.get("MMFAST_LIVEKIT", "")
SUITE = "tests/test_realtime/test_realtime.py"
TOOLS = "the embedded model calls no tools"
KNOWS = "asks for what a model of shapes and colours does not know or cannot be told"
WORDS = "a recording with words that the embedded speech model has never heard"
REASONS = {
    "test_generate_reply_with_instructions": KNOWS,
    "test_generate_reply_preserves_session_instructions": KNOWS,
    "test_generate_reply_cancellation": KNOWS,
    "test_update_chat_ctx": KNOWS,
    "test_update_chat_ctx_replaces_history": KNOWS,
    "test_reuse_session_across_handoff": KNOWS,
    "test_input_audio_transcription": WORDS,
    "test_push_real_audio_triggers_response": WORDS,  # no words heard: no sentence invented
    "test_function_tool": TOOLS,
    "test_function_tool_reply": TOOLS,
}


class Knowing:
    """Hears one question about the weather, and answers from what it is told."""

    def transcribe(self, pcm: Tensor, rate: int) -> str:
        return "what is the weather in paris"

    def chat(self, turns: Sequence[Turn]) -> str:
        told = [turn.text for turn in turns]
        results = [re.search("<tool_response>(.*)</tool_response>", text) for text in told]
        if answers := [each.group(1) for each in results if each]:
            return f"it says {answers[-1]}"
        if tools := [line for line in told[0].splitlines() if line.startswith('{"name"')]:
            tool = json.loads(tools[0])
            given = dict.fromkeys(tool["parameters"]["properties"], "Paris")
            call = json.dumps({"name": tool["name"], "arguments": given})
            return f"<tool_call>{call}</tool_call>"
        for before in ("say exactly: ", "number is ", "color is ", r"2 \+ "):
            found = [re.search(rf"{before}(\w+)", text, re.IGNORECASE) for text in told]
            if words := [each.group(1) for each in found if each]:
                return "four: 4" if words[-1] == "2" else words[-1]
        name = re.search(r"name is (\w+)", " ".join(told))
        return f"i am {name.group(1)}" if name else "hello there"


@contextmanager
def serving(knowing: bool) -> Iterator[str]:
    config, model = ServerConfig(demo=False, realtime_sessions=8), Knowing()
    voices: ChatterVoices
    if knowing:
        voices = ChatterVoices(Cascade(model, model.chat, HumSpeaker(24000), calls_tools=True))
    else:
        voices = EngineVoices(load_engine(config), load_voice(None), config)
    with listening(RealtimeService(config, lambda: voices)) as url:
        yield url


def failures(url: str, folder: Path) -> tuple[set[str], set[str]]:
    """Names of the cases for OpenAI that were run, and of those that failed."""
    python = os.environ.get("MMFAST_LIVEKIT_PYTHON", f"{CHECKOUT}/.venv/bin/python")
    report = folder / "report.xml"
    keys = {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": url}
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | keys
    call = [python, "-m", "pytest", SUITE, "-q", "-k", "openai", f"--junitxml={report}"]
    call += ["-p", "no:cacheprovider"]
    subprocess.run(call, cwd=CHECKOUT, env=env, capture_output=True, timeout=600, check=False)
    cases = list(ElementTree.parse(report).iter("testcase"))
    broken = [case for case in cases if any(each.tag in ("failure", "error") for each in case)]
    ran, failed = (
        {case.get("name", "").partition("[")[0] for case in some} for some in (cases, broken)
    )
    return ran, failed


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not CHECKOUT, reason="MMFAST_LIVEKIT names no checkout of livekit/agents")
@pytest.mark.parametrize("knowing", [False, True])
def test_agents_of_livekit(knowing: bool, tmp_path: Path) -> None:
    """All cases pass with a model that knows; of the embedded one, all that test no knowledge."""
    with serving(knowing) as url:
        ran, failed = failures(url, tmp_path)
    assert len(ran) == 18
    assert failed <= (set() if knowing else REASONS.keys()), failed
