"""Greedy tokens equal mlx-lm's plain ones: every architecture, every kind of cache, k from 0 to 8.

Losslessness in float32, for 120 tokens after a prompt that is longer than the windows of 16, with a
draft that is right about half of the time.
"""

from functools import lru_cache

import pytest
import tiny
from helpers import decode, pair, plain


@lru_cache(maxsize=None)
def reference(name):
    return plain(pair(name).target, tiny.PROMPT, 120)


# All of them where kinds of caches differ; elsewhere k = 2 would repeat what 1 and 4 say.
LENGTHS = {name: (0, 1, 2, 4, 8) if name in ("llama", tiny.TINY_SW, "gemma3n") else (0, 1, 4, 8) for name in tiny.EXACT}


@pytest.mark.parametrize("name, k", [(name, k) for name, ks in LENGTHS.items() for k in ks])
def test_greedy_speculation_never_changes_the_tokens(name, k):
    """A14, A16, A51: windows are crossed many times, with rejections before and after."""
    decoder, ids = decode(pair(name), tiny.PROMPT, max_tokens=120, num_draft_tokens=k)
    assert ids == reference(name)
    assert len(set(ids)) >= 50  # a model that repeats itself would hide faults
    if k == 1:
        assert 0.2 < decoder.stats.acceptance_rate < 0.85
    assert decoder.stats.mode == ("speculative" if k else "plain (no draft tokens asked for)")


@pytest.mark.parametrize("name", [tiny.TINY_SW, "gemma3_text", "gpt_oss", "gemma3n"])
@pytest.mark.parametrize("prompt", [3, 14, 15, 16, 17, 31])
def test_a_window_may_be_crossed_anywhere_in_a_reply(name, prompt):
    """A51: the first crossing lies before, at and after the end of the prompt."""
    p, ids = pair(name), (tiny.PROMPT * 2)[:prompt]
    assert decode(p, ids, max_tokens=40, num_draft_tokens=3)[1] == plain(p.target, ids, 40)


@pytest.mark.parametrize("target, draft", [("llama", tiny.TINY_SW), (tiny.TINY_SW, "llama"), ("gemma3n", "qwen3")])
def test_target_and_draft_may_keep_different_kinds_of_caches(target, draft):
    from mlx_spec.pairs import Pair

    p = Pair(tiny.make(target), tiny.make(draft))
    for k in (1, 4):
        assert decode(p, tiny.PROMPT, max_tokens=60, num_draft_tokens=k)[1] == plain(p.target, tiny.PROMPT, 60)
