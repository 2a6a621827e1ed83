"""The query compressor against its oracle, its files, and its use by specs."""

from __future__ import annotations

import json
from pathlib import Path

import oracles_compressors as oracle
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import mmfast
from mmfast import MmfastError, ModelError, SpecError
from mmfast.compressors import base
from mmfast.compressors.query_compressor import QueryCompressor, cells_of
from mmfast.core.reduction import Reduction
from mmfast.core.registry import get
from mmfast.core.spec import parse

GRID = (4, 5)
CELLS = {  # by hand: halves of the longer side, then of the halves
    1: [list(range(20))],
    2: [[p for p in range(20) if p % 5 < 2], [p for p in range(20) if p % 5 >= 2]],
}


def make(tokens: int, asks: bool = True, width: int = 16) -> QueryCompressor:
    torch.manual_seed(tokens)
    made = QueryCompressor(width, tokens, GRID, inner=24, heads=3, asks=asks)
    for weight in made.parameters():  # also those that start at zero
        torch.nn.init.normal_(weight, std=0.3)
    return made.eval().requires_grad_(False)


def features(*lead: int, width: int = 16) -> tuple[Tensor, Tensor]:
    torch.manual_seed(7)
    return torch.randn(*lead, 3, 20, width), torch.randn(*lead, 6, width)


def cells(tokens: int) -> list[list[int]]:
    if tokens in CELLS:
        found = [set(cell) for cell in CELLS[tokens]]
        cell = cells_of(GRID, tokens).tolist()
        assert sorted(map(sorted, found)) == sorted(
            [p for p in range(20) if cell[p] == number] for number in range(tokens)
        )
    numbers = cells_of(GRID, tokens).tolist()
    return [[p for p in range(20) if numbers[p] == number] for number in range(tokens)]


def judged(compressor: QueryCompressor, x: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    weights = {name: each.double().numpy() for name, each in compressor.state_dict().items()}
    tokens = compressor.config["tokens"]
    vectors, places = oracle.query_compressor(
        weights, compressor.config, cells(tokens), x.double().numpy(), text.double().numpy()
    )
    return torch.from_numpy(vectors), torch.tensor(places)


@pytest.mark.parametrize("tokens", [1, 2, 4, 7, 20])
@pytest.mark.parametrize("asks", [True, False])
def test_oracle(tokens: int, asks: bool) -> None:
    compressor = make(tokens, asks).double()
    x, text = (each.double() for each in features())
    out = compressor(x, text)
    vectors, places = judged(compressor, x, text)
    assert torch.equal(out.place, places)
    torch.testing.assert_close(out.vectors, vectors, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        "listen.k.weight",
        "look.v.weight",
        "mix.k.weight",
        "layers.0.look.q.weight",
        "layers.1.narrow.bias",
        "choose.weight",
        "time.weight",
        "change.bias",
        "learned",
        "ask",
    ],
)
def test_the_oracle_sees_every_part(name: str) -> None:
    compressor = make(4).double()
    x, text = (each.double() for each in features())
    vectors, _ = judged(compressor, x, text)
    with torch.no_grad():
        dict(compressor.named_parameters())[name].mul_(1.1)
    assert not torch.allclose(compressor(x, text).vectors, vectors, rtol=1e-6, atol=1e-6)


def test_rows_of_a_batch_are_those_of_one_by_one_and_padding_is_not_read() -> None:
    compressor, (x, text) = make(4), features(3)
    known = torch.ones(3, 6, dtype=torch.bool)
    known[1, 4:] = False
    together = compressor(x, text, known)
    for row in range(3):
        one = compressor(x[row], text[row][known[row]])
        torch.testing.assert_close(together.vectors[row], one.vectors, rtol=1e-5, atol=1e-5)
        assert torch.equal(together.place[row], one.place)
    several = compressor(x[:, None], text[:, None].expand(-1, 2, -1, -1))
    assert several.vectors.shape == (3, 2, 3, 4, 16)


def test_places_ascend_and_owners_are_cells() -> None:
    out = make(7)(*features())
    assert bool((out.place.diff(dim=-1) > 0).all())
    number = cells_of(GRID, 7)
    for frame in range(3):
        for slot, place in enumerate(out.place[frame].tolist()):
            mine = out.owner[frame] == slot
            assert bool(mine[place]) and len(set(number[mine].tolist())) == 1


def test_untrained_it_stays_among_the_features_of_the_cell() -> None:
    torch.manual_seed(0)
    fresh = QueryCompressor(16, 2, GRID, inner=24, heads=3)
    x, text = features()
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    vectors = fresh(x, text).vectors
    assert bool(((vectors >= low - 1e-5) & (vectors <= high + 1e-5)).all())


def test_a_question_is_asked_for() -> None:
    x, text = features()
    with pytest.raises(ModelError, match="reads the question"):
        make(1)(x)
    blind = make(1, asks=False)
    assert torch.equal(blind(x).vectors, blind(x, text).vectors)


def test_files_keep_everything(tmp_path: Path) -> None:
    compressor, (x, text) = make(4), features()
    path = base.file_of(tmp_path, "query_compressor", 4)
    base.save(compressor, path)
    again = base.load(path)
    assert again.config == compressor.config and not again.training
    assert torch.equal(again(x, text).vectors, compressor(x, text).vectors)
    assert [file.name for file in path.parent.iterdir()] == ["query_compressor-4.safetensors"]
    base.save(compressor, path, torch.float16)
    close = base.load(path)(x, text).vectors
    torch.testing.assert_close(close, compressor(x, text).vectors, rtol=0.05, atol=0.05)


def test_broken_files_are_one_line(tmp_path: Path) -> None:
    path, good = tmp_path / "broken.safetensors", tmp_path / "good.safetensors"
    base.save(make(1), good)
    state = load_file(good)
    config = {"name": "query_compressor", **make(1).config}
    bad = {"nothing": None, "no JSON": "{", "unknown name": json.dumps({**config, "name": "x"})}
    bad["another size"] = json.dumps({**config, "inner": 48})
    bad["another argument"] = json.dumps({**config, "code": "print()"})
    for text in bad.values():
        save_file(state, path, None if text is None else {"compressor": text})
        with pytest.raises(MmfastError) as caught:
            base.load(path)
        assert "\n" not in str(caught.value)
    path.write_bytes(b"not a file of tensors")
    with pytest.raises(ModelError, match="cannot be read"):
        base.load(path)


def test_a_spec_counts_tokens_of_a_frame(tmp_path: Path) -> None:
    base.save(make(4), path := tmp_path / "four.safetensors")
    x, text = features()
    tokens = mmfast.Tokens(x.flatten(0, 1), query=text, grid=(3, *GRID))
    found = mmfast.reduce(tokens, f"query_compressor:4?path={path}")
    assert isinstance(found, Reduction)
    found.check()
    assert (found.m, found.pure) == (12, False)
    vectors = make(4)(x, text).vectors.flatten(0, 1)
    assert torch.equal(found.apply(tokens.x), vectors)
    after = mmfast.reduce(tokens, f"query_compressor:4?path={path}+divprune:5")
    assert isinstance(after, Reduction) and after.m == 5
    slots = torch.searchsorted(found.keep, after.keep)
    assert torch.equal(after.apply(tokens.x), vectors[slots])
    whole = mmfast.reduce(tokens, "query_compressor:1.0")
    assert isinstance(whole, Reduction) and whole.pure and whole.m == 60
    with pytest.raises(ModelError, match="meets frames of 5 x 4"):
        turned = mmfast.Tokens(x.flatten(0, 1), query=text, grid=(3, 5, 4))
        mmfast.reduce(turned, f"query_compressor:4?path={path}")


def test_specs_are_refused_in_one_line() -> None:
    with pytest.raises(SpecError, match="tokens a frame"):
        parse("query_compressor:0.25")
    with pytest.raises(SpecError, match=r"needs a budget; write the number of .*_compressor:1'$"):
        parse("query_compressor")
    with pytest.raises(SpecError, match=r"needs a budget; write the rate .* 'compllm:2'$"):
        parse("compllm")
    with pytest.raises(SpecError, match="cannot run at site 'llm2'"):
        parse("query_compressor@llm2:1")
    with pytest.raises(SpecError, match="did you mean 'query_compressor'"):
        parse("query_compresor:1")
    with pytest.raises(SpecError, match="unknown cache"):
        parse("query_compressor:1", "cache")
    assert get("query_compressor").learned and not get("evs").learned
    assert "query_compressor" not in {method.name for method in mmfast.methods("reducer")}
