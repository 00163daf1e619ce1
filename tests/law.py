"""What the tests of the output law share: enumeration of a verify function, exact references, a chi-square.

Laws are numpy arrays of float64 and come from nothing in mlx_spec, except where a function takes the shipped rule as an argument.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import product
from typing import Callable, NamedTuple

import mlx.core as mx
import numpy as np
from tiny import ScriptModel

from mlx_spec import verify
from mlx_spec.pairs import Pair

FAIL = float(np.nextafter(np.float32(1), np.float32(0)))  # the largest uniform: fails wherever failing is possible

Law = Callable[[tuple], np.ndarray]  # the law of the next token after a prefix


def softmax(logits):
    logits = np.asarray(logits, dtype=np.float64)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def log(probs) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(probs, dtype=np.float64))


def fixed(*probs) -> Law:
    """The same law after every prefix."""
    return lambda prefix: np.array(probs, dtype=np.float64)


def after(first, *rows) -> Law:
    """One law at the start, another after each first token."""
    return lambda prefix: np.array(rows[prefix[0]] if prefix else first, dtype=np.float64)


def by_prefix(seed: int, vocab: int = 3, sparse: bool = False) -> Law:
    """Another random law after every prefix; sparse: some of it impossible, as a filter leaves it."""

    @lru_cache(maxsize=None)
    def law(prefix: tuple) -> np.ndarray:
        logits = 1.5 * np.random.default_rng([seed, 17, *prefix]).normal(size=vocab)
        probs = softmax(logits)
        if sparse:
            probs[np.argmin(probs)] = 0
        return probs / probs.sum()

    return law


class Paths(NamedTuple):
    """Every draft of k tokens, as a batch."""

    tokens: list[tuple]
    draft: mx.array
    target: mx.array


def paths(p: Law, q: Law, k: int, vocab: int, prefix: tuple = ()) -> Paths:
    tokens = list(product(range(vocab), repeat=k))
    rows = lambda law, n: mx.array(log([[law(prefix + t[:i]) for i in range(n)] for t in tokens]).astype(np.float32))
    return Paths(tokens, rows(q, k), rows(p, k + 1))


def outcome_probs(rule: str, accept_probs: np.ndarray) -> np.ndarray:
    """(batch, k) probabilities of the coins to (batch, k + 1) probabilities of the accepted count."""
    k = accept_probs.shape[1]
    ones = np.ones((len(accept_probs), 1))
    if rule == "token":  # the leading successes
        stands = np.cumprod(np.concatenate([ones, accept_probs], axis=1), axis=1)
        return stands * np.concatenate([1 - accept_probs, ones], axis=1)
    last = [np.prod(1 - accept_probs[:, i:], axis=1) for i in range(k + 1)]  # the last success
    return np.stack(last, axis=1) * np.concatenate([ones, accept_probs], axis=1)


def enumerate_rounds(judge, rule: str, p: Law, q: Law, k: int, vocab: int, drawn_from: Law | None = None) -> Callable:
    """All outcomes of a round after a prefix: (emitted but the last, law of the last, probability).

    judge: a rule of `verify`, or a fault of one. Each accepted count is forced by its coins: 0 succeeds wherever
    success is possible, `FAIL` fails wherever failure is. drawn_from: what drafts really come from, if not q.
    """

    @lru_cache(maxsize=None)
    def outcomes(prefix: tuple) -> list:
        batch = paths(p, q, k, vocab, prefix)
        tokens = mx.array(batch.tokens, dtype=mx.uint32)
        source = drawn_from or q
        weights = np.array([math.prod(source(prefix + t[:i])[t[i]] for i in range(k)) for t in batch.tokens])
        found = []
        for a in range(k + 1):
            coins = mx.array([[0.0 if (i < a if rule == "token" else i == a - 1) else FAIL for i in range(k)]] * len(weights))
            verdict = judge(tokens, batch.draft, batch.target, coins)
            chance = weights * outcome_probs(rule, np.array(verdict.accept_probs, dtype=np.float64))[:, a]
            accepted, law = np.array(verdict.accepted), np.exp(np.array(verdict.next_logprobs, dtype=np.float64))
            for i in np.flatnonzero(chance > 1e-9):
                assert accepted[i] == a
                found.append((batch.tokens[i][:a], law[i], chance[i]))
        return found

    return outcomes


def emitted_law(outcomes: Callable, n: int, vocab: int) -> np.ndarray:
    """The joint law of the first n tokens over as many rounds as they take."""

    @lru_cache(maxsize=None)
    def law(prefix: tuple, left: int) -> np.ndarray:
        if left == 0:
            return np.ones(())
        joint = np.zeros((vocab,) * left)
        for kept, last, chance in outcomes(prefix):
            if len(kept) >= left:
                joint[kept[:left]] += chance
                continue
            for y in range(vocab):
                joint[kept + (y,)] += chance * last[y] * law(prefix + kept + (y,), left - len(kept) - 1)
        return joint

    return law((), n)


def target_law(p: Law, n: int, vocab: int) -> np.ndarray:
    """The joint law of n tokens drawn from p one by one."""
    joint = np.zeros((vocab,) * n)
    for t in np.ndindex(joint.shape):
        joint[t] = math.prod(p(t[:i])[t[i]] for i in range(n))
    return joint


def expected_accepted(outcomes: Callable) -> float:
    return sum(len(kept) * chance for kept, _, chance in outcomes(()))


def match_probs(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Probability that both argmaxes, of log p and of log q plus the same Gumbel noise, are x: for every x."""
    with np.errstate(divide="ignore", invalid="ignore"):
        worst = np.maximum(p[..., None, :] / p[..., :, None], q[..., None, :] / q[..., :, None])
    both = (p > 0) & (q > 0)
    return np.where(both, 1 / np.where(both[..., None], worst, 1).sum(-1), 0)


def count_and_first(kept: np.ndarray, p: np.ndarray, start: int, k: int) -> np.ndarray:
    """Law of (accepted count, first emitted token), (k + 1, vocab), for a rule that judges each position by itself.

    kept[s, x]: probability that x is drafted after s and stands.
    """
    alive = np.ones(len(p))
    at_least = [p[start]]
    for _ in range(k):
        at_least.append(kept[start] * alive)
        alive = kept @ alive
    law = [p[start] - kept[start]] + [at_least[a] - at_least[a + 1] for a in range(1, k)] + [at_least[k]]
    return np.stack(law)


def block_count_and_first(p: np.ndarray, q: np.ndarray, start: int, k: int) -> np.ndarray:
    """The same law for block verification, written down from the paper in float64 (arXiv 2403.10444)."""
    law = np.zeros((k + 1, len(p)))
    for t in product(range(len(p)), repeat=k):
        states = (start, *t)
        weight = math.prod(q[states[i], t[i]] for i in range(k))
        if weight == 0:
            continue
        share = [1.0]
        for i in range(k):
            share.append(min(share[-1] * p[states[i], t[i]] / q[states[i], t[i]], 1))
        excess = [np.maximum(share[i] * p[states[i]] - q[states[i]], 0) for i in range(k)] + [p[states[k]]]
        h = [1.0]
        for i in range(1, k):
            z = excess[i].sum()
            h.append(z / (z + 1 - share[i]) if z + 1 - share[i] > 1e-15 else 1.0)
        h.append(share[k])
        for a in range(k + 1):
            chance = weight * h[a] * math.prod(1 - h[j] for j in range(a + 1, k + 1))
            if chance == 0:
                continue
            if a:
                law[a, t[0]] += chance
            else:
                law[0] += chance * excess[0] / excess[0].sum()
    return law


def filtered(p, temperature=1.0, top_p=1.0, min_p=0.0, top_k=0):
    """mlx-lm's filters on each row, then the temperature, by sorting in numpy."""
    keep = np.ones_like(p, dtype=bool)
    order = np.argsort(-p, axis=-1)
    ranked = np.take_along_axis(p, order, axis=-1)
    above = np.cumsum(ranked, axis=-1) - ranked
    if top_p < 1:
        np.put_along_axis(keep, order, above < top_p, axis=-1)
    keep &= p >= min_p * p.max(-1, keepdims=True)
    if top_k:
        ranks = np.argsort(order, axis=-1)
        keep &= ranks < top_k
    warm = np.where(keep, p ** (1 / temperature), 0)
    return warm / warm.sum(-1, keepdims=True)


def p_value(counts, probs) -> float:
    """Pearson's chi-square, by Wilson and Hilferty's cube root. Rare cells are pooled; an impossible one that occurs is 0.

    probs: one law for all of counts, or one for each row of it (then each row's total is given).
    """
    counts, probs = np.asarray(counts, dtype=np.float64), np.asarray(probs, dtype=np.float64)
    if counts[probs <= 0].any():
        return 0.0
    rows = counts.reshape(-1, counts.shape[-1]) if probs.ndim > 1 and np.allclose(probs.sum(-1), 1) else counts.reshape(1, -1)
    x2, freedom = 0.0, 0
    for count, law in zip(rows, probs.reshape(rows.shape)):
        expected = count.sum() * law
        rare = expected < 8
        cells = np.append(count[~rare], count[rare].sum()), np.append(expected[~rare], expected[rare].sum())
        seen = cells[1] > 0
        x2 += ((cells[0] - cells[1])[seen] ** 2 / cells[1][seen]).sum()
        freedom += max(seen.sum() - 1, 0)
    if freedom == 0:
        return 1.0
    spread = 2 / (9 * freedom)
    return 0.5 * math.erfc(((x2 / freedom) ** (1 / 3) - 1 + spread) / math.sqrt(2 * spread))


def visible_error(draws: int, cells: int, threshold: float = 1e-4) -> float:
    """The total-variation error that a chi-square surely sees (power .99): the non-centrality is at least 4 n tv^2."""
    z = {1e-4: 3.72}[threshold]
    freedom = cells - 1
    critical = freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3
    shift = next(s for s in np.arange(0, 1000, 0.1) if freedom + s - 2.33 * math.sqrt(2 * (freedom + 2 * s)) > critical)
    return math.sqrt(shift / (4 * draws))


def script(p, q) -> Pair:
    """A pair of models that look their next law up by the newest token; p and q are (V, V) logits."""
    pair = Pair(ScriptModel(np.asarray(p, dtype=np.float64)), ScriptModel(np.asarray(q, dtype=np.float64)))
    assert pair.target_profile.reason is None and pair.draft_profile.reason is None
    return pair


def play(rule, p_logprobs, q_logprobs, start, k, rng, *, noise=None, coins=None, last_noise=None):
    """One vectorised round of the shipped rule for each start token: accepted (B,), emitted (B, k + 1), -1 beyond.

    p_logprobs, q_logprobs: (V, V) mx arrays, laws by the newest token. All randomness is fresh unless given: noise
    (k + 1, B, V) draws the drafts (and under match the target's own), coins (B, k), last_noise (B, V) draws the last token.
    """
    batch, vocab = len(start), p_logprobs.shape[0]
    noise = rng.gumbel(size=(k + 1, batch, vocab)) if noise is None else noise
    q, states = np.array(q_logprobs), [np.asarray(start)]
    for i in range(k):
        states.append(np.argmax(q[states[-1]] + noise[i], axis=-1))
    drafts, rows = np.stack(states[1:], axis=1), mx.array(np.stack(states, axis=1))
    tokens, target = mx.array(drafts.astype(np.uint32)), p_logprobs[rows]
    if rule == "match":
        verdict = verify.match(tokens, target, mx.array(noise.transpose(1, 0, 2).astype(np.float32)))
        last_noise = noise[np.array(verdict.accepted), np.arange(batch)]
    else:
        coins = rng.random((batch, k)) if coins is None else coins
        verdict = getattr(verify, rule)(tokens, q_logprobs[rows[:, :k]], target, mx.array(coins.astype(np.float32)))
        last_noise = rng.gumbel(size=(batch, vocab)) if last_noise is None else last_noise
    last = np.argmax(np.array(verdict.next_logprobs) + last_noise.astype(np.float32), axis=-1)
    accepted = np.array(verdict.accepted)
    emitted = np.where(np.arange(k + 1) < accepted[:, None], np.pad(drafts, ((0, 0), (0, 1))), -1)
    emitted[np.arange(batch), accepted] = last
    return accepted, emitted


def tally(*columns, shape) -> np.ndarray:
    """How often each combination occurs."""
    counts = np.zeros(shape)
    np.add.at(counts, columns, 1)
    return counts


def transitions(start, ids, vocab) -> np.ndarray:
    """How often each token followed each."""
    path = np.array([start, *ids])
    return tally(path[:-1], path[1:], shape=(vocab, vocab))


def as_often_as(chances, count) -> bool:
    """Whether so many of some independent events are credible, to 4 standard errors."""
    chances = np.asarray(chances)
    return abs(count - chances.sum()) <= 4 * np.sqrt((chances * (1 - chances)).sum())
