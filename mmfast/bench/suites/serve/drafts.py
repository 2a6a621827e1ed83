"""Benchmark of the server: descriptions of clips with each kind of drafts, beside none."""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F

from mmfast.bench.registry import Tick, benchmark
from mmfast.bench.results import Row
from mmfast.bench.suites.drafts import MODEL, described
from mmfast.bench.suites.serve.chats import ChatRecord, TimeSpent, answered, reset, spent
from mmfast.bench.timing import frozen, noise, paired
from mmfast.models.loading import load
from mmfast.models.prompt import chat_inputs
from mmfast.models.wrappers import decoder_of
from mmfast.serve.engine.base import Finish, Media, Message, Options, Request, SamplingOptions
from mmfast.serve.engine.scheduler import Scheduler
from mmfast.tiny.scenes.evaluate import SceneCase

TOKENS, AT_ONCE = 64, 4
LAYERS = 2  # of the 5 of the model, in the draft model
_PLAIN, _AGAIN = "none", "none again"
_FIXED = "?adapt=false&most=3"
_OWN = ("draft:", f"draft:{_FIXED}", f"draft:{_FIXED}&media=false")
WAYS = (
    _PLAIN,
    _AGAIN,
    "self:0.1",
    f"self:0.1{_FIXED}",
    "recycle",
    "recycle?tree=24",
    "lookup",
    *_OWN,
)
_NUMBERS = itertools.count()


def taught(pair: tuple[Any, Any], tick: Tick, groups: int = 8, passes: int = 4) -> Any:
    """Return the first layers of a model, taught to say what it says of clips.

    So many `groups` of eight clips, each of which is read in so many `passes`.
    """
    model, processor = pair
    config = copy.deepcopy(model.config)
    config.text_config.num_hidden_layers = LAYERS
    config.text_config.layer_types = config.text_config.layer_types[:LAYERS]
    small = type(model)(config).eval()
    small.load_state_dict(model.state_dict(), strict=False)
    rates = torch.optim.AdamW(decoder_of(small).parameters(), lr=1e-3)
    cases, known = described(1), list[tuple[dict[str, Any], int, torch.Tensor]]()
    for number in range(groups):
        tick("clips for the draft model", number, groups)
        chats = [case.chat(case.shot()) for case in islice(cases, 8)]
        inputs = chat_inputs(processor, chats, model.device)
        with torch.no_grad():
            out = model.generate(**inputs, do_sample=False, max_new_tokens=TOKENS)
            length = inputs["input_ids"].shape[1]
            mask = F.pad(inputs["attention_mask"], (0, out.shape[1] - length), value=1)
            whole = {**inputs, "input_ids": out, "attention_mask": mask}
            says = model(**whole).logits[:, length - 1 : -1].log_softmax(-1)
        known.append((whole, length, says))
    for number, (whole, length, says) in enumerate(known * passes):
        tick("draft model", number, groups * passes)
        mine = small(**whole).logits[:, length - 1 : -1].log_softmax(-1)
        loss = F.kl_div(mine, says, log_target=True, reduction="batchmean") / says.shape[1]
        rates.zero_grad()
        loss.backward()
        rates.step()
    return small


@dataclass
class DraftedWay:
    """Rounds of one way to answer: seconds, tokens, drafts, and whether the text was the plain."""

    times: list[TimeSpent] = field(default_factory=list)
    tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    same: bool = True


def _request(case: SceneCase, decode: str) -> Request:
    number, shot = next(_NUMBERS), case.shot()
    message = Message("user", (Media(shot, f"scene-{number}"), *case.turns))
    sampling = SamplingOptions(max_tokens=TOKENS)
    return Request(f"scene-{number}", (message,), sampling, Options(decode=decode))


def _round(
    scheduler: Scheduler, requests: Sequence[Request], together: bool, way: DraftedWay | None
) -> list[str]:
    """Answer requests at once or in turn; returns their texts."""
    records = list[ChatRecord]()
    reset(scheduler)
    taken = spent(lambda: records.extend(answered(scheduler, requests, together)))
    if way is not None:
        way.times.append(taken)
        for record in records:
            assert isinstance(record.last, Finish)
            rows = [row for row in record.last.trace["rows"] if row["stage"] == "draft"]
            way.tokens += record.last.completion_tokens
            way.proposed += sum(row["tokens_in"] for row in rows)
            way.accepted += sum(row["tokens_out"] for row in rows)
    return [record.text for record in records]


@benchmark("serve", "drafts")
def draft_rows(tick: Tick, rounds: int = 5, groups: int = 8, passes: int = 4) -> list[Row]:
    """Describe four clips, at once and one by one, with each kind of drafts and without."""
    pair = load(MODEL, "cpu", "float32")
    rows, cases = list[Row](), described(2)
    with tempfile.TemporaryDirectory() as folder:
        taught(pair, tick, groups, passes).save_pretrained(Path(folder))
        specs = {way: f"draft:{folder}{way.removeprefix('draft:')}" for way in _OWN}
        made = Scheduler(pair, name=MODEL, decode=specs["draft:"], slots=AT_ONCE)
        with closing(made) as scheduler, frozen():
            for together in (False, True):
                ways = {name: DraftedWay() for name in WAYS}
                for number in range(rounds + 1):  # the first round warms up
                    asked = list(islice(cases, AT_ONCE))
                    texts = dict[str, list[str]]()
                    for name in WAYS if number % 2 else WAYS[::-1]:
                        spec = _PLAIN if name == _AGAIN else specs.get(name, name)
                        requests = [_request(case, spec) for case in asked]
                        counts = ways[name] if number else None
                        texts[name] = _round(scheduler, requests, together, counts)
                    for name, way in ways.items():
                        way.same &= texts[name] == texts[_PLAIN]
                    tick(f"{AT_ONCE if together else 1} at once", number, rounds)
                rows += _rows(ways, AT_ONCE if together else 1, rounds)
    return rows


def _rows(ways: dict[str, DraftedWay], sessions: int, rounds: int) -> list[Row]:
    shared: Row = {"model": MODEL, "sessions": sessions, "n": rounds, "clips": AT_ONCE * rounds}
    shared |= {"device": "cpu", "threads": torch.get_num_threads(), "draft_layers": LAYERS}
    cpu = {name: [each.cpu for each in way.times] for name, way in ways.items()}
    shared["noise"] = noise(cpu[_AGAIN], cpu[_PLAIN])
    rows = list[Row]()
    for name, way in ways.items():
        if name == _AGAIN:
            continue
        each: Row = {"job": name, **shared, "tokens": way.tokens, "same_tokens": way.same}
        each["cpu_ms_per_token"] = 1e3 * median(cpu[name]) * rounds / way.tokens
        each["ms_per_token"] = 1e3 * median(t.wall for t in way.times) * rounds / way.tokens
        each |= {"to_plain": paired(cpu[name], cpu[_PLAIN])}
        each |= {"proposed": way.proposed, "accepted": way.accepted}
        each["accepted_share"] = way.accepted / way.proposed if way.proposed else 0.0
        rows.append(each | {"drafted": way.accepted / way.tokens})
    return rows
