"""The law with drafts on hidden states, on a target whose laws are looked up and whose states are one-hot.

Power: in the transitions between 6 ids 1,440 tokens, six replies of 240, surely show a total-variation error of .122; every fault
here gives p-values below 1e-10. Whether first drafts stand as often as the unrolled draft says is seen to 4 standard errors, .06.
"""

from itertools import product
from typing import NamedTuple

import law
import mlx.core as mx
import numpy as np
import pytest
import tiny
from helpers import Scripted, decode, heads, mlp
from law import as_often_as, filtered, p_value, softmax

from mlx_spec import verify
from mlx_spec.drafters.heads import HeadsDrafter
from mlx_spec.drafters.mlp import MlpDrafter
from mlx_spec.engine import Decoder
from mlx_spec.hidden import Inside
from mlx_spec.pairs import Pair
from mlx_spec.types import Options

VOCAB, REDUCED, THRESHOLD = 6, 4, 1e-4
REPLIES, LENGTH = 6, 240  # short ones, whose rounds share their shapes
RULES = ("token", "block", "match")
LOGITS = 1.5 * np.random.default_rng(16).normal(size=(VOCAB, VOCAB))
KINDS = {
    "heads": lambda target: mild(heads(target)),
    "reduced heads": lambda target: mild(heads(target, depths=(1,), vocab=REDUCED)),
    "reduced mlp": lambda target: mlp(target, vocab=REDUCED, n_predict=4),
}
REDUCED_KINDS = ("reduced heads", "reduced mlp")


def mild(head):
    """With a random head's logits as they are, one id has nearly everything."""
    head.norm.weight = 0.25 * head.norm.weight
    return head


def make(kind):
    """A new pair, which has compiled nothing yet."""
    target = tiny.ScriptStates(LOGITS)
    pair = Pair(target, KINDS[kind](target))
    assert pair.target_profile.reason is pair.draft_profile.reason is None
    return pair


class Reply(NamedTuple):
    """The ids from the prompt on, and whether the first draft stood, by the place of the pending token."""

    ids: list
    stood: dict


def replies(pair, k=2, count=REPLIES, **options):
    """Replies to a prompt of token 1."""
    found = []
    for seed in range(count):
        settings = Options(**{"temperature": 1.0, "seed": seed, "num_draft_tokens": k} | options, max_tokens=LENGTH)
        ids, stood = [1], {}
        for chunk in Decoder(pair, [1], settings, run_ahead=True).chunks():
            stood[len(ids) - 1] = chunk.tokens[0].origin == "accepted"
            ids += [t.id for t in chunk.tokens]
        found.append(Reply(ids, stood))
    return found


def transitions(found):
    return sum(law.transitions(r.ids[0], r.ids[1:], VOCAB) for r in found)


def drafts_laws(draft, target, ids, **options):
    """What the first draft after each token is drawn from, computed as in training."""
    tokens = mx.array([ids])
    out = draft.unroll(tokens, Inside(target, draft.depths).states(tokens), 1)[0][0]
    return filtered(softmax(np.array(draft.shared.spread(draft.logits(out), VOCAB))), **options)


def first_drafts_stand(pair, found, rule="block", **options):
    """As often as 1 - TV, or as shared noise lets two draws agree."""
    chances, count = [], 0
    for ids, stood in found:
        p, q = filtered(softmax(LOGITS), **options)[ids], drafts_laws(pair.draft, pair.target, ids, **options)
        kept = (law.match_probs(p, q) if rule == "match" else np.minimum(p, q)).sum(-1)
        places = list(stood)[:-2]  # the last rounds may have been cut
        chances += list(kept[places])
        count += sum(stood[i] for i in places)
    return as_often_as(chances, count)


def right(found, **options):
    return p_value(transitions(found), filtered(softmax(LOGITS), **options)) > THRESHOLD


def test_the_smallest_error_that_is_seen():
    assert law.visible_error(REPLIES * LENGTH, VOCAB * (VOCAB - 1) + 1) < 0.122


@pytest.mark.parametrize("kind, rule, k", [
    *product(["heads"], RULES, [2]), *product(REDUCED_KINDS, ["token", "block"], [1, 2, 4]),
    *product(REDUCED_KINDS, ["match"], [4])])
def test_the_law_and_the_first_drafts_acceptance_do_not_depend_on_k(kind, rule, k):
    pair = make(kind)
    found = replies(pair, k, verify=rule)
    assert right(found)
    assert first_drafts_stand(pair, found, rule)
    assert 0.2 < np.mean([s for r in found for s in r.stood.values()]) < 0.8


@pytest.mark.parametrize("options", [
    dict(temperature=0.3), dict(temperature=2.0), dict(top_k=2), dict(top_p=0.7), dict(min_p=0.2)], ids=str)
@pytest.mark.parametrize("kind", REDUCED_KINDS)
def test_temperature_and_filters_hold_with_a_reduced_vocabulary(kind, options):
    """Filters on the draft's law see fewer ids than those on the target's."""
    pair = make(kind)
    found = replies(pair, **options)
    assert not transitions(found)[filtered(softmax(LOGITS), **options) == 0].any()
    assert right(found, **options)
    assert first_drafts_stand(pair, found, **options)


@pytest.mark.parametrize("extra", [{}, dict(top_p=0.9, repetition_penalty=1.2, logit_bias={3: 1.0})], ids=["plain law", "more"])
def test_match_gives_a_seed_one_text_with_every_kind_of_draft(extra):
    options = dict(max_tokens=100, temperature=1.0, seed=7, verify="match", **extra)
    texts = [decode(make(kind), [1], controller=Scripted(*ks), **options)[1] for kind in KINDS for ks in ((0,), (4,), (2, 0, 0, 1))]
    assert all(text == texts[0] for text in texts) and len(set(texts[0])) == VOCAB


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", REDUCED_KINDS)
def test_a_draft_none_of_whose_ids_may_come_changes_nothing(kind, rule, k):
    """What it proposes then has no law: a block that asks for one would keep the proposal."""
    pair = make(kind)
    banned = pair.draft.ids.tolist()
    found = replies(pair, k, 2, verify=rule, logit_bias=dict.fromkeys(banned, -np.inf))
    p = softmax(LOGITS)
    p[:, banned] = 0
    assert p_value(transitions(found), p / p.sum(-1, keepdims=True)) > THRESHOLD


# --- faults, each injected


def drafting(change):
    """A fault of a proposal. change: the drafter's model and `choose` to another `choose`."""

    def inject(patch):
        for drafter in (HeadsDrafter, MlpDrafter):
            shipped = drafter.propose
            patch.setattr(drafter, "propose", lambda self, state, plan, choose, shipped=shipped: shipped(
                self, state, plan, change(self.model, choose)))

    return inject


def residual(change):
    """A fault of the last token's law. change: the arguments of `verify._residual` to others."""

    def inject(patch):
        shipped = verify._residual
        patch.setattr(verify, "_residual", lambda *arguments: shipped(*change(*arguments)))

    return inject


def of_colder_logits(by):
    """Tokens are drawn at another temperature than the law that is reported."""
    return lambda model, choose: lambda logits, drafted: (choose(by * logits, drafted)[0], choose(logits, drafted)[1])


def law_of_reduced_columns(model, choose):
    def faulty(logits, drafted):
        token, law = choose(logits, drafted)
        return token, mx.pad(law[:, model.ids], ((0, 0), (0, VOCAB - REDUCED)), constant_values=-mx.inf)

    return faulty


def token_of_reduced_columns(model, choose):
    def faulty(logits, drafted):
        token, law = choose(logits, drafted)
        return mx.argmax(model.ids == token[:, None], axis=-1), law

    return faulty


def law_before_the_filter(model, choose):
    return lambda logits, drafted: (choose(logits, drafted)[0], logits - mx.logsumexp(logits, axis=-1, keepdims=True))


FAULTS = {
    "F1, the draft takes its argmax": (drafting(of_colder_logits(1e6)), {}),
    "F1, drawn at another temperature": (drafting(of_colder_logits(3)), {}),
    "F2, q before the filter": (drafting(law_before_the_filter), dict(top_p=0.6)),
    "q in the columns of the reduced head": (drafting(law_of_reduced_columns), {}),
    "F12, a token that q rules out": (drafting(token_of_reduced_columns), {}),
    "F4, the correction drawn from p": (residual(lambda a, s, q, p: (a, s, mx.full(q.shape, -mx.inf), p)), {}),
    "F10, the bonus of row 0": (
        residual(lambda a, s, q, p: (a, s, q, mx.concatenate([p[:, :-1], p[:, :1]], axis=1))), dict(k=1)),
}


@pytest.mark.parametrize("kind, rule", [("reduced heads", "token"), ("reduced mlp", "block")])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen_in_the_law(fault, kind, rule, monkeypatch):
    inject, options = FAULTS[fault][0], dict(FAULTS[fault][1])
    inject(monkeypatch)
    found = replies(make(kind), verify=rule, **options)
    options.pop("k", None)
    assert not right(found, **options)


@pytest.mark.parametrize("kind", REDUCED_KINDS)
def test_drafts_declared_certain_though_they_were_drawn_are_seen_in_their_acceptance(kind, monkeypatch):
    """The law stays right: they are judged by the target's own draw, and fewer stand."""
    drafting(lambda model, choose: lambda logits, drafted: (choose(logits, drafted)[0], None))(monkeypatch)
    pair = make(kind)
    found = replies(pair)
    assert right(found)
    assert not first_drafts_stand(pair, found)
