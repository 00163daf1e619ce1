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
    rounds_up = True  # may read more tokens again than it has missed

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

    def begin(self, caches: list, read: int) -> Any:
        """Its state when `read` tokens are in the caches."""
        return caches

    def caches(self, state: Any) -> list:
        return state

    def grow(self, state: Any, capacity: int) -> None:
        grow(self.layers, self.caches(state), capacity)

    def _open(self, state: Any, offset: mx.array, bound: int) -> Pass:
        return Pass(self.model, self.layers, state, Cursor(offset, bound))

    def _known(self, tokens: mx.array) -> mx.array:
        return mx.minimum(tokens, self.vocab - 1)



@dataclass(frozen=True, eq=False)
class RecurrentDrafter(ModelDrafter):
    """A draft model with recurrent state, which must read no token twice.

    Its state: the caches, and how many tokens are in them. A round starts right there and may read
    one token past the newest, because the host does not know how much a round in flight will have
    kept; so the state after the newest is made as after a target's pass. Of the single steps each
    leaves a state, and the accepted count chooses one.
    """

    rounds_up = False

    def propose(self, state: State, plan: Plan, choose: Choose) -> Proposal:
        caches, read = state.drafter
        first = self._open(caches, read[0], plan.bound)
        rows = mx.take_along_axis(state.history, read[:, None] + mx.arange(plan.catch_up), axis=1)
        unread = state.length - read
        logits = mx.take_along_axis(first(self._known(rows)), unread[:, None, None] - 1, axis=1)[:, 0]
        stages, tokens, logprobs = [first.kept(unread[0])], [], []
        while True:
            token, law = choose(logits, tokens)
            tokens.append(token)
            logprobs.append(law)
            if len(tokens) == plan.num_draft_tokens:
                break
            step = self._open(stages[-1], state.length[0] + len(stages) - 1, plan.bound)
            logits = step(self._known(token[:, None]))[:, -1]
            stages.append(step.state)

        def after(accepted: mx.array) -> tuple[list, mx.array]:
            stand = mx.minimum(accepted, len(stages) - 1)
            chosen = [layer.choose(list(made), stand[0]) for layer, made in zip(self.layers, zip(*stages))]
            return chosen, state.length + stand

        known = None if logprobs[0] is None else mx.stack(logprobs, axis=1)
        return Proposal(mx.stack(tokens, axis=1), known, after)

    def read(self, state: Any, tokens: Sequence[int], start: int, bound: int) -> Any:
        caches, read = state
        known = read.item() - start
        assert known >= 0  # or tokens are left out
        if known >= len(tokens):
            return state
        return super().read(caches, tokens[known:], start + known, bound), mx.array([start + len(tokens)])

    def begin(self, caches: list, read: int) -> tuple[list, mx.array]:
        return caches, mx.array([read])

    def caches(self, state: Any) -> list:
        return state[0]
