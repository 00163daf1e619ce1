"""Which rounds are compiled, and when.

A compiled round was traced once and fuses its small operations; an eager one builds its graph anew each time. What a trace depends
on is its key: another shape, or other options, is another trace. Weights are constants in it, so it ends with its pair.
"""

from __future__ import annotations

from typing import Any, Callable, Hashable

import mlx.core as mx

from .types import Options


class Traces:
    """Those of one pair.

    after: a trace takes about as long as compiling saves in so many rounds, so a shape is compiled once it has been run this
    often; at worst that costs twice what knowing beforehand would have. most: that are kept; one holds some megabytes.
    """

    after, most = 24, 24

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[int | None, Callable]] = {}  # uses so far, None once compiled

    def __len__(self) -> int:
        return len(self._known)

    def clear(self) -> None:
        self._known.clear()

    def step(self, key: Hashable, build: Callable) -> Callable:
        """The function that builds a round: `build`, or what it was compiled to."""
        uses, step = self._known.pop(key, (0, build))
        if uses is not None:
            uses += 1
            if uses >= self.after:
                uses, step = None, mx.compile(step)
        self._known[key] = uses, step  # the most recent last
        if len(self) > self.most:
            del self._known[next(iter(self._known))]
        return step


def signature(round: Any, o: Options) -> tuple:
    """What a compiled round depends on beside its plan and the shapes of its arrays."""
    drafter = getattr(round.drafter, "signature", id(round.drafter))
    bias = tuple(sorted(o.logit_bias.items())) if o.logit_bias else None
    penalties = (o.repetition_penalty, o.repetition_context_size, o.presence_penalty,
                 o.presence_context_size, o.frequency_penalty, o.frequency_context_size)
    return round.layers, drafter, round.sampling, round.rule, bias, penalties
