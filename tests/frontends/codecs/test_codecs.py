"""Every codec: what it does in pieces is what the stock model does at once."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from codec_cases import CHUNKS, dac, encodec, in_pieces, mimi, noise, parametrised, some_codes
from torch import Tensor
from torch.nn import functional

from mmfast.core.speech import Codec, Stage
from mmfast.frontends.codecs.stages import tree_map
from mmfast.models.loading import load_codec

MODELS: dict[str, Any] = {
    "mimi": mimi,
    "mimi-reflect": partial(mimi, pad_mode="reflect"),
    "mimi-grouped-kv": partial(mimi, num_key_value_heads=1, use_conv_shortcut=True),
    "encodec": encodec,
    "encodec-zeros": partial(encodec, pad_mode="constant"),
    "encodec-both-ways": partial(encodec, use_causal_conv=False),
    "encodec-trimmed": partial(encodec, trim_right_ratio=0.5, pad_mode="replicate"),
    "dac": dac,
    "dac-odd": partial(dac, downsampling_ratios=(2, 5)),
}
IN_STEP = {"mimi", "mimi-grouped-kv", "encodec-zeros"}  # both halves
TOLERANCE = 2e-5
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")


@pytest.fixture(params=MODELS, scope="module")
def case(request: pytest.FixtureRequest) -> tuple[str, Any, Any]:
    model = MODELS[request.param]()
    return request.param, model, load_codec(model)


def stock_decode(name: str, model: Any, codes: Tensor) -> Tensor:
    with torch.no_grad():
        if name.startswith("mimi"):
            return model.decode(codes).audio_values[:, 0]
        if name.startswith("encodec"):
            return model.decode(codes[None], [None]).audio_values[:, 0]
        return model.decode(audio_codes=codes).audio_values


def stock_encode(name: str, model: Any, pcm: Tensor, hop: int) -> Tensor:
    with torch.no_grad():
        if name.startswith("mimi"):
            return model.encode(pcm[:, None]).audio_codes
        if name.startswith("encodec"):
            return model.encode(pcm[:, None], bandwidth=2.0).audio_codes[0]
        full = functional.pad(pcm, (0, -pcm.shape[-1] % hop))  # as its processor does
        return model.encode(full[:, None]).audio_codes


def test_is_a_codec(case: tuple[str, Any, Any]) -> None:
    name, _, codec = case
    assert isinstance(codec, Codec)
    assert isinstance(codec.encoder, Stage) and isinstance(codec.decoder, Stage)
    assert codec.frame_rate == codec.sample_rate / codec.hop
    both = codec.encoder.layers.in_step, codec.decoder.layers.in_step
    assert all(both) == (name in IN_STEP)
    assert name.split("-")[0] in repr(codec)


def test_decodes_as_stock(case: tuple[str, Any, Any]) -> None:
    name, model, codec = case
    for frames in (1, 2, 9, 40):
        codes = some_codes(codec, 2, frames, seed=frames)
        theirs, ours = stock_decode(name, model, codes), codec.decode(codes)
        assert ours.shape == (2, frames * codec.hop) and ours.dtype == torch.float32
        assert theirs.std() > 0.02
        torch.testing.assert_close(ours[:, : theirs.shape[-1]], theirs, rtol=0, atol=TOLERANCE)
        assert not ours[:, theirs.shape[-1] :].any()  # DAC of an odd stride gives a little less


def test_encodes_as_stock(case: tuple[str, Any, Any]) -> None:
    name, model, codec = case
    for samples in (40 * codec.hop, 40 * codec.hop - 3, codec.hop + 1, 3):
        pcm = noise(2, samples, seed=samples)
        theirs, ours = stock_encode(name, model, pcm, codec.hop), codec.encode(pcm)
        assert ours.shape == (2, codec.codebooks, -(-samples // codec.hop))
        assert ours.dtype == torch.int64 and torch.equal(ours, theirs)
    assert ours.unique().numel() > 1


@pytest.mark.parametrize("chunk", CHUNKS)
def test_decodes_in_pieces(case: tuple[str, Any, Any], chunk: int) -> None:
    name, model, codec = case
    codes = some_codes(codec, 2, 40)
    pieces, theirs = in_pieces(codec.decoder, codes, chunk), stock_decode(name, model, codes)
    assert pieces.shape == (2, 40 * codec.hop)
    torch.testing.assert_close(
        pieces[:, : theirs.shape[-1]], theirs, rtol=0, atol=TOLERANCE
    )  # exact to rounding, so there is no click at a boundary either


def test_encodes_in_pieces(case: tuple[str, Any, Any]) -> None:
    name, model, codec = case
    pcm = noise(2, 40 * codec.hop - 5)
    theirs = stock_encode(name, model, pcm, codec.hop)
    for sizes in ([1], [codec.hop], [3 * codec.hop], [7 * codec.hop], [1, 5, 0, 17, 50], [7]):
        assert torch.equal(in_pieces(codec.encoder, pcm, sizes), theirs), sizes


def test_is_late_by_its_lookahead_and_nothing_more(case: tuple[str, Any, Any]) -> None:
    name, _, codec = case
    codes = some_codes(codec, 1, 64)
    _, out = codec.decoder.step(codec.decoder.start(), codes)
    assert out.shape[-1] == 64 * codec.hop - codec.decoder.lookahead
    assert (codec.decoder.lookahead == 0) == (
        name not in ("encodec-both-ways", "encodec-trimmed") and "dac" not in name
    )
    first = codec.decoder.startup
    _, out = codec.decoder.step(codec.decoder.start(), codes[..., :first])
    assert out.shape[-1] > 0
    _, out = codec.decoder.step(codec.decoder.start(), codes[..., : first - 1])
    assert out.shape[-1] == 0


def test_what_has_been_said_stays(case: tuple[str, Any, Any]) -> None:
    """The output of a prefix is the prefix of the output."""
    _, _, codec = case
    codes = some_codes(codec, 2, 45)
    whole = codec.decode(codes)
    _, part = codec.decoder.step(codec.decoder.start(2), codes[..., :31])
    torch.testing.assert_close(part, whole[:, : part.shape[-1]], rtol=0, atol=TOLERANCE)


def test_state_is_a_value(case: tuple[str, Any, Any]) -> None:
    _, _, codec = case
    for stage, x in (
        (codec.decoder, some_codes(codec, 2, 60)),
        (codec.encoder, noise(2, 60 * codec.hop + 3)),
    ):
        cut = x.shape[-1] // 2 + 1
        state, _ = stage.step(stage.start(2), x[..., :cut])
        before = tree_map(torch.clone, state)
        after, first = stage.step(state, x[..., cut:])
        stage.finish(after)
        stage.reset(state, torch.tensor([True, False]))
        _, again = stage.step(state, x[..., cut:])
        assert torch.equal(first, again)
        tree_map(lambda a, b: a if torch.equal(a, b) else pytest.fail("changed"), state, before)


def test_a_stream_begins_anew_beside_others(case: tuple[str, Any, Any]) -> None:
    """Row 1 is reset in the middle: row 0 and 2 are as before, row 1 is a new stream."""
    _, _, codec = case
    codes = some_codes(codec, 3, 60)
    rows = torch.tensor([False, True, False])
    state, first = codec.decoder.step(codec.decoder.start(3), codes[..., :20])
    state = codec.decoder.reset(state, rows)
    middle = []
    for at in range(20, 60, 4):
        state, out = codec.decoder.step(state, codes[..., at : at + 4])
        middle.append(out)
    out = torch.cat([*middle, codec.decoder.finish(state)], -1)
    both = torch.cat([first, out], -1)
    n = 60 * codec.hop
    torch.testing.assert_close(both[::2, :n], codec.decode(codes[::2]), rtol=0, atol=TOLERANCE)
    fresh = codec.decode(codes[1:2, :, 20:])
    blank = out.shape[-1] - fresh.shape[-1]
    assert (blank == 0) == codec.decoder.layers.in_step
    assert not out[1, :blank].any()
    torch.testing.assert_close(out[1:2, blank:], fresh, rtol=0, atol=TOLERANCE)


def test_a_stream_is_heard_anew_beside_others(case: tuple[str, Any, Any]) -> None:
    _, _, codec = case
    pcm, rows = noise(2, 60 * codec.hop), torch.tensor([True, False])
    cut = 20 * codec.hop
    state, first = codec.encoder.step(codec.encoder.start(2), pcm[:, :cut])
    state = codec.encoder.reset(state, rows)
    state, second = codec.encoder.step(state, pcm[:, cut : cut + 13])
    state, third = codec.encoder.step(state, pcm[:, cut + 13 :])
    out = torch.cat([second, third, codec.encoder.finish(state)], -1)
    both = torch.cat([first, out], -1)
    assert torch.equal(both[1:, :, :60], codec.encode(pcm[1:]))
    blank = out.shape[-1] - 40
    assert (blank == 0) == codec.encoder.layers.in_step
    assert (out[0, :, :blank] == -1).all()
    assert torch.equal(out[:1, :, blank:], codec.encode(pcm[:1, cut:]))


def test_resetting_all_is_a_start_and_none_is_nothing(case: tuple[str, Any, Any]) -> None:
    _, _, codec = case
    codes = some_codes(codec, 2, 30)
    state, _ = codec.decoder.step(codec.decoder.start(2), codes)
    assert codec.decoder.reset(state, torch.tensor([False, False])) is state
    state = codec.decoder.reset(state, torch.tensor([True, True]))
    _, out = codec.decoder.step(state, codes)
    _, fresh = codec.decoder.step(codec.decoder.start(2), codes)
    assert torch.equal(out, fresh)


def test_a_long_stream_in_blocks(case: tuple[str, Any, Any]) -> None:
    """More frames than are worked on at once."""
    name, model, codec = case
    codes = some_codes(codec, 1, 150)
    theirs = stock_decode(name, model, codes)
    ours = codec.decode(codes)[:, : theirs.shape[-1]]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def test_encodec_carries_weight_normalisation() -> None:
    assert parametrised(encodec()) > 5  # so that the weights it streams with are the normalised
