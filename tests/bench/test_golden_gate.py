"""`mmfast verify` refuses a file that does not hold just what its method computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import run
from golden_files import GOLDEN, load
from safetensors.torch import save_file

from mmfast import Reduction
from mmfast.bench import parity
from mmfast.bench.cache_parity import CACHE_DRIVERS, PREFILL_DRIVERS
from mmfast.bench.gate import ParityRow, verify
from mmfast.bench.parity import DRIVERS

NAMES = sorted(DRIVERS)
UNUSED = {"params": {"ratio", "model", "grids", "image_sizes"}, "arrays": {"in.size"}}
Arrays = dict[str, torch.Tensor]


def verified(
    tmp_path: Path, arrays: Arrays, metadata: dict[str, str], name: str = "any-1"
) -> ParityRow:
    save_file(arrays, tmp_path / f"{name}.safetensors", metadata)
    (row,) = verify(tmp_path)
    return row


def with_params(metadata: dict[str, str], change: Callable[[dict[str, Any]], object]) -> Any:
    params = json.loads(metadata["params"])
    change(params)
    return {**metadata, "params": json.dumps(params)}


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_array_is_refused(name: str, tmp_path: Path) -> None:
    arrays, metadata = load(GOLDEN / f"{name}-3.safetensors")
    bare = {key: value for key, value in metadata.items() if key != "compare"}
    for gone in arrays:
        rest = {n: a for n, a in arrays.items() if n != gone}
        for told in (metadata, bare):
            row = verified(tmp_path, rest, told)
            assert not row.ok
            assert gone in row.detail or gone in UNUSED["arrays"], row.detail


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_array_is_refused(name: str, tmp_path: Path) -> None:
    arrays, metadata = load(GOLDEN / f"{name}-1.safetensors")
    known = next(n for n in arrays if n.startswith("out."))
    for extra in ("out.other", "in.other", "other", f"{known}s", known.upper()):
        row = verified(tmp_path, {**arrays, extra: torch.zeros(3)}, metadata)
        assert not row.ok and repr(extra) in row.detail and "choices" in row.detail
    listed = {**json.loads(metadata["compare"]), "other": "exact"}
    row = verified(tmp_path, arrays, {**metadata, "compare": json.dumps(listed)})
    assert not row.ok and "'out.other'" in row.detail
    renamed = {("out.other" if n == known else n): a for n, a in arrays.items()}
    assert not verified(tmp_path, renamed, metadata).ok


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_or_missing_parameter_is_refused(name: str, tmp_path: Path) -> None:
    arrays, metadata = load(GOLDEN / f"{name}-2.safetensors")
    told = with_params(metadata, lambda params: params.update(colour=0.5))
    for extra in (told, {**metadata, "param.colour": "0.5"}):
        row = verified(tmp_path, arrays, extra)
        assert not row.ok and "unknown parameter 'colour'" in row.detail
    for gone in set(json.loads(metadata["params"])) - UNUSED["params"]:
        row = verified(tmp_path, arrays, with_params(metadata, lambda p, gone=gone: p.pop(gone)))
        assert not row.ok and gone in row.detail


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_array_is_seen_whatever_the_list_says(name: str, tmp_path: Path) -> None:
    """Of results and of inputs; a list without the array does not hide it."""
    arrays, metadata = load(GOLDEN / f"{name}-1.safetensors")
    listed = json.loads(metadata["compare"])
    for changed in [n for n in arrays if n.startswith("out.")]:
        wrong = {n: a.clone() for n, a in arrays.items()}
        flat = wrong[changed].view(-1)
        flat[0] = ~flat[0] if flat.dtype == torch.bool else flat[0] + 1
        fewer = {n: how for n, how in listed.items() if f"out.{n}" != changed}
        for compare in (listed, fewer):
            row = verified(tmp_path, wrong, {**metadata, "compare": json.dumps(compare)})
            assert not row.ok and changed.removeprefix("out.") in row.detail


def test_the_command_ends_with_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays, metadata = load(GOLDEN / "evs-1.safetensors")
    save_file(arrays, tmp_path / "evs-1.safetensors", metadata)
    assert run(capsys, "verify", str(tmp_path))[0] == 0
    save_file({**arrays, "out.other": torch.ones(2)}, tmp_path / "evs-2.safetensors", metadata)
    code, out, _ = run(capsys, "verify", str(tmp_path), "--json")
    document = json.loads(out)
    assert code == 1 and not document["ok"]
    assert [row["ok"] for row in document["rows"]] == [True, False]
    assert "'out.other'" in document["rows"][1]["detail"]


def _shifted(found: Reduction) -> Reduction:
    return replace(found, keep=(found.keep - (found.keep > 0).long()))


def _doubled(found: Reduction) -> Reduction:
    if found.mix is not None:
        return replace(found, mix=replace(found.mix, weight=2 * found.mix.weight))
    return replace(found, weight=2 * found.share(), pure=False)


def _reversed(found: Reduction) -> Reduction:
    return replace(found, order=parity.order_of(found).flip(-1))


ORDERS = ["dycoke", "holitom", "prumerge", "prumerge_plus", "tome", "visiondrop", "visionzip"]
FEATURES = [*ORDERS, "fastvid", "holitom_inner", "prunevid", "sparsevlm"]
ORDERS += ["cdpruner", "divprune"]
# The reference of prunevid tells merged features alone: no place, and no order.
PLACED = [name for name in NAMES if name not in {"prunevid", *CACHE_DRIVERS, *PREFILL_DRIVERS}]


@pytest.mark.parametrize(
    ("bug", "names"),
    [(_shifted, PLACED), (_doubled, FEATURES), (_reversed, ORDERS)],
    ids=["keep", "features", "order"],
)
def test_results_are_those_of_the_reducer(
    bug: Callable[[Reduction], Reduction], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver computes nothing that hides a wrong Reduction."""
    whole, chunk = parity.run_spec, parity.stream_stc_pruner

    def spoilt(*given: Any) -> Any:
        found = whole(*given)
        return [bug(one) for one in found] if isinstance(found, list) else bug(found)

    monkeypatch.setattr(parity, "run_spec", spoilt)
    monkeypatch.setattr(
        parity, "stream_stc_pruner", lambda *given: (bug((found := chunk(*given))[0]), found[1])
    )
    monkeypatch.setattr(Reduction, "check", lambda self: None)
    rows = {row.file: row for row in verify(GOLDEN)}
    for name in names:
        assert not rows[f"{name}-1.safetensors"].ok, name
