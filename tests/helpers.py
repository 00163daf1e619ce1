"""What several test files share: plain decoding by mlx-lm as the yardstick, and a tiny pair."""

import random
from functools import lru_cache

import mlx.core as mx
import tiny
from mlx_lm.generate import generate_step

from mlx_spec.drafters.heads import Heads, HeadsArgs
from mlx_spec.drafters.mlp import Mlp, MlpArgs
from mlx_spec.engine import Decoder
from mlx_spec.hidden import trunk
from mlx_spec.pairs import Pair
from mlx_spec.types import Options


def plain(model, ids, n, **options):
    """mlx-lm's own greedy tokens."""
    steps = generate_step(mx.array(ids), model, max_tokens=n, **options)
    return [token for (token, _), _ in zip(steps, range(n))]


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
    return Pair(target, drafts[draft]())


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


class Scripted:
    """A controller that goes through a list of k again and again."""

    def __init__(self, *ks):
        self.ks, self.largest, self.i = ks, max(ks), -1

    def choose(self):
        self.i += 1
        return self.ks[self.i % len(self.ks)]
