"""A conversation: messages, and what the models have read of them, so that a turn reads only what
is new. Every turn gives the same tokens as a cold run over the same messages; with `max_kv_size` or
`kv_bits`, whose caches depend on how a prompt was cut, as mlx-lm's own continuation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable

from .api import Stream
from .engine import Decoder
from .errors import SpecError
from .memory import Memory, recall
from .prompts import encode
from .types import Chunk, Options, Result

FORMAT = 1
CACHE_OPTIONS = ("max_kv_size", "kv_bits", "kv_group_size", "quantized_kv_start")


class Chat:
    """Turns with a pair. messages: what was said, {"role", "content"}; change it with `edit`.

    pair: may be replaced between turns, by one with another draft or none; what the target has
    read is kept. system: text before the first turn. options: of every turn, see `Options`.
    """

    def __init__(self, pair: Any, system: str | None = None, **options: Any):
        Options.of(**options)
        self.pair, self.options = pair, options
        self.messages: list[dict[str, str]] = [] if not system else [{"role": "system", "content": system}]
        self._memory: Memory | None = None
        self._caches: tuple = ()

    def send(self, text: str, **options: Any) -> Result:
        """The whole reply to a user turn; options of this turn only."""
        return self.stream(text, **options).result()

    def stream(self, text: str, **options: Any) -> Turn:
        """The reply chunk by chunk. What there is when it ends, or is closed, becomes part of the
        conversation. Raises ValueError for a turn without text, before anything is changed."""
        _check_turn(text)
        return self._turn([*self.messages, {"role": "user", "content": text}], options)

    def retry(self, **options: Any) -> Turn:
        """Another reply to the last user turn."""
        kept = list(self.messages)
        while kept and kept[-1]["role"] == "assistant":
            kept.pop()
        if not kept or kept[-1]["role"] != "user":
            raise ValueError("there is no turn to retry: send something first")
        return self._turn(kept, options)

    def edit(self, index: int, text: str, **options: Any) -> Turn:
        """Say user turn `index` (0 is the first) differently, and forget what came after it."""
        places = [i for i, m in enumerate(self.messages) if m["role"] == "user"]
        if not -len(places) <= index < len(places):
            raise ValueError(f"there are {len(places)} user turns to edit; got index {index}")
        _check_turn(text)
        return self._turn([*self.messages[: places[index]], {"role": "user", "content": text}], options)

    def clear(self) -> None:
        """Begin anew; the system text stays."""
        self.messages = [m for m in self.messages if m["role"] == "system"]
        self._memory = None

    def save(self, path: str | Path) -> None:
        """The messages as JSON; caches are read anew after `load`. Raises SpecError."""
        try:
            Path(path).write_text(json.dumps({"format": FORMAT, "messages": self.messages}, indent=1), encoding="utf-8")
        except OSError as e:
            raise SpecError(f"{path} can't be written: {e.strerror or e}") from e

    def load(self, path: str | Path) -> None:
        """Messages that `save` wrote, in place of these. Raises SpecError."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            messages = [{"role": m["role"], "content": m["content"]} for m in found["messages"]]
        except OSError as e:
            raise SpecError(f"{path} can't be read: {e.strerror or e}") from e
        except (ValueError, KeyError, TypeError) as e:
            raise SpecError(f"{path} is no saved conversation; give a file that Chat.save wrote") from e
        self.messages, self._memory = messages, None

    def _turn(self, messages: list[dict[str, str]], options: dict[str, Any]) -> Turn:
        checked = Options.of(**self.options | options)
        ids, notes = encode(self.pair.tokenizer, messages, vocab_size=self.pair.vocab_size)
        caches = tuple(getattr(checked, name) for name in CACHE_OPTIONS)
        memory = self._memory if caches == self._caches else None
        self._memory, self._caches = None, caches  # it is spent, whatever becomes of the turn
        memory = recall(memory, self.pair, ids, drafting=checked.num_draft_tokens != 0)
        decoder = Decoder(self.pair, ids, checked, memory=memory)
        self.messages = messages
        return Turn(self, decoder, (*self.pair.notes, *notes))

    def _said(self, text: str, memory: Memory | None) -> None:
        if text:
            self.messages = [*self.messages, {"role": "assistant", "content": text}]
        self._memory = memory


def _check_turn(text: str) -> None:
    if not isinstance(text, str):
        raise ValueError(f"the message must be text; got {type(text).__name__}")
    if not text.strip():
        raise ValueError("the message is empty: write something")


class Turn(Stream):
    """A reply under way, which joins the conversation when it ends."""

    def __init__(self, chat: Chat, decoder: Decoder, notes: tuple[str, ...]):
        super().__init__(decoder, notes)
        self._chat: Chat | None = chat

    def __next__(self) -> Chunk:
        try:
            return super().__next__()
        except StopIteration:
            self._settle(self._decoder.leave)
            raise
        except BaseException:
            self._settle(lambda: None)
            raise

    def close(self) -> None:
        super().close()
        if not self._chunks.gi_running:  # otherwise the thread that reads it settles it
            self._settle(self._decoder.leave)

    def _settle(self, leave: Callable[[], Memory | None]) -> None:
        chat, self._chat = self._chat, None
        if chat is not None:
            chat._said("".join(c.text for c in self._seen), leave())

    def _free(self) -> None:
        """The caches stay for the next turn."""
