"""The prompt for a drafter on hidden states: it reads along while the target's prefill runs."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..hidden import Inside
from ..shapes import Integer


class Reader:
    """The target as a prefill calls it, with a drafter's module in step: slot p gets token p and the
    states of token p - 1; before the first token they are zero.

    caches: mlx-lm's, for the module's own layers. last: the target's states after the newest token.
    """

    def __init__(self, module: nn.Module, target: nn.Module, caches: list[Any], last: list[mx.array] | None = None):
        self.module, self.caches, self.inside = module, caches, Inside(target, module.depths)
        self.last = last or [mx.zeros((1, 1, module.args.hidden_size)) for _ in (*module.depths, "final")]

    def __call__(self, tokens: Integer[mx.array, "batch rows"], cache: list[Any]) -> None:
        states = self.inside.states(tokens, cache)
        before = [mx.concatenate([old.astype(s.dtype), s[:, :-1]], axis=1) for old, s in zip(self.last, states)]
        if self.caches:
            self.module(tokens, self.module.inward(before), self.caches)
        self.last = [s[:, -1:] for s in states]

    @property
    def arrays(self) -> list:
        """What has to be evaluated after a chunk."""
        return [c.state for c in self.caches] + self.last
