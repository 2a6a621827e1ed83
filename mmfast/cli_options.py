"""Options that several commands share, and what completes them."""

from __future__ import annotations

from typing import Annotated

import typer


def complete_spec(incomplete: str) -> list[str]:
    """Spec strings that end in a method whose name begins as typed."""
    from mmfast.core.registry import methods

    head, _, last = incomplete.rpartition("+")
    prefix = f"{head}+" if head else ""
    return [prefix + m.name for m in methods("reducer") if m.name.startswith(last)]


def complete_cache(incomplete: str) -> list[str]:
    """Cache specs that end in a policy whose name begins as typed."""
    from mmfast.core.registry import methods

    head, _, last = incomplete.rpartition("+")
    prefix = f"{head}+" if head else ""
    return [prefix + m.name for m in methods("cache") if m.name.startswith(last)]


def complete_preset(incomplete: str) -> list[str]:
    """Model shapes of `mmfast bench` that begin as typed."""
    from mmfast.bench.presets import PRESETS

    return [name for name in PRESETS if name.startswith(incomplete)]


Reduce = Annotated[
    str | None,
    typer.Option(
        help="Spec, for example evs:0.25 or divprune:0.5+fastv@llm3:0.5.",
        autocompletion=complete_spec,
    ),
]
Reduces = Annotated[
    list[str] | None,
    typer.Option("--reduce", help="Spec; give it several times.", autocompletion=complete_spec),
]
Cache = Annotated[
    str | None,
    typer.Option(
        help="KV policy spec, for example snapkv:1024 or sink:4+window:512+quant:8.",
        autocompletion=complete_cache,
    ),
]
Caches = Annotated[
    list[str] | None,
    typer.Option(
        "--cache", help="KV policy; give it several times.", autocompletion=complete_cache
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Model = Annotated[
    str | None, typer.Option(help="Checkpoint directory or hub id; embedded if absent.")
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1; CUDA where there is one if absent.")
]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Ttft = Annotated[
    float | None,
    typer.Option("--target-ttft-ms", help="Milliseconds to the first token: plan for it."),
]
TokenTarget = Annotated[
    int | None,
    typer.Option("--target-tokens", help="Visual tokens in a decoder layer, on average."),
]
Memory = Annotated[
    str | None,
    typer.Option("--max-memory", help="Weights, KV and activations: 2GB, 800MB."),
]
Quality = Annotated[str | None, typer.Option("--quality", help="high, balanced or fast.")]
