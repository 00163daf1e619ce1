"""Text that others wrote, made safe to show: as tokens by origin, or as Markdown.

Nothing a model or a user writes becomes markup of the page: in HTML everything is escaped, in
Markdown everything outside code. Knows nothing of widgets.
"""

from __future__ import annotations

import html
import math
import re
from typing import Any, Iterable, Iterator

OPEN, CLOSE = "<think>", "</think>"
FENCE = re.compile(r"\s*(`{3,}|~{3,})")
# Code within a paragraph, and maths, in which angle brackets and backslashes are themselves.
SPAN = re.compile(r"(?<![`\\])(`+)(?!`)(?:(?!\n\s*\n).)+?(?<!`)\1(?!`)|\$\$.+?\$\$", re.DOTALL)
UNSAFE_LINK = re.compile(r"\]\((?!\s*(?:https?://|mailto:|#))")
ESCAPED = re.compile(r"(?<!\\)\\([<&])")
REFERENCE = re.compile(r"^(\s*)\[([^\]\n]+)\]:", re.MULTILINE)

LEGEND = ('<div class="legend"><span class="t accepted">accepted</span> draft was right '
          '<span class="t correction">correction</span> draft was wrong '
          '<span class="t bonus">bonus</span> after a full run '
          '<span class="t plain">plain</span> one at a time <i>hover: probability under the target</i></div>')


def clean(text: str) -> str:
    """Half characters and NUL, which a paste can bring, become the replacement character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace("\0", "\ufffd")


def escape(text: str) -> str:
    return html.escape(clean(text), quote=True)


def tokens_html(pieces: Iterable[tuple[str, tuple[Any, ...]]]) -> str:
    """Each token with its origin as class and its probability under the target as title. Text of
    several tokens that can't be told apart counts as the last one's."""
    return "".join(_token(text, tokens[-1]) if tokens else escape(text) for text, tokens in pieces if text)


def _token(text: str, token: Any) -> str:
    probability = math.exp(min(token.logprob, 0.0))
    blank = "" if text.strip() else " blank"
    return f'<span class="t {token.origin}{blank}" title="{token.origin}, p = {probability:.3g}">{escape(text)}</span>'


def split_thinking(text: str, thinks: bool = False) -> tuple[str | None, str, bool]:
    """(thought, answer, whether the thought is finished); thinks: the prompt has opened it already.

    A tag inside code is text. Without an opening tag, what comes before a closing one is thought.
    """
    body = text.lstrip()
    opened = thinks or body.startswith(OPEN)
    thought = body.removeprefix(OPEN)
    end = _closing(thought, opened)
    if end is not None:
        return thought[:end].strip(), thought[end + len(CLOSE):].lstrip(), True
    return (thought.strip(), "", False) if opened else (None, text, True)


def _closing(text: str, opened: bool) -> int | None:
    at = 0
    for kind, part in _parts(text):
        if kind == "text" and CLOSE in part:
            return at + part.index(CLOSE)
        at += len(part)
    # A thought cut off in its code closes on a line of its own.
    alone = re.search(rf"^{CLOSE}", text, re.MULTILINE) if opened else None
    return alone.start() if alone and _open_fence(text[: alone.start()]) else None


def thought_html(thought: str, finished: bool) -> str:
    """A block that folds once the thinking is done."""
    label = "thinking" if finished else "thinking, not finished"
    return f'<details class="thought"{"" if finished else " open"}><summary>{label}</summary>{escape(thought)}</details>'


def markdown(text: str) -> str:
    """Markdown that shows the text and nothing else: no HTML, no images, no links but to the web;
    an open code fence is closed, so that what follows is not code."""
    text = clean(text)
    fence = _open_fence(text)
    made = "".join(_safe(kind, part) for kind, part in _parts(text))
    return made if fence is None else f"{made.rstrip()}\n{fence}\n"


def _safe(kind: str, part: str) -> str:
    if kind == "code":
        return part
    if kind == "maths":
        return part.replace("<", r"\lt ").replace(">", r"\gt ")
    # Entities, because a backslash could meet another one before it.
    part = ESCAPED.sub(r"\1", part).replace("&", "&amp;").replace("<", "&lt;").replace("![", "&#33;[")
    return REFERENCE.sub(r"\1&#91;\2]:", UNSAFE_LINK.sub("]&#40;", part))


def _parts(text: str) -> Iterator[tuple[str, str]]:
    """("text" | "code" | "maths", part): together they are the text."""
    for fence, block in _blocks(text):
        if fence:
            yield "code", block
            continue
        at = 0
        for span in SPAN.finditer(block):
            yield "text", block[at : span.start()]
            yield ("code" if span[1] else "maths"), span[0]
            at = span.end()
        yield "text", block[at:]


def _blocks(text: str) -> Iterator[tuple[str | None, str]]:
    """Fenced blocks, with their fence, and what lies between; the last one is still open."""
    held, fence = "", None
    for line in text.splitlines(keepends=True):
        mark = FENCE.match(line)
        if fence is None and mark:
            yield None, held
            held, fence = line, mark[1]
        elif fence and mark and mark[1].startswith(fence) and line.strip() == mark[1]:
            yield fence, held + line
            held, fence = "", None
        else:
            held += line
    yield fence, held


def _open_fence(text: str) -> str | None:
    return list(_blocks(text))[-1][0]


def history_html(messages: Iterable[dict[str, str]]) -> str:
    """What was said, as text."""
    return "".join(f'<div class="said {escape(m["role"])}">{escape(m["content"])}</div>' for m in messages)


def history_markdown(messages: Iterable[dict[str, str]]) -> str:
    """The same with the replies as Markdown, their thinking folded."""
    return "".join(f'<div class="said {escape(m["role"])}">\n\n{_told(m)}\n\n</div>\n\n' for m in messages)


def _told(message: dict[str, str]) -> str:
    thought, answer, _ = split_thinking(message["content"])
    if message["role"] == "user" or thought is None:
        return markdown(message["content"])
    return f'<details class="thought"><summary>thinking</summary>\n\n{markdown(thought)}\n\n</details>\n\n{markdown(answer)}'
