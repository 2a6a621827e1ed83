"""Questions about images and clips: read, prompt, reduce, generate, account."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import StopStringCriteria

from mmfast.attach import attach, handle_of, recorded, turn_of
from mmfast.caches.plan import call_plan
from mmfast.core.errors import MediaError, MmfastError, warn
from mmfast.core.spec import AUTO, Spec, parse
from mmfast.core.trace import Row, Trace, peak_bytes
from mmfast.decoding.speculation import plan_decode
from mmfast.frontends.image import kind_of, read_image
from mmfast.frontends.source import is_encoded, rereadable
from mmfast.frontends.video.reader import read_video
from mmfast.models.attention import with_attn
from mmfast.models.context import placeholders
from mmfast.models.cost import FirstToken, encoder_timer
from mmfast.models.decoder.draft_stage import DraftSource, check_decode
from mmfast.models.decoder.few_rows import few_rows
from mmfast.models.decoder.grouped import grouped
from mmfast.models.doubt import Doubt, StepRecorder, check_plain, detector_of, doubts
from mmfast.models.families.adapter import add_views, check_media, token_counts
from mmfast.models.image_guard import made_guard, watching
from mmfast.models.kv.room import growing_cache
from mmfast.models.loading import load
from mmfast.models.prompt import (
    MediaPart,
    ScopeWarning,
    Shot,
    check_question,
    is_chat,
    read_chat,
    scope_note_of,
    summed,
    user_inputs,
)
from mmfast.models.reduction.check import check
from mmfast.models.text_stream import reader_left, stream_text, stripped
from mmfast.models.wrappers import stock_model
from mmfast.pipelines.answer import Answer, AnswerStream
from mmfast.pipelines.generation import (
    CALL,
    GENERATE,
    beams_of,
    by_length,
    check_seed,
    merged,
    pair_up,
    seeded,
    several,
)
from mmfast.pipelines.options import checked, named, portable, within
from mmfast.pipelines.planning import PipelinePlanner, Tick
from mmfast.pipelines.registry import task
from mmfast.planner.arithmetic import use_weights
from mmfast.planner.plan import Plan
from mmfast.planner.target import Target, automatic, check_alone, checked_by, make_target
from mmfast.prefill.plan import plan_prefill
from mmfast.streams.reuse.media import MediaReuse
from mmfast.streams.reuse.modules import PromptModules
from mmfast.streams.reuse.plan import check_beside, parse_reuse
from mmfast.streams.reuse.schema import ModulePrompt
from mmfast.streams.reuse.store import ReuseStore, store_of

MEDIA = ("text", "images", "videos")
MODULES = "modules"  # of inputs: a prompt from modules, and its question
TARGET = named(make_target)


@dataclass(frozen=True)
class BegunCall:
    """Questions that were read, and planned for; `items` counts the media of each."""

    inputs: dict[str, Any]
    items: list[int]
    notes: list[str]
    reading: Trace
    start: float  # of the call, by the clock
    how: dict[str, Any]  # arguments of `generate`
    reduce: str | Sequence[Spec] | None
    plan: Plan | None


class VisualQA:
    """Answer questions about images or clips with any supported checkpoint.

    Args:
        model: None (embedded), a directory, a hub id, a model, or a `(model, processor)` pair.
        processor: Object, directory or hub id; None takes the model's.
        model_kwargs: Arguments of `from_pretrained`: `device_map`, `quantization_config`,
            `attn_implementation`, `revision` and so on. A model that they place, or quantise, is
            not moved. Remote code and weights that are no safetensors are refused.
        reduce: Spec string such as `"evs:0.25"` or `"divprune:0.5+fastv@llm3:0.5"`, or `"auto"`:
            the planner chooses, for balanced quality unless a target says otherwise. Under
            `"auto?check=0.8&every=4"` all tokens lead to a share of the tokens of answers, too, or
            later ones keep more (`docs/guides/choose.md`).
        cache: Spec string of what happens to keys and values, such as `"snapkv:1024"` (evict
            behind the prompt), `"sink:4+window:512"` (at every step) or `"quant:4"` (fewer bits);
            the trace gets a row `kv`. See `mmfast.attach`.
        encoder: None (stock), `"fast"`, `"compile"`, `"graph"` or `"riformer:2"`: how the vision
            tower runs.
        decode: Draft and verify, such as `"self:0.1"` or `"recycle"`: the same answer in fewer
            passes (another one under `bild:`); the trace gets a row `draft`. What drafts is made
            once and learns from question to question. See `mmfast.decoding.speculation`.
        prefill: What a long prompt reads, such as `"sample_attention:0.95"`: its attention goes to
            chosen blocks of keys; the trace gets a row `sparse`.
        attn: Attention back end of a model that is loaded: `"sdpa"`, `"eager"`,
            `"flash_attention_2"`, `"flash_attention_3"` or `"flex_attention"`.
        reuse: What is kept of media for later questions: `"encoder"` (outputs of the tower),
            `"prefix"` (and keys and values of a shared beginning, bit for bit) or `"blend:0.15"`
            (and of pictures seen elsewhere, of which every layer reads that share of the tokens
            again; with `"kvcomm"` none, but offsets that other pictures tell). Questions of a
            batch are then asked one by one.
        check: Judge every token of an answer by the detector beside the weights (`Answer.doubts`):
            which words are probably made up. Plain decoding alone.
        guard: What refuses harmful pictures: an `ImageGuard`, a JSON file of one, or a CLIP's name.
        store: A `mmfast.ReuseStore` that pipelines share, or a folder of one; None: 1 GB of main
            memory.
        device: `cpu`, `cuda`, `cuda:1`; None picks CUDA where there is one.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        weights: Linear layers of the decoder on packed weights, on a CPU: `"int8"`, `"int4"`,
            `"float16"`, `"bfloat16"`, `"int8-dynamic"` (activations, too), or `"fastest"`, which
            measures once what this device does best; the trace has a note of it.
        frames: Frames sampled uniformly from a clip.
        fps: Sample at this rate instead.
        max_new_tokens: Longest answer in tokens; None: 128.
        batch_size: Questions answered in one forward pass.
        target_ttft_ms: Milliseconds to the first token; the planner picks method and budget.
        target_tokens: Visual tokens of a prompt that a decoder layer works on, on average.
        max_memory: Bytes of weights, keys and values, and activations: `"2GB"` or a number. Those
            of a draft model count.
        quality: `high` (a point of accuracy at most), `balanced` (three) or `fast` (the best at a
            tenth of the tokens).
        **generate: Further arguments of the model's `generate`, such as `temperature`, `top_p`,
            `do_sample`, `generation_config`; and `seed`, which repeats what is drawn.

    Raises:
        SpecError: Wrong `reduce` or `cache`, before any weight is read.
        MmfastError: An unknown option or value, before any weight is read; a target that nothing
            can meet, or one beside `reduce`.
        ModelError: The checkpoint, or the model that drafts, cannot be loaded.
    """

    task: str
    tick: Tick | None = None  # called while the device is measured, instead of a bar
    kind = "video"  # or `image`

    @checked(CALL, GENERATE)
    def __init__(
        self,
        model: Any = None,
        *,
        processor: Any = None,
        model_kwargs: Mapping[str, Any] | None = None,
        reduce: str | None = None,
        cache: str | None = None,
        encoder: str | None = None,
        decode: str | None = None,
        prefill: str | None = None,
        attn: str | None = None,
        reuse: str | None = None,
        check: bool = False,
        guard: Any = None,
        store: ReuseStore | str | Path | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        weights: str | None = None,
        frames: int = 8,
        fps: float | None = None,
        max_new_tokens: int | None = None,
        batch_size: int = 1,
        target_ttft_ms: float | None = None,
        target_tokens: int | None = None,
        max_memory: str | int | None = None,
        quality: str | None = None,
        **generate: Any,
    ) -> None:
        self._own = {"max_new_tokens": max_new_tokens, **generate}
        with within(self.task):
            target = make_target(target_ttft_ms, target_tokens, max_memory, quality)
            reduce, self.target = automatic(reduce, target, cache)
            specs, plan, self.decode = parse(reduce), call_plan(cache), plan_decode(decode)
            again = parse_reuse(reuse)
            check_beside(again, specs, plan, self.decode, prefill)
            self.prefill = plan_prefill(prefill)
            model_kwargs = with_attn(model_kwargs, attn, model)
            if again is None and store is not None:
                raise MmfastError("store= keeps nothing without reuse=; give reuse='prefix' too")
            check_alone(self.target, reduce)
            self.check = check
            self.generate = merged(self._own, {})
            check_plain(check, self.decode is not None, self.generate)
        self.embedded, self.warned = model is None, False  # of what is outside its scope
        self.reduce: str | Sequence[Spec] | None = specs
        self._spec = reduce  # as the caller wrote it
        self.cache, self.encoder = plan, encoder
        self.frames, self.fps, self.batch_size = frames, fps, batch_size
        self.model, self.processor = load(model, device, dtype, processor, model_kwargs)
        if check:
            detector_of(self.model)  # an error of its own where there is none
        self.guard = made_guard(guard, self.model, specs, again, encoder, self.target)
        self.packing = use_weights(self.model, weights, model)
        self._inside = (plan, encoder, self._drafts(), self.prefill)
        self.reuse: MediaReuse | None = None
        if again is not None:
            self.reuse = MediaReuse(self.model, self.processor, again, store_of(store))
        self._name = model
        self._planner: PipelinePlanner | None = None

    def __getstate__(self) -> dict[str, Any]:
        return portable(self)

    @property
    def drafts(self) -> DraftSource | None:
        """The source of drafts for all questions, if any."""
        return self._inside[2]

    def _drafts(self) -> DraftSource | None:
        """Return what drafts for all questions, as it learns from one to the next."""
        if self.decode is None:
            return None
        model = stock_model(self.model, "decode=")
        specs: Any = AUTO if self.target else self.reduce or ()
        check_decode(self.decode, model, specs, self.cache)
        with turn_of(model):  # a twin of it has none of the hooks of a call
            return DraftSource(model, self.decode)

    @abstractmethod
    def _read(self, media: Any, trace: Trace | None = None) -> list[Shot]:
        """Decode what one question is about; `trace` notes what is left out."""

    @checked({*CALL, *TARGET, *MEDIA, "batch_size"}, GENERATE)
    def __call__(self, media: Any = None, question: Any = None, **options: Any) -> Any:
        """Answer one question, or a list of them.

        Args:
            media: A clip or image; a list gives a list of answers. Or modules (`PromptSchema`), or
                a conversation: messages as transformers takes them; or a list of those.
            question: A question; a list goes with a list of media, or with one that all share.
            **options: As transformers calls them: `text`, the question or conversation, and
                `images` or `videos`, a list of which goes with one question, or fills the parts of
                a conversation that have no source. Instead of those of the pipeline: `batch_size`,
                `seed`, arguments of `generate`; `target_ttft_ms`, `target_tokens`, `max_memory` or
                `quality`. A latency out of reach warns and takes the fastest plan.

        Returns:
            An `Answer`, or a list of them where `media` or `question` is a list, [] of empty ones.

        Raises:
            MediaError: The input cannot be read.
            MmfastError: Empty question, lists of different lengths, an unknown option, or a target
                that nothing meets.
        """
        size = options.pop("batch_size", None) or self.batch_size
        size = size if self.reuse is None else 1
        pairs, many, wanted, how = self._asked(media, question, options)
        answers: list[Answer] = []
        for at in range(0, len(pairs), size):
            answers += by_length(
                pairs[at : at + size], lambda each: self._answer(each, wanted, how)
            )
        return answers if many else answers[0]

    @checked({*CALL, *TARGET, *MEDIA}, GENERATE)
    def stream(self, media: Any = None, question: Any = None, **options: Any) -> AnswerStream:
        """Answer one question, as a call does, in text deltas that joined are the answer.

        Behind its last delta `.answer` of what is returned has the `Answer`.
        """
        pairs, many, wanted, how = self._asked(media, question, options)
        if many or beams_of(self.model, how) > 1:
            raise MmfastError("stream() answers one question, and without num_beams; call the pipe")
        begun, told = self._begun(pairs, wanted, how), list[Answer]()

        def generate(streamer: Any, criteria: Any) -> None:
            told.extend(self._told(begun, streamer, criteria))

        own = how.get("stopping_criteria") or ()
        return AnswerStream(stripped(stream_text(self.processor.tokenizer, generate, own)), told)

    def _asked(
        self, media: Any, question: Any, options: dict[str, Any]
    ) -> tuple[list[tuple[Any, Any]], bool, Target, dict[str, Any]]:
        """Media with questions, or conversations with None; whether they were a list; options."""
        given = {k: v for k in MEDIA if (v := options.pop(k, None)) is not None}
        text, own = given.pop("text", None), f"{self.kind}s"
        with within(self.task):
            wanted = self._wanted({k: options.pop(k) for k in TARGET if k in options})
            how = merged(self._own, options)
            check_plain(self.check, False, how, self.model)
            check_seed(how, self.model)
        for name in given.keys() - {own}:
            raise MediaError(f"{self.task} takes no {name}=; use {name[:-1]}-qa")
        if (given and media is not None) or (text is not None and question is not None):
            raise MmfastError(f"media and {own}=, or question and text=, are both given; give one")
        media, question = given.get(own, media), text if question is None else question
        lists = [each for each in (media, question) if isinstance(each, list)]
        if lists and not any(lists) and not (given and isinstance(question, str)):
            return [], True, wanted, how
        if isinstance(media, Mapping):
            raise MmfastError(
                f"{self.task} takes no dict of {', '.join(map(repr, media))}; give the {self.kind} "
                f"and the question one after the other, or by name: {own}=…, text=…"
            )
        chat, fill = (media, None) if question is None else (question, media)
        chats = [chat] if is_chat(chat) else chat
        if isinstance(chats, (list, tuple)) and chats and all(map(is_chat, chats)):
            if fill is not None and chats is chat:
                raise MmfastError(f"{own}= goes with one conversation; write them inside of each")
            own_parts = [] if fill is None else fill if several(fill, own) else [fill]
            return [(read_chat(c, own_parts), None) for c in chats], chats is chat, wanted, how
        if media is None:
            raise MmfastError(f"there is no {self.kind} to ask about; give one, or a conversation")
        if given and own == "images" and isinstance(media, list):  # all are of one question
            one = isinstance(question, str)
            media = tuple(media) if one else [tuple(m) if type(m) is list else m for m in media]
        pairs, many = pair_up(media, question, own == "images")
        if wanted and any(isinstance(each, ModulePrompt) for each, _ in pairs):
            raise MmfastError("modules are read before a target is planned; leave the target out")
        return pairs, many, wanted, how

    @checked(TARGET)
    def plan(
        self,
        media: Any,
        question: str,
        target: Target | None = None,
        tick: Tick | None = None,
        **limits: Any,
    ) -> Plan:
        """Plan a call that meets a target, without answering.

        Args:
            media: A clip or image.
            question: A question.
            target: What to meet; or as `limits`, those of a call.
            tick: Called with (steps done, steps, what is measured) while the device is measured.
            **limits: `target_ttft_ms` and so on.

        Raises:
            MmfastError: Nothing meets the target; says what the best plan reaches.
        """
        wanted, start = target or self._wanted(limits), time.perf_counter()
        inputs, items = self._inputs([(media, check_question(question))], Trace())
        return self.planner.plan(inputs, items, wanted, start, True, tick, self.generate)[0]

    @property
    def planner(self) -> PipelinePlanner:
        """Made when it is first asked for: most pipelines never plan."""
        if self._planner is None:
            self._planner = PipelinePlanner(self, self._name, self.target.check)
        return self._planner

    def _wanted(self, target: dict[str, Any]) -> Target:
        wanted = checked_by(make_target(**target), self.target.check) if target else self.target
        check_alone(wanted, self._spec)
        return wanted

    def _inputs(
        self, pairs: list[tuple[Any, Any]], trace: Trace, notes: list[str] | None = None
    ) -> tuple[dict[str, Any], list[int]]:
        """Return the model's inputs, and the number of images or clips of each question.

        `notes` gets a line each on what is outside the scope of the embedded model, or "".
        """
        if any(isinstance(media, ModulePrompt) for media, _ in pairs):
            ((prompt, question),) = pairs  # with a store, questions are asked one by one
            with turn_of(self.model), trace.stage("read"):
                self.modules.placed(prompt.schema)
            (notes if notes is not None else []).append("")
            return {MODULES: (prompt, question)}, [0]
        with trace.stage("read"):
            chats = [self._chat(media, question, trace) for media, question in pairs]
            pairs[:] = [(chat, None) for chat in chats]  # nothing is read twice
        said = [[part for turn in chat for part in turn["content"]] for chat in chats]
        shots = [[part for part in mine if isinstance(part, Shot)] for mine in said]
        if self.guard:
            self.guard.look([each for mine in shots for each in mine], trace)
        with turn_of(self.model), trace.stage("preprocess"):  # padding is a state of tokenizers
            reduced = bool(self.reduce or self.target)
            inputs = user_inputs(self.processor, chats, self.model, reduced)
            (notes if notes is not None else []).extend(map(self._note, chats))
        return inputs, list(map(len, shots))

    def _note(self, chat: list[dict[str, Any]]) -> str:
        """Return a line on what is outside the scope of the embedded model, and warn once of it."""
        asked = [turn["content"] for turn in chat if turn["role"] == "user"]
        note = scope_note_of(asked) if self.embedded else ""
        if note and not self.warned:
            self.warned = True
            warn(note, ScopeWarning)
        return note

    def _chat(self, media: Any, question: str | None, trace: Trace) -> list[dict[str, Any]]:
        """Messages of texts and decoded media, of a question or of a conversation (None)."""
        if question is not None:
            return [{"role": "user", "content": [*self._read(media, trace), question]}]
        read = []
        for message in media:
            parts: list[Any] = []
            for part in message["content"]:
                if isinstance(part, MediaPart) and part.kind != self.kind:
                    raise MediaError(f"{self.task} takes no {part.kind}; use {part.kind}-qa")
                seen = isinstance(part, MediaPart)
                parts += self._read(part.source, trace) if seen else [part]
            read.append({**message, "content": parts})
        return read

    def _answer(
        self, pairs: list[tuple[Any, Any]], target: Target, how: dict[str, Any]
    ) -> list[Answer]:
        return self._told(self._begun(pairs, target, how))

    def _begun(
        self, pairs: list[tuple[Any, Any]], target: Target, how: dict[str, Any]
    ) -> BegunCall:
        start, reading, notes = time.perf_counter(), Trace(), list[str]()
        inputs, items = self._inputs(pairs, reading, notes)
        reduce, plan = self.reduce, None
        if target:
            plan, start = self.planner.planned(inputs, items, target, start, how, reading)
            reduce = plan.spec if plan else None
        return BegunCall(inputs, items, notes, reading, start, how, reduce, plan)

    def _told(self, begun: BegunCall, streamer: Any = None, criteria: Any = ()) -> list[Answer]:
        """Generate, account and check; a reader of `streamer` has `criteria` beside it."""
        inputs, plan, first = begun.inputs, begun.plan, FirstToken(then=streamer)
        more = {"stopping_criteria": criteria} if criteria else {}
        how, cache, begin = begun.how, plan.cache if plan else None, time.perf_counter()
        with (
            turn_of(self.model),
            encoder_timer(self.model) as encode,
            self._attached(inputs, begun.reduce, how, cache) as (trace, given),
            StepRecorder().on(self.model) if self.check else nullcontext() as recorder,
            watching(self.guard, self.model, trace, sum(begun.items)),
            recorded(self.model, trace),
        ):
            output = self.run(given, how, streamer=first, **more)
        end = time.perf_counter()
        first.at = first.at or end  # under beam search no token is certain before
        kind = "video" if "pixel_values_videos" in inputs else "image"
        each = token_counts(self.model, kind, inputs, trace) if any(begun.items) else []
        counts = summed(each, begun.items)
        if MODULES in inputs:
            counts = [self.modules.counts(inputs[MODULES][0], given["input_ids"])]
        if each:
            add_views(self.model, kind, inputs, trace)
        prompt = given["input_ids"].shape[1]
        # "vit" and "guard" are parts of encode, and "draft" of generate
        inside = sum(row.ms for row in trace.rows if row.stage not in ("vit", "guard", "draft"))
        trace.add("prefill", prompt, 1, (first.at - begin) * 1e3 - encode.ms - inside)
        trace.add("generate", 1, output.shape[1] - prompt, (end - first.at) * 1e3)
        visual = sum(n for n, _ in counts)
        if self.packing is not None:
            trace.notes.append(self.packing.note)
        encoding = Row("encode", visual, visual, encode.ms, peak_bytes())
        trace.rows[:0], trace.notes[:0] = [*begun.reading.rows, encoding], begun.reading.notes
        texts = self.processor.batch_decode(output[:, prompt:], skip_special_tokens=True)
        ttft = (first.at - begun.start) * 1e3
        told: list[tuple[Doubt, ...]] = [()] * len(texts)
        if recorder is not None:
            with trace.stage("check"):
                told = doubts(self.model, self.processor.tokenizer, recorder, output[:, prompt:])
        if plan is not None and not reader_left(criteria):
            self.planner.check(plan, inputs, how, output[:, prompt:], trace)
        return [
            Answer(text.strip(), trace, ttft, n, m, plan, note, doubt)
            for text, (n, m), note, doubt in zip(texts, counts, begun.notes, told, strict=True)
        ]

    @contextmanager
    def _attached(
        self,
        inputs: dict[str, Any],
        reduce: str | Sequence[Spec] | None,
        how: Mapping[str, Any],
        cache: str | None = None,  # of a plan
    ) -> Iterator[tuple[Trace, dict[str, Any]]]:
        """Attach what acts inside the model; the trace, and what `generate` is to be given."""
        if self.reuse is None:
            inside = (call_plan(cache), *self._inside[1:]) if cache else self._inside
            with attach(self.model, reduce, *inside) as trace:
                yield trace, inputs
            return
        config = getattr(self.model, "generation_config", None)
        check_beside(self.reuse.plan, reduce, self.cache, generate=how, config=config)
        if self.reuse.plan.prefix and (other := handle_of(self.model)) is not None:
            raise MmfastError(
                f"{self.task}: {other.what!r} is attached to the model and would not act beside "
                f"reuse={str(self.reuse.plan)!r}; detach it, or use reuse='encoder'"
            )
        specs = check(parse(reduce), self.model, self.cache, self.encoder)
        behind = () if self.reuse.plan.prefix else [s for s in specs if s.site != "vit"]
        with attach(self.model, behind, *self._inside) as trace:
            beams = beams_of(self.model, how)
            if own := inputs.get(MODULES):
                yield trace, self.modules.inputs(own[0], own[1], beams, trace)
            else:
                yield trace, self.reuse.inputs(inputs, specs, self.encoder, beams, trace)
        self.reuse.store.flush()

    @cached_property
    def modules(self) -> PromptModules:
        """Modules of schemas; MmfastError without `reuse=` of keys and values, or with a guard."""
        if self.guard:
            raise MmfastError("guard= does not see the pictures of modules; leave it out")
        specs = check(parse(self.reduce), self.model, self.cache, self.encoder)
        return PromptModules(self.reuse, self._read, specs, self.encoder)

    def overlay(self, media: Any, trace: Trace, item: int = 0, *, sheets: bool = True) -> list[Any]:
        """Pictures of what the stages kept, merged and dropped; see `mmfast.overlay`.

        The media is what was asked about, and is read again; `item` is the number of its first
        image or clip, where several were asked about in a batch. Returns a PIL image per image or
        clip, or without `sheets` a list of `(frame, caption)` each.
        """
        from mmfast.pipelines.overlay import draw_shots

        return draw_shots(self._read(media), self.processor, trace, item, sheets)

    def run(
        self, inputs: dict[str, Any], how: Mapping[str, Any] | None = None, **extra: Any
    ) -> torch.Tensor:
        """Stock `generate` as `how` says, else as the pipeline does, and without placeholders."""
        how = {**(self.generate if how is None else how), **extra}
        # A checkpoint may ask for outputs of another shape.
        how = {"return_dict_in_generate": False, "num_return_sequences": 1, **how}
        blocked = {*placeholders(self.model), *(how.pop("suppress_tokens", None) or ())}
        if beams_of(self.model, how) > 1:
            how.pop("streamer", None)
        tokenizer, config = self.processor.tokenizer, getattr(self.model, "generation_config", None)
        if (seed := how.pop("seed", None)) is not None:
            how["custom_generate"] = seeded(seed, how.get("streamer"))
            if strings := how.pop("stop_strings", None):  # other loops get no tokenizer
                ends = StopStringCriteria(tokenizer, strings)
                how["stopping_criteria"] = [*(how.get("stopping_criteria") or ()), ends]
        if how.get("stop_strings") or getattr(config, "stop_strings", None):
            how["tokenizer"] = tokenizer
        cache = growing_cache(self.model, {**inputs, **how})
        # The last bits of a model on rounded weights are not those of the stock model anyway.
        packed = self.packing is not None and self.packing.plan
        steps = grouped(self.model, steps=True) if packed else nullcontext()
        with torch.inference_mode(), steps, few_rows(self.model):
            output: torch.Tensor = self.model.generate(
                **inputs, **cache, suppress_tokens=sorted(blocked) or None, **how
            )
        return output


@task("image-qa", aliases=("image-text-to-text",))
class ImageQA(VisualQA):
    """Answer questions about images: path, bytes, file object, PIL image or array.

    A tuple of images is one input: the question is about all of them together.
    """

    kind = "image"

    def _read(self, media: Any, trace: Trace | None = None) -> list[Shot]:
        images = media if isinstance(media, tuple) else (media,)
        if not images:
            raise MmfastError("no image to ask about; give an image or a tuple of images")
        return [Shot("image", self._picture(image, trace), None) for image in images]

    def _picture(self, media: Any, trace: Trace | None) -> Any:
        if kind_of(media := rereadable(media)) == "image":
            return read_image(media, trace=trace)
        length = f" of {len(media)} frames" if hasattr(media, "__len__") else ""
        if is_encoded(media):
            length = f" of {read_video(media, frames=1).duration:.3g} s"
        raise MediaError(f"this is a video{length}: use video-qa, or give one of its frames")


@task("video-qa", aliases=("video-text-to-text",))
class VideoQA(VisualQA):
    """Answer questions about videos: path, bytes, file object, array, list of frames, iterator."""

    def __init__(self, model: Any = None, **options: Any) -> None:
        super().__init__(model, **options)
        check_media(self.model, "video")

    def _read(self, media: Any, trace: Trace | None = None) -> list[Shot]:
        if kind_of(media := rereadable(media)) == "image":
            raise MediaError("this is a still picture, not a video: give a video, or take image-qa")
        sampling: dict[str, Any] = {"fps": self.fps} if self.fps else {"frames": self.frames}
        clip = read_video(media, **sampling)
        return [Shot("video", clip.frames, clip.metadata())]
