"""The page's other side: sessions, races, verdicts, pairs that fail, all through the worker."""

import gc
import weakref

import pytest
import tiny
from helpers import heads

from mlx_spec import arena as arena_module
from mlx_spec import generate
from mlx_spec.arena import PLAIN, SPECULATIVE, Arena, Session
from mlx_spec.errors import PairError, SpecError
from mlx_spec.pairs import Pair


def text_pair(draft="noisy"):
    target = tiny.make("llama")
    made = {"noisy": lambda: tiny.noisy_copy(target), "heads": lambda: heads(target, (1,), 200)}
    return Pair(target, made[draft](), tiny.byte_tokenizer())


@pytest.fixture
def arena():
    made = Arena(lambda target, draft, **_: text_pair(draft or "noisy"))
    made.prepare("x").result()
    yield made
    made.worker.close()


def last(job):
    return job.result()[-1]


def ask(arena, session, text="hello", mode="race", **options):
    return last(arena.answer(session, text, mode, dict(max_tokens=24, num_draft_tokens=3) | options))


def test_a_race_shows_both_replies_and_that_they_are_identical(arena):
    reply = ask(arena, Session())
    assert list(reply.lanes) == [PLAIN, SPECULATIVE] and reply.done and reply.verdict.kind == "identical"
    assert reply.lanes[PLAIN].ids == reply.lanes[SPECULATIVE].ids
    assert reply.speedup > 0 and reply.lanes[SPECULATIVE].stats.drafted > 0 == reply.lanes[PLAIN].stats.drafted
    assert [n for _, n in reply.lanes[PLAIN].trail] == sorted(n for _, n in reply.lanes[PLAIN].trail)


@pytest.mark.parametrize("verify", ["match", "block"])
def test_at_a_temperature_one_seed_serves_both_and_only_match_is_compared(arena, verify):
    reply = ask(arena, Session(), temperature=0.9, verify=verify)
    assert reply.seed is not None and reply.comparable == (verify == "match")
    assert (reply.verdict is not None) == (verify == "match")
    if verify == "match":
        assert reply.verdict.kind == "identical"


def test_turns_of_a_conversation_equal_cold_runs_in_both_lanes(arena):
    """A91: and nothing of one visitor reaches the other."""
    mine = Session()
    for text in ("my word is plum", "and then?", "what is my word?"):
        before = list(mine.messages)
        reply = ask(arena, mine, text)
        cold = generate(arena.pair, [*before, {"role": "user", "content": text}], max_tokens=24)
        assert reply.lanes[PLAIN].ids == reply.lanes[SPECULATIVE].ids == cold.ids
        other = ask(arena, Session(), "what is my word?", "speculative")
        alone = generate(arena.pair, [{"role": "user", "content": "what is my word?"}], max_tokens=24)
        assert other.lanes[SPECULATIVE].ids == alone.ids


def test_the_plain_lane_of_a_pair_with_heads_builds_on_its_memory():
    arena, session = Arena(lambda *_, **__: text_pair("heads")), Session()
    arena.prepare("x").result()
    ask(arena, session)
    assert session.memories[PLAIN] is not None and session.memories[SPECULATIVE] is not None
    reply = ask(arena, session, "more")
    assert reply.verdict.kind == "identical"
    arena.worker.close()


def test_a_stop_keeps_the_partial_text_with_its_numbers_and_the_conversation(arena):
    session = Session()
    job = arena.answer(session, "hello", "race", dict(max_tokens=None))
    events = iter(job)
    next(events)
    session.stop()
    final = list(events)[-1]
    assert final.done and final.verdict is None
    assert {view.finish_reason for view in final.lanes.values()} <= {"cancelled", "stop"}
    assert session.messages[0]["content"] == "hello" and final.lanes[SPECULATIVE].stats.generation_tokens >= 0
    assert ask(arena, session, "go on").verdict.kind == "identical"


def test_a_second_visitor_waits_in_line_and_a_stop_touches_only_its_own(arena):
    a, b = Session(), Session()
    first = arena.answer(a, "one", "race", dict(max_tokens=None))
    second = arena.answer(b, "two", "plain", dict(max_tokens=5))
    assert next(iter(first)) is not None and second.place == 1
    b.stop()
    assert second.result() == [] or second.result()[-1].done
    third = arena.answer(b, "three", "plain", dict(max_tokens=5))
    a.stop()
    first.result()
    assert last(third).lanes[PLAIN].stats.generation_tokens > 0


def test_a_pair_that_fails_leaves_the_old_one_answering(arena):
    old, session = arena.pair, Session()

    def broken(*_, **__):
        raise PairError("no such folder: x")

    arena._load = broken
    with pytest.raises(PairError, match="no such folder"):
        arena.prepare("x").result()
    assert arena.pair is old and ask(arena, session).done


def test_loading_can_be_cancelled_and_shows_its_progress(arena):
    old = arena.pair

    def slow(target, draft, on_progress, **_):
        for i in range(100):
            on_progress(i, 100)
        return text_pair()

    arena._load = slow
    assert (50, 100) in arena.prepare("x").result()
    arena.pair = old
    job = arena.prepare("x")
    job.cancel()
    try:
        job.result()
    except SpecError as error:
        assert "cancelled" in str(error)
    assert arena.pair is old


def test_what_is_wrong_is_said_before_the_worker_is_asked(arena):
    session = Session()
    for wrong in (dict(text="  "), dict(temperature=-1)):
        with pytest.raises(ValueError):
            ask(arena, session, **wrong)
    assert session.messages == [] and session.last_turn() is None
    ask(arena, session, "a", "plain")
    assert session.last_turn() == "a" and session.messages == []


def test_a_view_that_was_told_is_not_changed_by_what_comes_later(arena):
    replies = arena.answer(Session(), "hello", "race", dict(max_tokens=60)).result()
    sizes = [len(r.lanes[PLAIN].ids) for r in replies]
    assert sizes == sorted(sizes)


def test_each_token_has_its_own_text_and_together_they_are_the_reply(arena):
    reply = ask(arena, Session(), max_tokens=60)
    for view in reply.lanes.values():
        alone = [(text, tokens[0]) for text, tokens in view.pieces if len(tokens) == 1]
        assert len(alone) >= 0.8 * len(view.ids) and len(view.ids) == view.stats.generation_tokens
        decoded = arena.pair.tokenizer.decode(view.ids)
        assert view.text == decoded


def test_nothing_is_built_on_what_a_fault_left_behind(arena, monkeypatch):
    """A reply that breaks keeps its text, not its caches; the next turn equals a cold run."""
    session, real = Session(), arena_module.race

    def breaks(lanes):
        for n, step in enumerate(real(lanes)):
            yield step
            if n == 27:
                raise SpecError("the model gave logits that are not numbers")

    monkeypatch.setattr(arena_module, "race", breaks)
    with pytest.raises(SpecError, match="not numbers"):
        ask(arena, session)
    monkeypatch.undo()
    assert not session.memories and session.messages[0]["content"] == "hello"
    before = list(session.messages)
    reply = ask(arena, session, "again")
    cold = generate(arena.pair, [*before, {"role": "user", "content": "again"}], max_tokens=24)
    assert reply.lanes[PLAIN].ids == reply.lanes[SPECULATIVE].ids == cold.ids


def test_what_auto_needs_is_measured_before_a_race_begins(arena, monkeypatch):
    """Otherwise one column would start seconds late, once."""
    measured, real = [], arena_module.race

    def looks(lanes):
        measured.append(arena.pair.costs is not None)
        yield from real(lanes)

    monkeypatch.setattr(arena_module, "race", looks)
    assert ask(arena, Session(), mode="plain", num_draft_tokens="auto").done
    assert ask(arena, Session(), num_draft_tokens="auto").verdict.kind == "identical"
    assert measured == [False, True]


def test_a_new_pair_is_not_kept_company_by_the_old_ones_weights(arena):
    """A81: a visitor who does not come back holds no model."""
    session = arena.session()
    ask(arena, session)
    gone = weakref.ref(arena.pair.target)
    arena.prepare("x").result()
    gc.collect()
    assert gone() is None and not session.memories
    assert ask(arena, session, "again").verdict.kind == "identical"
