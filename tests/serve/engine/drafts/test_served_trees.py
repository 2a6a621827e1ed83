"""Trees that models draft in the batch: the plain text, likely tokens of each path, no rests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_requests import eventually
from scheduling import (
    answers,
    ask,
    clip,
    comings_and_goings,
    image,
    model_of,
    promised_bytes,
    stock,
)
from second_drafts import ONEVISION, counts, empty, engine, folder, reads, spec_of
from transformers import Qwen2ForCausalLM

from mmfast.models.decoder.token_tree import BatchTree
from mmfast.serve.engine.base import Request, SamplingOptions
from mmfast.serve.engine.decode import Chooser
from mmfast.serve.engine.drafts import BatchDrafts, DraftRows
from mmfast.serve.engine.kv.rows import AnswerRows

WAYS = ["tree=2x2x1&most=7", "tree=dynamic&most=6", "most=3"]
OWN = "self:0.2?adapt=false&least=0&tree=3x2&most=8"


def specs(name: str, family: str = ONEVISION) -> list[str]:
    """A tree by levels, one by likelihood and a chain, of the same draft model."""
    return [f"draft:{folder(family)}/{name}?adapt=false&least=0&{way}" for way in WAYS]


def asked(decode: list[str | None], tokens: int = 30, prefix: str = "") -> list[Request]:
    """Media and text of all lengths, with these specs in turn."""
    parts: list[Any] = [(image(1), "what?"), ("a b a c a b d a " * 4,), (clip(1), "and?")]
    parts += [("why?",), (image(2), "a b a c a b d a?"), ("a b a c a b d a e " * 3,)]
    return [
        ask(f"{prefix}{i}", *mine, tokens=tokens - 3 * i, decode=decode[i % len(decode)])
        for i, mine in enumerate(parts)
    ]


def moves(patch: pytest.MonkeyPatch) -> list[bool]:
    """Whether what stood of a tree was not its first tokens, at each step of an answer."""
    settle, found = AnswerRows.settle, list[bool]()

    def noted(self: AnswerRows, number: int, kept: int, path: Any = None) -> None:
        if path is not None:
            found.append(list(path) != list(range(len(path))))
        settle(self, number, kept, path)

    patch.setattr(AnswerRows, "settle", noted)
    return found


def test_trees_beside_chains_and_none_change_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    reads(monkeypatch)
    branches = moves(monkeypatch)
    tree, dynamic, chain = specs("near")
    ways = [tree, dynamic, OWN, "none", chain, "recycle?adapt=false&tree=12"]
    with engine(spec_of("near")) as made:
        plain = [stock(model_of(ONEVISION), each) for each in asked(ways)]
        found = answers(made, asked(ways))
        assert [text for text, _ in found] == plain
        made_in_all = [counts(end) for _, end in found]
        assert made_in_all[3] is None and all(both and both[0] > 0 for both in made_in_all[:3])
        assert sum(both[1] for both in made_in_all[:3] if both) > 0
        assert any(branches) and empty(made) and made._runner.nbytes == 0
        settle = AnswerRows.settle
        # planted: what stands of a tree stays where it was read
        monkeypatch.setattr(
            AnswerRows, "settle", lambda own, at, kept, _=None: settle(own, at, kept)
        )
        found = answers(made, asked([tree, dynamic], prefix="w"))
        assert [text for text, _ in found] != plain


def trees(patch: pytest.MonkeyPatch) -> list[tuple[Any, list[int], list[Any]]]:
    """Key, what was said, and drafts with parents and confidences, at each step with a tree."""
    propose, found = BatchDrafts.propose, list[tuple[Any, list[int], list[Any]]]()

    def noted(self: BatchDrafts, rows: Any) -> None:
        propose(self, rows)
        for row in rows:
            if row.drafts is not None and row.own.tokens:
                nodes = zip(row.own.tokens, row.own.parents, row.own.sure, strict=True)
                found.append((row.key, [*row.own.said], [*nodes]))

    patch.setattr(BatchDrafts, "propose", noted)
    return found


def likely(patch: pytest.MonkeyPatch) -> bool:
    """Children are the likeliest words of the draft model behind their path, read anew."""
    found, right = trees(patch), True
    model = Qwen2ForCausalLM.from_pretrained(folder(ONEVISION) / "text").eval()
    blocked = Chooser(model_of(ONEVISION)[0])._blocked
    tree, dynamic, _ = specs("text")
    requests = [ask("a", "a b c " * 20, tokens=14, decode=tree)]
    requests += [ask("b", "who? " * 4, tokens=18, decode=dynamic)]
    with engine(spec_of("text")) as made:
        prepare = made._runner.encoder.prepare
        prompts = {r.id: prepare(r).inputs["input_ids"][0].tolist() for r in requests}
        answers(made, [*requests, ask("c", image(1), "what?", decode="none")])
    assert {key for key, *_ in found} == {"a", "b"}
    for key, said, nodes in found:
        paths = {-1: [*prompts[key], *said]}
        for node, (token, parent, _) in enumerate(nodes):
            paths[node] = [*paths[parent], token]
        for parent in {parent for _, parent, _ in nodes}:
            mine = {token: sure for token, own, sure in nodes if own == parent}
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([paths[parent]])).logits[0, -1]
                logits[blocked] = -torch.inf
            right &= {*mine} == {*logits.topk(len(mine)).indices.tolist()}
            best = pytest.approx(float(logits.softmax(-1).amax()), abs=1e-5)
            right &= all(sure == best for sure in mine.values())
            assert len(mine) <= (2 if key == "a" else 6)
        assert len(nodes) <= (7 if key == "a" else 6)
    assert any(nodes[1][1] == -1 for _, _, nodes in found if len(nodes) > 1)
    return right


def test_children_are_the_likeliest_behind_their_path(monkeypatch: pytest.MonkeyPatch) -> None:
    reads(monkeypatch)
    with monkeypatch.context() as patch:
        assert likely(patch)
    paths = BatchTree.paths

    def seen(self: BatchTree, behind: int) -> list[list[int]]:
        """Planted: a token sees all that was read before it, on other paths as well."""
        return [[*range(path[-1] + 1)] for path in paths(self, behind)]

    monkeypatch.setattr(BatchTree, "paths", seen)
    assert not likely(monkeypatch)


def test_drawn_text_is_that_of_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws and rules; what the model itself would draw is the first child of a place."""
    reads(monkeypatch)
    ways: list[dict[str, Any]] = [
        {"temperature": 1.0, "top_p": 0.9, "seed": 5},
        {"temperature": 1.3, "seed": 2},
        {"presence_penalty": 1.5, "repetition_penalty": 1.3},
        {"grammar": "start: /[a-d]{18}/"},
    ]
    tree, dynamic, _ = specs("same")

    def drawn(name: str, decode: list[str | None]) -> list[Request]:
        pairs = zip(asked(decode, prefix=name), ways, strict=False)
        return [replace(r, sampling=SamplingOptions(max_tokens=16, **way)) for r, way in pairs]

    with engine(spec_of("same")) as made:
        texts = [text for text, _ in answers(made, drawn("p", ["none"]))]
        for name, decode in (("t", [tree]), ("d", [dynamic]), ("s", [OWN])):
            found = answers(made, drawn(name, decode))
            assert [text for text, _ in found] == texts and len(set(texts)) == len(ways)
            for _, end in found[:2] if name == "t" else ():
                # three levels of which all stand, and one more token
                assert counts(end)[1] >= 16 * 0.6  # type: ignore[index]
        assert empty(made) and made._runner.nbytes == 0


def test_a_tree_that_fails_lets_its_answer_go_on_with_a_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads(monkeypatch)
    take, calls = BatchTree.take, [0]

    def broken(self: BatchTree, shares: Any) -> None:
        calls[0] += 1
        if calls[0] == 7:
            raise RuntimeError("no memory")
        take(self, shares)

    monkeypatch.setattr(BatchTree, "take", broken)
    with engine(spec_of("near")) as made:
        requests = asked(specs("near")[:2])[:2]
        found = answers(made, requests)
        assert [text for text, _ in found] == [stock(model_of(ONEVISION), r) for r in requests]
        notes = [note for _, end in found for note in end.trace.get("notes", ())]  # type: ignore[union-attr]
        assert notes and all("drafted no longer: RuntimeError" in note for note in notes)
        assert empty(made) and made._runner.nbytes == 0


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_who_comes_and_goes_at_random_changes_no_text(seed: int) -> None:
    """Trees and chains of two sources, that adapt or not, paused, cancelled, of all lengths."""
    rng = random.Random(seed)
    with engine(spec_of("near"), slots=3) as made:

        def some() -> Iterator[Request]:
            for number in range(12):
                knobs = rng.choice([*WAYS, *WAYS[:2]]) + rng.choice(["", "&adapt=false&least=0"])
                spec = rng.choice([f"draft:{folder(ONEVISION)}/near", "self:0.3"]) + f"?{knobs}"
                parts = rng.choice([(image(number), "what?"), ("a b " * rng.randrange(1, 30),)])
                more = {"tokens": rng.randrange(1, 40), "priority": rng.randrange(3)}
                decode = rng.choice([spec, spec, spec, "none"])
                yield ask(f"{number}", *parts, decode=decode, **more)

        comings_and_goings(made, rng, some(), model_of(ONEVISION))
        eventually(lambda: empty(made) and made._runner.nbytes == 0)


def test_rows_of_trees_are_in_the_memory_that_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    found, draft, over = promised_bytes(monkeypatch), DraftRows.draft, list[int]()

    def noted(self: DraftRows, wanted: Any) -> int:
        count = draft(self, wanted)
        over.extend(s.length > s.most for mine in self.store._slots for s in mine)
        return count

    monkeypatch.setattr(DraftRows, "draft", noted)
    reads(monkeypatch)
    spec = f"draft:{folder(ONEVISION)}/near?adapt=false&least=0&tree=dynamic&most=48"
    with engine(spec, slots=4) as made:
        answers(made, [ask(f"{i}", image(i), "what?", tokens=60) for i in range(4)])
        assert found and all(0.95 * held <= most for held, most in found)
        assert over and not any(over)


@pytest.mark.slow
def test_a_model_with_windows_drafts_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    reads(monkeypatch)
    kinds: list[bool] = []
    propose = BatchDrafts.propose

    def noted(self: BatchDrafts, rows: Any) -> None:
        propose(self, rows)
        kinds.extend(r.own.parents is None for r in rows if r.drafts is not None and r.own.tokens)

    monkeypatch.setattr(BatchDrafts, "propose", noted)
    for family in ("gemma3", "qwen2_5_vl", "qwen3_vl"):
        kinds.clear()
        with engine(spec_of("near", family), family) as made:
            requests = [each for each in asked(specs("near", family)[:2]) if each.id != "2"]
            found = answers(made, requests)
            assert [text for text, _ in found] == [stock(model_of(family), r) for r in requests]
            assert kinds and {*kinds} == {family == "gemma3"} and empty(made)
