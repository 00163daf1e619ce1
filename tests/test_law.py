"""The law of what comes out: 200,000 vectorised rounds of the shipped functions, then the engine itself.

Power: with 200,000 draws a chi-square at p < 1e-4 surely sees a total-variation error of .0088 in 8 cells (one token), .0104 in
32 (accepted count and token) and .0115 in 64 (a pair): `test_the_smallest_error_that_is_seen`. The engine's runs are shorter and
see .05 and more; what is wrong in a rule is found above them, what is wrong between rounds is large.
"""

import law
import mlx.core as mx
import numpy as np
import pytest
from helpers import decode, pair
from law import as_often_as, filtered, log, p_value, play, script, softmax, tally, transitions

from mlx_spec import stream_generate
from mlx_spec.sampling import Sampling, logprobs
from mlx_spec.types import Options

ROUNDS, VOCAB, THRESHOLD = 200_000, 8, 1e-4
RULES = ("token", "block", "match")
SAMPLINGS = {
    "temperature": Sampling(0.8),
    "top-k": Sampling(1.0, top_k=4),
    "top-p": Sampling(1.3, top_p=0.8),
    "min-p": Sampling(1.0, min_p=0.1),
    "all": Sampling(0.7, top_p=0.9, min_p=0.03, top_k=6),
}


def tables(seed, sampling, vocab=VOCAB):
    """Laws of target and draft after each token, through the shipped filters: mx log-probabilities and float64."""
    rng = np.random.default_rng(seed)
    shipped = [logprobs(mx.array(1.2 * rng.normal(size=(vocab, vocab)).astype(np.float32)), sampling) for _ in range(2)]
    exact = [np.exp(np.array(x, dtype=np.float64)) for x in shipped]
    return shipped, [x / x.sum(-1, keepdims=True) for x in exact]


def second_token(emitted, again):
    """Column 1, from another round where the first emitted one token only."""
    second, ended = emitted[:, 1].copy(), emitted[:, 1] < 0
    second[ended] = again(emitted[ended, 0], ended)[1][:, 0]
    return second


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("rule", RULES)
def test_a_round_emits_the_targets_law(rule, name):
    """First token; accepted count with first token; pair of tokens over rounds; all against exact laws."""
    rng, k, start = np.random.default_rng(10), 3, np.zeros(ROUNDS, int)
    (p_log, q_log), (p, q) = tables(11, SAMPLINGS[name])
    accepted, emitted = play(rule, p_log, q_log, start, k, rng)
    first = emitted[:, 0]
    assert p_value(tally(first, shape=VOCAB), p[0]) > THRESHOLD
    kept = np.minimum(p, q) if rule == "token" else law.match_probs(p, q)
    joint = law.block_count_and_first(p, q, 0, k) if rule == "block" else law.count_and_first(kept, p, 0, k)
    assert p_value(tally(accepted, first, shape=(k + 1, VOCAB)), joint) > THRESHOLD
    second = second_token(emitted, lambda start, _: play(rule, p_log, q_log, start, k, rng))
    assert p_value(tally(first, second, shape=(VOCAB, VOCAB)), p[0][:, None] * p) > THRESHOLD


def test_the_smallest_error_that_is_seen():
    for cells, error in ((8, 0.0088), (32, 0.0104), (64, 0.0115)):
        assert law.visible_error(ROUNDS, cells) < error
    # and it does see it: move that much from the likeliest token to the others
    p = softmax(np.random.default_rng(12).normal(size=VOCAB))
    wrong = p + np.where(p == p.max(), -0.0088, 0.0088 / (VOCAB - 1))
    misses = [p_value(np.random.default_rng(s).multinomial(ROUNDS, wrong), p) > THRESHOLD for s in range(200)]
    assert sum(misses) <= 4
    alarms = [p_value(np.random.default_rng(s).multinomial(ROUNDS, p), p) < 0.01 for s in range(2000)]
    assert 5 <= sum(alarms) <= 40  # 1 in 100: the p-value is one


def rows(*probs):
    """The same law after each token."""
    return mx.array(np.tile(log(probs), (len(probs), 1)).astype(np.float32))


def test_noise_that_drew_the_draft_and_then_the_correction_is_caught():
    """F9."""
    p, q, rng = (0.1, 0.6, 0.3), (0.6, 0.3, 0.1), np.random.default_rng(13)
    start, noise = np.zeros(ROUNDS, int), rng.gumbel(size=(2, ROUNDS, 3))
    wrong = tally(play("token", rows(*p), rows(*q), start, 1, rng, noise=noise, last_noise=noise[0])[1][:, 0], shape=3)
    assert p_value(wrong, np.array([11, 63, 36]) / 110) > THRESHOLD
    assert p_value(wrong, p) < THRESHOLD
    assert p_value(tally(play("token", rows(*p), rows(*q), start, 1, rng, noise=noise)[1][:, 0], shape=3), p) > THRESHOLD


def test_coins_that_are_used_in_two_rounds_are_caught():
    """F14: each round by itself is right, the two together are not."""
    p, rng = (0.7, 0.3), np.random.default_rng(14)
    laws, coins, start = (rows(*p), rows(0.3, 0.7)), rng.random((ROUNDS, 1)), np.zeros(ROUNDS, int)
    exact = np.outer(p, p)
    _, emitted = play("token", *laws, start, 1, rng, coins=coins)
    assert p_value(tally(emitted[:, 0], shape=2), p) > THRESHOLD
    same = second_token(emitted, lambda start, ended: play("token", *laws, start, 1, rng, coins=coins[ended]))
    fresh = second_token(emitted, lambda start, ended: play("token", *laws, start, 1, rng))
    assert p_value(tally(emitted[:, 0], same, shape=(2, 2)), exact) < THRESHOLD
    assert p_value(tally(emitted[:, 0], fresh, shape=(2, 2)), exact) > THRESHOLD


@pytest.mark.parametrize("rule", ["token", "block"])
def test_noise_of_a_thrown_away_draft_may_serve_again_under_token_only(rule):
    """F14 in its subtlest form, draft noise keyed by position: block judges a whole draft, so a thrown-away token has had a say
    in the accepted count, and a next round that meets its noise again is not independent of that."""
    p, q, rng = (1 / 3, 2 / 3), (2 / 3, 1 / 3), np.random.default_rng(15)
    noise, start = rng.gumbel(size=(3, ROUNDS, 2)), np.zeros(ROUNDS, int)
    _, emitted = play(rule, rows(*p), rows(*q), start, 2, rng, noise=noise)
    again = lambda start, ended: play(rule, rows(*p), rows(*q), start, 2, rng, noise=noise[1:, ended].repeat([1, 2], axis=0))
    second = second_token(emitted, again)
    assert (p_value(tally(emitted[:, 0], second, shape=(2, 2)), np.outer(p, p)) > THRESHOLD) == (rule == "token")


# The engine, on models whose laws are looked up


SCRIPTS = {
    # The block rule's gain, and so what a fault between rounds does to it, is large here.
    "the paper's": (np.tile(log((1 / 3, 2 / 3)), (2, 1)), np.tile(log((2 / 3, 1 / 3)), (2, 1))),
    "random": tuple(np.random.default_rng(16).normal(size=(2, 6, 6))),
}


@pytest.fixture(scope="module")
def scripts():
    return {name: script(*logits) for name, logits in SCRIPTS.items()}


def rounds_of(pair, start, **options):
    """A long reply round by round: (pending token, origins of what it emitted, ids)."""
    found, pending = [], start
    for chunk in stream_generate(pair, [start], **options):
        ids = [t.id for t in chunk.tokens]
        found.append((pending, [t.origin for t in chunk.tokens], ids))
        pending = ids[-1]
    return found


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("rule", RULES)
def test_the_engines_law_and_acceptance_do_not_depend_on_k(scripts, rule, k, name):
    """Transitions against the script; the first draft stands with 1 - TV (token, block), or as often as shared noise agrees."""
    p_logits, q_logits = SCRIPTS[name]
    p, q, vocab = softmax(p_logits), softmax(q_logits), len(p_logits)
    found = rounds_of(scripts[name], 1, max_tokens=3000, temperature=1.0, seed=20 + k, num_draft_tokens=k, verify=rule)
    ids = [i for _, _, ids in found for i in ids]
    assert p_value(transitions(1, ids, vocab), p) > THRESHOLD
    first_drafts_stand(found, (law.match_probs(p, q) if rule == "match" else np.minimum(p, q)).sum(-1))


def first_drafts_stand(found, chance):
    """As often as they should. chance: by pending token. The last rounds may have been cut."""
    stood = sum(origins[0] == "accepted" for _, origins, _ in found[:-2])
    assert as_often_as([chance[pending] for pending, _, _ in found[:-2]], stood)


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize(
    "options",
    [dict(temperature=0.3), dict(temperature=1.0), dict(temperature=2.0)]  # A22
    + [dict(temperature=1.0, **f) for f in (dict(top_k=2), dict(top_p=0.7), dict(min_p=0.2))],  # A23, A24
    ids=str,
)
def test_temperature_and_filters_hold_in_the_engine(scripts, options, k):
    """A22 (the draft ignores the temperature), A23, A24 (a filter on one side only): k = 2 and plain."""
    p, q = (filtered(softmax(logits), **options) for logits in SCRIPTS["random"])
    found = rounds_of(scripts["random"], 1, max_tokens=2000, seed=30, num_draft_tokens=k, **options)
    counts = transitions(1, [i for _, _, ids in found for i in ids], len(p))
    assert not counts[p == 0].any()
    assert p_value(counts, p) > THRESHOLD
    first_drafts_stand(found, np.minimum(p, q).sum(-1) if k else np.zeros(len(p)))


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_that_gives_no_numbers_after_some_tokens_changes_nothing(rule):
    """As half precision does that overflows; the ids that a pair is tried with at load are others."""
    p, q = np.random.default_rng(17).normal(size=(2, 12, 12))
    p[:, 10:] += 2
    q[10:] = np.nan
    found = rounds_of(script(p, q), 1, max_tokens=2000, temperature=1.0, seed=31, num_draft_tokens=2, verify=rule)
    assert p_value(transitions(1, [i for _, _, ids in found for i in ids], 12), softmax(p)) > THRESHOLD


@pytest.mark.parametrize("rule", RULES)
def test_the_target_as_its_own_draft_has_everything_accepted_at_temperature_one(rule):
    """A25: a rule that only keeps equal independent draws would keep sum p^2; a cache fault would show as a slow decay."""
    decoder, ids = decode(pair("llama", "same"), [5, 6, 7], max_tokens=500, temperature=1.0, seed=1, num_draft_tokens=4, verify=rule)
    assert len(set(ids)) > 50
    assert decoder.stats.acceptance_rate > 0.995


@pytest.mark.parametrize("rule", RULES)
def test_acceptance_changes_smoothly_with_temperature(rule):
    """A26: 100 % at 0 and nothing at .3 is a fault."""
    rates = []
    for temperature in (0.0, 0.3, 0.7, 1.0):
        options = dict(max_tokens=200, temperature=temperature, seed=2, num_draft_tokens=3, verify=rule)
        rates.append(decode(pair("llama", "noisy"), [5, 6, 7], **options)[0].stats.acceptance_rate)
    assert min(rates) > 0.5 * max(rates) > 0.1, rates


FILTERS = dict(top_p=0.95, min_p=0.001, top_k=200, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={3: 2.0})


@pytest.mark.parametrize("model", ["llama", "llama_sw"])
@pytest.mark.parametrize("extra", [{}, FILTERS], ids=["plain law", "filters and penalties"])
def test_match_gives_a_seed_one_text_whatever_is_drafted(model, extra):
    options = dict(max_tokens=48, temperature=1.0, seed=7, verify="match", **extra)
    _, expected = decode(pair(model, None), [1, 2, 3], **options)
    assert len(set(expected)) > 20
    drafts = {"same": (4,), "noisy": (1, 4, 8), "other": (0, 4), "heads": (1,), "deep heads": (4,), "reduced mlp": (3,)}
    for draft, ks in drafts.items():
        for k in ks:
            decoder, ids = decode(pair(model, draft), [1, 2, 3], num_draft_tokens=k, **options)
            assert ids == expected, (draft, k)
            assert k == 0 or decoder.stats.drafted > 0


def test_options_here_name_every_filter():
    """A filter that is added to Options belongs into this file's tables."""
    assert {"temperature", "top_p", "top_k", "min_p"} == set(Sampling.__dataclass_fields__) <= set(Options.__dataclass_fields__)
