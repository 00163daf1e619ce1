"""The multi-head speculator: its formula and its place in a round. What training sees of it: test_unroll.py."""

import math

import mlx.core as mx
import numpy as np
import pytest
import tiny
from helpers import Scripted, decode, mlp, pair, plain
from mlx.utils import tree_flatten

from mlx_spec.drafters.mlp import Mlp, MlpArgs
from mlx_spec.errors import PairError
from mlx_spec.pairs import Pair

N = 48
KINDS = ("mlp", "reduced mlp")


# --- the formula


def by_hand(weights, args, state, tokens):
    """Logits of every step for one row, out of the published description. weights: numpy, by name."""
    gelu = np.vectorize(lambda v: 0.5 * v * (1 + math.erf(v / math.sqrt(2))))
    unit = lambda v: v / np.sqrt((v * v).mean() + 1e-6)  # noqa: E731
    old = 0.5 ** (0.5 / args.n_predict)
    new = math.sqrt((1 - old * old) * args.inner_dim / 2)
    state = unit(state) / math.sqrt(2) if args.scale_input else state
    found = []
    for i, token in enumerate(tokens):
        j, p = (0, min(i, 1)) if args.tie_weights else (i, i)
        state = weights[f"proj.{p}.weight"] @ state + new / old * weights[f"emb.{j}.weight"][token]
        state = gelu(unit(state) * weights[f"ln.{j}.weight"] + weights[f"ln.{j}.bias"])
        found.append(weights[f"head.{j}.weight"] @ state)
    return np.stack(found)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_is_what_the_paper_and_the_published_checkpoints_compute(tied, scaled):
    draft = mlp(tiny.make("llama"), tie_weights=tied, scale_input=scaled)
    draft.bind(tiny.make("llama"), mx.float32)
    states = mx.random.normal((1, 5, 64), key=mx.random.key(1))
    tokens = mx.array([[5, 258, 0, 77, 9]])
    got = [np.array(draft.logits(out, s)) for s, out in enumerate(draft.unroll(tokens, [states], 3))]
    weights = {k: np.array(v, dtype=np.float64) for k, v in tree_flatten(draft.parameters())}
    for i in range(3):
        before = np.array(states[0, i - 1], dtype=np.float64) if i else np.zeros(64)
        wanted = by_hand(weights, draft.args, before, tokens[0, i : i + 3].tolist())
        for s in range(3):
            np.testing.assert_allclose(got[s][0, i], wanted[s], rtol=1e-4, atol=1e-4)


def test_tied_heads_hold_their_weights_once():
    names = [k for k, _ in tree_flatten(Mlp(MlpArgs(64, 4, 10, 32, tie_weights=True)).trainable_parameters())]
    assert sorted(names) == ["emb.0.weight", "head.0.weight", "ln.0.bias", "ln.0.weight", "proj.0.weight",
                             "proj.1.weight"]


def test_tokens_outside_a_reduced_vocabulary_share_the_last_row_of_the_embedding():
    draft = mlp(tiny.make("llama"), vocab=20)
    draft.bind(tiny.make("llama"), mx.float32)
    ids = draft.ids.tolist()
    rows = draft._row[mx.minimum(mx.arange(300), draft._row.shape[0] - 1)].tolist()
    assert draft.emb[0].weight.shape[0] == 21
    assert rows == [ids.index(i) if i in ids else 20 for i in range(300)]


# --- rounds


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("name", ["llama", "llama_sw", "gemma3_text"])
def test_greedy_speculation_with_a_speculator_never_changes_the_tokens(name, run_ahead):
    expected = plain(pair(name, None).target, tiny.PROMPT, N)
    for kind, k in (("mlp", 1), ("mlp", 3), ("reduced mlp", 3)):
        decoder, ids = decode(pair(name, kind), tiny.PROMPT, max_tokens=N, num_draft_tokens=k, run_ahead=run_ahead)
        assert ids == expected and decoder.stats.mode == "speculative" and decoder.stats.drafted > N / 3


@pytest.mark.parametrize("prompt", [tiny.PROMPT, tiny.PROMPT[:1], tiny.PROMPT[:2]])
def test_a_prompt_of_any_length_can_be_drafted_for(prompt):
    assert decode(pair("llama", "mlp"), prompt, max_tokens=12)[1] == plain(pair("llama", None).target, prompt, 12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verify", ["token", "block", "match"])
def test_every_rule_runs_and_match_gives_the_text_of_plain_decoding(kind, verify):
    options = dict(max_tokens=24, temperature=0.8, seed=7, verify=verify)
    decoder, ids = decode(pair("llama", kind), tiny.PROMPT, num_draft_tokens=3, **options)
    assert len(ids) == 24 and decoder.stats.drafted > 0
    if verify == "match":
        assert ids == decode(pair("llama", None), tiny.PROMPT, **options)[1]


def test_more_drafts_than_there_are_heads_are_not_asked_for():
    decoder, ids = decode(pair("llama", "mlp"), tiny.PROMPT, max_tokens=N, num_draft_tokens=8)
    assert decoder.k_max == 3 and ids == plain(pair("llama", None).target, tiny.PROMPT, N)
    assert decoder.stats.drafted <= 3 * decoder.stats.rounds
    own = pair("llama", "mlp").draft.drafter((), tiny.VOCAB)
    again = dict(drafter=own, controller=Scripted(8, 0, 2))
    assert decode(pair("llama", "mlp"), tiny.PROMPT, max_tokens=N, **again)[1] == ids


def test_a_later_turn_goes_on_with_the_state_of_the_last_one():
    loaded = pair("llama", "mlp")
    decoder, ids = decode(loaded, tiny.PROMPT, max_tokens=10)
    memory = decoder.leave()
    longer = tiny.PROMPT + ids + list(b" and")
    assert len(memory.draft[1]) == 1
    assert decode(loaded, longer, memory=memory, max_tokens=16)[1] == plain(loaded.target, longer, 16)


# --- what does not fit


def test_a_speculator_for_a_wider_target_is_refused_in_one_line():
    with pytest.raises(PairError, match="width 128, the target's are 64 wide") as caught:
        Pair(tiny.make("llama"), Mlp(MlpArgs(128, 3, tiny.VOCAB)))
    assert "\n" not in str(caught.value)


def test_a_vocabulary_that_the_target_does_not_have_is_refused():
    draft = mlp(tiny.make("llama"), vocab=10)
    draft.ids = mx.arange(255, 265, dtype=mx.int32)
    with pytest.raises(PairError, match="knows token id 264, the target has 259 ids"):
        Pair(tiny.make("llama"), draft)


def test_ids_of_a_padded_head_that_no_reply_may_hold_do_no_harm():
    target, _ = tiny.padded_pair()
    draft = mlp(target, vocab=10)
    draft.ids = mx.arange(254, 264, dtype=mx.int32)
    loaded = Pair(target, draft, tiny.byte_tokenizer())
    logits = draft.shared.spread(mx.arange(10, dtype=mx.float32)[None], loaded.vocab_size)
    assert logits[0].tolist() == [-math.inf] * 254 + [0, 1, 2, 3, 4]
    alone = Pair(target, None, tiny.byte_tokenizer())
    assert decode(loaded, tiny.PROMPT, max_tokens=8)[1] == decode(alone, tiny.PROMPT, max_tokens=8)[1]
