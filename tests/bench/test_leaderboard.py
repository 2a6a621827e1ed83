"""The referee on cells made by hand: tests, ranks, fronts, jobs, agreement and the page."""

from __future__ import annotations

import json
import random
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from board_cells import KINDS, cell, speed
from cli_runs import fails, run

from mmfast.bench.leaderboard.agreement import agree
from mmfast.bench.leaderboard.page import html, write_board
from mmfast.bench.leaderboard.standing import standing
from mmfast.bench.leaderboard.statistics import (
    calibration_error,
    fisher,
    holm,
    newcombe,
    pareto,
    rank_intervals,
    ranks,
)
from mmfast.bench.report.docs import write_table
from mmfast.planner.candidates import evidence_for

stats = pytest.importorskip("scipy.stats")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


def bits(rng: random.Random, n: int, share: float) -> str:
    return "".join("1" if rng.random() < share else "0" for _ in range(n))


def signed(won: int, lost: int) -> float:
    """Share of all ways to swap two methods on the questions that tell them apart."""
    found = {0: 1}  # ways by the sum of signs
    for _ in range(won + lost):
        sums = [(total + sign, ways) for total, ways in found.items() for sign in (-1, 1)]
        found = {total: sum(w for t, w in sums if t == total) for total, _ in sums}
    far = sum(ways for total, ways in found.items() if abs(total) >= abs(won - lost))
    return float(far / sum(found.values()))


def test_pairs_are_told_apart_by_an_exact_test() -> None:
    """Every p equals the count over all swaps, and the corrected one follows the procedure."""
    rng = random.Random(0)
    marks = {"all tokens": "1" * 30, "downsample": bits(rng, 30, 0.4)}
    marks |= {f"m{i}": bits(rng, 30, share) for i, share in enumerate((0.6, 0.95, 0.2))}
    document = standing([cell(name, right) for name, right in marks.items()])
    names, swaps = [n for n in marks if n != "all tokens"], {}
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            pairs = [*zip(marks[a], marks[b], strict=True)]
            swaps[a, b] = signed(pairs.count(("1", "0")), pairs.count(("0", "1")))
    wanted, passed = {}, True
    for step, (pair, p) in enumerate(sorted(swaps.items(), key=lambda item: item[1])):
        passed = passed and p * (len(swaps) - step) < 0.05
        if passed:
            wanted[frozenset(pair)] = p
    found = {frozenset((row["better"], row["worse"])): row["p"] for row in document["pairs"]}
    assert found == pytest.approx(wanted) and 0 < len(found) < len(swaps)
    for row in document["pairs"]:
        better, worse = marks[row["better"]], marks[row["worse"]]
        assert row["won"] - row["lost"] == better.count("1") - worse.count("1") > 0
    for row in document["rows"][1:]:
        pairs = [*zip(marks["all tokens"], marks[row["method"]], strict=True)]
        assert row["difference"] == pytest.approx(-pairs.count(("1", "0")) / 30)
        tail = stats.binomtest(0, pairs.count(("1", "0")), 0.5).pvalue
        assert row["p"] == pytest.approx(tail)


def test_statistics_equal_their_definitions() -> None:
    rng = np.random.default_rng(1)
    for _ in range(60):
        n, other = rng.integers(1, 30, 2).tolist()
        a, b = int(rng.integers(0, n + 1)), int(rng.integers(0, other + 1))
        table = [[a, n - a], [b, other - b]]
        assert fisher(a, n, b, other) == pytest.approx(stats.fisher_exact(table).pvalue)
        ps = rng.uniform(0, 0.2, 6).tolist()
        alpha = float(rng.uniform(0, 0.3))
        left = sorted(range(6), key=lambda i: ps[i])
        rejected = set[int]()
        while left and ps[left[0]] * len(left) <= alpha:
            rejected.add(left.pop(0))
        assert {i for i, p in enumerate(holm(ps)) if p <= alpha} == rejected
        scores = rng.integers(0, 5, 9).astype(float)
        assert ranks(scores).tolist() == stats.rankdata(-scores).tolist()
    # Table II of Newcombe (1998), example a: 56 of 70 against 48 of 80
    assert newcombe(48, 80, 56, 70) == pytest.approx((0.0524, 0.3339), abs=1e-4)


def test_the_front_holds_what_nothing_dominates() -> None:
    rng = random.Random(2)
    for _ in range(200):
        points = [(rng.randint(0, 6), rng.randint(0, 6)) for _ in range(rng.randint(1, 12))]
        wanted = [
            not any(c <= x and v >= y and (c, v) != (x, y) for c, v in points) for x, y in points
        ]
        assert pareto(points) == wanted, points


def test_calibration_error_by_bins() -> None:
    rng = random.Random(3)
    chances = [rng.random() for _ in range(300)] + [1.0, 0.0]
    right = [rng.random() < c**2 for c in chances]
    total = 0.0
    for low in range(10):
        inside = [
            (c, r)
            for c, r in zip(chances, right, strict=True)
            if low <= 10 * c < low + 1 or (low == 9 and c == 1.0)
        ]
        if inside:
            confidence = sum(c for c, _ in inside) / len(inside)
            accuracy = sum(r for _, r in inside) / len(inside)
            total += len(inside) / len(chances) * abs(confidence - accuracy)
    assert calibration_error(chances, right) == pytest.approx(total) and total > 0.1
    assert calibration_error([1.0] * 4, [True] * 4) == 0.0


def test_shuffled_labels_tell_nothing_apart() -> None:
    """Of 25 sets of six equal methods, few may have a pair at all."""
    rng = random.Random(4)
    wrong = 0
    for _ in range(25):
        marks = [*"1" * 45, *"0" * 15]
        cells = [cell("all tokens", "1" * 60)]
        for name in ("downsample", "a", "b", "c", "d", "e"):
            rng.shuffle(marks)
            cells.append(cell(name, "".join(marks)))
        document = standing(cells)
        wrong += bool(document["pairs"])
        assert all(
            row["rank_interval"][1] - row["rank_interval"][0] > 2 for row in document["ranks"]
        )
    assert wrong <= 4  # 5 % are expected at most


def test_a_better_method_wins() -> None:
    rng = random.Random(5)
    marks = {name: bits(rng, 120, 0.6) for name in ("downsample", "a", "b", "c")}
    cells = [cell("all tokens", "1" * 120), cell("good", "1" * 114 + "0" * 6)]
    cells += [cell(name, right) for name, right in marks.items()]
    document = standing(cells)
    first, *others = document["ranks"]
    assert (first["method"], first["rank"], first["rank_interval"]) == ("good", 1.0, [1.0, 1.0])
    assert first["beats"] == 4 and first["beaten_by"] == 0
    assert all(row["beaten_by"] >= 1 and row["rank_interval"][0] >= 2 for row in others)
    best = {job["job"]: job for job in document["jobs"]}["all questions"]
    assert (best["method"], best["tied"], best["of"]) == ("good", [], 5)
    # The same marks under the names of others: the name decides nothing.
    names = {"good": "a", "a": "good"}
    for row in cells:
        row["method"] = names.get(row["method"], row["method"])
    assert standing(cells)["ranks"][0]["method"] == "a"


def test_rank_intervals_cover_the_ranks_of_resamples() -> None:
    marks = np.random.default_rng(6).random((5, 80)) < np.array([[0.5, 0.6, 0.7, 0.8, 0.9]]).T
    rng, drawn = np.random.default_rng(7), []
    for _ in range(600):
        right = marks[:, rng.integers(0, 80, 80)].sum(-1)
        drawn.append(stats.rankdata(-right))
    for (rank, low, high), mine in zip(rank_intervals(marks), np.array(drawn).T, strict=True):
        assert low <= rank <= high
        assert [low, high] == pytest.approx(np.percentile(mine, [2.5, 97.5]), abs=0.6)


def test_vtc_split_and_abilities_by_hand() -> None:
    """Kinds take turns: colour, number, first, count, position."""
    cells = [cell("all tokens", "1111111110"), cell("downsample", "1100011000")]
    cells += [cell("mine", "1010101011", same="1111111111", chances=[0.5] * 10)]
    row = {r["method"]: r for r in standing(cells)["rows"]}["mine"]
    split = row["split"]
    assert (split["answered"]["n"], split["answered"]["accuracy"]) == (4, 0.5)
    assert (split["unanswered"]["n"], split["unanswered"]["accuracy"]) == (6, 4 / 6)
    assert (split["answered"]["stock"], split["unanswered"]["stock"]) == (1.0, 5 / 6)
    assert row["by_kind"] == {**dict.fromkeys(KINDS[:4], 0.5), "position": 1.0}
    assert (row["text"]["n"], row["text"]["accuracy"]) == (2, 0.5)
    assert (row["place"]["accuracy"], row["agreement"]) == (1.0, 1.0)
    assert row["calibration_error"] == pytest.approx(0.1)
    assert standing(cells)["rows"][1]["split"] is None  # of downsampling itself


def test_cells_without_a_partner_are_left_out() -> None:
    cells = [cell("all tokens", "1111"), cell("a", "1110"), cell("b", "11100")]
    cells += [cell("c", "1111", weights="others"), cell("d", "1111", seed=2)]
    cells += [cell("e", "1111", suite="image"), {**cell("f", "1111"), "error": "it broke"}]
    document = standing(cells)
    assert [row["method"] for row in document["rows"]] == ["all tokens", "a"]
    assert document["failed"][0]["method"] == "f" and "it broke" in html(document)
    assert standing([])["rows"] == [] and "not measured" in html(standing([]))
    again = standing([*cells, cell("a", "0000")])["rows"][1]  # the latest counts
    assert again["accuracy"] == 0.0


def test_seeds_are_joined_and_ranks_need_all_of_them() -> None:
    cells = [cell(m, "1100", seed=s) for m in ("all tokens", "downsample", "a") for s in (1, 2)]
    document = standing([*cells, cell("late", "1111", seed=1)])
    rows = {row["method"]: row for row in document["rows"]}
    assert (rows["a"]["n"], rows["a"]["seed"], rows["late"]["n"]) == (8, [1, 2], 4)
    assert [row["method"] for row in document["ranks"]] == ["downsample", "a"]
    # A seed that only few have finished is left out, not the many.
    few = [cell(m, "1111", seed=3) for m in ("all tokens", "downsample")]
    ranked = standing([*cells, cell("b", "1100"), cell("b", "0011", seed=2), *few])["ranks"]
    assert {row["method"]: row["n"] for row in ranked} == {"downsample": 8, "a": 8, "b": 8}


def test_jobs_of_cost_ask_for_a_small_loss() -> None:
    marks = "1" * 118 + "0" * 2
    cells = [cell("all tokens", "1" * 120), cell("downsample", "10" * 60)]
    cells += [cell("safe", marks, 0.25), cell("risky", "1" * 90 + "0" * 30, 0.1)]
    cells += [speed("safe", 2.0, 0.25), speed("risky", 4.0), speed("downsample", 5.0)]
    found = {job["job"]: job for job in standing(cells)["jobs"]}
    for job in ("fewest tokens without loss", "first token soonest, eight at once"):
        assert (found[job]["method"], found[job]["budget"]) == ("safe", 0.25)
    assert found["first token soonest, one request"]["value"] == 2.0
    assert found["text"]["n"] == 24 and found["all questions"]["decided"]
    few = standing([cell("all tokens", "1"), cell("downsample", "1"), cell("a", "0")])["jobs"]
    assert [job["decided"] for job in few if job["job"] == "all questions"] == [False]


def test_the_planner_reads_the_rows() -> None:
    cells = [cell("all tokens", "1" * 60), cell("random", "10" * 30), cell("evs", "1" * 60)]
    cells += [cell("downsample", "100" * 20)]
    found = evidence_for("video", standing(cells)["rows"], "tiny-video")
    assert found is not None and found.own and found.n == 60
    curves = {curve.name: curve for curve in found.curves}
    assert curves["evs"].points == ((0.1, 1.0),)
    assert found.verdict(curves["evs"], 0.1) is None
    assert "random selection" in str(found.verdict(curves["downsample"], 0.1))


def board(rng: random.Random, share: float, seed: int = 1, **more: Any) -> dict[str, Any]:
    """A run of five methods; with the same generator state the same answers."""
    shares = {"all tokens": 0.97, **dict.fromkeys(("downsample", "a", "b", "c"), share)}
    return standing([cell(k, bits(rng, 100, v), seed=seed, **more) for k, v in shares.items()])


def test_two_runs_agree_or_not() -> None:
    first, same = board(random.Random(8), 0.8), board(random.Random(8), 0.8)
    found = agree(first, same)
    assert found["agree"] and found["differ"] == found["outside"] == 0
    assert all(row["paired"] and row["same"] == 1.0 for row in found["rows"])
    # Other questions: independent samples.
    found = agree(first, board(random.Random(9), 0.8, seed=2))
    assert found["agree"] and not any(row["paired"] for row in found["rows"])
    # Other weights answer the same questions, but are another model.
    assert not any(
        r["paired"] for r in agree(first, board(random.Random(8), 0.8, weights="x"))["rows"]
    )
    # Planted: one method lost a quarter of its answers on the other machine.
    spoilt = board(random.Random(8), 0.8)
    row = next(row for row in spoilt["rows"] if row["method"] == "b")
    row["right"]["1"] = "0" * 30 + row["right"]["1"][30:]
    row["accuracy"] = row["right"]["1"].count("1") / 100
    found = agree(first, spoilt)
    assert not found["agree"]
    assert [row["method"] for row in found["rows"] if not row["agree"]] == ["b"]
    assert not agree(first, board(random.Random(10), 0.3, seed=2))["agree"]


def test_compare_from_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = []
    for number, share in enumerate((0.8, 0.8, 0.2)):
        home = tmp_path / str(number)
        home.mkdir()
        write_board(board(random.Random(11 + number), share, seed=number), home)
        files.append(str(home / "leaderboard.json"))
    code, out, _ = run(capsys, "leaderboard", "--compare", *files[:2], "--json")
    assert code == 0 and json.loads(out)["agree"]
    code, out, _ = run(capsys, "leaderboard", "--compare", files[0], files[2])
    assert code == 1 and "NO" in out and "all tokens" in out
    (tmp_path / "text.json").write_text("no JSON")
    (tmp_path / "other.json").write_text('{"rows": [], "suite": "video"}')
    (tmp_path / "torn.json").write_text('{"rows": [{"suite": "video"}], "suite": "leaderboard"}')
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    wrong = {"text": "no JSON", "other": "no leaderboard", "torn": "'method'", "binary": "UTF-8"}
    for name, told in {**wrong, "absent": "No such file"}.items():
        path = str(tmp_path / f"{name}.json")
        assert told in fails(capsys, "leaderboard", "--compare", files[0], path)
    assert "--grid" in fails(capsys, "leaderboard", "--compare", *files[:2], "--grid", "full")
    write_board(standing([cell("all tokens", "11", suite="image")]), tmp_path)
    shared = fails(capsys, "leaderboard", "--compare", files[0], str(tmp_path / "leaderboard.json"))
    assert "share no suite" in shared


class Reader(HTMLParser):
    """Tags that are left open, addresses, and the text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.links, self.text = list[str](), list[str](), ""
        self.tags = list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(v) for k, v in attrs if k in ("src", "href", "data", "action")]
        if tag not in ("meta", "line", "polyline"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def shown() -> dict[str, Any]:
    cells = [cell("all tokens", "1111111110" * 4), cell("downsample", "1100011000" * 4)]
    cells += [cell("<script>alert(1)</script>", "1010101011" * 4), cell("evs", "1" * 40, 0.25)]
    return standing([*cells, speed("evs", 2.0, 0.25), {**cell("broken", "1"), "error": "a & b"}])


def test_the_page_is_one_file_that_asks_for_nothing() -> None:
    reader = Reader()
    reader.feed(text := html(shown()))
    assert not reader.open and not reader.links and "://" not in text
    assert reader.tags.count("script") == 1 and reader.tags.count("svg") == 4
    assert "<script>alert(1)</script>" in reader.text and "a & b" in reader.text
    assert "2.00x (1.90 to 2.10)" in reader.text and "not measured" in reader.text
    assert reader.tags.count("circle") >= 8 and "Which method for which job" in reader.text


def test_tables_of_the_site() -> None:
    cells = [cell(m, right, seed=s) for m, right in MARKS.items() for s in (1, 2)]
    cells += [speed("evs", 2.0), cell("all tokens", "1" * 20, suite="image")]
    text = "\n".join(write_table("leaderboard", cells))
    assert "**video**: 40 questions, seeds 1, 2, 10 % of the tokens. All tokens: 100.0" in text
    assert "| `evs` | 1 (1 to 1) | 95.0" in text and "| 2.00x |" in text
    assert "not measured" in text and text.index("`evs`") < text.index("`downsample`")
    text = "\n".join(write_table("leaderboard_jobs", cells))
    assert "2 on video, 0 on image" in text
    assert "| video | all questions | `evs` | 10 % | 95.0 (" in text
    assert write_table("leaderboard", []) == ["Not measured."]


MARKS = {"all tokens": "1" * 20, "downsample": "1" * 4 + "0" * 16, "evs": "1" * 19 + "0"}


def test_a_board_is_written_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_board(shown(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def killed(path: Path, text: str, **_: Any) -> None:
        path.write_bytes(text.encode()[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        write_board(shown(), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    api = pytest.importorskip("playwright.sync_api")
    write_board(shown(), tmp_path)
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page, faults = browser.new_page(), list[str]()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda m: faults.append(m.text) if m.type == "error" else None)
        page.goto((tmp_path / "leaderboard.html").as_uri())
        table = page.locator("table").nth(1)
        names = lambda: table.locator("tbody tr td:first-child").all_inner_texts()
        table.get_by_text("right, %", exact=True).click()
        assert names()[-1] == "evs" and names()[0] == "downsample"
        table.get_by_text("right, %", exact=True).click()
        assert names()[0] == "evs"
        assert page.locator("svg").count() == 4 and not faults
        browser.close()
