"""A second model that drafts for answers of a batch, or the model itself on a shorter prompt.

It reads a prompt of its own, in chunks between the steps of all answers and behind the prompts of
others, begun when its answer has said a first token. Until that is done the answer goes on without
drafts; then the model reads what was said meanwhile and drafts, on rows of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mmfast.core.errors import MmfastError, ModelError, SpecError
from mmfast.core.kv import KVBlock
from mmfast.core.spec import parse
from mmfast.decoding.speculation import EXIT, DecodePlan
from mmfast.models.context import placeholders
from mmfast.models.decoder.draft_stage import load_draft
from mmfast.models.decoder.draft_weights import DraftWeights
from mmfast.models.decoder.drafters import own_inputs
from mmfast.models.decoder.early_exit import load_exit
from mmfast.models.families.adapter import adapter_for, check_media, placeholder
from mmfast.models.loading import twin_model
from mmfast.models.packing import pack_weights
from mmfast.models.reduction.check import check, refuse_files
from mmfast.models.reduction.record import features_given
from mmfast.models.wrappers import CONV
from mmfast.serve.engine.base import Event, Failure
from mmfast.serve.engine.batch import RunningBatch
from mmfast.serve.engine.decode import DecodeBatch
from mmfast.serve.engine.drafts import CATCH_UP, AnswerDrafts, DraftRows, RunningRow, ViewRows
from mmfast.serve.engine.encoder import MediaEncoder, parted
from mmfast.serve.engine.kv.bucket import Entries, taken
from mmfast.serve.engine.kv.rows import AnswerRow, AnswerRows, entries, with_room
from mmfast.serve.engine.lane import AttentionCall, Lane
from mmfast.serve.engine.prefill import Prefiller, PrefillJob
from mmfast.serve.engine.request import ActiveRequest
from mmfast.serve.engine.slots import Filled, Prepared


class PromptReader(RunningBatch):
    """Prompts of a second model, which another batch answers: `ended` gets their keys and values.

    `chunk` and `limit` are those of the engine; `served` is charged as for any prompt.
    """

    def __init__(
        self,
        model: Any,
        chunk: int | None,
        limit: int,
        served: Callable[[str, float], None],
        ended: Callable[[str, Filled], None],
    ) -> None:
        lane = Lane(model)
        encoder = MediaEncoder(model, None, min(limit // 16, 64 << 20))
        parts = Prefiller(model, chunk, lane), DecodeBatch(model, 1, lane)
        super().__init__(encoder, *parts, 0, served)  # and keeps no beginnings of prompts
        self._ended = ended

    def _begin(self, answer: ActiveRequest, job: PrefillJob) -> None:
        del self._jobs[answer.id]
        try:
            self._ended(answer.id, self.prefiller.result(job))
        except Exception as error:  # of this prompt alone
            self._fail(answer, error)


class LoadedDrafts(DraftRows):
    """Drafts of what a server was started with, by the `name` of the spec.

    An answer takes `per_token` bytes for each token of its row, and of its prompt until then.
    """

    name: str
    per_token: int

    def adopt(self, drafts: AnswerDrafts, prepared: Prepared, tokens: int) -> None:
        """Get ready to draft for an answer of so many tokens at most."""
        drafts.piece = prepared.length
        drafts.room = drafts.piece + tokens + drafts.plan.most + 1

    def needed(self, answers: Iterable[ActiveRequest]) -> int:
        """Return the bound of memory in bytes, with rows for those of these answers that lack one.

        A prompt lies in a tensor of its own until it is copied to its row.
        """
        ready = {id(row.drafts) for row in self.rows}
        mine = [a.drafts for a in answers if a.drafts is not None and self._drafts(a.drafts)]
        waiting = [drafts for drafts in mine if id(drafts) not in ready]
        tokens = self.store.needed([drafts.room for drafts in waiting])
        return self.per_token * (tokens + sum(drafts.piece for drafts in waiting))

    def alone(self, drafts: AnswerDrafts | None) -> int:
        """Return the bytes that the drafts of one answer take."""
        if drafts is None or not self._drafts(drafts):
            return 0
        return self.per_token * (taken([drafts.room]) + drafts.piece)

    def _drafts(self, drafts: AnswerDrafts) -> bool:
        return drafts.plan.loads and drafts.plan.model == self.name

    urgent = False  # an answer says nothing until its prompt has been read

    def read(self) -> None:
        """Do a unit of work on prompts of its own, if there are any; answers wait for it."""

    def close(self) -> None:
        """End its threads, if there are any; no request is at work."""


class WholeRows(ViewRows):
    """The rows of the answers themselves, on which the model drafts on weights in fewer bits.

    What drafts add to these rows falls before the step.
    """

    def __init__(self, decoder: DecodeBatch, weights: DraftWeights) -> None:
        super().__init__(decoder.lane, decoder.chooser)
        self.store, self.weights, self._decoder = decoder.store, weights, decoder

    @property
    def order(self) -> Sequence[RunningRow]:
        """All answers, also those for which others draft."""
        return self._decoder.rows

    @property
    def nbytes(self) -> int:
        """None beside those of the answers."""
        return 0

    def add(self, row: RunningRow) -> None:
        """Take an answer, which has its entries."""
        if not row.own.paused:
            self.rows.append(row)

    def release(self, row: RunningRow) -> None:
        """Forget an answer."""
        if row in self.rows:
            self.rows.remove(row)

    def take(self, row: RunningRow) -> None:
        """Forget an answer that is paused."""
        self.release(row)

    def draft(self, wanted: dict[RunningRow, int]) -> int:
        """Draft so many tokens for these answers, and leave their rows as they were."""
        with self.store.lent():
            return super().draft(wanted)

    def settle(self, kept: dict[RunningRow, int]) -> None:
        """Note what answers have said, and read."""
        for row in self.rows:
            row.own.held, row.own.read = row.own.held + kept.get(row, 0), 0


class EarlyExit(LoadedDrafts):
    """The first layers of the model and a trained adapter, over the rows of the answers themselves.

    Kangaroo (Liu et al., arXiv 2404.18911). What drafts add to these rows falls before the step;
    rows of its own hold what the adapter keeps of the states that pass by: of the prompt, as far as
    it was read for this answer, and of what the answer has said.

    Raises:
        ModelError: There is no such adapter, or it is another model's.
    """

    kind = EXIT

    def __init__(self, plan: DecodePlan, model: Any, decoder: DecodeBatch) -> None:
        super().__init__(decoder.lane, decoder.chooser)
        self.name, self._decoder = plan.model, decoder
        self._adapter = self.lane.exit = load_exit(plan.model, model)
        self.store = AnswerRows(1)
        self._attention = AttentionCall(self._adapter, sdpa_attention_forward, "sdpa", (), {})
        weight = self._adapter.key.weight
        self.per_token = 2 * weight.shape[0] * weight.element_size()

    def begin(self, row: RunningRow) -> None:
        """Begin to draft for an answer."""
        own = row.own
        if own.view is None:  # nothing of the prompt passed by
            states = self._adapter.key.weight.new_zeros(1, 0, self._adapter.config["width"])
            _, keys, values = self._adapter.heads(states, torch.arange(0, device=states.device))
            own.view = AnswerRow([Entries(KVBlock((keys[0],), (values[0],)), 0)])
        (part,) = own.view.parts
        assert isinstance(part, Entries)
        own.piece = part.keys.shape[1]
        part.most = own.piece + row.sampling.max_tokens
        self.add(row)

    def draft(self, wanted: dict[RunningRow, int]) -> int:
        """Draft so many tokens for these answers, and leave their rows as they were."""
        with self._decoder.store.lent():
            return super().draft(wanted)

    def _hidden(self, reads: dict[RunningRow, list[int]]) -> Tensor:
        rows, store = self._decoder.rows, self._decoder.store
        store.advance([len(reads.get(row, ())) for row in rows], further=True)
        mine = {row: reads[row] for row in rows if row in reads}
        found = self._pass(self.lane.leave, store, mine).split([*map(len, mine.values())])
        states = dict(zip(mine, found, strict=True))
        return self._behind({row: states[row] for row in reads})

    def _behind(self, states: dict[RunningRow, Tensor]) -> Tensor:
        """Let the adapter read states `[n, D]` of answers: those for the head, `[T, D]`."""
        both, places = torch.cat([*states.values()])[None], list[int]()
        for row, mine in states.items():
            at = row.own.piece + row.own.held + row.own.read
            places += range(at, at + len(mine))
        heads = self._adapter.heads(both, torch.tensor(places, device=both.device))
        return self._adapter.mixed(both, self.store.attend_flat(0, self._attention, *heads))[0]

    def settle(self, kept: dict[RunningRow, int]) -> None:
        """Keep what was read and stands, and read what else answers have said."""
        super().settle(kept)
        missed: dict[RunningRow, Tensor] = {}
        for row in self.rows:
            own = row.own
            if row in kept and own.early is not None:
                new = own.early[own.held - len(own.said) + 1 : kept[row]]
                missed |= {row: new} if len(new) else {}
                own.early = None
        if missed:
            self.store.advance([len(missed.get(row, ())) for row in self.rows])
            self._behind(missed)
        for row, new in missed.items():
            row.own.held += len(new)


class SecondModel(LoadedDrafts):
    """The model of `draft:DIR`, or of `self?reduce=SPEC`, and its prompts and rows.

    Args:
        plan: Spec that names it.
        model: The model of the engine, whose tokens are those of `chooser`.
        chunk: As of the engine, like `limit` and `served`; see `PromptReader`.

    Raises:
        ModelError: It cannot be loaded, has other tokens, or keeps states that no draft can leave.
    """

    def __init__(
        self,
        plan: DecodePlan,
        model: Any,
        chooser: Any,
        chunk: int | None,
        limit: int,
        served: Callable[[str, float], None],
    ) -> None:
        self.name, self.kind = plan.model, plan.kind
        own = load_draft(plan.model, model) if plan.model else twin_model(model)
        if plan.weights:
            pack_weights(own, plan.weights)
        self._main, self._model = model, own
        self.reader = PromptReader(own, chunk, limit, served, self._ended)
        super().__init__(self.reader.prefiller.lane, chooser)
        self.per_token = self.reader.per_token
        if CONV in self.lane.kinds:
            raise ModelError(
                f"decode={plan.text!r} takes drafts back, which {type(own).__name__} cannot: its "
                "layers keep no keys to drop; give another draft model"
            )
        self._words = len(self.lane.decoder.get_input_embeddings().weight)
        self._coming: dict[str, RunningRow] = {}  # whose prompts are being read

    # --- from any thread ------------------------------------------------------------------------

    def adopt(self, drafts: AnswerDrafts, prepared: Prepared, tokens: int) -> None:
        """Give the drafts of an answer of so many tokens at most the prompt that this model reads.

        Raises:
            SpecError: The model cannot read it; says why in one line.
        """
        plan = drafts.plan
        try:
            drafts.prompt = self._prompt(plan, prepared)
        except MmfastError as error:
            raise SpecError(self._refused(plan, str(error))) from error
        except (KeyError, IndexError, ValueError, RuntimeError, TypeError) as error:
            reason = f"it takes other media ({' '.join(str(error).split())[:160]})"
            raise SpecError(self._refused(plan, reason)) from error
        drafts.piece = drafts.prompt.length
        drafts.room = drafts.piece + tokens + plan.reach + CATCH_UP + 1

    def _refused(self, plan: DecodePlan, reason: str) -> str:
        return (
            f"the draft model of decode={plan.text!r} cannot read this prompt: {reason}; let it "
            "read text alone with '?media=false', or leave it out with decode='none'"
        )

    def _prompt(self, plan: DecodePlan, prepared: Prepared) -> Prepared:
        seen = plan.media and adapter_for(self._model).media
        without = None if seen else placeholders(self._main)
        inputs = own_inputs(self._model, prepared.inputs, without)
        ids = inputs["input_ids"]
        if int(ids.max()) >= self._words:
            raise ModelError(f"token {int(ids.max())} is none of its {self._words}")
        request = replace(prepared.request, messages=())  # which can be large
        if not (given := features_given(inputs)):
            return Prepared(request, inputs, {}, None)
        adapter, base = adapter_for(self._model), self._model.base_model
        for kind in given:
            check_media(self._model, kind)
            wanted = sum(layout.length for layout in adapter.layout(base, kind, inputs))
            found = int((ids == placeholder(base.config, kind)).sum())
            if wanted != found:
                raise ModelError(f"its {kind}s are {wanted} tokens, and {found} stand there")
        specs = check(parse(plan.reduce), self._model) if plan.reduce else ()
        refuse_files(specs)
        early, deep, inside, whole = parted(specs)
        if not whole:
            raise SpecError(f"{plan.reduce!r} does not act when a prompt is read")
        return Prepared(request, inputs, prepared.media, early, 0.0, deep, None, inside)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, those of prompts included."""
        return self.store.nbytes + self.reader.nbytes

    # --- the engine's thread --------------------------------------------------------------------

    def begin(self, row: RunningRow) -> None:
        """Begin to read the prompt for an answer."""
        prompt, row.own.prompt = row.own.prompt, None
        request = ActiveRequest(prompt.request, partial(self._told, row), row.sampling)
        request.prepared = prompt
        self._coming[request.id] = row
        self.reader.start(request)

    @property
    def urgent(self) -> bool:  # type: ignore[override]
        """An answer says nothing until its prompt has been read."""
        return any(row.own.waits for row in self._coming.values())

    def read(self) -> None:
        """Do a unit of work on prompts, if there are any; answers wait for it."""
        if self._coming:
            self.reader.unit(True)

    def _ended(self, name: str, filled: Filled) -> None:
        row = self._coming.pop(name)
        own = row.own
        made = filled.row
        if made is None:
            most = filled.length + row.sampling.max_tokens
            made = AnswerRow(entries(filled.kv, self.lane.kinds, self.lane.window, most))
        # What an answer has said meanwhile is read along with drafts.
        own.view = with_room(made, own.plan.reach + CATCH_UP, views=True)
        own.start = filled.position.tolist()
        self.add(row)

    def _told(self, row: RunningRow, event: Event) -> None:
        if isinstance(event, Failure):
            self._coming.pop(str(row.key), None)
            row.own.view, row.own.waits = None, False
            row.own.notes.append(self._refused(row.own.plan, event.message))

    def release(self, row: RunningRow) -> None:
        """Forget an answer, and stop reading for it."""
        super().release(row)
        if self._coming.pop(str(row.key), None) is not None:
            self.reader.cancel(str(row.key))

    def settle(self, kept: dict[RunningRow, int]) -> None:
        """Keep what was read and stands; an answer that says a token of no embedding is left."""
        super().settle(kept)
        for row in [row for row in self.rows if row.token >= self._words]:
            self.release(row)
            row.own.notes.append(
                f"decode {row.own.plan.text!r} drafted no longer behind token {row.token}, which "
                "the draft model does not have"
            )

    def close(self) -> None:
        """End the thread of the encoder; no request is at work."""
        self.reader.encoder.slicer.close()
