"""Text for training: what is read from files, and what a target writes itself."""

import gzip
import json
import resource
from itertools import chain, islice

import mlx.core as mx
import numpy as np
import pytest
import tiny
from helpers import plain

from mlx_spec.errors import SpecError
from mlx_spec.pairs import Pair
from mlx_spec.train import text
from mlx_spec.train.states import Example

TOKENIZER = tiny.byte_tokenizer()
BARE = tiny.byte_tokenizer(chat_template=None)


def chatty(tokenizer=TOKENIZER, seed=0):
    """A target that writes short words and ends them: random letters, <eos> one time in fourteen."""
    table = np.full((tiny.VOCAB, tiny.VOCAB), -40.0)
    letters = [*range(97, 123), 32]
    table[:, letters] = np.random.default_rng(seed).normal(size=(tiny.VOCAB, len(letters)))
    table[:, tiny.EOS] = 1.0
    return Pair(tiny.ScriptModel(table), None, tokenizer, name="chatty")


def user_turns(pair, count, seed):
    return islice(chain.from_iterable(text._turns(pair, seed, set())), count)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(text, "BATCH", 4)
    monkeypatch.setattr(text, "TURN_TOKENS", 32)


def lines(path, *objects):
    path.write_text("".join(json.dumps(o) + "\n" for o in objects))
    return path


def read(path, tokenizer=TOKENIZER, max_length=64, vocab_size=tiny.VOCAB):
    return list(text.read(path, tokenizer, max_length, vocab_size))


def prompt(*messages):
    roles = ("user", "assistant", "user")
    turns = [{"role": role, "content": content} for role, content in zip(roles, messages)]
    return list(TOKENIZER.apply_chat_template(turns, add_generation_prompt=True, tokenize=True))


# reading


def test_ready_made_ids_are_taken_as_they_are(tmp_path):
    file = lines(tmp_path / "a.jsonl", {"prompt": [1, 2], "answer": [3, 257], "temperature": 0.4}, {"prompt": [5]})
    assert read(file, tokenizer=None) == [Example([1, 2], [3, 257], 0.4), Example([5], [], None)]


def test_a_question_and_its_answer_go_through_the_chat_template(tmp_path):
    file = lines(tmp_path / "a.jsonl", {"prompt": "Hi", "answer": "Ho"})
    assert read(file) == [Example(prompt("Hi"), [*b"Ho", tiny.EOS])]


def test_the_last_assistant_turn_is_the_answer(tmp_path):
    roles = ("user", "assistant", "user", "assistant")
    talk = [{"role": role, "content": content} for role, content in zip(roles, "abcd")]
    file = lines(tmp_path / "a.jsonl", {"messages": talk})
    assert read(file, max_length=200) == [Example(prompt("a", "b", "c"), [*b"d", tiny.EOS])]


def test_what_ends_in_a_user_turn_has_an_empty_answer(tmp_path):
    file = lines(tmp_path / "a.jsonl", {"prompt": "Hi"}, {"messages": [{"role": "user", "content": "Hi"}]})
    assert read(file) == [Example(prompt("Hi"), [])] * 2


def test_a_document_is_cut_into_pieces_and_loses_nothing(tmp_path):
    file = lines(tmp_path / "a.jsonl", {"text": "abcdefghij"}, {"text": ""}, {"text": "x"})
    pieces = read(file, max_length=4)
    assert [bytes(e.answer) for e in pieces] == [b"abcd", b"efgh", b"ij"]
    assert all(e.prompt == [] and e.temperature is None for e in pieces)


def test_a_file_of_text_is_read_block_by_block_and_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "BLOCK", 7)
    content = "one line\nand, é, a much longer second line\n\nthe end"
    (tmp_path / "a.md").write_text(content)
    pieces = read(tmp_path / "a.md", max_length=5)
    assert b"".join(bytes(e.answer) for e in pieces) == content.encode()
    assert {len(e.answer) for e in pieces} <= {2, 3, 4, 5}


def test_a_long_answer_is_cut_and_a_prompt_without_room_for_one_left_out(tmp_path):
    file = lines(tmp_path / "a.jsonl", {"prompt": [1] * 6, "answer": [2] * 9}, {"prompt": [1] * 8, "answer": [2]})
    assert read(file, max_length=8) == [Example([1] * 6, [2] * 2)]


def test_a_folder_is_read_in_order_packed_or_not(tmp_path):
    (tmp_path / "sub").mkdir()
    lines(tmp_path / "b.jsonl", {"text": "bb"})
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as f:
        f.write('\n{"text": "aa"}\n')
    for name in ("c.txt", "sub/d.md", "._b.jsonl", "z.csv"):
        (tmp_path / name).write_text("cc")
    assert [bytes(e.answer) for e in read(tmp_path)] == [b"aa", b"bb", b"cc", b"cc"]


def test_reading_holds_one_text_at_a_time(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "first"}\nnot JSON\n')
    assert bytes(next(text.read(file, TOKENIZER, 64)).answer) == b"first"


WRONG_LINES = [
    *((line, "line 2: it must be JSON: {\"prompt\"") for line in (
        "not JSON", "[1, 2]", "3", "null", '"text"', '{"words": "a"}',
        '{"messages": "a"}', '{"messages": []}', '{"messages": [1]}',
    )),
    ('{"prompt": [1], "answer": [259]}', "line 2: token ids must be from 0 to 258; got 259"),
    ('{"prompt": [true], "answer": [1]}', "line 2: the prompt must be text, token ids or .*; got a list with True"),
    ('{"prompt": "a", "answer": 3}', "line 2: the prompt must be text, token ids or messages; got int"),
    ('{"prompt": null, "answer": [1]}', "line 2: the prompt must be text, token ids or messages; got NoneType"),
    ('{"prompt": [1], "temperature": "hot"}', "line 2: could not convert string to float: 'hot'"),
    ('{"text": 3}', "line 2: the prompt must be text, token ids or messages; got int"),
    ('{"messages": [{"role": "user"}]}', "line 2: message 0 must have exactly the keys"),
]


@pytest.mark.parametrize("line, message", WRONG_LINES)
def test_a_wrong_line_is_named_in_one_line(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"text": "right"}\n' + line)
    with pytest.raises(SpecError, match=message) as e:
        read(tmp_path / "a.jsonl")
    assert "\n" not in str(e.value) and str(tmp_path / "a.jsonl") in str(e.value)


def test_text_needs_a_tokenizer(tmp_path):
    (tmp_path / "a.txt").write_text("words")
    for file in (lines(tmp_path / "a.jsonl", {"text": "words"}), tmp_path / "a.txt"):
        with pytest.raises(SpecError, match="no tokenizer: give the prompt as token ids"):
            read(file, tokenizer=None)


def test_without_a_chat_template_prompts_are_plain_text(tmp_path):
    file = lines(tmp_path / "a.jsonl", {"prompt": "Hi", "answer": "Ho"}, {"prompt": "Hi"})
    assert read(file, tokenizer=BARE) == [Example([*b"Hi"], [*b"Ho", tiny.EOS]), Example([*b"Hi"], [])]


def test_files_that_hold_no_text_say_so(tmp_path):
    with pytest.raises(SpecError, match="none.jsonl does not exist"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(SpecError, match="has no text to learn from"):
        read(tmp_path)
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(SpecError, match="has no text to learn from"):
        read(tmp_path / "a.jsonl")
    (tmp_path / "a.csv").write_text("a,b")
    with pytest.raises(SpecError, match="a.csv .* give .jsonl.*, .txt or .md files"):
        read(tmp_path / "a.csv")


def test_files_that_are_damaged_say_so(tmp_path):
    whole = gzip.compress(b'{"text": "a long enough text"}\n' * 9)
    for content in (whole[:-12], b"no gzip", whole[:20] + b"\xff" * 9 + whole[29:]):
        (tmp_path / "a.jsonl.gz").write_bytes(content)
        with pytest.raises(SpecError, match="a.jsonl.gz can't be read"):
            read(tmp_path / "a.jsonl.gz")
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(SpecError, match="a.txt can't be read: 'utf-8'"):
        read(tmp_path / "a.txt")


# writing


def test_made_up_turns_are_whole_prompts_and_no_two_alike(small):
    turns = list(user_turns(chatty(), 12, seed=1))
    begin, end = prompt("\0")[: len(b"user\n") + 1], prompt("")[-len(b"assistant\n") - 3 :]
    assert len({tuple(t) for t in turns}) == len(turns) == 12
    for turn in turns:
        said = turn[len(begin) : -len(end)]
        assert turn[: len(begin)] == begin and turn[-len(end) :] == end
        opener = next((o for o in text.OPENERS if bytes(said).startswith(o.encode())), "")
        written = said[len(opener) :]
        assert len(written) < 32 and set(written) <= {*range(97, 123), 32} and said[0] != 32 != said[-1]


def test_half_of_the_turns_begin_in_a_way_that_was_chosen():
    begun = [[i] for i in range(1, 5)]
    starts = text._starts(begun, (1, 2))
    assert starts == text._starts(begun, (1, 2)) != text._starts(begun, (1, 3))
    assert starts.count([]) == len(starts) // 2 and {*map(tuple, starts)} == {(), (1,), (2,), (3,), (4,)}


def test_turns_and_answers_depend_on_the_seed_alone(small):
    def made(seed):
        pair = chatty()
        turns = list(user_turns(pair, 5, seed))
        mx.random.normal((3,))  # what else is drawn in the process changes nothing
        return turns, list(text.answers(pair, turns, seed))

    assert made(1) == made(1)
    assert made(1)[0] != made(2)[0]
    prompts = made(1)[0]
    assert list(text.answers(chatty(), prompts, 1)) != list(text.answers(chatty(), prompts, 2))


def test_temperatures_take_turns_and_zero_is_plain_decoding(small):
    model = tiny.make("llama")
    pair = Pair(model, None, TOKENIZER)
    prompts = [list(b"The quick"), list(b"A"), list(b"brown foxes jump"), list(b"over it"), list(b"again")]
    found = list(text.answers(pair, prompts, 3, max_tokens=10, temperatures=(0.0, 0.8)))
    assert [e.temperature for e in found] == [0.0, 0.8, 0.0, 0.8, 0.0]
    assert [e.prompt for e in found] == prompts
    for e in (found[0], found[2], found[4]):
        assert e.answer == until_end(plain(model, e.prompt, 10))


def test_tokens_are_drawn_at_the_temperature_that_is_named(monkeypatch):
    monkeypatch.setattr(text, "BATCH", 4000)
    table = np.full((tiny.VOCAB, tiny.VOCAB), -40.0)
    table[:, [5, 6]] = 0.0, 1.0
    pair = Pair(tiny.ScriptModel(table), None, TOKENIZER)
    found = list(text.answers(pair, [[1]] * 4000, 0, max_tokens=1, temperatures=(0.0, 0.5)))
    share = np.mean([e.answer == [6] for e in found if e.temperature])
    assert abs(share - 1 / (1 + np.exp(-2.0))) < 0.03
    assert all(e.answer == [6] for e in found if not e.temperature)


def until_end(ids):
    return ids[: next((i + 1 for i, t in enumerate(ids) if t == tiny.EOS), len(ids))]


def test_an_answer_ends_with_the_end_token_or_is_as_long_as_allowed(small):
    found = list(text.answers(chatty(), [[1], [2, 3]] * 8, 0, max_tokens=9))
    ended = [e for e in found if e.answer[-1] == tiny.EOS]
    assert 0 < len(ended) < len(found)
    assert all(tiny.EOS not in e.answer[:-1] for e in found)
    assert all(len(e.answer) == 9 for e in found if e not in ended)


def test_ids_beyond_the_vocabulary_are_never_written(small):
    table = np.zeros((tiny.VOCAB + 60, tiny.VOCAB + 60))
    table[:, tiny.VOCAB :] = 9.0
    pair = Pair(tiny.ScriptModel(table), None, TOKENIZER)
    found = [i for e in text.answers(pair, [[1], [2]], 0, max_tokens=8) for i in e.answer]
    assert found and max(found) < tiny.VOCAB


@pytest.mark.parametrize("name", ["llama", "llama_sw", "llama4", "gemma2", "internlm3", "afm7", "qwen3_next"])
def test_prompts_of_unequal_length_are_answered_as_if_each_were_alone(small, name):
    """In mlx-lm's padded batches llama4, gemma2 and internlm3 raise, and afm7 goes wrong silently."""
    model = tiny.make(name)
    pair = Pair(model, None, TOKENIZER)
    prompts = [list(b"The quick brown fox"), list(b"Ab"), list(b"x")]
    found = list(text.answers(pair, prompts, 3, max_tokens=6, temperatures=(0.0,)))
    assert [e.answer for e in found] == [until_end(plain(model, p, 6)) for p in prompts]


def test_without_a_chat_template_data_are_asked_for(small, tmp_path):
    for tokenizer in (BARE, None):
        with pytest.raises(SpecError, match="no chat template .* pass --data with"):
            list(user_turns(chatty(tokenizer), 1, 0))
    with pytest.raises(SpecError, match="no chat template .* pass --data with"):
        text.write(chatty(BARE), tmp_path, 10, 0)


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "<bos>{% for m in messages %}{% endfor %}"])
def test_a_template_that_shows_no_user_turn_asks_for_data(small, template):
    with pytest.raises(SpecError, match="makes up no user turns.* pass --data"):
        list(user_turns(chatty(tiny.byte_tokenizer(chat_template=template)), 1, 0))


def test_a_target_that_never_ends_a_turn_or_repeats_itself_is_given_up(small, monkeypatch):
    monkeypatch.setattr(text, "OPENERS", ("",))
    endless = np.full((tiny.VOCAB, tiny.VOCAB), -40.0)
    endless[:, 97] = 0
    with pytest.raises(SpecError, match="makes up no user turns"):
        list(user_turns(Pair(tiny.ScriptModel(endless), None, TOKENIZER), 1, 0))
    same = endless.copy()
    same[97] = -40.0
    same[97, tiny.EOS] = 0
    turns = user_turns(Pair(tiny.ScriptModel(same), None, TOKENIZER), 2, 0)
    assert next(turns) == prompt("a")
    with pytest.raises(SpecError, match="makes up no user turns"):
        next(turns)


def test_what_is_written_can_be_read_and_is_enough(small, tmp_path):
    seen = []
    path = text.write(chatty(), tmp_path / "new", 600, 5, on_progress=seen.append)
    examples = read(path, tokenizer=None, max_length=512)
    assert path == tmp_path / "new" / "text.jsonl"
    assert sum(len(e.answer) for e in examples) == seen[-1] >= 600 > seen[-2]
    assert {e.temperature for e in examples} == {0.0, 0.4, 0.6, 0.8}


def stop_after(batches):
    done = iter(range(1, batches))

    def on_progress(tokens):
        if next(done, None) is None:
            raise KeyboardInterrupt

    return on_progress


@pytest.mark.parametrize("prompts", [None, [[i, i + 1] for i in range(60)]])
def test_a_run_that_was_stopped_goes_on_to_the_same_text(small, tmp_path, prompts):
    whole = text.write(chatty(), tmp_path / "whole", 1000, 5, prompts).read_bytes()
    with pytest.raises(KeyboardInterrupt):
        text.write(chatty(), tmp_path / "cut", 1000, 5, prompts, on_progress=stop_after(2))
    part = (tmp_path / "cut" / "text.jsonl").read_bytes()
    assert part and part != whole and whole.startswith(part) and part.endswith(b"\n")
    with open(tmp_path / "cut" / "text.jsonl", "ab") as f:
        f.write(whole[len(part) : len(part) + 50])  # killed in the middle of a batch
    assert text.write(chatty(), tmp_path / "cut", 1000, 5, prompts).read_bytes() == whole


def test_an_interrupt_while_a_batch_is_drawn_leaves_whole_batches(small, tmp_path, monkeypatch):
    whole = text.write(chatty(), tmp_path / "whole", 1000, 5).read_bytes()
    real, calls = text._written, iter(range(5))

    def interrupted(*args):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(text, "_written", interrupted)
        text.write(chatty(), tmp_path / "cut", 1000, 5)
    part = (tmp_path / "cut" / "text.jsonl").read_bytes()
    assert whole.startswith(part) and part.endswith(b"\n\n")
    assert text.write(chatty(), tmp_path / "cut", 1000, 5).read_bytes() == whole


@pytest.mark.parametrize("prompts", [None, [[i, i + 1] for i in range(60)]])
def test_a_run_that_was_killed_at_any_byte_goes_on_to_the_same_text(small, tmp_path, prompts):
    whole = text.write(chatty(), tmp_path, 200, 5, prompts).read_bytes()
    for size in range(0, len(whole), 97):
        (tmp_path / "text.jsonl").write_bytes(whole[:size])
        assert text.write(chatty(), tmp_path, 200, 5, prompts).read_bytes() == whole


def test_more_tokens_continue_and_fewer_change_nothing(small, tmp_path):
    short = text.write(chatty(), tmp_path, 40, 5).read_bytes()
    long = text.write(chatty(), tmp_path, 1000, 5).read_bytes()
    assert long.startswith(short) and len(long) > len(short)
    assert text.write(chatty(), tmp_path, 40, 5).read_bytes() == long


def test_another_target_seed_or_prompts_start_anew(small, tmp_path):
    other = chatty(seed=1)
    other.name = "other"
    for pair, seed, prompts in ((chatty(), 5, None), (chatty(), 6, None), (other, 6, None), (other, 6, [[1], [2]])):
        alone = text.write(pair, tmp_path / "alone" / f"{pair.name}{seed}{prompts}", 30, seed, prompts).read_bytes()
        assert text.write(pair, tmp_path / "shared", 30, seed, prompts).read_bytes() == alone


def test_prompts_that_run_out_end_the_text(small, tmp_path):
    path = text.write(chatty(), tmp_path, 10**6, 5, iter([[1], [2], [3], [4], [5]]))
    assert [e.prompt for e in read(path)] == [[1], [2], [3], [4], [5]]


def test_a_full_disk_is_one_line_and_loses_no_batch(small, tmp_path):
    """A limit on the size of files stands for it: what fits is written, the rest is refused."""
    whole = text.write(chatty(), tmp_path / "whole", 1000, 5).read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) // 2, before[1]))
    try:
        with pytest.raises(SpecError, match="File too large.*make room and run it again") as e:
            text.write(chatty(), tmp_path / "cut", 1000, 5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    part = (tmp_path / "cut" / "text.jsonl").read_bytes()
    assert "\n" not in str(e.value) and b"\n\n" in part and whole.startswith(part)
    assert text.write(chatty(), tmp_path / "cut", 1000, 5).read_bytes() == whole


def test_a_folder_that_can_not_be_made_is_one_line(small, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="choose another folder"):
        text.write(chatty(), tmp_path / "file" / "sub", 10, 0)


@pytest.mark.real
def test_the_demo_target_makes_up_turns_and_answers_them(monkeypatch):
    import mlx_spec

    monkeypatch.setattr(text, "BATCH", 4)
    monkeypatch.setattr(text, "TURN_TOKENS", 40)
    pair = mlx_spec.load("demo")
    turns = list(user_turns(pair, 1, 0))
    assert "<|im_start|>user\n" in pair.tokenizer.decode(turns[0])
    first = next(text.answers(pair, turns, 0, max_tokens=12, temperatures=(0.0,)))
    assert first.answer == plain(pair.target, turns[0], len(first.answer))
