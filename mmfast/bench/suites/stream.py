"""Benchmarks of streams: memory over hours, prefill, the frame cache, and reading long files."""

from __future__ import annotations

import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from mmfast.bench.cases import Case, build, feature_rows
from mmfast.bench.presets import Preset, get_preset
from mmfast.bench.registry import Tick, benchmark, chosen, over
from mmfast.bench.results import Row
from mmfast.bench.suites.camera import embedded_clips
from mmfast.bench.suites.vision import qwen_shape, siglip_shape
from mmfast.bench.timing import (
    AGAIN,
    ON_ONE_THREAD,
    PairedTimes,
    Sample,
    compare_jobs,
    counted,
    frozen,
    interleave,
    one_thread,
    resident_bytes,
    spread,
    timed,
)
from mmfast.caches.plan import plan_cache
from mmfast.core.errors import MmfastError
from mmfast.core.tokens import Tokens
from mmfast.frontends.clip import Frame
from mmfast.frontends.video.reader import iter_video, read_video
from mmfast.frontends.video.threads import cores
from mmfast.models.cache_name import CACHE
from mmfast.models.encoder_names import encode_media
from mmfast.models.loading import embedded_path, load
from mmfast.models.vision.frames.cache import FrameCache
from mmfast.ops.stream_cache import RowBuffer
from mmfast.streams.engine import Engine, score_policies
from mmfast.streams.frontend import FrameEncoder, StreamReducer
from mmfast.streams.memory import ROOM
from mmfast.streams.script import Piece

FRAMES, EARLY, PART = 20_000, 2_000, 1_000
MEMORY = "sink:64+window:512+retrieve:4"
QUESTION = "What colour is the circle?"
_ASK, _SAMPLE, _SIDE = 500, 50, 96


@benchmark("stream", "bounded")
def bounded(tick: Tick) -> list[Row]:
    """Watch 20,000 frames with the embedded model: memory and time per frame must not grow."""
    import mmfast

    pipe = mmfast.pipeline("video-stream", device="cpu", dtype="float32", reduce="dtd:0.5")
    return [bounded_row(pipe, tick=lambda done, total: tick("frames", done, total))]


def bounded_row(
    pipe: Any,
    frames: int = FRAMES,
    early: int = EARLY,
    part: int = PART,
    side: int = _SIDE,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> Row:
    """Compare highest bytes, and median times of `part` frames, after `early` with those before."""
    seen, figures = _watch(pipe, frames, side, tick)
    samples = early // _SAMPLE
    before = statistics.median(seen.spent[early - part : early])
    after = statistics.median(seen.spent[-part:])
    memory = figures["memory"]
    row = {"memory": MEMORY, "reduce": pipe.stream_model.reduce, "n": frames, "early": early}
    for name, growth, values in (
        ("held", "held_growth", seen.held),
        ("resident", "growth", seen.resident),
    ):
        first, most = max(values[:samples]), max(values)
        row |= {f"{name}_early_mb": first / 1e6, f"{name}_mb": most / 1e6, growth: most / first - 1}
    row |= {"early_ms": before, "late_ms": after, "slowdown": after / before - 1}
    row |= {"evicted": memory["evicted_blocks"], "rebases": memory["rebases"]}
    row |= {"stored": memory["archive"]["blocks"], **ON_ONE_THREAD}
    return row | {"device": str(pipe.model.device)}


class _MemoryRecord(NamedTuple):
    """Bytes held by the session, resident bytes of the process, and milliseconds per frame."""

    held: list[int]
    resident: list[int]
    spent: list[float]


def _watch(
    pipe: Any, frames: int, side: int, tick: Callable[[int, int], None]
) -> tuple[_MemoryRecord, dict[str, Any]]:
    seen = _MemoryRecord([], [], [])
    with tempfile.TemporaryDirectory() as folder, one_thread():
        options = {"host_bytes": "2MB", "disk_bytes": "2MB", "folder": Path(folder)}
        with pipe.open(MEMORY, **options) as session:
            for i, frame in enumerate(itertools.islice(noise_frames(side), frames)):
                start = time.process_time()
                session.push(frame, float(i))
                seen.spent.append((time.process_time() - start) * 1e3)
                if i % _ASK == _ASK - 1:
                    session.ask(QUESTION, max_new_tokens=4).read()
                if i % _SAMPLE == _SAMPLE - 1:
                    gc.collect()
                    seen.held.append(bytes_of(session))
                    seen.resident.append(resident_bytes())
                    tick(i + 1, frames)
            return seen, session.stats()


def noise_frames(side: int, seed: int = 0) -> Iterator[NDArray[np.uint8]]:
    """Yield frames `[side, side, 3]` without end; each replaces one quarter of the last."""
    random = np.random.default_rng(seed)
    frame = random.integers(0, 256, (side, side, 3), dtype=np.uint8)
    half = side // 2
    while True:
        y, x = (int(random.integers(2)) * half for _ in range(2))
        new = random.integers(0, 256, (half, half, 3), dtype=np.uint8)
        frame = frame.copy()
        frame[y : y + half, x : x + half] = new
        yield frame


def bytes_of(session: Any) -> int:
    """Count the bytes a session holds: keys and values, stored blocks and their index."""
    memory = session.stats()["memory"]
    archive = memory["archive"]
    stored: int = sum(archive["bytes"].values())
    return int(memory["bytes"]) + stored + int(archive["index_bytes"])


SHAPE = "qwen2.5-vl-7b"
WINDOW, ASKED, SAID, BUSY = 4_096, 30, 8, 3  # tokens; frames that come while it is answered
FRAME = 196


@benchmark("stream", "ask")
def ask(tick: Tick) -> list[Row]:
    """Count and time what a question copies of a full window of a 7B model's keys and values."""
    tick(SHAPE, 0, 1)
    return ask_rows(layers=28, window=WINDOW, rounds=9)


def ask_rows(layers: int, window: int, rounds: int) -> list[Row]:
    """Compare a question with one on a copy, frames, and both at once, at other sizes.

    New rows of frames are written, those of the question only get their places.
    """
    text = get_preset(SHAPE).text
    heads, width = text["num_key_value_heads"], 128
    rows = torch.randn(heads, FRAME, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    live = [RowBuffer(window + ROOM, bounded=True) for _ in range(layers)]

    def frame() -> None:
        for buffer in live:
            buffer.write(rows, rows, rows)
            buffer.length += FRAME
            if buffer.length > window:
                buffer.keep([(0, 64), (64 + buffer.length - window, buffer.length)])

    def answer(fork: Callable[[RowBuffer, int], RowBuffer], frames: int) -> None:
        branch = [fork(buffer, ROOM) for buffer in live]
        for i, n in enumerate((ASKED, *[1] * SAID)):
            for buffer in branch:
                buffer.claim(buffer.length, buffer.length + n)
                buffer.length += n
            if i < frames:
                frame()

    def frames_alone() -> None:
        for _ in range(BUSY):
            frame()

    jobs: dict[str, Callable[[], None]] = {
        "question and answer on a copy": partial(answer, copied, 0),
        "question and answer": partial(answer, RowBuffer.fork, 0),
        f"{BUSY} frames": frames_alone,
        f"question and answer, {BUSY} frames meanwhile": partial(answer, RowBuffer.fork, BUSY),
    }
    for _ in range(window // FRAME + 1):
        frame()
    note = f"{layers} layers of {heads} key heads, {window:,} tokens"
    shared = {"preset": SHAPE, "note": note, "dtype": "bfloat16", **ON_ONE_THREAD}
    return [{**shared, "job": name, **_copies(job, rounds)} for name, job in jobs.items()]


def copied(buffer: RowBuffer, room: int) -> RowBuffer:
    """Return another buffer with the same rows in a tensor of its own, and room for more."""
    copy = RowBuffer(buffer.length + room)
    if buffer.data is not None:
        copy.write(*buffer.read(slice(None)), at=0)
        copy.length = buffer.length
    return copy


def _copies(job: Callable[[], None], rounds: int) -> Row:
    mb, times = counted(job).copied / 1e6, list[float]()
    with one_thread():
        for _ in range(rounds):
            start = time.process_time()
            job()
            times.append((time.process_time() - start) * 1e3)
    return {"copied_mb": mb, **spread(times), "n": rounds}


HELD, OPENING = 256, 16  # tokens that a score policy holds, and of the opening text
_COUNTED = 20  # frames whose operations are counted, early and late


@benchmark("stream", "score")
def score(tick: Tick, only: Sequence[str] | None = None) -> Iterator[Row]:
    """Watch 20,000 random frames under every score policy: the bound must hold at every step."""
    known = chosen(only, score_policies(), "score policy of a stream")
    for done, name in enumerate(known):
        yield score_row(name, FRAMES, tick=partial(tick, name))
        tick(name, done + 1, len(known))


def score_row(
    policy: str,
    frames: int,
    early: int = EARLY,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> Row:
    """Append frames to a memory of the tiny shape; MmfastError where it ever holds too much.

    Operations of torch are counted over the last frames before `early` and over the last of all,
    none of which is timed.
    """
    shape = get_preset("tiny")
    case, memory_spec = build(shape, ("llm",), frames=2), f"sink:{OPENING}+{policy}:{HELD}"
    gen, spent, held, most = torch.Generator().manual_seed(0), list[float](), list[int](), 0
    _, rows, columns = case.grid
    n, engine = rows * columns, Engine(case.model)
    memory, operations = engine.memory(plan_cache(memory_spec)), {early: 0, frames: 0}
    with one_thread():
        for i in range(frames + 1):
            count, kind = (n, "frame") if i else (OPENING, "text")
            x = torch.randn(count, case.visual.shape[-1], generator=gen)
            places, advance = torch.arange(count)[None], torch.tensor([count])
            piece = Piece(x, places, advance, kind, kind == "text", float(i))
            end = next((end for end in operations if end - _COUNTED < i <= end), None)
            if end is not None:
                operations[end] += counted(partial(engine.append, memory, piece)).count
            else:
                start = time.process_time()
                engine.append(memory, piece)
                spent.append((time.process_time() - start) * 1e3)
            most = max(most, memory.tokens())
            held.append(int(memory.stats()["bytes"]))
            if i % _SAMPLE == 0:
                tick(i, frames)
    engine.close()
    if most > OPENING + HELD:
        raise MmfastError(f"{memory_spec!r} held {most} tokens; run pytest tests/streams")
    part = min(PART, early - _COUNTED)
    ends = (early - _COUNTED, len(spent))
    before, after = (statistics.median(spent[end - part : end]) for end in ends)
    figures = {"most": most, "held_growth": max(held) / max(held[:early]) - 1, "early_ms": before}
    figures |= {"late_ms": after, "slowdown": after / before - 1}
    figures |= {"positions": max(memory.next_start), "live_blocks": memory.stats()["live_blocks"]}
    first, last = (total // _COUNTED for total in operations.values())
    figures |= {"operations_early": first, "operations": last}
    shared = {"preset": "tiny", "memory": memory_spec, "n": frames, "early": early}
    return {**shared, **figures, **ON_ONE_THREAD}


PRESET, SPEC = "llava-onevision-0.5b", "stc_pruner:0.3"


@benchmark("stream", "prefill")
def prefill(tick: Tick) -> list[Row]:
    """Append 8 frames of 196 tokens to the KV cache one by one, whole and reduced."""
    tick(PRESET, 0, 1)
    return prefill_rows(layers=24, frames=8, rounds=3)


def prefill_rows(layers: int, frames: int, rounds: int) -> list[Row]:
    """Measure the prefill at other sizes; the time includes choosing the tokens."""
    shape = get_preset(PRESET)
    text = {**shape.text, "num_hidden_layers": layers, "vocab_size": 512}
    special = {"image_token_index": 510, "video_token_index": 511}
    case = build(replace(shape, text=text, special=special), ("llm",), frames=frames)
    with torch.no_grad():
        kept = _check_prefill(case)
    jobs = {"whole": lambda: append_frames(case, None), SPEC: lambda: append_frames(case, SPEC)}
    note = f"{layers} of {shape.text['num_hidden_layers']} layers, {frames} frames one by one"
    shared = {"preset": PRESET, "note": note, "dtype": "float32", "tokens": case.n}
    shared["frames"] = frames
    extra: dict[str, Row] = {
        "whole": {"method": None, "knobs": {}, "kept": case.n},
        SPEC: {"method": "stc_pruner", "knobs": {"budget": 0.3}, "kept": kept},
    }
    return _saving(compare_jobs(jobs, rounds, shared, extra=extra))


def _saving(rows: list[Row]) -> list[Row]:
    return [{**row, "saved": 1.0 - 1.0 / row["speedup"]} for row in rows]


def append_frames(case: Case, spec: str | None) -> tuple[DynamicCache, Tensor]:
    """Append every frame to an empty cache; return it and the last hidden state `[D]`."""
    decoder: Any = case.model.get_decoder()
    _, rows, columns = case.grid
    reducer = None if spec is None else StreamReducer(spec)
    state = None if reducer is None else reducer.start()
    cache, last = DynamicCache(config=case.model.config.get_text_config()), case.visual[0]
    for number, x in enumerate(case.visual.split(rows * columns)):
        keep = torch.arange(len(x))
        if reducer is not None and state is not None:
            state, found = reducer.step(state, Tokens(x, grid=(1, rows, columns)))
            keep, x = found.keep, found.apply(x)
        positions = (keep + number * rows * columns)[None]
        output = decoder(
            inputs_embeds=x[None], position_ids=positions, **{CACHE: cache}, use_cache=True
        )
        last = output.last_hidden_state[0, -1]
    return cache, last


def _check_prefill(case: Case) -> int:
    cache, last = append_frames(case, None)
    decoder: Any = case.model.get_decoder()
    at_once = decoder(inputs_embeds=case.visual[None]).last_hidden_state[0, -1]
    far = float((last - at_once).abs().max() / at_once.abs().max())
    if far > 1e-3 or cache.get_seq_length() != case.n:
        raise MmfastError(
            f"prefill frame by frame is {far:.1e} away from prefill at once, so its time means "
            "nothing; run pytest tests/streams/test_stream_reducers.py"
        )
    return int(append_frames(case, SPEC)[0].get_seq_length())


SHARE, EVERY, ROUNDS = 0.25, 32, 5
_CUT = "8 of 32 layers, one of them full attention; 784 patches"
# Preset, frames of a call (the Qwen tower takes two at once), and what is cut.
SHAPES: dict[str, tuple[Preset, int, str]] = {
    "siglip-so400m-384": (siglip_shape(26), 1, "26 layers, 729 patches"),
    "qwen2.5-vl-vit": (qwen_shape(8), 2, _CUT),
}


@benchmark("stream", "frame-cache")
def frame_cache(tick: Tick) -> list[Row]:
    """Compare the stock tower with the frame cache on real shapes, and its cost over a stream."""
    return over(SHAPES, lambda name: frame_cache_rows(name, ROUNDS), tick)


def frame_cache_rows(name: str, rounds: int) -> list[Row]:
    """Measure one shape of `SHAPES`: patches change a little, scene cuts are not looked for."""
    preset, frames, note = SHAPES[name]
    case = build(preset, ("vit",), frames=frames)
    encode = partial(encode_media, case.model, "video")
    cache = FrameCache(case.model, SHARE, cut=None, every=None)
    state = cache.start()
    # Separate streams: in step with the other job, one would encode the same frame every time.
    stream, whole = _stream(case), _stream(case)
    with torch.no_grad():
        _check_cache(encode, cache, state, stream)

    def cached() -> None:
        with cache.using(state):
            encode(next(stream))

    shared = {"preset": name, "note": note, "dtype": "float32"}
    jobs = {"stock": lambda: encode(next(whole)), "frame cache": cached}
    stock_row, row = _saving(compare_jobs(jobs, rounds, shared))
    n = state.patches / state.frames
    computed = (state.computed / n - 1) / (state.frames - 1)  # the first one is whole
    if abs(computed - SHARE) > 1 / n:
        raise MmfastError(f"the frame cache computed {computed:.3f} of the patches, not {SHARE}")
    row |= {"method": "frame_cache", "knobs": {"refresh": SHARE}, "computed": computed}
    # The saving over a stream in which one frame of `EVERY` is computed whole.
    row |= {"every": EVERY, "saved_every": row["saved"] * (EVERY - 1) / EVERY}
    row["state_mb"] = state.nbytes / 1e6
    return [stock_row | {"method": None, "knobs": {}, "computed": 1.0, "state_mb": 0.0}, row]


def _stream(case: Case) -> Iterator[dict[str, Any]]:
    """Yield arguments of the encoder with one frame each, without end."""
    still: Tensor = case.pixels["pixel_values_videos"]
    gen = torch.Generator().manual_seed(1)
    noisy = [still + 0.05 * torch.randn(still.shape, generator=gen) for _ in range(3)]
    return itertools.cycle([{**case.pixels, "pixel_values_videos": each} for each in noisy])


def _check_cache(encode: Callable[..., Any], cache: FrameCache, state: Any, stream: Any) -> None:
    """Check a whole frame bit for bit, and that exactly the share of the next is computed."""
    first, second = next(stream), next(stream)
    with cache.using(state):
        whole = feature_rows(encode(first))
    n = state.computed
    with cache.using(state):
        partly = feature_rows(encode(second))
    share = (state.computed - n) / n
    same = torch.equal(whole, feature_rows(encode(first)))
    if not same or abs(share - SHARE) > 1 / n or not bool(partly.isfinite().all()):
        raise MmfastError(
            f"the frame cache failed its checks (whole frame equal: {same}, share {share:.3f}); "
            "run pytest tests/models/vision"
        )


MODEL = "tiny-video"
# Frames a second, and knobs of the cache.
QUALITY_CASES: tuple[tuple[float, dict[str, Any]], ...] = (
    (8.0, {"refresh": 0.25}),
    (4.0, {"refresh": 0.25}),
    (8.0, {"refresh": 0.1}),
    (8.0, {"threshold": 0.02}),
    (8.0, {"refresh": 0.25, "fixed": True}),
)


@benchmark("stream", "frame-cache-quality")
def frame_cache_quality(tick: Tick) -> list[Row]:
    """Compare features of the frame cache with the stock tower's on the embedded clips."""
    paths = embedded_clips()
    model, processor = load(embedded_path(MODEL), "cpu", "float32")
    found: list[Row] = []
    for done, (fps, knobs) in enumerate(QUALITY_CASES):
        tick(f"{fps:g} frames/s", done, len(QUALITY_CASES))
        found.append(quality_row(model, processor, paths, fps, knobs))
    return found


def quality_row(
    model: Any, processor: Any, paths: Sequence[Path], fps: float, knobs: Mapping[str, Any]
) -> Row:
    """Return cosines of all tokens with the stock ones, without the first frame of a clip."""
    cache, cosines = FrameCache(model, **knobs), []
    counts = dict.fromkeys(("frames", "whole", "patches", "computed"), 0)
    for path in paths:
        clip = read_video(path, fps=fps)
        shots = [(frame, float(time)) for frame, time in zip(clip.frames, clip.times, strict=True)]
        state = cache.start()
        stock = _frame_features(FrameEncoder(model, processor), shots, None)
        cached = _frame_features(FrameEncoder(model, processor, cache=cache), shots, state)
        cosines.append(F.cosine_similarity(cached, stock, dim=-1)[1:])
        counts = {name: total + state.stats()[name] for name, total in counts.items()}
    cosine = torch.cat(cosines)  # [frames, tokens]
    row = {"model": MODEL, "method": "frame_cache", "knobs": knobs, "fps": fps, "n": len(paths)}
    row |= {"cosine": cosine.mean().item(), "cosine_worst_token": cosine.min().item()}
    row |= {"cosine_worst_frame": cosine.mean(-1).min().item(), "whole": counts["whole"]}
    row |= {"computed": counts["computed"] / counts["patches"], "frames": counts["frames"]}
    return row | {"device": "cpu", "dtype": "float32"}


def _frame_features(encoder: FrameEncoder, shots: Sequence[Any], state: Any) -> Tensor:
    return torch.stack([encoder([[shot]], state)[0].features for shot in shots])


FPS = 1.0


class ClipShape(NamedTuple):
    """Size, length and encoding of the generated clip."""

    width: int = 1280
    height: int = 720
    seconds: int = 60
    rate: int = 30
    gop: int = 250

    def __str__(self) -> str:
        size = f"{self.width}x{self.height}"
        return f"{size}, {self.seconds} s, {self.rate}/s, H.264, GOP {self.gop}"


@benchmark("stream", "reader")
def reader(tick: Tick, shape: ClipShape | None = None, rounds: int = 5) -> list[Row]:
    """Compare PyAV on one thread, PyAV with frame threads, and slices in parallel."""
    shape = shape or ClipShape()
    with tempfile.TemporaryDirectory() as folder:
        path = write_clip(Path(folder) / "clip.mp4", shape)
        jobs: dict[str, Callable[[], list[Frame]]] = {
            "PyAV, one thread": lambda: list(_one_decoder(path, "NONE")),
            "PyAV, frame threads": lambda: list(_one_decoder(path, "FRAME")),
            "slices": lambda: [frame for frame, _ in iter_video(path, fps=FPS)],
        }
        expected = jobs["PyAV, one thread"]()
        for name, job in jobs.items():
            frames = job()
            same = len(frames) == len(expected) and all(map(np.array_equal, frames, expected))
            if not same:
                raise MmfastError(f"{name!r} reads other frames: run pytest tests/frontends/video")
        ways = {name: partial(_timed, job) for name, job in jobs.items()}
        ways[AGAIN] = ways["PyAV, one thread"]
        steps, total = itertools.count(1), rounds * len(ways)
        with frozen():
            found = interleave(ways, rounds, lambda: tick("read", next(steps), total))
    return _reader_rows(found, shape, len(expected))


def _timed(job: Callable[[], object]) -> Sample:
    used, ms = time.process_time(), timed(job)[1]
    return {"ms": ms, "cpu_ms": (time.process_time() - used) * 1e3}


def _reader_rows(found: Mapping[str, list[Sample]], shape: ClipShape, frames: int) -> list[Row]:
    wall, cpu = PairedTimes.of(found), PairedTimes.of(found, "cpu_ms")
    shared = {"clock": "wall", "device": "cpu", "clip": str(shape), "fps": FPS, "frames": frames}
    return [
        {**wall.row(name), "cpu_median_ms": statistics.median(cpu.times[name])}
        | {"cpu_speedup": cpu.speedup(name), "threads": 1 if name == wall.first else cores()}
        | {**shared, "identical": True}
        for name in wall.times
    ]


def _one_decoder(path: Path, threads: str) -> Iterator[Frame]:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.thread_type = threads
        if threads == "NONE":
            stream.codec_context.thread_count = 1
        due, seconds = 0, float(stream.time_base or 0)
        for frame in container.decode(stream):
            # A constant rate that divides by the second: a frame lies at every instant.
            if frame.pts is not None and frame.pts * seconds * FPS > due - 1e-6:
                due += 1
                yield np.asarray(frame.to_ndarray(format="rgb24"), dtype=np.uint8)


def write_clip(path: Path, shape: ClipShape) -> Path:
    """Encode a camera that pans over a textured scene with moving patches and sensor noise."""
    with av.open(str(path), "w") as file:
        stream: Any = file.add_stream("libx264", rate=shape.rate, options={"preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = shape.width, shape.height, "yuv420p"
        stream.codec_context.gop_size = shape.gop
        for number, planes in enumerate(_scene(shape)):
            frame = av.VideoFrame.from_ndarray(planes, format="yuv420p")
            frame.pts, frame.time_base = number, Fraction(1, shape.rate)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return path


def _scene(shape: ClipShape) -> Iterator[Frame]:
    """Yield YUV 4:2:0 pictures, planes below each other [H * 3 / 2, W]."""
    rng = np.random.default_rng(0)
    width, height = shape.width, shape.height
    wall = _texture(rng, height * 3 // 2, width * 3 // 2)
    colour = _texture(rng, height // 2, width // 2)
    patch = _texture(rng, height // 4, width // 8)
    grain = rng.integers(-3, 4, (height + 64, width + 64), dtype=np.int8)
    for number in range(shape.seconds * shape.rate):
        top = round((np.sin(number / 70) + 1) / 2 * (len(wall) - height))
        left = round((np.cos(number / 110) + 1) / 2 * (wall.shape[1] - width))
        luma = wall[top : top + height, left : left + width].astype(np.int16)
        for each in range(4):
            y = (number * (each + 1) + each * 97) % (height - len(patch))
            x = (number * (5 - each) + each * 211) % (width - patch.shape[1])
            luma[y : y + len(patch), x : x + patch.shape[1]] = patch
        dy, dx = rng.integers(0, 64, 2)
        luma += grain[dy : dy + height, dx : dx + width]
        chroma = np.roll(colour, (number // 2, number), axis=(0, 1)).reshape(-1, width)
        yield np.concatenate([luma.clip(16, 235).astype(np.uint8), chroma, chroma[::-1]])


def _texture(rng: np.random.Generator, height: int, width: int) -> Frame:
    total = np.zeros((height, width))
    for scale in (4, 12, 36, 108):
        coarse = rng.standard_normal((height // scale + 2, width // scale + 2))
        y = np.linspace(0, len(coarse) - 1.01, height)
        x = np.linspace(0, coarse.shape[1] - 1.01, width)
        rows, columns = y.astype(int)[:, None], x.astype(int)
        dy, dx = (y - y.astype(int))[:, None], x - columns
        upper = coarse[rows, columns] * (1 - dx) + coarse[rows, columns + 1] * dx
        lower = coarse[rows + 1, columns] * (1 - dx) + coarse[rows + 1, columns + 1] * dx
        total += scale**0.5 * (upper * (1 - dy) + lower * dy)
    total = (total - total.min()) / (total.max() - total.min())
    return np.asarray(16 + 219 * total, dtype=np.uint8)
