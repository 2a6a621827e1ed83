"""What the tab "Ask" shows: cards with figures, frames with what became of their patches."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import mmfast
from mmfast.demos.asking import Shown, same

LEGEND = (
    ("as it was", "kept"),
    ("same colour", "merged into one token; its place is framed"),
    ("dark", "dropped"),
    ("pale", "merged inside the vision tower"),
)


def player(path: str, uploaded: bool = False) -> str:
    """A clip that plays or a picture, as the browser shows it.

    Raises:
        MmfastError: It is neither.
    """
    kind, suffix = mmfast.kind_of(path), path.rsplit(".", 1)[-1].lower()
    if uploaded:
        source = "gradio_api/file=" + quote(path)
    else:
        data = base64.b64encode(Path(path).read_bytes()).decode()
        source = f"data:{'video/mp4' if suffix == 'mp4' else 'image/jpeg'};base64,{data}"
    if kind == "video" and suffix not in ("gif", "webp"):
        return (
            f'<video class="mm-player" src="{escape(source)}" controls loop muted autoplay '
            'playsinline aria-label="The clip"></video>'
        )
    return f'<img class="mm-player" src="{escape(source)}" alt="The picture">'


def cards(base: Shown, fast: Shown, right: str | None) -> str:
    """Two answers beside each other, and whether they agree."""
    agree = same(base.text, fast.text)
    share = fast.tokens / max(fast.of, 1)
    word = "Same answer" if agree else "Another answer"
    verdict = f"{word} with {share:.0%} of the visual tokens."
    known = "" if right is None else f' <span class="mm-soft">Right is: {escape(right)}.</span>'
    left = _card("All tokens", base, None)
    card = _card(fast.spec or "All tokens", fast, base)
    return (
        f'<div class="mm-cards">{left}{card}</div>'
        f'<p class="mm-verdict {"mm-same" if agree else "mm-other"}" role="status">'
        f"<strong>{verdict}</strong>{known}</p>{_stages(base, fast)}"
    )


def _card(title: str, shown: Shown, base: Shown | None) -> str:
    tokens, ttft = f"{shown.tokens:,}", f"{shown.ttft_ms:,.0f} ms"
    if base is not None:
        tokens += f" <small>of {shown.of:,}</small>"
        ttft += f" <small>{base.ttft_ms / max(shown.ttft_ms, 1e-9):.2f}x</small>"
    return (
        f'<section class="mm-card{"" if base is None else " mm-fast"}"><h3>{escape(title)}</h3>'
        f'<p class="mm-answer">{escape(shown.text) or "(no answer)"}</p><dl>'
        f"<div><dt>visual tokens</dt><dd>{tokens}</dd></div>"
        f"<div><dt>first token after</dt><dd>{ttft}</dd></div></dl></section>"
    )


def _stages(base: Shown, fast: Shown) -> str:
    before = {name: ms for name, _, _, ms in base.rows}
    rows = "".join(
        f"<tr><th scope=row>{escape(name)}</th><td>{was:,}</td><td>{left:,}</td>"
        f"<td>{before[name]:,.1f}</td><td>{ms:,.1f}</td></tr>"
        if name in before
        else f"<tr><th scope=row>{escape(name)}</th><td>{was:,}</td><td>{left:,}</td>"
        f"<td></td><td>{ms:,.1f}</td></tr>"
        for name, was, left, ms in fast.rows
    )
    return (
        f"<details class=mm-more><summary>Where the time went</summary>"
        f'<div class="mm-scroll" tabindex="0" role="region" aria-label="Milliseconds per stage">'
        f"<table><thead><tr><th scope=col>stage</th><th scope=col>tokens in</th>"
        f"<th scope=col>out</th><th scope=col>all tokens, ms</th><th scope=col>fewer, ms</th>"
        f"</tr></thead><tbody>{rows}</tbody></table></div><p class=mm-soft>First token: median of "
        f"{fast.rounds}, both ways in turn; stages: of the last one. The embedded model is so "
        "small that reading and encoding take most of the time; the README has models of real "
        "size.</p></details>"
    )


def frames(base: Shown, fast: Shown) -> str:
    """What the model sees and what is left of it, frame by frame."""
    seen = [uri(picture) for picture, _ in base.frames]
    left = [
        {"kept": uri(picture), "caption": _caption(number, len(fast.frames), line)}
        for number, (picture, line) in enumerate(fast.frames)
    ]
    data = [{"seen": seen[min(i, len(seen) - 1)], **each} for i, each in enumerate(left)]
    legend = "".join(f"<li><b>{name}</b> {meaning}</li>" for name, meaning in LEGEND)
    return (
        f"<mm-frames data-frames='{escape(json.dumps(data), quote=True)}'></mm-frames>"
        f'<ul class="mm-legend">{legend}</ul>'
    )


def _caption(number: int, count: int, line: str) -> str:
    """The overlay counts frames from 0; people do not."""
    rest = line.split(": ", 1)[-1]
    return f"Frame {number + 1} of {count}: {rest}" if count > 1 else rest


def uri(picture: Any) -> str:
    """A PIL image as a data URI, so that nothing is stored."""
    file = io.BytesIO()
    picture.save(file, "webp", quality=88)
    return "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()


def about_method(method: Any) -> str:
    """One line about a method with a link to its paper."""
    paper = link(method.paper) or "a baseline, no paper"
    needs = ", ".join(method.needs)
    return f'<p class="mm-soft">{escape(method.summary)} Reads: {escape(needs)}. {paper}</p>'


def link(paper: str) -> str:
    """To an arXiv page."""
    if not paper:
        return ""
    where = f"https://arxiv.org/abs/{escape(paper)}"
    return f'<a href="{where}" target="_blank" rel="noopener noreferrer">arXiv {escape(paper)}</a>'


def note(text: str) -> str:
    """A line in place of a result."""
    return f'<p class="mm-empty">{escape(text)}</p>'


def facts(rows: Sequence[tuple[str, str]], title: str) -> str:
    """Names and figures in a grid."""
    cells = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in rows)
    return f'<dl class="mm-facts" aria-label="{escape(title)}">{cells}</dl>'
