"""Benchmarks of speech: that they measure what they say, on things whose cost is known."""

import json
import time

import pytest
import torch
from speech_fakes import RATE, Parrot, PlainCodec, random_speech_model

from mmfast.bench import registry
from mmfast.bench.report.docs import write_table
from mmfast.bench.suites.speech import drafts as speech_drafts
from mmfast.bench.suites.speech import speed as speech_speed
from mmfast.bench.suites.speech.quality import codec_rows, mel_distance, quality, unseen_lines
from mmfast.bench.suites.speech.speed import sound_figures, sound_rows
from mmfast.core.errors import MmfastError
from mmfast.core.speech import Sound
from mmfast.tiny.speech.recordings import say


def nothing(label, done, total):
    """Shows no progress."""
    assert done <= total


@pytest.fixture(scope="module")
def model():
    return random_speech_model()


def test_names_and_what_is_none():
    assert {"codec", "modes", "shape", "first-sound"} <= set(registry.names("speech"))
    with pytest.raises(MmfastError, match="codec") as caught:
        registry.named_rows("speech", "codex")
    assert "\n" not in str(caught.value)


def test_sound_figures_know_better_from_worse():
    pytest.importorskip("pesq", reason="pesq has no wheel and needs a C compiler: [speech-eval]")
    recorded = [say(line.text, line.voice).pcm for line in unseen_lines(2, 0)]
    rng = torch.Generator().manual_seed(0)
    noisy = [pcm + 0.05 * torch.randn(pcm.shape, generator=rng) for pcm in recorded]
    same, worse = quality(recorded, recorded), quality(recorded, noisy)
    assert same["pesq"] > 4.5
    assert same["stoi"] == pytest.approx(1, abs=1e-3)
    assert same["mel_db"] == 0
    assert worse["pesq"] < 3
    assert worse["stoi"] < 0.99
    assert worse["mel_db"] > 1


def test_log_mel_distance_is_in_decibels():
    pcm = say("the red circle").pcm
    loud = pcm + 0.02 * torch.randn(len(pcm), generator=torch.Generator().manual_seed(0))
    assert mel_distance(loud, loud * 10 ** (-6 / 20)) == pytest.approx(6, rel=0.01)


def test_codec_rows():
    pytest.importorskip("pesq", reason="pesq has no wheel and needs a C compiler: [speech-eval]")
    lines = unseen_lines(2, 0)
    texts = iter([lines[0].text, lines[1].text, lines[0].text, "zero"])
    rows = codec_rows(PlainCodec(), lines, lambda pcm: next(texts), nothing)
    assert [row["job"] for row in rows] == ["recordings", "codec"]
    assert rows[0]["wer"] == 0
    assert rows[1]["errors"] > 0
    assert rows[1]["bits_per_second"] == 200
    assert 0 < rows[1]["decode_rtf"] < 1
    assert rows[1]["pesq"] > 2


def test_first_sound_counts_time_passes_and_gaps():
    def pieces():
        yield Sound(torch.zeros(0), RATE, heard="x", passes=1)
        time.sleep(0.05)
        yield Sound(torch.ones(800), RATE, passes=2)  # 50 ms of sound
        time.sleep(0.15)
        yield Sound(torch.ones(1600), RATE, passes=5)

    row = sound_figures(pieces())
    assert 45 < row["first_ms"] < 150
    assert row["first_cpu_ms"] < row["first_ms"]
    assert row["passes"] == 3
    assert row["chunk_ms"] == 50
    assert 80 < row["gap_ms"] < 200
    assert row["seconds"] == pytest.approx(0.15)
    assert row["rtf"] == pytest.approx(0.2 / 0.15, rel=0.5)


def test_first_sound_rows():
    lines = unseen_lines(2, 0)
    rows = sound_rows(Parrot(), lines, [say("hello").pcm], nothing)
    jobs = [(job, mode) for mode in ("turbo", "exact", "vanilla") for job in ("say", "reply")]
    assert [(row["job"], row["mode"]) for row in rows] == jobs
    assert all(row["passes_before"] == 1 and row["seconds"] > 0 for row in rows)
    assert [row["n"] for row in rows] == [2, 1] * 3


@pytest.mark.slow
def test_modes_are_compared_on_the_same_sentences(model):
    lines = unseen_lines(1, 0)
    rows = {row["job"]: row for row in speech_speed.mode_rows(model, lines, 2, nothing)}
    assert next(iter(rows)) == "vanilla"
    ways = {f"{name} (mctp)" for name in ("turbo", "fast", "raw", "raw boost")}
    assert ways | {"exact (mctp)", "exact (mtp)"} <= set(rows)
    assert rows["vanilla"]["tokens_per_pass"] == pytest.approx(1, abs=0.01)
    assert rows["vanilla"]["speedup"] == rows["vanilla"]["ideal"] == 1
    assert rows["raw (mctp)"]["tokens_per_pass"] > 3
    for name in ("exact (mctp)", "exact (mtp)"):
        assert rows[name]["identical"] == 1
        assert set(rows[name]["acceptance"]) <= {"0", "1"}
    assert rows["raw (mctp)"]["identical"] < 1
    assert rows["turbo (mctp)"]["verify"].startswith("typical:")
    for row in rows.values():
        assert row["tokens_per_second"] == pytest.approx(1e3 / row["ms_per_token"])
        assert row["of_ideal"] == pytest.approx(row["speedup"] / row["ideal"])
    json.dumps(list(rows.values()), allow_nan=False)


def test_weights_that_are_read_are_counted(model):
    """By hand: 3 layers of width 32; a module is a layer, two norms and a projection."""
    layer = 4 * 32 * 32 + 3 * 32 * 48 + 2 * 32
    audio = model.layout.total - model.layout.texts
    trunk = 3 * layer + 32 + audio * 32
    module = layer + 2 * 32 + 2 * 32 * 32 + audio * 32
    assert speech_speed.trunk_weights(model.backbone, audio) == trunk
    assert speech_speed.draft_weights(model.heads["mctp"], audio) == module
    assert speech_speed.module_share(model, "mctp") == pytest.approx(module / trunk)


def test_the_shape_of_7_billion_has_them():
    shape = speech_drafts.LanguageShape()
    layer = shape.hidden * (2 * shape.hidden + 2 * 512 + 3 * shape.inner)
    assert 6.4e9 < shape.layers * layer < 6.7e9
    small = speech_drafts.LanguageShape("small", 32, 6, 48, 4, 2, 400, 200, 4, 2)
    backbone, head = speech_drafts.build_language_model(small, torch.float32)
    assert len(backbone.blocks) == 6
    assert len({id(layer) for layer in backbone.decoder.layers}) == 2
    own = 32 * (2 * 32 + 2 * 16 + 3 * 48) + 32 + 2 * 16 + 2 * 32  # biases, norms
    assert speech_speed.trunk_weights(backbone, 200) == 6 * own + 32 + 200 * 32
    assert speech_speed.draft_weights(head, 200) == own + 2 * 32 + 2 * 32 * 32 + 200 * 32


def test_shape_rows():
    small = speech_drafts.LanguageShape("small", 32, 6, 48, 4, 2, 400, 200, 10, 2)
    rows = {row["job"]: row for row in speech_drafts.shape_rows(small, 2, nothing, torch.float32)}
    assert list(rows) == ["vanilla", "boost", "1,10"]
    share = rows["1,10"]["module_share"]
    assert rows["1,10"]["ideal"] == pytest.approx(11 / (1 + 10 * share))
    assert rows["boost"]["ideal"] == pytest.approx(14 / (4 + 10 * share))
    assert rows["vanilla"]["module_ms"] == 0
    wide = rows["1,10"]["wide_ms"] / rows["1,10"]["pass_ms"]
    assert rows["1,10"]["ideal_here"] == pytest.approx(11 / (wide + 10 * share))
    assert rows["boost"]["ideal_here"] == pytest.approx(14 / (3 + wide + 10 * share))
    assert rows["vanilla"]["of_ideal_here"] == 1
    assert rows["1,10"]["module_cost"] > 0
    assert all(row["ms_per_token"] > 0 and row["main_ms"] > 0 for row in rows.values())


def test_rows_make_tables(model):
    pytest.importorskip("pesq", reason="pesq has no wheel and needs a C compiler: [speech-eval]")
    lines = unseen_lines(1, 0)
    shared = {"bench": "", "processor": "cpu", "date": "today", "commit": None}
    small = speech_drafts.LanguageShape("small", 32, 2, 48, 4, 2, 400, 200, 10, 2)
    found = {
        "codec": codec_rows(PlainCodec(), lines, lambda pcm: "zero", nothing),
        "modes": speech_speed.mode_rows(model, lines, 1, nothing),
        "shape": speech_drafts.shape_rows(small, 1, nothing, torch.float32),
        "first-sound": sound_rows(Parrot(), lines, [], nothing),
    }
    rows = [{**shared, **row, "bench": name} for name, part in found.items() for row in part]
    text = write_table("speech_cost", rows)
    for name, part in found.items():
        start = next(i for i, line in enumerate(text) if f"--speech {name}`" in line)
        table = text[start + 2 : start + 4 + len(part)]
        assert {line.count("|") for line in table} == {table[0].count("|")}
        assert len(table) == len(part) + 2
    assert "not measured" in "\n".join(write_table("speech_cost", []))
