"""The tiny models are lively: what other tests assume of them."""

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

import tiny

FORTY = mx.array([(tiny.PROMPT * 3)[:40]])


def rollout(model, n=120):
    """Greedy ids, the gap between the two best log-probabilities of each, and whether all were finite."""
    steps = list(generate_step(mx.array(tiny.PROMPT), model, max_tokens=n))
    logprobs = mx.stack([row for _, row in steps])
    best = mx.sort(logprobs, axis=-1)[:, -2:]
    return [int(token) for token, _ in steps], (best[:, 1] - best[:, 0]).tolist(), bool(mx.isfinite(logprobs).all())


def agreement(draft, ids):
    """The share of the target's greedy ids that the draft would have proposed."""
    cache = make_prompt_cache(draft)
    choices = [draft(mx.array([tiny.PROMPT]), cache=cache)[0, -1].argmax()]
    choices += [draft(mx.array([[token]]), cache=cache)[0, -1].argmax() for token in ids[:-1]]
    return sum(a == b for a, b in zip(mx.stack(choices).tolist(), ids)) / len(ids)


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_greedy_rollouts_wander_without_near_ties(name):
    model = tiny.make(name)
    ids, gaps, finite = rollout(model)
    assert finite
    assert len(set(ids)) >= 50
    assert sum(gap < 1e-3 for gap in gaps) <= 1
    assert 0.4 < agreement(tiny.noisy_copy(model), ids) < 0.85


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_prefill_and_single_steps_equal_one_pass(name):
    model = tiny.make(name)
    tokens = mx.concatenate([FORTY, FORTY[:, :30]], axis=1)
    whole = model(tokens, cache=make_prompt_cache(model))
    cache = make_prompt_cache(model)
    parts = [model(FORTY, cache=cache)] + [model(tokens[:, i : i + 1], cache=cache) for i in range(40, 70)]
    error = mx.abs(whole - mx.concatenate(parts, axis=1)).max().item()
    assert (error > 0.1) if name in tiny.LENGTH_DEPENDENT else (error < 1e-3)


def test_every_kind_of_cache_is_there():
    kinds = {name: {type(c).__name__ for c in make_prompt_cache(make())} for name, make in tiny.ARCHITECTURES.items()}
    assert {name for name, kind in kinds.items() if "ArraysCache" in kind} == set(tiny.RECURRENT)
    assert kinds[tiny.TINY_SW] == {"KVCache", "RotatingKVCache"}
    assert set.union(*(kinds[name] for name in tiny.EXACT)) == {"KVCache", "RotatingKVCache", "ChunkedKVCache", "CacheList"}


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_the_seed_decides_every_weight(name):
    a, b, other = (tiny.make(name, seed)(FORTY, cache=None) for seed in (0, 0, 1))
    assert mx.array_equal(a, b) and not mx.allclose(a, other)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gemma3n", "gemma4", "mistral3", "exaone4", "qwen3_next"])
def test_a_folder_loads_as_the_same_model(name, tmp_path):
    model, _ = mlx_lm.load(str(tiny.write_folder(tmp_path, name, seed=3)))
    assert mx.array_equal(model(FORTY), tiny.make(name, 3)(FORTY))


def test_a_folder_has_the_tokenizer_and_the_end_tokens_asked_for(tmp_path):
    folder = tiny.write_folder(tmp_path, eos=[5], tokenizer_eos="<pad>", generation_config={"eos_token_id": [5, 7]}, dtype=mx.bfloat16)
    model, tokenizer = mlx_lm.load(str(folder))
    assert model.lm_head.weight.dtype == mx.bfloat16
    assert tokenizer.eos_token_ids == {5, 7, tiny.PAD}
    assert tokenizer.encode("aé<eos>") == [97, 0xC3, 0xA9, tiny.EOS]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert tokenizer.decode(chat) == "<bos>user\nhi<eos>\n<bos>assistant\n"


def test_the_byte_tokenizer_streams_text():
    tokenizer = tiny.byte_tokenizer()
    assert len(tokenizer.get_vocab()) == tiny.VOCAB
    detokenizer = tokenizer.detokenizer
    for token in tokenizer.encode("naïve café"):
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == "naïve café"


def test_padded_heads_are_wider_than_the_tokenizer():
    assert [model(FORTY).shape[-1] for model in tiny.padded_pair()] == [264, 320]


@pytest.mark.parametrize("by_position", [False, True])
def test_a_script_model_follows_its_table(by_position):
    table = mx.random.normal((8, 8), key=mx.random.key(0))
    model = tiny.ScriptModel(table, by_position=by_position)
    cache = make_prompt_cache(model)
    first, second = model(mx.array([[1, 2]]), cache), model(mx.array([[3]]), cache)
    expected = table[:3] if by_position else table[1:4]
    assert mx.array_equal(mx.concatenate([first, second], axis=1)[0], expected)
    assert cache[0].keys_and_values()[0][0, 0, :, 0].tolist() == [1, 2, 3]


def test_a_script_model_takes_an_offset_on_the_device_and_evaluates_nothing():
    class Recorder:
        offset = mx.array(2)

        def update_and_fetch(self, keys, values):
            self.keys = keys
            return keys, values

    table = mx.random.normal((6, 8), key=mx.random.key(0))
    model, recorder = tiny.ScriptModel(table, by_position=True), Recorder()
    logits = mx.compile(lambda tokens: model(tokens, [recorder]))(mx.array([[4, 5]]))
    assert mx.array_equal(logits[0], table[2:4])
    assert recorder.keys.shape == (1, 1, 2, 4)
