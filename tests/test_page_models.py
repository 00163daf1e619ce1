"""The page's handlers on tiny models, in the one thread that owns MLX: what a visitor sees where models, templates
and other visitors are difficult."""

import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
import tiny
from test_arena import text_pair
from test_page import SETTINGS, send, shown

import app as page_app
from mlx_spec import load
from mlx_spec.arena import Arena
from mlx_spec.page.stage import Stage, Visitor
from mlx_spec.pairs import Pair
from mlx_spec.prompts import MERGED, PLAIN_TEXT, SYSTEM_FOLDED, encode

SHORT = [*SETTINGS[:5], 16, 3, "match"]


@pytest.fixture
def open_page():
    """Makes a page on what `loader` loads."""
    made = []

    def call(loader=lambda *_, **__: text_pair(), target="tiny"):
        stage = Stage(Arena(loader), lambda *_: None)
        stage.load(target).join(60)
        assert stage.ready, stage.status
        made.append(stage.arena)
        return page_app.Page(stage)

    yield call
    for arena in made:
        arena.worker.close()


def test_loading_nothing_says_what_to_choose(open_page):
    page = open_page()
    with pytest.warns(UserWarning, match="Choose a pair"):
        assert "tiny is ready" in page.load(None, " ", "")


def test_a_draft_by_itself_is_for_the_pair_that_answers(open_page, monkeypatch):
    page, asked = open_page(), []
    monkeypatch.setattr(page.stage, "load", lambda *names: asked.append(names))
    page.load(None, "", " none ")
    page.load("other", "", "x")
    assert asked == [(page.stage.target, "none"), ("other", "x")] and page.stage.target


def ask(page, visitor, said="hello", mode="race", system="", settings=SHORT):
    """What a visitor sees in the end: the last value of every widget."""
    seen = {}
    for update in send(page, visitor, said, mode, system, settings):
        seen |= update
    return seen


def places(page, updates):
    return " ".join(u[page.place] for u in updates if page.place in u)


def test_a_long_prompt_tells_how_much_of_it_was_read_and_then_no_more(open_page):
    page = open_page()
    settings = [*SHORT[:5], 4, *SHORT[6:]]
    updates = list(send(page, Visitor(), "z" * (2 * page_app.CHUNK), "race", "", settings))
    assert places(page, updates).count(f"{page_app.READING}, {page_app.CHUNK} of") == 2  # once a column
    last = [u[page.place] for u in updates if page.place in u][-1]
    assert page_app.READING not in last


def with_template(template):
    def loader(*_, **__):
        target = tiny.make("llama")
        return Pair(target, tiny.noisy_copy(target), tiny.byte_tokenizer(chat_template=template))

    return loader


def scripted(reply, said, template=tiny.CHAT_TEMPLATE, end=tiny.EOS, after=b"user\nmore"):
    """A pair that answers `said` with `reply` and the end token, and would then go on."""
    tokenizer = tiny.byte_tokenizer(chat_template=template)
    prompt, _ = encode(tokenizer, [{"role": "user", "content": said}])
    rows = [0] * (len(prompt) - 1) + [*reply.encode(), end, *after]
    table = np.full((len(rows), tiny.VOCAB), -10.0)
    table[np.arange(len(rows)), rows] = 10.0
    return lambda *_, **__: Pair(*(tiny.ScriptModel(table, by_position=True) for _ in range(2)), tokenizer)


# what a reply is made of


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_nothing_after_the_end_token_reaches_the_page(open_page, temperature):
    """A31: the end token lies in a block of which every draft is kept."""
    page, visitor = open_page(scripted("Hi.", "Say hi.")), Visitor()
    seen = ask(page, visitor, "Say hi.", settings=[temperature, 1, 0, 0, "1", 64, 8, "match"])
    for name in page.replies:
        assert "".join(text for text, _ in visitor.reply.lanes[name].pieces) == "Hi."
        assert "user" not in seen[page.replies[name]].rpartition('class="reply"')[2]
    assert "identical" in seen[page.verdict] and visitor.messages[-1]["content"] == "Hi."


def test_a_draft_that_cannot_be_used_is_off_with_its_reason_and_the_target_answers(open_page, tmp_path):
    """A05: a folder without weights, then a draft with another tokenizer."""
    target, empty, other = tiny.write_folder(tmp_path / "target"), tmp_path / "empty", tiny.write_folder(tmp_path / "other")
    empty.mkdir()
    names = json.loads((other / "tokenizer.json").read_text())
    names["model"]["vocab"] = {token: (i + 7) % 256 if i < 256 else i for token, i in names["model"]["vocab"].items()}
    (other / "tokenizer.json").write_text(json.dumps(names))
    page = open_page(load, str(target))
    for draft in (empty, other):
        page.stage.load(str(target), str(draft)).join(60)
        assert page.stage.kind == "off" and "draft off: " in page.banner_html()
        visitor = Visitor()
        assert "both columns are plain decoding" in ask(page, visitor)[page.verdict]
        assert visitor.reply.lanes["speculative"].stats.drafted == 0


def test_a_model_without_a_chat_template_answers_and_the_page_says_so(open_page):
    """A70."""
    page = open_page(with_template(None))
    updates = send(page, Visitor(), settings=SHORT)
    assert PLAIN_TEXT in places(page, updates) and "identical" in updates[-1][page.verdict]


def test_a_template_without_a_system_role_has_the_system_box_in_the_first_turn(open_page):
    """A71."""
    refuses = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    page = open_page(with_template(refuses + tiny.CHAT_TEMPLATE))
    updates = send(page, Visitor(), system="Be brief.", settings=SHORT)
    assert SYSTEM_FOLDED in places(page, updates) and "identical" in updates[-1][page.verdict]


def test_roles_alternate_after_a_reply_that_was_stopped_before_its_first_token(open_page):
    """A71."""
    strict = ("{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
              "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}")
    page, visitor = open_page(with_template(strict + tiny.CHAT_TEMPLATE)), Visitor()
    visitor.session = page.stage.arena.session()
    visitor.session.messages = [{"role": "user", "content": "stopped before a word"}]
    updates = send(page, visitor, settings=SHORT)
    assert MERGED in places(page, updates) and "identical" in updates[-1][page.verdict]


@pytest.mark.parametrize("opens", [True, False])
def test_a_draft_changes_neither_the_prompt_nor_what_counts_as_thinking(open_page, opens):
    """A73: and A72, whoever writes the opening tag."""
    template = tiny.CHAT_TEMPLATE + ("{% if add_generation_prompt %}<think>\n{% endif %}" if opens else "")
    reply = ("" if opens else "<think>\n") + "17*23\n</think>\n\n391"
    page = open_page(scripted(reply, "What is 17*23?", template))
    whole = '<details class="thought"><summary>thinking</summary>17*23</details>', "391"
    cut = '<details class="thought" open><summary>thinking, not finished</summary>17*23</details>', ""
    for tokens, wanted in ((64, whole), (5 if opens else 13, cut)):
        for mode, k in (("plain", 4), ("speculative", 0), ("speculative", 4)):
            visitor = Visitor()
            visitor.formatted = True
            seen = ask(page, visitor, "What is 17*23?", mode, settings=[*SETTINGS[:5], tokens, k, "match"])
            assert (seen[page.replies[mode]].rpartition("</div>")[2], seen[page.answers[mode]]["value"]) == wanted


def test_a_prompt_that_was_read_before_is_answered_again(open_page):
    """A65: everything is in the caches already."""
    page, visitor = open_page(), Visitor()
    first = ask(page, visitor)
    again = {}
    for update in page.retry(visitor, "race", "", *SHORT):
        again |= update
    assert "identical" in again[page.verdict] and len(visitor.messages) == 2
    assert shown(page, [again], "plain").rpartition('"reply"')[2] == shown(page, [first], "plain").rpartition('"reply"')[2]


# stopping


def test_a_stop_is_heard_between_the_chunks_of_a_long_prompt(open_page, monkeypatch):
    """A77: four chunks, stopped in the first."""
    page, visitor, read = open_page(), Visitor(), []
    model = type(page.stage.arena.pair.target)
    forward = model.__call__

    def counted(self, tokens, *args, **kwargs):
        if tokens.shape[1] > page_app.CHUNK // 2:
            read.append(tokens.shape[1])
            visitor.stop()
        return forward(self, tokens, *args, **kwargs)

    monkeypatch.setattr(model, "__call__", counted)
    updates = send(page, visitor, "x" * 8000, settings=SHORT)
    assert len(read) <= 2 and "stopped" in updates[-1][page.verdict]
    monkeypatch.undo()
    assert "identical" in ask(page, Visitor())[page.verdict]


def test_only_who_pressed_stop_is_told_of_a_stop(open_page):
    """A79: many short replies, each looked at while it ends."""
    page = open_page(scripted("ok", "hello"))
    for _ in range(25):
        visitor = Visitor()
        seen = ask(page, visitor)
        assert "identical" in seen[page.verdict]
        assert {view.finish_reason for view in visitor.reply.lanes.values()} == {"stop"}


def test_twenty_tabs_that_are_closed_under_way_leave_nothing(open_page):
    """A78, A81: and the one that stays is answered."""
    page = open_page()
    ask(page, Visitor())
    sizes = []
    for n in range(20):
        visitor, request = Visitor(), SimpleNamespace(session_hash=f"tab {n}")
        page.enter(visitor, request)
        stream = page.send("tell me more " * (n + 1), visitor, "race", "", *SETTINGS[:5], 4096, 3, "match")
        next(stream), next(stream)
        stream.close()
        page.leave(request)
        page.stage.arena.worker.ask(lambda job: mx.clear_cache()).result()
        del visitor, stream
        gc.collect()
        sizes.append(mx.get_active_memory())
    assert page.visitors == {} and max(sizes[5:]) <= 1.05 * max(sizes[:5])
    assert "identical" in ask(page, Visitor())[page.verdict]


def test_many_conversations_need_the_memory_of_one(open_page):
    """A81: each begins anew, in the same tab."""
    page, visitor, active = open_page(), Visitor(), []
    for n in range(12):
        ask(page, visitor, f"{n} bottles", "speculative")
        page.clear(visitor)
        gc.collect()
        active.append(mx.get_active_memory())
    assert max(active[4:]) <= 1.02 * max(active[:4])


# threads


@pytest.mark.parametrize("name", ["llama", tiny.TINY_SW, tiny.TINY_HYB])
def test_any_thread_may_ask_and_the_models_are_loaded_where_they_are_used(open_page, tmp_path, name):
    """A82, A83: full, rotating and recurrent caches, from folders, twice from threads of a pool."""
    folder = tiny.write_folder(tmp_path / name, name)
    page = open_page(load, str(folder))
    with ThreadPoolExecutor(2) as pool:
        for seen in pool.map(lambda n: ask(page, Visitor(), f"hello {n}"), range(4)):
            assert page.replies["plain"] in seen and "bad" not in seen[page.place]
            assert "identical" in seen[page.verdict] or "plain decoding" in seen[page.verdict]


def test_two_tabs_at_once_and_another_pair_while_they_stream(open_page):
    """A84: twenty rounds; nothing is mixed, nothing fails, and the new pair answers in the end."""
    page, found = open_page(), []
    wanted = {said: ask(page, Visitor(), said)[page.json] for said in ("one", "two")}
    texts = {}
    for said in wanted:
        visitor = Visitor()
        ask(page, visitor, said)
        texts[said] = visitor.messages[-1]["content"]

    def talk(said):
        visitor = Visitor()
        seen = ask(page, visitor, said)
        found.append((said, visitor.messages[-1]["content"], "identical" in seen[page.verdict]))

    for n in range(20):
        threads = [threading.Thread(target=talk, args=(said,)) for said in texts]
        [t.start() for t in threads]
        if n % 5 == 0:
            page.stage.load(f"pair {n}").join(60)
        [t.join(60) for t in threads]
    assert sorted(found) == sorted([(said, text, True) for said, text in texts.items()] * 20)
    assert page.stage.pair_name == "pair 15"
