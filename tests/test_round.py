"""A round is one graph: one submission and one read, nothing evaluated inside, nothing copied."""

from contextlib import contextmanager

import mlx.core as mx
import pytest
import tiny
from helpers import Scripted, decode, heads, pair

from mlx_spec.engine import Decoder
from mlx_spec.pairs import Pair
from mlx_spec.round import Plan, State
from mlx_spec.types import Options

READS = ("item", "tolist", "__array__", "__bool__", "__int__", "__float__", "__index__", "__iter__", "__buffer__")
EVALUATIONS = ("eval", "async_eval", "synchronize")

REQUESTS = {
    "greedy": {},
    "greedy with penalties": dict(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, logit_bias={5: -2.0}),
    "token": dict(temperature=0.8, verify="token", seed=1),
    "block": dict(temperature=0.8, verify="block", seed=1),
    "match": dict(temperature=0.8, verify="match", seed=1),
    "block with filters and penalties": dict(temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, seed=1, repetition_penalty=1.1),
    "quantised": dict(kv_bits=8, kv_group_size=32),
    "bounded": dict(max_kv_size=32),
}
DRAFTS = pytest.mark.parametrize("draft", ["noisy", "deep heads", "reduced mlp"])


@contextmanager
def counted(monkeypatch):
    """Every evaluation and host read, in order, by name."""
    events = []

    def spy(owner, name, label):
        original = getattr(owner, name, None)
        if original is None:
            return

        def wrapper(*args, **kwargs):
            events.append(label)
            return original(*args, **kwargs)

        patch.setattr(owner, name, wrapper)

    with monkeypatch.context() as patch:
        for name in EVALUATIONS:
            spy(mx, name, name)
        for name in READS:
            spy(mx.array, name, name)
        yield events


def rounds(pair, n, monkeypatch, **options):
    """The events of n rounds in the middle of a reply, and the decoder."""
    run = {name: options.pop(name) for name in ("controller", "run_ahead", "drafter") if name in options}
    decoder = Decoder(pair, tiny.PROMPT * 2, Options(max_tokens=None, **options), **run)
    chunks = decoder.chunks()
    for _ in range(12):  # past the compilation of the shapes in use
        next(chunks)
    with counted(monkeypatch) as events:
        for _ in range(n):
            next(chunks)
    chunks.close()
    return events, decoder


def test_the_counters_see_what_they_are_meant_to_see(monkeypatch):
    """The control: each way of looking at an array from the host is noticed."""
    with counted(monkeypatch) as events:
        x = mx.array([1.0])
        mx.eval(x), mx.async_eval(x), x.item(), x.tolist(), bool(x), int(x), float(x)
    assert [e for e in events if e != "__array__"] == [
        "eval", "async_eval", "item", "tolist", "__bool__", "__int__", "__float__"]


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("request_name", REQUESTS)
@DRAFTS
def test_a_round_costs_one_submission_and_one_read(draft, request_name, run_ahead, k, monkeypatch):
    options = dict(num_draft_tokens=k, run_ahead=run_ahead, **REQUESTS[request_name])
    events, decoder = rounds(pair(draft=draft), 12, monkeypatch, **options)
    assert events == ["async_eval", "tolist"] * 12
    assert (decoder.stats.drafted > 0) == (k > 0)


@pytest.mark.parametrize("name, draft", [
    (tiny.TINY_SW, "noisy"), ("gemma3n", "noisy"), ("gpt_oss", "noisy"), (tiny.TINY_SW, "deep heads"), ("gpt_oss", "deep heads")])
def test_windows_and_shared_keys_cost_no_more(name, draft, monkeypatch):
    events, _ = rounds(pair(name, draft), 10, monkeypatch, num_draft_tokens=3)
    assert events == ["async_eval", "tolist"] * 10


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("draft, ks", [(draft, (0, 3, 0, 8)) for draft in ("noisy", "deep heads", "reduced mlp")] + [
    (draft, (3, (4, "lookup"), 0, (8, "lookup"))) for draft in ("noisy", "deep heads", None)])
def test_switching_k_or_source_costs_no_more(draft, ks, run_ahead, monkeypatch):
    """A30's rounds: plain, drafted and looked up ones in turn."""
    events, _ = rounds(pair(draft=draft), 16, monkeypatch, controller=Scripted(*ks), run_ahead=run_ahead)
    assert events == ["async_eval", "tolist"] * 16


@pytest.mark.parametrize("run_ahead", [True, False])
def test_choosing_costs_no_read(run_ahead, monkeypatch):
    """Auto, whatever it chooses; a draft that was parked for long reads what it missed between two rounds."""
    events, _ = rounds(pair(), 12, monkeypatch, run_ahead=run_ahead)
    assert events.count("tolist") == 12 and set(events) <= {"async_eval", "tolist", "eval"}


@DRAFTS
def test_a_round_is_read_after_the_next_one_is_submitted(draft):
    """Run-ahead: submit 1, submit 2, read 1, submit 3, read 2, ..."""
    decoder = Decoder(pair(draft=draft), tiny.PROMPT, Options(max_tokens=60, num_draft_tokens=2), run_ahead=True)
    order, submit, read = [], decoder._submit, decoder._read
    decoder._submit = lambda: (order.append("submit"), submit())[1]
    decoder._read = lambda: (order.append("read"), read())[1]
    for _ in decoder.chunks():
        pass
    submitted = [i for i, event in enumerate(order) if event == "submit"]
    was_read = [i for i, event in enumerate(order) if event == "read"]
    ahead = sum(submitted[r + 1] < was_read[r] for r in range(len(submitted) - 1))
    assert ahead >= len(submitted) - 3  # the last tokens of the budget are not run ahead of


def test_nothing_runs_ahead_into_the_last_round_of_a_budget():
    """Tokens left <= k + 1: the round in flight may be the last, a second one would be wasted."""
    decoder = Decoder(pair(draft="same"), tiny.PROMPT, Options(max_tokens=15, num_draft_tokens=4), run_ahead=True)
    count, submit = [], decoder._submit
    decoder._submit = lambda: (count.append(1), submit())[1]
    list(decoder.chunks())
    assert len(count) == decoder.stats.rounds == 3


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("k", [0, 4])
@DRAFTS
def test_nothing_in_a_round_looks_at_a_traced_array(draft, request_name, k):
    """mx.compile raises when something inside evaluates; first a function that does must raise."""
    with pytest.raises(ValueError):
        mx.compile(lambda x: x if (x > 0).any() else -x)(mx.array([1.0]))
    decoder = Decoder(pair(draft=draft), tiny.PROMPT * 2, Options(max_tokens=40, num_draft_tokens=k, **REQUESTS[request_name]))
    chunks = decoder.chunks()
    next(chunks)
    while decoder.flights:
        mx.eval(decoder.flights.popleft().packed)
    k = min(k, decoder.k_max)
    plan = Plan(k, 2 if k else 1, 256)

    def trace(state):
        return decoder.context.round(State(*state), plan)[1]

    traced, eager = mx.compile(trace)(tuple(decoder.context.state)), trace(tuple(decoder.context.state))
    assert traced.tolist()[0][: k + 2] == eager.tolist()[0][: k + 2]


@pytest.mark.parametrize("k, draft", [(0, "same"), (4, "same"), (4, "heads")])
@pytest.mark.parametrize("run_ahead", [True, False])
def test_decoding_copies_no_cache(k, draft, run_ahead):
    """Caches filled to 16k directly; in steady state the peak rises by less than a tenth of one copy.

    Sixteen layers, because MLX may copy the one buffer that a round in flight is reading just then.
    """
    target = tiny.make("llama", num_hidden_layers=16)
    p = Pair(target, target if draft == "same" else heads(target, depths=(4, 8), layers=4))
    decoder = Decoder(p, tiny.PROMPT, Options(max_tokens=None, num_draft_tokens=k), run_ahead=run_ahead)
    decoder.context.read(decoder.history, 0)
    fill(decoder, 16_000)
    for _ in range(12):  # both shapes compiled
        decoder._fill(), decoder._emit()
    copy = sum(a.nbytes for arrays in decoder.context.state.target for a in arrays)  # the head's is a fourth of it
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(12):
        decoder._fill(), decoder._emit()
    assert copy > 60e6
    assert mx.get_peak_memory() - before < 0.1 * copy


def fill(decoder, length):
    """A long context without reading one: empty caches that claim `length` positions."""
    decoder.context._grow(length + 512)
    state = decoder.context.state
    drafter = state.drafter
    if decoder.context.hears:  # a round's states belong to the newest tokens
        drafter = (*drafter[:-1], mx.array([length - 1]))
    decoder.context.state = state._replace(length=mx.array([length]), drafter=drafter)
    decoder.length = length
    decoder.history += [0] * (length - len(decoder.history))
    mx.eval(decoder.context.state.length)


@pytest.mark.parametrize("draft", ["same", "noisy"])
@pytest.mark.parametrize("ks", [(4,), (0, 3, 0, 8), (1, 0, 0, 0, 5), (2,) + (0,) * 20])
def test_switching_k_changes_no_token_and_a_twin_draft_keeps_everything(ks, draft):
    """A30, A19: after plain rounds the draft reads what it missed, be it one token or twenty."""
    p = pair(draft=draft)
    decoder, ids = decode(p, tiny.PROMPT, controller=Scripted(*ks), max_tokens=150)
    assert ids == decode(p, tiny.PROMPT, num_draft_tokens=0, max_tokens=150)[1]
    if draft == "same":
        assert decoder.stats.acceptance_rate == 1


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("name", [tiny.TINY_SW, "gemma3_text"])
def test_a_twin_draft_with_windows_keeps_everything_through_every_switch(name, run_ahead):
    p = pair(name, "same")
    decoder, _ = decode(p, tiny.PROMPT * 3, controller=Scripted(3, *[0] * 30, 8, 0), max_tokens=200, run_ahead=run_ahead)
    assert decoder.stats.acceptance_rate == 1 and decoder.stats.drafted > 30
