"""Costs are timed once for a pair's shapes on a machine, and kept."""

import json

import mlx.core as mx
import pytest
import tiny
from helpers import pair

from mlx_spec import costs
from mlx_spec.costs import Costs, best, measure
from mlx_spec.pairs import Pair


@pytest.fixture
def timings(monkeypatch, tmp_path):
    """What was timed; each figure is its number, so that they differ."""
    found = []

    def timed(step, start, seconds):
        step(start)
        found.append(step)
        return float(len(found))

    monkeypatch.setattr(costs, "timed", timed)
    monkeypatch.setattr(costs, "cache_folder", lambda: tmp_path)
    return found


def fresh(draft_seed=7):
    return Pair(tiny.make("llama"), tiny.make("llama", draft_seed))


@pytest.mark.parametrize("name, draft", [
    ("llama", "noisy"), ("llama", "deep heads"), ("llama", "reduced mlp"), ("llama", None), (tiny.TINY_HYB, "noisy"), ("gpt_oss", "noisy")])
def test_every_kind_of_draft_is_timed(name, draft, tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "cache_folder", lambda: tmp_path)
    p = pair(name, draft)
    found = measure(p, again=True)
    assert len(found.rows_s) == len(found.deep.rows_s) == 9 and min(found.rows_s + found.deep.rows_s) > 0
    assert (found.step_s is None) == (draft is None) and (found.c is None) == (draft is None)


def test_a_pair_of_the_same_shapes_is_not_timed_again(timings, tmp_path):
    first = measure(fresh())
    count = len(timings)
    assert count == 1 + 5 + 3 + 2 * 2  # a pass of a second is slow
    assert measure(fresh(draft_seed=8)) == first and len(timings) == count
    measure(Pair(tiny.make("llama"), None))
    assert len(timings) == count + 1 + 5 + 3 and len(list(tmp_path.glob("costs/*.json"))) == 2


def test_timing_again_takes_the_place_of_what_was_stored(timings):
    first = measure(fresh())
    again = measure(fresh(), again=True)
    assert again != first and measure(fresh()) == again


@pytest.mark.parametrize("damage", ["", "{", '{"costs": {"rows_s": 3}}', "[]", '{"costs": {"speed": 1}}'])
def test_a_damaged_file_is_timed_anew(damage, timings, tmp_path):
    measure(fresh())
    count, [path] = len(timings), tmp_path.glob("costs/*.json")
    path.write_text(damage)
    measure(fresh())
    assert len(timings) == 2 * count and json.loads(path.read_text())["costs"]["rows_s"][0]


def test_a_folder_that_cannot_be_written_costs_only_time(timings, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(costs, "cache_folder", lambda: tmp_path / "file")
    assert measure(fresh()).rows_s[0] == 2  # the second figure


def test_the_speed_up_counts_the_start_of_a_round_s_drafting():
    flat = Costs((1.0,) * 9, 0.1, 0.5)
    assert flat.speedup([1.0] * 4, 4) == pytest.approx(5 / (0.5 + 0.4 + 1))
    assert flat.speedup([0.0], 1) == pytest.approx(1 / 1.6)
    assert best(flat, [0.1] * 4) == (0, 1.0)


def test_costs_between_two_depths_lie_on_a_line_and_never_fall():
    deep = Costs((3.0, 2.0), 0.3, 0.0, 4096)
    found = Costs((1.0, 4.0), 0.1, 0.0, 256, deep)
    middle = found.at((256 + 4096) // 2)
    assert middle.rows_s == pytest.approx((2.0, 4.0)) and middle.step_s == pytest.approx(0.2)
    assert found.at(10).rows_s == found.rows_s and found.at(8192).rows_s[0] > 3


def test_fast_models_are_timed_for_every_number_of_rows_and_very_slow_ones_at_one_depth(timings, monkeypatch):
    monkeypatch.setattr(costs, "SLOW_S", 10.0)
    measure(Pair(tiny.make("llama"), None))
    assert len(timings) == 1 + 9 + 3
    monkeypatch.setattr(costs, "PATIENCE_S", 0.0)
    found = measure(fresh())
    assert found.deep is None and found.at(9000) == found and measure(fresh()) == found


def test_a_cost_is_the_best_of_two_stretches_at_least():
    """One stretch alone may be the one that was disturbed."""
    calls = []
    costs.timed(lambda state: calls.append(1) or state, mx.array(0), seconds=0.0)
    assert len(calls) == 1 + 2 + 4


def test_a_round_of_k_drafts_is_a_pass_over_k_and_one_rows():
    assert Costs((1.0, 2.0, 4.0), 0.5).speedup([0.5, 0.5], 1) == pytest.approx(1.5 / 2.5)


def test_a_rounds_start_costs_more_deeper_down():
    found = Costs((1.0, 1.0), 0.1, 0.2, 256, Costs((1.0, 1.0), 0.1, 0.6, 4096))
    assert found.at((256 + 4096) // 2).start_s == pytest.approx(0.4)
