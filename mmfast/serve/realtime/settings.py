"""Settings of a session: what `session.update` may change, and what is in effect."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mmfast.core.errors import unknown
from mmfast.serve.calls import choice_fault
from mmfast.serve.config import VOICE_NAMES, answers_to
from mmfast.serve.realtime.protocol import AudioOutput, EventError, SessionShape, VoiceShape, Wish
from mmfast.voice.ear import Ear, ProsodyEar, SemanticEar, VoiceEar

# Names that stock clients ask for; each is one of the model's own voices.
_PCM = {"type": "audio/pcm", "rate": 24000}
_SERVER_VAD = {
    "type": "server_vad",
    "threshold": 0.5,
    "prefix_padding_ms": 300,
    "silence_duration_ms": 500,
    "idle_timeout_ms": None,
    "create_response": True,
    "interrupt_response": True,
}
_SEMANTIC_VAD = {
    "type": "semantic_vad",
    "eagerness": "auto",
    "create_response": True,
    "interrupt_response": True,
}
IDLE = ("truncation", "tracing", "include", "prompt", "reasoning", "parallel_tool_calls")
_ANSWERS = ("instructions", "output_modalities", "max_output_tokens")
_OBJECTS = {"realtime": "realtime.session", "transcription": "realtime.transcription_session"}
_HEARS = ("type", "object", "id", "model", "include", "expires_at", "mmfast")
_DEFAULTS = {"server_vad": _SERVER_VAD, "semantic_vad": _SEMANTIC_VAD}


class Settings:
    """Settings of one session that are in effect.

    `voices` are names of the model, the default first; empty where it has none. `pace` is in words
    per minute: least, usual, most; None where the model has no choice. `strict` refuses other names
    of the model than its own. A session of the kind `transcription` writes speech down and answers
    nothing. `calls`: the model can call tools. `served` are names of the model and of its adapters.
    """

    def __init__(
        self,
        id: str,
        model: str,
        voices: Sequence[str],
        seconds: float,
        pace: tuple[int, int, int] | None = None,
        strict: bool = False,
        kind: str = "realtime",
        calls: bool = False,
        served: Sequence[str] = (),
    ) -> None:
        self._voices, self._pace, self._strict = tuple(voices), pace, strict
        self._calls, self._served = calls, served
        self.values: dict[str, Any] = {
            "type": kind,
            "object": _OBJECTS[kind],
            "id": id,
            "model": model,
            "output_modalities": ["audio"],
            "instructions": "",
            "tools": [],
            "tool_choice": "auto",
            "max_output_tokens": "inf",
            "truncation": "auto",
            "tracing": None,
            "prompt": None,
            "include": None,
            "expires_at": int(time.time() + seconds),
            "audio": {
                "input": {
                    "format": dict(_PCM),
                    "transcription": None,
                    "noise_reduction": None,
                    "turn_detection": dict(_SERVER_VAD),
                },
                "output": {
                    "format": dict(_PCM),
                    "voice": self._voices[0] if self._voices else "default",
                    "speed": 1.0,
                },
            },
        }

    def update(self, asked: SessionShape) -> None:
        """Apply all given settings, or none of them and raise `EventError`."""
        given = asked.model_dump(exclude_unset=True)
        model = self.values["model"]
        fits = answers_to(asked.model, model, self._strict, agent=True)
        if not fits or (asked.model in self._served and asked.model != model):
            raise EventError(
                f"the model of a session stays {model!r}; open another session",
                param="session.model",
            )
        tools = checked_tools(asked.tools, self._calls, "session.tools")
        changed = copy.deepcopy(self.values)
        if asked.tools is not None:
            changed["tools"] = tools
        if given.get("tool_choice") is not None:
            changed["tool_choice"] = given["tool_choice"]
        _check_choice(changed, "session.tool_choice")
        kind = changed["type"] = given.get("type", changed["type"])
        changed["object"] = _OBJECTS[kind]
        for name in _ANSWERS:
            if given.get(name) is not None:
                changed[name] = given[name]
        audio = given.get("audio") or {}
        _input(changed["audio"]["input"], audio.get("input") or {})
        out = audio.get("output") or {}
        changed["audio"]["output"].update(self.output(out, "session.audio.output"))
        self._report(changed, given, audio.get("input") or {})
        self.values = changed

    def _report(
        self, changed: dict[str, Any], given: Mapping[str, Any], heard: Mapping[str, Any]
    ) -> None:
        """Report the given settings that have no effect here, so that no client relies on them."""
        idle = dict.fromkeys((changed.get("mmfast") or {}).get("without_effect", ()))
        asked = {name: given[name] for name in ("model", *IDLE) if name in given}
        if changed["type"] == "transcription":
            asked |= {name: given[name] for name in _ANSWERS if name in given}
        if "noise_reduction" in heard:
            asked["audio.input.noise_reduction"] = heard["noise_reduction"]
        for name, value in asked.items():
            idle.pop(name, None)
            if value is not None and (name in _ANSWERS or value != changed.get(name)):
                idle[name] = None
        if idle:
            changed["mmfast"] = {"without_effect": list(idle)}
        else:
            changed.pop("mmfast", None)

    def output(self, given: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the given settings of the output, checked."""
        found = {name: value for name, value in given.items() if value is not None}
        if "format" in found:
            found["format"] = _format(found["format"])
        if "voice" in found:
            found["voice"] = self.voice(found["voice"], f"{where}.voice")
        return found

    def voice(self, asked: str | Mapping[str, Any] | VoiceShape, where: str) -> str:
        """Return the name of an available voice; `EventError` for any other one."""
        name = asked["id"] if isinstance(asked, Mapping) else str(asked)
        if name not in self._voices and name not in VOICE_NAMES and name != "default":
            raise EventError(unknown("voice", name, [*self._voices, *VOICE_NAMES]), param=where)
        return name

    def speaking(self, output: Mapping[str, Any]) -> dict[str, Any]:
        """Return voice and speed of an output as options of the model's speaker."""
        found, name = dict[str, Any](), output["voice"]
        if name in self._voices:
            found["voice"] = name
        elif name in VOICE_NAMES and self._voices:
            found["voice"] = self._voices[VOICE_NAMES[name] % len(self._voices)]
        if self._pace is not None and output["speed"] != 1.0:
            least, usual, most = self._pace
            found["speed"] = round(min(max(usual * output["speed"], least), most))
        return found

    @property
    def answers(self) -> bool:
        """False for a session that writes speech down and answers nothing."""
        return bool(self.values["type"] != "transcription")

    @property
    def shown(self) -> dict[str, Any]:
        """The session as the client sees it: one of transcription has no output."""
        if self.answers:
            return self.values
        found = {name: self.values[name] for name in _HEARS if name in self.values}
        return {**found, "audio": {"input": self.values["audio"]["input"]}}

    @property
    def turn_detection(self) -> dict[str, Any] | None:
        """Settings of the turn detection; None leaves turns to the client."""
        found: dict[str, Any] | None = self.values["audio"]["input"]["turn_detection"]
        return found

    @property
    def detection(self) -> dict[str, Any] | None:
        """The settings that an ear depends on."""
        names = ("type", "threshold", "prefix_padding_ms", "silence_duration_ms", "eagerness")
        turns = self.turn_detection
        if turns is None:
            return None
        return {**{name: turns.get(name) for name in names}, "prosody": _extra(turns, "prosody")}

    @property
    def backchannels(self) -> bool:
        """True if a short "mhm" under a reply is passed over."""
        return _extra(self.turn_detection or {}, "backchannels")

    @property
    def transcribes(self) -> bool:
        """True if the client wants transcripts of its speech."""
        return not self.answers or self.values["audio"]["input"]["transcription"] is not None

    @property
    def input_format(self) -> str:
        """Format of incoming sound."""
        return str(self.values["audio"]["input"]["format"]["type"])

    def of_response(self, wish: Wish) -> dict[str, Any]:
        """Return the settings of one response; `EventError` if one is not available."""
        tools = checked_tools(wish.tools, self._calls, "response.tools")
        own, values = wish.model_dump(exclude_unset=True), self.values
        found = {name: values[name] for name in _ANSWERS}
        found.update({name: own[name] for name in _ANSWERS if own.get(name) is not None})
        asked = AudioOutput() if wish.audio is None else wish.audio.output or AudioOutput()
        given = self.output(asked.model_dump(exclude_unset=True), "response.audio.output")
        output = {**values["audio"]["output"], **given}
        found["tools"] = values["tools"] if wish.tools is None else tools
        found["tool_choice"] = own.get("tool_choice") or values["tool_choice"]
        _check_choice(found, "response.tool_choice")
        return {**found, "output": output, "asked": own.get("instructions") or ""}


def checked_tools(tools: Sequence[Any] | None, calls: bool, where: str) -> list[dict[str, Any]]:
    """Return the functions; `EventError` for other tools, and where the model calls none."""
    if tools and not calls:
        raise EventError("this model calls no tools; send an empty list", param=where)
    for number, tool in enumerate(tools or ()):
        if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            text = "a tool is of type 'function' and has a name; others are not called here"
            raise EventError(text, param=f"{where}.{number}")
    return [dict(tool) for tool in tools or ()]


def _check_choice(settings: Mapping[str, Any], where: str) -> None:
    choice, names = settings["tool_choice"], [tool["name"] for tool in settings["tools"]]
    named = None if isinstance(choice, str) else choice["name"]
    if wrong := choice_fault(choice, named, names):
        raise EventError(f"{wrong}; give such tools, or 'auto'", param=where)


def ear_of(turns: Mapping[str, Any]) -> Ear:
    """Return an ear that finds turns by these settings; `ModelError` without silero-vad."""
    if turns["type"] == "semantic_vad":
        make = ProsodyEar if _extra(turns, "prosody") else SemanticEar
        return make(turns["eagerness"])
    threshold = min(max(float(turns["threshold"]), 0.01), 0.99)
    return VoiceEar(
        threshold=threshold,
        exit=min(0.35, 0.7 * threshold),
        silence_duration_ms=turns["silence_duration_ms"],
        prefix_padding_ms=turns["prefix_padding_ms"],
    )


def _extra(turns: Mapping[str, Any], name: str) -> bool:
    return bool((turns.get("mmfast") or {}).get(name))


def _input(current: dict[str, Any], given: Mapping[str, Any]) -> None:
    if given.get("format") is not None:
        current["format"] = _format(given["format"])
    if "transcription" in given:
        asked = given["transcription"]
        names = ("model", "language", "prompt")
        current["transcription"] = None if asked is None else _texts(asked, names)
    if "turn_detection" in given:
        current["turn_detection"] = _turns(current["turn_detection"], given["turn_detection"])


def _texts(given: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
    return {name: given[name] for name in names if isinstance(given.get(name), str)}


def _turns(
    current: Mapping[str, Any] | None, given: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Return settings of turns; gaps are filled from current ones of that kind, or by defaults."""
    if given is None:
        return None
    kind = given["type"]
    if kind == "server_vad" and _extra(given, "prosody"):
        text = "prosody=true belongs to 'semantic_vad'; 'server_vad' ends turns by silence"
        raise EventError(text, param="session.audio.input.turn_detection.mmfast.prosody")
    before = current if current is not None and current["type"] == kind else _DEFAULTS[kind]
    set_ = {k: v for k, v in given.items() if v is not None or k == "idle_timeout_ms"}
    return {**before, **set_}


def _format(given: Mapping[str, Any]) -> dict[str, Any]:
    return dict(_PCM) if given["type"] == "audio/pcm" else {"type": given["type"]}
