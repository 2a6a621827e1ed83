"""Questions as clauses behind what people say first, in looser words, with slips of the hand."""

import re
from itertools import islice, product

import numpy as np
import pytest

from mmfast.tiny.scenes import looks, nouns, outside, sayings
from mmfast.tiny.scenes.evaluate import FREELY, scene_cases
from mmfast.tiny.scenes.facts import clip_items
from mmfast.tiny.scenes.questions import FORMS, KEPT, SAID, SceneItem, varied
from mmfast.tiny.scenes.wordings import FREE, LOOSER, _mistyped
from mmfast.tiny.video import scene


@pytest.mark.parametrize("form", sayings.CLAUSES)
def test_leads_and_verbs_that_are_kept_back_are_never_trained(form: str) -> None:
    trained, kept = (
        {sayings.saying(form, number) for number in sayings.sayings(form, way)}
        for way in (False, True)
    )
    assert len(kept) == len(sayings.KEPT_LEADS) * len(sayings.KEPT_VERBS) * len(
        sayings.CLAUSES[form]
    )
    assert not trained & kept and len(trained) > 3000
    verbs = re.compile(rf"\b({'|'.join(sayings.KEPT_VERBS)})\b", re.I)
    assert all(verbs.search(text) for text in kept)
    assert not any(verbs.search(text) for text in trained)
    for text in trained | kept:  # every clause stands whole in its sentence
        assert any(clause.lower() in text.lower() for clause in sayings.CLAUSES[form])


def test_a_clause_has_the_answer_of_the_question_it_is_made_of() -> None:
    forms = set()
    for index in range(8):
        view = looks.make_view(scene.EVAL, 3, index)
        items = clip_items(view, scene.make_table(view.scene, looks.draw(view)))
        known = {(item.form or item.kind, item.slots, item.answer)
                 for item in items if item.kind != SAID and item.before is None}  # fmt: skip
        said = [item for item in items if item.kind == SAID]
        assert {(item.form, item.slots, item.answer) for item in said} <= known
        forms |= {item.form for item in said}
        for item in said[:40]:
            numbers = item.wordings(False)
            text = item.worded(numbers[len(numbers) // 2])
            assert "{" not in text and all(slot.strip() in text for slot in item.slots[:1])
    assert forms >= {*sayings.CLAUSES} - {"it_place", "it_way", "it_shape", "it_colour"}


def test_clauses_about_what_is_outside_are_kept_back_as_questions_are() -> None:
    rng = np.random.default_rng(8)
    trained, kept = (
        {outside.worldly(rng, way, said=True) for _ in range(400)} for way in (False, True)
    )
    assert not trained & kept and not any("{" in text for text in trained | kept)
    verbs = {word for verb in (*sayings.VERBS, *sayings.INVENTED) for word in verb.split()}
    assert not verbs & {*nouns.COMMON, *nouns.KEPT}
    foreign = {word for text in kept for word in re.findall(r"[a-z]+", text.lower())}
    assert foreign & {*nouns.KEPT} and not foreign & {*nouns.COMMON}


def test_questions_without_clauses_are_those_of_before() -> None:
    """What a seed draws for the evaluation does not depend on clauses."""
    plain, asked = (np.random.default_rng(8) for _ in range(2))
    for kept in (True, False) * 20:
        outside.worldly(plain, kept)
        outside.worldly(asked, kept, said=False)
    assert plain.random() == asked.random()


def test_looser_words_leave_what_is_kept_back() -> None:
    rng = np.random.default_rng(0)
    shown = {varied("Which object moves?", rng).lower() for _ in range(400)}
    assert not any("which item" in text for text in shown)
    shown = {varied("What is the colour of the thing?", rng).lower() for _ in range(600)}
    for word in (*LOOSER["thing"], "what's", "whats"):
        assert any(word in text for text in shown), word


def test_a_slip_changes_one_word_by_one_or_two_letters() -> None:
    rng, seen = np.random.default_rng(1), set()
    for text, _ in product((FORMS["colour"][0], FORMS["describe"][0], "is it so?"), range(40)):
        found = _mistyped(text, rng)
        pairs = [(a, b) for a, b in zip(text.split(), found.split(), strict=True) if a != b]
        assert len(pairs) <= 1
        for before, after in pairs:
            assert len(before) > 4 and (before[0], before[-1]) == (after[0], after[-1])
            assert sorted(before) == sorted(after) or len(after) == len(before) - 1
            seen.add(len(after) - len(before))
        if text == "is it so?":
            assert found == text
    assert seen == {0, -1}
    item = SceneItem(SAID, ("star",), "red", "colour")
    assert item.worded(0) != item.worded(1)


def test_free_wordings_are_never_trained_and_have_the_answers_of_their_forms() -> None:
    """Asked of seventeen forms in turn; a view whose items they fit is found for each."""
    cases = list(islice(scene_cases(5, (FREELY,)), 2 * len(FREE)))
    assert all(case.kept and case.media == "video" and "{" not in case.turns[0] for case in cases)
    for case, form in zip(cases, [*FREE, *FREE], strict=True):
        fits = [re.compile(re.escape(w).replace(r"\{", "{").replace(r"\}", "}")
                           .format(*[".+"] * 4)) for w in FREE[form]]  # fmt: skip
        assert any(fit.fullmatch(case.turns[0]) for fit in fits), (form, case.turns)
    shown = {word for rows in FORMS.values() for word in rows[:-KEPT]}
    shown |= {clause for rows in sayings.CLAUSES.values() for clause in rows}
    assert not shown & {word for rows in FREE.values() for word in rows}
    (which,) = {case.answer for case in cases[-1:]}
    assert len(which.split()) == 2 or which.startswith("there")
