"""A method from one file, of a plugin or of the package: everything reads the registry."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import decode_models
import oracles
import pytest
import torch
from oracle_base import Answer, Item, pruned, ranked
from reducer_checks import check_contract
from typer.testing import CliRunner

import mmfast
from mmfast.bench.report.docs import render, write_table
from mmfast.caches.plan import plan_cache
from mmfast.cli import app
from mmfast.core import registry
from mmfast.core.errors import SpecError
from mmfast.heads.base import save_head
from mmfast.models.decoder.backbone import load_head, make_head

METHOD = '''"""Keep the longest tokens."""

from mmfast import Reduction, Tokens, register
from mmfast.ops.ranking import stable_topk


@register("longest", sites=("pre", "llm"))
def longest(tokens: Tokens, budget: int) -> Reduction:
    """Keep the tokens of greatest length.

    Args:
        tokens: `x` `[..., N, D]`.
        budget: Tokens to keep.
    """
    return Reduction.prune(stable_topk(tokens.x.double().norm(dim=-1), budget), tokens.n)
'''


def oracle(item: Item, budget: int) -> Answer:
    return pruned(item.n, ranked([float(row @ row) ** 0.5 for row in item.x])[:budget])


def install(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `pip install` leaves of a package with one module and one entry point."""
    assert len(METHOD.splitlines()) < 20
    (folder / "longest_tokens.py").write_text(source)
    info = folder / "longest_tokens-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: longest-tokens\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mmfast.plugins]\nlongest = longest_tokens\n")
    monkeypatch.syspath_prepend(folder)


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Everything as before once the test is over."""
    yield
    registry.unregister("longest")
    registry._LOADED.discard("longest_tokens")
    sys.modules.pop("longest_tokens", None)


@pytest.mark.usefixtures("forgotten")
def test_a_file_and_an_entry_point_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, METHOD, monkeypatch)
    listed = CliRunner().invoke(app, ["methods", "--json"])
    rows = {row["name"]: row for row in json.loads(listed.stdout)}
    assert rows["longest"]["summary"] == "Keep the tokens of greatest length."
    listed = "\n".join(write_table("methods", []))
    assert "[`longest`](reducers/longest.md) | baseline | pre llm&lt;K&gt; |" in listed
    for name in ("methods", "accuracy"):
        stale = f"<!-- table:{name} -->\n<!-- /table:{name} -->"
        assert "`longest`" in render(stale, tmp_path)
    method = registry.get("longest")
    assert method in mmfast.methods("reducer")
    with pytest.raises(KeyError, match="longest"):
        check_contract(method)  # no method without an oracle
    monkeypatch.setitem(oracles.ORACLES, "longest", oracle)
    check_contract(method)
    kept = mmfast.reduce(mmfast.Tokens(torch.eye(4) * torch.arange(1.0, 5)[:, None]), "longest:2")
    assert kept.keep.tolist() == [2, 3]


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (".norm(dim=-1)", ".norm(dim=-1).neg()"),  # keeps the shortest
        ("budget), tokens.n", "budget - 1), tokens.n"),  # one too few
    ],
)
def test_the_contract_finds_a_wrong_method(
    right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, METHOD.replace(right, wrong), monkeypatch)
    monkeypatch.setitem(oracles.ORACLES, "longest", oracle)
    with pytest.raises((AssertionError, mmfast.MmfastError)):
        check_contract(registry.get("longest"))


@pytest.mark.usefixtures("forgotten")
def test_a_broken_plugin_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, METHOD.replace('"longest"', '"evs"'), monkeypatch)
    for _ in range(2):
        with pytest.raises(SpecError, match=r"plugin 'longest' \(longest_tokens\).*already reg"):
            registry.methods()
    monkeypatch.undo()
    assert registry.get("evs").fn.__module__ == "mmfast.reducers.video.evs"


@pytest.mark.usefixtures("forgotten")
def test_a_plugin_takes_no_name_by_a_function_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, METHOD.replace("longest", "evs"), monkeypatch)
    with pytest.raises(SpecError, match=r"'evs' is already registered"):
        registry.methods()
    monkeypatch.undo()
    assert registry.get("evs").fn.__module__ == "mmfast.reducers.video.evs"


@pytest.mark.usefixtures("forgotten")
def test_threads_wait_for_a_plugin_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = METHOD.replace("from mmfast import", "import time\n\nfrom mmfast import", 1)
    install(tmp_path, slow.replace("@register", "time.sleep(0.3)\n\n\n@register"), monkeypatch)
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(registry.get, "longest") for _ in range(3)]
    assert {each.result().name for each in found} == {"longest"}


IN_PACKAGE = {
    "reducer": METHOD,
    "cache": '''"""Keep the newest tokens."""

import torch

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens


@register("longest", kind="cache", sites=("kv",), role="score")
def longest(tokens: Tokens, budget: int) -> Reduction:
    """Keep the newest tokens of every head."""
    keep = torch.arange(tokens.n - budget, tokens.n)
    return Reduction.prune(keep.expand(*tokens.x.shape[:-2], budget), tokens.n)
''',
    "head": '''"""Multi-token prediction under another name."""

from typing import ClassVar

from mmfast.core.registry import register
from mmfast.heads.mtp import Mtp


@register("longest", kind="head", needs=("hidden",), sites=("time",))
class Longest(Mtp):
    """Draft with independent modules."""

    name: ClassVar[str] = "longest"
''',
}


@pytest.fixture(params=IN_PACKAGE)
def added(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """One more file in the package of a kind; everything as before once the test is over."""
    kind, package = request.param, registry.PACKAGES[request.param]
    (tmp_path / "longest_file.py").write_text(IN_PACKAGE[kind])
    home = importlib.import_module(package)
    registry.methods()  # the others are loaded, so that only the new file is imported here
    monkeypatch.setattr(home, "__path__", [*home.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "_LOADED", registry._LOADED - {package})
    yield kind
    registry.unregister("longest", kind)
    sys.modules.pop(f"{package}.longest_file", None)
    vars(home).pop("longest_file", None)


def test_one_file_in_its_package_is_enough(added: str, tmp_path: Path) -> None:
    method = registry.get("longest", added)
    assert method.fn.__module__ == f"{registry.PACKAGES[added]}.longest_file"
    assert method in mmfast.methods(added)
    rows = json.loads(CliRunner().invoke(app, ["methods", "--json"]).stdout)
    assert {"name": "longest", "kind": added, "summary": method.summary}.items() <= next(
        row.items() for row in rows if row["name"] == "longest"
    )
    tokens = mmfast.Tokens(torch.eye(4) * torch.arange(1.0, 5)[:, None])
    if added == "reducer":
        assert mmfast.reduce(tokens, "longest:2").keep.tolist() == [2, 3]
    elif added == "cache":
        plan = plan_cache("longest:2")
        assert plan is not None and plan.reduce(tokens).keep.tolist() == [2, 3]
    else:
        model = decode_models.tiny()
        head = make_head("longest", model, modules=2)
        save_head(head, tmp_path / "head.safetensors")
        assert type(load_head(tmp_path / "head.safetensors", model)) is method.fn


def test_threads_that_ask_at_once_see_every_method() -> None:
    code = (
        "import threading, mmfast\n"
        "from mmfast.core.registry import get, methods\n"
        "from mmfast.models.families.adapter import families\n"
        "found, gate = [], threading.Barrier(8)\n"
        "def ask():\n"
        "    gate.wait()\n"
        "    found.append((get('evs').name, len(methods()), len(families())))\n"
        "threads = [threading.Thread(target=ask) for _ in range(8)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "assert len(found) == 8 and len(set(found)) == 1, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
