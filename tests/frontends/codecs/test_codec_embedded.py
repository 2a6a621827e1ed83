"""The embedded codec streams exactly, in both directions, and takes any sound."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from embedded_codec_cases import CHUNKS, codec, speech, spoken_codes, voice
from torch import Tensor

from mmfast.core.errors import MediaError, ModelError
from mmfast.core.speech import Codec, Stage
from mmfast.frontends.codecs.embedded.codec import DecoderState, load_embedded, save_embedded
from mmfast.frontends.codecs.embedded.features import FRAME, VocoderNet, pitch_track
from mmfast.frontends.codecs.embedded.synthesis import SynthesisState

CLOSE = 2e-5
PINNED = [[1021] * 12, [385, 414, 414, 236, 395, 395, 395, 154, 154, 154, 154, 154]]


def stream(stage: Any, parts: Any) -> Tensor:
    """All that a stage gives for the parts, end included."""
    state, outs = None, []
    for part in parts:
        state = stage.start(len(part)) if state is None else state
        state, out = stage.step(state, part)
        outs.append(out)
    return torch.cat([*outs, stage.finish(state)], -1)


def test_it_is_a_codec() -> None:
    assert isinstance(codec(), Codec)
    assert isinstance(codec().encoder, Stage) and isinstance(codec().decoder, Stage)
    assert (codec().sample_rate, codec().frame_rate, codec().hop) == (16000, 25.0, 640)
    assert (codec().codebooks, codec().size) == (2, 1024)
    assert "25 frames/s" in repr(codec())


@pytest.mark.parametrize("samples", [*(FRAME * n for n in CHUNKS), 97, 333, 777, 4097])
def test_encoding_in_pieces(samples: int) -> None:
    whole = codec().encode(speech())
    assert whole.shape == (2, 2, -(-speech().shape[1] // FRAME)) and whole.dtype == torch.long
    assert torch.equal(stream(codec().encoder, speech().split(samples, 1)), whole)


@pytest.mark.parametrize("frames", CHUNKS)
def test_decoding_in_pieces(frames: int) -> None:
    codes = spoken_codes()
    whole = codec().decode(codes)
    assert whole.shape == (2, codes.shape[2] * FRAME) and whole.dtype == torch.float32
    assert whole.abs().max() > 0.01
    assert (stream(codec().decoder, codes.split(frames, 2)) - whole).abs().max() <= CLOSE


@pytest.mark.parametrize("lost", ["tails", "phase", "pitch", "points", "ringing", "made"])
def test_a_lost_state_is_noticed(lost: str) -> None:
    decoder, codes = codec().decoder, spoken_codes()
    whole = codec().decode(codes)

    def without(state: DecoderState) -> DecoderState:
        fresh = decoder.start(2)
        if lost == "tails":
            return state._replace(tails=fresh.tails)
        return state._replace(voice=state.voice._replace(**{lost: getattr(fresh.voice, lost)}))

    state, outs = decoder.start(2), []
    for part in codes.split(7, 2):
        state, out = decoder.step(without(state), part)
        outs.append(out)
    wrong = torch.cat([*outs, decoder.finish(state)], 1)
    assert (wrong - whole).abs().max() > 10 * CLOSE


def test_a_lost_past_of_the_encoder_is_noticed() -> None:
    encoder = codec().encoder
    parts = [encoder.step(encoder.start(2), part)[1] for part in speech().split(FRAME * 3, 1)]
    whole = codec().encode(speech())
    assert not torch.equal(torch.cat(parts, 2), whole[:, :, : sum(p.shape[2] for p in parts)])


def test_a_prefix_gives_a_prefix() -> None:
    codes = codec().encode(speech()[:, : FRAME * 20])
    assert torch.equal(codes, codec().encode(speech())[:, :, :20])
    short, long = codec().decode(spoken_codes()[:, :, :20]), codec().decode(spoken_codes())
    sure = 19 * FRAME  # the last frame would have looked one ahead
    assert (short[:, :sure] - long[:, :sure]).abs().max() <= CLOSE


def test_a_state_is_a_value() -> None:
    for stage, parts in (
        (codec().encoder, speech().split(3000, 1)),
        (codec().decoder, spoken_codes().split(5, 2)),
    ):
        state, _ = stage.step(stage.start(2), parts[0])
        once = stage.step(state, parts[1])[1]
        stage.step(state, parts[2])
        assert torch.equal(stage.step(state, parts[1])[1], once)


def test_rows_do_not_touch() -> None:
    codes = spoken_codes()
    both = codec().decode(codes)
    for row in range(2):
        assert (codec().decode(codes[row]) - both[row]).abs().max() <= CLOSE
        assert torch.equal(codec().encode(speech()[row]), codec().encode(speech())[row : row + 1])


def test_one_stream_of_a_batch_starts_anew() -> None:
    decoder, codes = codec().decoder, spoken_codes()
    state, early = decoder.step(decoder.start(2), codes[:, :, :11])
    state = decoder.reset(state, torch.tensor([False, True]))
    state, late = decoder.step(state, codes[:, :, 11:])
    late = torch.cat([late, decoder.finish(state)], 1)
    whole, fresh = codec().decode(codes), codec().decode(codes[1:, :, 11:])
    assert (torch.cat([early, late], 1)[0] - whole[0]).abs().max() <= CLOSE
    assert late[1, :FRAME].abs().max() == 0.0  # one frame late
    assert (late[1, FRAME:] - fresh[0]).abs().max() <= CLOSE


def test_one_heard_stream_of_a_batch_starts_anew() -> None:
    encoder, pcm = codec().encoder, speech()
    state, _ = encoder.step(encoder.start(2), pcm[:, : 9 * FRAME])
    state = encoder.reset(state, torch.tensor([True, False]))
    late = encoder.step(state, pcm[:, 9 * FRAME : 30 * FRAME])[1]
    assert torch.equal(late[0], codec().encode(pcm[0, 9 * FRAME : 30 * FRAME])[0])
    assert torch.equal(late[1], codec().encode(pcm)[1, :, 9:30])


@pytest.mark.parametrize("stage", ["encoder", "decoder"])
def test_all_streams_start_anew(stage: str) -> None:
    worker = getattr(codec(), stage)
    part = speech()[:, :5000] if stage == "encoder" else spoken_codes()[:, :, :7]
    state, once = worker.step(worker.start(2), part)
    again = worker.reset(state, torch.tensor([True, True]))
    assert torch.equal(worker.step(again, part)[1], once)


def test_silence_is_one_code_and_silent() -> None:
    codes = codec().encode(torch.zeros(1, 16000))
    assert codes.shape == (1, 2, 25) and not codes.any()
    assert codec().decode(codes).abs().max() < 2e-3
    faint = 1e-4 * torch.randn(1, 16000, generator=torch.Generator().manual_seed(0))
    assert not codec().encode(faint).any()


@pytest.mark.parametrize("kind", ["noise", "clipped", "offset", "square", "loud"])
def test_any_sound_gives_sound(kind: str) -> None:
    base = voice(0.5)
    sounds = {
        "noise": torch.randn(9999, generator=torch.Generator().manual_seed(1)),
        "clipped": (20 * base).clamp(-1, 1),
        "offset": base + 0.4,
        "square": torch.sign(base),
        "loud": 32768 * base,
    }
    out = codec().decode(codec().encode(sounds[kind][None]))
    assert bool(out.isfinite().all()) and out.abs().max() < 4


@pytest.mark.parametrize("samples", [0, 1, 639, 640, 641])
def test_tiny_sounds(samples: int) -> None:
    codes = codec().encode(torch.zeros(1, samples))
    assert codes.shape == (1, 2, -(-samples // FRAME))
    assert codec().decode(codes).shape == (1, codes.shape[2] * FRAME)


def test_a_long_sound() -> None:
    pcm = voice(1.0).repeat(40)[None]
    codes = codec().encode(pcm)
    assert codes.shape == (1, 2, 1000)
    tail = codec().encoder.step(codec().encoder.start(), pcm[:, 30 * 16000 :])[1]
    assert torch.equal(tail[0, :, 2:], codes[0, :, 752:])  # nothing from long ago


@pytest.mark.parametrize(
    "sound",
    [torch.full((1, 900), torch.nan), torch.zeros(1, 9, dtype=torch.int16), torch.zeros(1, 1, 9)],
)
def test_what_is_no_sound(sound: Tensor) -> None:
    with pytest.raises(MediaError) as caught:
        codec().encode(sound)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "codes",
    [
        torch.zeros(1, 2, 3),
        torch.full((1, 2, 3), 1024),
        torch.full((1, 2, 3), -1),
        torch.zeros(1, 3, 3, dtype=torch.long),
    ],
)
def test_what_are_no_codes(codes: Tensor) -> None:
    with pytest.raises(MediaError) as caught:
        codec().decode(codes)
    assert "\n" not in str(caught.value)


def test_codes_never_change() -> None:
    """The language model was trained on them."""
    codes = codec().encode(voice(0.8)[None])[0]
    assert codes[:, 4:16].tolist() == PINNED


def test_nothing_clicks_where_pieces_meet() -> None:
    codes = codec().encode(voice(1.0, 120, 120)[None])
    sound = codec().decode(codes)[0, 8 * FRAME :].double()
    jumps = sound.diff(n=2).abs()
    at = torch.arange(FRAME, len(jumps) - 4, FRAME // 4)[:, None] + torch.arange(-3, 2)
    assert jumps[at].max() <= 1.02 * jumps.max()
    assert jumps[at].mean() < 1.5 * jumps.mean()


def test_the_pitch_of_a_voice() -> None:
    for hertz in (75.0, 110.0, 163.0, 240.0, 330.0):
        heard = torch.nn.functional.pad(voice(0.5, hertz, hertz).double(), (480, 0))[None]
        found, strength = pitch_track(heard)
        assert (found[0, 10:] / hertz - 1).abs().max() < 0.01 and strength[0, 10:].min() > 0.9


def test_pitch_comes_back() -> None:
    """Of a voice that it was not fitted to, roughly."""
    for hertz in (90.0, 120.0, 200.0):
        sound = codec().decode(codec().encode(voice(1.0, hertz, hertz)[None]))[0]
        found, _ = pitch_track(torch.nn.functional.pad(sound.double(), (480, 0))[None])
        assert abs(float(found[0, 50:90].median()) / hertz - 1) < 0.2


def test_written_and_read(tmp_path: Any) -> None:
    torch.manual_seed(0)
    net, state = VocoderNet(32, 16), SynthesisState.start(1, torch.zeros(1))
    assert state.points.shape == (1, 96)
    own = codec().encoder
    save_embedded(tmp_path, own.books, own.bias, net)
    again = load_embedded(tmp_path)
    assert torch.equal(again.encode(speech()), codec().encode(speech()))
    assert again.decode(spoken_codes()).shape == codec().decode(spoken_codes()).shape
    (tmp_path / "config.json").write_text('{"kind": "mimi"}')
    with pytest.raises(ModelError, match="holds no embedded codec"):
        load_embedded(tmp_path)
    with pytest.raises(ModelError, match="no embedded codec at"):
        load_embedded(tmp_path / "nowhere")
