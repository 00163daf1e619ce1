"""Are two replies the same, and if not: a near tie that rounding decides, or a fault?

A batch of rows rounds differently from one row, so where the two best choices lie very close either
may come out. What lies further apart is a bug.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence

import mlx.core as mx

from . import sampling
from .prefill import prefill
from .probe import prompt_cache
from .sampling import DRAW, Sampling
from .types import Options

TIES = {mx.float32: 1e-3}  # gaps of the two best choices that rounding can flip
TIE_HALF = 0.5


@dataclass(frozen=True)
class Verdict:
    """kind: identical, tie or BUG. at: the first token that differs; gap: of the two best choices there."""

    kind: str
    at: int | None = None
    gap: float | None = None

    def __str__(self) -> str:
        if self.kind == "identical":
            return self.kind
        return f"{'tie' if self.kind == 'tie' else 'mismatch'} at token {self.at}, gap {self.gap:.2g}"


def compare(pair: Any, ids: Sequence[int], wanted: Sequence[int], got: Sequence[int], options: Options = Options(),
            seed: int = 0) -> Verdict:
    """Two replies to a prompt, greedy or by `match` with one seed. One that was stopped early is
    compared as far as it goes. Evaluates where they differ."""
    at = next((i for i, (a, b) in enumerate(zip(wanted, got)) if a != b), None)
    if at is None:
        return Verdict("identical")
    scores = _scores(pair, [*ids, *wanted[:at]], options, seed)
    low, high = mx.sort(mx.topk(scores, 2)).tolist()
    dtype = pair.target_profile.layers[0].dtype if pair.target_profile.layers else mx.float32
    return Verdict("tie" if high - low <= TIES.get(dtype, TIE_HALF) else "BUG", at, high - low)


def _scores(pair: Any, prefix: list[int], options: Options, seed: int) -> mx.array:
    """What the next token is the argmax of, by mlx-lm's own caches and single rows."""
    caches = prompt_cache(pair.target)
    prefill(pair.target, caches, prefix[:-1], Options(prefill_step_size=options.prefill_step_size))
    logits = pair.target(mx.array([prefix[-1:]]), cache=caches)[0, -1:, : pair.vocab_size].astype(mx.float32)
    for processor in (*sampling.penalties(options), *options.logits_processors):
        logits = sampling.run(processor, mx.array(prefix), logits)
    law = Sampling.of(options)
    if law.greedy:
        return logits[0]
    noise = sampling.gumbel(sampling.make_keys(seed), DRAW, mx.array(len(prefix)), pair.vocab_size)
    return sampling.logprobs(logits, law)[0] + noise
