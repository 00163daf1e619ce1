"""The shipped verify functions, enumerated: every draft, every outcome of the coins; and every fault that must be caught."""

import math
from fractions import Fraction as F

import law
import mlx.core as mx
import numpy as np
import pytest
from jaxtyping import TypeCheckError
from law import after, by_prefix, fixed, log

from mlx_spec import sampling, verify
from mlx_spec.types import Options
from mlx_spec.verify import Verdict

RULES = ("token", "block")


def emitted(judge, rule, p, q, k, n, **options):
    vocab = len(p(()))
    return law.emitted_law(law.enumerate_rounds(judge, rule, p, q, k, vocab, **options), n, vocab)


def distance(found, p):
    return np.abs(found - law.target_law(p, found.ndim, found.shape[0])).max()


@pytest.mark.parametrize("sparse", [(False, False), (True, False), (True, True)], ids=["dense", "p filtered", "both filtered"])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_the_law_of_k_plus_one_tokens_over_rounds_is_the_targets(rule, k, sparse):
    for seed in range(3):
        p, q = by_prefix(2 * seed, sparse=sparse[0]), by_prefix(2 * seed + 1, sparse=sparse[1])
        assert distance(emitted(getattr(verify, rule), rule, p, q, k, k + 1), p) < 1e-6


GOLDEN = {"token": (F(2, 3), F(10, 9), F(38, 27), F(130, 81)), "block": (F(2, 3), F(11, 9), F(5, 3), F(166, 81))}


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("rule", RULES)
def test_expected_accepted_tokens_are_the_papers(rule, k):
    p, q = fixed(1 / 3, 2 / 3), fixed(2 / 3, 1 / 3)
    found = law.expected_accepted(law.enumerate_rounds(getattr(verify, rule), rule, p, q, k, 2))
    assert abs(found - float(GOLDEN[rule][k - 1])) < 1e-6


def test_a_drafted_token_stands_with_one_minus_the_total_variation():
    p, q = fixed(0.2, 0.5, 0.3), fixed(0.5, 0.3, 0.2)
    for rule in RULES:
        assert abs(law.expected_accepted(law.enumerate_rounds(getattr(verify, rule), rule, p, q, 1, 3)) - 0.7) < 1e-6


def test_match_keeps_a_draft_as_often_as_shared_noise_agrees():
    """.6935 for these laws. With 200,000 rounds the standard error is .001: an error of .0041 is seen."""
    p, q, n = np.array([0.2, 0.5, 0.3]), np.array([0.5, 0.3, 0.2]), 200_000
    assert abs(law.match_probs(p, q).sum() - 0.6935) < 5e-5
    rows = lambda x: mx.array(np.tile(log(x), (3, 1)).astype(np.float32))
    accepted, _ = law.play("match", rows(p), rows(q), np.zeros(n, int), 1, np.random.default_rng(1))
    assert abs(accepted.mean() - 0.6935) < 4 * math.sqrt(0.6935 * 0.3065 / n) + 5e-5


def test_under_match_the_tokens_are_the_targets_own_draws_whatever_was_drafted():
    """F9 can't arise: the draft changes how many of the target's draws a round may use, never which they are."""
    rng = np.random.default_rng(2)
    batch, k, vocab = 500, 4, 5
    scores, noise = rng.normal(size=(batch, k + 1, vocab)), rng.gumbel(size=(batch, k + 1, vocab))
    scores, noise = mx.array(scores.astype(np.float32)), mx.array(noise.astype(np.float32))
    for n in (noise, None):
        own = np.argmax(np.array(scores) + (0 if n is None else np.array(n)), axis=-1)
        for drafts in (rng.integers(0, vocab, (batch, k)), own[:, :k], (own[:, :k] + 1) % vocab):
            verdict = verify.match(mx.array(drafts.astype(np.uint32)), scores, n)
            accepted = np.array(verdict.accepted)
            assert (accepted == np.cumprod(own[:, :k] == drafts, axis=1).sum(1)).all()
            row = verdict.next_logprobs if n is None else verdict.next_logprobs + verify.row(n, verdict.accepted)
            assert (np.array(mx.argmax(row, axis=-1)) == own[np.arange(batch), accepted]).all()


@pytest.mark.parametrize("rule", RULES)
def test_a_full_run_draws_its_bonus_from_the_last_row(rule):
    """F10."""
    batch = law.paths(by_prefix(1), by_prefix(1), 2, 3)
    verdict = getattr(verify, rule)(mx.array(batch.tokens, dtype=mx.uint32), batch.draft, batch.target, mx.zeros((9, 2)))
    assert verdict.accepted.tolist() == [2] * 9
    assert mx.allclose(verdict.next_logprobs, batch.target[:, 2], atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_a_coin_of_zero_does_not_accept_the_impossible(rule):
    """F12: uniforms include 0."""
    verdict = one(getattr(verify, rule), (0, 1), (0.5, 0.5), token=0, coin=0.0)
    assert verdict.accepted.item() == 0
    assert np.exp(np.array(verdict.next_logprobs)).tolist() == [[0, 1]]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("coin", [0.0, 0.5, law.FAIL])
def test_equal_laws_accept_everything_and_leave_no_empty_residual(rule, coin):
    """F13: with p = q to the last bit max(p - q, 0) is all zeros."""
    verdict = one(getattr(verify, rule), (0.3, 0.7), (0.3, 0.7), token=1, coin=coin)
    assert verdict.accepted.item() == 1
    # A coin can't reject here, but rounding can: then the next token's law is p itself.
    forced = verify._residual(mx.array([0]), mx.ones(1), *[mx.array(log([[(0.3, 0.7)]]).astype(np.float32))] * 2)
    assert np.allclose(np.exp(np.array(forced)), [[0.3, 0.7]])


def test_the_scripted_coin_catches_a_sign_that_is_not_strict():
    """F12, injected."""

    def judge(drafts, draft, target, coins):
        ratios = verify._ratios(drafts, draft, target)
        return verify.token(drafts, draft, target, coins)._replace(accepted=verify.leading(coins <= ratios))

    assert one(judge, (0, 1), (0.5, 0.5), token=0, coin=0.0).accepted.item() == 1


def test_equal_laws_catch_a_residual_without_a_guard():
    """F13, injected: 0/0."""
    p = mx.array([[0.3, 0.7]])
    excess = mx.maximum(p - p, 0)
    assert np.isnan(np.array(excess / excess.sum(-1, keepdims=True))).all()


def one(judge, p, q, token, coin):
    row = lambda x, n: mx.array(log([[x] * n]).astype(np.float32))
    return judge(mx.array([[token]], dtype=mx.uint32), row(q, 1), row(p, 2), mx.array([[coin]]))


# Faults: each is the shipped rule with one thing wrong. `exp` of everything, because that is how they are told.


def parts(drafts, draft, target):
    """p and q of row 0, the drafted token's own p and q, and the drafted token."""
    at = lambda rows: mx.take_along_axis(mx.exp(rows[:, 0]), drafts[:, :1], axis=-1)
    return mx.exp(target[:, 0]), mx.exp(draft[:, 0]), at(target), at(draft), drafts[:, :1]


def verdict(coins, accept_probs, correction, bonus):
    accepted = verify.leading(coins < accept_probs)
    return Verdict(accepted, mx.log(mx.where(accepted[:, None] > 0, bonus, correction)), accept_probs)


def fault(change):
    """A rule for k = 1. change(p, q, px, qx, x, shipped correction) -> (accept_probs, correction)."""

    def judge(drafts, draft, target, coins):
        p, q, px, qx, x = parts(drafts, draft, target)
        excess = mx.maximum(p - q, 0)
        right = mx.where(excess.sum(-1, keepdims=True) > 0, excess / mx.maximum(excess.sum(-1, keepdims=True), 1e-30), p)
        accept_probs, correction = change(p, q, px, qx, x, right)
        return verdict(coins, accept_probs, correction, mx.exp(target[:, 1]))

    return judge


def without(p, x):
    """p with token x removed: the residual of a one-hot draft."""
    rest = mx.where(mx.arange(p.shape[-1]) == x, 0, p)
    return rest / rest.sum(-1, keepdims=True)


ratio = lambda px, qx: mx.minimum(px / qx, 1)

FAULTS = {
    "F3": fault(lambda p, q, px, qx, x, right: (ratio(px, qx), mx.softmax(mx.maximum(p - q, 0), axis=-1))),
    "F4": fault(lambda p, q, px, qx, x, right: (ratio(px, qx), p)),
    "F4b": fault(lambda p, q, px, qx, x, right: ((px >= qx).astype(mx.float32), right)),
    "F4c": fault(lambda p, q, px, qx, x, right: (ratio(px, qx), without(p, x))),
    "F5": fault(lambda p, q, px, qx, x, right: (mx.where(x == 1, 0, ratio(px, qx)), mx.where(x == 1, p, right))),
    "F7": fault(lambda p, q, px, qx, x, right: (mx.ones_like(px), right)),
    "F8": fault(lambda p, q, px, qx, x, right: (px, right)),
}

# id -> rule, p, q, what drafts are drawn from if not q, what comes out instead of p
TABLE = {
    "F1": (verify.token, (0.6, 0.4), (0.7, 0.3), (1, 0), (0.857, 0.143)),
    "F2": (verify.token, (0.2, 0.5, 0.3), (0.5, 0.3, 0.2), (0.625, 0.375, 0), (0.25, 0.625, 0.125)),
    "F3": (FAULTS["F3"], (0.1, 0.3, 0.6), (0.6, 0.3, 0.1), None, (0.237, 0.437, 0.326)),
    "F4": (FAULTS["F4"], (0.7, 0.3), (0.3, 0.7), None, (0.58, 0.42)),
    "F4b": (FAULTS["F4b"], (0.7, 0.3), (0.3, 0.7), None, (1, 0)),
    "F4c": (FAULTS["F4c"], (0.2, 0.3, 0.5), (0.5, 0.3, 0.2), None, (0.2, 0.4125, 0.3875)),
    "F5": (FAULTS["F5"], (0.7, 0.3), (0.5, 0.5), None, (0.85, 0.15)),
    "F7": (FAULTS["F7"], (0.6, 0.4), (0.5, 0.5), None, (0.5, 0.5)),
    "F8": (FAULTS["F8"], (0.6, 0.4), (0.5, 0.5), None, (0.8, 0.2)),
}


@pytest.mark.parametrize("name", TABLE)
def test_enumeration_catches_the_fault_and_its_own_wrong_law(name):
    judge, p, q, drawn_from, wrong = TABLE[name]
    p, q = fixed(*p), fixed(*q)
    drawn = {"drawn_from": fixed(*drawn_from)} if drawn_from else {}
    found = emitted(judge, "token", p, q, 1, 1, **drawn)
    assert np.abs(found - wrong).max() < 6e-4
    assert distance(found, p) > 0.05
    assert distance(emitted(verify.token, "token", p, q, 1, 1), p) < 1e-6  # the shipped rule, same checker


def test_enumeration_catches_a_bonus_from_the_first_row():
    """F10: the first token is right, the joint law of two is not."""
    p, q = after((0.9, 0.1), (0.2, 0.8), (0.5, 0.5)), fixed(0.5, 0.5)

    def judge(drafts, draft, target, coins):
        shipped = verify.token(drafts, draft, target, coins)
        wrong = mx.where(shipped.accepted[:, None] == 1, target[:, 0], shipped.next_logprobs)
        return shipped._replace(next_logprobs=wrong)

    found = emitted(judge, "token", p, q, 1, 2)
    assert np.allclose(found.sum(1), (0.9, 0.1), atol=1e-6)
    assert abs(np.abs(found - law.target_law(p, 2, 2)).sum() / 2 - 0.39) < 0.005
    assert distance(emitted(verify.token, "token", p, q, 1, 2), p) < 1e-6


def test_enumeration_catches_the_token_rules_threshold_on_a_block_ratio():
    """F11: the running product is compared with the coin where h_i belongs."""
    p, q = after((0.7, 0.3), (0.6, 0.4), (0.2, 0.8)), after((0.4, 0.6), (0.3, 0.7), (0.5, 0.5))

    def judge(drafts, draft, target, coins):
        joint = verify._joint(verify._ratios(drafts, draft, target))
        lengths = mx.arange(1, 3)
        accepted = mx.where(coins < joint[:, 1:], lengths, 0).max(axis=1)
        scale = mx.take_along_axis(joint, accepted[:, None], axis=1)[:, 0]
        return Verdict(accepted, verify._residual(accepted, scale, draft, target), joint[:, 1:])

    assert np.allclose(emitted(judge, "block", p, q, 2, 1), (0.55, 0.45), atol=1e-6)
    assert distance(emitted(verify.block, "block", p, q, 2, 3), p) < 1e-6


@pytest.mark.parametrize("compiled", [False, True])
def test_counting_the_leading_successes_never_returns_garbage(compiled):
    """A scalar cumprod().sum() has returned memory that nobody wrote: many arrays, in flight together, batch 1 and more."""
    count = mx.compile(verify.leading) if compiled else verify.leading
    rng = np.random.default_rng(3)
    for batch, k in ((1, 0), (1, 1), (1, 4), (1, 8), (5, 3), (2, 16)):
        keeps = rng.random((150, batch, k)) < 0.8
        counts = [count(mx.array(keep)) for keep in keeps]
        mx.async_eval(*counts)
        assert (np.array(mx.stack(counts)) == np.cumprod(keeps, axis=2).sum(2)).all()


def test_annotated_shapes_are_the_real_ones_and_others_are_refused():
    """The annotations of verify.py and sampling.py, which conftest.py has checked by jaxtyping and beartype."""
    k, vocab = 2, 4
    tokens, draft = mx.zeros((3, k), mx.uint32), sampling.log_softmax(mx.zeros((3, k, vocab)))
    target, coins = sampling.logprobs(mx.zeros((3, k + 1, vocab)), sampling.Sampling(0.5, 0.9, 0.1, 2)), mx.full((3, k), 0.5)
    for verdict in (verify.token(tokens, draft, target, coins), verify.block(tokens, draft, target, coins)):
        assert verdict.accepted.shape == (3,) and verdict.next_logprobs.shape == (3, vocab)
    for noise in (mx.zeros((3, k + 1, vocab)), None):
        verify.match(tokens, target, noise)
    keys = sampling.make_keys(0)
    assert sampling.gumbel(keys, sampling.DRAW, mx.array(5), vocab).shape == (vocab,)
    bias = sampling.penalties(Options(logit_bias={1: 2.0}))
    assert sampling.process(bias, mx.array([1, 2, vocab]), mx.zeros((1, vocab))).tolist() == [[0, 2, 0, 0]]
    for wrong in ((tokens, draft[:2], target, coins), (tokens, draft, target, coins[:, :1]), (coins, draft, target, coins)):
        with pytest.raises(TypeCheckError):
            verify.token(*wrong)
    with pytest.raises(TypeCheckError):
        sampling.position_key(keys[:, :1], sampling.DRAW, mx.array(5))
