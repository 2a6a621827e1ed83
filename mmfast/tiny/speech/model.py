"""The speech model in training: a stock backbone, and the losses of what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from transformers import LlamaConfig, LlamaForCausalLM

from mmfast.models.speech.layout import SpeechLayout
from mmfast.tiny.speech.bank import AUDIO, PaddedBatch

HEAD = 32  # width of an attention head
AHEAD = 5  # further tokens that states predict, too
EVERY = 3  # one place in so many does
EARLY = 4  # frames of a word that count as its beginning
# Weights of the losses.
BOOKS = (1.0, 0.5, 0.5, 0.5)
TURNS = 1.5  # `<next>` and `<end>`
STARTS = 2.0  # of book 0 where a word begins, relative to elsewhere
LATER = 0.08  # of each further token
Part = tuple[float, int, int]  # loss, places, places predicted correctly


def make_backbone(
    layout: SpeechLayout, width: int = 160, layers: int = 14, inner: int = 448, codes: bool = True
) -> LlamaForCausalLM:
    """A Llama with random weights whose layers are the identity at first, with or without codes."""
    config = LlamaConfig(
        vocab_size=layout.total if codes else layout.base,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD,
        num_key_value_heads=width // HEAD,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        pad_token_id=layout.id("<pad>"),
        eos_token_id=layout.end,
    )
    lm = LlamaForCausalLM(config).float()
    for name, weight in lm.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(weight)
        elif weight.ndim > 1:
            spread = {"model.embed_tokens.weight": 0.5, "lm_head.weight": 0.02}
            nn.init.normal_(weight, std=spread.get(name, width**-0.5))
    return lm


def run_backbone(lm: Any, x: Tensor, middle: int = 0) -> tuple[Tensor, Tensor]:
    """Embeddings `[B, L, D]` to normed last states, and those after layer `middle`."""
    turn = lm.model.rotary_emb(x, torch.arange(x.shape[1], device=x.device)[None])
    kept = x
    for i, layer in enumerate(lm.model.layers):
        x = layer(x, position_embeddings=turn)
        if i == middle:
            kept = x
    return lm.model.norm(x), kept


class TrainingModel(nn.Module):
    """A backbone, and read-outs that are discarded after training."""

    def __init__(self, lm: LlamaForCausalLM, layout: SpeechLayout) -> None:
        super().__init__()
        width = lm.config.hidden_size
        self.lm, self.layout = lm, layout
        # States that know what follows make the draft modules' guesses right.
        self.ahead = nn.Linear(width, AHEAD * width, bias=False)
        nn.init.zeros_(self.ahead.weight)

    @property
    def embed(self) -> Tensor:
        """Rows of the embedding."""
        weight: Tensor = self.lm.model.embed_tokens.weight
        return weight

    @property
    def head(self) -> Tensor:
        """Rows of the output head."""
        weight: Tensor = self.lm.lm_head.weight
        return weight


def losses(model: TrainingModel, batch: PaddedBatch) -> tuple[Tensor, dict[str, Part]]:
    """Loss of one batch, a sum over places, and for each part its loss and places."""
    layout, parts = model.layout, dict[str, Part]()
    states, _ = run_backbone(model.lm, model.embed[batch.ids])
    chosen = batch.kind[:, :-1] == AUDIO
    logits = linear(states[:, :-1][chosen], model.head[layout.texts :])
    target = batch.ids[:, 1:][chosen] - layout.texts
    each = cross_entropy(logits, target, reduction="none")
    book = torch.where(target < 2, -1, (target - 2) // layout.entries)
    scale = torch.tensor([TURNS, *BOOKS[: layout.books]])[book + 1]
    # The first frames of a word decide which word it is.
    early = (book == 0) & (ages(layout, batch.ids)[:, 1:][chosen] <= EARLY * layout.books)
    total = (each * torch.where(early, STARTS * scale, scale)).sum()
    total = total + LATER * further_loss(model, states, batch)
    for q in range(-1, layout.books):
        mine = book == q
        name = f"book{q}" if q >= 0 else "turn"
        parts[name] = _part(each[mine].sum(), logits[mine], target[mine])
    return total, parts


def _part(loss: Tensor, logits: Tensor, target: Tensor) -> Part:
    right = int((logits.argmax(-1) == target).sum()) if len(target) else 0
    return float(loss.detach()), len(target), right


def ages(layout: SpeechLayout, ids: Tensor) -> Tensor:
    """Audio tokens since the sound of this group began `[B, L]`: 1 at its first code."""
    sound = (ids >= layout.texts).long().cumsum(1)
    turn = (ids == layout.next) | (ids == layout.end)
    before = torch.where(turn, sound, 0).cummax(1).values.roll(1, 1)
    before[:, 0] = 0
    return sound - before


def sounding(kind: Tensor, ahead: int, shift: int, every: int) -> Tensor:
    """Choose one in `every` places `[B, n]` that, with the next `ahead`, predict sound."""
    n = kind.shape[1] - 1 - ahead
    whole = torch.stack([kind[:, i : i + n] == AUDIO for i in range(ahead + 1)]).all(0)
    rows, places = torch.arange(len(kind))[:, None], torch.arange(n)
    return whole & ((5 * rows + places + shift) % every == 0)


def further_loss(model: TrainingModel, states: Tensor, batch: PaddedBatch) -> Tensor:
    """Loss of the tokens behind the next one: a sum, as if all places predicted them."""
    texts, total = model.layout.texts, states.new_zeros(())
    shifts = model.ahead.weight.unflatten(0, (AHEAD, -1))
    for k in range(1, min(AHEAD, batch.ids.shape[1] - 2) + 1):
        whole = sounding(batch.kind, k, k, EVERY)
        if not whole.any():
            continue
        here = states[:, : whole.shape[1]][whole]
        logits = linear(here + linear(here, shifts[k - 1]), model.head[texts:])
        labels = batch.ids[:, 1 + k :][whole] - texts
        total = total + cross_entropy(logits, labels, reduction="sum") * EVERY
    return total


@torch.no_grad()
def place_codes(model: TrainingModel, vectors: Tensor) -> None:
    """Place the rows of codes by their shares `[Q, V, n]` of the sound's features."""
    width, base = model.embed.shape[1], model.layout.base
    shared = torch.randn(vectors.shape[-1], width, generator=torch.Generator().manual_seed(3))
    flat = vectors.float() - vectors.float().mean(1, keepdim=True)
    flat = flat / flat.std(dim=(1, 2), keepdim=True)  # every book at the same loudness
    sound = (flat @ shared / vectors.shape[-1] ** 0.5).flatten(0, 1)
    books = torch.randn(len(vectors), 1, width).expand(-1, vectors.shape[1], -1).flatten(0, 1)
    model.embed[base:] = 0.4 * sound + 0.3 * books
    model.head[base:] = 0.02 * sound


@torch.no_grad()
def continued(
    folder: Path, layout: SpeechLayout, old: SpeechLayout, codes: bool = True
) -> LlamaForCausalLM:
    """A backbone that goes on from weights over the rows `old`; rows it did not know are new."""
    stock = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    state, kept = stock.state_dict(), [i for i, row in enumerate(layout.rows) if row in old.index]
    places = [old.index[layout.rows[i]] for i in kept]
    was = stock.config
    shape = was.hidden_size, was.num_hidden_layers, was.intermediate_size
    lm = make_backbone(layout, *shape, codes=codes)
    for name, value in lm.state_dict().items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            value[kept] = state[name][places]
            value[layout.texts :] = state[name][old.texts :]
        else:
            value.copy_(state[name])
    return lm
