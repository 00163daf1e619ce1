"""Token ids to text that may be shown: end tokens, the budget, stop strings, half characters.

mlx-lm's detokeniser makes the text, and its state machine holds back what may become a stop string; tokens are held
back with their text, so that the two agree at every moment. Knows nothing of models, rounds or MLX arrays.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Collection, Sequence

from mlx_lm.generate import TextStateMachine

from .types import FinishReason, Token


@dataclass(frozen=True)
class Emission:
    """What may be shown now. kept: how many of the fed tokens are in the reply; dropped: how many
    tokens of this or earlier rounds turned out to lie inside a stop string."""

    text: str
    tokens: tuple[Token, ...]
    kept: int
    finish_reason: FinishReason | None
    dropped: int = 0


class Emitter:
    """One reply's text. The end token is not part of the reply; neither is a stop string."""

    def __init__(self, tokenizer: Any, end_ids: Collection[int], stop: Sequence[str] = (),
                 max_tokens: int | None = None):
        self.tokenizer, self.end_ids, self.left = tokenizer, end_ids, max_tokens
        self.detokenizer = tokenizer.detokenizer if tokenizer is not None else None
        machine = TextStateMachine({"normal": [(s, None) for s in stop]}) if stop else None
        self.machine = machine and machine.make_state("normal")
        self.decoded, self.shown = 0, ""
        self.ids: list[int] = []
        self.waiting: deque[Token] = deque()
        self.ends: deque[int] = deque()  # where the text of the first waiting tokens ends

    def feed(self, tokens: Sequence[Token]) -> Emission:
        """Add one round's tokens. After a finish reason nothing more may be fed."""
        text, kept, finish = "", 0, None
        for token in tokens:
            if token.id in self.end_ids:
                finish = "stop"
                break
            text += self._add(token)
            kept += 1
            if self.left is not None:
                self.left -= 1
            finish = "stop_string" if self._stopped else "length" if self.left == 0 else None
            if finish:
                break
        return self._emission(text, kept, finish)

    def close(self, finish: FinishReason) -> Emission:
        """End the reply from outside (cancelled): what was held back is shown."""
        return self._emission("", 0, finish)

    def _add(self, token: Token) -> str:
        self.ids.append(token.id)
        self.waiting.append(token)
        if self.detokenizer is None:
            return ""
        self.detokenizer.add_token(token.id)
        return self._segment()

    def _segment(self) -> str:
        """Newly decoded text, less what may be the beginning of a stop string."""
        segment = self.detokenizer.last_segment
        self.decoded += len(segment)
        if segment:  # tokens that gave no text yet end where this segment does
            self.ends.extend([self.decoded] * (len(self.waiting) - len(self.ends)))
        if self.machine is None:
            return segment
        if self._stopped:
            return ""
        self.machine, segment, _ = TextStateMachine.step(self.machine, segment)
        return segment

    @property
    def _stopped(self) -> bool:
        return self.machine is not None and self.machine[0] is None

    def _emission(self, text: str, kept: int, finish: FinishReason | None) -> Emission:
        if finish in ("stop", "length", "cancelled") and self.detokenizer is not None:
            text += self._flush()
            if self._stopped:
                finish = "stop_string"
        self.shown += text
        released = self._release(finish)
        return Emission(text, released, kept, finish, len(self.waiting) if finish else 0)

    def _flush(self) -> str:
        self.detokenizer.finalize()
        text = self._segment()
        if self.machine is None or self._stopped:
            return text
        self.machine, held, _ = TextStateMachine.flush(self.machine)
        return text + held

    def _release(self, finish: FinishReason | None) -> tuple[Token, ...]:
        """Tokens whose text is shown; without stop strings, or at an ordinary end, all."""
        if finish == "stop_string":
            ready = self._needed() - (len(self.ids) - len(self.waiting))
        elif finish or self.machine is None:
            ready = len(self.waiting)
        else:
            ready = sum(end <= len(self.shown) for end in self.ends)
        for _ in range(min(ready, len(self.ends))):
            self.ends.popleft()
        return tuple(self.waiting.popleft() for _ in range(ready))

    def _needed(self) -> int:
        """The fewest tokens that spell what is shown: what lies wholly in the stop string goes."""
        needed = len(self.ids)
        while needed and self._spelt(needed - 1).startswith(self.shown):
            needed -= 1
        return needed

    def _spelt(self, count: int) -> str:
        detokenizer = self.tokenizer.detokenizer
        for i in self.ids[:count]:
            detokenizer.add_token(i)
        detokenizer.finalize()
        return detokenizer.text
