"""A round whose logits processors may keep state: judged position by position, on the host.

Such a processor must see each kept position once, in order, and no rejected one. So every position is processed,
judged and read before the next: more reads and nothing in flight, but the same law and the same state.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Sequence

import mlx.core as mx

from .cache import Pass
from .round import Plan, Proposal, Round, State, advance, pack
from .sampling import Processor, run


def stepwise(round: Round, processors: Sequence[Processor], plan: Plan, history: Sequence[int]) -> Callable:
    """A round as the engine calls it; block verification, which judges jointly, becomes token."""
    single = replace(round, rule="token") if round.rule == "block" else round

    def step(arrays: tuple) -> tuple[tuple, mx.array]:
        state = State(*arrays)
        proposal, logits, target = single.score(state, plan)
        emitted, rows = [], []
        for i in range(plan.num_draft_tokens + 1):
            row = logits[:, i]
            for processor in processors:
                row = run(processor, mx.array([*history, *emitted], dtype=mx.uint32), row)
            rows.append(row)
            draft = _one(proposal, i)
            pair = mx.stack([row] * (draft.tokens.shape[1] + 1), axis=1)
            stands, token = single.judge(pair, state.length + i, state.keys, draft)
            kept = bool(stands.item())
            emitted.append((draft.tokens[0, 0] if kept else token[0]).item())
            if not kept:
                break
        return _settle(state, plan, emitted, rows, target, proposal)

    return step


def _one(proposal: Proposal, i: int) -> Proposal:
    """Draft i as a proposal of its own; none after the last."""
    law = None if proposal.logprobs is None else proposal.logprobs[:, i : i + 1]
    return Proposal(proposal.tokens[:, i : i + 1], law, None)


def _settle(state: State, plan: Plan, emitted: list, rows: list, target: Pass, proposal: Proposal) -> tuple:
    """The same state and packed array as a round in the graph."""
    unused = plan.num_draft_tokens + 1 - len(emitted)
    tokens = mx.array([emitted + [0] * unused], dtype=mx.uint32)
    logits = mx.stack(rows + [mx.zeros_like(rows[0])] * unused, axis=1)
    accepted = mx.array([len(emitted) - 1])
    after = advance(state, tokens, accepted, target, proposal.state)
    return tuple(after), pack(accepted, tokens, logits)
