"""A small language model as the drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Sequence

import mlx.core as mx

from ..cache import Cursor, Layer, Pass, grow
from ..round import Choose, Plan, Proposal, State, newest


@dataclass(frozen=True, eq=False)
class ModelDrafter:
    """Proposes k tokens one after the other, with caches of its own.

    Before it proposes it reads the newest `plan.catch_up` tokens at their own positions: at least
    those it has missed, which is the last proposal after a full run. Reading again what it has
    read changes nothing. Ids that its embedding does not know are read as the last one it knows:
    that can cost acceptance, never exactness.
    """

    model: Callable
    layers: tuple[Layer, ...]
    vocab: int
    hears = False

    @property
    def signature(self) -> tuple:
        return self.layers, self.vocab

    def propose(self, state: State, plan: Plan, choose: Choose) -> Proposal:
        draft = self._open(state.drafter, state.length[0] - plan.catch_up, plan.bound)
        rows = newest(state, plan.catch_up)
        tokens, logprobs = [], []
        for _ in range(plan.num_draft_tokens):
            logits = draft(self._known(rows))[:, -1]
            token, law = choose(logits, tokens)
            tokens.append(token)
            logprobs.append(law)
            rows = token[:, None]
        known = None if logprobs[0] is None else mx.stack(logprobs, axis=1)
        return Proposal(mx.stack(tokens, axis=1), known, draft.state)

    def read(self, state: Any, tokens: Sequence[int], start: int, bound: int) -> Any:
        """Catch up on many tokens at once, known to the host: after a stretch of plain rounds."""
        draft = self._open(state, mx.array(start), bound)
        draft(self._known(mx.array([tokens], dtype=mx.uint32)))
        return draft.state

    def grow(self, state: Any, capacity: int) -> None:
        grow(self.layers, state, capacity)

    def _open(self, state: Any, offset: mx.array, bound: int) -> Pass:
        return Pass(self.model, self.layers, state, Cursor(offset, bound))

    def _known(self, tokens: mx.array) -> mx.array:
        return mx.minimum(tokens, self.vocab - 1)

