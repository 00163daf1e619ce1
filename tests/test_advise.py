"""Which draft fits: candidates by content, predictions from costs and acceptance, a verdict that may be none."""

import json
import time
from functools import partial

import pytest
import tiny
from helpers import heads, pair
from huggingface_hub import CacheNotFound, scan_cache_dir
from mlx.utils import tree_flatten, tree_unflatten

from mlx_spec import advise as module
from mlx_spec import cli
from mlx_spec.advise import LOOKUP, advise, candidates
from mlx_spec.arena import Arena
from mlx_spec.costs import Costs
from mlx_spec.drafters.saved import save
from mlx_spec.errors import PairError
from mlx_spec.page.stage import Loading, Stage
from mlx_spec.pairs import load
from mlx_spec.prefill import Cancelled
from mlx_spec.types import Options, Token

FLAT = (1.0, *(1.02 for _ in range(8)))


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """A target whose upper two layers add nothing; of drafts its lower half, a stranger, one with another tokenizer, a broken one."""
    root = tmp_path_factory.mktemp("shelf")
    target = tiny.make("llama", num_hidden_layers=4)
    for layer in target.layers[2:]:
        layer.self_attn.o_proj.weight *= 0
        layer.mlp.down_proj.weight *= 0
    tiny.write_folder(root / "target", model=target, num_hidden_layers=4)
    half = tiny.make("llama")
    own = dict(tree_flatten(target.parameters()))
    half.update(tree_unflatten([(name, own[name]) for name, _ in tree_flatten(half.parameters())]))
    tiny.write_folder(root / "drafts/half", model=half)
    tiny.write_folder(root / "drafts/stranger", seed=9)
    other = tiny.write_folder(root / "drafts/other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"A": 65', '"A": 66').replace('"B": 66', '"B": 65'))
    broken = tiny.write_folder(root / "drafts/broken")
    (broken / "model.safetensors").write_bytes(b"no")
    return root


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No hub cache, short replies, drafts that cost a tenth of a flat target."""
    def empty():
        raise CacheNotFound("none", cache_dir="none")

    monkeypatch.setattr(module, "scan_cache_dir", empty)
    monkeypatch.setattr(module, "TOKENS", 16)
    monkeypatch.setattr(module, "PROMPTS", 2)
    monkeypatch.setattr(module, "measure", lambda pair, again: Costs(FLAT, None if pair.draft is None else 0.1))


def test_every_draft_is_tried_and_what_can_not_be_used_is_said(shelf):
    found = advise(load(str(shelf / "target"), False), [shelf / "drafts"])
    by = {a.draft.rpartition("/")[2]: a for a in found}
    assert set(by) == {LOOKUP, "half", "stranger", "other", "broken"}
    assert "another tokenizer" in by["other"].error and by["broken"].error and by["half"].error is None
    assert all(a.error for a in found[-2:]) and by["half"].acceptance == (1.0,) * 8 and by["half"].c == pytest.approx(0.1)
    usable = [a.speedup for a in found if not a.error]
    assert usable == sorted(usable, reverse=True) and min(usable) >= 1


def test_without_anything_to_look_up_the_prediction_is_that_of_the_costs_and_the_acceptance():
    costs, new = Costs(FLAT, 0.1), [(list(range(20)), list(range(30, 90)))]
    for a in (0.0, 0.3, 0.9):
        k, looked_up, gain = module._predict(costs, (a,) * 8, new)
        assert gain == pytest.approx(max([1.0, *(costs.speedup((a,) * 8, k) for k in range(1, 9))])) and looked_up == 0
        assert (k == 0) == (gain == 1)


def test_lookup_is_predicted_by_replaying_known_replies():
    costs, phrase = Costs(FLAT, None), list(range(40))
    assert module._predict(costs, (), [(list(range(20)), list(range(30, 50)))]) == (0, 0, 1.0)
    drafted, looked_up, gain = module._predict(costs, (), [([*phrase, 50, *phrase[:3]], phrase[3:])])
    assert (drafted, looked_up) == (0, 8) and gain == pytest.approx(37 / (5 * 1.02))


def test_a_draft_and_lookup_gain_together():
    """As `auto` has them: half of the reply is new, and the draft is right about it; half is a copy."""
    costs, phrase, new = Costs(FLAT, 0.1), list(range(40)), list(range(100, 137))
    replies = [([*phrase, 50, *phrase[:3]], [*phrase[3:], *new])]
    _, _, alone = module._predict(costs, (), replies)
    k, looked_up, both = module._predict(costs, (0.8,) * 8, replies)
    own = costs.speedup((0.8,) * 8, k)
    assert both > 1.1 * max(alone, own) and looked_up == 8
    assert both == pytest.approx(74 / (37 / own + 5 * 1.02), rel=0.03)
    assert module._predict(costs, (0.0,) * 8, replies)[::2] == (0, alone)


def test_acceptance_of_a_place_is_of_those_that_got_there():
    A, C = (Token(0, 0.0, origin) for origin in ("accepted", "correction"))
    reply = lambda *_: [C] * 8 + [A, C] * 4 + [A, A, C] + [A, A, A, C] * 2 + [A, A, A, A, Token(0, 0.0, "bonus")]  # noqa: E731
    found = module._try(pair(), "x", reply, [([1, 2], [3, 4])], Costs(FLAT, None), lambda done: None)
    assert found.acceptance == pytest.approx((0.5, 0.5, 0.75, *[1 / 3] * 6)[:8])


def test_a_draft_that_proposes_three_tokens_at_most_is_predicted_for_three():
    p, kept = pair(draft="mlp"), [*[Token(0, 0.0, "accepted")] * 3, Token(0, 0.0, "bonus")] * 4
    found = module._try(p, "x", lambda *_: kept, [(tiny.PROMPT, [1] * 16)], Costs(FLAT, None), lambda done: None)
    assert p.draft.largest == found.k == len(found.acceptance) == 3


@pytest.mark.parametrize("tokens", [15, 16, 17, 18, 19])
def test_what_the_end_of_a_reply_cut_off_was_not_refused(tokens):
    reply = partial(module._reply, Options(max_tokens=tokens))
    known = [(tiny.PROMPT, [t.id for t in reply(pair(draft=None), tiny.PROMPT, 0)])]
    assert set(module._try(pair(draft="same"), "x", reply, known, Costs(FLAT, None), lambda done: None).acceptance) == {1.0}


def test_a_gain_within_the_noise_is_no_advice():
    assert not module.Advice("x", 2, 1.01).helps and module.Advice("x", 2, 1.05).helps and not module.Advice("x", 0, 1.5).helps


def test_a_lookup_of_k_is_a_pass_over_k_and_one_rows():
    phrase, slope = list(range(40)), Costs(tuple(1 + 0.1 * m for m in range(9)), None)
    _, k, gain = module._predict(slope, (), [([*phrase, 50, *phrase[:3]], phrase[3:])])
    assert k == 8 and gain == pytest.approx(37 / (5 * 1.8))


def test_a_saved_draft_needs_no_tokenizer_of_its_own(shelf, tmp_path):
    p, name = load(str(shelf / "target"), False), str(tmp_path / "head")
    save(tmp_path / "head", heads(p.target), facts={"target": str(shelf / "target")})
    found = {a.draft: a for a in advise(p, [name])}
    assert found[name].error is None and found[name].c == pytest.approx(0.1)


def test_a_draft_that_adds_nothing_does_not_hide_what_helps(monkeypatch):
    parts = dict(_prompts=lambda names: [], candidates=lambda target, folders: ["d"], locate=lambda name: None,
                 _check=lambda pair, path: None, join=lambda alone, name: pair(),
                 _predict=lambda costs, acceptance, replies: (0, 8, 1.30 if costs.step_s is None else 1.31))
    for name, value in parts.items():
        monkeypatch.setattr(module, name, value)
    found = advise(pair(draft=None))
    assert found[0].draft == LOOKUP and found[0].helps and found[1].speedup == 1.31


def test_candidates_are_smaller_than_the_target_and_named_once(shelf):
    names = list(candidates(str(shelf / "target"), [shelf / "drafts", shelf / "drafts/half", shelf]))
    assert [n.rpartition("/")[2] for n in names].count("half") == 1 and str(shelf / "target") not in names
    with pytest.raises(Exception, match="holds no models"):
        list(candidates(str(shelf / "target"), [shelf / "target" / "none"]))


def test_what_the_hubs_cache_holds_whole_is_a_candidate(shelf, tmp_path, monkeypatch):
    cache = tmp_path / "hub"
    for name, files in {"whole": True, "part": False}.items():
        snapshot = cache / f"models--org--{name}/snapshots/{'a' * 40}"
        snapshot.parent.mkdir(parents=True)
        (cache / f"models--org--{name}/refs").mkdir()
        (cache / f"models--org--{name}/refs/main").write_text("a" * 40)
        tiny.write_folder(snapshot)
        if not files:
            (snapshot / "model.safetensors").unlink()
    monkeypatch.setattr(module, "scan_cache_dir", lambda: scan_cache_dir(cache))
    found = {f"org/{n}": cache / f"models--org--{n}/snapshots/{'a' * 40}" for n in ("whole", "part")}
    monkeypatch.setattr(module, "cached_repo", lambda name: found[name] if (found[name] / "model.safetensors").exists() else None)
    assert list(candidates(str(shelf / "target"))) == ["org/whole"]


def test_the_command_prints_a_table_and_the_winners_command(shelf, capsys, monkeypatch):
    monkeypatch.setattr(module, "measure", lambda pair, again: Costs(FLAT, None if pair.draft is None else 0.0))
    target = str(shelf / "target")
    assert cli.main(["advise", "--target", target, "--drafts", str(shelf / "drafts"), "--prompts", "code"]) == 0
    shown = capsys.readouterr()
    assert "can't be used: the draft has another tokenizer" in shown.out and "trying" in shown.err
    *_, said, command = shown.out.strip().splitlines()
    assert said.startswith(f"drafts/half makes {shelf.name}/target ") and "\ndrafts/half " in shown.out
    assert command.startswith(f"mlx_spec generate --target {target} --draft {shelf}/drafts/half ")


def test_where_lookup_alone_wins_the_command_is_one_without_a_draft(shelf, capsys, monkeypatch):
    """Also where the target's name is that of a pair with a draft."""
    monkeypatch.setattr(module, "advise", lambda *_: [module.Advice(LOOKUP, 4, 1.2), module.Advice("org/small", 0, 1.2, (0.1,), 0.4)])
    target = str(shelf / "target")
    assert cli.main(["advise", "--target", target]) == 0
    *_, said, command = capsys.readouterr().out.strip().splitlines()
    assert said == f"prompt lookup without a draft makes {shelf.name}/target 1.20x as fast, as predicted" and "--draft none " in command
    assert load(target, "none").draft is None
    with pytest.raises(PairError, match="got True"):
        load(target, True)


def test_the_command_can_be_pasted_whatever_a_folder_is_called(shelf, capsys, monkeypatch):
    monkeypatch.setattr(module, "advise", lambda *_: [module.Advice("/my models/a b", 2, 1.5, (0.8,), 0.1)])
    assert cli.main(["advise", "--target", str(shelf / "target")]) == 0
    assert " --draft '/my models/a b' --prompt" in capsys.readouterr().out


def test_where_none_helps_the_command_says_so(shelf, capsys, monkeypatch):
    """A06: a draft that loses is not recommended."""
    steep = tuple(float(m) for m in range(1, 10))
    monkeypatch.setattr(module, "measure", lambda pair, again: Costs(steep, None if pair.draft is None else 1.0))
    arguments = ["advise", "--target", str(shelf / "target"), "--drafts", str(shelf / "drafts/half")]
    assert cli.main(arguments) == 0 and "none helps here" in capsys.readouterr().out
    assert cli.main([*arguments, "--json"]) == 0
    assert all(a["speedup"] == 1 for a in json.loads(capsys.readouterr().out))


def test_wrong_prompts_are_said_before_anything_is_loaded(capsys):
    assert cli.main(["advise", "--target", "nowhere/none", "--prompts", "poems"]) == 1
    assert "poems" in capsys.readouterr().err


def test_a_search_that_is_cancelled_ends_within_a_round(shelf):
    tried, half = [], str(shelf / "drafts/half")
    with pytest.raises(Cancelled):
        advise(load(str(shelf / "target"), False), [shelf / "drafts"], on_prompt=lambda *now: tried.append(now),
               should_cancel=lambda: (half, 0) in tried)
    assert tried[:2] == [(LOOKUP, 0), (LOOKUP, 1)] and tried[-1] == (half, 0)


@pytest.fixture
def page(shelf, monkeypatch):
    """With the target loaded, and the drafts as if they were the hub cache's."""
    app = pytest.importorskip("app", reason="the page needs gradio: pip install 'mlx-spec[app]'")
    names = list(candidates(str(shelf / "target"), [shelf / "drafts"]))
    monkeypatch.setattr(module, "candidates", lambda target, folders: names)
    stage = Stage(Arena(), lambda *_: None)
    stage.load(str(shelf / "target")).join(60)
    assert stage.ready, stage.status
    yield app.Page(stage)
    stage.arena.worker.close()


def test_the_page_offers_the_same_list(shelf, page, monkeypatch):
    monkeypatch.setattr(module, "measure", lambda pair, again: Costs(FLAT, None if pair.draft is None else 0.0))
    assert page.drafts()["visible"] is False
    assert 'class="banner loading"' in page.advise()[0]
    wait(page)
    offered, half = page.news()[1], str(shelf / "drafts/half")
    found = {a.draft: a for a in advise(load(str(shelf / "target"), False), [shelf / "drafts"])}
    assert offered["visible"] and offered["choices"][0] == (f"drafts/half · {found[half].speedup:.2f}x predicted, k = {found[half].k}", half)
    assert {name for _, name in offered["choices"]} == {half, str(shelf / "drafts/stranger"), "none"}
    assert "another tokenizer" in offered["info"] and page.stage.kind == "ready" and ">drafts/half makes" in page.banner_html()
    for draft in (half, "none"):
        page.load(None, *page.chosen(draft))
        wait(page)
        assert page.stage.kind == "ready" and (page.stage.arena.pair.draft is None) == (draft == "none")
    assert "without a draft is ready" in page.stage.status
    assert page.advise()[1]["visible"] is False  # what was found before is not shown as if it were new
    page.cancel_load()
    wait(page)


def test_a_search_on_the_page_can_be_cancelled_and_the_pair_still_answers(shelf, page, monkeypatch):
    monkeypatch.setattr(module, "TOKENS", 2000)
    page.advise()
    while "trying" not in page.stage.status:
        time.sleep(0.01)
    page.cancel_load()
    wait(page)
    assert page.stage.status == f"the search for a draft was cancelled · {shelf.name}/target still answers"
    assert not page.stage.advice[1] and page.stage.ready


def test_what_is_under_way_is_not_ended_by_a_search(page):
    page.stage._loading = Loading("x")
    with pytest.warns(UserWarning, match="under way"):
        page.advise()
    page.stage._loading = None


def test_without_a_pair_the_page_says_to_load_one(page):
    page.stage.arena, arena = None, page.stage.arena
    with pytest.warns(UserWarning, match="load the target first"):
        page.advise()
    page.stage.arena = arena


def wait(page):
    while page.stage.loading:
        time.sleep(0.01)
