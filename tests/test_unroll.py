"""What a draft on hidden states does in a reply is what its unrolling computes: the same states, the same keys, the same tokens.

A wrong row, slot or state would change no token of the reply, only cost acceptance.
"""

import math
from dataclasses import replace
from functools import lru_cache

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
import tiny
from helpers import Counting, Scripted, guided, heads, mlp, pair, plain
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.sample_utils import make_logits_processors

from mlx_spec import context
from mlx_spec.cache import read_bound
from mlx_spec.engine import Decoder
from mlx_spec.hidden import Inside
from mlx_spec.memory import recall
from mlx_spec.pairs import Pair
from mlx_spec.probe import KEEP, prompt_cache
from mlx_spec.round import Plan
from mlx_spec.types import Options

N = 48
KINDS = ("deep heads", "reduced mlp")
SCRIPTS = {"always": (3,), "through zero": (0, 3, 0, 1, 2), "long plain stretches": (3, *[0] * 9, 2)}
TOLERANCE = 1e-4


# --- the state between rounds


def states_of(pair, ids, gone=()):
    """The target's states after each token, in one pass; zero at the places that a reply has forgotten."""
    found = Inside(pair.target, pair.draft.depths).states(mx.array([ids]))
    kept = mx.array([i not in gone for i in range(len(ids))])
    return [s * kept[:, None] for s in found]


def unrolled(pair, ids, k, gone=()):
    """k greedy drafts after the ids and the logits they are the best of, computed as in training."""
    drafts, rows, states = [], [], states_of(pair, ids, gone)
    for step in range(k):
        longer = [mx.pad(s, ((0, 0), (0, step), (0, 0))) for s in states]
        out = pair.draft.unroll(mx.array([ids + drafts]), longer, step + 1)[step]
        rows.append(pair.draft.logits(out[:, len(ids) - 1], step))
        drafts.append(pair.draft.ids[mx.argmax(rows[-1])].item())
    return drafts, mx.concatenate(rows)


def keys_and_values(pair, ids, gone=()):
    """What a head's caches hold after one pass over the ids; an Mlp has none."""
    if pair.draft.cache_layers():
        caches = [KVCache() for _ in pair.draft.layers]
        before = [mx.pad(s, ((0, 0), (1, 0), (0, 0)))[:, :-1] for s in states_of(pair, ids, gone)]
        pair.draft(mx.array([ids]), pair.draft.inward(before), caches)
        return [c.state for c in caches]
    return []


def proposed(decoder, k):
    """What the decoder's drafter would propose now, greedily, with the logits of its output ids, and its caches then."""
    state, drafter, rows = decoder.context.state, replace(decoder.context.drafter, stream=None), []

    def choose(logits, drafted):
        rows.append(logits[:, drafter.model.ids])
        return mx.argmax(logits, axis=-1), None

    found = drafter.propose(state, Plan(k, 1, read_bound(state.length.item() + 16)), choose)
    return found.tokens[0].tolist(), mx.concatenate(rows), found.state or []


def close(got, wanted):
    return (mx.abs(got - wanted).max() / mx.abs(wanted).max()).item() < TOLERANCE


def the_state_is_right(decoder, gone=()):
    """Between rounds, whether or not one is in flight: the device's own history says what is committed."""
    pair, state = decoder.pair, decoder.context.state
    ids = state.history[0, : state.length.item()].tolist()
    tokens, logits, caches = proposed(decoder, 3)
    drafts, wanted = unrolled(pair, ids, 3, gone)
    assert tokens == drafts and close(logits, wanted)
    for arrays, theirs in zip(caches, keys_and_values(pair, ids, gone), strict=True):
        for a, b in zip(arrays, theirs):
            assert close(a[:, :, : len(ids)], b[:, :, : len(ids)])


def start(pair, prompt, ks=(3,), n=N, run_ahead=False, memory=None, text=None, **options):
    """A decoder that is led along the target's greedy text, and its chunks."""
    text = text or prompt + plain(pair.target, prompt, n)
    decoder = Decoder(pair, prompt, Options(max_tokens=n, **options), controller=Scripted(*ks), drafter=guided(pair, text),
                      run_ahead=run_ahead, memory=recall(memory, pair, prompt))
    return decoder, decoder.chunks()


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("kind", KINDS)
def test_after_every_round_the_drafter_knows_what_one_pass_over_the_text_would_tell_it(kind, name, run_ahead):
    decoder, chunks = start(pair("llama", kind), tiny.PROMPT, SCRIPTS[name], run_ahead=run_ahead)
    for _ in chunks:
        the_state_is_right(decoder)
    stats = decoder.stats
    assert (stats.plain > 1) == (name != "always")  # the last round of a budget may be one of them
    assert stats.accepted > 5 and stats.corrections > 3 and stats.bonuses > 0


@pytest.mark.parametrize("length", [1, 2, 6, 7, 8, 14, 15, 19])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_of_several_chunks_is_read_without_a_seam(kind, length):
    decoder, chunks = start(pair("llama", kind), tiny.PROMPT[:length], n=8, prefill_step_size=7)
    for _ in chunks:
        the_state_is_right(decoder)


@pytest.mark.parametrize("name", ["llama_sw", "gemma3_text", "mistral3"])
def test_other_targets_are_heard_as_well(name):
    decoder, chunks = start(pair(name, "deep heads"), tiny.PROMPT, SCRIPTS["through zero"], n=24)
    for _ in chunks:
        pass
    the_state_is_right(decoder)


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("n, unread", [(16, 3), (17, 0)])
@pytest.mark.parametrize("more", [b"?", b" and a longer question"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_later_turn_goes_on_where_the_last_one_ended(kind, more, n, unread, run_ahead):
    """unread: tokens of the last round that the drafter has not read with the target's states."""
    p = pair("llama", kind)
    first, chunks = start(p, tiny.PROMPT, n=n, run_ahead=run_ahead, prefill_step_size=7)
    assert len(list(chunks)) < n - 2
    assert first.context.state.drafter[-1].item() == len(first.history) - 1 - unread
    later, chunks = start(p, first.history + list(more), n=8, memory=first.leave(), prefill_step_size=7)
    for _ in chunks:
        the_state_is_right(later)


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_that_is_said_differently_lacks_the_state_before_the_change(kind):
    p = pair("llama", kind)
    first, chunks = start(p, tiny.PROMPT, n=20)
    assert len(list(chunks)) < 18
    common = first.history[:-6]
    later, chunks = start(p, common + list(b" or else"), n=8, memory=first.leave())
    for _ in chunks:
        the_state_is_right(later, gone=(len(common) - 1,))


def test_buffers_grow_under_way_with_what_the_head_has_read(monkeypatch):
    monkeypatch.setattr(context, "AHEAD", 8)
    prompt = (tiny.PROMPT * 30)[:490]
    decoder, chunks = start(pair("llama", "deep heads"), prompt)
    capacities = {decoder.context.capacity for _ in chunks}
    assert len(capacities) == 2
    the_state_is_right(decoder)


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_after_one_without_drafts_knows_the_whole_text(kind):
    """A head that was not asked for has read nothing, and the target's states are gone."""
    p = pair("llama", kind)
    first = Decoder(p, tiny.PROMPT, Options(max_tokens=20, num_draft_tokens=0))
    assert len(list(first.chunks())) == 20
    later, chunks = start(p, first.history + list(b" and more"), n=8, memory=first.leave())
    for _ in chunks:
        the_state_is_right(later)


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("at, length, known", [(22, 1, True), (20, 1, False), (21, 2, True), (20, 17, False)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_after_a_stop_string_lacks_at_most_the_state_before_its_first_token(kind, at, length, known, run_ahead):
    """The round that dropped tokens began before the last one kept, or after it; with another one in flight, always after."""
    base, letters = pair("llama", kind), {i: -math.inf for i in range(tiny.VOCAB) if not 32 < i < 127}
    p = Pair(base.target, base.draft, tiny.byte_tokenizer())
    text = plain(p.target, tiny.PROMPT, N, logits_processors=make_logits_processors(letters))
    first, chunks = start(p, tiny.PROMPT, text=tiny.PROMPT + text, run_ahead=run_ahead, logit_bias=letters,
                          stop=[bytes(text[at : at + length]).decode()])
    for _ in chunks:
        pass
    assert first.finish == "stop_string" and first.history == tiny.PROMPT + text[: len(first.history) - len(tiny.PROMPT)]
    memory = first.leave()
    assert (memory.draft[1] is not None) == (known and not run_ahead)
    gone = () if memory.draft[1] else (len(memory.ids) - 1,)
    later, chunks = start(p, first.history + list(b" and more"), n=8, memory=memory)
    for _ in chunks:
        the_state_is_right(later, gone)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_processor_with_state_changes_nothing_in_the_drafters_state(run_ahead):
    p = pair("llama", "deep heads")
    text = tiny.PROMPT + plain(p.target, tiny.PROMPT, N, logits_processors=[Counting()])
    decoder, chunks = start(p, tiny.PROMPT, (3, 0, 2), text=text, run_ahead=run_ahead, logits_processors=[Counting()])
    for _ in chunks:
        the_state_is_right(decoder)
    assert decoder.stats.accepted > 8 and decoder.stats.corrections > 4


def test_a_bounded_head_sees_what_mlx_lms_bounded_cache_sees():
    """The prompt in the same chunks, then token by token on mlx-lm's caches, which turn meanwhile."""
    p, size = pair("llama", "deep heads"), 24
    prompt = tiny.PROMPT * 2
    text = prompt + plain(p.target, prompt, N, prompt_cache=prompt_cache(p.target, size), prefill_step_size=7)
    decoder, chunks = start(p, prompt, (3, 0, 2), text=text, max_kv_size=size, prefill_step_size=7)
    for _ in chunks:
        pass
    state = decoder.context.state
    ids = state.history[0, : state.length.item()].tolist()
    assert ids[: len(text)] == text[: len(ids)] and decoder.stats.accepted > 8
    theirs, own = prompt_cache(p.target, size), [RotatingKVCache(size, keep=KEEP) for _ in p.draft.layers]
    last, pieces = [mx.zeros((1, 1, 64))] * 3, [ids[i : min(i + 7, 37)] for i in range(0, 37, 7)] + [[i] for i in ids[37:]]
    for piece in pieces:
        states = Inside(p.target, p.draft.depths).states(mx.array([piece]), theirs)
        before = [mx.concatenate([a, b[:, :-1]], axis=1) for a, b in zip(last, states)]
        out, last = p.draft(mx.array([piece]), p.draft.inward(before), own), [s[:, -1:] for s in states]
        mx.eval(out, last, [c.state for c in own])
    assert close(proposed(decoder, 1)[1], p.draft.logits(out[:, -1]))


# --- a text learnt by heart


LEARNERS = {
    "heads": lambda target: heads(target),
    "deep heads": lambda target: heads(target, depths=(1, 2), vocab=200, layers=2),
    "mlp": lambda target: mlp(target),
    "reduced mlp": lambda target: mlp(target, vocab=200),
}
LESSONS = {"heads": 12, "deep heads": 32, "mlp": 25, "reduced mlp": 25}


@lru_cache(maxsize=None)
def learnt(kind):
    """A pair whose draft knows one text of its target by heart, and the text."""
    target = tiny.make("llama")
    text = tiny.PROMPT + plain(target, tiny.PROMPT, N)
    draft = LEARNERS[kind](target)
    loaded = Pair(target, draft)
    tokens, states = mx.array([text]), Inside(target, draft.depths).states(mx.array([text]))
    place = {t: i for i, t in enumerate(draft.ids.tolist())}
    wanted = mx.array([place.get(t, 0) for t in text])

    def loss(draft):
        outs = draft.unroll(tokens, states, 3)
        return sum(nn.losses.cross_entropy(draft.logits(o[0], s)[: -1 - s], wanted[1 + s :], reduction="mean")
                   for s, o in enumerate(outs))

    optimizer, step = optim.Adam(learning_rate=0.01), nn.value_and_grad(draft, loss)
    for _ in range(LESSONS[kind]):
        optimizer.update(draft, step(draft)[1])
        mx.eval(draft.parameters(), optimizer.state)
    return loaded, text


def accepted_by(draft, target, text, k):
    """How many drafts stand in each round that writes the text, from what training computes."""
    outs = draft.unroll(mx.array([text]), Inside(target, draft.depths).states(mx.array([text])), k)
    best = [draft.ids[mx.argmax(draft.logits(o[0], s), axis=-1)].tolist() for s, o in enumerate(outs)]
    at, found = len(tiny.PROMPT) - 1, []
    while at < len(text) - 1:
        room = min(k, len(text) - at - 2)
        stands = next((s for s in range(room) if best[s][at] != text[at + 1 + s]), room)
        found.append(stands)
        at += stands + 1
    return found


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("kind", LEARNERS)
def test_what_is_drafted_in_a_reply_is_what_was_trained(kind, run_ahead):
    loaded, text = learnt(kind)
    options = Options(max_tokens=N, num_draft_tokens=3)
    rounds = [c.tokens for c in Decoder(loaded, tiny.PROMPT, options, run_ahead=run_ahead).chunks()]
    wanted = accepted_by(loaded.draft, loaded.target, text, 3)
    assert [t.id for r in rounds for t in r] == text[len(tiny.PROMPT) :]
    # The last round of a reply may draft more than fits.
    assert [sum(t.origin == "accepted" for t in r) for r in rounds[:-1]] == wanted[:-1]
    assert 0.3 * N < sum(wanted) < 0.8 * N
