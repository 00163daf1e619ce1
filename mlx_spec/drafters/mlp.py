"""The multi-head speculator of IBM's "The Hitchhiker's Guide to Speculative Decoding" (arXiv 2404.19124).

    the target's state before the newest token  -> proj_0 --+
    embedding of the newest token               ----------- add -> norm -> GELU = state_0 -> head_0
    state_0                                     -> proj_1 --+
    embedding of draft 0                        ----------- add -> norm -> GELU = state_1 -> head_1 ...

A step looks at one state and one token, so there is nothing to cache and nothing to read along.
Knows the layout of the published checkpoints, not where they come from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import BaseModelArgs

from ..round import Choose, Plan, Proposal, State, newest
from ..shapes import Float, Integer
from .shared import Shared

EPS = 1e-6


@dataclass
class MlpArgs(BaseModelArgs):
    """config.json of a speculator. emb_dim: width of the target's states; inner_dim: of its own, 0: the same. reduced:
    the output ids are a choice of the target's, kept in `ids`; the embedding has one row more, for all other tokens."""

    emb_dim: int
    n_predict: int
    vocab_size: int
    inner_dim: int = 0
    tie_weights: bool = False
    scale_input: bool = False
    reduced: bool = False
    model_type: str = "mlp_speculator"

    def __post_init__(self) -> None:
        self.inner_dim = self.inner_dim or self.emb_dim
        if min(self.emb_dim, self.n_predict, self.vocab_size, self.inner_dim) < 1:
            raise ValueError("emb_dim, n_predict, vocab_size and inner_dim must be positive")

    @property
    def hidden_size(self) -> int:
        return self.emb_dim


class Norm(nn.RMSNorm):
    """By the root of the mean square, with a bias."""

    def __init__(self, dims: int):
        super().__init__(dims, eps=EPS)
        self.bias = mx.zeros((dims,))

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x) + self.bias


class Mlp(nn.Module):
    """The trained part. Tied heads share everything but the first projection, whose input has another width."""

    depths = ()

    def __init__(self, args: MlpArgs):
        super().__init__()
        self.args, self.model_type = args, args.model_type
        inner, n = args.inner_dim, args.n_predict
        own = 1 if args.tie_weights else n
        self.emb = [nn.Embedding(args.vocab_size + args.reduced, inner) for _ in range(own)]
        self.proj = [nn.Linear(inner if i else args.emb_dim, inner, bias=False) for i in range(min(own + 1, n))]
        self.ln = [Norm(inner) for _ in range(own)]
        self.head = [nn.Linear(inner, args.vocab_size, bias=False) for _ in range(own)]
        for layer in self.proj + self.head:
            # As wide as in IBM's training, on which the two weights of the sum below are tuned.
            layer.weight = mx.random.normal(layer.weight.shape, scale=inner**-0.5)
        self.ids = mx.arange(args.vocab_size, dtype=mx.int32)
        self.freeze(keys="ids", recurse=False)

    @property
    def largest(self) -> int:
        """The most tokens that it can propose."""
        return self.args.n_predict

    @property
    def token_weight(self) -> float:
        """Of the token's embedding, where the projected state has 1."""
        state = 0.5 ** (0.5 / self.args.n_predict)
        return math.sqrt((1 - state**2) * self.args.inner_dim / 2) / state

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """From the names of published checkpoints: with a prefix, tied weights stored once or for each head."""
        kept: dict[str, mx.array] = {}
        for name, weight in sorted(weights.items()):
            part, _, rest = name.removeprefix("speculator.").partition(".")
            index, _, last = rest.partition(".")
            if self.args.tie_weights and index.isdigit() and part in ("emb", "proj", "ln", "head"):
                rest = f"{min(int(index), len(self[part]) - 1)}.{last}"
            kept.setdefault(f"{part}.{rest}" if rest else part, weight)
        if not self.args.reduced:
            kept.setdefault("ids", self.ids)
        return kept

    def bind(self, target: nn.Module, dtype: mx.Dtype) -> None:
        """Check that it fits the target, and compute in its dtype. Raises PairError."""
        self.shared = Shared(target, self.ids, self.args.emb_dim)
        self.set_dtype(dtype)
        count = self.args.vocab_size
        rows = mx.arange(count)
        if self.args.reduced:
            unknown = mx.full((int(self.ids.max().item()) + 2,), count)
            rows = mx.put_along_axis(unknown, self.ids, rows, axis=0)
        self._row = rows  # of a token's embedding; the last one also for all ids above
        mx.eval(rows)

    def enter(self, state: Float[mx.array, "batch rows dim"]) -> Float[mx.array, "batch rows dim"]:
        """The target's final states as the first step takes them."""
        state = state.astype(self.ln[0].weight.dtype)
        return mx.fast.rms_norm(state, None, EPS) / math.sqrt(2) if self.args.scale_input else state

    def __call__(self, tokens: Integer[mx.array, "batch rows"], state: Float[mx.array, "batch rows dim"],
                 step: int) -> Float[mx.array, "batch rows inner"]:
        """Step `step` of a draft: each token with the state before it, to the next state."""
        assert step < self.args.n_predict
        emb, proj, ln = (_at(layers, step) for layers in (self.emb, self.proj, self.ln))
        rows = self._row[mx.minimum(tokens, self._row.shape[0] - 1)]
        return nn.gelu(ln(proj(state) + self.token_weight * emb(rows)))

    def logits(self, state: Float[mx.array, "*rows inner"], step: int = 0) -> Float[mx.array, "*rows vocab"]:
        """Of the output ids only."""
        return _at(self.head, step)(state)

    def unroll(self, tokens: Integer[mx.array, "batch rows"], states: Sequence[Float[mx.array, "batch rows dim"]],
               steps: int) -> list[Float[mx.array, "batch rows inner"]]:
        """For training: the drafts that start at every row at once. Step s of row i has seen tokens i .. i + s and the
        target's state before token i, and predicts token i + s + 1."""
        state, found = self.enter(mx.pad(states[-1], ((0, 0), (1, 0), (0, 0)))[:, :-1]), []
        for s in range(steps):
            state = self(mx.roll(tokens, -s, axis=1), state, s)
            found.append(state)
        return found

    def cache_layers(self) -> tuple:
        return ()

    def drafter(self, layers: tuple, vocab: int) -> MlpDrafter:
        return MlpDrafter(self, vocab)


def _at(layers: list, step: int) -> nn.Module:
    """A step's own layer, or the last one, which tied steps share."""
    return layers[min(step, len(layers) - 1)]


@dataclass(frozen=True, eq=False)
class MlpDrafter:
    """Its state: the target's final states of the last round's rows, and the position after the first of them."""

    model: Mlp
    vocab: int
    hears = True
    depths = ()
    layers = ()

    @property
    def largest(self) -> int:
        return self.model.largest

    @property
    def signature(self) -> tuple:
        return id(self.model), self.vocab

    def propose(self, state: State, plan: Plan, choose: Choose) -> Proposal:
        heard, start = state.drafter
        row = (state.length - 1 - start)[:, None, None]
        own = self.model.enter(mx.take_along_axis(heard, row, axis=1))
        token, tokens, logprobs = newest(state, 1)[:, 0], [], []
        for step in range(plan.num_draft_tokens):
            own = self.model(token[:, None], own, step)
            logits = self.model.logits(own[:, -1], step)
            token, law = choose(self.model.shared.spread(logits, self.vocab), tokens)
            tokens.append(token)
            logprobs.append(law)
        known = None if logprobs[0] is None else mx.stack(logprobs, axis=1)
        return Proposal(mx.stack(tokens, axis=1), known, None)

    def keep_up(self, state: State, plan: Plan) -> None:
        """Nothing: a round without drafts is heard like any other."""

    def hear(self, drafted: Any, states: Sequence[mx.array], start: mx.array) -> tuple[mx.array, mx.array]:
        """The state of the next round."""
        return states[-1], start

    def leave(self, state: State, kept: int, bound: int) -> tuple[list, list[mx.array] | None]:
        """As a head does; it has no caches."""
        heard, start = state.drafter
        row = kept - start.item()
        return [], [heard[:, row : row + 1]] if row >= 0 else None

    def grow(self, state: tuple, capacity: int) -> None:
        """Nothing grows with the text."""
