"""Codecs that hear all of a recording, and codecs of latents: as the stock class, streamed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import codec_cases
import pytest
import torch
from codec_cases import in_pieces, noise
from torch import Tensor

from mmfast.core.errors import MediaError, ModelError
from mmfast.core.speech import Codec, Stage
from mmfast.models.loading import load_codec

pytestmark = pytest.mark.filterwarnings("ignore")
TOLERANCE = 2e-5


def xcodec2_codes(model: Any, pcm: Tensor, hop: int) -> Tensor:
    from transformers import Xcodec2FeatureExtractor

    rows = [row.numpy() for row in pcm]
    heard = Xcodec2FeatureExtractor(hop_length=hop)(rows, sampling_rate=16000, return_tensors="pt")
    heard.pop("padding_mask")
    return model.encode(**heard).audio_codes


def whole(pcm: Tensor, hop: int) -> Tensor:
    return torch.nn.functional.pad(pcm, (0, -pcm.shape[-1] % hop))[:, None]


# model, stock encode, stock decode; whether each half gives sound or codes before the end
CASES: dict[str, tuple[Any, Callable[..., Tensor], Callable[..., Tensor], tuple[bool, bool]]] = {
    "xcodec": (
        codec_cases.xcodec,
        lambda model, pcm, hop: model.encode(whole(pcm, hop)).audio_codes,
        lambda model, codes: model.decode(codes).audio_values[:, 0],
        (False, True),
    ),
    "higgs": (
        codec_cases.higgs_tokenizer,
        lambda model, pcm, hop: model.encode(whole(pcm, hop)).audio_codes,
        lambda model, codes: model.decode(codes).audio_values[:, 0],
        (False, True),
    ),
    "xcodec2": (
        codec_cases.xcodec2,
        xcodec2_codes,
        lambda model, codes: model.decode(codes).audio_values.reshape(len(codes), -1),
        (False, False),
    ),
    "vibevoice": (
        codec_cases.vibevoice_tokenizer,
        lambda m, pcm, hop: m.encode(whole(pcm, hop), sample=False).latents.transpose(1, 2),
        lambda model, latents: model.decode(latents.transpose(1, 2)).audio[:, 0],
        (True, True),
    ),
    "pocket": (
        codec_cases.pocket_tokenizer,
        lambda model, pcm, hop: model.encode(whole(pcm, hop)).latents.transpose(1, 2),
        lambda model, latents: model.decode(latents.transpose(1, 2)).audio_values[:, 0],
        (True, True),
    ),
}


@pytest.fixture(params=CASES, scope="module")
def case(request: pytest.FixtureRequest) -> Any:
    build, encode, decode, streams = CASES[request.param]
    model = build()
    return model, load_codec(model), encode, decode, streams


def given(codec: Any, frames: int) -> Tensor:
    generator = torch.Generator().manual_seed(frames)
    if codec.size:
        return torch.randint(codec.size, (2, codec.codebooks, frames), generator=generator)
    return torch.randn(2, codec.codebooks, frames, generator=generator)


def test_is_a_codec(case: Any) -> None:
    _, codec, _, _, streams = case
    assert isinstance(codec, Codec)
    assert isinstance(codec.encoder, Stage) and isinstance(codec.decoder, Stage)
    found = [math.isfinite(half.lookahead) for half in (codec.encoder, codec.decoder)]
    assert tuple(found) == streams  # what cannot stream says so
    assert ("latents" in repr(codec)) == (codec.size == 0)


def test_decodes_as_stock(case: Any) -> None:
    model, codec, _, decode, streams = case
    for frames in (1, 2, 33):
        codes = given(codec, frames)
        with torch.no_grad():
            wanted = decode(model, codes)
        found = codec.decode(codes)
        assert found.shape == (2, frames * codec.hop) and wanted.std() > 1e-3
        torch.testing.assert_close(found, wanted[:, : found.shape[1]], rtol=0, atol=TOLERANCE)
        for size in (1, 3, 7):
            pieces = in_pieces(codec.decoder, codes, size)[:, : found.shape[1]]
            torch.testing.assert_close(pieces, wanted[:, : found.shape[1]], rtol=0, atol=TOLERANCE)
    _, early = codec.decoder.step(codec.decoder.start(2), given(codec, 33))
    assert bool(early.shape[-1]) == streams[1]


def test_encodes_as_stock(case: Any) -> None:
    model, codec, encode, _, streams = case
    for samples in (20 * codec.hop, 20 * codec.hop - 3):
        pcm = noise(2, samples, seed=samples)
        with torch.no_grad():
            wanted = encode(model, pcm, codec.hop)
        found = codec.encode(pcm)
        assert found.unique().numel() > 2
        torch.testing.assert_close(found, wanted.to(found.dtype), rtol=0, atol=TOLERANCE)
        for sizes in ([codec.hop], [1, 5, 0, 17 * codec.hop]):
            pieces = in_pieces(codec.encoder, pcm, sizes)
            torch.testing.assert_close(pieces, found, rtol=0, atol=TOLERANCE)
    _, early = codec.encoder.step(codec.encoder.start(2), pcm)
    assert bool(early.shape[-1]) == streams[0]


def test_a_stream_begins_anew_beside_others(case: Any) -> None:
    _, codec, _, _, _ = case
    one, two = given(codec, 12), given(codec, 9)
    state, first = codec.decoder.step(codec.decoder.start(2), one)
    state = codec.decoder.reset(state, torch.tensor([False, True]))
    state, rest = codec.decoder.step(state, two)
    tail = codec.decoder.finish(state)
    old = torch.cat([first, rest, tail], -1)[:1]
    wanted = codec.decode(torch.cat([one, two], -1)[:1])
    torch.testing.assert_close(old[:, : wanted.shape[1]], wanted, rtol=0, atol=TOLERANCE)
    if codec.decoder.lookahead in (0, math.inf):  # with look-ahead a row comes late
        alone, new = codec.decode(two[1:]), torch.cat([rest, tail], -1)[1:]
        torch.testing.assert_close(new[:, : alone.shape[1]], alone, rtol=0, atol=TOLERANCE)


def test_loads_from_a_folder(case: Any, tmp_path: Path) -> None:
    model, codec, _, _, _ = case
    model.save_pretrained(tmp_path)
    if codec.name == "xcodec2":
        from transformers import Xcodec2FeatureExtractor

        Xcodec2FeatureExtractor(hop_length=codec.hop).save_pretrained(tmp_path)
    codes = given(codec, 5)
    loaded = load_codec(tmp_path, device="cpu")
    torch.testing.assert_close(loaded.decode(codes), codec.decode(codes), rtol=0, atol=TOLERANCE)
    pcm = noise(1, 5 * codec.hop)
    torch.testing.assert_close(loaded.encode(pcm), codec.encode(pcm), rtol=0, atol=TOLERANCE)


def test_wrong_inputs_are_one_line(case: Any) -> None:
    _, codec, _, _, _ = case
    wrong = given(codec, 3)
    bad = [wrong.float() if codec.size else wrong.long(), wrong[:, :0], wrong[0, 0]]
    bad += [torch.full_like(wrong, codec.size) if codec.size else wrong * torch.nan]
    for each in bad:
        with pytest.raises(MediaError) as error:
            codec.decode(each)
        assert "\n" not in str(error.value)
    with pytest.raises(ModelError, match="out of range"):
        load_codec(case[0], codebooks=99)
    with pytest.raises(ModelError, match="unknown option of codec"):
        load_codec(case[0], lookahead=1)


def test_fewer_books_are_the_first_ones() -> None:
    model = codec_cases.xcodec()
    pcm = noise(1, 160)
    few, all_books = load_codec(model, codebooks=2).encode(pcm), load_codec(model).encode(pcm)
    assert torch.equal(few, all_books[:, :2])


def test_folders_of_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ModelError, match=r"unknown codec 'bert'.*xcodec2"):
        load_codec(tmp_path)
