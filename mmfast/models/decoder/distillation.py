"""On-policy distillation of draft heads: they learn from the backbone behind their own drafts.

Cross-entropy on whole texts shows a module only true tokens in front of it; when it drafts, it
reads what the modules before it have guessed. Here a head drafts at a place of the model's own
text, one pass of the backbone tells its distribution behind every draft, and each module learns
that distribution (Kullback-Leibler divergence), as deep as the drafts go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import ModelError
from mmfast.decoding.loop import BatchDecoder
from mmfast.decoding.row import Open
from mmfast.decoding.sampling import Sampling
from mmfast.heads.base import causal_mask


def own_text(
    trunk: Any, prompts: Sequence[Sequence[int]], length: int, sampling: Sampling | None = None
) -> Tensor:
    """Return prompts of one length and what the model itself says behind them: ids `[B, T]`."""
    if len({len(prompt) for prompt in prompts}) != 1:
        lengths = sorted({len(prompt) for prompt in prompts})
        raise ModelError(f"prompts of lengths {lengths} make no batch; cut them to one length")
    guides = [Open(length) for _ in prompts]
    decoder = BatchDecoder(trunk, None, guides, sampling=sampling)
    decoder.feed(prompts)
    for _ in decoder:
        pass
    lines = [[*prompt, *guide.said] for prompt, guide in zip(prompts, guides, strict=True)]
    return torch.tensor(lines, device=trunk.device)


def draft_loss(
    head: Any,
    ids: Tensor,
    at: int,
    *,
    share: float = 1.0,
    rows: slice = slice(None),
    generator: torch.Generator | None = None,
) -> Tensor:
    """Divergence of every module from the backbone behind its own drafts, weighted and summed.

    `ids` `[B, T]` are texts; the backbone has read those up to place `at`, the head drafts behind
    the token after it. A `share` of the texts has drafts in front of the deeper modules, the others
    the true tokens; `generator`, on the CPU, says which. `rows` of the vocabulary are drafted.
    Gradients reach the head alone if `backward` gets its parameters as `inputs`. ModelError: the
    texts end too soon.
    """
    trunk, depth = head.trunk, int(head.modules_count)
    if not 0 <= at <= ids.shape[1] - depth - 1:
        raise ModelError(
            f"place {at} of texts of {ids.shape[1]} tokens leaves no {depth} tokens to draft; "
            "use longer texts"
        )
    with torch.no_grad():
        own = torch.rand(len(ids), 1, generator=generator).to(ids.device) < share
        line, hidden, p = _drafted(head, ids, at, own, rows)
    mask = causal_mask(line.shape[1], hidden, head.window) if head.window else None
    states = head(hidden, trunk.embed(line).detach(), mask)
    total = hidden.new_zeros(())
    for module, (state, weight) in enumerate(zip(states, head.weights(), strict=True)):
        q = head.output(module, state[:, at], rows).float().log_softmax(-1)
        total = total + weight * F.kl_div(q, p[:, module], reduction="batchmean")
    return total


def _drafted(
    head: Any, ids: Tensor, at: int, own: Tensor, rows: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """Texts with drafts `[B, at + 1 + K]`, states the head reads there, and chances `[B, K, V]`.

    Only the texts that `own` `[B, 1]` names get drafts.
    """
    trunk, depth, batch = head.trunk, int(head.modules_count), len(ids)
    read, token = ids[:, : at + 1], ids[:, at + 1]
    state, heads = trunk.state(batch, at + depth + 2), head.init_state(batch, at + depth + 2)
    embeds = trunk.embed(read)
    raw = trunk.run(state, embeds, [at + 1] * batch)
    fed = trunk.norm(raw) if head.reads == "normed" else raw
    head.observe(heads, embeds, fed, [at + 1] * batch)
    head.refresh()  # it drafts with the weights of now
    drafts: list[Tensor] = []

    def pick(logits: Tensor, _: int) -> Tensor:
        drafts.append(logits.argmax(-1) + rows.indices(trunk.vocabulary)[0])
        return drafts[-1]

    if depth > 1:
        head.draft(heads, token, depth - 1, rows, pick)
    true = ids[:, at + 2 : at + 1 + depth]
    mixed = torch.where(own, torch.stack(drafts, 1), true) if drafts else true
    line = torch.cat([read, token[:, None], mixed], 1)
    behind = trunk.run(state, trunk.embed(line[:, at + 1 :]), [depth] * batch)
    p = trunk.logits(trunk.norm(behind), rows).float().softmax(-1)
    later = fed.new_zeros(batch, depth, fed.shape[-1])  # no module at `at` sees behind it
    return line, torch.cat([fed, later], 1), p


def distil(
    head: Any,
    prompts: Sequence[Sequence[int]],
    *,
    steps: int = 200,
    length: int = 32,
    batch: int = 16,
    rate: float = 1e-3,
    share: float = 0.75,
    sampling: Sampling | None = None,
    rows: slice = slice(None),
    seed: int = 0,
    progress: Callable[[int, float], object] | None = None,
) -> list[float]:
    """Train a head on what its model says behind prompts of one length; returns the losses.

    Each step takes `batch` texts of `length` new tokens (greedy, or as `sampling` says) and one
    place of them, chosen at random; `share` and `rows` are those of `draft_loss`. The backbone is
    not changed. `progress` gets every step and its loss.
    """
    trunk, start = head.trunk, len(prompts[0]) if len(prompts) else 0
    texts = own_text(trunk, prompts, length, sampling)
    places = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(head.parameters(), lr=rate)
    last, losses = texts.shape[1] - int(head.modules_count) - 1, list[float]()
    first = min(max(start - 1, 0), last)
    for step in range(steps):
        chosen = torch.randint(len(texts), (batch,), generator=places).to(texts.device)
        at = int(torch.randint(first, last + 1, (), generator=places))
        given: dict[str, Any] = {"share": share, "rows": rows, "generator": places}
        loss = draft_loss(head.train(), texts[chosen], at, **given)
        optimiser.zero_grad()
        loss.backward(inputs=list(head.parameters()))
        optimiser.step()
        losses.append(float(loss.detach()))
        if progress is not None:
            progress(step, losses[-1])
    head.eval()
    return losses
