"""Printed pages of the document model: letters, facts, labels, and how its tower learns them."""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFont

from mmfast.models.loading import embedded_path, load
from mmfast.tiny import training
from mmfast.tiny.document import fonts, pages, prints
from mmfast.tiny.document.fonts import KEPT, LETTERS, TRAINED, draw_letters, typefaces
from mmfast.tiny.document.prints import (
    TILE,
    Printed,
    PrintedPage,
    make_print,
    print_facts,
    print_labels,
    print_owners,
)
from mmfast.tiny.document.readout import (
    HEADS,
    PARTS,
    POINTING,
    PageReadout,
    pointers,
    pointing_loss,
)
from mmfast.tiny.document.tower import READ, PrintTower
from mmfast.tiny.document.train import (
    HELD,
    PageTask,
    draw_pages,
    encode_pages,
    main,
    read_tiles,
)
from mmfast.tiny.document.words import learn_words, with_words
from mmfast.tiny.video.model import (
    DecoderLayout,
    make_tokenizer,
    run_decoder,
    vocabulary_texts,
)
from mmfast.tiny.video.scene import EVAL, IGNORE, TRAIN

SIDE = pages.CELLS * 12
SEVERAL = [make_print(EVAL, 5, index) for index in range(24)]


def test_letters_are_those_of_the_fonts(tmp_path: Path) -> None:
    """What lies beside the checkpoint is what a system with these fonts draws."""
    try:
        [ImageFont.truetype(name, 20) for name in (*TRAINED, *KEPT)]
    except OSError:
        pytest.skip("not all of the fonts are installed")
    draw_letters(tmp_path / "letters.png")
    with (
        Image.open(tmp_path / "letters.png") as drawn,
        Image.open(embedded_path("tiny-document") / "letters.png") as shipped,
    ):
        assert drawn.size == shipped.size
        gap = np.abs(np.asarray(drawn, np.int64) - np.asarray(shipped, np.int64))
        assert gap.mean() < 3  # other versions of a font may differ a little


def test_every_letter_has_ink_and_room() -> None:
    for face in typefaces():
        assert len(face.cells) == len(face.advances) == len(LETTERS)
        dark = face.cells.max(2) > 128  # [letters, columns of a cell]
        assert (face.cells > 128).any((1, 2)).all(), face.name
        assert not dark[:, -1].any(), f"{face.name}: a letter is cut off"
        assert min(face.advances) > 5 and max(face.advances) < fonts.WIDE


def test_a_stamp_is_its_letters_side_by_side() -> None:
    face = typefaces()[0]
    word, size = face.stamp("milk", 24), 24 / fonts.EM
    ends = np.cumsum([face.advances[LETTERS.index(letter)] for letter in "milk"])
    middles = (fonts.SIDE + ends - np.diff(ends, prepend=0) / 2) * size
    assert np.allclose(word.centres, middles)
    assert abs(word.wide - (ends[-1] + 2 * fonts.SIDE) * size) <= 1
    last = face.stamp("k", 24).ink[:, : word.wide]
    part = word.ink[:, -last.shape[1] :]
    assert np.abs(part.astype(int) - last.astype(int))[:, 5:-2].mean() < 12
    with pytest.raises(ValueError, match="substring"):
        face.stamp("é", 24)


def test_pages_are_stable_and_some_fonts_never_trained_on() -> None:
    one, again = make_print(EVAL, 3, 5), make_print(EVAL, 3, 5)
    assert np.array_equal(one.picture, again.picture) and one.words == again.words
    assert make_print(TRAIN, 3, 5).words != one.words
    seen = {purpose: {make_print(purpose, 1, i).font for i in range(80)} for purpose in (0, 1)}
    assert not seen[TRAIN] & {*KEPT} and seen[EVAL] & {*KEPT}
    assert len(seen[TRAIN]) > len(TRAINED) / 2


@pytest.mark.rest_is_slow(5)
@pytest.mark.parametrize("page", SEVERAL)
def test_words_lie_apart_and_within_tiles(page: PrintedPage) -> None:
    covered = np.zeros(page.picture.shape[:2], int)
    for word in page.words:
        left, top, right, bottom = word.box
        assert left // TILE == (right - 1) // TILE and top // TILE == (bottom - 1) // TILE, word
        covered[top:bottom, left:right] += 1
        inside = page.picture[top:bottom, left:right].astype(int)
        assert np.ptp(inside.sum(-1)) > 250, word  # ink on paper
    assert covered.max() == 1
    paper = np.median(page.picture.reshape(-1, 3), 0)
    stray = np.abs(page.picture - paper).sum(-1)[covered == 0]
    assert (stray > 200).mean() < 0.02  # rules, tails of letters, noise


def _read(words: list[Printed]) -> list[Printed]:
    """Words line by line, by their places alone."""

    def middle(word: Printed) -> float:
        return (word.box[1] + word.box[3]) / 2

    down = sorted(middle(word) for word in words)
    ends = [below for above, below in pairwise(down) if below - above > 14]
    return sorted(words, key=lambda word: (sum(middle(word) >= e for e in ends), word.box[0]))


@pytest.mark.rest_is_slow(5, 1)
@pytest.mark.parametrize("page", SEVERAL)
def test_facts_are_what_a_reader_of_the_places_finds(page: PrintedPage) -> None:
    """Rows and columns by geometry alone, without what the page knows of them."""

    def at(text: str, role: str) -> Printed:
        (found,) = [word for word in page.of(role) if word.text == text]
        return found

    def middle(word: Printed, axis: int) -> float:
        return (word.box[axis] + word.box[axis + 2]) / 2

    found = list(print_facts(page))
    assert len({(fact.kind, fact.slots) for fact in found}) == len(found)
    for fact in found:
        if fact.kind in ("cell", "item"):
            header, other = fact.slots
            name, number = (other, fact.answer) if fact.kind == "cell" else (fact.answer, other)
            item, column = at(name, "item"), at(header, "header")
            row = [w for w in page.of("number") if abs(middle(w, 1) - middle(item, 1)) < 8]
            ways = [abs(middle(word, 0) - middle(column, 0)) for word in row]
            assert row[ways.index(min(ways))].text == number
        elif fact.kind == "rows":
            assert int(fact.answer) == len({round(w.box[1] / 4) for w in page.of("item")})
        elif fact.kind == "after":
            texts = [word.text for word in _read(page.of("note"))]
            assert texts[texts.index(fact.slots[0]) + 1] == fact.answer
        else:
            assert fact.answer == min(page.words, key=lambda w: w.box[1]).text


def test_labels_read_the_page() -> None:
    for page in SEVERAL[:8]:
        owners = print_owners(page)
        labels = dict(zip(prints.PARTS, print_labels(page, owners), strict=True))
        grid = {
            name: np.append(row[144:], IGNORE).reshape(SIDE, SIDE + 1)[:, :-1]
            for name, row in labels.items()
        }
        assert all((row[:144] == IGNORE).all() for row in labels.values())
        assert {*np.unique(owners)} == {*range(len(page.words) + 1)}  # no word is lost
        last = ""
        for number, word in enumerate(page.words, start=1):
            mine = owners == number
            top = np.argwhere(mine)[0][0]
            columns = np.flatnonzero(mine[top])
            read = [prints.LETTERS[i] for i in grid["own letter"][top, columns]]
            rest = iter(word.text)
            short = [letter for i, letter in enumerate(read) if i == 0 or letter != read[i - 1]]
            assert all(letter in rest for letter in short), (word.text, read)
            if word.role == "number":
                digits = 10 * grid["own tens"] + grid["own units"]
                assert (digits[mine] == int(word.text)).all()
                (item,) = [w for w in page.of("item") if w.row == word.row]
                assert (grid["item"][mine] == prints.ITEMS.index(item.text)).all()
            else:
                assert (grid["own word"][mine] == prints.WORDS.index(word.text)).all()
            before = grid["before"][mine]
            if word.role == "note" and last:
                assert (before == prints.NOTES.index(last)).all()
            else:
                assert (before == IGNORE).all()
            last = word.text if word.role == "note" else last


def test_words_become_tokens_and_nothing_else_changes() -> None:
    old = make_tokenizer()
    new = with_words(old, prints.WORDS)
    for word in prints.WORDS:
        assert len(new.encode(word)) == len(new.encode(f" {word}")) == 1
        assert new.decode(new.encode(f"the {word} 42")) == f"the {word} 42"
    texts = [*vocabulary_texts()]
    assert [new.encode(text) for text in texts] == [old.encode(text) for text in texts]
    assert with_words(new, prints.WORDS).get_vocab() == new.get_vocab()


def test_the_tower_learns_tiles_as_the_processor_cuts_them() -> None:
    _, processor = load(str(embedded_path("tiny-document")), "cpu", "float32")
    drawn = draw_pages(processor.image_processor, 1, 2, 0)
    assert [page.facts[0].kind for page in drawn[1:]] == ["cell", "cell"]
    tiles, labels = read_tiles(drawn[1:])
    assert labels.shape == (len(READ), len(tiles), 144)
    words = [*READ].index("own word")
    for number, page in enumerate(drawn[1:], start=1):
        sheet = make_print(TRAIN, 0, number)
        for tile, label in zip(tiles, labels[words], strict=True):
            at = [i for i in range(9) if np.array_equal(page.pixels[1 + i], tile)]
            for place in at:
                row, column = divmod(place, 3)
                inside = {
                    prints.WORDS.index(w.text)
                    for w in sheet.words
                    if w.role != "number" and (w.box[1] // TILE, w.box[0] // TILE) == (row, column)
                }
                assert {*label[label != IGNORE].tolist()} == inside


def test_reading_is_learned_and_other_features_are_held() -> None:
    model, processor = load(str(embedded_path("tiny-document")), "cpu", "float32")
    drawn = draw_pages(processor.image_processor, 1, 2, 0)
    tiles, labels = read_tiles(drawn[1:])
    others, seen = read_tiles(drawn[:1], every=True)
    assert np.array_equal(others, drawn[0].pixels) and bool((seen[:, 0] == IGNORE).all())
    some = torch.arange(len(others))
    reads = PrintTower(model, (tiles, labels), (others, seen), 0, 1e-3)
    assert float(reads.loss((False, some))[0].detach()) > 1  # looks of things are not read yet
    task = PrintTower(model, (tiles, labels), (others, torch.full_like(seen, IGNORE)), 0, 1e-3)

    def loss(printed: bool, chosen: torch.Tensor) -> float:
        return float(task.loss((printed, chosen))[0].detach())

    assert loss(False, some) < 1e-6
    with torch.no_grad():
        model.model.multi_modal_projector.linear_2.bias += 0.3
    assert loss(False, some) > 0.05
    printed = torch.arange(len(tiles))
    first = loss(True, printed)
    for _ in range(8):
        training.update(task, [(True, printed)], 1.0)
    assert loss(True, printed) < 0.8 * first


@pytest.mark.parametrize("sort", ["--pages", "--prints"])
def test_a_recipe_without_pages_to_hold_out_says_so(
    sort: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([sort, "0", "--out", str(tmp_path / "new")])
    assert "64 pages of each sort are held out" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_words_are_read_by_their_embeddings() -> None:
    """A state that is the embedding of a word reads as it, as answered and as asked."""
    tokenizer = with_words(make_tokenizer(), prints.WORDS)
    head = PageReadout(32, tokenizer)
    embedding = torch.randn(len(tokenizer), 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for layer in head.named.values():
            layer.weight.copy_(10 * torch.eye(32))
            layer.bias.zero_()

    def loss(text: str, part: str, word: int) -> float:
        (token,) = tokenizer.encode(text, add_special_tokens=False)
        labels = {name: torch.tensor([[word if name == part else IGNORE]]) for name in PARTS}
        return float(head.loss(embedding[token].view(1, 1, -1), labels, embedding).detach())

    milk, eggs = prints.ITEMS.index("milk"), prints.ITEMS.index("eggs")
    assert loss("milk", "own word", prints.WORDS.index("milk")) < 0.01
    assert loss("milk", "own word", prints.WORDS.index("eggs")) > 50
    assert loss("4", "own tens", 4) < 0.01 < 50 < loss("4", "own tens", 5)
    both = loss("milk", "item", milk)  # right as answered, not as asked
    assert 0 < both < loss("milk", "item", eggs) - 50
    assert loss(" send", "before", prints.NOTES.index("send")) < loss("send", "own word", 0) - 50


@pytest.mark.parametrize("page", SEVERAL[:8])
def test_answers_stand_where_the_page_has_them(page: PrintedPage) -> None:
    owners = print_owners(page)
    own = dict(zip(prints.PARTS, print_labels(page, owners), strict=True))
    none = torch.full_like(own["item"], IGNORE)
    labels = torch.stack([own.get(name, none) for name in PARTS])
    for fact in print_facts(page):
        seen = np.append(pointers(labels, fact)[144:].numpy(), False)  # the last newline
        places = seen.reshape(SIDE, SIDE + 1)[:, :-1]
        said = {page.words[number - 1].text for number in np.unique(owners[places])}
        if fact.kind == "rows":
            assert said == {word.text for word in page.of("item") if word.row == int(fact.answer)}
        else:
            # A row is told by its number, which the question names.
            assert said == {fact.slots[1] if fact.kind == "item" else fact.answer}, fact


def test_pointing_is_the_attention_of_the_model() -> None:
    """The loss is that of the weights which stock layers give to what answers, text left out."""
    eager = {"attn_implementation": "eager"}
    model, _ = load(str(embedded_path("tiny-document")), "cpu", "float32", None, eager)
    lm = model.model.language_model
    x = torch.randn(1, 12, lm.config.hidden_size, generator=torch.Generator().manual_seed(0))
    seen = torch.zeros(3, 12).masked_fill(~torch.ones(3, 12).tril(9).bool(), -torch.inf)
    layout = DecoderLayout(torch.arange(9)[None], torch.arange(9, 12)[None], [seen[None, None]])
    found = run_decoder(lm, x[:, :9], x[:, 9:], layout)
    wanted = torch.zeros(1, 7, dtype=torch.bool)
    wanted[0, [2, 4]] = True
    asked = torch.tensor([0]), torch.tensor([1]), torch.tensor([10])
    loss = pointing_loss(lm, found, torch.arange(7)[None], wanted, asked)
    with torch.no_grad():
        stock = lm(inputs_embeds=x, output_attentions=True).attentions
    by_hand = 0.0
    for layer in POINTING:
        weights = stock[layer][0, :HEADS, 10, 1:8]  # of the question's second token
        by_hand -= float((weights[:, [2, 4]].sum(1) / weights.sum(1)).log().mean())
    assert float(loss.detach()) == pytest.approx(by_hand, abs=1e-4)


@pytest.mark.slow
def test_lessons_show_what_says_something_and_never_what_is_held() -> None:
    model, processor = load(str(embedded_path("tiny-document")), "cpu", "float32")
    learn_words(model, processor)
    drawn = draw_pages(processor.image_processor, HELD + 3, HELD + 3, 0)
    known, labels = encode_pages(model, processor, drawn, 0)
    options = argparse.Namespace(seed=0, pages=HELD + 3, batch=3, things=0.67, whole=0.0, rate=1e-3)
    task = PageTask(model, known, labels, options)
    things = {HELD, HELD + 1, HELD + 2}
    free = things | {each + HELD + 3 for each in things}
    assert {*torch.cat(task.free).tolist()} == free and not free & {*task.held}
    seen, told = set[int](), 0
    for step in range(8):
        for chosen, lesson, kept in task.batches(step, 0.5):
            seen |= {*chosen}
            assert [page in things for page in chosen] == [True, True, False]
            assert (kept.diff(dim=1) > 0).all()
            says = task.saying[chosen]
            told += bool((says.gather(1, kept).sum(1) == says.sum(1)).all())
            assert {k for kinds in lesson.kinds for k in kinds} <= {*pages.KINDS, *prints.KINDS}
    assert seen == free and told > 6  # of sixteen; diverse and random ones lack some
