"""Reading a prompt: mlx-lm's caches and chunks, because lengths are known to the host here.

The last prompt token is left for the first round, as in mlx-lm, or the first token could differ
from plain decoding.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import mlx.core as mx
from mlx_lm.generate import maybe_quantize_kv_cache

from .types import Options


class Cancelled(Exception):
    """The caller's `should_cancel` said so."""


def prefill(
    model: Callable,
    caches: list[Any],
    ids: Sequence[int],
    options: Options,
    progress: Callable[[int], None] = lambda read: None,
    beside: Callable[[], list] = list,
) -> None:
    """Feed `ids` to the caches in chunks of `prefill_step_size`, evaluating after each.

    Only the caches, and what `beside` names, are evaluated, so no logits are computed. Raises
    Cancelled between chunks.
    """
    tokens = mx.array(ids, dtype=mx.uint32)[None]
    for start in range(0, len(ids), options.prefill_step_size):
        if options.should_cancel is not None and options.should_cancel():
            raise Cancelled
        chunk = tokens[:, start : start + options.prefill_step_size]
        model(chunk, cache=caches)
        quantize(caches, options)
        mx.eval([c.state for c in caches], beside())
        progress(start + chunk.shape[1])
        mx.clear_cache()


def quantize(caches: list[Any], options: Options) -> None:
    """mlx-lm's rule: full caches become quantised once they hold `quantized_kv_start` tokens."""
    maybe_quantize_kv_cache(caches, options.quantized_kv_start, options.kv_group_size, options.kv_bits)
