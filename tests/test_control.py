"""The controller in a simulated world: rounds with a known acceptance, a known cost and no model."""

import random

import pytest
import tiny
from helpers import Scripted, decode, pair

from mlx_spec import engine, request
from mlx_spec.control import (DRAFT, FIRST_WAIT, KEPT_ROUNDS, LARGEST, LOOKUP, LOOKUP_KS, PRIOR_ROUNDS, Auto, Choice, Evidence, Fixed,
                              Learnt)
from mlx_spec.costs import Costs, expected
from mlx_spec.pairs import Pair

V = {  # a pass over m rows: memory-bound, as published for an M4 Pro, and where every row costs
    "flat": (1.0, *(1.05 for _ in range(8))),
    "M4": (1.0, 1.1, 1.2, 1.35, 1.5, 1.8, 2.0, 2.2, 2.5),
    "steep": (1.0, 1.8, 2.5, 3.2, 4.0, 4.8, 5.5, 6.2, 7.0),
}


def world(auto, costs, acceptance, tokens=1000, skip=32, seed=0, matched=lambda length: 0, slow=lambda choice: 1.0, lag=0):
    """Tokens a second past the first `skip`, and the choices. acceptance: by source, of every place."""
    draw, spent, length, marks, choices, late = random.Random(seed), 0.0, 100, (0.0, 0), [], []
    limits = {source: LARGEST for source in acceptance}
    auto.begin()
    while length < 100 + tokens:
        choice = auto.choose(length, limits, matched(length))
        accepted = 0
        while accepted < choice.k and draw.random() < acceptance[choice.source]:
            accepted += 1
        drafting = costs.draft_s(choice.k) if choice.source == DRAFT else 0.0
        seconds = (drafting + costs.rows_s[choice.k]) * slow(choice)
        late.append((choice, accepted, seconds))
        if len(late) > lag:
            auto.learn(*late.pop(0))
        spent, length = spent + seconds, length + accepted + 1
        choices.append(choice)
        if length <= 100 + skip:
            marks = spent, length - 100
    return (length - 100 - marks[1]) / (spent - marks[0]), choices


def auto(costs, learnt=None, **options):
    return Auto(lambda: costs, learnt or Learnt(), **options)


def best_fixed(costs, a):
    return max(expected([a] * k, k) / (costs.draft_s(k) + costs.rows_s[k]) for k in range(LARGEST + 1))


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("curve", V)
def test_auto_is_as_good_as_the_best_fixed_k(curve, lag):
    ratios = []
    for c in (0.02, 0.05, 0.15, 0.3):
        for a in (0.0, 0.5, 0.7, 0.8, 0.9, 0.97):
            costs = Costs(V[curve], c)
            found = sum(world(auto(costs), costs, {DRAFT: a}, seed=s, lag=lag)[0] for s in range(3)) / 3
            ratios.append(found / best_fixed(costs, a))
    assert sum(ratios) / len(ratios) > 0.985 and min(ratios) > 0.95


@pytest.mark.parametrize("curve", V)
@pytest.mark.parametrize("c, a", [(0.1, 0.0), (0.3, 0.0), (1.0, 0.9), (1.0, 0.0), (0.1, 0.02)])
def test_a_useless_or_slow_draft_costs_nothing(curve, c, a):
    """A06, A08: at least 0.98 of plain decoding after the first 32 tokens."""
    costs = Costs(V[curve], c)
    found = [world(auto(costs), costs, {DRAFT: a}, tokens=256, seed=s)[0] for s in range(5)]
    assert sum(found) / 5 > 0.98 and min(found) > 0.96


@pytest.mark.parametrize("curve", V)
def test_a_draft_of_no_use_is_left_before_it_has_cost_three_tokens(curve):
    """From its first token on, with nothing known of it."""
    costs = Costs(V[curve], 0.07)
    tokens = 48
    assert world(auto(costs), costs, {DRAFT: 0.0}, tokens=tokens, skip=0)[0] > 1 - 3 / tokens


def test_a_draft_as_slow_as_its_target_is_not_even_tried():
    costs = Costs(V["M4"], 1.0)
    assert {c.k for c in world(auto(costs), costs, {DRAFT: 0.9})[1]} == {0}


def test_parked_probes_get_rarer_and_a_draft_that_has_become_good_is_found():
    costs, learnt = Costs(V["M4"], 0.1), Learnt()
    _, choices = world(auto(costs, learnt), costs, {DRAFT: 0.0}, tokens=600)
    probes = [i for i, c in enumerate(choices) if c.probe]
    gaps = [b - a for a, b in zip(probes, probes[1:])]
    assert len(probes) >= 4 and all(b >= 1.9 * a for a, b in zip(gaps, gaps[1:])) and all(choices[i].k == 1 for i in probes)
    speed, later = world(auto(costs, learnt), costs, {DRAFT: 0.9}, tokens=600, skip=100)
    assert speed > 0.95 * best_fixed(costs, 0.9) and sum(c.k > 2 for c in later[-50:]) == 50


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("a", [0.1, 0.36, 0.5])
def test_in_short_replies_too_probes_lose_a_hundredth_at_most(a, lag):
    """Where every row costs, a draft that is right now and then looks promising in each probe; with a second round in
    flight two are made before one is judged."""
    costs, learnt = Costs(V["steep"], 0.1), Learnt()
    world(auto(costs, learnt), costs, {DRAFT: a}, tokens=300, lag=lag)  # until it is parked
    found = [world(auto(costs, learnt), costs, {DRAFT: a}, tokens=64, skip=0, seed=s, lag=lag)[0] for s in range(20)]
    assert sum(found) / 20 > 0.985


@pytest.mark.parametrize("took", [1.2, 3.6, 1000.0])
def test_what_a_draft_reads_again_counts_as_lost_by_its_probe(took):
    """A draft model that was left alone for long; one round that something else disturbed does not count for ever."""
    learnt = Learnt()
    controller = auto(Costs(V["M4"], 0.1), learnt)
    controller.begin(), controller.choose(100, {DRAFT: LARGEST}, 0)
    controller.learn(Choice(1, probe=True), 0, took)
    owed = learnt.of(DRAFT, 0).paid - learnt.rounds
    assert 10 < owed < 500 and owed == pytest.approx(100 * (min(took, 4 * 1.2) - 1), rel=0.05)
    reproducible = auto(Costs(V["M4"], 0.1), Learnt(), clocked=False)
    reproducible.begin(), reproducible.choose(100, {DRAFT: LARGEST}, 0)
    reproducible.learn(Choice(1, probe=True), 0, took)
    assert reproducible.learnt.of(DRAFT, 0).paid - 1 == pytest.approx(20)


def test_what_one_reply_taught_the_next_one_begins_with():
    costs, learnt = Costs(V["M4"], 0.1), Learnt()
    world(auto(costs, learnt), costs, {DRAFT: 0.0})
    assert auto_first(costs, learnt).k == 0 < auto_first(costs, Learnt()).k


def auto_first(costs, learnt):
    controller = auto(costs, learnt)
    controller.begin()
    return controller.choose(100, {DRAFT: LARGEST}, 0)


def test_the_task_sets_the_first_k():
    """IBM's guide: 3-4 tokens for prose, 6-8 for code, with a memory-bound target and a small draft."""
    costs = Costs((1.0, *(1 + 0.06 * m for m in range(1, 9))), 0.05)
    assert 3 <= auto_first(costs, Learnt("prose")).k <= 5 and 6 <= auto_first(costs, Learnt("code")).k <= 8


def test_k_shrinks_with_depth():
    deep = Costs(tuple(1.0 + 1.2 * m for m in range(1, 10)), 0.1, 0.0, 4096)
    costs = Costs(V["flat"], 0.1, 0.0, 256, deep)
    near, far = (auto(costs) for _ in range(2))
    near.begin(), far.begin()
    assert near.choose(200, {DRAFT: LARGEST}, 0).k > far.choose(6000, {DRAFT: LARGEST}, 0).k


def test_the_clock_corrects_costs_that_are_wrong():
    """Drafting takes three times what was measured: with k = 4 it no longer pays."""
    costs = Costs(V["M4"], 0.1)
    slow = lambda choice: 1.0 if choice.k == 0 else 2.5  # noqa: E731
    _, clocked = world(auto(costs), costs, {DRAFT: 0.7}, slow=slow)
    _, blind = world(auto(costs, clocked=False), costs, {DRAFT: 0.7}, slow=slow)
    assert all(c.k == 0 or c.probe for c in clocked[-100:]) and all(c.k > 0 for c in blind[-100:])


def test_one_stray_round_changes_little():
    learnt = Learnt()
    for _ in range(10):
        learnt.time(DRAFT, 4, 1.0)
    learnt.time(DRAFT, 4, 1000.0)
    assert learnt.pace_of(DRAFT, 4) < 1.03


def test_lookup_is_used_where_it_matches_and_pays():
    costs = Costs(V["M4"], None)
    half = lambda length: 8 if length // 50 % 2 else 0  # noqa: E731
    speed, choices = world(auto(costs), costs, {LOOKUP: 0.9}, matched=half)
    assert speed > 1.3 and {c.source for c in choices if c.k} == {LOOKUP}
    assert world(auto(costs), costs, {LOOKUP: 0.0}, matched=half)[0] > 0.98


def test_of_two_sources_the_faster_one_is_used_round_by_round():
    costs = Costs(V["M4"], 0.3)
    half = lambda length: 8 if length // 50 % 2 else 0  # noqa: E731
    _, choices = world(auto(costs), costs, {DRAFT: 0.8, LOOKUP: 0.9}, matched=half)
    assert {c.source for c in choices if c.matched} == {LOOKUP} and sum(c.k > 0 for c in choices if not c.matched) > 50


def test_few_shapes_occur():
    costs = Costs(V["M4"], 0.05)
    _, choices = world(auto(costs), costs, {DRAFT: 0.75, LOOKUP: 0.8}, tokens=2000, matched=lambda n: n % 3 * 4)
    assert len({(c.k, c.source) for c in choices[50:]}) <= 9


def test_acceptance_of_a_place_that_was_never_reached_is_that_of_the_one_before():
    found = Evidence(0.5)
    for _ in range(60):
        found.see(Choice(1), 1)
    assert found.acceptance()[0] > 0.8 and found.acceptance()[7] == pytest.approx(found.acceptance()[0])


def test_earlier_replies_weigh_as_so_many_rounds_at_most():
    learnt = Learnt()
    found = learnt.of(DRAFT, 0)
    for _ in range(200):
        found.see(Choice(1), 1)
    learnt.begin()
    assert found.judged[0] == pytest.approx(KEPT_ROUNDS) and found.acceptance()[0] > 0.95


def test_a_parked_draft_that_has_become_good_is_back_two_probes_later():
    costs, learnt = Costs(V["M4"], 0.1), Learnt()
    world(auto(costs, learnt), costs, {DRAFT: 0.0}, tokens=400)
    choices = world(auto(costs, learnt), costs, {DRAFT: 1.0}, tokens=200)[1]
    first = next(i for i, c in enumerate(choices) if c.probe)
    back = next(i for i, c in enumerate(choices) if c.k and not c.probe)
    assert back - first <= 3


def test_a_probe_that_stood_makes_what_was_known_count_less():
    found = Evidence(0.7)
    for _ in range(100):
        found.see(Choice(1), 0)
    before = found.judged[0]
    found.see(Choice(1, probe=True), 1)
    assert found.judged[0] < 0.8 * before and found.idle == found.wait == FIRST_WAIT


def test_a_lookups_round_time_is_a_lookups():
    learnt = Learnt()
    one = auto(Costs(V["M4"], 0.1), learnt)
    one.begin(), one.choose(100, {DRAFT: LARGEST, LOOKUP: LARGEST}, 8)
    for _ in range(40):
        one.learn(Choice(4, LOOKUP, 8), 4, 3 * V["M4"][4])
        one.learn(Choice(0), 0, 1.0)
    assert learnt.pace_of(LOOKUP, 4) > 1.3 * learnt.pace_of(DRAFT, 4)


def test_what_is_taken_for_granted_of_a_lookup_weighs_more_than_of_a_draft():
    learnt = Learnt()
    assert [learnt.of(s, 4).judged[0] for s in (DRAFT, LOOKUP)] == [PRIOR_ROUNDS[DRAFT], PRIOR_ROUNDS[LOOKUP]]


def test_a_slow_draft_says_nothing_of_lookups():
    learnt = Learnt()
    for _ in range(200):
        learnt.time(DRAFT, 4, 3.0)
        learnt.time(DRAFT, 0, 1.0)
    assert learnt.pace_of(LOOKUP, 4) == learnt.pace_of(DRAFT, 0) < 0.5 * learnt.pace_of(DRAFT, 3)


def test_a_machine_that_is_slower_for_all_changes_no_choice():
    costs = Costs(V["M4"], 0.1)
    speed, choices = world(auto(costs), costs, {DRAFT: 0.7}, slow=lambda choice: 2.0)
    assert 2 * speed > 0.95 * best_fixed(costs, 0.7) and sum(c.k == 0 for c in choices) < len(choices) / 10
    learnt = Learnt()
    for _ in range(20):
        learnt.time(DRAFT, 4, 2.0)
    assert 1.05 < learnt.pace_of(DRAFT, 0) < learnt.pace_of(DRAFT, 4)


def test_k_shrinks_while_one_reply_gets_longer():
    deep = Costs(tuple(1.0 + 1.2 * m for m in range(1, 10)), 0.1, 0.0, 4096)
    one = auto(Costs(V["flat"], 0.1, 0.0, 256, deep))
    one.begin()
    assert one.choose(200, {DRAFT: LARGEST}, 0).k > one.choose(6000, {DRAFT: LARGEST}, 0).k


@pytest.mark.parametrize("gain, k", [(1.01, 0), (1.06, 2)])
def test_a_lookup_must_gain_as_much_as_another_k(gain, k):
    one = auto(Costs((1.0, 9.0, 1.75 / gain, *[9.0] * 6), None))  # of a match of 3, 1.75 tokens are expected
    one.begin()
    assert one.choose(100, {LOOKUP: LARGEST}, 3).k == k


def test_lookups_reach_the_largest_k_and_are_probed_with_the_smallest():
    costs = Costs(V["flat"], None)
    assert LARGEST in {c.k for c in world(auto(costs), costs, {LOOKUP: 0.97}, matched=lambda n: 8)[1]}
    probes = {c.k for c in world(auto(costs), costs, {LOOKUP: 0.0}, matched=lambda n: 8)[1] if c.probe}
    assert probes == {LOOKUP_KS[0]}


def test_a_place_that_was_never_reached_is_like_the_last_one_that_was():
    found = Evidence(0.7)
    for _ in range(60):
        found.see(Choice(2), 1)
    first, second, third, *_ = found.acceptance()
    assert second < 0.2 < 0.9 < first and third == second


def test_what_was_long_ago_counts_less():
    found = Evidence(0.7)
    for accepted in (1, 0):
        for _ in range(100):
            found.see(Choice(1), accepted)
    assert found.acceptance()[0] < 0.2


# in the engine


@pytest.fixture
def priced(monkeypatch):
    """Costs as if they had been measured: drafts pay."""
    monkeypatch.setattr(request, "measure", lambda pair, again=False: Costs(V["M4"], None if pair.draft is None else 0.05))


@pytest.mark.parametrize("run_ahead", [True, False])
def test_auto_is_the_default_and_changes_no_token(run_ahead, priced):
    for draft in ("same", "noisy", "deep heads", "reduced mlp", None):
        decoder, ids = decode(pair(draft=draft), tiny.PROMPT * 2, max_tokens=80, run_ahead=run_ahead)
        assert isinstance(decoder.controller, Auto)
        assert ids == decode(pair(draft=draft), tiny.PROMPT * 2, max_tokens=80, num_draft_tokens=0)[1]
        assert decoder.stats.drafted > 0 or draft is None


@pytest.mark.parametrize("options", [dict(reproducible=True), dict(temperature=0.7, seed=3), dict(temperature=0.7), dict(temperature=0.7, verify="token")])
def test_a_reproducible_request_looks_at_no_clock_and_at_nothing_earlier(options, priced):
    """A48: nor does one whose result names a seed, drawn or given, that is to give the same text again."""
    p = pair(draft="noisy")
    runs = []
    for tick in (1e-6, 10.0):
        now = [0.0]

        def clock():
            now[0] += tick
            return now[0]

        decoder = engine.Decoder(p, tiny.PROMPT, engine.Options(max_tokens=100, **options), clock=clock, run_ahead=False)
        list(decoder.chunks())
        runs.append([entry[0] for entry in decoder.stats._log])
        options = options | {"seed": decoder.seed}
        p.learnt["prose"] = "spoilt"
    del p.learnt["prose"]
    assert runs[0] == runs[1]


def test_nothing_is_measured_for_a_fixed_k_or_a_target_that_decodes_plainly(monkeypatch):
    def never(pair):
        raise AssertionError("measured")

    monkeypatch.setattr(request, "measure", never)
    decode(pair(), tiny.PROMPT, max_tokens=5, num_draft_tokens=2)
    decode(pair("internlm3", "same"), tiny.PROMPT, max_tokens=5)
    with pytest.raises(AssertionError, match="measured"):
        decode(pair(), tiny.PROMPT, max_tokens=5)


def test_the_time_to_measure_is_in_no_figure_of_the_reply(monkeypatch):
    """A11, A102: the first reply is not slower on paper than it was."""
    now = [0.0]

    def measure(pair):
        now[0] += 1000
        return Costs(V["M4"], 0.05)

    monkeypatch.setattr(request, "measure", measure)
    decoder = engine.Decoder(pair(), tiny.PROMPT, engine.Options(max_tokens=10), clock=lambda: now[0])
    list(decoder.chunks())
    assert now[0] == 1000 and decoder.stats.prompt_s == 0 == decoder.stats.generation_s


@pytest.mark.parametrize("n", [1, 32, 256, 257])
def test_no_length_of_reply_bypasses_the_draft(n, priced):
    """A10: whatever the budget, what the result says was drafted was drafted."""
    decoder, _ = decode(pair(draft="same"), tiny.PROMPT, max_tokens=n)
    assert decoder.stats.mode == "speculative" and (decoder.stats.drafted > 0) == (n > 1)


def test_drafting_stops_where_the_draft_has_read_all_it_can_and_lookup_goes_on(priced):
    """A63: a draft with a context of 64, a target with more, a prompt of 57 tokens."""
    target = tiny.make("llama")
    p = Pair(target, tiny.noisy_copy(target), draft_max_length=64)
    decoder, ids = decode(p, tiny.PROMPT * 3, max_tokens=60)
    assert "the draft" in decoder.stats.mode and "64" in decoder.stats.mode
    assert ids == decode(p, tiny.PROMPT * 3, max_tokens=60, num_draft_tokens=0)[1]


@pytest.mark.parametrize("run_ahead", [True, False])
def test_a_draft_is_asked_for_nothing_past_its_context_whatever_is_in_flight(run_ahead, monkeypatch):
    ends, allowed, target = [], engine.Decoder._allowed, tiny.make("llama")

    def spy(decoder, choice):
        found = allowed(decoder, choice)
        ends.append(decoder._longest() + found.k + 1 if found.drafts else 0)
        return found

    monkeypatch.setattr(engine.Decoder, "_allowed", spy)
    decode(Pair(target, target, draft_max_length=64), tiny.PROMPT * 2, num_draft_tokens=3, max_tokens=60, run_ahead=run_ahead)
    assert 60 < max(ends) <= 64


def test_fixed_and_scripted_choices_are_what_they_say():
    assert Fixed(3).choose(5, {DRAFT: 8}, 0) == Choice(3)
    assert Scripted(2, (4, LOOKUP)).sources == (DRAFT, LOOKUP)


def test_costs_that_decoding_proves_wrong_are_timed_again_once():
    """Timed while something else ran: drafting seemed free."""
    asked, learnt = [], Learnt()

    def costs(again=False):
        asked.append(again)
        return Costs(V["M4"], 0.05)

    for seed in range(3):
        world(Auto(costs, learnt), Costs(V["M4"], 0.05), {DRAFT: 0.97}, seed=seed, slow=lambda choice: 4.0 if choice.k else 1.0)
    assert asked == [False, True, False]
    assert not Learnt().misled
