"""Logits to log-probabilities: processors, filters, temperature, in mlx-lm's order.

Target and draft both pass through these functions, so that the law a draft is judged by is the
law it was drawn from. Pure: no model, no cache; random keys come in as arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Sequence

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors

from .shapes import Float, Integer
from .types import Options

Processor = Callable[[mx.array, mx.array], mx.array]

# Below this a draw would be the argmax in float32 all the same, so it is greedy: no randomness.
GREEDY_BELOW = 1e-6

DRAFT, ACCEPT, DRAW = range(3)


@dataclass(frozen=True)
class Sampling:
    """Temperature and filters of one request."""

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0

    @classmethod
    def of(cls, options: Options) -> Sampling:
        if options.temperature < GREEDY_BELOW:
            return cls()
        # A top_p that is 0 in float32 would leave no token at all, not even the best.
        top_p = max(options.top_p, 1e-12) if options.top_p else 0.0
        return cls(options.temperature, top_p, options.min_p, options.top_k)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def logprobs(logits: Float[mx.array, "*batch vocab"], sampling: Sampling) -> Float[mx.array, "*batch vocab"]:
    """The law that a token is drawn from: filters on log-probabilities, then the temperature.

    The order is that of mlx-lm's `make_sampler`; filtered tokens are -inf, and the rest sums to 1.
    """
    x = log_softmax(logits)
    if 0 < sampling.top_p < 1:
        x = apply_top_p(x, sampling.top_p)
    if sampling.min_p > 0:
        x = apply_min_p(x, sampling.min_p)
    if sampling.top_k > 0:
        x = apply_top_k(x, sampling.top_k)
    return log_softmax(x * (1 / sampling.temperature))


def log_softmax(logits: Float[mx.array, "*batch vocab"]) -> Float[mx.array, "*batch vocab"]:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def pure(processor: Processor) -> Processor:
    """Mark a logits processor as a function of (tokens, logits) alone, without state, effects or evaluations:
    it then runs inside the round, for drafted tokens too."""
    processor.pure = True
    return processor


def is_pure(processor: Processor) -> bool:
    return getattr(processor, "pure", False) or getattr(processor, "__module__", "") == "mlx_lm.sample_utils"


def penalties(options: Options) -> list[Processor]:
    """mlx-lm's own processors for logit bias and the three penalties."""
    o = options
    return make_logits_processors(
        o.logit_bias, o.repetition_penalty, o.repetition_context_size, o.presence_penalty, o.presence_context_size,
        o.frequency_penalty, o.frequency_context_size)


def context_size(options: Options) -> int:
    """How many of the newest tokens the penalties look at."""
    names = [n for n in ("repetition", "presence", "frequency") if getattr(options, f"{n}_penalty")]
    return max((getattr(options, f"{n}_context_size") for n in names), default=0)


def process(processors: Sequence[Processor], tokens: Integer[mx.array, "context"],
            logits: Float[mx.array, "1 vocab"]) -> Float[mx.array, "1 vocab"]:
    """Run processors on one row. A token id of the vocabulary's size is no token: it has a column of its own."""
    vocab = logits.shape[-1]
    logits = mx.concatenate([logits, mx.zeros((1, 1), logits.dtype)], axis=-1)
    for processor in processors:
        logits = run(processor, tokens, logits)
    return logits[:, :vocab]


def run(processor: Processor, tokens: mx.array, logits: Float[mx.array, "1 vocab"]) -> Float[mx.array, "1 vocab"]:
    """One processor on one row. Raises ValueError when it returns something else than such a row."""
    shape = logits.shape
    out = processor(tokens, logits)
    if not isinstance(out, mx.array) or out.shape != shape:
        got = f"shape {out.shape}" if isinstance(out, mx.array) else type(out).__name__
        raise ValueError(f"a logits processor must return an mx.array of shape {shape}; it returned {got}")
    return out.astype(mx.float32)


def make_keys(seed: int) -> Integer[mx.array, "purposes 2"]:
    """One key each for drafting, accepting and drawing, so that no draw meets another's noise."""
    return mx.random.split(mx.random.key(seed), 3)


def position_key(keys: Integer[mx.array, "purposes 2"], purpose: int,
                 position: Integer[mx.array, ""]) -> Integer[mx.array, "2"]:
    """The key of one position: the same with and without a draft."""
    shift = mx.stack([mx.zeros_like(position), position]).astype(mx.uint32)
    return keys[purpose] + shift


def gumbel(keys: Integer[mx.array, "purposes 2"], purpose: int, position: Integer[mx.array, ""],
           vocab: int) -> Float[mx.array, "vocab"]:
    """Noise with which an argmax of log-probabilities is a draw from them (Gumbel-max)."""
    return mx.random.gumbel((vocab,), key=position_key(keys, purpose, position))
