"""Memory of a policy that acts on a long prompt: a few layers of it at a time."""

from __future__ import annotations

import pytest
import torch
from scheduling import EMBEDDED, model_of
from tensors_made import made

from mmfast.caches.plan import plan_cache
from mmfast.core.trace import Trace
from mmfast.models.reduction.sequence import Sequences
from mmfast.models.wrappers import position_axes
from mmfast.serve.engine.policies import PromptRecipe
from mmfast.serve.engine.prefill import Prefiller, PrefillJob
from mmfast.serve.engine.slots import Embedded


def read(spec: str, n: int) -> tuple[Prefiller, PrefillJob]:
    """A prompt of n words that has been read up to its end, where its policy is to act."""
    prefiller = Prefiller(model_of(EMBEDDED)[0], 64)
    recipe = PromptRecipe((), plan_cache(spec), Sequences(n, [], [], []), Trace())
    with torch.inference_mode():
        embeds = prefiller.decoder.get_input_embeddings()(torch.arange(n) % 200)
    places = torch.arange(n).expand(position_axes(prefiller.decoder), -1)
    job = prefiller.job(Embedded(embeds, places, recipe=recipe), n + 8)
    while job.logits is None:
        prefiller.step([job])
    return prefiller, job


@pytest.mark.parametrize("spec", ["knorm:0.5", "snapkv:0.5", "sink:4+window:64"])
def test_layers_of_a_long_prompt_are_copied_a_few_at_a_time(spec: str) -> None:
    prefiller, job = read(spec, 512)
    whole = job.nbytes
    layers = len(prefiller.lane.kinds)
    sizes, filled = made(lambda: prefiller.result(job))
    assert filled.row is not None and sizes[0] <= whole / layers
