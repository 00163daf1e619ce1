"""What several test files share: plain decoding by mlx-lm as the yardstick, and a tiny pair."""

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
import tiny
from mlx_lm.generate import generate_step

from mlx_spec import request
from mlx_spec.control import DRAFT, LOOKUP, Auto, Choice, Controller
from mlx_spec.costs import Costs
from mlx_spec.drafters.heads import Heads, HeadsArgs, HeadsDrafter
from mlx_spec.drafters.mlp import Mlp, MlpArgs, MlpDrafter
from mlx_spec.engine import Decoder
from mlx_spec.hidden import trunk
from mlx_spec.pairs import Pair
from mlx_spec.types import Options


def plain(model, ids, n, **options):
    """mlx-lm's own greedy tokens."""
    steps = generate_step(mx.array(ids), model, max_tokens=n, **options)
    return [token for (token, _), _ in zip(steps, range(n))]


SHARED = []  # pairs that many tests use: one that changes them puts them back


@lru_cache(maxsize=None)
def pair(name="llama", draft="noisy"):
    """A tiny pair without a tokenizer. draft: 'same', 'noisy', 'other', 'heads', 'deep heads', 'mlp',
    'reduced mlp' or None."""
    target = tiny.make(name)
    drafts = {
        "same": lambda: target,
        "noisy": lambda: tiny.noisy_copy(target),
        "other": lambda: tiny.make(name, 7),
        "heads": lambda: heads(target),
        "deep heads": lambda: heads(target, depths=(1, 2), vocab=200, layers=2),
        "mlp": lambda: mlp(target),
        "reduced mlp": lambda: mlp(target, vocab=200, tie_weights=True, scale_input=True),
        None: lambda: None,
    }
    made = Pair(target, drafts[draft]())
    SHARED.append(made)
    return made


def heads(target, depths=(), vocab=None, layers=1, seed=3):
    """A random head on a target's hidden states; vocab: how many output ids, every id when None."""
    width = trunk(target)(mx.array([[0]])).shape[-1]
    rows = target(mx.array([[0]])).shape[-1]
    args = HeadsArgs(width, vocab or rows, list(depths), layers, 2 * width, 2, 1, 32)
    return _with_ids(tiny.randomise(Heads(args), seed), rows, vocab, seed)


def mlp(target, vocab=None, seed=3, n_predict=3, **options):
    """A random speculator for a target; vocab and seed as in `heads`."""
    width = trunk(target)(mx.array([[0]])).shape[-1]
    rows = target(mx.array([[0]])).shape[-1]
    args = MlpArgs(width, n_predict, vocab or rows, 48, reduced=vocab is not None, **options)
    return _with_ids(tiny.randomise(Mlp(args), seed), rows, vocab, seed)


def _with_ids(draft, rows, vocab, seed):
    chosen = sorted(random.Random(seed).sample(range(rows), vocab)) if vocab else list(range(rows))
    draft.ids = mx.array(chosen, dtype=mx.int32)
    return draft


RIGHT = mx.random.randint(0, 1 << 20, (4096,), key=mx.random.key(1))  # by the length of the history, before mod k + 1


class Guided:
    """A drafter whose tokens are overruled: some are the stream's, the next one is not. Nothing else of it is changed, so
    that a random draft comes to every accepted count. Without a stream it is the drafter that it is made of."""

    def propose(self, state, plan, choose):
        if self.stream is None:
            return super().propose(state, plan, choose)
        right = mx.take(RIGHT, state.length) % (plan.num_draft_tokens + 1)

        def guided(logits, drafted):
            token = mx.take(self.stream, state.length + len(drafted))
            return mx.where(len(drafted) < right, token, (token + 1) % logits.shape[-1]), choose(logits, drafted)[1]

        return super().propose(state, plan, guided)

    @property
    def signature(self):
        return super().signature, id(self.stream)


@dataclass(frozen=True, eq=False)
class GuidedHeads(Guided, HeadsDrafter):
    stream: Any = None


@dataclass(frozen=True, eq=False)
class GuidedMlp(Guided, MlpDrafter):
    stream: Any = None


def guided(pair, text):
    """The pair's own drafter, led along the ids of a text."""
    stream = mx.array([*text, *[0] * 64], dtype=mx.uint32)
    if isinstance(pair.draft, Mlp):
        return GuidedMlp(pair.draft, pair.vocab_size, stream)
    return GuidedHeads(pair.draft, pair.draft_profile.layers, pair.vocab_size, stream)


@lru_cache(maxsize=None)
def text_pair(draft="noisy"):
    """A tiny llama pair with the byte tokenizer."""
    target = tiny.make("llama")
    return Pair(target, tiny.noisy_copy(target) if draft == "noisy" else None, tiny.byte_tokenizer())


def decode(pair, ids, *, controller=None, drafter=None, run_ahead=True, memory=None, **options):
    """A finished Decoder and its tokens' ids."""
    parts = dict(controller=controller, drafter=drafter, run_ahead=run_ahead, memory=memory)
    decoder = Decoder(pair, ids, Options(**options), **parts)
    chunks = list(decoder.chunks())
    return decoder, [t.id for c in chunks for t in c.tokens]


def drafts_pay(monkeypatch):
    """`auto` by costs with which every draft pays, and without a clock: what a busy machine times is no matter."""
    costs = Costs((1.0,) * 9, 0.001)
    monkeypatch.setattr(request, "Auto", lambda _, learnt, clocked: Auto(lambda again=False: costs, learnt, clocked=False))


class Scripted(Controller):
    """A controller that goes through a list of k again and again; (k, "lookup") is of another source than the draft."""

    sources = (DRAFT, LOOKUP)

    def __init__(self, *ks):
        self.choices = [Choice(k) if isinstance(k, int) else Choice(*k) for k in ks]
        self.largest, self.i = max(choice.k for choice in self.choices), -1

    def choose(self, length, limits, matched):
        self.i += 1
        return self.choices[self.i % len(self.choices)]


class Counting:
    """A penalty that counts for itself: each call is one more token of the reply."""

    def __init__(self):
        self.counts, self.last = {}, None

    def __call__(self, tokens, logits):
        newest = int(tokens[-1])
        if self.last is not None:
            self.counts[newest] = self.counts.get(newest, 0) + 1
        self.last = newest
        penalty = np.zeros(logits.shape, np.float32)
        for i, n in self.counts.items():
            penalty[0, i] = 0.8 * n + 0.8
        return logits - mx.array(penalty)
