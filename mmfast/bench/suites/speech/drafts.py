"""Benchmarks of drafted speech tokens: real shapes with random weights, and trained depth heads."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmfast.bench import timing
from mmfast.bench.cases import fill_, unfilled
from mmfast.bench.registry import Tick, benchmark
from mmfast.bench.results import Row, dtype_name
from mmfast.bench.suites.speech.speed import draft_weights, trunk_weights
from mmfast.decoding import codebooks
from mmfast.decoding.drafting import parse_schedule
from mmfast.decoding.loop import SingleDecoder
from mmfast.decoding.row import Costs, Open
from mmfast.decoding.sampling import Sampling
from mmfast.heads.code_base import CodeMlp
from mmfast.heads.depth import DepthHead
from mmfast.heads.groups import GroupsHead
from mmfast.models.speech.depth_weights import csm_depth
from mmfast.ops.audio import log_mel
from mmfast.ops.weight_forms import has_bfloat16
from mmfast.tiny.speech.codec import fit_book, recordings

ROUNDS, PROMPT = 5, 8
SCHEDULES = {"vanilla": 4, "boost": 2, "1,10": 3}  # cycles that are timed, unverified


class LanguageShape(NamedTuple):
    """Sizes of a language model whose last rows of the vocabulary are audio tokens."""

    name: str = "7b"
    hidden: int = 3584
    layers: int = 28
    inner: int = 18944
    heads: int = 28
    keys: int = 4
    vocabulary: int = 168_072
    audio: int = 16_384
    modules: int = 10
    distinct: int = 2


@benchmark("speech", "shape")
def shape(tick: Tick) -> list[Row]:
    """Measure drafting on the shape of Qwen2-7B with VITA-Audio's vocabulary (arXiv 2505.03739).

    Layers and modules share the weights of two layers, which are larger than any cache. Two ideals:
    by the weights read, and with the measured cost of a pass over eleven tokens.
    """
    return shape_rows(LanguageShape(), ROUNDS, tick)


def build_language_model(shape: LanguageShape, dtype: torch.dtype) -> tuple[Any, Any]:
    """Build the backbone and the `mctp` head of a shape, on the CPU."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from mmfast.heads.mctp import Mctp
    from mmfast.models.decoder.backbone import Backbone

    sizes = {"hidden_size": shape.hidden, "intermediate_size": shape.inner}
    sizes |= {"num_hidden_layers": shape.distinct, "num_attention_heads": shape.heads}
    sizes |= {"num_key_value_heads": shape.keys, "vocab_size": shape.vocabulary}
    config = Qwen2Config(**sizes, tie_word_embeddings=True, max_position_embeddings=4096)
    with unfilled("cpu", dtype):
        model: Any = Qwen2ForCausalLM(config)
    model.tie_weights()
    fill_(model)
    layers = model.model.layers
    model.model.layers = nn.ModuleList(layers[i % shape.distinct] for i in range(shape.layers))
    config.layer_types = ["full_attention"] * shape.layers
    backbone = Backbone(model.eval(), lean=False, check=False)
    head = Mctp(_SharedTrunk(backbone, shape.distinct), shape.modules, window=1)
    return backbone, head.to(dtype).eval()


class _SharedTrunk:
    """A trunk whose new layers are its own layers in turn, which saves memory."""

    def __init__(self, backbone: Any, distinct: int) -> None:
        self._backbone, self._distinct, self._made = backbone, distinct, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backbone, name)

    def new_layer(self, ffn: int | None = None) -> nn.Module:
        self._made += 1
        layer: nn.Module = self._backbone.decoder.layers[self._made % self._distinct]
        return layer


def shape_rows(
    shape: LanguageShape, rounds: int, tick: Tick, dtype: torch.dtype | None = None
) -> list[Row]:
    """Measure a shape; None is bfloat16 where the processor multiplies it, else float32."""
    dtype = dtype or (torch.bfloat16 if has_bfloat16() else torch.float32)
    backbone, head = build_language_model(shape, dtype)
    wide = 1 + parse_schedule("1,10").most
    clocked, audio = _ClockedHead(head), slice(shape.vocabulary - shape.audio, shape.vocabulary)
    names, steps = [*SCHEDULES, timing.AGAIN, "wide"], itertools.count(1)

    def job(name: str) -> timing.Sample:
        tick(name, next(steps), (rounds + 1) * len(names))
        if name == "wide":
            return {"ms": wide_pass(backbone, wide, audio)}
        mode = "vanilla" if name == timing.AGAIN else name
        return decode(backbone, clocked, mode, SCHEDULES[mode], audio)

    jobs = {name: partial(job, name) for name in names}
    with torch.inference_mode(), timing.one_thread(), timing.frozen():
        for run in jobs.values():  # warm-up
            run()
        samples = timing.interleave(jobs, rounds)
    share = draft_weights(head, shape.audio) / trunk_weights(backbone, shape.audio)
    shared = {"preset": shape.name, "dtype": dtype_name(dtype), "distinct_layers": shape.distinct}
    shared |= {"module_share": share, "n": rounds, **timing.ON_ONE_THREAD}
    times = timing.PairedTimes.of(samples)
    return [{**shared, **_shape_row(name, times, samples, share)} for name in SCHEDULES]


def _shape_row(
    name: str,
    times: timing.PairedTimes,
    samples: Mapping[str, Sequence[timing.Sample]],
    share: float,
) -> Row:
    def middle(part: str, *jobs: str) -> float:
        return median(sample[part] for job in jobs for sample in samples[job])

    speedup, ideal = times.speedup(name), ideal_speedup(name, share)
    module, pass_ms = middle("module", name), middle("main", "vanilla", timing.AGAIN)
    wide = median(times.times["wide"])
    here = 1.0 if name == "vanilla" else ideal_speedup(name, share, wide / pass_ms)
    row = {"job": name, "score": speedup, "ms_per_token": median(times.times[name])}
    row |= {"pass_ms": pass_ms, "main_ms": middle("main", name), "wide_ms": wide}
    row |= {"module_ms": module, "module_cost": module / pass_ms, "noise": times.noise}
    row |= {"speedup": speedup, "ideal": ideal, "of_ideal": speedup / ideal}
    return row | {"ideal_here": here, "of_ideal_here": speedup / here}


class _ClockedHead:
    def __init__(self, head: Any) -> None:
        self._head, self.seconds = head, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def draft(self, *inputs: Any) -> int:
        start = time.process_time()
        ran = int(self._head.draft(*inputs))
        self.seconds += time.process_time() - start
        return ran


def ideal_speedup(schedule: str, share: float, wide: float = 1.0) -> float:
    """Ideal where a module reads `share` of a pass; one behind drafts is `wide` times as long."""
    main, drafts = parse_schedule(schedule).pairs[-1]
    return (main + drafts) / (main - 1 + wide + share * drafts)


def wide_pass(backbone: Any, tokens: int, audio: slice) -> float:
    """Measure milliseconds of the backbone over several tokens at once, to the logits of one."""
    state = backbone.state(1, PROMPT + tokens)
    state.lengths = [PROMPT]
    start = time.process_time()
    hidden = backbone.run(state, backbone.embed(torch.arange(tokens)[None]), [tokens])
    backbone.logits(backbone.norm(hidden)[:, -1], audio)
    return 1e3 * (time.process_time() - start)


def decode(
    backbone: Any, head: _ClockedHead, schedule: str, cycles: int, audio: slice
) -> dict[str, float]:
    """Measure milliseconds per token behind the first cycle, of a main pass, and of a module."""
    opening, (main, drafts) = parse_schedule(schedule).pairs[0], parse_schedule(schedule).pairs[-1]
    tokens = sum(opening) + cycles * (main + drafts)
    guide, reserve = Open(tokens, rows=audio), PROMPT + tokens + 32
    decoder = SingleDecoder(
        backbone, head, guide, schedule=schedule, verify="none", costs=Costs(), reserve=reserve
    )
    decoder.feed(list(range(PROMPT)))
    steps = iter(decoder)
    next(steps)  # the prompt
    stats, before, head.seconds = decoder.stats, replace(decoder.stats), 0.0
    start = time.process_time()
    list(steps)
    spent = time.process_time() - start
    modules = stats.draft_passes - before.draft_passes
    return {
        "ms": 1e3 * spent / (stats.tokens - before.tokens),
        "main": 1e3 * (spent - head.seconds) / (stats.passes - before.passes),
        "module": 1e3 * head.seconds / modules if modules else 0.0,
    }


WRONG = (0.0, 0.1)  # share of wrong drafts


def build_depth_decoder(**sizes: Any) -> Any:
    """Build the stock depth decoder of CSM-1B, or of other sizes."""
    from transformers import CsmDepthDecoderConfig, CsmDepthDecoderForCausalLM

    torch.manual_seed(0)
    model = CsmDepthDecoderForCausalLM(CsmDepthDecoderConfig(**sizes)).eval()
    torch.nn.init.normal_(model.codebooks_head.weight, std=0.05)
    return model


def _stock_depth(model: Any, hidden: Tensor, first: Tensor, codes: int) -> Callable[[], Tensor]:
    ids = torch.nn.functional.pad(first[:, None], (1, 0))

    def run() -> Tensor:
        said: Tensor = model.generate(
            input_ids=ids,
            backbone_last_hidden_state=hidden.clone(),
            min_new_tokens=codes,
            max_new_tokens=codes,
            do_sample=False,
        )
        return said[:, 2:]

    return run


@benchmark("speech", "depth-shape")
def depth_shape(tick: Tick) -> list[Row]:
    """Compare ways to decode a frame of CSM's real shape, relative to code by code."""
    return depth_rows(2, tick)


@torch.no_grad()
def depth_rows(rounds: int, tick: Tick, **sizes: Any) -> list[Row]:
    """Measure depth passes of CSM, or of other sizes."""
    model = build_depth_decoder(**sizes)
    core, config, choice = csm_depth(model), model.config, codebooks.CodeChoice()
    dtype = model.model.norm.weight.dtype
    hidden = torch.randn(1, config.backbone_hidden_size, dtype=dtype)
    first = torch.randint(config.vocab_size, (1,))
    right = codebooks.one_by_one(core, hidden, first, choice)
    stock = _stock_depth(model, hidden, first, core.codes)
    same = torch.equal(stock(), right)
    tokens = torch.cat([first[:, None], right[:, :-1]], dim=1)
    frame = core.begin(hidden)
    one, all_of = (partial(core.run, frame, tokens[:, :n], 0) for n in (1, core.codes))
    share = codebooks.measure_share(one, all_of, core.codes, time.process_time)
    ways: dict[str, Callable[[], Tensor]] = {
        "code by code": lambda: codebooks.one_by_one(core, hidden, first, choice),
        "stock": stock,
    }
    counts = dict.fromkeys(ways, core.codes)
    for wrong in WRONG:
        noise = torch.rand(right.shape) < wrong
        drafts = codebooks.FrameDrafts(torch.where(noise, (right + 1) % core.size, right))
        count, name = codebooks.FrameCount(core.codes), f"drafts {1 - wrong:.0%} right"
        inputs = (core, hidden, first, drafts, choice)
        codebooks.draft_and_check(*inputs, None, count)
        counts[name] = count.rounds
        ways[name] = partial(codebooks.draft_and_check, *inputs, codebooks.BlockPlan(core.codes))
        same &= torch.equal(ways[name](), right)

    shared = {"preset": "csm", "codebooks": core.codes, "share_of_a_code": share}
    shared |= {"identical": float(same)}
    extra = {name: {"passes_per_frame": counts[name]} for name in ways}
    tick("csm", 0, 1)
    rows = timing.compare_jobs(ways, rounds, shared, extra=extra)
    return [{**row, "score": row["speedup"]} for row in rows]


BOOKS, SIZE, WIDTH, STACK = 8, 64, 64, 4  # 25 frames per second
SPAN, BATCH = 24, 12


@dataclass(frozen=True, eq=False)
class FrameModel:
    """A decoder with a depth head."""

    body: Any
    head: DepthHead

    def hidden(self, codes: Tensor) -> Tensor:
        """Return hidden states `[B, T, D]` that predict the frames of codes `[B, T, K]`."""
        start = codes.new_full((len(codes), 1, BOOKS), SIZE)
        read = self.head.inputs(torch.cat([start, codes[:, :-1]], dim=1))
        hidden: Tensor = self.body(inputs_embeds=read).last_hidden_state
        return hidden


def codes_of(count: int, seed: int, books: list[Tensor] | None = None) -> tuple[Any, list[Tensor]]:
    """Return codes `[T, K]` of recordings and the codebooks; None fits new ones."""
    frames = []
    for pcm in recordings(count, seed):
        mel = log_mel(pcm[None])[0]
        whole = len(mel) // STACK
        frames.append(mel[: whole * STACK].reshape(whole, -1))
    rest, fitted, found = torch.cat(frames), books or [], []
    for at in range(BOOKS):
        book = books[at] if books else fit_book(rest, SIZE, 0.0, seed + at)[0]
        if not books:
            fitted.append(book)
        nearest = torch.cdist(rest, book).argmin(1)
        found.append(nearest)
        rest = rest - book[nearest]
    whole_codes = torch.stack(found, dim=1)
    return whole_codes.split([len(f) for f in frames]), fitted


def _spans(codes: Any, source: torch.Generator) -> Tensor:
    line = torch.cat(list(codes))
    starts = torch.randint(len(line) - SPAN, (BATCH,), generator=source)
    return torch.stack([line[s : s + SPAN] for s in starts.tolist()])


def train_frame_model(codes: Any, steps: int, seed: int = 0) -> FrameModel:
    """Train the language model and its depth head on codes."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(seed)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": 2}
    ids = {"vocab_size": 1, "bos_token_id": None, "eos_token_id": None}
    config = LlamaConfig(**ids, **sizes, num_attention_heads=4)
    head = DepthHead(WIDTH, BOOKS, SIZE, dim=WIDTH, layers=2, ffn=2 * WIDTH, per_step=False)
    model, source = FrameModel(LlamaModel(config), head), torch.Generator().manual_seed(seed)
    weights = [*model.body.parameters(), *head.parameters()]

    def loss() -> Tensor:
        spans = _spans(codes, source)
        return head.loss(model.hidden(spans), spans).loss

    _optimise(weights, steps, loss)
    model.body.eval()
    head.eval()
    return model


def _optimise(weights: list[Any], steps: int, loss: Any) -> None:
    optimiser = torch.optim.AdamW(weights, 2e-3, betas=(0.9, 0.98))
    plan = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        optimiser.zero_grad()
        loss().backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimiser.step()
        plan.step()


def train_drafters(
    model: FrameModel, codes: Any, steps: int, seed: int = 1
) -> dict[str, codebooks.Drafter]:
    """Train drafters to predict the codes of the depth head."""
    mlp, choice = CodeMlp(WIDTH, BOOKS, SIZE, 1, 2 * WIDTH), codebooks.CodeChoice()
    groups = GroupsHead(WIDTH, BOOKS, SIZE, groups=4, dim=WIDTH, layers=1, ffn=2 * WIDTH)
    source = torch.Generator().manual_seed(seed)

    def loss() -> Tensor:
        spans = _spans(codes, source)
        with torch.no_grad():
            hidden = model.hidden(spans)
            flat = hidden.flatten(0, 1)
            front = model.head.fronts(flat)
            said = codebooks.one_by_one(model.head, flat, front, choice).view_as(spans)
            before = torch.cat([spans[:, :1], spans[:, :-1]], dim=1).flatten(0, 1)
        guess = mlp.guess(flat, front, before)
        one = torch.nn.functional.cross_entropy(guess.flatten(0, 1), said.flatten())
        two = groups.loss(flat[:, None], said.flatten(0, 1)[:, None], power=None).loss
        return one + two

    _optimise([*mlp.parameters(), *groups.parameters()], steps, loss)
    made = {"copy": codebooks.copy_frame, "mlp": codebooks.parallel(mlp.eval().guess)}
    return made | {"groups": codebooks.parallel(groups.eval().guess)}


@torch.no_grad()
def draft_row(
    model: FrameModel, codes: Any, name: str, drafter: codebooks.Drafter, sampling: Sampling
) -> Row:
    """Decode frames of unseen recordings, each separately."""
    decoder = codebooks.FrameDecoder(model.head, drafter, codebooks.BlockPlan(BOOKS))
    choice, same, frames = codebooks.CodeChoice(sampling), 0, 0
    for line in codes:
        hidden = model.hidden(line[None])[0]
        for at in range(1, len(line), 4):
            one = hidden[at][None]
            said = decoder.frame(one, model.head.fronts(one), line[at - 1][None], choice)
            frames += 1
            if sampling.greedy:
                alone = codebooks.one_by_one(model.head, one, model.head.fronts(one), choice)
                same += int(torch.equal(said, alone))
    passes, mode = decoder.count.rounds / frames, f"T {sampling.temperature:g}"
    row = {"job": name, "mode": "greedy" if sampling.greedy else mode, "codebooks": BOOKS}
    row |= {"score": passes, "passes_per_frame": round(passes, 3), "n": frames}
    row["identical"] = same / frames if sampling.greedy else None
    return row | {"acceptance": decoder.count.to_dict()["acceptance"], "seed": 0, "device": "cpu"}


@benchmark("speech", "depth-drafts")
def depth_drafts(tick: Tick, count: int = 60, steps: int = 400, unseen: int = 5) -> list[Row]:
    """Measure the share of accepted drafts, codebook by codebook, and depth passes per frame."""
    tick("recordings and training", 0, 2)
    seen, books = codes_of(count, seed=0)
    fresh, _ = codes_of(unseen, seed=977, books=books)
    model = train_frame_model(seen, steps)
    found = train_drafters(model, seen, max(steps // 2, 1))
    samplings = (Sampling(), Sampling(temperature=0.8, top_k=50))
    tick("drafting", 1, 2)
    return [draft_row(model, fresh, n, found[n], way) for n in found for way in samplings]
