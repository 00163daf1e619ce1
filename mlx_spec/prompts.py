"""From a prompt (text, ids or chat messages) to token ids.

Encoding and chat templates are the tokenizer's; this knows what to do when a template refuses.
"""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import Any, Mapping, Sequence

from mlx_lm.tokenizer_utils import TokenizerWrapper

Message = Mapping[str, str]
Turns = list[dict[str, str]]  # messages that were checked
Encoded = tuple[list[int], tuple[str, ...]]  # ids, notes

ROLES = ("system", "user", "assistant", "tool")
PLAIN_TEXT = "plain-text mode: this model has no chat template; an instruct variant of it answers better"
SYSTEM_FOLDED = "the chat template has no system role: the system text is part of the first user turn"
MERGED = "the chat template wants alternating roles: turns in a row by the same role were joined"


def encode(tokenizer: TokenizerWrapper | None, prompt: str | Sequence[int] | Sequence[Message], *,
           vocab_size: int | None = None, template_options: Mapping[str, Any] | None = None) -> Encoded:
    """Token ids of a prompt and notes on what was done to it. Raises ValueError.

    prompt: text, encoded as mlx-lm's `stream_generate` does; ids from 0 to vocab_size - 1; or messages
    {"role", "content"}, put through the chat template. An empty prompt is the tokenizer's start token.
    """
    notes: tuple[str, ...] = ()
    is_text = isinstance(prompt, str)
    items = [] if is_text else _items(prompt)
    is_chat = bool(items) and isinstance(items[0], Mapping)
    if tokenizer is None and (is_text or is_chat):
        raise ValueError("this pair has no tokenizer: give the prompt as token ids")
    if is_text:
        ids = _encode_text(tokenizer, prompt)
    elif is_chat:
        ids, notes = _encode_messages(tokenizer, _checked_messages(items), dict(template_options or {}))
    else:
        ids = _checked_ids(tokenizer, items, vocab_size)
    if not ids and (tokenizer is None or tokenizer.bos_token_id is None):
        raise ValueError("the prompt is empty: write something, or give at least one token id")
    return ids or [tokenizer.bos_token_id], notes


def _items(prompt: Any) -> list[Any]:
    try:
        if isinstance(prompt, (bytes, bytearray, Mapping)):
            raise TypeError
        return list(prompt.tolist() if hasattr(prompt, "tolist") else prompt)
    except TypeError:
        raise ValueError(f"the prompt must be text, token ids or messages; got {type(prompt).__name__}") from None


def clean(text: str) -> str:
    """Text that can be encoded: halves of characters become U+FFFD, whole surrogate pairs characters."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _encode_text(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    text = clean(text)
    has_start = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    return list(tokenizer.encode(text, add_special_tokens=not has_start))


def _checked_ids(tokenizer: TokenizerWrapper | None, ids: list[Any], vocab_size: int | None) -> list[int]:
    if vocab_size is None:
        vocab_size = 2**31 if tokenizer is None else max(tokenizer.get_vocab().values()) + 1
    for i in ids:
        if isinstance(i, bool) or not hasattr(i, "__index__"):
            raise ValueError(f"the prompt must be text, token ids or messages; got a list with {i!r}")
        if not 0 <= i < vocab_size:
            raise ValueError(f"token ids must be from 0 to {vocab_size - 1}; got {i}")
    return [int(i) for i in ids]


def _checked_messages(messages: list[Any]) -> Turns:
    checked = []
    for n, message in enumerate(messages):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise ValueError(f"message {n} must have exactly the keys 'role' and 'content'; got {message!r:.80}")
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise ValueError(f"message {n}: role must be one of {', '.join(ROLES)}; got {role!r}")
        if not isinstance(content, str):
            raise ValueError(f"message {n}: content must be text; got {type(content).__name__}")
        checked.append({"role": role, "content": clean(content)})
    return checked


def _encode_messages(tokenizer: TokenizerWrapper, messages: Turns, options: dict) -> Encoded:
    if not tokenizer.has_chat_template:
        return _encode_text(tokenizer, _as_text(messages)), (PLAIN_TEXT,)
    failure, folded = None, _folded(messages)
    for notes, attempt in (((), messages), ((MERGED,), _merged(messages)), ((SYSTEM_FOLDED,), folded),
                           ((SYSTEM_FOLDED, MERGED), _merged(folded))):
        try:
            text = _render(tokenizer, attempt, options)
            ids = _render(tokenizer, attempt, options, tokenize=True)
        except Exception as e:
            failure = failure or e
            continue
        if all(m["content"].strip() in text for m in attempt if m["role"] == "system"):
            return list(ids), notes
    reason = (str(failure).strip().splitlines() or [""])[0]
    raise ValueError(f"the chat template refuses these messages: {reason}") from failure


def _render(tokenizer: TokenizerWrapper, messages: Turns, options: dict, tokenize: bool = False) -> Any:
    return tokenizer.apply_chat_template(messages, tokenize=tokenize, **{"add_generation_prompt": True} | options)


def _folded(messages: Turns) -> Turns:
    system = [m["content"] for m in messages if m["role"] == "system"]
    if not system:
        return messages
    rest = [dict(m) for m in messages if m["role"] != "system"]
    first = next((m for m in rest if m["role"] == "user"), None)
    if first is None:
        rest.insert(0, first := {"role": "user", "content": ""})
    first["content"] = "\n\n".join(text for text in (*system, first["content"]) if text)
    return rest


def _merged(messages: Turns) -> Turns:
    return [{"role": role, "content": "\n\n".join(m["content"] for m in turns)}
            for role, turns in groupby(messages, key=itemgetter("role"))]


def _as_text(messages: Turns) -> str:
    """A lone user turn as it is; a conversation as a transcript that the reply continues."""
    if len(messages) == 1 and messages[0]["role"] == "user":
        return messages[0]["content"]
    lines = [m["content"] if m["role"] == "system" else f"{m['role'].capitalize()}: {m['content']}" for m in messages]
    return "\n\n".join([*lines, "Assistant:"])


def turn_end(tokenizer: TokenizerWrapper) -> int | None:
    """The special token that the chat template puts after an assistant turn, if there is one."""
    if not tokenizer.has_chat_template:
        return None
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "zebra"}]
    try:
        text = _render(tokenizer, turns, {"add_generation_prompt": False})
    except Exception:
        return None
    ids = tokenizer.encode(text.rpartition("zebra")[2].lstrip(), add_special_tokens=False)
    added = getattr(tokenizer, "added_tokens_decoder", {}).get(ids[0]) if ids else None
    return ids[0] if added is not None and added.special else None
