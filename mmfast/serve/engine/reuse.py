"""Media that requests have paid for before, found again at any place of a prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from mmfast.caches.plan import call_plan
from mmfast.core.errors import MmfastError, SpecError
from mmfast.core.spec import Spec, parse
from mmfast.core.trace import Trace
from mmfast.frontends.image import kind_of, read_image
from mmfast.frontends.video.reader import read_video
from mmfast.models.prompt import Shot, check_question
from mmfast.models.reduction.check import check
from mmfast.models.reduction.record import features_given
from mmfast.serve.engine.adapters import adapters_of
from mmfast.serve.engine.request import ActiveRequest, check_storeless
from mmfast.streams.reuse.media import MediaReuse
from mmfast.streams.reuse.modules import Places, PromptModules
from mmfast.streams.reuse.plan import ReusePlan, check_beside, parse_reuse
from mmfast.streams.reuse.schema import ModulePrompt, PromptSchema
from mmfast.streams.reuse.store import ReuseStore
from mmfast.streams.stream import WeightChecksum

_PROMPT = "add_generation_prompt"
ENCODER, PREFILL = "reuse encoder", "reuse kv"  # rows of a trace


class ServedReuse:
    """Prompts of an engine about media that its store may have.

    Every prompt is read on a twin of the model, one after the other; what one has paid for, the
    next one finds. Values belong to a tenant and an adapter, and no other finds them. `taken` and
    `computed` count tokens of prompts.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        plan: ReusePlan,
        store: ReuseStore,
        modules: PromptSchema | str | Path | None = None,
    ) -> None:
        self.model, self.plan, self.store = model, plan, store
        self.schema, self._folder = _schema_of(modules)
        self._placed: Places = WeakKeyDictionary()
        self._processor, self._weights = processor, WeightChecksum(model)
        self._writer = ThreadPoolExecutor(1, "mmfast-reuse")  # no answer waits for the disk
        self.taken = self.computed = 0

    def check(self, answer: ActiveRequest) -> None:
        """Refuse (MmfastError) a request whose own `reuse` is wrong or does not act."""
        options = answer.request.options
        if options.modules or options.arguments:
            answer.modules = self._asked(answer)
        if options.reuse is None:
            return
        plan = self._plan(answer)
        if plan.prefix and not self.plan.prefix:
            raise SpecError(
                f"reuse={str(plan)!r}: this server keeps outputs of the vision tower alone; give "
                "'encoder', or leave it out"
            )
        check_beside(plan, answer.reduce, call_plan(answer.cache), prefill=answer.prefill)

    def acts(self, answer: ActiveRequest) -> bool:
        """Return True if the prompt of a request is read here: it has media, and specs fit."""
        prepared = answer.prepared
        if answer.modules is not None:
            return True
        if prepared is None or not features_given(prepared.inputs):
            return False
        try:
            mine = answer.reduce, call_plan(answer.cache)
            check_beside(self._plan(answer), *mine, prefill=answer.prefill)
        except SpecError:  # of this request alone, which is read as without a store
            return False
        return True

    def on(self, model: Any) -> MediaReuse:
        """Return the reuse on a twin, whose calls run in slices.

        ModelError: keys and values of the model cannot be moved.
        """
        media = MediaReuse(model, self._processor, self.plan, self.store, self._weights)
        if self.schema is not None:  # one that the model cannot read is refused now
            self._modules(media, (), "").placed(self.schema)
        return media

    def ahead(self, answer: ActiveRequest) -> int:
        """Return how many tokens of modules stand before a question, before any reduction."""
        if answer.modules is None or self.schema is None:
            return 0
        placed = self._placed[self.schema]
        return sum(len(p.ids) for name in answer.modules[0].names for p in placed[name].parts)

    def _asked(self, answer: ActiveRequest) -> tuple[ModulePrompt, str]:
        """Read what a request takes of the schema; MmfastError where that does not act."""
        request, options = answer.request, answer.request.options
        if self.schema is None:
            check_storeless(options)
        assert self.schema is not None
        prompt = self.schema.prompt(*options.modules, **options.arguments)
        own = [part for message in request.messages for part in message.content]
        alone = len(request.messages) == 1 and all(isinstance(part, str) for part in own)
        if not alone or options.raw is not None or options.template.keys() - {_PROMPT}:
            raise MmfastError(
                "modules stand before one question: give one message of a user with text alone, "
                "no tools and no arguments of the template, or leave modules out"
            )
        if not self._plan(answer).prefix:
            raise SpecError("modules are keys and values that are kept; leave reuse='encoder' out")
        check_beside(
            self._plan(answer), answer.reduce, call_plan(answer.cache), prefill=answer.prefill
        )
        return prompt, check_question("".join(map(str, own)))

    def _modules(self, media: MediaReuse, specs: Sequence[Spec], owner: str) -> PromptModules:
        return PromptModules(media, self._shots, specs, None, owner, self._placed)

    def _shots(self, source: Any) -> list[Shot]:
        """Decode a picture or clip of the schema, which the operator wrote."""
        source = self._folder / source if isinstance(source, Path) else source
        if kind_of(source) == "image":
            return [Shot("image", read_image(source), None)]
        clip = read_video(source, frames=8)
        return [Shot("video", clip.frames, clip.metadata())]

    def behind(self, answer: ActiveRequest) -> list[Spec]:
        """Return the stages of a request that are left to act inside the model."""
        return (
            [] if self._plan(answer).prefix else [s for s in self._specs(answer) if s.site != "vit"]
        )

    def inputs(self, media: MediaReuse, answer: ActiveRequest, trace: Trace) -> dict[str, Any]:
        """Return the inputs of the model for a request, with all that is reused."""
        assert answer.prepared is not None
        request, known = answer.request, adapters_of(self.model)
        key = known.keys.get(request.adapter or "", "")
        tower = key if request.adapter in known.visual else ""
        specs = self._specs(answer)
        if answer.modules is not None:
            return self._put_together(media, answer, specs, f"adapter {key}" if key else "", trace)
        media.plan = self._plan(answer)
        given = media.encoded(answer.prepared.inputs, specs, None, trace, _owner(request, tower))
        if media.plan.prefix:
            given = media.prompt(given, specs, trace, _owner(request, key))
        rows = {row.stage: row for row in trace.rows}
        counted = rows.get(PREFILL, rows[ENCODER])
        self.taken += counted.tokens_in - counted.tokens_out
        self.computed += counted.tokens_out
        both = (rows[stage] for stage in (ENCODER, PREFILL) if stage in rows)
        answer.cached = max(row.tokens_in - row.tokens_out for row in both)
        self._writer.submit(self.store.flush)
        return given

    def _put_together(
        self,
        media: MediaReuse,
        answer: ActiveRequest,
        specs: Sequence[Spec],
        owner: str,
        trace: Trace,
    ) -> dict[str, Any]:
        """Inputs of the model for modules, which are the operator's and so all tenants', too."""
        assert answer.modules is not None
        given = self._modules(media, specs, owner).inputs(*answer.modules, trace=trace)
        rows = {row.stage: row for row in trace.rows}
        fresh = rows["reuse modules"].tokens_out + rows[PREFILL].tokens_out
        answer.cached = max(0, rows[PREFILL].tokens_in - fresh)
        self.taken, self.computed = self.taken + answer.cached, self.computed + fresh
        self._writer.submit(self.store.flush)
        return given

    def _plan(self, answer: ActiveRequest) -> ReusePlan:
        return parse_reuse(answer.request.options.reuse) or self.plan

    def _specs(self, answer: ActiveRequest) -> Sequence[Spec]:
        specs = parse(answer.reduce)
        return check(specs, self.model, call_plan(answer.cache)) if specs else ()

    def gauges(self) -> dict[str, float]:
        """Return figures for `Health`: finds of the store, its bytes, and tokens of prompts."""
        return {
            "reuse_hits": float(self.store.hits),
            "reuse_misses": float(self.store.misses),
            "reuse_bytes": float(self.store.nbytes),
            "reuse_tokens": float(self.taken),
            "reuse_computed_tokens": float(self.computed),
        }

    def close(self) -> None:
        """Write what is not on disk yet."""
        self._writer.shutdown()


def _schema_of(given: PromptSchema | str | Path | None) -> tuple[PromptSchema | None, Path]:
    """Return a schema, and the folder at which paths of its media start; MmfastError: no such."""
    if given is None or isinstance(given, PromptSchema):
        return given, Path()
    path = Path(given).expanduser()
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else f"is no JSON ({error})"
        raise MmfastError(f"modules {str(given)!r}: {why}; give a file with a schema") from None
    return PromptSchema.read(document), path.parent


def _owner(request: Any, adapter: str) -> str:
    """Name of a tenant and an adapter; "" is everyone, as in a pipeline."""
    nobody = request.tenant in ("", "/")  # neither a key nor a user
    return "" if nobody and not adapter else repr((request.tenant, adapter))
