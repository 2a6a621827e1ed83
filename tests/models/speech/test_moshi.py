"""Moshi step by step: the codes of the stock model, a state that is a value, bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from codebook_models import llama, moshi
from torch import Tensor

from mmfast.core.errors import ModelError, SpecError
from mmfast.core.speech import Chatter
from mmfast.decoding.codebooks import CodeChoice, copy_frame
from mmfast.decoding.sampling import Sampling
from mmfast.models.speech.depth_weights import moshi_depth
from mmfast.models.speech.moshi import MoshiVoice
from mmfast.models.speech.moshi_steps import MoshiState, MoshiSteps
from mmfast.ops.codebooks import delay

GREEDY = Sampling()


@pytest.fixture(scope="module")
def model() -> Any:
    return moshi()


def _talk(steps: MoshiSteps, user: Tensor, state: MoshiState | None = None) -> Any:
    """User codes `[B, K, T]` to texts `[B, T]`, codes `[B, K, T]` and the last state."""
    state = steps.start(len(user)) if state is None else state
    texts, codes = [], []
    for at in range(user.shape[2]):
        state, frame = steps.step(state, user[:, :, at])
        assert bool(frame.whole.all())
        texts.append(frame.text)
        codes.append(frame.codes)
    return torch.stack(texts, dim=1), torch.stack(codes, dim=2), state


def test_the_depth_transformer_is_the_stock_one_on_the_same_weights(model: Any) -> None:
    core = moshi_depth(model.depth_decoder)
    hidden, tokens = torch.randn(5, 32), torch.randint(50, (5, 4))
    with torch.no_grad():
        want = model.depth_decoder(
            input_ids=tokens, last_hidden_state=hidden[:, None], attention_mask=torch.ones(5, 4)
        ).logits
        torch.testing.assert_close(core.whole(hidden, tokens), want, rtol=1e-4, atol=1e-5)
    assert not list(core.parameters())  # nothing is copied
    stock = model.depth_decoder.layers[0].mlp.fc1.weight
    assert core.layers[0].gate.weight.data_ptr() == stock.data_ptr()


@pytest.mark.parametrize("window", [20, 6])
@pytest.mark.filterwarnings("ignore")
def test_greedy_is_the_stock_generate(window: int) -> None:
    model, n = moshi(window), 12
    silence = torch.zeros(1, 1, model.config.audio_encoder_config.frame_size)
    blank = model.audio_encoder.encode(silence, num_quantizers=4)[0][:, :, :1]
    with torch.no_grad():
        stock = model.generate(
            **model.get_unconditional_inputs(num_samples=2),
            max_new_tokens=n,
            do_sample=False,
            concat_unconditional_inputs=False,
            return_audio_waveforms=False,
            return_audio_codes=True,
        )
    for drafter in (None, copy_frame):
        steps = MoshiSteps(model, drafter=drafter)
        texts, codes, _ = _talk(steps, blank.expand(2, -1, n - 1))
        assert torch.equal(texts, stock.sequences[:, 1:n])
        assert torch.equal(codes, stock.audio_codes)


def _recompute(model: Any, user: Tensor, texts: Tensor, raw: Tensor) -> tuple[Tensor, Tensor]:
    """Stock forward over everything at once: what it says at every step."""
    heard = delay(user, (0, 1, 1, 1), 64)[:, :, : user.shape[2]]
    said = raw.clone()
    said[:, 1:, 0] = 64  # the first step's lagging codes belong to no frame
    start = torch.full((len(user), 4, 1), 64)
    text = torch.cat([torch.full((len(user), 1), 50), texts], dim=1)[:, : user.shape[2] + 1]
    with torch.no_grad():
        out = model(
            input_ids=text,
            moshi_audio_codes=torch.cat([start, said], dim=2)[:, :, : text.shape[1]],
            user_audio_codes=torch.cat([start, heard], dim=2),
        )
        wrote = out.logits.argmax(-1)  # [B, T + 1]
        tokens = torch.cat([wrote[:, :, None], raw[:, :-1].transpose(1, 2)], dim=2).flatten(0, 1)
        codes = model.depth_decoder(
            input_ids=tokens,
            last_hidden_state=out.last_hidden_state.view(-1, 1, 32),
            attention_mask=torch.ones(tokens.shape),
        ).logits.argmax(-1)
    return wrote, codes.view(len(user), -1, 4).transpose(1, 2)


@pytest.mark.parametrize("drafted", [False, True])
def test_with_a_user_who_speaks_it_is_a_recompute_of_everything(model: Any, drafted: bool) -> None:
    steps = MoshiSteps(model, drafter=copy_frame if drafted else None)
    user = torch.randint(64, (40, 4, 9))
    state = steps.start(40)
    texts, raw = [state.text], [state.codes]
    for at in range(9):
        state, _ = steps.step(state, user[:, :, at])
        texts.append(state.text)
        raw.append(state.codes)
    text, codes = torch.stack(texts, dim=1), torch.stack(raw, dim=2)
    want_text, want_codes = _recompute(model, user, text, codes)
    assert torch.equal(text, want_text) and torch.equal(codes, want_codes)
    assert len(torch.unique(text, dim=0)) > 20


def test_a_thousand_conversations_drafted_are_those_code_by_code(model: Any) -> None:
    user = torch.randint(64, (1000, 4, 4))
    plain = _talk(MoshiSteps(model), user)
    drafted = _talk(MoshiSteps(model, drafter=copy_frame), user)
    assert torch.equal(plain[0], drafted[0]) and torch.equal(plain[1], drafted[1])
    assert len(torch.unique(plain[1].flatten(1), dim=0)) > 900
    for row in range(0, 1000, 200):
        alone = _talk(MoshiSteps(model, drafter=copy_frame), user[row : row + 1])
        assert torch.equal(alone[1][0], plain[1][row])


def test_a_state_is_a_value_and_streams_start_anew_on_their_own(model: Any) -> None:
    steps, user = MoshiSteps(model), torch.randint(64, (2, 4, 8))
    _, _, early = _talk(steps, user[:, :, :4])
    one = _talk(steps, user[:, :, 4:], early)
    _talk(steps, torch.randint(64, (2, 4, 3)), early)  # another branch, another conversation
    two = _talk(steps, user[:, :, 4:], early)
    assert torch.equal(one[1], two[1])
    fresh = steps.reset(early, torch.tensor([True, False]))
    mixed = steps.step(fresh, user[:, :, 4])[1]
    anew = steps.step(steps.start(2), user[:, :, 4])[1]
    assert torch.equal(mixed.codes[0], anew.codes[0]) and mixed.text[0] == anew.text[0]
    assert torch.equal(mixed.codes[1], steps.step(early, user[:, :, 4])[1].codes[1])


def test_memory_is_bounded_by_the_window(model: Any) -> None:
    steps = MoshiSteps(model, window=5)
    user = torch.randint(64, (1, 4, 30))
    _, _, state = _talk(steps, user)
    assert state.kv.keys[0].shape[2] == 4 and state.kv.advance.tolist() == [31]
    size = state.kv.nbytes
    _, _, state = _talk(steps, user, state)
    assert state.kv.nbytes == size


def test_a_seed_says_the_same_again(model: Any) -> None:
    user = torch.randint(64, (3, 4, 5))

    def say(seed: int, drafter: Any) -> Tensor:
        sampling = Sampling(temperature=0.8, top_k=20, seed=seed)
        text, audio = CodeChoice(sampling), CodeChoice(sampling)
        steps = MoshiSteps(model, text=text, audio=audio, drafter=drafter)
        codes: Tensor = _talk(steps, user)[1]
        return codes

    for drafter in (None, copy_frame):
        assert torch.equal(say(1, drafter), say(1, drafter))
        assert not torch.equal(say(1, drafter), say(2, drafter))


def _words(ids: list[int]) -> str:
    return "".join(f" w{i}" for i in ids)


def test_sound_in_and_sound_out_whatever_the_pieces(model: Any) -> None:
    voice = MoshiVoice(model, words=_words, text=GREEDY, audio=GREEDY)
    hop = voice.codec.hop
    pcm = torch.randn(hop * 6) * 0.1
    whole = list(voice.run([pcm]))
    assert [s.pcm.shape for s in whole] == [(6 * hop,)] and whole[0].passes == 6

    def pieces(size: int) -> Iterator[Tensor]:
        yield from pcm.split(size)

    for size in (hop, hop // 3, 2 * hop + 7):
        parts = list(voice.run(pieces(size)))
        torch.testing.assert_close(
            torch.cat([p.pcm for p in parts]), whole[0].pcm, rtol=0, atol=2e-5
        )
        assert "".join(p.text for p in parts) == whole[0].text
        codes = [p.codes for p in parts if p.codes is not None]
        assert torch.equal(torch.cat(codes, dim=1), whole[0].codes)
    user = model.audio_encoder.encode(pcm[None, None], num_quantizers=4)[0]
    texts, codes, _ = _talk(MoshiSteps(model), user)
    assert torch.equal(whole[0].codes, codes[0])
    assert whole[0].text == _words([t for t in texts[0].tolist() if t not in (0, 3)])


def test_several_conversations_of_sound_at_once(model: Any) -> None:
    voice = MoshiVoice(model, text=GREEDY, audio=GREEDY)
    pcm = torch.randn(2, voice.codec.hop * 3) * 0.1
    _, both = voice.step(voice.start(2), pcm)
    for row in range(2):
        _, alone = voice.step(voice.start(1), pcm[row : row + 1])
        assert torch.equal(both.codes[row], alone.codes[0])
    state, _ = voice.step(voice.start(2), pcm)
    state = voice.reset(state, torch.tensor([True, False]))
    _, again = voice.step(state, pcm)
    assert torch.equal(again.codes[0], both.codes[0])


def test_it_replies_and_falls_silent(model: Any) -> None:
    voice = MoshiVoice(model, words=_words, text=GREEDY, audio=GREEDY)
    assert isinstance(voice, Chatter)
    pcm = torch.randn(8000) * 0.1
    said = list(voice.reply(pcm, 16000, seconds=0.8))
    assert len(said) == 10 and all(len(s.pcm) == voice.codec.hop for s in said)
    quiet = MoshiVoice(model, text=GREEDY, audio=GREEDY, silent=range(1, 50))
    spoken = list(quiet.reply(pcm, 16000, seconds=2.0, quiet=0.16))
    assert len(spoken) <= 25


def test_what_is_no_moshi_is_refused(model: Any) -> None:
    with pytest.raises(ModelError, match="LlamaForCausalLM is no Moshi"):
        MoshiSteps(llama())
    with pytest.raises(ModelError, match="is no Moshi"):
        MoshiSteps(model.decoder)
    codec = MoshiVoice(model).codec
    codec.codebooks = 3  # type: ignore[misc]
    with pytest.raises(ModelError, match="3 x 64 codes does not fit"):
        MoshiVoice(model, codec)


def test_an_option_it_does_not_have_is_named(model: Any) -> None:
    voice = MoshiVoice(model, text=GREEDY, audio=GREEDY)
    with pytest.raises(SpecError, match=r"'verify'.*quiet, seconds"):
        voice.reply(torch.zeros(1920), 24000, verify="exact")
