"""Warnings name the line of the user's code, not one of the package."""

from __future__ import annotations

import warnings

from mmfast.core import errors


def test_a_warning_points_at_the_first_line_outside() -> None:
    space = {"warn": errors.warn, "__name__": "mmfast.inner.part"}
    exec("def deep(n):\n    return deep(n - 1) if n else warn('so')", space)
    for depth in (0, 1, 5):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            space["deep"](depth)  # type: ignore[operator]
        assert [(w.filename, str(w.message)) for w in seen] == [(__file__, "so")]


def test_the_command_says_it_in_one_line(capsys: object) -> None:
    from mmfast.cli import _warned

    _warned(UserWarning("two\nlines"), UserWarning, "package.py", 3)
    assert capsys.readouterr().err == "mmfast: warning: two lines\n"  # type: ignore[attr-defined]
