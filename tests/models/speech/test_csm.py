"""CSM step by step: the codes of the stock generate, context in its voice, sound as it comes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from codebook_models import csm, llama, prompts
from torch import Tensor

from mmfast.core.errors import ModelError, SpecError
from mmfast.core.speech import Speaker
from mmfast.decoding.codebooks import BlockPlan, copy_frame
from mmfast.decoding.sampling import Sampling
from mmfast.models.speech.csm import CsmSteps, CsmVoice, SpeechContext
from mmfast.models.speech.depth_weights import csm_depth

GREEDY = Sampling()


class _Letters:
    """A tokenizer of letters."""

    bos_token_id = 1
    eos_token_id = 2

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(c) % 90 + 3 for c in text]


@pytest.fixture(scope="module")
def model() -> Any:
    return csm()


def _say(steps: CsmSteps, turns: list[list[SpeechContext]], frames: int) -> Tensor:
    state, codes = steps.start(turns), []
    for _ in range(frames):
        state, frame = steps.step(state)
        codes.append(frame)
    return torch.stack(codes, dim=1)  # [B, T, Q]


def test_the_depth_transformer_is_the_stock_one_on_the_same_weights(model: Any) -> None:
    core = csm_depth(model.depth_decoder)
    hidden, tokens = torch.randn(5, 32), torch.randint(67, (5, 7))
    front = torch.zeros(5, 1, dtype=torch.long)
    with torch.no_grad():
        want = model.depth_decoder(
            input_ids=torch.cat([front, tokens], dim=1), backbone_last_hidden_state=hidden
        ).logits
        torch.testing.assert_close(core.whole(hidden, tokens), want, rtol=1e-4, atol=1e-5)
    assert not list(core.parameters())


@pytest.mark.filterwarnings("ignore")
def test_greedy_is_the_stock_generate(model: Any) -> None:
    asked, longest, n = prompts(6, words=90), 6, 8
    ids, mask = torch.full((6, longest), 98), torch.zeros(6, longest, dtype=torch.long)
    for row, prompt in enumerate(asked):
        ids[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1
    with torch.no_grad():
        stock = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=n, do_sample=False
        )
    turns = [[SpeechContext(p)] for p in asked]
    for drafter in (None, copy_frame):
        assert torch.equal(_say(CsmSteps(model, drafter=drafter), turns, n), stock)
    assert len(torch.unique(stock.flatten(1), dim=0)) == 6


@pytest.mark.filterwarnings("ignore")
def test_context_with_sound_is_the_stock_prompt(model: Any) -> None:
    pcm = torch.randn(1, 1, 3 * 1920) * 0.1
    codes = model.codec_model.encode(pcm).audio_codes[0]
    one, two = prompts(2, seed=5, words=90)
    marks = torch.tensor([98] * codes.shape[1] + [99])
    ids = torch.cat([one, marks, two])[None]
    with torch.no_grad():
        stock = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            input_values=pcm,
            input_values_cutoffs=torch.tensor([[pcm.shape[-1]]]),
            max_new_tokens=6,
            do_sample=False,
        )
    steps = CsmSteps(model, drafter=copy_frame)
    assert torch.equal(_say(steps, [[SpeechContext(one, codes), SpeechContext(two)]], 6), stock)
    assert not torch.equal(_say(steps, [[SpeechContext(two)]], 6), stock)


def test_a_thousand_prompts_drafted_are_those_code_by_code(model: Any) -> None:
    turns = [[SpeechContext(p)] for p in prompts(1000, words=90)]
    plain = _say(CsmSteps(model), turns, 3)
    for share in (0.0, 0.1):
        steps = CsmSteps(model, drafter=copy_frame, plan=BlockPlan(7, share))
        assert torch.equal(_say(steps, turns, 3), plain)
    assert len(torch.unique(plain.flatten(1), dim=0)) > 900
    for row in range(0, 1000, 200):
        alone = _say(CsmSteps(model, drafter=copy_frame), turns[row : row + 1], 3)
        assert torch.equal(alone[0], plain[row])


def test_speech_ends_where_all_codes_are_the_end(model: Any) -> None:
    steps = CsmSteps(model)
    turns = [[SpeechContext(p)] for p in prompts(3, words=90)]
    state, codes = steps.step(steps.start(turns))
    assert not bool(state.ended.any())
    steps.end = int(codes[1, 0])
    steps.frames.frame = lambda *_: torch.full((3, 7), steps.end)  # type: ignore[method-assign]
    state, again = steps.step(steps.start(turns))
    assert torch.equal(again[:, 0], codes[:, 0])
    assert state.ended.tolist() == (codes[:, 0] == steps.end).tolist()
    assert state.ended.tolist()[1] and not state.ended.all()
    state, _ = steps.step(state)
    assert bool(state.ended[1])  # over is over


def test_a_speaker_says_sentence_by_sentence_as_frames_come(model: Any) -> None:
    voice = CsmVoice(model, _Letters(), audio=GREEDY, drafter=copy_frame)
    assert isinstance(voice, Speaker)
    said = list(voice.speak("Red. Blue circle", seconds=0.32))
    hop = voice.codec.hop
    assert [s.text for s in said] == ["Red. ", "", "", "", "Blue circle", "", "", ""]
    assert all(s.pcm.shape == (hop,) and s.passes == 1 and s.tokens == 8 for s in said)
    codes = torch.cat([s.codes for s in said if s.codes is not None], dim=1)
    want = voice.codec.decode(codes.clamp(max=63)[None])[0]
    torch.testing.assert_close(torch.cat([s.pcm for s in said]), want, rtol=0, atol=2e-5)
    first = voice.said("Red.")
    steps = CsmSteps(model)
    assert torch.equal(_say(steps, [[first]], 4)[0].T, codes[:, :4])
    behind = [SpeechContext(first.ids, codes[:, :4]), voice.said("Blue circle")]
    assert torch.equal(_say(steps, [behind], 4)[0].T, codes[:, 4:])
    pieces = list(voice.speak(iter(["Re", "d. Bl", "ue circ", "le"]), seconds=0.32))
    assert torch.equal(torch.cat([s.pcm for s in pieces]), torch.cat([s.pcm for s in said]))


def test_the_oldest_context_makes_room(model: Any) -> None:
    voice = CsmVoice(model, _Letters(), audio=GREEDY)
    voice.room = 45
    old = [voice.said("x" * 20) for _ in range(3)]
    kept = voice._fit([*old, voice.said("now")], 8)
    assert len(kept) == 2 and kept[-1] is not old[-1]
    context = [voice.said("hm", torch.randn(3 * voice.codec.hop) * 0.1, "1")]
    assert context[0].codes is not None and context[0].codes.shape == (8, 3)
    assert len(list(voice.speak("A b", context=context, seconds=0.16))) == 2


def test_what_is_no_csm_is_refused(model: Any) -> None:
    with pytest.raises(ModelError, match="LlamaForCausalLM is no CSM"):
        CsmSteps(llama())
    codec = CsmVoice(model, _Letters()).codec
    codec.codebooks = 4  # type: ignore[misc]
    with pytest.raises(ModelError, match="4 codebooks does not fit"):
        CsmVoice(model, _Letters(), codec)


def test_an_option_it_does_not_have_is_named(model: Any) -> None:
    voice = CsmVoice(model, _Letters(), audio=GREEDY)
    with pytest.raises(SpecError, match=r"'mode'.*context, seconds, voice"):
        voice.speak("hello", mode="turbo")
