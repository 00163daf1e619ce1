"""Training: what is learnt is what the engine then accepts, whatever was interrupted."""

from functools import lru_cache

import mlx.core as mx
import numpy as np
import pytest
import tiny
from helpers import decode, heads
from mlx_lm.models.cache import make_prompt_cache

from mlx_spec.drafters.heads import Heads
from mlx_spec.pairs import Pair
from mlx_spec.train.batches import load, shuffled, split
from mlx_spec.train.loop import Schedule, Trainer
from mlx_spec.train.loss import loss, score
from mlx_spec.train.states import Example, States, collect, make_card

QUICK = dict(epochs=4, batch_tokens=512, learning_rate=3e-3, warmup=10, every=20, judged_texts=8)


@lru_cache(maxsize=None)
def target():
    return tiny.make("llama")


def texts(count=64, length=40, seed=0):
    """What the target writes itself, after prompts of three random ids; every fourth text greedily."""
    model, rng = target(), np.random.default_rng(seed)
    prompts = rng.integers(0, 40, (count, 3))
    cache, y = make_prompt_cache(model), mx.array(prompts)
    heat = mx.array(np.where(np.arange(count) % 4 == 0, 1e-6, 0.5))[:, None]
    answers, keys = [], mx.random.split(mx.random.key(seed), length)
    for key in keys:
        logits = model(y, cache=cache)[:, -1]
        y = mx.random.categorical(logits / heat, key=key)[:, None]
        answers.append(y)
    ids = np.array(mx.concatenate(answers, axis=1)).tolist()
    return [Example(p, a, 0.0 if i % 4 == 0 else 0.5) for i, (p, a) in enumerate(zip(prompts.tolist(), ids))]


def stored(folder, examples, depths=()):
    store = States(folder, make_card("tiny", depths, 64, "test"))
    collect(store, target(), depths, iter(examples))
    return store


def student(**facts):
    head = heads(target(), **facts)
    head.bind(target(), mx.float32)
    return head


def test_loss_falls_and_acceptance_rises_on_held_out_text(tmp_path):
    trainer = Trainer(student(), stored(tmp_path / "states", texts(400)), Schedule(**QUICK), tmp_path)
    before, losses = trainer.judge(), []
    after = trainer.run(lambda p: losses.append(p.loss))
    print(losses[0], losses[-1], before.acceptance, after.acceptance, after.sampled, trainer.steps)
