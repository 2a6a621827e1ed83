"""What training under a reduction must equal: tokens removed by hand, row by row, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import model_oracle as oracle
import torch
from tiny_models import Tiny, build
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ALONG = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels")
IGNORE = -100
Gradients = dict[str, Tensor]


def learner(family: str, **shape: Any) -> Tiny:
    """A model of its own in training, in double precision."""
    this = build(family, **shape)
    this.model.double().train().requires_grad_(True)
    for module in this.model.modules():  # or rows would not be independent of each other
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return this


def kind_of(this: Tiny) -> str:
    """Videos where the family has them."""
    return "video" if "video" in this.facts.kinds else "image"


def rows_of(this: Tiny, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Inputs of each prompt alone; `{x}` in it is an image or video of its own."""
    kind, found = kind_of(this), []
    for number, text in enumerate(texts):
        media = this.media(kind, 1, seed=number) if "{x}" in text else {}
        found.append(oracle.doubled(this.inputs([text.replace("{x}", f"{{{kind}}}")], **media)))
    return found


def batch_of(this: Tiny, texts: Sequence[str], right: bool = False) -> dict[str, Any]:
    """The same prompts as a batch, padded on the left or on the right, with labels."""
    kind, name = kind_of(this), {"video": "videos", "image": "images"}[kind_of(this)]
    media = [
        item
        for number, text in enumerate(texts)
        if "{x}" in text
        for item in this.media(kind, 1, seed=number)[name]
    ]
    given = [text.replace("{x}", f"{{{kind}}}") for text in texts]
    inputs = oracle.doubled(this.inputs(given, **{name: media}))
    inputs["labels"] = labels_of(inputs)
    if right:
        for row, mask in enumerate(inputs["attention_mask"].clone()):
            gap = int((mask == 0).sum())
            for each in set(ALONG) & set(inputs):
                inputs[each][row] = inputs[each][row].roll(-gap)
    return inputs


def labels_of(inputs: dict[str, Any]) -> Tensor:
    """Every token but padding is a label, media included; now and then one takes no part."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
    at = mask.cumsum(1)
    return ids.masked_fill(~mask | (at % 5 == 2), IGNORE)


def removed_terms(
    this: Tiny, texts: Sequence[str], reductions: Sequence[tuple[str, int, Any]]
) -> tuple[Tensor, int]:
    """Sum of the loss over all rows, each alone, and the number of labels that count."""
    total, count, item = torch.zeros((), dtype=torch.float64), 0, 0
    for text, inputs in zip(texts, rows_of(this, texts), strict=True):
        labels = labels_of(inputs)[0]
        if "{x}" in text:
            mine = [(site, 0, red) for site, number, red in reductions if number == item]
            item += 1
            prompt = oracle.embed(this, inputs)
            keep = oracle.kept_places(prompt, mine)
            assert len(keep) < len(prompt.embeds)
            plain = all(site == "pre" and red.pure for site, _, red in mine)
            logits = (
                oracle.removed(this, prompt, keep)
                if plain
                else oracle.masked(this, prompt, mine)[keep]
            )
            labels = labels[keep]
        else:
            logits = this.model(**inputs).logits[0]
        total = (
            total
            + F.cross_entropy(  # in float32, as stock models do
                logits[:-1].float(), labels[1:], ignore_index=IGNORE, reduction="sum"
            )
        )
        count += int((labels[1:] != IGNORE).sum())
    return total, count


def gradients(this: Tiny, loss: Callable[[], Tensor]) -> tuple[Tensor, Gradients]:
    """A loss, and the gradients of all parameters that it reaches."""
    this.model.zero_grad(set_to_none=True)
    value = loss()
    value.backward()
    found = {
        name: p.grad.clone() for name, p in this.model.named_parameters() if p.grad is not None
    }
    return value.detach(), found


def assert_same(
    found: tuple[Tensor, Gradients], expected: tuple[Tensor, Gradients], far: float = 1e-6
) -> None:
    """Losses and gradients agree, and no parameter is left out."""
    assert abs(float(found[0] - expected[0])) < far * max(1, float(expected[0]))
    zero = {name for name, grad in expected[1].items() if not grad.any()}
    assert set(expected[1]) - zero <= set(found[1])
    for name, grad in expected[1].items():
        difference = (found[1].get(name, torch.zeros_like(grad)) - grad).abs().max()
        assert float(difference) < far * max(1, float(grad.abs().max())), name


def hooks_inside(layers: Sequence[Any], use_reentrant: bool) -> None:
    """Let layers call their hooks within the checkpoint, as FSDP's `checkpoint_wrapper` does."""
    for layer in layers:
        stock = type(layer)

        def call(self: Any, *args: Any, _stock: Any = stock, **kwargs: Any) -> Any:
            run = partial(_stock.__call__, self, **kwargs)
            if not self.training:
                return run(*args)
            return checkpoint(run, *args, use_reentrant=use_reentrant)

        layer.__class__ = type(stock.__name__, (stock,), {"__call__": call})
