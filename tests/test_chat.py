"""Conversations: every turn equals a cold run, and reads only what is new.

Replies of tiny random models are any bytes, so texts seldom encode to the ids that were drawn: the
longest common beginning is what counts.
"""

import json

import mlx.core as mx
import pytest
import tiny
from helpers import heads

from mlx_spec import Chat, generate
from mlx_spec.errors import SpecError
from mlx_spec.memory import Memory, recall
from mlx_spec.pairs import Pair
from mlx_spec.prompts import encode

TURNS = ("The quick brown fox", "jumps over", "the lazy dog \n\n again", "and once more, with feeling")


def make(name="llama", draft="noisy"):
    target = tiny.make(name)
    made = {"noisy": lambda: tiny.noisy_copy(target), "heads": lambda: heads(target, (1,), 200), None: lambda: None}
    return Pair(target, made[draft](), tiny.byte_tokenizer())


def with_draft(pair, draft):
    return Pair(pair.target, draft, pair.tokenizer)


def cold(pair, messages, **options):
    return generate(pair, messages, **options)


def read_by(pair, monkeypatch):
    """How many prompt tokens the target reads in prefills, call by call."""
    from mlx_spec import context

    seen, original = [], context.prefill

    def spy(model, caches, ids, *args, **kwargs):
        if model is pair.target or type(model).__name__ == "Reader":
            seen.append(len(ids))
        return original(model, caches, ids, *args, **kwargs)

    monkeypatch.setattr(context, "prefill", spy)
    return seen


@pytest.mark.parametrize("draft", ["noisy", "heads", None])
@pytest.mark.parametrize("name", ["llama", tiny.TINY_SW, "gemma3_text"])
def test_every_turn_equals_a_cold_run(name, draft):
    """A58, A60, A61: windows of 16 have wrapped long before the second turn."""
    pair = make(name, draft)
    chat = Chat(pair, "You are brief.", max_tokens=20, num_draft_tokens=3)
    for text in TURNS:
        before = list(chat.messages)
        reply = chat.send(text)
        assert reply.ids == cold(pair, [*before, {"role": "user", "content": text}], max_tokens=20).ids
    assert [m["role"] for m in chat.messages] == ["system"] + ["user", "assistant"] * 4


@pytest.mark.parametrize("draft", ["noisy", "heads"])
def test_a_turn_reads_only_what_is_new(draft, monkeypatch):
    pair = make("llama", draft)
    seen, chat = read_by(pair, monkeypatch), Chat(pair, max_tokens=8)
    chat.send("a" * 600)
    chat.send("b")
    assert seen[0] > 600 and seen[1] < 60


def test_retry_and_edit_equal_a_cold_run_and_forget_what_came_after(monkeypatch):
    """A59: an edit of the first turn cuts every layer of both models, or nothing is used."""
    for name in ("llama", tiny.TINY_SW):
        pair = make(name)
        chat = Chat(pair, max_tokens=12, num_draft_tokens=2)
        first = chat.send(TURNS[0])
        chat.send(TURNS[1])
        assert chat.retry().result().ids == cold(pair, chat.messages[:3], max_tokens=12).ids
        assert len(chat.messages) == 4
        edited = chat.edit(0, "The quick brown cat").result()
        assert edited.ids == cold(pair, [{"role": "user", "content": "The quick brown cat"}], max_tokens=12).ids
        assert edited.ids != first.ids and len(chat.messages) == 2


def test_a_draft_may_be_switched_on_off_and_to_another_between_turns():
    """A57, A58: plain, with a draft, another draft, a head, none."""
    base = make(draft=None)
    drafts = [None, tiny.noisy_copy(base.target), tiny.noisy_copy(base.target, seed=2), heads(base.target, (1,), 200), None]
    chat = Chat(base, max_tokens=16, num_draft_tokens=3)
    for text, draft in zip((*TURNS, "the end"), drafts):
        chat.pair = pair = with_draft(base, draft)
        before = list(chat.messages)
        reply = chat.send(text)
        assert reply.ids == cold(pair, [*before, {"role": "user", "content": text}], max_tokens=16).ids
        assert (reply.stats.drafted > 0) == (draft is not None)


def test_caches_of_other_options_are_not_built_on():
    pair = make()
    chat = Chat(pair, max_tokens=12)
    for options in ({}, dict(max_kv_size=32), {}, dict(kv_bits=8, kv_group_size=32), dict(kv_bits=4, kv_group_size=32), {}):
        before = list(chat.messages)
        reply = chat.send("go on", **options)
        assert reply.ids == cold(pair, [*before, {"role": "user", "content": "go on"}], max_tokens=12, **options).ids


def test_a_reply_that_was_stopped_stays_and_the_next_turn_is_right():
    pair = make()
    chat = Chat(pair, max_tokens=60, num_draft_tokens=3)
    turn = chat.stream(TURNS[0])
    partial = "".join(next(turn).text for _ in range(6))
    turn.close()
    turn.close()
    assert chat.messages[-1] == {"role": "assistant", "content": partial}
    before = list(chat.messages)
    assert chat.send("and?").ids == cold(pair, [*before, {"role": "user", "content": "and?"}], max_tokens=60).ids


def test_a_long_turn_then_a_short_one_share_no_position():
    """A62: a drafter's position belongs to its request."""
    for k in (1, 2, 4):
        pair = make()
        for text in ("x" * 300, "hi"):
            chat = Chat(pair, max_tokens=10, num_draft_tokens=k)
            assert chat.send(text).ids == cold(pair, [{"role": "user", "content": text}], max_tokens=10).ids


def test_an_empty_turn_changes_nothing():
    """A64, A65, A66."""
    chat = Chat(make(), max_tokens=4)
    for text in ("", "  ", "\n"):
        with pytest.raises(ValueError, match="message is empty"):
            chat.stream(text)
    with pytest.raises(ValueError, match="must be text; got NoneType"):
        chat.send(None)
    with pytest.raises(ValueError, match="nothing|no turn to retry"):
        chat.retry()
    with pytest.raises(ValueError, match="0 user turns"):
        chat.edit(0, "x")
    assert chat.messages == []
    assert chat.send("hello").finish_reason in ("length", "stop")


def test_a_conversation_is_saved_and_goes_on_as_if_it_had_not_been(tmp_path):
    """A57: caches are not saved, so a file fits any pair."""
    pair, path = make(), tmp_path / "chat.json"
    chat = Chat(pair, "Be kind.", max_tokens=12)
    chat.send(TURNS[0])
    chat.save(path)
    other = Chat(make(draft=None), max_tokens=12)
    other.load(path)
    assert other.messages == chat.messages
    assert other.send("b").ids == chat.send("b").ids
    with pytest.raises(SpecError, match="none.json can't be read: No such file"):
        other.load(tmp_path / "none.json")
    for wrong in ("{}", "[]", "nonsense", json.dumps({"messages": [1]})):
        path.write_text(wrong)
        with pytest.raises(SpecError, match="no saved conversation"):
            other.load(path)
    with pytest.raises(SpecError, match="can't be written"):
        chat.save(tmp_path / "missing" / "chat.json")


def test_clearing_keeps_the_system_text_only():
    chat = Chat(make(), "Be kind.", max_tokens=4)
    chat.send("a")
    chat.clear()
    assert chat.messages == [{"role": "system", "content": "Be kind."}]
    with pytest.raises(ValueError):
        chat.retry()


def test_a_memory_is_of_use_only_to_the_same_target():
    pair, other = make(), make()
    ids, _ = encode(pair.tokenizer, "abc")
    assert recall(Memory(other, ids, [], [], 0), pair, ids) is None
    assert recall(None, pair, ids) is None


def test_memory_does_not_grow_with_turns():
    """A81: the caches of one conversation, whatever its number of turns."""
    chat, sizes = Chat(make(), max_tokens=8), []
    for i in range(12):
        chat.send("hi")
        mx.clear_cache()
        sizes.append(mx.get_active_memory())
    assert max(sizes[6:]) < 1.3 * max(sizes[2:6])
