"""The page without a browser and without MLX: its handlers on an arena that says what a test wrote,
then the running server through gradio_client."""

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("gradio", reason="the page needs gradio: pip install 'mlx-spec[app]'")

import app as page_app  # noqa: E402
from mlx_spec.errors import PairError, SpecError  # noqa: E402
from mlx_spec.page import numbers, text  # noqa: E402
from mlx_spec.page.stage import Loading, Stage, Visitor  # noqa: E402
from mlx_spec.types import Options, Stats, Token  # noqa: E402
from mlx_spec.worker import Worker  # noqa: E402

ROOT = Path(__file__).parents[1]
EVIL = ["<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "[x](javascript:alert(1))", "<svg onload=alert(1)>"]
SETTINGS = [0, 1, 0, 0, "", 256, 4, "match"]


def view(name, words, origin="accepted", tps=10.0, finish=None, rounds=None):
    stats = Stats(accepted=len(words), drafted=len(words) + 2, rounds=rounds or max(len(words), 1), generation_s=len(words) / tps or 0.1,
                  drafted_by_position=[4, 2], accepted_by_position=[3, 1], ttft_s=0.1, mode="speculative")
    pieces = [(word, (Token(i, -0.5, origin),)) for i, word in enumerate(words)]
    return SimpleNamespace(name=name, pieces=pieces, text="".join(words), stats=stats, finish_reason=finish, used_s=1.0,
                           trail=[(0.1 * i, i) for i in range(len(words))])


def reply(words=tuple("abcd"), mode="race", done=True, verdict="identical", tps=(10.0, 16.2), finish="stop", thinks=False, **options):
    lanes = {name: view(name, words, "plain" if name == "plain" else "accepted", rate, finish if done else None)
             for name, rate in zip(("plain", "speculative"), tps) if mode in ("race", name)}
    made = Options.of(verify="match").but(**options)
    found = None
    if verdict:
        kind = verdict.split()[0]
        found = type("Verdict", (), {"kind": {"mismatch": "BUG"}.get(kind, kind), "__str__": lambda self: verdict})()
    return SimpleNamespace(lanes=lanes, options=made, seed=made.seed or 1, notes=(), done=done, thinks=thinks,
                           verdict=found if done else None, speedup=tps[1] / tps[0] if mode == "race" else None,
                           comparable=made.temperature == 0 or made.verify == "match")


class Session:
    def __init__(self):
        self.messages, self.job = [], None

    def last_turn(self):
        while self.messages:
            message = self.messages.pop()
            if message["role"] == "user":
                return message["content"]
        return None

    def stop(self):
        if self.job is not None:
            self.job.cancel()


class StubArena:
    """Says `words` one by one; after `limit` of them it waits for `gate`, so that a test decides how
    far it gets."""

    def __init__(self, words=("one ", "two ", "three")):
        self.worker, self.pair, self.words, self.asked = Worker(), SimpleNamespace(notes=()), words, []
        self.gate, self.limit, self.pause = threading.Event(), 0, 0.04
        self.gate.set()

    def session(self):
        return Session()

    def answer(self, session, said, mode, options, system=""):
        options = Options.of(**options)
        self.asked.append((said, mode, options, system))
        session.job = self.worker.ask(lambda job: self._run(job, session, said, mode, options))
        return session.job

    def _run(self, job, session, said, mode, options):
        got = []
        for word in self.words:
            while len(got) >= self.limit and not self.gate.wait(0.01) and not job.cancelled():
                pass
            if job.cancelled():
                break
            got.append(word)
            time.sleep(self.pause)
            job.tell(reply(tuple(got), mode, done=False))
        last = reply(tuple(got), mode, finish="cancelled" if job.cancelled() else "stop")
        session.messages += [{"role": "user", "content": said}, {"role": "assistant", "content": "".join(got)}]
        job.tell(last)


@pytest.fixture
def page():
    made = page_app.Page(Stage(StubArena()))
    yield made
    made.stage.arena.gate.set()
    made.stage.arena.worker.close()


def send(page, visitor, said="hello", mode="race", system="", settings=SETTINGS):
    return list(page.send(said, visitor, mode, system, *settings))


def shown(page, updates, name="speculative"):
    return [u[page.replies[name]] for u in updates if page.replies[name] in u][-1]


# what others wrote


@pytest.mark.parametrize("evil", EVIL)
def test_nothing_that_is_said_becomes_markup(page, evil):
    """A86: user text, model text, system box and model name."""
    page.stage.arena.words = (evil,)
    page.stage.status = evil
    visitor = Visitor()
    updates = send(page, visitor, said=evil, system=evil)
    pieces = [shown(page, updates), page.banner_html(), text.history_html(visitor.messages), text.thought_html(evil, True)]
    for made in [*pieces, *(u[page.history] for u in updates if page.history in u)]:
        assert "<script" not in made and "<img" not in made and "<svg" not in made and "href" not in made
        assert text.escape(evil) in made


@pytest.mark.parametrize("evil", EVIL)
def test_markdown_has_no_html_images_or_script_links(evil):
    made = text.markdown(f"before {evil} after ![x](http://a/b.png)\n\n[r]: javascript:alert(1)\n[r]")
    assert "<" not in made and "](javascript" not in made and "\n[r]:" not in made and "![" not in made
    assert text.markdown(r"[x\](javascript:alert(1)) a \< b") == r"[x\]&#40;javascript:alert(1)) a &lt; b"
    assert text.markdown("[site](https://example.org)") == "[site](https://example.org)"


def test_code_is_left_as_it_is_and_an_open_fence_is_closed():
    """A88, A89: HTML in a fence is shown; what comes after a reply cut in its code is not code."""
    fenced = "see:\n```html\n<b>x & y</b>\n```\nand `a<b` but a<b"
    assert text.markdown(fenced) == fenced[:-3] + "a&lt;b"
    assert text.markdown("x\n~~~~py\nif a < b:") == "x\n~~~~py\nif a < b:\n~~~~\n"
    for end in range(len(fenced)):
        made = text.markdown(fenced[:end])
        assert made.count("```") % 2 == 0 or fenced[:end].endswith(("`", "``")) or "```" not in fenced[:end]


def test_prices_stay_prices_and_maths_keeps_its_signs():
    """A87."""
    assert text.markdown("It costs $5 today and $7 tomorrow.") == "It costs $5 today and $7 tomorrow."
    assert text.markdown(r"$$a < b & c$$") == r"$$a \lt  b & c$$"
    assert [d["left"] for d in page_app.MATHS] == ["$$"]


def test_half_characters_and_nul_are_replaced(page):
    """A67."""
    send(page, Visitor(), said="ok \udc9d done\0")
    assert page.stage.arena.asked[-1][0] == "ok \ufffd done\ufffd"
    assert text.escape("\ud83d") == "\ufffd"


@pytest.mark.parametrize("said, thinks, expected", [
    ("<think>plan</think>Answer.", False, ("plan", "Answer.", True)),
    ("plan...</think>Answer.", True, ("plan...", "Answer.", True)),
    ("plan...</think>Answer.", False, ("plan...", "Answer.", True)),
    ("<think>plan", False, ("plan", "", False)),
    ("plan", True, ("plan", "", False)),
    ("use `<think>` and `</think>`", False, (None, "use `<think>` and `</think>`", True)),
    ("```\n</think>\n```\nx", False, (None, "```\n</think>\n```\nx", True)),
    ("<think>```py\nx\n</think>\nAnswer", False, ("```py\nx", "Answer", True)),
    ("<answer>x</answer> if a<b and c>d", False, (None, "<answer>x</answer> if a<b and c>d", True)),
])
def test_thinking_is_taken_apart_from_the_answer(said, thinks, expected):
    """A72, A85."""
    assert text.split_thinking(said, thinks) == expected


def test_unfinished_thinking_is_open_and_marked(page):
    assert "not finished" in text.thought_html("x", False) and "<details class=\"thought\" open>" in text.thought_html("x", False)
    assert "open" not in text.thought_html("x", True)
    page.stage.arena.words = ("<think>pla", "n</think>", "It is **so**")
    visitor = Visitor()
    visitor.formatted = True
    last = send(page, visitor)[-1]
    assert "plan" in last[page.replies["plain"]] and last[page.answers["plain"]]["value"] == "It is **so**"


def test_tokens_show_their_origin_and_probability():
    made = text.tokens_html([("a<", (Token(1, -0.6931, "accepted"),)), ("bc", (Token(2, 0, "accepted"), Token(3, -3, "bonus")))])
    assert made == ('<span class="t accepted" title="accepted, p = 0.5">a&lt;</span>'
                    '<span class="t bonus" title="bonus, p = 0.0498">bc</span>')


def test_earlier_turns_follow_the_formatting_switch(page):
    """A92: turns are roles and strings, whatever Gradio's version makes of messages."""
    page.stage.arena.words = ("<think>a plan</think>", "It is **so** <b>")
    visitor = Visitor()
    send(page, visitor, said="1 < 2")
    assert visitor.messages == [{"role": "user", "content": "1 < 2"},
                                {"role": "assistant", "content": "<think>a plan</think>It is **so** <b>"}]
    plain = send(page, visitor, said="more")[1]
    assert "&lt;think&gt;a plan" in plain[page.history] and plain[page.told]["visible"] is False
    formatted = page.show_formatted(True, visitor)
    assert formatted[page.history] == "" and formatted[page.told]["visible"]
    told = formatted[page.told]["value"]
    assert "1 &lt; 2" in told and "<summary>thinking</summary>\n\na plan\n\n</details>\n\nIt is **so** &lt;b>" in told


# figures


@pytest.mark.parametrize("made, expected", [
    (reply(), ("won", "1.62x faster · identical")),
    (reply(tps=(12.0, 10.0), verdict="tie at token 83, gap 0.004"), ("lost", "1.20x slower here · tie at token 83, gap 0.004")),
    (reply(verdict="mismatch at token 5, gap 2"), ("bad", "1.62x faster · mismatch at token 5, gap 2: a bug, please report it")),
    (reply(verdict=None, temperature=0.7, verify="block"), ("won", "1.62x faster · texts are not comparable token by token")),
    (reply(verdict=None, finish="cancelled"), ("won", "1.62x faster · stopped")),
    (reply(tps=(10.0, 10.1)), ("open", "as fast as plain · identical")),
    (reply(words="abcdefgh", done=False), ("won", "1.62x faster so far")),
    (reply(done=False), ("open", "too short to time so far")),
    (reply(words=("a",)), ("open", "too short to time · identical")),
    (reply(mode="plain"), ("open", "")),
])
def test_the_verdict_says_how_it_went(made, expected):
    assert numbers.verdict(made) == expected


def test_what_is_not_known_is_a_dash_and_the_row_can_be_copied():
    assert numbers.NOTHING in numbers.head_html("plain", None, 4)
    empty = reply(words=(), tps=(1.0, 1.0))
    assert "0" in numbers.head_html("speculative", empty.lanes["speculative"], 4)
    assert "k auto, 4.0 on average<" in numbers.head_html("speculative", view("speculative", "ab", rounds=1), "auto")
    found = numbers.record(reply(seed=7, num_draft_tokens=4), "a|b")
    assert found["seed"] == 7 and found["verdict"] == "1.62x faster · identical" and found["k"] == 4
    lines = numbers.row_markdown(found).splitlines()
    assert len(lines) == 3 and r"a\|b" in lines[2] and numbers.row_json(found).startswith("{")
    assert numbers.acceptance_rows(reply()) == [("1", 75.0), ("2", 50.0)] and numbers.acceptance_rows(reply(mode="plain")) == []


# handlers


@pytest.mark.parametrize("blank", ["", "  ", "\n \n", None])
def test_a_blank_send_asks_nothing(page, blank):
    """A64, A66."""
    visitor = Visitor()
    assert send(page, visitor, said=blank) == [{page.place: ""}]
    assert page.stage.arena.asked == [] and visitor.session is None


def test_every_path_streams_to_the_end(page):
    """A93: send and Enter are one handler; retry, example; then edit puts the text back."""
    visitor = Visitor()
    for updates in (send(page, visitor), list(page.retry(visitor, "race", "", *SETTINGS)),
                    list(page._example("an example")(visitor, "race", "", *SETTINGS))):
        texts = [u[page.replies["speculative"]] for u in updates if page.replies["speculative"] in u]
        assert len(texts) >= 2 and all(word in texts[-1] for word in ("one", "two", "three"))
        assert "identical" in updates[-1][page.verdict] and "{" in updates[-1][page.json]
    assert [m["content"] for m in visitor.messages if m["role"] == "user"] == ["hello", "an example"]
    assert [m["content"] for m in visitor.said] == ["hello", "one two three", "an example"]
    assert page.edit(visitor)[page.returned] == "an example"
    assert [m["content"] for m in visitor.messages] == ["hello", "one two three"]
    assert page.clear(visitor)[page.history] == "" and visitor.messages == []
    assert page.edit(visitor) == {page.place: ""} and list(page.retry(visitor, "race", "", *SETTINGS)) == [{page.place: ""}]


def test_a_retry_takes_a_new_seed_and_settings_arrive(page):
    visitor, settings = Visitor(), [0.7, 0.9, 40.0, 0.05, "7", 32.0, 2.0, "block"]
    send(page, visitor, system="be brief", settings=settings)
    list(page.retry(visitor, "plain", "", *settings))
    assert page_app.options_of([*SETTINGS[:6], "auto", "match"])["num_draft_tokens"] == "auto"
    (_, mode, first, system), (_, other_mode, second, _) = page.stage.arena.asked
    assert (mode, other_mode, system) == ("race", "plain", "be brief") and first.seed == 7 and second.seed is None
    assert (first.top_k, first.max_tokens, first.num_draft_tokens, first.verify) == (40, 32, 2, "block")


def test_a_wrong_setting_is_one_line_and_the_text_stays_in_the_box(page):
    updates = send(page, Visitor(), settings=[0, 1, 0, 0, "abc", 256, 4, "match"])
    assert "seed must be a whole number" in updates[-1][page.place] and updates[-1][page.returned] == "hello"


def test_a_stop_keeps_the_partial_text_with_its_numbers(page):
    visitor, arena = Visitor(), page.stage.arena
    arena.gate.clear()
    arena.limit = 1
    stream = page.send("hello", visitor, "race", "", *SETTINGS)
    next(stream)
    first = next(stream)
    page.stop(visitor)
    rest = list(stream)
    assert "one" in shown(page, [first, *rest]) and "stopped" in rest[-1][page.verdict]
    assert visitor.messages[-1]["content"].startswith("one")
    arena.gate.set()
    assert "three" in shown(page, send(page, visitor, "again"))


def test_a_browser_slower_than_the_device_sees_the_newest_and_not_all(page):
    page.stage.arena.words, page.stage.arena.pause = tuple(f"{i} " for i in range(200)), 0.001
    seen = []
    for update in page.send("hello", Visitor(), "race", "", *SETTINGS):
        seen.append(update)
        time.sleep(0.05)
    assert len(seen) < 200 and "199" in shown(page, seen)


def test_a_closed_stream_cancels_its_job(page):
    """A76: whoever drops the generator leaves nothing running."""
    visitor = Visitor()
    page.stage.arena.gate.clear()
    page.stage.arena.limit = 1
    stream = page.send("hello", visitor, "race", "", *SETTINGS)
    next(stream), next(stream)
    stream.close()
    assert visitor.session.job.cancelled() and not visitor.busy.locked()


def test_the_second_visitor_sees_its_place_and_its_stop_and_clear_act_at_once(page):
    """A90, A91."""
    a, b, arena = Visitor(), Visitor(), page.stage.arena
    arena.gate.clear()
    first = page.send("my word is plum", a, "race", "", *SETTINGS)
    next(first)
    puller = threading.Thread(target=lambda: list(first))
    puller.start()
    while not arena.asked:
        time.sleep(0.01)
    second = page.send("what is my word?", b, "race", "", *SETTINGS)
    next(second)
    assert "1 before you" in next(second)[page.place]
    page.stop(b)
    rest = list(second)
    assert rest[-1][page.returned] == "what is my word?" and not a.session.job.cancelled()
    page.clear(b)
    arena.gate.set()
    puller.join(60)
    assert a.messages[-1]["content"] == "one two three" and b.messages == []


def test_a_prompt_is_seen_while_it_is_read(page):
    visitor, arena = Visitor(), page.stage.arena
    send(page, visitor)
    arena.gate.clear()
    stream = page.send("a long one", visitor, "race", "", *SETTINGS)
    first = next(stream)
    assert "one two three" in first[page.history] and first[page.history].endswith('user">a long one</div>')
    assert page_app.READING in first[page.place] and first[page.verdict] == "" and "three" not in first[page.replies["plain"]]
    arena.gate.set()
    assert list(stream)[-1][page.verdict]


def test_a_wrong_setting_takes_the_prompt_out_of_what_was_said(page):
    visitor = Visitor()
    send(page, visitor)
    last = send(page, visitor, said="again", settings=[0, 1, 0, 0, str(2**64), 256, 4, "match"])[-1]
    assert "below 2**64" in last[page.place] and last[page.returned] == "again"
    assert "again" not in last[page.history] and "three" in last[page.replies["plain"]]


def test_a_stop_before_the_first_pair_is_there_gives_the_text_back():
    stage, go = Stage(StubArena(), lambda *_: go.wait(5)), threading.Event()
    stage.arena.pair = None
    page, visitor = page_app.Page(stage), Visitor()
    stage.load("x")
    stream = page.send("hello", visitor, "race", "", *SETTINGS)
    next(stream), next(stream)
    page.stop(visitor)
    last = list(stream)[-1]
    assert last[page.returned] == "hello" and last[page.place] == last[page.history] == ""
    go.set()
    stage.arena.worker.close()


def test_a_clear_while_it_streams_leaves_nothing_behind(page):
    visitor = Visitor()
    page.stage.arena.gate.clear()
    page.stage.arena.limit = 1
    stream = page.send("hello", visitor, "race", "", *SETTINGS)
    next(stream), next(stream)
    page.clear(visitor)
    assert all(page.replies["plain"] not in u for u in stream) and visitor.messages == [] and visitor.reply is None


def test_an_error_is_a_line_and_the_page_lives_on(page):
    def fail(*_):
        raise RuntimeError("<b>out of memory</b>")

    good, page.stage.arena._run = page.stage.arena._run, fail
    updates = send(page, Visitor())
    assert "RuntimeError: &lt;b&gt;out of memory" in updates[-1][page.place]
    page.stage.arena._run = good
    assert "three" in shown(page, send(page, Visitor()))


def test_the_view_can_change_while_nothing_or_something_is_shown(page):
    visitor = Visitor()
    assert page.show_formatted(True, visitor)[page.verdict] == ""
    last = send(page, visitor)[-1]
    assert last[page.answers["plain"]]["visible"] and page.show_formatted(False, visitor)[page.answers["plain"]]["visible"] is False


# pairs


def loading_stage(prepare, fetch=lambda *_: None):
    stage = Stage(StubArena(), fetch)
    stage.arena.prepare = lambda *names: stage.arena.worker.ask(lambda job: prepare(job, *names))
    return stage


def test_another_load_takes_the_place_of_the_one_under_way():
    go, began, prepared = threading.Event(), threading.Event(), []

    def fetch(target, draft, progress):
        if target == "slow":
            began.set()
            go.wait(5)
            progress(1, 2)

    def prepare(job, target, draft):
        prepared.append(target)
        job.tell(SimpleNamespace(notes=()))

    stage = loading_stage(prepare, fetch)
    slow = stage.load("slow")
    assert began.wait(5)
    stage.load("quick").join(60)
    go.set()
    slow.join(60)
    assert prepared == ["quick"] and (stage.kind, stage.pair_name, stage.status) == ("ready", "quick", "quick is ready")
    stage.arena.worker.close()


def test_what_was_replaced_says_nothing_and_ends_nothing():
    """The one that took its place is still under way when it gives up."""
    go, other, began = (threading.Event() for _ in range(3))

    def fetch(target, draft, progress):
        began.set()
        (go if target == "slow" else other).wait(5)
        progress(1, 2)

    stage = loading_stage(lambda job, *_: job.tell(SimpleNamespace(notes=())), fetch)
    slow = stage.load("slow")
    assert began.wait(5)
    quick = stage.load("quick")
    go.set()
    slow.join(60)
    assert stage.loading and stage.kind == "loading" and "quick" in stage.status
    other.set()
    quick.join(60)
    assert stage.kind == "ready" and not stage.loading
    stage.arena.worker.close()


def test_a_job_that_came_after_the_cancel_is_cancelled_too():
    loading, cancelled = Loading("x"), []
    loading.cancel()
    loading.job = SimpleNamespace(cancel=lambda: cancelled.append(1))
    with pytest.raises(SpecError, match="loading was cancelled"):
        loading.check()
    assert cancelled


def test_drafts_that_can_not_be_used_are_told_where_none_can():
    from mlx_spec.advise import LOOKUP, Advice

    stage = loading_stage(lambda *_: None)
    page = page_app.Page(stage)
    stage.advice = "t", [Advice(LOOKUP, 8, 1.3), Advice("x", error="another tokenizer")]
    shown = page.drafts()
    assert shown["visible"] and shown["choices"] == [(f"{LOOKUP} · 1.30x predicted, k = 8", "none")] and "x: another" in shown["info"]
    stage.arena.worker.close()


def test_a_draft_that_fails_leaves_a_banner_and_a_pair_that_fails_leaves_the_old_one():
    """A05."""
    def prepare(job, target, draft):
        if target == "bad":
            raise PairError("no such folder: bad")
        job.tell((1, 2))
        job.tell(SimpleNamespace(notes=("draft off: it has another tokenizer",)))

    stage = loading_stage(prepare)
    stage.load("x", "y").join(60)
    assert (stage.kind, stage.status) == ("off", "x is ready · draft off: it has another tokenizer")
    stage.load("bad").join(60)
    assert stage.kind == "bad" and stage.status == "no such folder: bad · x still answers" and not stage.loading
    stage.arena.worker.close()


def test_a_download_shows_progress_can_be_cancelled_and_lets_the_old_pair_answer():
    seen, go = threading.Event(), threading.Event()

    def fetch(target, draft, progress):
        progress(50_000_000, 100_000_000)
        seen.set()
        go.wait(5)
        progress(100_000_000, 100_000_000)

    stage = loading_stage(lambda job, *_: job.tell(SimpleNamespace(notes=())), fetch)
    page, thread = page_app.Page(stage), stage.load("x")
    assert seen.wait(5) and "fetching x: 50 of 100 MB (50%)" in page.banner_html()
    assert "three" in shown(page, send(page, Visitor()))
    page.cancel_load()
    go.set()
    thread.join(60)
    assert stage.kind == "bad" and stage.status.startswith("loading was cancelled")
    stage.arena.worker.close()


def test_a_turn_waits_for_the_first_pair_and_says_when_there_is_none():
    stage = Stage(StubArena())
    stage.arena.pair = None
    page = page_app.Page(stage)
    assert "no pair is loaded" in send(page, Visitor())[-1][page.place]
    go = threading.Event()
    stage._fetch = lambda *_: go.wait(5)

    def prepare(*_):
        stage.arena.pair = SimpleNamespace(notes=())
        return stage.arena.worker.ask(lambda job: job.tell(stage.arena.pair))

    stage.arena.prepare = prepare
    stage.load("x")
    stream = page.send("hello", Visitor(), "race", "", *SETTINGS)
    next(stream)
    assert "waiting for the pair" in next(stream)[page.place]
    go.set()
    assert "three" in shown(page, list(stream))
    stage.arena.worker.close()


def test_what_was_fetched_is_shown_as_here(page, monkeypatch):
    entry = SimpleNamespace(name="x", size_bytes=2e9, on_disk=False, note="a pair")
    monkeypatch.setattr(page_app, "catalogue", lambda: [entry])
    assert page.pairs()["choices"] == [("x · 2.0 GB · download · a pair", "x")]
    entry.on_disk = True
    assert page.enter(Visitor(), SimpleNamespace(session_hash="tab"))["choices"] == [("x · 2.0 GB · here · a pair", "x")]


def test_a_wrong_pair_name_is_one_line(monkeypatch):
    monkeypatch.setattr(page_app, "serve", lambda *_: pytest.fail("it listens"))
    with pytest.raises(SpecError, match="no pair has the name 'nope'; pairs are: "):
        page_app.main(["--pair", "nope"])


@pytest.mark.parametrize("port", ["0", "65536", "-1", "http"])
def test_a_wrong_port_is_a_wrong_command_line(port, capsys, monkeypatch):
    monkeypatch.setattr(page_app, "serve", lambda *_: pytest.fail("it listens"))
    with pytest.raises(SystemExit) as ended:
        page_app.main([f"--port={port}"])
    assert ended.value.code == 2 and "must be a number from 1 to 65535" in capsys.readouterr().err


def test_an_address_that_can_not_be_had_is_one_line_that_says_why(monkeypatch):
    monkeypatch.setattr(page_app, "serve", lambda *_: pytest.fail("it listens"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} is taken: give another --port"):
            page_app.main([f"--port={port}"])
    page_app.check_address("127.0.0.1", port)
    with pytest.raises(ValueError, match=r"can't listen on nowhere.invalid, port 7860: [^()]+$"):
        page_app.main(["--host=nowhere.invalid", "--port=7860"])


def test_a_target_and_a_pair_are_not_both_taken(capsys, monkeypatch):
    monkeypatch.setattr(page_app, "serve", lambda *_: pytest.fail("it listens"))
    with pytest.raises(SystemExit):
        page_app.main(["--pair", "demo", "--target", "x"])
    assert "not allowed with" in capsys.readouterr().err


# the running server


@pytest.fixture
def served(page):
    yield page, page_app.serve(page)
    page.blocks.close()


def client(address):
    from gradio_client import Client

    return Client(address, verbose=False)


def test_two_clients_stream_queue_and_keep_apart(served):
    page, address = served
    a, b, arena = client(address), client(address), page.stage.arena
    arena.gate.clear()
    wanted = ["race", "", *SETTINGS]
    first = a.submit("my word is plum", *wanted, api_name="/send")
    while not arena.asked:
        time.sleep(0.02)
    second = b.submit("what is my word?", *wanted, api_name="/send")
    while len(arena.asked) < 2:
        time.sleep(0.02)
    b.submit(api_name="/clear").result(timeout=60)  # waits for nobody: the first one is still held
    second.result(timeout=60)
    arena.gate.set()
    assert any("one two three" in str(value).replace("</span>", "").replace('<span class="t plain" title="plain, p = 0.607">', "")
               for value in first.result(timeout=60))
    edited = a.predict(api_name="/edit")
    assert "my word is plum" in str(edited[0]) and "plum" not in str(b.predict(api_name="/edit"))


def test_the_page_on_tiny_models_races_to_an_identical_end():
    from test_arena import text_pair

    from mlx_spec.arena import Arena

    arena = Arena(lambda *_, **__: text_pair())
    stage = Stage(arena, lambda *_: None)
    stage.load("tiny").join(60)
    page = page_app.Page(stage)
    address = page_app.serve(page)
    try:
        visitor = client(address)
        job = visitor.submit("hello", "race", "", *SETTINGS[:5], 40, 3, "match", api_name="/send")
        assert "identical" in str(job.result(timeout=60)) and len(job.outputs()) >= 3
        assert "identical" in str(visitor.predict("race", "", *SETTINGS[:5], 20, 3, "match", api_name="/retry"))
    finally:
        page.blocks.close()
        arena.worker.close()


# the start


def test_the_page_is_up_before_mlx_is_imported():
    code = "import sys, app; app.Page(app.Stage()); print([m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_lm')])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert run.stdout.strip().endswith("[]"), run.stderr[-500:]


@pytest.mark.parametrize("here, expected", [((), "demo"), (("demo",), "demo"), (("demo", "mid"), "mid"), (("mid", "vast"), "mid")])
def test_the_largest_pair_that_is_here_and_fits_is_the_first(monkeypatch, here, expected):
    sizes = {"demo": 10**6, "mid": 10**7, "vast": 10**18}
    entries = [SimpleNamespace(name=n, on_disk=n in here, memory_bytes=size) for n, size in sizes.items()]
    monkeypatch.setattr("mlx_spec.page.stage.catalogue", lambda: entries)
    assert page_app.best_pair() == expected
