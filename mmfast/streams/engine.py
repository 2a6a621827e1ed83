"""Runs pieces of streams through the text model of a stock checkpoint, one forward each.

The engine belongs to a model and holds nothing of any stream. Memories and branches hold their
own tokens, so any number of them may use one engine, from any thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from mmfast.caches.plan import CachePlan
from mmfast.core.errors import ModelError
from mmfast.models.masks import FULL, kind_of
from mmfast.models.raw import Raw, RawCapture
from mmfast.models.rotary import Rotary, check_rotation
from mmfast.streams.archive import Archive
from mmfast.streams.branch import Branch
from mmfast.streams.buffers import Buffer, Slot, same_length
from mmfast.streams.fitting import fitting
from mmfast.streams.memory import Memory, Store
from mmfast.streams.piece import Piece
from mmfast.streams.places import Start, live
from mmfast.streams.quotas import Quotas
from mmfast.streams.scoring import check_score, score
from mmfast.streams.turning import Turner


class Engine:
    """Prefills streams and answers on branches of them.

    Args:
        model: A transformers model with a text model of full-attention layers
            (`model.get_decoder()`); it stays as it is, with hooks that do nothing for others.

    Raises:
        ModelError: Its layers are of another kind, or its keys cannot be read or moved.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.decoder = model.get_decoder()
        capture = RawCapture(self.decoder)
        self._close = weakref.finalize(self, capture.remove)
        self._capture = capture
        try:
            _check_layers(self.decoder, capture)
            rotary = Rotary(self.decoder)
            check_rotation(self.decoder, capture, rotary)
        except BaseException:
            self.close()
            raise
        self.attentions = [capture.attentions[i] for i in range(len(capture.attentions))]
        self.turner = Turner(rotary, self.attentions)

    def close(self) -> None:
        """Take the hooks off the model."""
        self._close()

    def memory(
        self,
        plan: CachePlan | None = None,
        *,
        tiers: Quotas | None = None,
        archive: Store | None = None,
        slack: float = 0.25,
    ) -> Memory:
        """An empty memory.

        Args:
            plan: What stays and how it is found again; None keeps everything.
            tiers: Byte quotas of the archive that a plan with `retrieve` gets.
            archive: Another archive to use.
            slack: How much further than a prompt of the live tokens positions may run, as a
                share of it, before all are re-based; 0 re-bases whenever something leaves.

        Raises:
            SpecError: The plan cannot bound a stream, or scores by what streams do not have.
        """
        check_score(plan)
        if archive is None and plan is not None and plan.retrieve is not None:
            device = self.turner.device(0)
            retriever, store = plan.retriever(), plan.quantiser()
            archive = Archive(retriever, self.turner.layers, device, tiers, store)
        return Memory(self.turner, plan, archive, slack)

    def append(self, memory: Memory, piece: Piece) -> None:
        """Prefill a piece at the end of a stream, then let go of what no longer fits.

        Raises:
            MmfastError: The piece is malformed or does not fit; the memory is as it was.
        """
        with memory.lock, torch.no_grad():
            block = live(piece, memory.number, memory.cursor.start(piece))
            self._forward(piece, block.start, memory.buffers)
            memory.admit(score(memory, block))

    def branch(self, memory: Memory) -> Branch:
        """A copy of the live tokens on which a question is answered; the stream goes on."""
        with memory.lock, torch.no_grad():
            return Branch(self, memory)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[V]`, float32, of a last hidden state `[D]`."""
        found: Tensor = self.model.get_output_embeddings()(hidden)
        found = found.float()
        cap = getattr(self.decoder.config, "final_logit_softcapping", None)
        return found if cap is None else cap * torch.tanh(found / cap)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings `[n, D]` of token ids `[n]`."""
        table = self.decoder.get_input_embeddings()
        embeds: Tensor = table(ids.to(table.weight.device))
        return embeds

    def _forward(
        self,
        piece: Piece,
        start: Start,
        buffers: Sequence[Buffer],
        recall: Callable[[Raw], Callable[[int], None]] | None = None,
    ) -> Tensor:
        """Run a piece behind the tokens of the buffers; they hold its tokens, not counted in.

        Args:
            piece: What to run.
            start: Where it starts.
            buffers: Per layer.
            recall: Given what is captured, makes what every layer calls before it attends.

        Returns:
            The last hidden state `[D]`.
        """
        weight = self.decoder.get_input_embeddings().weight
        embeds = piece.embeds.to(weight.device, weight.dtype)[None]  # [1, n, D]
        places = (
            piece.relative.to(weight.device) + torch.tensor(start, device=weight.device)[:, None]
        )
        with self._capture.recording() as raw:
            before = None if recall is None else recall(raw)
            cache = Cache(layers=[Slot(i, b, raw, before) for i, b in enumerate(buffers)])
            uneven = before is not None or not same_length(buffers)
            flash = "flash" in str(self.decoder.config._attn_implementation)
            fit = fitting(self.decoder.config, self.attentions, embeds, cache)
            with fit if uneven or flash else nullcontext():
                output = self.decoder(
                    inputs_embeds=embeds,
                    position_ids=places[:, None] if self.turner.axes > 1 else places,
                    past_key_values=cache,
                    use_cache=True,
                    **_planes(piece, weight),
                )
        last: Tensor = output.last_hidden_state[0, -1]
        return last


def _check_layers(decoder: Any, capture: RawCapture) -> None:
    layers = len(decoder.layers)
    kinds = {kind_of(decoder.config, i) for i in range(layers)}
    if len(capture.attentions) < layers or kinds != {FULL}:
        odd = ", ".join(sorted(kinds - {FULL})) or "other than attention"
        raise ModelError(
            f"{type(decoder).__name__} has layers of kind {odd}, which endless streams cannot "
            "keep; use a model of full-attention layers, such as LLaVA-OneVision, Qwen2.5-VL or "
            "Qwen3-VL"
        )


def _planes(piece: Piece, weight: Tensor) -> dict[str, Any]:
    """What DeepStack models take beside the embeddings."""
    if not piece.planes or piece.visual is None:
        return {}
    return {
        "visual_pos_masks": piece.visual.to(weight.device)[None],
        "deepstack_visual_embeds": [plane.to(weight.device) for plane in piece.planes],
    }
