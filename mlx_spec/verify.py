"""Accept and correct: which drafted tokens stand, and from what law the next one comes.

p is the target, q the draft. Row i of `target_logprobs` is p's law of the token after i drafted
tokens; row i of `draft_logprobs` is the law that `draft_tokens[:, i]` was *drawn from*. Nothing
here knows a model, a cache or a random key: coins and noise come in as arguments and the next
token leaves as a law, so that a test can enumerate every outcome of the shipped functions.

token  Leviathan, Kalman, Matias, 2023, arXiv 2211.17192
block  Sun et al., 2024, arXiv 2403.10444
match  the target's own draw, made with noise that does not depend on the draft
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from .shapes import Float, Integer


class Verdict(NamedTuple):
    """accepted: how many drafted tokens stand. next_logprobs: the law of the token after them.

    accept_probs: what the coins were compared with, for tests; None under `match`, which has no
    coins.
    """

    accepted: Integer[mx.array, "batch"]
    next_logprobs: Float[mx.array, "batch vocab"]
    accept_probs: Float[mx.array, "batch k"] | None


def token(
    draft_tokens: Integer[mx.array, "batch k"],
    draft_logprobs: Float[mx.array, "batch k vocab"],
    target_logprobs: Float[mx.array, "batch rows vocab"],
    uniforms: Float[mx.array, "batch k"],
) -> Verdict:
    """Keep x while u < p(x)/q(x); the first that falls is replaced by a draw from max(p - q, 0)."""
    ratios = _ratios(draft_tokens, draft_logprobs, target_logprobs)
    accepted = leading(uniforms < ratios)
    scale = mx.ones(accepted.shape)
    next_logprobs = _residual(accepted, scale, draft_logprobs, target_logprobs)
    return Verdict(accepted, next_logprobs, mx.minimum(ratios, 1))


def block(
    draft_tokens: Integer[mx.array, "batch k"],
    draft_logprobs: Float[mx.array, "batch k vocab"],
    target_logprobs: Float[mx.array, "batch rows vocab"],
    uniforms: Float[mx.array, "batch k"],
) -> Verdict:
    """Judge the block jointly: keep the longest prefix whose own coin allows it.

    P_i, the share of the block's probability that i tokens may keep, is a running product capped
    at 1; a later success overrides an earlier failure, which is how this accepts more than `token`.
    """
    k = draft_tokens.shape[1]
    joint = _joint(_ratios(draft_tokens, draft_logprobs, target_logprobs))
    inner = joint[:, 1:k]
    excess = _excess(inner, draft_logprobs[:, 1:], target_logprobs[:, 1:k]).sum(axis=-1)
    room = excess + 1 - inner
    # P = 1 with nothing in excess: the prefix is exactly as likely under both, keep it.
    inner_probs = mx.where(room > 0, excess / mx.where(room > 0, room, 1), 1)
    accept_probs = mx.concatenate([inner_probs, joint[:, k:]], axis=1)
    lengths = mx.arange(1, k + 1, dtype=mx.int32)
    accepted = mx.where(uniforms < accept_probs, lengths, 0).max(axis=1)
    scale = mx.take_along_axis(joint, accepted[:, None], axis=1)[:, 0]
    next_logprobs = _residual(accepted, scale, draft_logprobs, target_logprobs)
    return Verdict(accepted, next_logprobs, accept_probs)


def match(
    draft_tokens: Integer[mx.array, "batch k"],
    target_scores: Float[mx.array, "batch rows vocab"],
    noise: Float[mx.array, "batch rows vocab"] | None,
) -> Verdict:
    """Let the target draw for itself, argmax of scores plus noise, and keep the drafts that agree.

    scores: log-probabilities with Gumbel noise keyed by position, or plain logits with no noise
    (greedy). The next token is the argmax of `next_logprobs` plus the same row of noise.
    """
    own = mx.argmax(target_scores if noise is None else target_scores + noise, axis=-1)
    accepted = leading(own[:, :-1] == draft_tokens)
    return Verdict(accepted, row(target_scores, accepted), None)


def leading(
    keep: mx.array,
) -> Integer[mx.array, "batch"]:
    """How many are true before the first that is not; keep is (batch, k) and may have no column."""
    return mx.cumprod(keep.astype(mx.int32), axis=1).sum(axis=1)


def row(
    rows: mx.array,
    index: Integer[mx.array, "batch"],
) -> mx.array:
    """rows[b, index[b]] for every b: (batch, rows, ...) to (batch, ...)."""
    index = index.reshape(-1, *[1] * (rows.ndim - 1))
    return mx.take_along_axis(rows, index, axis=1).squeeze(1)


def _ratios(draft_tokens: mx.array, draft_logprobs: mx.array, target_logprobs: mx.array) -> mx.array:
    k = draft_tokens.shape[1]
    chosen = draft_tokens[..., None]
    p = mx.take_along_axis(target_logprobs[:, :k], chosen, axis=-1)
    q = mx.take_along_axis(draft_logprobs, chosen, axis=-1)
    return mx.exp(p - q)[..., 0]


def _joint(ratios: mx.array) -> mx.array:
    """P_0 = 1, P_i = min(P_{i-1} ratio_i, 1): (batch, k) to (batch, k + 1)."""
    joint = [mx.ones(ratios.shape[:1])]
    for i in range(ratios.shape[1]):
        joint.append(mx.minimum(joint[-1] * ratios[:, i], 1))
    return mx.stack(joint, axis=1)


def _excess(scale: mx.array, draft_logprobs: mx.array, target_logprobs: mx.array) -> mx.array:
    return mx.maximum(scale[..., None] * mx.exp(target_logprobs) - mx.exp(draft_logprobs), 0)


def _residual(
    accepted: mx.array, scale: mx.array, draft_logprobs: mx.array, target_logprobs: mx.array
) -> mx.array:
    """The law of the token after the accepted ones: normalised max(scale p - q, 0).

    After a full run there is no q left: a row of zeros makes the bonus the same expression.
    """
    nothing = mx.full((draft_logprobs.shape[0], 1, draft_logprobs.shape[2]), -mx.inf)
    p = row(target_logprobs, accepted)
    q = row(mx.concatenate([draft_logprobs, nothing], axis=1), accepted)
    excess = _excess(scale, q, p)
    total = excess.sum(axis=-1, keepdims=True)
    # p = q to the last bit leaves nothing: any draw from p is right then.
    return mx.where(total > 0, mx.log(excess) - mx.log(mx.where(total > 0, total, 1)), p)
