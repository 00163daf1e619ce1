"""Caches of other kinds than keys and values by position: several in a layer, attention in chunks,
and models that count positions in Python. mlx-lm's own tokens are the yardstick."""

from types import SimpleNamespace

import hybrids
import mlx.core as mx
import mlx_lm.models.gpt_bigcode
import pytest
import tiny
from helpers import decode, pair, plain
from mlx_lm.models.cache import ChunkedKVCache
from test_cache import largest_gap
from test_round import rounds

from mlx_spec.cache import Cursor, Pass, Several
from mlx_spec.window import Chunked
from mlx_spec.pairs import Pair
from mlx_spec.positions import Counted
from mlx_spec.probe import profile

NEW = ("deepseek_v32", "longcat_flash", "minimax_m3_vl", "llama4", "llama4_text", "gpt_bigcode", "afm7")
LONG = tiny.PROMPT * 8


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_chunks_are_crossed_anywhere_in_a_long_reply(k):
    """300 tokens, chunks of 16: the ring is written over twelve times."""
    p = pair("llama4")
    decoder, ids = decode(p, tiny.PROMPT, max_tokens=300, num_draft_tokens=k)
    assert ids == plain(p.target, tiny.PROMPT, 300) and decoder.stats.mode == "speculative"
    assert any(isinstance(layer, Chunked) for layer in decoder.context.round.layers)


@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 150])
@pytest.mark.parametrize("name", ["llama4", "deepseek_v32", "minimax_m3_vl", "gpt_bigcode", "afm7"])
def test_a_reply_may_begin_at_any_position(name, prompt):
    """Before, at and after the first chunk, and the number of keys that an indexer picks. A16, A18."""
    p = pair(name)
    decoder, ids = decode(p, LONG[:prompt], max_tokens=40, num_draft_tokens=3)
    assert ids == plain(p.target, LONG[:prompt], 40) and decoder.stats.mode == "speculative"


@pytest.mark.parametrize("name", NEW)
def test_the_next_turn_builds_on_every_kind(name):
    """A60, A62: twice, on what rejected drafts and a round in flight left behind."""
    p, prompt, memory = pair(name), LONG[:50], None
    for _ in range(3):
        decoder, ids = decode(p, prompt, memory=memory, max_tokens=37, num_draft_tokens=4, run_ahead=True)
        assert ids == plain(p.target, prompt, 37)
        memory = decoder.leave()
        assert memory.target
        prompt = prompt + ids + tiny.PROMPT


@pytest.mark.parametrize("prompt", [1, 2, 3, 50])
@pytest.mark.parametrize("name", ["falcon_h1", "baichuan_m1", "longcat_flash_ngram"])
def test_recurrent_states_beside_keys_and_values(name, prompt):
    """In one layer, or as the last few tokens, which a short prompt does not fill; and the turn after."""
    target = hybrids.make(name)
    p, ids = Pair(target, target), LONG[:prompt]
    expected = plain(target, ids, 40)
    end = next(t for i, t in enumerate(expected) if i > 15 and t not in expected[:i])
    p.end_ids = frozenset({end})
    first, reply = decode(p, ids, max_tokens=100, num_draft_tokens=4, run_ahead=True)
    assert reply == expected[: expected.index(end)] and first.stats.acceptance_rate == 1
    memory = first.leave()  # a round is in flight, past the end
    p.end_ids = frozenset()
    ids = ids + reply + tiny.PROMPT
    assert memory.target and decode(p, ids, memory=memory, max_tokens=30, num_draft_tokens=4)[1] == plain(target, ids, 30)


@pytest.mark.parametrize("target, draft", [("llama", name) for name in NEW] + [("llama4", "deepseek_v32"), ("afm7", "llama4")])
def test_every_kind_serves_as_a_draft(target, draft):
    p = Pair(tiny.make(target), tiny.make(draft))
    decoder, ids = decode(p, tiny.PROMPT, max_tokens=60, num_draft_tokens=4)
    assert ids == plain(p.target, tiny.PROMPT, 60) and decoder.stats.mode == "speculative"


@pytest.mark.parametrize("name", ["llama4", "deepseek_v32"])
def test_drafts_on_hidden_states_hear_targets_of_every_kind(name):
    decoder, ids = decode(pair(name, "heads"), tiny.PROMPT, max_tokens=40, num_draft_tokens=3)
    assert ids == plain(pair(name).target, tiny.PROMPT, 40) and decoder.stats.drafted > 50


@pytest.mark.parametrize("name", NEW)
def test_a_twin_draft_keeps_everything(name):
    """A19: its caches are never behind, whatever its kind."""
    decoder, _ = decode(pair(name, "same"), tiny.PROMPT, max_tokens=60, num_draft_tokens=4)
    assert decoder.stats.acceptance_rate == 1


@pytest.mark.parametrize("name", NEW)
def test_every_kind_costs_one_submission_and_one_read(name, monkeypatch):
    events, _ = rounds(pair(name), 4, monkeypatch, num_draft_tokens=3)
    assert events == ["async_eval", "tolist"] * 4


def test_the_chunks_of_a_ring_without_slack_are_seen_to_be_wrong():
    """The control: rejected drafts then cover keys of the chunk that is still open."""
    model = tiny.make("llama4")
    narrow = SimpleNamespace(for_request=lambda slack, *rest: profile(model).for_request(0, *rest))
    assert largest_gap(model, profiled=narrow) > 1e-2


@pytest.mark.parametrize("length", [3, 16, 17, 40])
def test_a_chunk_survives_the_way_to_the_device_and_back(length):
    cache = ChunkedKVCache(16)
    for start in range(0, length, 7):
        cache.maybe_trim_front()
        part = mx.arange(start, min(start + 7, length), dtype=mx.float32).reshape(1, 1, -1, 1)
        cache.update_and_fetch(part, part)
    layer = Chunked.like(cache, slack=6)
    arrays = layer.adopt(cache, 256)
    held = layer.open(arrays, Cursor(mx.array(length), 256)).start_position(mx.array(length))
    assert sorted(p for p in held.tolist() if p >= 0) == list(range(max(0, length - 22), length))
    back = layer.hand_back(arrays, length)
    assert back.keys_and_values()[0][0, 0, :, 0].tolist() == list(range(max(0, length - 16), length))
    assert (back.offset, back.start_position) == (length, max(0, length - 16))


def test_an_indexer_is_counted_for_even_where_its_keys_are_too_few_to_be_picked():
    """With room for every key, two rows look alike in both ways; at a longer text they would not."""
    model = tiny.make("minimax_m3_vl", index_topk_blocks=64, index_block_size=128)
    found = profile(model)
    assert found.counts and all(isinstance(layer, Several) for layer in found.layers)


def test_a_model_that_counts_in_python_leaves_its_module_as_it_was():
    """Also where it fails: another model of the same module may come next."""
    code, model = mlx_lm.models.gpt_bigcode, tiny.make("gpt_bigcode")
    before, seen = dict(vars(code)), []

    def fail(*args, cache):
        seen.append(code.np is before["np"])
        raise ZeroDivisionError

    layers = profile(model).layers
    state = [layer.buffers(256) for layer in layers]
    with pytest.raises(ZeroDivisionError):
        Pass(Counted(fail, model), layers, state, Cursor(mx.array(0), 256))(mx.array([[0]]))
    assert seen == [False] and vars(code) == before


@pytest.mark.parametrize("name", ["llama4", "deepseek_v32"])
def test_a_bound_and_packed_keys_are_refused_where_mlx_lm_has_none(name):
    """A53, A54: never half honoured, never silently dense."""
    for options in (dict(max_kv_size=64), dict(kv_bits=8, kv_group_size=32)):
        with pytest.raises(ValueError, match="can't be"):
            decode(pair(name), tiny.PROMPT, **options)
