"""One round of speculative decoding, as one graph.

    history, length     the tokens so far; the newest is *pending*: in no cache yet
        |
    drafter             proposes k tokens and the laws they were drawn from
        |
    target              one pass over [pending, k drafts]: k + 1 laws
        |
    verify              how many drafts stand, and the law of the token after them
        |
    history, length     longer by accepted + 1: the caches' rollback is this subtraction

Nothing here evaluates. What the round decided leaves as one packed int32 array; everything else
stays on the device as the next round's state, so the next round can be built before this one is
read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Protocol, Sequence

import mlx.core as mx

from . import sampling, verify
from .cache import Arrays, Cursor, Layer, Pass
from .drafters import lookup
from .sampling import ACCEPT, DRAFT, DRAW, Processor, Sampling
from .shapes import Float, Integer


class State(NamedTuple):
    """A request between rounds, all of it on the device.

    history holds `length` tokens and room for more; target has `length - 1` of them in its caches.
    """

    history: Integer[mx.array, "batch capacity"]
    length: Integer[mx.array, "batch"]
    keys: Integer[mx.array, "purposes 2"]
    target: list[Arrays]
    drafter: Any


class Plan(NamedTuple):
    """What the host decides for a round before it is built: every shape follows from this.

    catch_up: how many of the newest tokens the drafter reads again before it proposes.
    bound: how far attention reads. length: the exact length, where a processor wants to know it.
    looks_up: the tokens come from the history, not from the drafter. unread: a round without its drafts leaves a
    listener's states for later, in room for so many rows; 0: it reads them now.
    """

    num_draft_tokens: int
    catch_up: int = 1
    bound: int = 256
    length: int | None = None
    looks_up: bool = False
    unread: int = 0


class Proposal(NamedTuple):
    """What a drafter proposes. logprobs: the law each token was drawn from, None if it was certain.

    state: the drafter's for the next round, or a function that makes it of how many were accepted.
    """

    tokens: Integer[mx.array, "batch k"]
    logprobs: Float[mx.array, "batch k vocab"] | None
    state: Any


class Choose(Protocol):
    """Draws drafted token i from logits, given the tokens drafted before it."""

    def __call__(
        self, logits: Float[mx.array, "batch rows"], drafted: Sequence[mx.array]
    ) -> tuple[Integer[mx.array, "batch"], Float[mx.array, "batch vocab"] | None]: ...


class Drafter(Protocol):
    """What proposes. hears: whether it reads the target's hidden states (a `Listener`)."""

    hears: bool

    def propose(self, state: State, plan: Plan, choose: Choose) -> Proposal: ...


class Listener(Drafter, Protocol):
    """A drafter on hidden states. The target is run as `Inside(model, depths)` for it."""

    depths: tuple[int, ...]

    def keep_up(self, state: State, plan: Plan) -> Any:
        """What `hear` goes on from after a round that it proposes nothing in."""

    def hear(self, drafted: Any, states: Sequence[mx.array], start: Integer[mx.array, "batch"]) -> Any:
        """Its state for the next round: `states` are the target's, a row for the token before
        position `start` and for each draft after it."""


def newest(state: State, count: int) -> Integer[mx.array, "batch count"]:
    """The last `count` tokens of the history."""
    index = state.length[:, None] - count + mx.arange(count)
    return mx.take_along_axis(state.history, index, axis=1)


@dataclass(frozen=True, eq=False)
class Round:
    """The static facts of a request's rounds. Calling it builds one: state in, state out.

    model: rows to logits, or to (logits, hidden states) for a drafter that hears them.
    rule: "token", "block" or "match". processors run on every row, on the history and the tokens
    drafted before that row; context is how many tokens they look at (0: the exact history).
    """

    model: Callable
    layers: tuple[Layer, ...]
    drafter: Drafter | None
    sampling: Sampling
    rule: str
    vocab: int
    processors: tuple[Processor, ...] = ()
    context: int = 0

    def __call__(self, state: State, plan: Plan) -> tuple[State, Integer[mx.array, "batch packed"]]:
        proposal, logits, target = self.score(state, plan)
        logits = self._rows(logits, state, plan, proposal.tokens)
        accepted, token = self.judge(logits, state.length, state.keys, proposal)
        emitted = emit(accepted, token, proposal.tokens)
        after = advance(state, emitted, accepted, target, proposal.state)
        return after, pack(accepted, emitted, logits)

    def score(self, state: State, plan: Plan) -> tuple[Proposal, Float[mx.array, "batch rows vocab"], Pass]:
        """The drafts, the target's logits after the pending token and after each of them, and its pass."""
        proposal = self._propose(state, plan)
        rows = mx.concatenate([newest(state, 1), proposal.tokens], axis=1)
        target = Pass(self.model, self.layers, state.target, Cursor(state.length[0] - 1, plan.bound))
        logits = target(rows)
        if self._hears:
            logits, states = logits
            proposal = proposal._replace(state=self.drafter.hear(proposal.state, states, state.length))
        return proposal, fit(logits, self.vocab), target

    @property
    def _hears(self) -> bool:
        return self.drafter is not None and self.drafter.hears

    def _propose(self, state: State, plan: Plan) -> Proposal:
        if plan.num_draft_tokens == 0 or plan.looks_up:
            drafted = self.drafter.keep_up(state, plan) if self._hears else state.drafter
            tokens = mx.zeros((state.length.shape[0], 0), mx.uint32)
            if plan.num_draft_tokens:
                tokens = lookup.propose(state.history, state.length, plan.num_draft_tokens)
            return Proposal(tokens, None, drafted)

        noise = self._draft_noise(state, plan.num_draft_tokens)

        def choose(logits: mx.array, drafted: Sequence[mx.array]) -> tuple:
            logits = self._process(fit(logits, self.vocab), state, plan, drafted)
            if noise is None:
                return mx.argmax(logits, axis=-1), None
            logprobs = sampling.logprobs(logits, self.sampling)
            token = mx.argmax(logprobs + noise[:, len(drafted)], axis=-1)
            return token, drawn_from(logprobs, token)

        return self.drafter.propose(state, plan, choose)

    def _draft_noise(self, state: State, k: int) -> Float[mx.array, "1 k vocab"] | None:
        """Under match the draft draws with the target's noise, so that the two often agree. Else
        the noise serves one round only: a draft that falls has had a say in what block keeps, and
        its position must not meet the same noise again."""
        if self.sampling.greedy:
            return None
        if self.rule == "match":
            return self._noise(state.keys, state.length[0], k)
        key = sampling.position_key(state.keys, DRAFT, state.length[0])
        return mx.random.gumbel((1, k, self.vocab), key=key)

    def _rows(self, logits: mx.array, state: State, plan: Plan, drafts: mx.array) -> mx.array:
        """Every row through the processors, each on the tokens before it."""
        if not self.processors:
            return logits
        drafted = [drafts[:, i] for i in range(drafts.shape[1])]
        rows = [self._process(logits[:, i], state, plan, drafted[:i]) for i in range(logits.shape[1])]
        return mx.stack(rows, axis=1)

    def _process(self, logits: mx.array, state: State, plan: Plan, drafted: Sequence[mx.array]) -> mx.array:
        if not self.processors:
            return logits
        tokens = self._context(state, plan)
        if drafted:
            tokens = mx.concatenate([tokens, mx.stack(drafted, axis=1).astype(tokens.dtype)], axis=1)
        return sampling.process(self.processors, tokens[0], logits)

    def _context(self, state: State, plan: Plan) -> mx.array:
        """What the processors see: the exact history, or the newest tokens of it, with the id
        `vocab`, which stands for no token, before its start."""
        if plan.length is not None:
            return state.history[:, : plan.length]
        index = state.length[:, None] - self.context + mx.arange(self.context)
        tokens = mx.take_along_axis(state.history, mx.maximum(index, 0), axis=1)
        return mx.where(index < 0, self.vocab, tokens)

    def judge(
        self, logits: mx.array, length: mx.array, keys: mx.array, proposal: Proposal
    ) -> tuple[Integer[mx.array, "batch"], Integer[mx.array, "batch"]]:
        """How many drafts stand, and the token after them; the first draft is token `length`."""
        k = proposal.tokens.shape[1]
        if self.sampling.greedy:
            verdict = verify.match(proposal.tokens, logits, None)
            return verdict.accepted, mx.argmax(verdict.next_logprobs, axis=-1)
        target = sampling.logprobs(logits, self.sampling)
        if k == 0 or self.rule == "match" or proposal.logprobs is None:
            noise = self._noise(keys, length[0], k + 1)
            verdict = verify.match(proposal.tokens, target, noise)
            chosen = verify.row(noise, verdict.accepted)
        else:
            rule = verify.token if self.rule == "token" else verify.block
            coins = mx.random.uniform(shape=(1, k), key=sampling.position_key(keys, ACCEPT, length[0]))
            verdict = rule(proposal.tokens, proposal.logprobs, target, coins)
            chosen = sampling.gumbel(keys, DRAW, length[0] + verdict.accepted[0], self.vocab)
        return verdict.accepted, mx.argmax(verdict.next_logprobs + chosen, axis=-1)

    def _noise(self, keys: mx.array, first: mx.array, rows: int) -> mx.array:
        return mx.stack([sampling.gumbel(keys, DRAW, first + i, self.vocab) for i in range(rows)])[None]


def drawn_from(
    logprobs: Float[mx.array, "batch vocab"], token: Integer[mx.array, "batch"]
) -> Float[mx.array, "batch vocab"]:
    """The law a token came from. A row that rules every id out, or is no numbers, is none to draw
    from: then the token was certain. Block verification would take the NaN for a success."""
    chance = mx.take_along_axis(logprobs, token[:, None], axis=-1)
    certain = mx.where(mx.arange(logprobs.shape[-1]) == token[:, None], 0.0, -mx.inf)
    return mx.where(chance > -mx.inf, logprobs, certain)


def emit(
    accepted: Integer[mx.array, "batch"], token: Integer[mx.array, "batch"], drafts: Integer[mx.array, "batch k"]
) -> Integer[mx.array, "batch rows"]:
    """The accepted drafts with the next token behind them; what follows is overwritten later."""
    places = mx.arange(drafts.shape[1] + 1)
    padded = mx.pad(drafts, ((0, 0), (0, 1)))
    return mx.where(places < accepted[:, None], padded, token[:, None]).astype(mx.uint32)


def advance(
    state: State, emitted: mx.array, accepted: mx.array, target: Pass, drafter: Any
) -> State:
    """The state after a round. Of keys and values only the length says how much stands."""
    history = mx.slice_update(state.history, emitted, state.length, (1,))
    drafter = drafter(accepted) if callable(drafter) else drafter
    return State(history, state.length + accepted + 1, state.keys, target.kept(accepted[0] + 1), drafter)


def fit(logits: Float[mx.array, "*rows head"], vocab: int) -> Float[mx.array, "*rows vocab"]:
    """Float32 logits of exactly the ids that may be emitted: a padded head is cut, a short one is
    filled with impossible tokens."""
    logits = logits[..., :vocab].astype(mx.float32)
    short = vocab - logits.shape[-1]
    if short:
        pad = mx.full((*logits.shape[:-1], short), -mx.inf)
        logits = mx.concatenate([logits, pad], axis=-1)
    return logits


def pack(
    accepted: Integer[mx.array, "batch"],
    emitted: Integer[mx.array, "batch rows"],
    logits: Float[mx.array, "batch rows vocab"],
) -> Integer[mx.array, "batch packed"]:
    """Count, tokens and their log-probabilities' bits in one int32 array, so that one read tells all."""
    chosen = mx.take_along_axis(logits, emitted[..., None], axis=-1)[..., 0]
    logprobs = chosen - mx.logsumexp(logits, axis=-1)
    columns = [accepted[:, None].astype(mx.int32), emitted.astype(mx.int32), logprobs.view(mx.int32)]
    return mx.concatenate(columns, axis=1)
