"""The page in a real browser, on tiny random models: what is sent is seen, and nothing that a model or
a user writes runs. Needs Playwright and Debian's chromium."""

import os
import shutil
import time
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.real
pytest.importorskip("gradio", reason="the page needs gradio: pip install 'mlx-spec[app]'")
sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("needs a chromium: apt-get install chromium, or CHROMIUM=path", allow_module_level=True)

import app as page_app  # noqa: E402
from mlx_spec.page.stage import Stage  # noqa: E402
from test_page import EVIL, StubArena  # noqa: E402

RACE = "document.querySelector('#race').getBoundingClientRect()"
IN_VIEW = f"{RACE}.bottom <= innerHeight"
DONE = "(document.querySelector('#verdict .verdict')?.innerText || 'so far').includes('so far') === false"


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


def serve(stage):
    page = page_app.Page(stage)
    return page, page_app.serve(page)


@pytest.fixture(scope="module")
def tiny_address():
    from helpers import drafts_pay
    from test_arena import text_pair

    from mlx_spec.arena import Arena
    from mlx_spec.errors import PairError

    def load(target, draft, **_):
        if target == "bad":
            raise PairError("no such folder: bad")
        return text_pair()

    arena = Arena(load)
    stage = Stage(arena, lambda *_: None)
    stage.load("tiny").join(60)
    page, address = serve(stage)
    with pytest.MonkeyPatch.context() as patched:
        drafts_pay(patched)
        yield address
    page.blocks.close()
    arena.worker.close()


@pytest.fixture
def stub(browser):
    arena = StubArena()
    page, address = serve(Stage(arena))
    yield arena, address
    arena.gate.set()
    for context in browser.contexts:  # a server waits for tabs that listen
        context.close()
    page.blocks.close()
    arena.worker.close()


def visit(browser, address, width=1280, scheme="light"):
    tab = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
    tab.set_default_timeout(60_000)  # a machine may have other things to do
    tab.problems = []
    tab.on("dialog", lambda d: (tab.problems.append(d.message), d.dismiss()))
    tab.on("pageerror", lambda e: tab.problems.append(str(e)))
    tab.on("request", lambda r: tab.problems.append(r.url) if not r.url.startswith((address, "data:", "blob:")) else None)
    tab.goto(address)
    tab.wait_for_selector("#box textarea")
    return tab


def say(tab, text):
    tab.fill("#box textarea", text)
    tab.press("#box textarea", "Enter")


def test_a_race_fills_both_columns_ends_in_a_verdict_and_a_second_turn_follows(browser, tiny_address):
    tab = visit(browser, tiny_address)
    say(tab, "hello")
    tab.wait_for_selector("#plain .reply .t.plain")
    tab.wait_for_selector("#speculative .reply .t.accepted")
    tab.wait_for_function(DONE)
    assert "identical" in tab.inner_text("#verdict")
    assert tab.inner_text("#plain .reply") == tab.inner_text("#speculative .reply") != ""
    assert "p = " in tab.get_attribute("#speculative .reply .t", "title")
    assert tab.input_value("#box textarea") == ""
    say(tab, "and then?")
    tab.wait_for_function("document.querySelectorAll('#history .said.user').length === 2")
    tab.wait_for_function(DONE)
    tab.click("#edit")
    tab.wait_for_function("document.querySelector('#box textarea').value === 'and then?'")
    tab.click("#clear")
    tab.wait_for_function("!document.querySelector('#history .said')")
    assert tab.problems == []


def test_escape_stops_and_the_partial_text_stays(browser, stub):
    arena, address = stub
    arena.gate.clear()
    arena.limit = 2
    tab = visit(browser, address)
    say(tab, "hello")
    tab.wait_for_selector("#speculative .reply .t")
    tab.keyboard.press("Escape")
    tab.wait_for_function("document.querySelector('#verdict .verdict')?.innerText.includes('stopped')")
    assert tab.inner_text("#speculative .reply").split() == ["one", "two"] and tab.problems == []


def test_a_blank_enter_sends_nothing_and_shift_enter_is_a_new_line(browser, stub):
    arena, address = stub
    tab = visit(browser, address)
    say(tab, "   ")
    tab.fill("#box textarea", "a")
    tab.press("#box textarea", "Shift+Enter")
    tab.keyboard.type("b")
    tab.press("#box textarea", "Enter")
    tab.wait_for_function(DONE)
    assert [asked[0] for asked in arena.asked] == ["a\nb"]


def test_what_is_typed_faster_than_the_server_answers_is_kept(browser, stub):
    """A80: Enter takes what is there at that moment, a second one ends the reply and sends, and what
    comes back, because it could not be sent, goes in front of what is typed by then."""
    arena, address = stub
    tab, value = visit(browser, address), "document.querySelector('#box textarea').value"
    arena.gate.clear()
    tab.focus("#box textarea")
    for n, said in enumerate(("one", "two")):
        tab.keyboard.type(said)
        tab.keyboard.press("Enter")
        tab.keyboard.type("x")
        while len(arena.asked) <= n:
            tab.wait_for_timeout(20)
        assert tab.evaluate(value) == "x"
        tab.keyboard.press("Backspace")
    assert [asked[0] for asked in arena.asked] == ["one", "two"]
    arena.pair = None
    tab.keyboard.type("three")
    tab.keyboard.press("Enter")
    tab.keyboard.type("x")
    tab.wait_for_function(f"{value} === 'three\\nx'")
    assert tab.problems == []


def test_the_pairs_say_what_is_here_once_one_was_fetched(browser, monkeypatch):
    page, address = serve(Stage(StubArena()))
    entry = SimpleNamespace(name="x", size_bytes=2e9, on_disk=False, note="a pair")
    monkeypatch.setattr(page_app, "catalogue", lambda: [entry])
    tab = visit(browser, address)
    entry.on_disk, page.stage.status = True, "x is ready"
    tab.wait_for_function("document.querySelector('.banner').innerText.includes('x is ready')")
    tab.click("#models button")
    for _ in range(100):  # a list that is open stays as it was
        tab.click("#pair input")
        tab.wait_for_timeout(200)
        if "2.0 GB · here" in tab.inner_text("#pair"):
            break
        tab.keyboard.press("Escape")
        tab.wait_for_timeout(200)
    assert "2.0 GB · here" in tab.inner_text("#pair") and tab.problems == []
    page.blocks.close()


def test_drafts_that_fit_are_offered_and_go_into_the_boxes(browser, stub):
    """A86: with names that are markup."""
    from mlx_spec.advise import Advice

    arena, address = stub
    offered = [Advice("org/small", 3, 1.5, (0.8,), 0.1), Advice(f"org/{EVIL[1]}", c=0.3), Advice("prompt lookup"),
               Advice(f"org/other {EVIL[1]}", error="the draft has another tokenizer")]
    arena.pair.name = "big"
    arena.advise = lambda: arena.worker.ask(lambda job: (job.tell(("org/small", 3)), job.tell(offered)))
    tab = visit(browser, address)
    tab.click("#models button")
    tab.click("#advise")
    tab.click("#advised label:has-text('org/small')")
    tab.wait_for_function("document.querySelector('#draft textarea, #draft input').value === 'org/small'")
    assert tab.input_value("#target textarea, #target input") == "big"
    shown = tab.inner_text("#advised")
    assert "1.50x predicted, k = 3" in shown and "another tokenizer" in shown and shown.count(EVIL[1]) == 2
    tab.wait_for_function("document.querySelector('.banner').innerText.includes('org/small makes big 1.50x as fast')")
    assert tab.problems == []
    assert tab.evaluate("document.querySelectorAll('#advised img').length") == 0


@pytest.mark.parametrize("formatted", [False, True])
def test_nothing_that_is_written_runs(browser, stub, formatted):
    """A86, in both views; A85: and it is shown."""
    arena, address = stub
    arena.words = tuple(f"{evil}\n\n" for evil in EVIL) + ("It costs $5 today and $7 tomorrow.", "\n\n`<b>` $$x^2$$")
    tab = visit(browser, address)
    if formatted:
        tab.click("#formatted input")
    for _ in range(2):  # the second time, the first is among the earlier turns
        say(tab, " ".join(EVIL))
        tab.wait_for_function("document.querySelector('#verdict .verdict')?.innerText.includes('so far')")
        tab.wait_for_function(DONE)
    column = "#speculative .answer" if formatted else "#speculative .reply"
    tab.wait_for_function(f"document.querySelector('{column}')?.innerText.includes('$7')")
    time.sleep(0.5)
    elements = "[...document.querySelectorAll('#race *, #history *, #told *')]"
    found = tab.evaluate(f"{elements}.flatMap(e => [...e.attributes].map(a => a.name + '=' + a.value))")
    assert not [a for a in found if a.startswith("on") or "javascript:" in a] and tab.problems == []
    shown, told = tab.inner_text(column), tab.inner_text("#told" if formatted else "#history")
    assert all(evil in shown and told.count(evil) == 3 for evil in EVIL) and "It costs $5 today and $7 tomorrow." in shown
    assert tab.evaluate("document.querySelectorAll('#race script, #race img, #history script, #history img, #told script, #told img').length") == 0
    if formatted:
        assert tab.evaluate(f"document.querySelectorAll('{column} .katex').length") > 0


def test_two_tabs_queue_and_leaving_one_ends_its_reply_only(browser, stub):
    arena, address = stub
    arena.gate.clear()
    first, second = visit(browser, address), visit(browser, address)
    say(first, "my word is plum")
    while not arena.asked:
        first.wait_for_timeout(20)
    say(second, "what is my word?")
    second.wait_for_function("document.querySelector('#place').innerText.includes('1 before you')")
    assert "plum" not in second.content()
    first.close()
    second.wait_for_function("!document.querySelector('#place').innerText.includes('before you')")  # the first one's has ended
    arena.gate.set()
    second.wait_for_function(DONE)
    assert "three" in second.inner_text("#speculative .reply")


def test_a_pair_that_fails_leaves_a_banner_and_the_old_pair_answering(browser, tiny_address):
    tab = visit(browser, tiny_address)
    tab.click("#models button")
    tab.fill("#target textarea, #target input", "bad")
    tab.click("#load")
    tab.wait_for_function("document.querySelector('.banner').innerText.includes('tiny still answers')")
    say(tab, "hello")
    tab.wait_for_function(DONE)
    assert tab.problems == []


def test_at_390_pixels_the_columns_stack_and_nothing_sticks_out(browser, stub):
    _, address = stub
    tab = visit(browser, address, width=390)
    say(tab, "hello " * 30)
    tab.wait_for_function(DONE)
    plain, speculative = tab.evaluate("['plain', 'speculative'].map(n => document.getElementById(n).getBoundingClientRect().toJSON())")
    assert speculative["top"] >= plain["bottom"] and plain["width"] <= 390
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_long_conversation_scrolls_in_itself_and_the_columns_stay_in_view(browser, stub):
    tab = visit(browser, stub[1])
    assert not tab.is_visible("#plots")  # nothing to draw yet
    say(tab, "word " * 5000)
    tab.wait_for_function(DONE)
    tab.wait_for_function(IN_VIEW)
    assert tab.is_visible("#plots") and tab.is_visible(".legend")
    top = tab.evaluate(f"{RACE}.top")
    tab.click("#formatted input")
    tab.wait_for_selector("#told .said")
    tab.wait_for_selector(".legend", state="hidden")  # it explains colours that are not shown now
    tab.wait_for_function(f"Math.abs({RACE}.top - {top}) < 2")  # the same place, either way


def test_the_columns_are_those_of_the_mode(browser, stub):
    tab = visit(browser, stub[1])
    tab.click("#mode label:has-text('plain')")
    tab.wait_for_selector("#speculative", state="hidden")
    say(tab, "hello")
    tab.wait_for_function("document.querySelector('#plain .reply').innerText.includes('three')")
    tab.click("#mode label:has-text('race')")
    tab.wait_for_selector("#speculative")


CONTRASTS = r"""() => {
  const light = (c) => c.map((v) => (v / 255 <= .03928 ? v / 255 / 12.92 : ((v / 255 + .055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const numbers = (css) => css.match(/[\d.]+/g).map(Number);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const c = numbers(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > .9) return c.slice(0, 3);
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll(".gradio-container *")].filter((e) => e.checkVisibility() && e.offsetWidth &&
    [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())).map((e) => {
      const [a, b] = [light(numbers(getComputedStyle(e).color).slice(0, 3)), light(ground(e))];
      return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), e.innerText];
    }).filter(([contrast]) => contrast < 4.5);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(browser, stub, scheme):
    """A contrast of 4.5, as WCAG 2 asks for."""
    tab = visit(browser, stub[1], scheme=scheme)
    assert tab.evaluate("document.body.classList.contains('dark')") == (scheme == "dark")
    say(tab, "hello")
    tab.wait_for_function(DONE)
    assert tab.evaluate(CONTRASTS) == []
