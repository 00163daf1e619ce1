"""From logits to laws as mlx-lm does it, seeds, keys, and temperature 0, which uses no randomness at all."""

from itertools import islice

import mlx.core as mx
import numpy as np
import pytest
import tiny
from helpers import decode, pair, plain
from law import filtered, script, softmax
from mlx_lm import sample_utils

from mlx_spec import generate, sampling, stream_generate
from mlx_spec.engine import Decoder
from mlx_spec.sampling import Sampling, logprobs
from mlx_spec.types import Options

PROMPT = [5, 6, 7]
RULES = ("token", "block", "match")

FILTERS = [
    dict(temperature=1.0), dict(temperature=0.3), dict(temperature=2.0),
    dict(temperature=1.0, top_k=3), dict(temperature=0.7, top_p=0.8), dict(temperature=1.5, min_p=0.1),
    dict(temperature=0.01, top_k=1, top_p=0.8), dict(temperature=0.8, top_p=0.9, min_p=0.02, top_k=5),
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_a_law_is_filtered_and_then_warmed_in_mlx_lms_order(options, monkeypatch):
    """Against numpy, and against what mlx-lm's own sampler hands to its draw."""
    logits = mx.array(2 * np.random.default_rng(0).normal(size=(50, 12)).astype(np.float32))
    found = np.exp(np.array(logprobs(logits, Sampling(**options))))
    assert np.allclose(found, filtered(softmax(np.array(logits)), **options), atol=2e-6)
    monkeypatch.setattr(sample_utils, "categorical_sampling", lambda x, temp: mx.softmax(x * (1 / temp), axis=-1))
    theirs = sample_utils.make_sampler(options["temperature"], options.get("top_p", 0), options.get("min_p", 0), top_k=options.get("top_k", 0))
    assert np.allclose(found, np.array(theirs(sampling.log_softmax(logits))), atol=2e-6)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_a_law_is_computed_in_float32_and_sums_to_one(dtype):
    law = logprobs(mx.random.normal((4, 3000), key=mx.random.key(0)).astype(dtype), Sampling(0.9))
    assert law.dtype == mx.float32 and np.allclose(np.exp(np.array(law)).sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize("options", [dict(top_p=0), dict(top_p=1), dict(min_p=1), dict(top_k=1, top_p=1e-6, min_p=1)], ids=str)
@pytest.mark.parametrize("logits", [[0.0, 0, 0, 0], [5.0, -np.inf, 1, 2], [90.0, 0, -90, 1]], ids=str)
def test_no_filter_ever_leaves_nothing(logits, options):
    """A50."""
    law = np.exp(np.array(logprobs(mx.array([logits]), Sampling(0.5, **options))))
    assert np.isfinite(law).all() and abs(law.sum() - 1) < 1e-6


def test_top_k_of_one_is_greedy():
    """A50: filters in the wrong order masked every token."""
    _, expected = decode(pair(), PROMPT, max_tokens=30)
    for rule in RULES:
        options = dict(temperature=0.01, top_k=1, top_p=0.8, verify=rule, seed=1)
        assert decode(pair(), PROMPT, max_tokens=30, **options)[1] == expected


@pytest.mark.parametrize("top_k", [tiny.VOCAB, tiny.VOCAB + 1])
def test_a_top_k_that_filters_nothing_is_refused_with_its_range(top_k):
    """A50."""
    with pytest.raises(ValueError, match=f"top_k must be 0 .* to {tiny.VOCAB - 1}"):
        decode(pair(), PROMPT, temperature=1.0, top_k=top_k)


@pytest.mark.parametrize("options", [dict(top_p=0), dict(top_p=1), dict(min_p=1), dict(top_k=tiny.VOCAB - 1)], ids=str)
def test_filters_at_their_ends_decode(options):
    """A50."""
    assert len(decode(pair(), PROMPT, max_tokens=12, temperature=1.0, seed=1, **options)[1]) == 12


# Seeds and keys


def test_keys_of_all_purposes_and_positions_are_different():
    """F14."""
    places = mx.arange(5000)
    for seed in (0, 1, 7, 2**32 - 1, 2**64 - 1):
        keys = sampling.make_keys(seed)
        every = [sampling.position_key(keys, purpose, p) for purpose in range(3) for p in places[:50]]
        assert len({tuple(k) for k in mx.stack(every).tolist()}) == len(every)
        assert len(set(keys[:, 0].tolist())) == 3  # the position moves the second word only: no two purposes ever meet


def test_numbers_of_neighbouring_positions_and_purposes_do_not_correlate():
    """F14: 2,000 positions; correlations above .09 (4 sigma) are seen."""
    keys, n = sampling.make_keys(3), 2000
    draws = [[mx.random.uniform(key=sampling.position_key(keys, purpose, mx.array(i))) for i in range(n)] for purpose in range(3)]
    u = np.array(mx.array([mx.stack(row).tolist() for row in draws]))
    series = [row[shift : n - 10 + shift] for row in u for shift in range(3)]
    related = np.abs(np.corrcoef(series) - np.eye(len(series)))
    assert related.max() < 4 / np.sqrt(n)


@pytest.fixture
def keys_by_round(monkeypatch):
    """A function that decodes a few rounds, not compiled yet, and returns the keys of all random draws of each."""
    used = []
    for name in ("gumbel", "uniform"):
        real = getattr(mx.random, name)
        monkeypatch.setattr(mx.random, name, lambda *a, key, real=real, **kw: (used.append(key), real(*a, key=key, **kw))[1])

    def run(rule: str) -> list[list[tuple]]:
        pair = script(*np.random.default_rng(1).normal(size=(2, 6, 6)))
        options = Options(max_tokens=100, temperature=1.0, seed=1, num_draft_tokens=4, verify=rule)
        rounds, origins = [], []
        for chunk in islice(Decoder(pair, [1], options, run_ahead=False).chunks(), 6):
            origins += [t.origin for t in chunk.tokens]
            rounds.append([tuple(k) for k in mx.stack(used).tolist()])
            used.clear()
        assert {"accepted", "correction"} <= set(origins)
        return rounds

    return run


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_round_uses_no_key_twice(rule, keys_by_round):
    """F9, F14, in the engine: drafts, coins and the last token."""
    for keys in keys_by_round(rule):
        assert len(keys) >= 3 and len(set(keys)) == len(keys)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_no_round_meets_the_random_numbers_of_another(rule, keys_by_round):
    """F14, in the engine."""
    keys = sum(keys_by_round(rule), [])
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("k", [0, 4])
def test_a_seed_repeats_itself_differs_from_others_and_is_in_the_result(k):
    """A48."""
    texts = [generate(pair(), PROMPT, max_tokens=25, temperature=1.0, seed=s, num_draft_tokens=k) for s in (11111, 22222, 33333, 11111)]
    assert texts[0].ids == texts[3].ids and [r.seed for r in texts] == [11111, 22222, 33333, 11111]
    assert len({tuple(r.ids) for r in texts}) == 3
    unseeded = [generate(pair(), PROMPT, max_tokens=25, temperature=1.0, num_draft_tokens=k) for _ in range(2)]
    assert unseeded[0].ids != unseeded[1].ids


def test_without_drafts_a_seed_gives_what_plain_decoding_gives():
    """A49: a step that drafts nothing consumes the same random numbers; so does a reply of one token."""
    _, expected = decode(pair(draft=None), PROMPT, max_tokens=30, temperature=1.0, seed=7)
    for rule in RULES:
        assert decode(pair(), PROMPT, max_tokens=30, temperature=1.0, seed=7, num_draft_tokens=0, verify=rule)[1] == expected
        assert decode(pair(), PROMPT, max_tokens=1, temperature=1.0, seed=7, num_draft_tokens=4, verify=rule)[1] == expected[:1]


def test_seeded_and_unseeded_requests_do_not_disturb_each_other():
    """A27: back to back and interleaved, each is what it is alone; no run of a placeholder."""
    options = dict(max_tokens=40, temperature=0.1)
    alone = generate(pair(), PROMPT, seed=7, **options).ids
    first, second = generate(pair(), PROMPT, **options), generate(pair(), PROMPT, seed=7, **options)
    assert second.ids == alone
    assert generate(pair(), PROMPT, seed=first.seed, **options).ids == first.ids
    streams = [stream_generate(pair(), PROMPT, seed=seed, **options) for seed in (first.seed, 7)]
    together, running = [[], []], [0, 1]
    while running:
        for i in list(running):
            chunk = next(streams[i], None)
            if chunk is None:
                running.remove(i)
            else:
                together[i] += [t.id for t in chunk.tokens]
    assert together == [first.ids, alone]
    for ids in together:
        assert all(0 <= i < tiny.VOCAB for i in ids) and (0, 0) not in zip(ids, ids[1:])


@pytest.mark.parametrize("rule", RULES)
def test_a_banned_token_is_never_drawn(rule):
    """A43 at temperature 1: the script likes token 2 best everywhere, and so does the draft."""
    logits = np.random.default_rng(4).normal(size=(6, 6))
    logits[:, 2] += 3
    draft = logits + np.random.default_rng(5).normal(size=(6, 6))
    options = dict(temperature=1.0, seed=1, num_draft_tokens=3, verify=rule, max_tokens=300)
    liked = script(logits, draft)
    assert decode(liked, [2, 2, 2], **options)[1].count(2) > 100
    assert 2 not in decode(liked, [2, 2, 2], logit_bias={2: float("-inf")}, **options)[1]


# Temperature 0


@pytest.mark.parametrize("temperature", [0, 1e-9])
@pytest.mark.parametrize("k", [0, 4])
def test_temperature_zero_uses_no_random_numbers(k, temperature, monkeypatch):
    """A20."""

    def refuse(*args, **kwargs):
        raise AssertionError("a random number at temperature 0")

    tiny_pair = pair()
    expected = plain(tiny_pair.target, PROMPT, 20)
    tiny_pair.compiled.clear()
    for name in dir(mx.random):
        if callable(getattr(mx.random, name)) and not name.startswith("_"):
            monkeypatch.setattr(mx.random, name, refuse)
    for rule in RULES:
        assert decode(tiny_pair, PROMPT, max_tokens=20, num_draft_tokens=k, verify=rule, temperature=temperature)[1] == expected
    with pytest.raises(AssertionError, match="random number"):
        decode(tiny_pair, PROMPT, max_tokens=20, num_draft_tokens=k, temperature=1.0)


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-9])
def test_temperature_zero_is_plain_greedy_every_time(temperature):
    """A20: greedy is what the number says, not how it is written."""
    expected = plain(pair().target, PROMPT, 20)
    for _ in range(5):
        assert decode(pair(), PROMPT, max_tokens=20, temperature=temperature, num_draft_tokens=3)[1] == expected


def test_the_first_drafted_token_is_checked_too():
    """A21, F7: the target says 7 where the draft says 1."""
    target, draft = np.zeros((10, 10)), np.zeros((10, 10))
    target[:, 7] = draft[:, 1] = 9
    decoder, ids = decode(script(target, draft), [1, 1, 1], max_tokens=6, num_draft_tokens=1)
    assert ids == [7] * 6
    assert decoder.stats.drafted > 0 and decoder.stats.acceptance_rate == 0
