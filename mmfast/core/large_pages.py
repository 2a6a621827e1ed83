"""Memory of prompts in large pages."""

import os

LARGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # torch reads it at its first allocation


def use_large_pages() -> None:
    """Let torch take what is 2 MB and larger in pages of that size, if it has taken nothing yet.

    Towers and prompts write tensors of many megabytes anew in every layer, and the system makes
    each page of 4 KB at its first touch: on Linux, up to a quarter of a bfloat16 tower's time.
    A user's own `THP_MEM_ALLOC_ENABLE` stands.
    """
    os.environ.setdefault(LARGE_PAGES, "1")
