"""An autoregressive head on the target's hidden states, as in EAGLE (arXiv 2401.15077, 2503.01840).

    states of token p - 1 (several depths)   -> project --+
    embedding of token p                     ------------ fuse -> layers -> norm -> target's head
                                                          ^          |
    for the drafts there are no target states:            +----------+  its own state goes in again

Slot p of its caches holds token p with the states of token p - 1. The first pass of a round reads
all that was written since the last one, with the target's own states; what was rejected lies past the
newest token, where nothing looks and the next write lands.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import BaseModelArgs, create_attention_mask
from mlx_lm.models.llama import ModelArgs, TransformerBlock

from ..cache import Cursor, Full, Layer, Pass, grow
from ..round import Choose, Plan, Proposal, State
from ..shapes import Float, Integer
from .shared import Shared


@dataclass
class HeadsArgs(BaseModelArgs):
    """config.json of a head. depths: layers after which the target's states are read, beside its final ones.
    vocab_size: output ids, the target's or fewer."""

    hidden_size: int
    vocab_size: int
    depths: list[int] = field(default_factory=list)
    num_hidden_layers: int = 1
    intermediate_size: int = 0
    num_attention_heads: int = 8
    num_key_value_heads: int = 8
    head_dim: int = 64
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    model_type: str = "mlx_spec_heads"

    def layer_args(self) -> ModelArgs:
        return ModelArgs.from_dict(vars(self))


class Unrolled:
    """One layer's keys and values of all steps so far; step s stands at the positions after row s."""

    def __init__(self) -> None:
        self.offset, self.keys, self.values = 0, [], []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys.append(keys)
        self.values.append(values)
        self.offset += 1
        return mx.concatenate(self.keys, axis=2), mx.concatenate(self.values, axis=2)


class Heads(nn.Module):
    """The trained part. `bind` adds what it shares with the target: embedding and output head."""

    def __init__(self, args: HeadsArgs):
        super().__init__()
        self.args, self.model_type = args, args.model_type
        dim, states = args.hidden_size, len(args.depths) + 1
        self.inward_norms = [nn.RMSNorm(dim, eps=args.rms_norm_eps) for _ in range(states)]
        self.project = nn.Linear(states * dim, dim, bias=False)
        self.embed_norm = nn.RMSNorm(dim, eps=args.rms_norm_eps)
        self.state_norm = nn.RMSNorm(dim, eps=args.rms_norm_eps)
        self.fuse = nn.Linear(2 * dim, dim, bias=False)
        self.layers = [TransformerBlock(args.layer_args()) for _ in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(dim, eps=args.rms_norm_eps)
        self.ids = mx.arange(args.vocab_size, dtype=mx.int32)
        self.freeze(keys="ids", recurse=False)

    @property
    def depths(self) -> tuple[int, ...]:
        return tuple(self.args.depths)

    def bind(self, target: nn.Module, dtype: mx.Dtype) -> None:
        """Share the target's embedding and head, and compute in its dtype. Raises PairError."""
        self.shared = Shared(target, self.ids, self.args.hidden_size, self.depths)
        self.set_dtype(dtype)

    def inward(self, states: Sequence[Float[mx.array, "batch rows dim"]]) -> Float[mx.array, "batch rows dim"]:
        """The target's states, shallow to final, as one."""
        dtype = self.norm.weight.dtype
        return self.project(mx.concatenate([n(s.astype(dtype)) for n, s in zip(self.inward_norms, states)], axis=-1))

    def __call__(self, tokens: Integer[mx.array, "batch rows"], state: Float[mx.array, "batch rows dim"],
                 cache: Sequence[Any], mask: Any = None) -> Float[mx.array, "batch rows dim"]:
        """One step: each token with the state before it, to a state of its own."""
        x = self.embed_norm(self.shared.embed(tokens).astype(state.dtype))
        x = self.fuse(mx.concatenate([x, self.state_norm(state)], axis=-1))
        mask = create_attention_mask(x, cache[0]) if mask is None else mask
        for layer, c in zip(self.layers, cache):
            x = layer(x, mask, c)
        return x

    def logits(self, state: Float[mx.array, "rows dim"], step: int = 0) -> Float[mx.array, "rows vocab"]:
        """Of the output ids only; every step has the same head."""
        return self.shared.head(self.norm(state))

    def unroll(self, tokens: Integer[mx.array, "batch rows"], states: Sequence[Float[mx.array, "batch rows dim"]],
               steps: int) -> list[Float[mx.array, "batch rows dim"]]:
        """For training: the drafts that start at every row at once, as in EAGLE-3. Step s of row i has read tokens
        i .. i + s and predicts token i + s + 1; like a draft, it sees the target's states up to row i, then its own."""
        rows = tokens.shape[1]
        causal, own = mx.tri(rows, rows, dtype=mx.bool_), mx.eye(rows, dtype=mx.bool_)
        state = self.inward([mx.pad(s, ((0, 0), (1, 0), (0, 0)))[:, :-1] for s in states])
        caches, found = [Unrolled() for _ in self.layers], []
        for s in range(steps):
            mask = mx.concatenate([causal] + [own] * s, axis=1)
            state = self(mx.roll(tokens, -s, axis=1), state, caches, mask)
            found.append(state)
        return found

    def cache_layers(self) -> tuple[Layer, ...]:
        a = self.args
        layer = Full(a.num_key_value_heads, a.head_dim, a.head_dim, self.norm.weight.dtype)
        return (layer,) * a.num_hidden_layers

    def drafter(self, layers: tuple[Layer, ...], vocab: int) -> HeadsDrafter:
        return HeadsDrafter(self, layers, vocab)


class Unread(NamedTuple):
    """A drafter's state that the next round's states are put behind: what was rejected is overwritten. room: rows."""

    caches: list
    states: list[mx.array]
    start: Integer[mx.array, "batch"]
    room: int

    def followed_by(self, states: Sequence[Float[mx.array, "batch rows dim"]], start: Integer[mx.array, "batch"]) -> tuple:
        # MLX does not check array offsets: past the end a write would corrupt the heap.
        at = mx.minimum(start - self.start, self.room - states[0].shape[1])
        padded = [mx.pad(old, ((0, 0), (0, self.room - old.shape[1]), (0, 0))) for old in self.states]
        return self.caches, [mx.slice_update(old, new, at, (1,)) for old, new in zip(padded, states)], self.start


@dataclass(frozen=True, eq=False)
class HeadsDrafter:
    """Its state: caches, the target's states of the rows that it has not read, and the position after the first of
    them; rows past the newest token mean nothing."""

    model: Heads
    layers: tuple[Layer, ...]
    vocab: int
    hears = True

    @property
    def depths(self) -> tuple[int, ...]:
        return self.model.depths

    @property
    def signature(self) -> tuple:
        return id(self.model), self.layers, self.vocab

    def propose(self, state: State, plan: Plan, choose: Choose) -> Proposal:
        own, out = self._read(state, plan.bound)
        tokens, logprobs = [], []
        for _ in range(plan.num_draft_tokens):
            if tokens:
                out = own(tokens[-1][:, None], out)
            token, law = choose(self.model.shared.spread(self.model.logits(out[:, -1]), self.vocab), tokens)
            tokens.append(token)
            logprobs.append(law)
        known = None if logprobs[0] is None else mx.stack(logprobs, axis=1)
        return Proposal(mx.stack(tokens, axis=1), known, own.state)

    def keep_up(self, state: State, plan: Plan) -> list | Unread:
        """In a round without drafts: what the last rounds wrote is kept for later, a pass over many rows costing
        little more than one over a single row, until there is no more room for it."""
        return Unread(*state.drafter, plan.unread) if plan.unread else self._read(state, plan.bound)[0].state

    def _read(self, state: State, bound: int) -> tuple[Pass, Float[mx.array, "batch 1 dim"]]:
        """The newest token's state, the caches behind it."""
        caches, states, start = state.drafter
        own = Pass(self.model, self.layers, caches, Cursor(start[0], bound))
        rows = states[0].shape[1]
        tokens = mx.take_along_axis(state.history, start[:, None] + mx.arange(rows), axis=1)
        out = own(tokens, self.model.inward(states))
        newest = (state.length - 1 - start)[:, None, None]
        own.cursor.offset = state.length[0]
        return own, mx.take_along_axis(out, newest, axis=1)

    def hear(self, caches: list | Unread, states: list[mx.array], start: mx.array) -> tuple:
        """The state of the next round: `start` is the position after the first of the states."""
        if isinstance(caches, Unread):
            return caches.followed_by(states, start)
        return caches, states, start

    def leave(self, state: State, kept: int, bound: int) -> tuple[list[Any], list[mx.array] | None]:
        """For a later turn, when all but `kept` tokens are forgotten: mlx-lm's caches, and the
        target's states that the next token is read with, None where they are gone."""
        _, states, start = state.drafter
        caches = self._read(state, bound)[0].state
        row = kept - start.item()
        last = [s[:, row : row + 1] for s in states] if row >= 0 else None
        return [layer.hand_back(a, kept) for layer, a in zip(self.layers, caches)], last

    def grow(self, state: tuple, capacity: int) -> None:
        grow(self.layers, state[0], capacity)
