"""Audio tokens per second of every way to decode, in turn on the same sentences."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmfast.bench.named import Tick
from mmfast.bench.results import Row
from mmfast.bench.speech_speaking import MODES, SpokenLine, unseen_lines
from mmfast.bench.timing import frozen, interleave, noise, one_thread, paired
from mmfast.decoding.loop import SingleDecoder
from mmfast.decoding.stats import Stats
from mmfast.models.speech.layout import SpeechGuide
from mmfast.tiny.speech.text import groups

ROUNDS, SEED = 24, 3


@dataclass(frozen=True)
class DecodeMode:
    """A way to decode."""

    name: str
    head: str | None
    mode: str
    verify: str


@dataclass
class Counts:
    """What a way did over all sentences."""

    tokens: int = 0
    passes: int = 0
    drafts: int = 0
    books: dict[int, list[int]] = field(default_factory=dict)
    said: dict[int, list[int]] = field(default_factory=dict)  # per line the tokens

    def add(self, line: int, stats: Stats, said: list[int]) -> None:
        """Count a sentence, once."""
        if line in self.said:
            return
        self.said[line] = said
        self.tokens += stats.tokens
        self.passes += stats.passes
        self.drafts += stats.draft_passes
        for book, (tries, stood) in stats.by_book.items():
            sums = self.books.setdefault(book, [0, 0])
            sums[0] += tries
            sums[1] += stood


def rows(progress: Tick) -> list[Row]:
    """Rows of the embedded model."""
    from mmfast.models.speech.embedded import load_speech

    return measure(load_speech(), unseen_lines(ROUNDS, SEED), ROUNDS, progress)


def ways(heads: Sequence[str]) -> list[DecodeMode]:
    """One token per pass, every mode with the first head, fastest and exact mode of others."""
    found = [DecodeMode("vanilla", None, "vanilla", "none")]
    for head in heads:
        for name, (mode, verify) in MODES.items():
            if name != "vanilla" and (head == heads[0] or name in ("turbo", "exact")):
                found.append(DecodeMode(f"{name} ({head})", head, mode, verify))
    return found


def measure(model: Any, lines: Sequence[SpokenLine], rounds: int, progress: Tick) -> list[Row]:
    """The same for another model of the kind of `SpeechModel`.

    A round says one sentence in every way; the clock is the processor time of the process, on one
    thread. Sound is not made: what is compared is the making of tokens.
    """
    chosen = ways([name for name in ("mctp", "mtp") if name in model.heads])
    counts = {way.name: Counts() for way in chosen}
    turn = dict.fromkeys((*counts, "again"), 0)
    names = {way.name: way for way in chosen} | {"again": chosen[0]}
    done = 0

    def job(name: str) -> Callable[[], dict[str, float]]:
        def run() -> dict[str, float]:
            nonlocal done
            number = turn[name] % len(lines)
            turn[name] += 1
            start = time.process_time()
            stats, said = utter(model, lines[number], names[name])
            spent = time.process_time() - start
            if name in counts:
                counts[name].add(number, stats, said)
            done += 1
            progress(name, done, rounds * len(names))
            return {"ms": 1e3 * spent / max(1, stats.tokens)}

        return run

    with one_thread(), frozen():
        for name in names:  # once before the clock starts
            utter(model, lines[0], names[name])
        samples = interleave({name: job(name) for name in names}, rounds)
    times = {name: [each["ms"] for each in found] for name, found in samples.items()}
    floor = noise(times[chosen[0].name], times["again"])
    base = [(a + b) / 2 for a, b in zip(times[chosen[0].name], times["again"], strict=True)]
    first = counts[chosen[0].name]
    return [
        _row(model, way, times[way.name], base, counts[way.name], first, floor) for way in chosen
    ]


def utter(model: Any, line: SpokenLine, way: DecodeMode) -> tuple[Stats, list[int]]:
    """Decode a sentence; its counts and its tokens."""
    layout = model.layout
    guide = SpeechGuide(layout, iter([layout.group(part) for part in groups(line.text)]))
    style = layout.style(line.voice.name, line.voice.rate, line.voice.pitch)
    head = None if way.head is None else model.heads[way.head]
    decoder = SingleDecoder(model.backbone, head, guide, schedule=way.mode, verify=way.verify)
    decoder.feed([layout.id("<speak>"), *style, *guide.opening()])
    said = [token for step in decoder for token in step.tokens]
    return decoder.stats, said


def _row(
    model: Any,
    way: DecodeMode,
    times: Sequence[float],
    base: Sequence[float],
    counts: Counts,
    vanilla: Counts,
    floor: float,
) -> Row:
    per_pass = counts.tokens / max(1, counts.passes)
    drafts = counts.drafts / max(1, counts.passes)
    share = 0.0 if way.head is None else module_share(model, way.head)
    ideal = per_pass / (1 + share * drafts) / (vanilla.tokens / max(1, vanilla.passes))
    speedup = 1.0 if way.head is None else paired(base, times)
    same = [vanilla.said.get(i) == said for i, said in counts.said.items()]
    return {
        "job": way.name,
        "head": way.head,
        "schedule": way.mode,
        "verify": way.verify,
        "score": speedup,
        "tokens_per_second": 1e3 / statistics.median(times),
        "ms_per_token": statistics.median(times),
        "speedup": speedup,
        "ideal": ideal,
        "of_ideal": speedup / ideal,
        "tokens_per_pass": per_pass,
        "drafts_per_pass": drafts,
        "module_share": share,
        "acceptance": {str(b): stood / max(1, n) for b, (n, stood) in sorted(counts.books.items())},
        "identical": sum(same) / max(1, len(same)),
        "noise": floor,
        "n": len(times),
        "tokens": counts.tokens,
        "seed": SEED,
        "clock": "processor time of the process",
        "threads": 1,
        "dtype": str(model.backbone.dtype).removeprefix("torch."),
        "device": "cpu",
    }


def module_share(model: Any, head: str) -> float:
    """Weights that a draft module reads, relative to those of a pass of the backbone."""
    return draft_weights(model.heads[head], model.layout.total - model.layout.texts) / (
        trunk_weights(model.backbone, model.layout.total - model.layout.texts)
    )


def trunk_weights(backbone: Any, entries: int) -> int:
    """Numbers that a pass reads: layers, norm, and `entries` rows of the output head."""
    parts = (*backbone.decoder.layers, backbone.final_norm)
    own = sum(int(p.numel()) for part in parts for p in part.parameters())
    return own + entries * int(backbone.width)


def draft_weights(head: Any, entries: int) -> float:
    """Numbers that one of its modules reads, on average."""
    alone = head.window == 1 and head.trunk.lean  # one sees itself: no queries, no keys
    unread = ("q_proj", "k_proj") if alone else ()
    own = sum(
        p.numel()
        for name, p in head.named_parameters(remove_duplicate=False)
        if not name.startswith("outputs") and not any(part in name for part in unread)
    )
    return float(own / head.modules_count + entries * head.trunk.width)
