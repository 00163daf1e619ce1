"""The tiny models are lively: what other tests assume of them."""

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

import tiny


def rollout(model, n=120):
    """Greedy ids, the gap between the two best log-probabilities of each, and whether all were finite."""
    steps = list(generate_step(mx.array(tiny.PROMPT), model, max_tokens=n))
    logprobs = mx.stack([lp for _, lp in steps])
    best = mx.sort(logprobs, axis=-1)[:, -2:]
    return [int(t) for t, _ in steps], (best[:, 1] - best[:, 0]).tolist(), bool(mx.isfinite(logprobs).all())


def agreement(target, draft, ids):
    """The share of the target's greedy tokens that the draft would have proposed."""
    logits = draft(mx.array([tiny.PROMPT + ids]))[0, len(tiny.PROMPT) - 1 : -1]
    return sum(a == b for a, b in zip(mx.argmax(logits, axis=-1).tolist(), ids)) / len(ids)


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_greedy_rollouts_wander_without_near_ties(name):
    model = tiny.make(name)
    ids, gaps, finite = rollout(model)
    assert finite and len(set(ids)) >= 50
    assert sum(g < 1e-3 for g in gaps) <= 1
    assert 0.3 < agreement(model, tiny.noisy_copy(model), ids) < 0.9


def test_folder_loads_offline_as_the_same_model(tmp_path):
    model, tokenizer = mlx_lm.load(str(tiny.write_folder(tmp_path, seed=3)))
    tokens = mx.array([tiny.PROMPT])
    assert mx.array_equal(model(tokens), tiny.make("llama", 3)(tokens))
    assert tokenizer.encode("aé<eos>") == [97, 0xC3, 0xA9, tiny.EOS]
    assert tokenizer.eos_token_ids == {tiny.EOS}
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert chat[0] == tiny.BOS and tokenizer.decode(chat) == "<bos>user\nhi<eos>\n<bos>assistant\n"


def test_script_model_reads_positions_from_its_cache():
    table = mx.random.normal((6, 8), key=mx.random.key(0))
    model = tiny.ScriptModel(table, by_position=True)
    cache = make_prompt_cache(model)
    first, second = model(mx.array([[1, 2]]), cache), model(mx.array([[3]]), cache)
    assert mx.array_equal(mx.concatenate([first, second], axis=1)[0], table[:3])
    assert cache[0].keys_and_values()[0][0, 0, :, 0].tolist() == [1, 2, 3]
