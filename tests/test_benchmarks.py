"""The arithmetic of the benchmarks' reports, on made-up records: nothing is timed."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import arms as bench  # noqa: E402
import draft_report as report  # noqa: E402
from draft_report import Arm  # noqa: E402
from drafters import arms_of  # noqa: E402
from helpers import pair  # noqa: E402

from mlx_spec.engine import Decoder  # noqa: E402

HEADS, PRUNED = "heads", "pruned"
SECONDS = {  # of ten tokens, where a target step takes 0.1 s: by who, draft and k
    ("plain", HEADS, 0): 1.0, ("plain", PRUNED, 0): 1.2, ("ours", HEADS, 1): 0.8, ("ours", HEADS, 2): 0.7,
    ("ours", PRUNED, 1): 1.25, ("theirs", PRUNED, 1): 1.4,
}
ROUNDS = dict(ids=list(range(10)), rounds=4, drafted_by_position=[4, 4], judged=[4, 3], kept=[3, 3], difference=None)
BUG = {"kind": "BUG", "at": 3, "gap": 2.0}
COSTS = {"rows_s": [0.1, 0.12, 0.14], "step_s": {HEADS: 0.01, PRUNED: 0.05}}


def arm(who, draft, k):
    return Arm(who, bench.Setting(draft, k, 0.0))


ARMS = [arm(*key) for key in SECONDS]
BEST = arm("ours", HEADS, 2)


def records(slower=(1.0, 1.1, 1.2), **changes):
    """One for each prompt, each so many times slower as a whole; changes: of the best arm's runs."""
    found = []
    for turn, factor in enumerate(slower):
        runs = {str(arm(*key)): ROUNDS | {"seconds": factor * s} for key, s in SECONDS.items()}
        runs[str(BEST)] |= changes
        costs = {"rows_s": [factor * s for s in COSTS["rows_s"]],
                 "step_s": {name: factor * s for name, s in COSTS["step_s"].items()}}
        found.append({"prompt": turn, "prompt_tokens": 5, "costs": costs, "runs": runs})
    return found


def figures(made):
    return report.figures_of(made, ARMS)


def test_a_draft_is_judged_only_where_those_before_it_were_kept():
    origins = ["accepted", "accepted", "bonus", "accepted", "correction", "correction", "plain", "accepted"]
    assert bench.by_position(origins) == {"judged": [4, 2], "kept": [3, 1]}


def test_acceptance_by_place_is_pooled_over_replies_of_different_depths():
    runs = [{"judged": [4, 2], "kept": [2, 1]}, {"judged": [6], "kept": [0]}]
    assert report.acceptance(runs) == [0.2, 0.5]


def test_the_counts_of_a_real_reply_fit_together():
    run = bench.ours(pair(), [1, 2, 3], bench.Setting("noisy", 3, 0.0), 20, 0)
    drafted = run["drafted_by_position"]
    assert len(run["ids"]) == 20 and sum(run["kept"]) == run["accepted"] and sum(drafted) == run["drafted"]
    assert all(a <= b <= c for a, b, c in zip(run["kept"], run["judged"], drafted))


def test_the_predicted_gain_is_tokens_per_round_over_k_c_and_v():
    costs = report.median_costs(records(), HEADS)
    assert costs.c == pytest.approx(0.1) and [costs.v(m) for m in (1, 2, 3)] == pytest.approx([1, 1.2, 1.4])
    assert report.predicted_gain(ROUNDS, costs) == pytest.approx((10 / 4) / (2 * 0.1 + 1.4))
    shorter = ROUNDS | {"drafted_by_position": [4, 3]}
    assert report.predicted_gain(shorter, costs) == pytest.approx(10 / (3 * (2 * 0.1 + 1.4) + 0.1 + 1.2))


def test_gains_are_over_the_median_of_the_plain_timings_and_a_slow_prompt_changes_none():
    found = figures(records())
    assert found[BEST]["gain"] == {name: pytest.approx(1.1 / 0.7) for name in ("median", "low", "high")}
    assert found[BEST]["measured/predicted"]["median"] == pytest.approx(1.1 / 0.7 / (2.5 / 1.6))
    assert found[BEST]["tokens_per_round"] == 2.5 and found[BEST]["acceptance"] == [0.75, 1.0]
    assert report.plain_steps(records(), 0.0) == pytest.approx(1.1)


def test_the_best_arm_is_the_fastest_that_has_a_speed():
    found = figures(records())
    assert report.best(found, "ours", 0.0) == BEST and report.best(found, "ours", 0.8) is None
    assert report.best(found, "ours", 0.0, PRUNED) == arm("ours", PRUNED, 1)
    wrong = figures(records(difference=BUG))
    assert wrong[BEST]["bug"] and report.best(wrong, "ours", 0.0) == arm("ours", HEADS, 1)
    tie = figures(records(difference=BUG | {"kind": "tie"}))
    assert not tie[BEST]["bug"]


def test_ours_and_mlx_lm_are_compared_prompt_by_prompt():
    peer = arm("theirs", PRUNED, 1)
    assert report.paired(records(), BEST, peer)["median"] == pytest.approx(2.0)
    row = report.target_row(figures(records()), records(), 0.0, HEADS)
    assert row[2] == "yes (>= 1.25; aim 1.4: yes)" and row[4] == "yes (>= 0.95)" and row[6] == "yes (lower end > 1)"
    assert report.target_row(figures(records()), records(), 0.0, PRUNED)[2].startswith("NO")


def test_targets_hold_at_their_bounds():
    assert report.reached_gain(1.25, 0.0) == "yes (>= 1.25; aim 1.4: NO)"
    assert report.reached_gain(1.1, 0.8) == "NO (> 1.1)"


def test_the_report_shows_losses_and_no_speed_of_a_wrong_reply(capsys):
    made = records(difference=BUG)
    found = figures(made)
    for show in (report.report_parts, report.report_targets):
        show(found, made)
    report.report_speeds(found)
    lines = capsys.readouterr().out.splitlines()
    wrong, loss = (next(x for x in lines if str(a.setting) in x and "ours" in x)
                   for a in (BEST, arm("ours", PRUNED, 1)))
    assert "BUG" in wrong and "1.571" not in wrong and "best k, a loss" in loss and "0.880" in loss


def test_what_the_training_report_says_is_taken_from_the_folder(tmp_path, capsys):
    facts = {"acceptance_by_step": [0.55, 0.5], "overlap_by_step": [0.6, 0.5], "judged_rows": 321, "training_s": 12.5}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mlx_spec_heads", "mlx_spec": facts}))
    (tmp_path / "model.safetensors").write_bytes(bytes(1234))
    report.report_training({"mine": str(tmp_path), "published": str(tmp_path / "none")})
    shown = capsys.readouterr().out
    assert all(x in shown for x in ("training report", "heads", "0.550 0.500", "321", "1,234", "12.5"))


def test_every_draft_goes_as_far_as_it_can_and_mlx_lm_runs_only_language_models():
    drafts = {"mlp": SimpleNamespace(largest=2, bind=None), PRUNED: SimpleNamespace()}
    found = arms_of({name: SimpleNamespace(draft=d) for name, d in drafts.items()}, [1, 2, 3], [0.0, 0.8])
    counts = {(a.who, a.setting.draft): 0 for a in found}
    for a in found:
        counts[a.who, a.setting.draft] += 1
    assert counts == {("plain", "mlp"): 2, ("ours", "mlp"): 4, ("plain", PRUNED): 2, ("ours", PRUNED): 6,
                      ("theirs", PRUNED): 6}


def test_a_slowed_build_sleeps_for_its_share_of_each_round(monkeypatch):
    import bench_power

    slept, clock = [], iter(range(0, 1000, 10))
    monkeypatch.setattr(bench_power, "time", SimpleNamespace(perf_counter=lambda: next(clock), sleep=slept.append))
    monkeypatch.setattr(Decoder, "_read", bench_power.slowed(0.05))
    run = bench.ours(pair(), [1, 2, 3], bench.Setting("noisy", 3, 0.0), 20, 0)
    assert slept == [0.5] * (run["rounds"] - 1)


@pytest.mark.parametrize("slower, code", [(0.05, 0), (0.0, 1)])
def test_three_builds_take_turns_in_processes_of_their_own_and_only_one_is_slowed(slower, code, monkeypatch, tmp_path, capsys):
    import bench_power
    from test_bench import SPEEDS, made

    called = []

    def run(command):
        called.append((share := float(command[command.index("--child") + 1]), path := Path(command[command.index("--out") + 1])))
        found = made({key: x * (1 - share) for key, x in SPEEDS.items()}, 0.01, len(called))
        path.write_text(json.dumps(found | {"made": f"2026-01-01T00:{len(called):02}:00+00:00"}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(bench_power.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["bench_power.py", "--out", str(tmp_path), "--slower", str(slower), "--runs", "4", "-k", "0"])
    assert bench_power.main() == code
    assert [path.stem for _, path in called[:6]] == ["base-1", "again-1", "slow-1", "again-2", "slow-2", "base-2"] and len(called) == 12
    assert {path.stem.split("-")[0] for share, path in called if share == 0.05} == ({"slow"} if slower else set())
    out = capsys.readouterr().out
    assert ("slower" in out.partition("`slower`")[0]) == (code == 0)
    assert "8 processes of one build differ in mlx-lm-plain: tokens/s" in out and "of 56 pairs agree" in out
    assert bench_power.main() == code and len(called) == 12  # what is there is not made again
