"""What may go into a codec, and one line on what may not; loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from codec_cases import dac, encodec, mimi, noise, some_codes
from torch import nn

from mmfast.core.errors import MediaError, MmfastError, ModelError
from mmfast.models.loading import load_codec

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")


@pytest.fixture(params=[mimi, encodec, dac], ids=["mimi", "encodec", "dac"])
def codec(request: pytest.FixtureRequest) -> Any:
    return load_codec(request.param())


NAN = torch.tensor([[0.0, float("nan"), float("inf")]])


@pytest.mark.parametrize(
    ("pcm", "says"),
    [
        (NAN, "2 NaN or infinite samples"),
        (torch.zeros(1, 2, 30), r"shape \[1, 2, 30\]"),
        (torch.zeros(0, 30), r"shape \[0, 30\]"),
        (torch.zeros(1, 30, dtype=torch.int16), "torch.int16"),
        ([0.0] * 30, "list"),
        (torch.tensor(0.5), r"shape \[\]"),
    ],
)
def test_bad_sound(codec: Any, pcm: Any, says: str) -> None:
    for use in (codec.encode, lambda x: codec.encoder.step(codec.encoder.start(), x)):
        with pytest.raises(MediaError, match=says) as caught:
            use(pcm)
        assert "\n" not in str(caught.value) and "give" in str(caught.value)


@pytest.mark.parametrize(
    ("codes", "says"),
    [
        (torch.zeros(1, 2, 4), "torch.float32"),
        (torch.full((1, 2, 4), 32), "code 32 is not in a codebook; give codes of 0 to 31"),
        (torch.full((1, 2, 4), -1), "code -1"),
        (torch.zeros(1, 9, 4, dtype=torch.long), r"shape \[1, 9, 4\]"),
        (torch.zeros(1, 0, 4, dtype=torch.long), "1 to"),
        (torch.zeros(4, dtype=torch.long), r"shape \[4\]"),
        ([[1]], "list"),
    ],
)
def test_bad_codes(codec: Any, codes: Any, says: str) -> None:
    for use in (codec.decode, lambda x: codec.decoder.step(codec.decoder.start(), x)):
        with pytest.raises(MediaError, match=says) as caught:
            use(codes)
        assert "\n" not in str(caught.value)


def test_the_batch_of_a_stream_is_fixed(codec: Any) -> None:
    with pytest.raises(MediaError, match="sound of 3 streams for a state of 2"):
        codec.encoder.step(codec.encoder.start(2), noise(3, 20))
    with pytest.raises(MediaError, match="batch is 0"):
        codec.decoder.start(0)
    for rows in (torch.tensor([True]), torch.tensor([1, 0])):
        with pytest.raises(MediaError, match=r"give torch.bool \[2\]"):
            codec.decoder.reset(codec.decoder.start(2), rows)


def test_nothing_gives_nothing(codec: Any) -> None:
    empty = codec.encode(torch.zeros(2, 0))
    assert empty.shape == (2, codec.codebooks, 0) and empty.dtype == torch.int64
    assert codec.decode(empty).shape == (2, 0)
    state, out = codec.encoder.step(codec.encoder.start(2), torch.zeros(2, 0))
    assert out.shape == (2, codec.codebooks, 0)
    assert codec.encoder.finish(state).shape == (2, codec.codebooks, 0)


@pytest.mark.parametrize("level", [0.0, 1.0, 100.0])
def test_silence_full_scale_and_beyond(codec: Any, level: float) -> None:
    sound = codec.decode(codec.encode(level * torch.ones(1, 10 * codec.hop + 1)))
    assert sound.shape == (1, 11 * codec.hop) and sound.isfinite().all()


def test_one_stream_may_come_without_a_batch(codec: Any) -> None:
    pcm = noise(30 * codec.hop)
    codes = codec.encode(pcm)
    assert torch.equal(codes, codec.encode(pcm[None]))
    assert torch.equal(codec.decode(codes[0]), codec.decode(codes))
    assert torch.equal(codec.encode(pcm.double()), codes)
    assert torch.equal(codec.decode(codes.int()), codec.decode(codes))


def test_half_precision_gives_float_sound() -> None:
    from transformers import MimiModel

    model = MimiModel(mimi().config)
    model.load_state_dict(mimi().state_dict())
    codec = load_codec(model.to(torch.bfloat16))
    codes = some_codes(codec, 1, 12)
    out, exact = codec.decode(codes), load_codec(mimi()).decode(codes)
    assert out.dtype == torch.float32
    assert (out - exact).abs().max() < 0.1 * exact.abs().max()
    assert codec.encode(noise(1, 50)).dtype == torch.int64


@pytest.mark.parametrize("make", [mimi, encodec, dac])
def test_from_a_directory(make: Any, tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    codec, given = load_codec(tmp_path, device="cpu"), load_codec(make())
    codes = some_codes(given, 1, 12)
    assert torch.equal(codec.decode(codes), given.decode(codes))


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        (nn.Linear(1, 1), {}, "unknown codec 'Linear'"),
        ("./nowhere", {}, "cannot load codec './nowhere'"),
        (mimi, {"codebooks": 9}, "codebooks=9 is out of range; Mimi takes 1 to 4"),
        (encodec, {"codebooks": 0}, "EnCodec takes 1 to 4"),
        (mimi, {"lookahead": 3}, "unknown option of codec mimi 'lookahead'"),
    ],
)
def test_what_cannot_be_loaded(source: Any, options: dict[str, Any], says: str) -> None:
    model = source() if source in (mimi, encodec) else source
    with pytest.raises(ModelError, match=says) as caught:
        load_codec(model, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"normalize": True, "chunk_length_s": 1.0, "overlap": 0.01}, "normalises each piece and"),
        ({"audio_channels": 2}, "has 2 channels"),
        ({"norm_type": "time_group_norm", "use_causal_conv": False}, "normalises over all time"),
    ],
)
def test_the_encodec_that_does_not_stream(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(MmfastError, match=says):
        load_codec(encodec(**changes))
