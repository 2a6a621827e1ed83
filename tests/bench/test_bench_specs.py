"""What a benchmark is asked for: presets, stages, budgets, and the private twins of a spec."""

from __future__ import annotations

import pytest
import torch

from mmfast.bench.cases import build, fill_, pick_dtype, video_features
from mmfast.bench.presets import PRESETS
from mmfast.bench.run import run_bench
from mmfast.bench.specs import Twins, expand, parse_keep, parse_stages
from mmfast.core.errors import MmfastError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import methods
from mmfast.core.spec import parse, run
from mmfast.core.tokens import Tokens
from mmfast.models.loading import pick_device


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"preset": "llava-onevision-0.5"}, ["'llava-onevision-0.5'", "llava-onevision-0.5b"]),
        ({"stages": "llm,vti"}, ["'vti'", "vit, llm, decode, ttft"]),
        ({"stages": ""}, ["vit, llm"]),
        ({"keep": "0.25,half"}, ["'half'", "0.25"]),
        ({"keep": "1.5"}, ["1.5", "(0, 1]"]),
        ({"keep": "0"}, ["0", "share"]),
        ({"keep": "nan"}, ["nan", "share"]),
        ({"reduce": ["evz:0.25"]}, ["'evz'", "'evs'"]),
        ({"reduce": ["evs:-3"]}, ["-3"]),
        ({"frames": 0}, ["--frames 0"]),
        ({"preset": "qwen3-vl-8b", "frames": 7}, ["--frames 7", "even"]),
        ({"device": "gpu"}, ["'gpu'", "cpu"]),
        ({"device": "cuda:99"}, ["'cuda:99'", "cpu"]),
        ({"dtype": "int8"}, ["'int8'", "bfloat16"]),
        ({"iters": 0}, ["--iters 0"]),
        ({"threads": -1}, ["--threads -1"]),
    ],
    ids=str,
)
def test_bad_options_are_one_line(options: dict[str, object], names: list[str]) -> None:
    with pytest.raises(MmfastError) as caught:
        run_bench(**options)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    assert all(name in message for name in names), message


def test_expand_gives_every_bare_spec_every_budget() -> None:
    specs = ["uniform", "evs:0.5", "fastv@llm3", "uniform:0.1", "random?seed=3"]
    with pytest.warns(UserWarning, match=r"--keep .*, and evs:0.5, uniform:0.1 have one, which"):
        found = expand(specs, parse_keep("0.25,64"))
    assert found == [
        *("uniform:0.25", "uniform:64", "evs:0.5", "fastv@llm3:0.25", "fastv@llm3:64"),
        *("uniform:0.1", "random:0.25?seed=3", "random:64?seed=3"),
    ]
    assert "evs:0.25" in expand([], ())
    assert expand(["evs"], ()) == ["evs"]  # it can choose for itself


def test_stages_keep_their_order() -> None:
    assert parse_stages("decode, vit") == ("vit", "decode")


@pytest.mark.parametrize("name", PRESETS)
def test_auto_dtype_fits_the_machine(name: str) -> None:
    kind = pick_dtype("auto", PRESETS[name], pick_device("cpu"))
    assert kind == (torch.bfloat16 if PRESETS[name].half else torch.float32)


def test_twins_leave_no_trace() -> None:
    before = methods("reducer")
    twins = Twins("visionzip:0.25+fastv@llm2:0.5", "x", towerless=True)
    with pytest.raises(RuntimeError), twins.registered():
        assert len(methods("reducer")) > len(before)
        raise RuntimeError
    assert methods("reducer") == before


def test_fixed_twin_repeats_the_recorded_choice() -> None:
    twins = Twins("holitom:0.25", "x", towerless=True)
    tokens = Tokens(video_features((4, 6, 6), 32), grid=(4, 6, 6))
    with twins.registered():
        (stage,) = parse(twins.spec("recorded"))
        chosen = run(stage, tokens)
        (stage,) = parse(twins.spec("fixed"))
        fixed = run(stage, tokens)
    assert isinstance(chosen, Reduction) and isinstance(fixed, Reduction)
    assert torch.equal(fixed.keep, chosen.keep) and fixed.pure
    assert len(twins.selection()) == 1
    assert twins.recordings[0].wrong() is None


def test_full_budget_goes_through_every_twin() -> None:
    assert parse(Twins("evs:0.5+fastv@llm2:0.5", "x", False).spec(keep=1.0))[1].budget == 1.0


def test_weights_are_sane() -> None:
    layer = torch.nn.Linear(2048, 700, bias=True)
    fill_(layer)
    assert layer.weight.std().item() == pytest.approx(2048**-0.5, rel=0.01)
    assert 0 < layer.bias.abs().max() < 0.2
    assert len(layer.weight.unique(dim=0)) == 700
    again = torch.nn.Linear(2048, 700)
    fill_(again)
    assert torch.equal(again.weight, layer.weight)


def test_clip_repeats_itself_but_not_everywhere() -> None:
    x = video_features((6, 12, 12), 64).unflatten(0, (6, 144))
    alike = torch.nn.functional.cosine_similarity(x[1:4], x[:3], dim=-1)
    assert (alike > 0.85).float().mean() > 0.5
    assert (alike < 0.5).float().mean() > 0.05


def test_only_what_a_stage_needs_is_built() -> None:
    llm, vit = build("tiny", ["llm"], frames=2), build("tiny", ["vit"], frames=2)
    assert len(llm.model.get_decoder().layers) == 4 and not llm.pixels
    assert len(vit.model.get_decoder().layers) == 1 and vit.pixels
    assert vit.n == llm.n == 2 * 16
