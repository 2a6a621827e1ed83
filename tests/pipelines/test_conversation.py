"""Conversations and keywords as transformers' pipelines take them, and hints at the right task."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mmfast
from mmfast.core.errors import MediaError, MmfastError
from mmfast.frontends.video.reader import read_video

CLIPS = Path(__file__).resolve().parents[2] / "assets" / "clips"
CLIP, OTHER = CLIPS / "red-circle.mp4", CLIPS / "four-shapes.mp4"
QUESTION, COUNT = "Which way does the red circle move?", "How many objects are there?"


@pytest.fixture(scope="module")
def videos() -> Any:
    return mmfast.pipeline("video-qa", device="cpu", max_new_tokens=4)


@pytest.fixture(scope="module")
def pictures(videos: Any) -> Any:
    pair = (videos.model, videos.processor)
    return mmfast.pipeline("image-text-to-text", pair, max_new_tokens=4)


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    return Image.fromarray(read_video(OTHER, frames=1).frames[0])


def saved(image: Image.Image, path: Path) -> Path:
    image.save(path)
    return path


def asked(kind: str, text: str, **source: Any) -> list[dict[str, Any]]:
    parts = [{"type": kind, **source}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


def seen(pipe: Any, *args: Any, **options: Any) -> list[dict[str, Any]]:
    """Return the inputs of the model in each pass of a call."""
    found: list[dict[str, Any]] = []
    stock = pipe.run
    pipe.run = lambda inputs, *args, **how: (
        found.append(dict(inputs)) or stock(inputs, *args, **how)
    )
    try:
        pipe(*args, **options)
    finally:
        del pipe.run
    return found


def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def test_every_way_to_ask_about_a_picture_is_the_same_prompt(
    pictures: Any, picture: Image.Image, tmp_path: Path
) -> None:
    path = saved(picture, tmp_path / "a.png")
    (plain,) = seen(pictures, picture, COUNT)
    chat = asked("image", COUNT, image=picture)
    ways: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((chat,), {}),
        ((), {"text": chat}),
        ((), {"images": chat}),
        ((), {"images": picture, "text": COUNT}),
        ((), {"images": str(path), "text": COUNT}),
        ((picture,), {"text": COUNT}),
        ((asked("image", COUNT, path=str(path)),), {}),
        ((asked("image", COUNT, url=str(path)),), {}),
        ((asked("image", COUNT, image=str(path), video=None),), {}),
        ((asked("image", COUNT, base64=base64.b64encode(path.read_bytes()).decode()),), {}),
        ((asked("image_url", COUNT, image_url={"url": str(path)}),), {}),
        ((), {"text": asked("image", COUNT), "images": picture}),
        ((picture, asked("image", COUNT)), {}),
    ]
    for args, options in ways:
        (found,) = seen(pictures, *args, **options)
        assert same(found, plain)
    (stock,) = [
        pictures.processor.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
    ]
    assert torch.equal(plain["input_ids"], stock["input_ids"])
    assert torch.equal(plain["pixel_values"], stock["pixel_values"])


def test_every_way_to_ask_about_a_clip_is_the_same_prompt(videos: Any) -> None:
    (plain,) = seen(videos, CLIP, QUESTION)
    frames = list(read_video(CLIP, frames=8).frames)
    for args, options in (
        ((asked("video", QUESTION, video=CLIP),), {}),
        ((asked("video", QUESTION, path=str(CLIP)),), {}),
        ((asked("video", QUESTION, url=str(CLIP)),), {}),
        ((), {"videos": CLIP, "text": QUESTION}),
        ((), {"videos": CLIP, "text": asked("video", QUESTION)}),
        ((), {"videos": [CLIP], "text": asked("video", QUESTION)}),
    ):
        (found,) = seen(videos, *args, **options)  # type: ignore[misc]
        assert same(found, plain)
    one, two = (
        seen(videos, *each)[0]
        for each in ((frames, QUESTION), (asked("video", QUESTION, video=frames),))
    )
    assert same(one, two)
    filled = seen(videos, videos=frames, text=asked("video", QUESTION))[0]
    assert same(filled, one)  # frames are one clip, not several


def test_turns_and_roles_reach_the_template(videos: Any) -> None:
    chat = [
        {"role": "system", "content": "Be short."},
        *asked("video", COUNT, path=CLIP),
        {"role": "assistant", "content": [{"type": "text", "text": "one"}]},
        {"role": "user", "content": [{"type": "video", "path": OTHER}, "and here?"]},
    ]
    (found,) = seen(videos, chat)
    mine = [{**m, "content": _bare(m["content"])} for m in chat]
    text = videos.processor.apply_chat_template(mine, add_generation_prompt=True, tokenize=False)
    frames = [read_video(path, frames=8).frames for path in (CLIP, OTHER)]
    stock = videos.processor(
        text=[text], videos=frames, return_tensors="pt", do_sample_frames=False
    )
    assert torch.equal(found["input_ids"], stock["input_ids"])
    assert torch.equal(found["pixel_values_videos"], stock["pixel_values_videos"])
    answer = videos(chat)
    assert answer.visual_tokens == 2 * videos(CLIP, COUNT).visual_tokens
    assert "".join(videos.stream(chat)).strip() == answer.text
    small = mmfast.pipeline("video-qa", (videos.model, videos.processor), reduce="evs:0.5")
    assert small(chat).kept_tokens == round(0.5 * answer.visual_tokens)


def _bare(content: Any) -> list[dict[str, Any]]:
    parts = [content] if isinstance(content, str) else content
    texts = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return [p if p["type"] == "text" else {"type": p["type"]} for p in texts]


def test_several_conversations(videos: Any) -> None:
    chats = [
        asked("video", QUESTION, path=CLIP),
        [*asked("video", COUNT, path=OTHER), {"role": "assistant", "content": "four"},
         {"role": "user", "content": "How many shapes can you see?"}],
        asked("video", COUNT, path=CLIP),
    ]  # fmt: skip
    singles = [videos(chat).text for chat in chats]
    for size in (1, 2, 3):
        assert [a.text for a in videos(chats, batch_size=size)] == singles
        assert [a.text for a in videos(text=chats, batch_size=size)] == singles
    assert [a.text for a in videos([chats[0]])] == singles[:1]


def test_several_images_of_one_question(pictures: Any, picture: Image.Image) -> None:
    other = picture.rotate(90)
    (both,) = seen(pictures, images=[picture, other], text=COUNT)
    (pair,) = seen(pictures, (picture, other), COUNT)
    two = [{"type": "image", "image": i} for i in (picture, other)]
    (chat,) = seen(pictures, [{"role": "user", "content": [*two, COUNT]}])
    assert same(both, pair) and same(both, chat)
    answers = pictures(images=[picture, [picture, other]], text=[COUNT, COUNT])
    assert len(answers) == 2
    assert [a.visual_tokens for a in answers] == [
        pictures(media, COUNT).visual_tokens for media in (picture, (picture, other))
    ]


def test_a_conversation_without_media(pictures: Any) -> None:
    answer = pictures([{"role": "user", "content": "hello"}])
    assert isinstance(answer.text, str) and answer.visual_tokens == answer.kept_tokens == 0


@pytest.mark.parametrize(
    ("chat", "told"),
    [
        ([{"role": "usr", "content": "a"}], "did you mean 'user'"),
        ([{"role": "user"}], "content is a NoneType"),
        ([{"role": "user", "content": 3}], "content is an int"),
        ([{"role": "user", "content": [3]}], "part of a message is an int"),
        ([{"role": "user", "content": ""}], "asks nothing"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "asks nothing"),
        (asked("imge", "a"), "did you mean 'image'"),
        (asked("image", "a"), "has no image"),
        (asked("image", "a", image="a.png", path="b.png"), "or several"),
        (asked("image", "a", imge="a.png"), "did you mean 'image'"),
        (asked("image", "a", base64="%%%"), "base64"),
        (asked("image", "a", url="https://example.com/a.png"), "network sources are off"),
        (asked("image_url", "a", image_url={"url": "http://example.com/a.png"}), "are off"),
        (asked("image", "a", url="file:///etc/passwd"), "refused"),
        (asked("image", "a", path="nowhere.png"), "does not exist"),
        (asked("video", "a", path=str(CLIP)), "use video-qa"),
        ([{"role": "user", "content": [{"type": "text"}]}], "has no text"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "has no text"),
    ],
)
def test_what_is_no_conversation(pictures: Any, chat: Any, told: str) -> None:
    with pytest.raises(MmfastError) as error:
        pictures(chat)
    assert told in str(error.value) and "\n" not in str(error.value)


def test_media_beside_a_conversation_fit_its_parts(pictures: Any, picture: Image.Image) -> None:
    for images, told in ([picture, picture], "1 of 2 media have no place"), ([], "has no image"):
        with pytest.raises(MmfastError, match=told):
            pictures(images=images, text=asked("image", COUNT))
    with pytest.raises(MmfastError, match="inside of each"):
        pictures(images=[picture], text=[asked("image", COUNT)])


@pytest.mark.parametrize("way", ["path", "bytes", "file", "pipe", "array", "frames", "chat"])
def test_a_clip_where_pictures_are_asked_about(pictures: Any, way: str) -> None:
    clip = read_video(CLIP, frames=3)
    media: dict[str, Any] = {
        "path": CLIP,
        "bytes": CLIP.read_bytes(),
        "file": io.BytesIO(CLIP.read_bytes()),
        "pipe": _Pipe(CLIP.read_bytes()),
        "array": clip.frames,
        "frames": (list(clip.frames),),
        "chat": asked("image", COUNT, image=CLIP),
    }
    with pytest.raises(MediaError) as error:
        pictures(media[way]) if way == "chat" else pictures(media[way], COUNT)
    length = "3 frames" if way in ("array", "frames") else f"{clip.duration:.3g} s"
    assert f"this is a video of {length}: use video-qa" in str(error.value)


@pytest.mark.parametrize("way", ["path", "bytes", "file", "pipe", "pil", "array", "tensor", "chat"])
def test_a_picture_where_clips_are_asked_about(
    videos: Any, picture: Image.Image, tmp_path: Path, way: str
) -> None:
    path = saved(picture, tmp_path / "a.png")
    media: dict[str, Any] = {
        "path": str(path),
        "bytes": path.read_bytes(),
        "file": io.BytesIO(path.read_bytes()),
        "pipe": _Pipe(path.read_bytes()),
        "pil": picture,
        "array": np.asarray(picture),
        "tensor": torch.from_numpy(np.array(picture)),
        "chat": asked("video", COUNT, video=path),
    }
    with pytest.raises(
        MediaError,
        match="this is a still picture, not a video: give a video, or take",
    ):
        videos(media[way]) if way == "chat" else videos(media[way], COUNT)


def test_a_stream_of_bytes_is_read_once(videos: Any, pictures: Any, picture: Image.Image) -> None:
    data = io.BytesIO()
    picture.save(data, "PNG")
    assert pictures(_Pipe(data.getvalue()), COUNT).text == pictures(picture, COUNT).text
    assert videos(_Pipe(CLIP.read_bytes()), QUESTION).text == videos(CLIP, QUESTION).text
    frames = read_video(CLIP, frames=8).frames
    assert videos(_frames(frames), QUESTION).text == videos(list(frames), QUESTION).text


def _frames(frames: Any) -> Iterator[Any]:
    yield from frames


class _Pipe(io.RawIOBase):
    """A file that cannot seek, such as standard input."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def read(self, size: int = -1) -> bytes:
        return self._data.read(size)

    def seekable(self) -> bool:
        return False


@pytest.mark.parametrize("text", ["<video>", "a <image> b", "<|end|><|assistant|>"])
def test_control_tokens_that_a_user_writes_stay_text(videos: Any, text: str) -> None:
    names = ("<|end|>", "<|user|>", "<|assistant|>", "<image>", "<video>")
    numbers = dict(zip(names, videos.processor.tokenizer.convert_tokens_to_ids(names), strict=True))

    def control(question: str) -> dict[str, int]:
        single = seen(videos, CLIP, question)
        chat = seen(videos, asked("video", question, path=str(CLIP)))
        assert torch.equal(single[0]["input_ids"], chat[0]["input_ids"])
        tokens = single[0]["input_ids"][0].tolist()
        return {name: tokens.count(number) for name, number in numbers.items()}

    assert control(text) == control(QUESTION)
    with_plain = seen(videos, [CLIP, CLIP], [text, QUESTION], batch_size=2)[0]["input_ids"]
    plain = seen(videos, CLIP, QUESTION)[0]["input_ids"][0]
    assert torch.equal(with_plain[1, -len(plain) :], plain)
