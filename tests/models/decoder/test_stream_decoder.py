"""Steps of a stock decoder with a state that is a value: branch, go back, batch, bounded window."""

from __future__ import annotations

import pytest
import torch
from codebook_models import llama
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.core.kv import KVBlock
from mmfast.models.decoder.backbone import StreamDecoder
from mmfast.ops.stream_cache import crop, merge, stack, take


def _run(decoder: StreamDecoder, x: Tensor, cuts: list[int]) -> tuple[KVBlock, Tensor]:
    state, outs, at = decoder.start(len(x)), [], 0
    with torch.no_grad():
        for n in cuts:
            state, out = decoder.step(state, x[:, at : at + n])
            outs.append(out)
            at += n
    return state, torch.cat(outs, dim=1)


def _close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_pieces_are_the_stock_forward(attention: str) -> None:
    model = llama()
    model.set_attn_implementation(attention)
    x = torch.randn(2, 9, 32)
    with torch.no_grad():
        want = model.model(inputs_embeds=x).last_hidden_state
    for cuts in ([9], [1] * 9, [4, 1, 3, 1]):
        _close(_run(StreamDecoder(model.model), x, cuts)[1], want)


def test_a_window_bounds_memory_and_is_the_mask() -> None:
    model, x, window = llama(), torch.randn(1, 30, 32), 6
    at = torch.arange(30)
    sees = (at[:, None] >= at) & (at[:, None] - at < window)
    with torch.no_grad():
        want = model.model(inputs_embeds=x, attention_mask=sees[None, None]).last_hidden_state
    for cuts in ([1] * 30, [7, 1, 12, 10]):
        state, out = _run(StreamDecoder(model.model, window), x, cuts)
        _close(out, want)
        assert state.keys[0].shape[2] == window - 1 and state.advance.tolist() == [30]
        assert state.nbytes == 2 * 2 * 2 * (window - 1) * 8 * 4


def test_padded_streams_are_those_alone() -> None:
    decoder = StreamDecoder(llama().model)
    rows = [torch.randn(n, 32) for n in (2, 5, 3)]
    x, real = torch.full((3, 5, 32), 7.0), torch.zeros(3, 5, dtype=torch.bool)
    for i, row in enumerate(rows):
        x[i, 5 - len(row) :], real[i, 5 - len(row) :] = row, True
    more = torch.randn(3, 2, 32)
    with torch.no_grad():
        state, out = decoder.step(decoder.start(3), x, real)
        state, behind = decoder.step(state, more)
    for i, row in enumerate(rows):
        _, alone = _run(decoder, torch.cat([row, more[i]])[None], [len(row), 2])
        _close(out[i, 5 - len(row) :], alone[0, : len(row)])
        _close(behind[i], alone[0, len(row) :])


def test_states_are_values() -> None:
    decoder, x = StreamDecoder(llama().model, 8), torch.randn(1, 12, 32)
    with torch.no_grad():
        early, _ = decoder.step(decoder.start(1), x[:, :6])
        one = decoder.step(early, x[:, 6:])[1]
        decoder.step(early, torch.randn(1, 3, 32))  # another branch
        two = decoder.step(early, x[:, 6:])[1]
    assert torch.equal(one, two)


def test_stack_take_merge_and_crop() -> None:
    decoder, x = StreamDecoder(llama().model), torch.randn(2, 9, 32)
    with torch.no_grad():
        short, _ = decoder.step(decoder.start(1), x[:1, :3])
        long, _ = decoder.step(decoder.start(1), x[1:, :7])
        both = stack([short, long])
        _, out = decoder.step(both, x[:, 7:])
        want = [decoder.step(s, x[i : i + 1, 7:])[1] for i, s in enumerate((short, long))]
        _close(out, torch.cat(want))
        back = take(both, torch.tensor([0]))
        assert back.relative.shape[1] == 3  # what only the other needed is gone
        _close(decoder.step(back, x[:1, 7:])[1], want[0])
        mixed = merge(both, stack([decoder.start(1)] * 2), torch.tensor([False, True]))
        _close(decoder.step(mixed, x[:, :1])[1][1:], decoder.step(decoder.start(1), x[1:, :1])[1])
        cut = crop(both, torch.tensor([2, 5]))
        fresh = stack([_run(decoder, x[:1], [2])[0], _run(decoder, x[1:], [5])[0]])
        _close(decoder.step(cut, x[:, 8:])[1], decoder.step(fresh, x[:, 8:])[1])


def test_attention_that_takes_no_mask_is_refused() -> None:
    model = llama()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ModelError, match="'flash_attention_2'"):
        StreamDecoder(model.model)


def test_a_window_without_history_is_refused() -> None:
    with pytest.raises(ModelError, match="window=1"):
        StreamDecoder(llama().model, 1)
