"""One look at a model over a few prompts, for the patterns of its heads (`models.kv.patterns`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmfast.attach import attach
from mmfast.core.errors import ModelError, an
from mmfast.models.cache_name import returned_cache
from mmfast.models.context import check_length, longest_prompt
from mmfast.models.kv.gates import KeyGate, StateRecorder, train_gate
from mmfast.models.kv.notes import REPEATED
from mmfast.models.kv.patterns import HeadPatterns, read_modules
from mmfast.models.reduction.probe import bias_of, probing, softmax_rows
from mmfast.models.wrappers import base_of

_ROWS = 64  # queries compared at once
_TEACHER = f"kvzip:{1 << 30}"  # scores everything, and nothing leaves


def calibrate_heads(
    model: Any,
    prompts: Iterable[Mapping[str, Any]] | None = None,
    *,
    save: str | Path | None = None,
    sink: int = 4,
    recent: int = 32,
    count: int = 4,
    length: int = 256,
    seed: int = 0,
    gates: bool = False,
    steps: int = 600,
) -> HeadPatterns:
    """Find the patterns of the heads of a model, which `qfilter` and `duo_attention` read.

    With `gates`, train those that `fastkvzip` reads as well: every prompt is read three times more
    for the scores of `kvzip`. They tell apart what they have seen: give prompts like yours, some
    ten thousand tokens in all, as drawn ones have no meaning.

    Args:
        model: A stock model of transformers, of text or with media.
        prompts: Inputs of the model, each a mapping as a processor makes it, one row each. None
            makes `count` prompts of `length` tokens drawn by chance, whose second half repeats the
            first: a head that retrieves looks half a prompt back there.
        save: Folder to write `mmfast_heads.safetensors` to, as a rule that of the model; `attach`
            finds it there.
        sink: First tokens that a streaming head sees.
        recent: Recent tokens that a streaming head sees.
        count: Prompts that are made.
        length: Tokens of each.
        seed: Seed of the draw and of training, made on the CPU.
        gates: Train gates, too.
        steps: Steps of their training, 1,024 tokens each.

    Returns:
        The patterns, which the model knows from now on.

    Raises:
        ModelError: A model without layers of full attention, no prompt, or made ones too short.
        ContextError: A prompt that is longer than the model reads.
    """
    if not hasattr(model, "get_decoder"):
        fix = "give a model, such as AutoModelForCausalLM.from_pretrained(…)"
        raise ModelError(f"{an(type(model).__name__)} has no decoder with heads; {fix}")
    if prompts is None:
        _check_drawn(model, length, 4 * (sink + recent))
    given = _drawn(model, count, length, seed) if prompts is None else prompts
    sums, lessons = _looked(model, given, sink, recent, gates)
    if not sums or any(not each.count for each in sums.values()):
        raise ModelError("no layer of full attention has read a prompt; give one prompt or more")
    found = HeadPatterns(
        {index: each.filters() for index, each in sums.items()},
        {index: (each.reach / each.count).float().cpu() for index, each in sums.items()},
        lessons.learn({i: each.groups for i, each in sums.items()}, steps, seed) if gates else {},
    )
    found.use(model)
    if save is not None:
        found.save(save)
    return found


def _check_drawn(model: Any, length: int, least: int) -> None:
    """Refuse made prompts that are too short to look back in, or longer than the model reads."""
    most = longest_prompt(model)
    if length < least:
        raise ModelError(
            f"length={length}: half a prompt back is within what streaming heads see; give {least}"
        )
    if most is not None and length > most:
        raise ModelError(
            f"length={length} is more than {an(type(model).__name__)} reads; give at most {most}"
        )


def _looked(
    model: Any, prompts: Iterable[Mapping[str, Any]], sink: int, recent: int, gates: bool
) -> tuple[dict[int, _Sums], _Lessons]:
    """Let a model read prompts; with `gates` repeat them, too."""
    modules = read_modules(model)
    sums = {index: _Sums(sink, recent) for index in modules}
    lessons = _Lessons(model, modules)
    hooks: Any = {module: sums[index].look for index, module in modules.items()}
    with torch.no_grad():
        for each in prompts:
            check_length(model, each)
            with probing(hooks), lessons.states.watching():
                base_of(model)(**each, use_cache=False)
            if gates:
                lessons.add(each)
    return sums, lessons


class _Lessons:
    """Tokens that gates learn from: the states that enter each layer, and the scores of `kvzip`."""

    def __init__(self, model: Any, modules: Mapping[int, nn.Module]) -> None:
        self._model, self.states = model, StateRecorder(modules)
        self._seen: dict[int, list[tuple[Tensor, Tensor]]] = {index: [] for index in modules}

    def add(self, prompt: Mapping[str, Any]) -> None:
        """Let the model repeat a prompt that it has just read."""
        seen = {index: self.states.take(index) for index in self._seen}
        with attach(self._model, cache=_TEACHER):
            out = base_of(self._model)(**prompt, use_cache=True)
        for index, layer in enumerate(returned_cache(out).layers):
            states = seen.get(index)
            if states is not None:
                scores = layer.notes[REPEATED][0].T.clamp(0, 1)  # [n, H]
                self._seen[index].append((states[0].cpu(), scores.cpu()))

    def learn(self, groups: Mapping[int, int], steps: int, seed: int) -> dict[int, KeyGate]:
        """Train the gates of all layers, which have `groups` query heads for each key head."""
        made = dict[int, KeyGate]()
        for index, many in groups.items():
            states, scores = map(torch.cat, zip(*self._seen[index], strict=True))
            made[index] = train_gate(states, scores, many, steps, seed)
        return made


class _Sums:
    """Sums over the queries of one layer."""

    def __init__(self, sink: int, recent: int) -> None:
        self._sink, self._recent = sink, recent
        self.gram: Any = 0.0
        self.total: Any = 0.0
        self.reach: Any = 0.0
        self.count = 0

    def look(
        self,
        _: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        scaling: Any,
        causal: Any,
    ) -> None:
        """Add the queries `[1, H, L, d]` of a prompt."""
        rows = query[:1].double()[0]
        self._heads, self.groups = key.shape[1], query.shape[1] // key.shape[1]
        self.gram = self.gram + rows.transpose(1, 2) @ rows
        self.total = self.total + rows.sum(1)
        length, size = query.shape[2], key.shape[2]
        # Early queries see no more than a streaming head does.
        for places in torch.arange(length // 2, length, device=query.device).split(_ROWS):
            bias = bias_of(mask, query[:1], key[:1], places, causal, 0)
            weights = softmax_rows(query[:1, :, places], key[:1], bias, scaling)[0]  # [H, c, S]
            seen = torch.arange(size, device=key.device)[None]
            here = (places + size - length)[:, None]
            near = (seen < self._sink) | (seen > here - self._recent)
            part = weights * near
            part = part / part.sum(-1, keepdim=True).clamp_min(1e-12)
            rows_of = value[0].float().repeat_interleave(len(weights) // self._heads, 0)
            full, less = weights @ rows_of, part @ rows_of
            change = (full - less).norm(dim=-1) / full.norm(dim=-1).clamp_min(1e-12)
            self.reach = self.reach + change.double().sum(-1).unflatten(0, (self._heads, -1)).mean(
                1
            )
            self.count += len(places)

    def filters(self) -> Tensor:
        """First right singular vector of the queries of each head, towards their mean."""
        vectors = torch.linalg.eigh(self.gram).eigenvectors[..., -1]  # [H, d]
        sign = (vectors * self.total).sum(-1, keepdim=True).sign()
        found: Tensor = (vectors * torch.where(sign == 0, 1.0, sign)).unflatten(
            0, (self._heads, -1)
        )
        return found.mean(1).float().cpu()


def _drawn(model: Any, count: int, length: int, seed: int) -> Iterable[dict[str, Tensor]]:
    """Prompts of tokens drawn by chance, the second half like the first."""
    config = model.config
    special = {
        int(value)
        for part in (config, config.get_text_config())
        for name, value in vars(part).items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
    known = torch.tensor(
        [i for i in range(config.get_text_config().vocab_size) if i not in special]
    )
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    for _ in range(count):
        half = known[torch.randint(len(known), (1, length // 2), generator=generator)]
        yield {"input_ids": torch.cat([half, half], 1).to(device)}
