"""Device-resident caches against mlx-lm's: every kind, every number of kept tokens."""

import math

import mlx.core as mx
import pytest
import tiny
from helpers import Scripted, decode, pair, plain
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors

from mlx_spec import context
from mlx_spec.cache import Cursor, Full, Quantized, adopt, read_bound, rung
from mlx_spec.window import Ring
from mlx_spec.engine import Decoder
from mlx_spec.pairs import Pair
from mlx_spec.prefill import prefill
from mlx_spec.probe import profile, prompt_cache
from mlx_spec.round import Plan, Proposal, Round, State, advance
from mlx_spec.sampling import Sampling
from mlx_spec.types import Options

LONG = tiny.PROMPT * 8


class Stream:
    """A drafter that proposes the next tokens of a given stream, the first `right` of them unspoilt."""

    def __init__(self, stream):
        self.stream, self.right = stream, 0

    hears = False

    def propose(self, state, plan, choose):
        index = state.length[:, None] + mx.arange(plan.num_draft_tokens)
        tokens = mx.take(self.stream, index)
        spoilt = (tokens + 1) % tiny.VOCAB
        return Proposal(mx.where(mx.arange(plan.num_draft_tokens) < self.right, tokens, spoilt), None, ())


def random_stream(n, seed=0):
    return mx.random.randint(0, 256, (n,), key=mx.random.key(seed)).astype(mx.uint32)


def plain_logits(model, stream, options, prompt, caches=None):
    """The logits after every token of the stream from the prompt on, one row at a time."""
    caches = caches or prompt_cache(model, options.max_kv_size)
    prefill(model, caches, stream[: prompt - 1].tolist(), options)
    rows = []
    for i in range(prompt - 1, stream.shape[0]):
        rows.append(model(stream[None, i : i + 1], cache=caches)[:, -1])
        mx.eval(rows[-1])
    return mx.concatenate(rows)


def forced_logits(model, layers, stream, options, prompt, k):
    """The same through rounds that keep 0, 1, ... k drafts in turn."""
    caches = prompt_cache(model, options.max_kv_size)
    prefill(model, caches, stream[: prompt - 1].tolist(), options)
    n = stream.shape[0]
    capacity = rung(n + k + 1)
    drafter = Stream(mx.pad(stream, (0, k + 1)))
    round = Round(profile(model).runs(), layers, drafter, Sampling(), "match", tiny.VOCAB)
    history = mx.pad(stream[:prompt], (0, capacity - prompt))[None]
    state = State(history, mx.array([prompt]), mx.zeros((3, 2), mx.uint32), adopt(layers, caches, capacity), ())
    rows, length = [], prompt
    while length + k + 1 <= n:
        drafter.right = len(rows) % (k + 1)
        _, logits, target = round.score(state, Plan(k, 1, read_bound(length + k)))
        kept = drafter.right + 1
        rows.append(logits[0, :kept])
        emitted = mx.concatenate([stream[length : length + kept], mx.zeros(k + 1 - kept, mx.uint32)])[None]
        state = advance(state, emitted, mx.array([drafter.right]), target, ())
        mx.eval(rows[-1], list(state))
        length += kept
    return mx.concatenate(rows), state.target


def largest_gap(model, options=Options(), k=3, prompt=20, n=110, profiled=None):
    layers = (profiled or profile(model)).for_request(
        2 * (k + 1), options.max_kv_size, options.kv_bits, options.kv_group_size)
    stream = random_stream(n)
    got, _ = forced_logits(model, layers, stream, options, prompt, k)
    want = plain_logits(model, stream, options, prompt)[: got.shape[0]]
    return (mx.abs(got - want).max() / mx.abs(want).max()).item()


@pytest.mark.parametrize("name", tiny.EXACT)
def test_logits_equal_plain_ones_whatever_number_of_drafts_is_kept(name):
    """Windows of 16 are wrapped five times; every kept count from 0 to k occurs. A14, A16, A51."""
    assert largest_gap(tiny.make(name)) < 1e-4


@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize("name", ["llama", tiny.TINY_SW])
def test_logits_equal_plain_ones_for_short_and_long_blocks(name, k):
    assert largest_gap(tiny.make(name), k=k) < 1e-4


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_quantised_caches_hold_the_words_that_mlx_lm_packs(name, bits):
    """A29, A55: the same packed keys and values, not merely close ones. A float32 rounding can move
    a number across the edge of its bucket, so one word in a hundred may differ."""
    options = Options(kv_bits=bits, kv_group_size=32)
    model, stream = tiny.make(name), random_stream(110)
    caches = prompt_cache(model)
    plain_logits(model, stream, options, 20, caches)
    state = forced_logits(model, quantised_layers(model, options), stream, options, 20, 3)[1]
    for cache, arrays in zip(caches, state):
        for theirs, ours in ((cache.keys[0], arrays[0]), (cache.values[0], arrays[3])):
            assert (theirs[:, :, :100] == ours[:, :, :100]).mean().item() > 0.99


def quantised_layers(model, options):
    return profile(model).for_request(8, None, options.kv_bits, options.kv_group_size)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_bounded_cache_keeps_the_first_four_tokens_and_the_newest(name):
    """A53: what mlx-lm's rotating cache sees, also after it has turned several times."""
    assert largest_gap(tiny.make(name), Options(max_kv_size=24)) < 1e-4


def test_a_ring_without_slack_is_seen_to_be_wrong():
    """The control of the tests above: rejected drafts then cover positions that are still seen."""
    model = tiny.make(tiny.TINY_SW)

    class Narrow:
        def for_request(self, slack, *rest):
            return profile(model).for_request(0, *rest)

    assert largest_gap(model, profiled=Narrow()) > 1e-2


def test_slots_of_a_ring_follow_from_the_newest_position():
    """keep = 2, ring of 5: positions 0 and 1 stay, position p >= 2 lives in 2 + (p - 2) mod 5."""
    layer = Ring(1, 1, 1, mx.float32, window=5, slack=2, keep=2)
    arrays = layer.buffers(64)
    for p in range(12):
        one = mx.full((1, 1, 1, 1), float(p))
        arrays = layer.write(arrays, Cursor(mx.array(p), 64), one, one)
    assert arrays[0][0, 0, :, 0].tolist() == [0, 1, 7, 8, 9, 10, 11]
    mask = layer.mask(arrays, Cursor(mx.array(11), 64), 1, None)[0].tolist()
    assert mask == [True, True, False, False, True, True, True]


@pytest.mark.parametrize("length", [3, 16, 17, 40])
@pytest.mark.parametrize("keep", [0, 4])
def test_a_window_survives_the_way_to_the_device_and_back(length, keep):
    """A60: a ring is never cut as if it were flat."""
    cache = RotatingKVCache(16, keep=keep)
    numbers = mx.arange(length, dtype=mx.float32).reshape(1, 1, -1, 1)
    for start in range(0, length, 7):
        part = numbers[:, :, start : start + 7]
        cache.update_and_fetch(part, part)
    layer = Ring.like(cache, slack=6)
    arrays = layer.adopt(cache, 256)
    back = layer.hand_back(arrays, length)
    expected = [*range(min(keep, length)), *range(max(min(keep, length), length - 16 + keep), length)]
    assert back.keys[0, 0, :, 0].tolist() == expected
    assert back.offset == length


def test_capacities_and_bounds_hold_what_they_promise_and_repeat():
    """A short ladder: lengths of 1 to 5,000 share few shapes."""
    assert all(rung(n) >= n and rung(n) % 256 == 0 for n in range(1, 5000))
    assert len({rung(n) for n in range(1, 5000)}) <= 8
    assert all(n <= read_bound(n) < n + max(256, n // 8 + 256) for n in range(1, 20000))


@pytest.mark.parametrize("name", ["llama", tiny.TINY_SW, "gemma3n"])
@pytest.mark.parametrize("draft", ["noisy", "same"])
def test_the_next_turn_on_what_a_reply_left_equals_a_cold_run(name, draft):
    """A round is still in flight when the first reply ends, and the window has wrapped. A60, A62."""
    p = pair(name, draft)
    first, ids = decode(p, LONG[:50], max_tokens=37, num_draft_tokens=4)
    memory = first.leave()
    prompt = LONG[:50] + ids + tiny.PROMPT
    _, warm = decode(p, prompt, memory=memory, max_tokens=40, num_draft_tokens=4)
    assert warm == plain(p.target, prompt, 40)
    if draft == "same":
        assert decode(p, prompt, max_tokens=40, num_draft_tokens=4)[0].stats.acceptance_rate == 1


LETTERS = {i: -math.inf for i in range(tiny.VOCAB) if not 32 < i < 127}


@pytest.mark.parametrize("length", [1, 9, 30])
@pytest.mark.parametrize("k", [0, 8])
@pytest.mark.parametrize("name", ["llama", tiny.TINY_SW])
def test_a_stop_string_longer_than_a_windows_slack_leaves_no_memory(name, k, length):
    """What a window held before it has been written over by what the stop string dropped."""
    base = pair(name)
    p = Pair(base.target, base.draft, tiny.byte_tokenizer())
    text = plain(p.target, tiny.PROMPT, 80, logits_processors=make_logits_processors(LETTERS))
    options = dict(max_tokens=80, num_draft_tokens=k, logit_bias=LETTERS)
    first, ids = decode(p, tiny.PROMPT, stop=[bytes(text[40 : 40 + length]).decode()], **options)
    assert first.finish == "stop_string" and ids == text[: len(ids)]
    memory, prompt = first.leave(), tiny.PROMPT + ids + tiny.PROMPT
    assert memory is not None or (name == tiny.TINY_SW and length + k > 8)
    expected = plain(p.target, prompt, 80, logits_processors=make_logits_processors(LETTERS))
    assert decode(p, prompt, memory=memory, **options)[1] == expected


def test_what_one_pair_left_is_of_no_use_to_another():
    """A75: caches that were made with other weights or another adapter are never read."""
    first, ids = decode(pair(), tiny.PROMPT, max_tokens=8)
    with pytest.raises(AssertionError):
        decode(pair(draft="same"), tiny.PROMPT + ids + [1], memory=first.leave(), max_tokens=4)


def test_a_round_left_in_flight_past_an_end_token_spoils_nothing():
    """The end token comes inside a block while the next round runs; the next turn reads on top."""
    p = pair(tiny.TINY_SW, "same")
    tokens = plain(p.target, LONG[:40], 30)
    end = next(t for i, t in enumerate(tokens) if i > 10 and t not in tokens[:i])
    p.end_ids = frozenset({end})
    try:
        first, ids = decode(p, LONG[:40], max_tokens=100, num_draft_tokens=4)
        assert first.finish == "stop" and ids == tokens[: tokens.index(end)]
        prompt = LONG[:40] + ids + tiny.PROMPT
        memory = first.leave()
        p.end_ids = frozenset()
        assert decode(p, prompt, memory=memory, max_tokens=30)[1] == plain(p.target, prompt, 30)
    finally:
        p.end_ids = frozenset()


def test_a_write_past_the_end_is_caught_before_it_is_submitted():
    """MLX does not check array offsets. With the buffers' growth broken, the next round would
    write behind them: the assertion must stop it."""
    decoder = Decoder(pair(), tiny.PROMPT, Options(max_tokens=None, num_draft_tokens=8))
    chunks = decoder.chunks()
    next(chunks)
    decoder.context._grow = lambda capacity: None
    with pytest.raises(AssertionError):
        for _ in range(3000):
            next(chunks)
    assert decoder.length + 2 * 9 > decoder.context.capacity  # it ran until the room was really used up


def test_buffers_grow_under_way_without_changing_the_reply():
    decoder = Decoder(pair(), tiny.PROMPT, Options(max_tokens=None, num_draft_tokens=4))
    ids, capacities = [], set()
    for chunk in decoder.chunks():
        ids += [t.id for t in chunk.tokens]
        capacities.add(decoder.context.capacity)
        if len(ids) > 2400:
            break
    assert len(capacities) > 1
    assert ids[:2400] == plain(pair().target, tiny.PROMPT, 2400)


@pytest.mark.parametrize("start", [0, 1, 32, 33])
@pytest.mark.parametrize("prompt", [1, 2, 19, 40])
def test_a_switch_to_quantised_caches_comes_at_mlx_lms_token(start, prompt):
    """A55: kv_bits from the first token and from token 32, before, at and after the prompt's end."""
    p, ids = pair(), LONG[:prompt]
    options = dict(kv_bits=4, kv_group_size=32, quantized_kv_start=start)
    decoder, got = decode(p, ids, max_tokens=60, num_draft_tokens=4, **options)
    assert got == plain(p.target, ids, 60, **options)
    assert any(isinstance(layer, Quantized) for layer in decoder.context.round.layers)
    assert any(isinstance(layer, Quantized) for layer in decoder.context.drafter.layers)


def test_quantised_caches_are_smaller_and_not_the_dense_ones():
    """A54: not silently dense."""
    def nbytes(**options):
        decoder, ids = decode(pair(), LONG, max_tokens=40, num_draft_tokens=3, **options)
        return sum(a.nbytes for arrays in decoder.context.state.target for a in arrays), ids

    dense, dense_ids = nbytes()
    packed, packed_ids = nbytes(kv_bits=4, kv_group_size=32)
    assert packed < 0.3 * dense
    assert packed_ids != dense_ids


@pytest.mark.parametrize("name, why", [
    (tiny.TINY_SW, "sliding-window"), ("deepseek_v3", "attention"), ("gpt_oss", "sliding-window"), ("afm7", "attention")])
def test_models_that_cannot_keep_quantised_caches_refuse_them(name, why):
    """A56: the message names the cause."""
    with pytest.raises(ValueError, match=f"kv_bits can't be used.*{why}"):
        decode(pair(name), tiny.PROMPT, kv_bits=8, kv_group_size=32)


def test_groups_that_do_not_divide_the_keys_are_named():
    with pytest.raises(ValueError, match="which kv_group_size 128 does not divide"):
        decode(pair(), tiny.PROMPT, kv_bits=4, kv_group_size=128)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_bounded_cache_gives_mlx_lms_tokens_with_both_models_bounded(name):
    """A53: a 200-token prompt into 64 slots."""
    p, ids = pair(name), LONG + LONG[:48]
    caches = [RotatingKVCache(64, keep=4) for _ in make_prompt_cache(p.target)]
    decoder, got = decode(p, ids, max_tokens=60, num_draft_tokens=3, max_kv_size=64)
    assert got == plain(p.target, ids, 60, prompt_cache=caches)
    for state in (decoder.context.state.target, decoder.context.state.drafter):
        assert all(a.shape[2] <= 64 + decoder.context.slack for arrays in state for a in arrays)


def test_a_bound_that_only_some_layers_could_keep_is_refused():
    """A53: never half honoured."""
    with pytest.raises(ValueError, match="max_kv_size can't be honoured: the target"):
        decode(pair(tiny.TINY_SW), tiny.PROMPT, max_kv_size=64)


@pytest.mark.parametrize("layer", [Full(2, 4, 4, mx.float32), Ring(2, 4, 4, mx.float32, window=16, slack=6)])
def test_offsets_that_are_arrays_mask_exactly_the_past(layer):
    arrays = layer.buffers(64)
    mask = layer.mask(arrays, Cursor(mx.array(5), 64), 3, None)
    assert mask.sum(axis=1).tolist() == [6, 7, 8]


@pytest.mark.parametrize("run_ahead", [True, False])
def test_there_is_room_for_every_round_in_flight(run_ahead, monkeypatch):
    """Buffers that grow with the reply are always larger than all that can be written once a round is submitted."""
    monkeypatch.setattr(context, "AHEAD", 8)
    seen, step = [], Decoder._step

    def spy(decoder, plan):
        """Before anything is written: MLX would write past the end."""
        seen.append(decoder._longest() + plan.num_draft_tokens + 1)
        assert seen[-1] <= decoder.context.capacity
        return step(decoder, plan)

    monkeypatch.setattr(Decoder, "_step", spy)
    p = pair(draft="same")
    prompt = tiny.PROMPT * 2
    decoder, ids = decode(p, prompt, controller=Scripted(8), max_tokens=700, run_ahead=run_ahead)
    assert ids == plain(p.target, prompt, 700) and max(seen) > 700
