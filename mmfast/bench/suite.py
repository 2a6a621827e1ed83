"""Names of the reducers that the accuracy tables measure: `python -m mmfast.bench.suite`.

Every registered method at its default site, and some whose default is inside the language model
also before the embedded model's last layer, where they are seen to lose least. Site `pixel` needs
a tower that packs patches, which the embedded models do not have.
"""

from __future__ import annotations

from mmfast.core.registry import methods

LAST = "llm4"  # of the embedded models' five layers
OTHER_SITES = ("fastv", "holitom_inner")


def names() -> list[str]:
    """Specs without budgets."""
    found = [method.name for method in methods("reducer") if method.sites[0] != "pixel"]
    return [*found, *(f"{name}@{LAST}" for name in OTHER_SITES)]


if __name__ == "__main__":
    print("\n".join(names()))
