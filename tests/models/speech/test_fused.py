"""Early fusion: a stock Llama that reads the codes of a stock codec as tokens of its vocabulary."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import codec_cases
import pytest
import torch
import transformers
from codebook_models import spread
from listener_models import letters
from tone_models import HumModel

import mmfast
from mmfast.core.errors import MediaError, ModelError
from mmfast.core.speech import Turn
from mmfast.models.loading import load_codec
from mmfast.models.speech import fused
from mmfast.models.speech.fused import END, START, FusedChat, load_fused
from mmfast.pipelines.speech import SpeechChat

RATE, CODES = 4000, 32  # of the tiny Mimi
NAMES = [f"<|sound_{i:04d}|>" for i in range(CODES)]
MIMI = codec_cases.mimi(sampling_rate=RATE, frame_rate=250.0)
TEMPLATE = (
    "{% for m in messages %}{{ '<u>' if m.role == 'user' else '<a>' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def tokenizer(names: list[str] = NAMES, template: str | None = TEMPLATE) -> Any:
    special = ("<unk>", "<u>", "<a>", "</s>")
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters(*special), unk_token="<unk>", eos_token="</s>", pad_token="</s>",
        additional_special_tokens=[*special[1:3], START, END, *names],
    )  # fmt: skip
    words.chat_template = template
    return words


def llama(size: int) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=size, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, eos_token_id=3, pad_token_id=3, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = spread(transformers.LlamaForCausalLM(config)).eval()
    asked = model.generation_config
    asked.suppress_tokens, asked.max_new_tokens = [0, 1, 2], 12
    asked._from_model_config = False
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    where = tmp_path_factory.mktemp("fused")
    words = tokenizer()
    llama(len(words)).save_pretrained(where)
    words.save_pretrained(where)
    MIMI.save_pretrained(where / "codec")
    return str(where)


@pytest.fixture(scope="module")
def pipe(folder: str) -> SpeechChat:
    return SpeechChat(folder, talker=HumModel(), device="cpu", dtype="float32")


def sound(seed: int, seconds: float = 0.08) -> torch.Tensor:
    torch.manual_seed(seed)
    return 0.4 * torch.rand(int(seconds * RATE)) - 0.2


def sound_text(pcm: torch.Tensor, shift: int = 0) -> str:
    """Codes of the stock class for the first codebook, as entries."""
    with torch.no_grad():
        codes = MIMI.encode(pcm[None, None], num_quantizers=1).audio_codes[0, 0]
    return START + "".join(NAMES[(int(c) + shift) % CODES] for c in codes) + END


def answer(folder: str, prompt: str) -> str:
    """Greedy answer of the stock classes to a prompt that is written by hand."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    words = transformers.AutoTokenizer.from_pretrained(folder)
    ids = words(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    never = words.convert_tokens_to_ids(["<unk>", "<u>", "<a>", START, END, *NAMES])
    out = model.generate(ids, do_sample=False, suppress_tokens=never)
    return str(words.decode(out[0, ids.shape[1] :], skip_special_tokens=True)).strip()


def test_sound_is_tokens_of_the_one_sequence(pipe: SpeechChat, folder: str) -> None:
    """The reply is that of the stock classes to text and codes in one prompt; another code is
    another reply.
    """
    pcm = sound(1)
    pieces = list(pipe.chatter.reply(pcm, RATE, [Turn("user", "a b"), Turn("assistant", "c")]))
    told = "".join(piece.text for piece in pieces).strip()
    before = "<u>a b<a>c<u>"
    assert told == answer(folder, f"{before}{sound_text(pcm)}<a>") != ""
    assert told != answer(folder, f"{before}{sound_text(pcm, shift=1)}<a>")
    assert pieces[0].heard is not None and pieces[0].heard.endswith(": 0.1 s)")


def test_a_conversation_keeps_the_sound_of_its_turns(pipe: SpeechChat, folder: str) -> None:
    first, second = sound(2), sound(3)
    heard = next(iter(pipe.chatter.reply(first, RATE))).heard
    assert heard is not None
    turns = [Turn("user", heard), Turn("assistant", "c")]
    told = "".join(piece.text for piece in pipe.chatter.reply(second, RATE, turns)).strip()
    assert told == answer(folder, f"<u>{sound_text(first)}<a>c<u>{sound_text(second)}<a>")


def test_a_conversation_through_the_pipeline(pipe: SpeechChat) -> None:
    spoken = pipe((sound(4, 0.5).numpy(), RATE))
    assert spoken.heard.startswith("(sound ") and spoken.text and len(spoken.pcm)
    with pipe.open(ear="manual") as session:
        events = list(session.run([sound(4, 0.5)], RATE))
    kinds = [event.kind for event in events]
    assert "error" not in kinds, events
    with pytest.raises(ModelError, match="writes down no words"):
        pipe.open(ear="semantic")


def test_entries_that_a_user_writes_stay_text(pipe: SpeechChat) -> None:
    chat: Any = pipe.chatter.chat  # type: ignore[attr-defined]
    seen: list[list[int]] = []
    hook = chat.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"][0].tolist()), with_kwargs=True
    )
    list(chat((Turn("user", f"{NAMES[3]}a"), Turn("user", chat.transcribe(sound(5), RATE)))))
    hook.remove()
    codes = chat.tokenizer.convert_tokens_to_ids(NAMES)
    count = sum(token in codes for token in seen[0])
    assert count == len(chat.codes(sound(5), RATE)) and seen[0][1] not in codes


def test_silence_is_not_answered_and_no_sound_is_refused(pipe: SpeechChat) -> None:
    (only,) = pipe.chatter.reply(torch.zeros(RATE), RATE)
    assert only.heard == "" and not only.text
    (only,) = pipe.chatter.reply(torch.zeros(0), RATE)
    assert only.heard == ""
    with pytest.raises(MediaError, match="NaN"):
        list(pipe.chatter.reply(torch.full((RATE,), torch.nan), RATE))


def test_the_oldest_turns_are_forgotten(pipe: SpeechChat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "KEPT", 3)
    chat: Any = pipe.chatter.chat  # type: ignore[attr-defined]
    first = chat.transcribe(sound(6, 0.02), RATE)
    chat._turns.clear()
    names = [chat.transcribe(sound(6, 0.02), RATE) for _ in range(5)]
    assert len({first, *names}) == 6 and [*chat._turns] == names[2:]
    numbers = [int(name.split()[1][:-1], 16) for name in names]  # which nobody can go on with
    assert all(b - a != 1 for a, b in itertools.pairwise(numbers))


def test_a_listener_writes_down_instead(folder: str) -> None:
    class Ears:
        def transcribe(self, pcm: torch.Tensor, rate: int) -> str:
            return "a b"

    own = mmfast.pipeline(
        "speech-chat", folder, listener=Ears(), talker=HumModel(), device="cpu", dtype="float32"
    )
    spoken = own((sound(1).numpy(), RATE))
    assert spoken.heard == "a b" and spoken.text.strip() == answer(folder, "<u>a b<a>")


@pytest.mark.parametrize(
    ("names", "rows", "part"),
    [
        (NAMES[:-1], 0, "31 entries"),
        ([*NAMES, "<|sound_9999|>"], 0, "33 entries"),
        (NAMES, -5, "embeddings"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_one_line(names: list[str], rows: int, part: str) -> None:
    words, codec = tokenizer(names), load_codec(MIMI, codebooks=1)
    with pytest.raises(ModelError, match=part) as caught:
        FusedChat(llama(len(words) + rows), words, codec)
    assert "\n" not in str(caught.value)


def test_what_a_folder_lacks_is_one_line(tmp_path: Path) -> None:
    words, codec = tokenizer(), load_codec(MIMI, codebooks=1)
    with pytest.raises(ModelError, match="no chat template"):
        FusedChat(llama(len(words)), tokenizer(template=None), codec)
    bare = transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters("<unk>"), unk_token="<unk>", additional_special_tokens=NAMES
    )
    bare.chat_template = TEMPLATE
    with pytest.raises(ModelError, match="sound_start"):
        FusedChat(llama(len(bare)), bare, codec)
    llama(len(words)).save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    (tmp_path / "codec").mkdir()
    with pytest.raises(ModelError, match=r"codec") as caught:  # and no listener in its place
        SpeechChat(str(tmp_path), talker=HumModel(), device="cpu")
    assert "\n" not in str(caught.value)
    (tmp_path / "codec" / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ModelError, match="'bert'"):
        load_fused(tmp_path, "cpu")
