"""Talkers that sound frame by frame: what the stock class says at the end, sooner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import active_count
from typing import Any

import pytest
import talker_models
import torch
from torch import Tensor

import mmfast
from mmfast.frontends.audio.wav import write_sound

TEXT = "hello there. how are you?"
pytestmark = pytest.mark.filterwarnings("ignore")


def prompt(processor: Any, role: str, text: str, **more: Any) -> str:
    turns = [{"role": role, "content": [{"type": "text", "text": text}]}]
    return processor.apply_chat_template(turns, tokenize=False, **more)


def higgs_by_hand(folder: str, text: str) -> Tensor:
    from transformers import HiggsAudioV2ForConditionalGeneration, HiggsAudioV2Processor

    model = HiggsAudioV2ForConditionalGeneration.from_pretrained(folder)
    processor = HiggsAudioV2Processor.from_pretrained(folder)
    task = "Generate audio following instruction."  # the template joins all turns
    asked = prompt(processor, "user", f"{task}{text}", add_generation_prompt=True)
    inputs = processor(text=[asked], return_tensors="pt")
    torch.manual_seed(5)
    codes = model.generate(**inputs, do_sample=True, temperature=1.2)
    return processor.batch_decode(codes)[0]


def vibevoice_by_hand(folder: str, text: str) -> Tensor:
    from transformers import VibeVoiceForConditionalGeneration, VibeVoiceProcessor

    model = VibeVoiceForConditionalGeneration.from_pretrained(folder)
    processor = VibeVoiceProcessor.from_pretrained(folder)
    inputs = processor(text=[prompt(processor, "0", text)], return_tensors="pt")
    torch.manual_seed(5)
    return model.generate(**inputs, num_diffusion_steps=3)[0].reshape(-1)


def pocket_by_hand(folder: str, text: str) -> Tensor:
    from transformers import PocketTTSForConditionalGeneration, PocketTTSProcessor

    model = PocketTTSForConditionalGeneration.from_pretrained(folder)
    processor = PocketTTSProcessor.from_pretrained(folder)
    torch.manual_seed(5)
    parts = []
    for sentence in ("hello there.", "how are you?"):
        inputs = processor(text=[prompt(processor, "user", sentence)], return_tensors="pt")
        made = model.generate(**inputs, do_sample=True, temperature=0.5)
        parts += processor.decode(made.audio_latents, made.audio_latents_mask)
    return torch.cat(parts)


Hand = Callable[[str, str], Tensor]
KINDS: dict[str, tuple[Hand, dict[str, Any], dict[str, Any]]] = {
    "higgs": (higgs_by_hand, {"do_sample": True, "temperature": 1.2}, {"do_sample": False}),
    "vibevoice": (vibevoice_by_hand, {"num_diffusion_steps": 3}, {"num_diffusion_steps": 3}),
    "pocket_tts": (
        pocket_by_hand, {"do_sample": True, "temperature": 0.5}, {"do_sample": False},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    pytest.importorskip("diffusers")
    return talker_models.folders_of(KINDS, tmp_path_factory)


@pytest.fixture(scope="module")
def pipes(folders: dict[str, str]) -> dict[str, Any]:
    return talker_models.pipes_of(folders)


@pytest.mark.parametrize("kind", KINDS)
def test_frames_are_what_the_stock_class_says_at_the_end(
    kind: str, folders: dict[str, str], pipes: dict[str, Any]
) -> None:
    by_hand, options, _ = KINDS[kind]
    with torch.no_grad():
        wanted = by_hand(folders[kind], TEXT)
    sounds = list(pipes[kind].stream(TEXT, seed=5, **options))
    pieces = [sound.pcm for sound in sounds if len(sound.pcm)]
    assert len(pieces) > 3 and "".join(sound.text for sound in sounds) == TEXT
    assert wanted.std() > 1e-3
    torch.testing.assert_close(torch.cat(pieces), wanted, rtol=0, atol=1e-4)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_list_is_each_text_alone(
    kind: str, pipes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "vibevoice":  # always draws noise, which a batch draws in another order
        monkeypatch.setattr(torch, "randn", lambda *shape, **_: torch.zeros(*shape))
    pipe, options = pipes[kind], KINDS[kind][2]
    texts = ["hello there.", "is it you my friend?"]
    for spoken, text in zip(pipe(texts, **options), texts, strict=True):
        alone = pipe(text, **options)
        assert spoken.text == alone.text == text
        torch.testing.assert_close(spoken.pcm, alone.pcm, rtol=0, atol=1e-4)


@pytest.mark.rest_is_slow(3, 1)
@pytest.mark.parametrize("kind", KINDS)
def test_streams_on_one_model_take_turns(kind: str, pipes: dict[str, Any]) -> None:
    pipe, options = pipes[kind], KINDS[kind][1]
    alone = [pipe("hello there.", seed=seed, **options).pcm for seed in (1, 2)]
    streams = [iter(pipe.stream("hello there.", seed=seed, **options)) for seed in (1, 2)]
    found: list[list[Tensor]] = [[], []]
    while any(streams):
        for at, stream in enumerate(streams):
            sound = next(stream, None) if stream is not None else None
            if sound is None:
                streams[at] = None  # type: ignore[call-overload]
            else:
                found[at].append(sound.pcm)
    for pieces, pcm in zip(found, alone, strict=True):
        torch.testing.assert_close(torch.cat(pieces), pcm, rtol=0, atol=1e-4)
    assert not torch.equal(*alone)


@pytest.mark.parametrize("kind", [*KINDS, "qwen3_omni"])
def test_a_stream_that_ends_leaves_one_that_waits_alone(
    kind: str, tmp_path: Path, pipes: dict[str, Any]
) -> None:
    if kind == "qwen3_omni":
        pipe = mmfast.pipeline("text-to-speech", talker_models.qwen3_omni(tmp_path))
        options: dict[str, Any] = {"max_words": 4, "max_codes": 8}
    else:
        pipe, options = pipes[kind], {**KINDS[kind][2], "max_new_tokens": 16}
    alone = pipe("the cat sat.", seed=1, **options).pcm
    stream = iter(pipe.stream("the cat sat.", seed=1, **options))
    other = iter(pipe.stream("the cat sat.", seed=2, **options))
    pieces = [torch.zeros(0)]
    for each in (stream, other, stream):  # both wait in a hook of the module, that has two
        while not len(sound := next(each).pcm):
            pass
        pieces += [sound] if each is stream else []
    list(other)
    pieces += [sound.pcm for sound in stream]
    torch.testing.assert_close(torch.cat(pieces), alone, rtol=0, atol=1e-4)


@pytest.mark.rest_is_slow(3, 2)
@pytest.mark.parametrize("kind", KINDS)
def test_who_leaves_stops_the_model(kind: str, pipes: dict[str, Any]) -> None:
    pipe = pipes[kind]
    threads = active_count()
    stream = iter(pipe.stream(TEXT, **KINDS[kind][1]))
    while not len(next(stream).pcm):
        assert torch.is_grad_enabled()  # what the model needs is not left behind
    assert active_count() == threads + 1
    stream.close()  # type: ignore[attr-defined]
    assert active_count() == threads
    hooks = [*pipe.talker.model.modules()]
    assert not [m for m in hooks if m._forward_hooks or m._forward_pre_hooks]


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_recording_gives_the_voice(kind: str, pipes: dict[str, Any], tmp_path: Path) -> None:
    pipe = pipes[kind]
    rate = pipe.talker.sample_rate
    generator = torch.Generator().manual_seed(0)
    sounds = {"tone": 0.5 * torch.sin(0.1 * torch.arange(4800))}
    sounds["noise"] = 0.2 * torch.randn(4800, generator=generator).clamp(-4, 4)
    voices = [str(tmp_path / f"{name}.wav") for name in sounds]
    for voice, sound in zip(voices, sounds.values(), strict=True):
        write_sound(voice, sound, rate)
    options = KINDS[kind][1]
    low, high = (pipe("hello there.", voice=voice, **options).pcm for voice in voices)
    plain = pipe("hello there.", **options).pcm
    assert len(low) and not torch.equal(low, high) and not torch.equal(low, plain)
