"""Plans, prompts and refusals of the vLLM plugin; tests/vllm/test_engine.py runs a real vLLM."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner
from vllm_positions import Model

import mmfast
from mmfast.core.errors import MmfastError, ModelError, SpecError
from mmfast.core.registry import methods
from mmfast.models.reduction.tower_signals import TOWER_SIGNALS
from mmfast.serve.config import ServerConfig
from mmfast.vllm import KNOWN, MODELS, VARIABLE, install, register
from mmfast.vllm.launch import command, launch
from mmfast.vllm.media import BASE, PrunedMedia, PrunedPrompt, digits, number, refuse, shorten
from mmfast.vllm.plan import choices, parse_plan, read_plan

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "tests" / "support" / "serve"


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")  # so that what a test sets is taken back
    monkeypatch.delenv(VARIABLE)


def signals(n: int, seed: int) -> dict[str, torch.Tensor]:
    """Attention and keys as a tower gives them."""
    rng = torch.Generator().manual_seed(seed)
    names = [name for name in TOWER_SIGNALS if name != "keys"]
    return {name: torch.rand(n, generator=rng) for name in names} | {
        "keys": torch.randn(n, 5, generator=rng)
    }


@settings(max_examples=200)
@given(
    name=st.sampled_from(choices()),
    grid=st.tuples(*[st.integers(1, 5)] * 3),
    budget=st.one_of(
        st.integers(1, 80), st.floats(0.001, 1.0).map(lambda share: round(share, 3) or 0.001)
    ),
    seed=st.integers(0, 3),
)
def test_counts_are_exact_and_choices_are_ours(
    name: str, grid: tuple[int, int, int], budget: float, seed: int
) -> None:
    n = math.prod(grid)
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))
    given = signals(n, seed)
    plan = parse_plan(f"{name}:{budget}")
    chosen = plan.reduce(x, grid, given)
    attn = given.pop("attn")
    kept = min(budget, n) if isinstance(budget, int) else budget
    ours = mmfast.reduce(mmfast.Tokens(x, attn=attn, grid=grid, signals=given), f"{name}:{kept}")
    assert not isinstance(ours, list)
    assert plan.count(grid) == ours.m == len(set(chosen.keep.tolist()))
    assert torch.equal(chosen.keep, ours.keep)
    assert torch.equal(chosen.apply(x), ours.apply(x))


@settings(max_examples=30)
@given(first=st.floats(0.05, 1.0), second=st.integers(1, 40), n=st.integers(1, 40))
def test_stages_one_after_the_other(first: float, second: int, n: int) -> None:
    plan, grid = parse_plan(f"evs:{first:.3f}+divprune:{second}"), (1, 1, n)
    kept = plan.reduce(torch.randn(n, 4), grid, {}).keep
    assert len(kept) == plan.count(grid) <= second


def test_values_that_are_not_finite_end_no_server() -> None:
    x = torch.randn(12, 4)
    x[3], x[5, 0] = float("nan"), float("inf")
    assert len(parse_plan("divprune:0.25").reduce(x, (3, 2, 2), {}).keep) == 3


def test_choices_read_the_encoder_alone() -> None:
    names = {name.partition("@")[0] for name in choices()}
    assert {"divprune", "evs", "uniform", "vidcom2", "tome", "visionzip", "holitom"} <= names
    for method in methods("reducer"):
        reads = {*method.needs} <= {"x", "grid", *TOWER_SIGNALS}
        allowed = "pre" in method.sites and method.scope == "item" and reads
        assert (method.name in names) == allowed, method.name
    assert len(names) >= 28


REFUSED = {
    "cdpruner:0.25": "question",
    "catp:0.25": "question",
    "script:0.25": "question",
    "fastv@llm2:0.5": "after the vision tower",
    "pyramiddrop@llm:0.5": "one length",
    "divprune@llm3:0.5": "after the vision tower",
    "tome@vit:0.5": "after the vision tower",
    "pixelprune": "one length",
    "evs": "must know the count",
    "  ": "empty",
    "evs:0.25?parity=true": "parity",
    "evz:0.25": "did you mean 'evs'",
    "divprune:0": "keeps nothing",
}


@pytest.mark.parametrize("spec", REFUSED)
def test_refused_in_one_line(spec: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_plan(spec)
    text = str(caught.value)
    assert REFUSED[spec] in text and "\n" not in text, text
    if REFUSED[spec] in ("question", "one length", "after the vision tower"):
        assert "divprune" in text and "fastv@pre" in text  # what to take instead


def config(**changes: Any) -> Any:
    """The parts of vLLM's configuration that matter."""
    plain = {"rate": None, "tensor": 1, "pipeline": 1, "draft": None, "embeds": False} | changes
    return SimpleNamespace(
        model_config=SimpleNamespace(
            multimodal_config=SimpleNamespace(
                video_pruning_rate=plain["rate"], enable_mm_embeds=plain["embeds"]
            )
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=plain["tensor"],
            pipeline_parallel_size=plain["pipeline"],
            use_ubatching=plain.get("halves", False),
        ),
        speculative_config=plain["draft"],
        compilation_config=SimpleNamespace(compile_mm_encoder=plain.get("compiled", False)),
        lora_config=plain.get("lora"),
    )


def test_options_that_do_not_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, tower = parse_plan("divprune:0.5"), parse_plan("visionzip:0.5")
    adapters = SimpleNamespace(enable_tower_connector_lora=False)
    refuse(config(lora=adapters), tower)
    refuse(config(tensor=2, compiled=True, embeds=True), plain)
    for plan, changes, word in (
        (plain, {"rate": 0.75}, "--video-pruning-rate"),
        (plain, {"pipeline": 2}, "--pipeline-parallel-size"),
        (plain, {"draft": object()}, "--speculative-config"),
        (plain, {"halves": True}, "--enable-dbo"),
        (
            plain,
            {"lora": SimpleNamespace(enable_tower_connector_lora=True)},
            "--enable-tower-connector-lora",
        ),
        (tower, {"tensor": 2}, "split vision tower"),
        (tower, {"compiled": True}, "compiled vision tower"),
        (tower, {"embeds": True}, "--enable-mm-embeds"),
    ):
        with pytest.raises(ModelError, match=word) as caught:
            refuse(config(**changes), plan)
        assert "\n" not in str(caught.value)
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(ModelError, match="VLLM_USE_RUST_FRONTEND"):
        refuse(config(), plain)


@given(
    ids=st.lists(st.integers(0, 3)), token=st.integers(0, 3), count=st.integers(0, 20)
)  # fmt: skip
def test_a_shorter_prompt(ids: list[int], token: int, count: int) -> None:
    out = shorten(ids, token, count)
    assert out.count(token) == min(count, ids.count(token))
    assert [i for i in out if i != token] == [i for i in ids if i != token]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_distances_survive_every_dtype(dtype: torch.dtype) -> None:
    most = BASE * BASE - 1
    far = torch.stack([torch.arange(0, most, 7)] * 3)
    far[1], far[2] = far[0].flip(0), most
    assert torch.equal(number(digits(far, torch.zeros(1, dtype=dtype))), far)


def test_without_a_spec_nothing_is_touched() -> None:
    code = (
        "import sys, mmfast.vllm; mmfast.vllm.register(); names = {*sys.modules};"
        "assert not {'vllm', 'torch', 'transformers', 'mmfast.vllm.plan'} & names, names"
    )
    environ = {k: v for k, v in os.environ.items() if k != VARIABLE}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environ)


def test_the_program_beside_vllm_needs_no_pytest() -> None:
    """`.ci/vllm` installs none there, and every test of a real engine is this program."""
    code = "import sys; sys.modules['pytest'] = None; import vllm_engine, tiny_models"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ENGINE), str(ROOT)])}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ)


class Registry:
    """The functions of vLLM that `register` calls and wraps."""

    def __init__(self) -> None:
        self.models: dict[str, str] = {}

    def register_model(self, name: str, place: str) -> None:
        self.models[name] = place

    def inspect_model_cls(self, names: list[str], model_config: Any) -> tuple[Any, str]:
        """Find what is asked for in `model_config` instead, as `--model-impl` does."""
        return SimpleNamespace(architecture=model_config or names[0]), names[0]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A module `vllm` of a version that is known."""
    module: Any = ModuleType("vllm")
    module.ModelRegistry, module.__version__ = Registry(), f"{KNOWN[0]}.1+cpu"
    monkeypatch.setitem(sys.modules, "vllm", module)
    found: Registry = module.ModelRegistry
    return found


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_with_a_spec_both_models_are_registered(registry: Registry, version: str) -> None:
    sys.modules["vllm"].__dict__["__version__"] = version
    os.environ[VARIABLE] = "divprune:0.25"
    for _ in range(3):
        register()
    assert registry.models == MODELS
    assert str(read_plan()) == "divprune@pre:0.25"
    assert not [name for name in sys.modules if name == "mmfast.vllm.qwen"]


@pytest.mark.parametrize("version", ["0.31.0", "0.320.0", "1.0.0", "dev"])
def test_an_unknown_version_stays_stock_and_says_so(
    registry: Registry, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    sys.modules["vllm"].__dict__["__version__"] = version
    with caplog.at_level(logging.WARNING, logger="vllm.mmfast"):
        assert not install("divprune:0.25")
        os.environ[VARIABLE] = "divprune:0.25"
        register()
        register()  # a further process: it inherits no spec
    assert registry.models == {} and VARIABLE not in os.environ
    assert len(caplog.messages) == 2  # one each
    assert version in caplog.messages[0] and "\n" not in caplog.messages[0]


def test_a_model_that_stays_stock_is_named_once(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    known = next(iter(MODELS))
    for _ in range(2):
        install("divprune:0.25")
    with caplog.at_level(logging.WARNING, logger="vllm.mmfast"):
        assert registry.inspect_model_cls([known], None)[1] == known
        assert caplog.messages == []
        for _ in range(2):
            registry.inspect_model_cls(["Qwen2VLForConditionalGeneration"], None)
        registry.inspect_model_cls([known], "TransformersMultiModalForCausalLM")
    assert len(caplog.messages) == 2
    for text, name in zip(caplog.messages, ("Qwen2VLFor", "TransformersMulti"), strict=True):
        assert name in text and known in text and "\n" not in text


def test_a_step_without_embeddings_adds_no_distances_again() -> None:
    """Idle ranks run the LLM on the positions of the step before, again and again."""
    model = Model(torch.zeros(3), torch.zeros(3, 3), [])
    far = digits(torch.full((3, 2), 7), torch.zeros(1))
    model.embed_input_ids(torch.zeros(3), [far], is_multimodal=torch.tensor([False, True, True]))
    positions = torch.zeros(3, 3, dtype=torch.int64)
    for _ in range(3):
        model.forward(None, positions)
    assert positions.tolist() == [[0, 7, 7]] * 3


class Encoder:
    """The parent of the plugin's model: rows of the first channel, and the calls."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def embed_multimodal(self, **given: Any) -> tuple[torch.Tensor, ...]:
        self.calls.append(given)
        grids = next(value for name, value in given.items() if "grid" in name)
        rows = next(value for name, value in given.items() if "pixel" in name or "embeds" in name)
        return rows.split([len(rows) * int(n) // int(grids.prod(-1).sum()) for n in grids.prod(-1)])


class Batches(PrunedMedia, Encoder):
    """The plugin's model without weights, for whose tower 12 tokens at once are measured."""

    def __init__(self) -> None:
        Encoder.__init__(self)
        self._most, self.visual = 12, SimpleNamespace(blocks=[])
        self.config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2))


@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize("encoded", [False, True])
def test_a_tower_gets_no_more_than_its_memory_was_measured_for(kind: str, encoded: bool) -> None:
    """A batch of vLLM is filled by kept tokens: a hundred images where it measured a few."""
    os.environ[VARIABLE] = "divprune:1"
    grids = torch.tensor([[1, 4, 4], [2, 4, 4], [1, 2, 2], [1, 16, 16], [1, 4, 4]])
    tokens = (grids.prod(-1) // 4).tolist()  # 4, 8, 1, 64, 4
    name = f"{kind}_embeds" if encoded else "pixel_values" + "_videos" * (kind == "video")
    rows = torch.arange(sum(tokens) * (1 if encoded else 4))[:, None]
    given = {name: rows, f"{kind}_grid_thw": grids, "timestamps": [[0.0], [1.0], [2.0], [3.0], []]}
    model = Batches()
    out = model.embed_multimodal(**given)
    assert torch.equal(torch.cat(out), rows) and len(out) == 5
    found = [call[f"{kind}_grid_thw"].prod(-1).sum() // 4 for call in model.calls]
    assert found == [12, 1, 64, 4]
    assert model.calls[0]["timestamps"] == [[0.0], [1.0]]


class Hashes:
    """The parent of the plugin's processor."""

    def _get_mm_hashes(self, inputs: Any) -> dict[str, list[str]]:
        return {"image": ["a", "b"], "video": []}


def test_results_of_another_spec_have_another_name() -> None:
    """Else a store of results, or a client's `uuid`, gave one spec's tokens to the other."""
    prompt: Any = type("Prompt", (PrunedPrompt, Hashes), {})()
    found = {}
    for spec in ("divprune:0.25", "divprune:0.5", "evs:0.25", "divprune:0.25"):
        os.environ[VARIABLE] = spec
        names = prompt._get_mm_hashes(None)
        assert found.setdefault(spec, names) == names and names["video"] == []
    assert len({name for names in found.values() for name in names["image"]}) == 6


def test_a_wrong_spec_ends_the_server_in_one_line(registry: Registry) -> None:
    os.environ[VARIABLE] = "cdpruner:0.25"
    with pytest.raises(SystemExit, match=r"^mmfast: 'cdpruner' looks at the question.*choices"):
        register()
    assert registry.models == {}


def test_the_command_of_the_server() -> None:
    server = ServerConfig(
        engine="vllm", model="m", reduce="evs:0.5", port=9, api_keys=("a", "b"), context=512
    )
    words = command(server)
    assert words[1:5] == ["-m", "mmfast.vllm", "serve", "m"]
    pairs = dict(pairwise(words[5:]))
    assert pairs["--port"] == "9" and pairs["--max-model-len"] == "512"
    assert words[words.index("--api-key") :][:3] == ["--api-key", "a", "b"]
    assert pairs["--allowed-media-domains"] == "none.invalid"  # no media from elsewhere
    allowed = command(ServerConfig(engine="vllm", model="m", remote_hosts=("x.org", "y.org")))
    assert allowed[allowed.index("--allowed-media-domains") :][1:3] == ["x.org", "y.org"]


def refused(tmp_path: Path) -> dict[str, ServerConfig]:
    (tmp_path / "config.json").write_text('{"architectures": ["LlavaForConditionalGeneration"]}')
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "config.json").write_text('{"architectures": [')

    def made(**options: Any) -> ServerConfig:
        return ServerConfig(engine="vllm", **({"model": "m"} | options))

    return {
        "needs a --model": made(model=None),
        "does not know the embedded tiny-video": made(model="tiny-video"),
        "/nowhere' does not exist": made(model=str(tmp_path / "nowhere")),
        "--cache has no effect": made(cache="snapkv:64"),
        "--demo has no effect": made(demo=False),
        "--max-tokens has no effect": made(max_tokens=5),
        "sha256": made(api_keys=("sha256:" + "0" * 64,)),
        "looks at the question": made(reduce="cdpruner:0.5"),
        "is LlavaForConditionalGeneration": made(model=str(tmp_path), reduce="evs:0.5"),
        "is no JSON object": made(model=str(tmp_path / "cut"), reduce="evs:0.5"),
    }


def test_what_the_server_cannot_have_is_refused(tmp_path: Path) -> None:
    for text, server in refused(tmp_path).items():
        with pytest.raises(MmfastError, match=text) as caught:
            command(server)
        assert "\n" not in str(caught.value)


def test_vllm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmfast.vllm.launch.find_spec", lambda name: None)
    with pytest.raises(MmfastError, match="pip install vllm"):
        launch(ServerConfig(engine="vllm", model="m"))


def test_the_spec_reaches_vllm_and_an_older_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("mmfast.vllm.launch.find_spec", lambda name: name)
    monkeypatch.setattr(os, "execvpe", lambda *given: seen.append(given))
    os.environ[VARIABLE] = "uniform:3"
    launch(ServerConfig(engine="vllm", model="m", reduce="evs:0.5", api_keys=("secret",)))
    launch(ServerConfig(engine="vllm", model="m"))
    assert seen[0][2]["VLLM_API_KEY"] == "secret" and "secret" not in seen[0][1]
    assert seen[0][2][VARIABLE] == "evs:0.5" and VARIABLE not in seen[1][2]
    assert seen[0][0] == sys.executable and "m" in seen[0][1]


def test_an_open_port_is_told_of_as_with_the_other_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmfast.cli import app

    def started(*_: Any) -> None:
        raise SystemExit(0)

    monkeypatch.setattr("mmfast.vllm.launch.find_spec", lambda name: name)
    monkeypatch.setattr(os, "execvpe", started)
    words = ["serve", "--engine", "vllm", "--model", "m", "--host", "0.0.0.0"]
    for more, told in (([], True), (["--api-key", "k"], False)):
        result = CliRunner().invoke(app, [*words, *more])
        assert result.exit_code == 0
        assert ("may ask without a key" in result.stderr) == told


def test_the_command_line_refuses_before_anything_is_loaded() -> None:
    from mmfast.cli import app

    words = ["serve", "--engine", "vllm", "--model", "m", "--reduce", "cdpruner:0.3", "--dry-run"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code != 0


def test_no_number_is_fetched_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """One transfer is what the tests of vLLM allow its own VidCom2."""
    plan, x = parse_plan("vidcom2:96"), torch.randn(192, 64)
    plan.reduce(x, (4, 6, 8), {})

    def fetched(*_: Any) -> Any:
        raise AssertionError("a number was fetched")

    for name in ("item", "tolist", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, fetched)
    assert plan.reduce(x, (4, 6, 8), {}).keep.shape == (96,)


PEER = """
import torch
from mmfast.vllm.plan import parse_plan

def compute_retained_tokens_count(tokens_per_frame, num_frames, q):
    total = tokens_per_frame * num_frames
    return max(num_frames, min(int(total * (1.0 - q)), total))

def compute_retention_mask(video_embeds, video_size_thw, spatial_merge_size, q):
    frames, rows, columns = (int(n) for n in video_size_thw)
    grid = frames, rows // spatial_merge_size, columns // spatial_merge_size
    mask = torch.zeros(len(video_embeds), dtype=torch.bool)
    if len(mask):
        count = compute_retained_tokens_count(grid[1] * grid[2], frames, q)
        mask[parse_plan(f"vidcom2:{count}").reduce(video_embeds, grid, {}).keep] = True
    return mask
"""


PEERS = {"vidcom2": PEER, "evs": "from vllm_positions import recompute_mrope_positions"}
FAULTS = {
    "vidcom2": "plan = parse_plan('evs:1')\nparse_plan = lambda text: plan",
    "evs": "from mmfast.vllm import media\nmedia.number = lambda rows: rows[:, :3].T.long() * 0",
}
# That one asks for exactly one transfer; the test above shows that there is none.
LEFT_OUT = "test_mask_reads_frame_budgets_once"


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("fault", [False, True])
def test_their_tests_pass_with_our_functions(tmp_path: Path, name: str, fault: bool) -> None:
    """`MMFAST_VLLM_TESTS` names vLLM's folder `tests`: that of 0.32 has VidCom2's, later ones both.

    With a planted fault they fail.
    """
    theirs = Path(os.environ.get("MMFAST_VLLM_TESTS", "/none"), "multimodal", f"test_{name}.py")
    if not theirs.is_file():
        pytest.skip(f"MMFAST_VLLM_TESTS names no folder with multimodal/test_{name}.py of vLLM")
    folder = tmp_path / "vllm" / "multimodal" / "video_prune"
    folder.mkdir(parents=True)
    (folder / f"{name}.py").write_text(f"{PEERS[name]}\n{FAULTS[name] if fault else ''}")
    copy = tmp_path / theirs.name
    copy.write_text(theirs.read_text())
    words = ["-q", "-c", os.devnull, "-p", "no:cacheprovider", str(copy), "-k", f"not {LEFT_OUT}"]
    places = (tmp_path, ROOT, ENGINE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == int(fault), done.stdout
    assert " passed" in done.stdout and (" failed" in done.stdout) == fault
