"""Greedy tokens with drafts on hidden states equal mlx-lm's plain ones, whatever is kept of the drafts.

The drafts are led along the text, because a random head is never right: every accepted count occurs.
"""

from functools import lru_cache

import mlx.core as mx
import pytest
import tiny
from helpers import Counting, Scripted, decode, guided, heads, mlp, pair, plain
from mlx_lm.sample_utils import make_logits_processors

import mlx_spec
from mlx_spec.cache import Quantized
from mlx_spec.window import Ring
from mlx_spec.engine import Decoder
from mlx_spec.errors import PairError
from mlx_spec.memory import recall
from mlx_spec.pairs import Pair
from mlx_spec.probe import prompt_cache

N = 48
LONG = tiny.PROMPT * 4
KINDS = ("deep heads", "reduced mlp")
ARCHITECTURES = ("llama", "llama_sw", "gemma3_text", "gpt_oss", "gemma4_text", "mistral3", "minicpm3", "deepseek_v3")
QUANTISED = dict(kv_bits=8, kv_group_size=32, quantized_kv_start=0)


@lru_cache(maxsize=None)
def reference(name, prompt=tuple(tiny.PROMPT), n=N):
    return plain(pair(name, None).target, list(prompt), n)


def led(pair, prompt, text, *, n=N, ks=None, **options):
    """A finished decoder whose drafter is led along a text, and the ids."""
    parts = dict(drafter=guided(pair, [*prompt, *text]), max_tokens=n, **options)
    return decode(pair, prompt, controller=Scripted(*ks), **parts) if ks else decode(pair, prompt, **parts)


@pytest.mark.parametrize("k", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_speculation_with_a_head_never_changes_the_tokens(name, k):
    decoder, ids = led(pair(name, "deep heads"), tiny.PROMPT, reference(name), num_draft_tokens=k)
    assert ids == reference(name) and len(set(ids)) > 20
    assert decoder.stats.mode == ("speculative" if k else "plain (no draft tokens asked for)")
    kept = decoder.stats.accepted_by_position
    assert not k or kept[-1] > 0 and 0.2 < decoder.stats.acceptance_rate < 0.8


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("ks", [(0, 3, 0, 8), (1, 0, 0, 0, 5), (2, *[0] * 20)])
@pytest.mark.parametrize("kind", KINDS)
def test_k_may_go_through_zero_and_back(kind, ks, run_ahead):
    for name in ("llama", "llama_sw"):
        decoder, ids = led(pair(name, kind), tiny.PROMPT, reference(name), ks=ks, run_ahead=run_ahead)
        assert ids == reference(name)
        assert decoder.stats.plain > 0 and decoder.stats.drafted > 0


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("name, options", [("llama", {}), ("llama_sw", {}), ("llama", dict(max_kv_size=24))], ids=["dense", "window", "bounded"])
def test_states_that_are_read_late_leave_the_caches_of_states_read_at_once(name, options, run_ahead, monkeypatch):
    """Where no draft is asked for, a head reads many rows in one pass now and then, and knows as much."""
    ks, rooms, found, choose = (4, *[0] * 9, (2, "lookup"), 0, 0, 1, 0), [], [], Decoder._leave_unread
    p = pair(name, "deep heads")
    text = plain(p.target, tiny.PROMPT, N, prompt_cache=prompt_cache(p.target, options.get("max_kv_size")))
    for leave_unread in (lambda d, choice: rooms.append(choose(d, choice)) or rooms[-1], lambda d, choice: 0):
        monkeypatch.setattr(Decoder, "_leave_unread", leave_unread)
        decoder, ids = led(p, tiny.PROMPT, text, ks=ks, run_ahead=run_ahead, **options)
        assert ids == text
        memory = decoder.leave()
        found.append([x[..., : c.size(), :] for c in memory.draft[0] for x in (c.keys, c.values)] + memory.draft[1])
    assert set(rooms) == {0, 5} and 2 * rooms.count(0) < rooms.count(5)
    assert len(found[0]) > 2 and all(mx.allclose(a, b, atol=1e-5) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("length", [1, 2, 6, 7, 8, 14, 15])
@pytest.mark.parametrize("name, kind", [("llama", "deep heads"), ("llama_sw", "deep heads"), ("llama", "reduced mlp")])
def test_a_prompt_may_end_anywhere_in_a_chunk(name, kind, length):
    prompt = tiny.PROMPT[:length]
    text = reference(name, tuple(prompt), 12)
    assert led(pair(name, kind), prompt, text, n=12, num_draft_tokens=3, prefill_step_size=7)[1] == text


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bounded_cache_gives_mlx_lms_tokens(kind, k):
    p = pair("llama", kind)
    text = plain(p.target, LONG, N, prompt_cache=prompt_cache(p.target, 32))
    decoder, ids = led(p, LONG, text, num_draft_tokens=k, max_kv_size=32)
    assert ids == text != reference("llama", tuple(LONG)) and decoder.stats.accepted > 5
    assert all(isinstance(layer, Ring) for layer in (*decoder.context.round.layers, *decoder.context.drafter.layers))


@pytest.mark.parametrize("begin", [0, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_caches_give_mlx_lms_tokens(kind, begin):
    """From the prompt on, or from a token of the reply on."""
    p, options = pair("llama", kind), QUANTISED | dict(quantized_kv_start=begin)
    text = plain(p.target, tiny.PROMPT, N, **options)
    decoder, ids = led(p, tiny.PROMPT, text, num_draft_tokens=4, **options)
    assert ids == text and decoder.stats.accepted > 5
    assert all(isinstance(layer, Quantized) for layer in decoder.context.round.layers)


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("options", [{}, QUANTISED, dict(max_kv_size=32)], ids=["dense", "quantised", "bounded"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_later_turn_goes_on_as_mlx_lms_own_does(kind, options, run_ahead):
    p, caches = pair("llama", kind), prompt_cache(pair("llama", kind).target, options.get("max_kv_size"))
    theirs = dict(options, prompt_cache=caches)
    theirs.pop("max_kv_size", None)
    text = plain(p.target, LONG, 19, **theirs)  # all of it is in its caches then
    first, ids = led(p, LONG, text, n=20, num_draft_tokens=3, run_ahead=run_ahead, **options)
    assert ids[:19] == text
    prompt = LONG + ids + list(b" and more")
    memory = recall(first.leave(), p, prompt)
    assert len(memory.ids) == len(LONG) + 19
    text = plain(p.target, prompt[len(memory.ids) :], 24, **theirs)
    assert led(p, prompt, text, n=24, num_draft_tokens=3, memory=memory, **options)[1] == text


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("name, kind", [("llama", "deep heads"), ("llama_sw", "deep heads"), ("llama", "reduced mlp")])
def test_a_turn_after_a_stop_string_equals_a_cold_one(name, kind, length):
    base, letters = pair(name, kind), {i: -float("inf") for i in range(tiny.VOCAB) if not 32 < i < 127}
    p, bias = Pair(base.target, base.draft, tiny.byte_tokenizer()), dict(logits_processors=make_logits_processors(letters))
    text = plain(p.target, LONG, N, **bias)
    stop = bytes(text[20 : 20 + length]).decode()
    first, ids = led(p, LONG, text, num_draft_tokens=3, stop=[stop], logit_bias=letters)
    assert first.finish == "stop_string" and first.length > len(first.history)
    prompt = LONG + ids + list(b" and more")
    cold = plain(p.target, prompt, 24, **bias)
    memory = recall(first.leave(), p, prompt)
    assert memory is not None
    assert led(p, prompt, cold, n=24, num_draft_tokens=3, memory=memory, logit_bias=letters)[1] == cold


@pytest.mark.parametrize("mark", [mlx_spec.pure, lambda processor: processor], ids=["pure", "with state"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_processors_see_what_plain_decoding_shows_them(kind, mark):
    halve = mark(lambda tokens, logits: logits.at[:, tokens[-1:]].add(-3.0))
    p, penalties = pair("llama", kind), dict(repetition_penalty=1.3, frequency_penalty=0.4)
    text = plain(p.target, tiny.PROMPT, N, logits_processors=[*make_logits_processors(**penalties), halve])
    decoder, ids = led(p, tiny.PROMPT, text, ks=(4, 0, 2), logits_processors=[halve], **penalties)
    assert ids == text != reference("llama") and decoder.stats.accepted > 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_processor_that_counts_for_itself_sees_kept_tokens_only(kind):
    p, ours = pair("llama", kind), Counting()
    text = plain(p.target, tiny.PROMPT, N, logits_processors=[Counting()])
    decoder, ids = led(p, tiny.PROMPT, text, ks=(4, 0, 2), logits_processors=[ours])
    assert ids == text and decoder.stats.accepted > 5
    assert sorted(i for i, n in ours.counts.items() for _ in range(n)) == sorted(ids[:-1])


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("options", [
    {}, dict(temperature=1.0, seed=5, verify="block"), dict(temperature=1.0, seed=5, verify="match")], ids=str)
def test_heads_of_padded_vocabularies_never_emit_what_no_token_is(options, k):
    """264 rows for 259 ids; some of the head's output ids are none."""
    target, _ = tiny.padded_pair()
    for draft in (heads(target, vocab=200), heads(target), mlp(target, vocab=200)):
        p = Pair(target, draft, tiny.byte_tokenizer())
        p.end_ids = frozenset()
        _, ids = decode(p, tiny.PROMPT, max_tokens=N, num_draft_tokens=k, **options)
        assert len(ids) == N and max(ids) < tiny.VOCAB
        if options.get("verify") != "block":
            assert ids == decode(p, tiny.PROMPT, max_tokens=N, num_draft_tokens=0, **options)[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_whose_embedding_is_not_one_layer_is_refused(kind):
    with pytest.raises(PairError, match="embedding and head are not where a draft on hidden states could share them"):
        pair("gemma3n", kind)


@pytest.mark.parametrize("name", ["internlm3"])
def test_a_target_that_decodes_plainly_does_so_with_a_head_as_well(name):
    p = pair(name, "heads")
    decoder, ids = decode(p, tiny.PROMPT, max_tokens=12, num_draft_tokens=3)
    assert ids == reference(name, n=12) and decoder.stats.mode.startswith("plain (the target decodes plainly")
