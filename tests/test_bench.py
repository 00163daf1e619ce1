"""The bench on tiny models: what is run, what is counted, what is said. Nothing here is judged by its speed."""

import csv
import io
import json
import math
import random
import statistics
import sys
import time

import helpers
import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny

import mlx_spec
from mlx_spec import cli, engine, request, verify
from mlx_spec.bench import arms, card, compare, figures, plot, record, render, run, texts
from mlx_spec.bench.arms import OURS, PLAIN, SPECULATIVE, Arm
from mlx_spec.bench.stats import difference, interval, shared_error, spread
from mlx_spec.compiled import Traces
from mlx_spec.control import DRAFT, LARGEST, LOOKUP, LOOKUP_KS
from mlx_spec.costs import Costs
from mlx_spec.pairs import Pair
from mlx_spec.types import Options

COSTS = Costs((1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8), 0.1, 0.02)
SYSTEM_PROFILER = json.dumps({"SPDisplaysDataType": [
    {"_name": "Apple M3 Max", "spdisplays_vendor": "sppci_vendor_Apple", "sppci_cores": "30", "sppci_model": "Apple M3 Max"}]})
PMSET_BATT = "Now drawing from 'Battery Power'\n -InternalBattery-0 (id=1)\t83%; discharging; 5:12 remaining present: true\n"
PMSET = "System-wide power settings:\nCurrently in use:\n standby              1\n lowpowermode         1\n displaysleep         10\n"


@pytest.fixture(autouse=True)
def quick_card(monkeypatch, tmp_path):
    """What takes seconds and is no matter here: costs, memory bandwidth, the BLAS."""
    monkeypatch.setenv("MLX_SPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(run, "measure", lambda pair, again: COSTS)
    monkeypatch.setattr(card, "bandwidth", lambda: 50.0)
    monkeypatch.setattr(card, "blas_in_use", lambda: {"blas": "openblas"})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target and a draft that agrees in part; neither ends a reply by itself."""
    folder, target = tmp_path_factory.mktemp("models"), tiny.make("llama")
    head = target.lm_head.weight
    target.lm_head.weight = mx.concatenate([head[:256], mx.zeros_like(head[256:])])
    tiny.write_folder(folder / "target", model=target)
    tiny.write_folder(folder / "draft", model=tiny.noisy_copy(target))
    return folder


@pytest.fixture
def bench(folders, tmp_path, capsys):
    """Runs `mlx_spec bench` on the tiny pair; returns exit code, stdout, stderr and the record."""

    def call(*arguments, draft="draft", prompts=("Why is the sky blue?", "Count to ten.")):
        path, out = tmp_path / "mine.jsonl", tmp_path / "out.json"
        path.write_text("".join(json.dumps({"text": p}) + "\n" for p in prompts))
        models = ["--target", str(folders / "target"), *(["--draft", str(folders / draft)] if draft else [])]
        command = ["bench", *models, "--prompts", str(path), "-m", "12", "--out", str(out), *map(str, arguments)]
        capsys.readouterr()
        code = cli.main(command)
        return code, *capsys.readouterr(), json.loads(out.read_text())

    return call


def made(speeds, noise=0.0, seed=0, repetitions=1, **changes):
    """A record with these speed-ups by (category, k); each prompt of three has a level of its own."""
    draw, runs = random.Random(seed), []
    for repetition, category, n in [(r, c, n) for r in range(repetitions) for c in dict.fromkeys(c for c, _ in speeds) for n in range(3)]:
        for k in dict.fromkeys([None, *(k for c, k in speeds if c == category)]):
            speed = (1 + 0.2 * n if k else 1) * (1.0 if k is None else speeds[category, k]) * (1 + draw.gauss(0, noise))
            drafted = [10] * (k or 0)
            runs.append({
                "prompt": f"{category}-{n}", "category": category, "repetition": repetition, "engine": PLAIN if k is None else OURS,
                "k": k or 0, "temperature": 0.0, "prompt_tokens": 40, "tokens": 20, "prompt_s": 1.0,
                "draft_prompt_s": 0.1 if k else None, "ttft_s": 1.1, "decode_s": 2.0 / speed, "rounds": 10, "drafted": sum(drafted),
                "accepted": 10 if k else 0, "looked_up": 0, "drafted_by_position": drafted, "judged": drafted, "kept": [10] * bool(k),
                "mode": "speculative" if k else "plain", "peak_memory_bytes": 10**8,
                "identity": None if k is None else {"kind": "identical", "at": None, "gap": None},
                "predicted": speed, "probe_ms": 5.0, "load": 0.1} | changes)
    facts = {"name": "t", "revision": None, "bits": 4, "dtype": "float16", "bytes": 10**9}
    costs = run.costs_of(COSTS, [], {"bandwidth_gbs": 100.0}, facts, None)
    found = {"version": 1, "made": "2026-01-01T00:00:00+00:00", "finished": True, "arguments": {}, "card": dict(CARD), "target": facts,
             "draft": None, "costs": costs, "runs": runs, "notes": []}
    record.check(found)
    return found


CARD = dict(system="macOS 26.1", chip="Apple M4 Pro", gpu_cores=20, memory_bytes=24 * 10**9, power="AC Power", low_power=False,
            device="gpu", blas=None, bandwidth_nominal_gbs=273, bandwidth_gbs=240.0, python="3.12", mlx="0", mlx_lm="0", mlx_spec="0",
            git=None)


# --- prompts


def test_every_category_has_real_prompts_and_one_is_very_long():
    """A11: no made-up ids, text of every kind."""
    found = texts.load()
    sizes = [len([p for p in found if p.category == name]) for name in texts.CATEGORIES]
    assert min(sizes) >= 8 and len({p.id for p in found}) == len({p.text for p in found}) == len(found)
    assert [p.id for p in found if len(p.text) > 20_000] == ["long-8"]
    assert all("\n\n" in p.text for p in found if p.category in ("edit", "summarise", "long"))  # with its text


def test_humaneval_and_gsm8k_files_are_read_as_they_are(tmp_path):
    path = tmp_path / "mine.jsonl"
    lines = [{"task_id": "HumanEval/0", "prompt": "def f():"}, {"question": "1 + 1?", "answer": "2"}, {"text": "Hi {x}", "id": 7}]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert [p.text for p in texts.load([str(path)])] == ["Complete this program:\n\ndef f():", "1 + 1?", "Hi {x}"]
    assert [p.id for p in texts.load([str(path)])] == ["mine-1", "mine-2", "7"]


def test_prompts_that_cannot_be_read_are_one_clear_line(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "bad.jsonl").write_text('{"words": 1}\n')
    for name, said in (("poetry", "chat, code"), ("../chat", "chat, code"), (str(tmp_path / "bad.jsonl"), "line 1"), (str(tmp_path / "empty.jsonl"), "no prompts"), ("none.jsonl", "none.jsonl")):
        with pytest.raises(ValueError, match=said) as error:
            texts.load([name])
        assert "\n" not in str(error.value)


# --- runs


@pytest.mark.parametrize("ks, all_run", [([4], False), ([4, "auto"], True)])
def test_the_warm_up_compiles_what_auto_can_choose_where_auto_is_timed(ks, all_run, monkeypatch):
    compiled, step = set(), Traces.step
    target = tiny.make("llama")
    p = Pair(target, tiny.noisy_copy(target))

    def spy(self, key, build):
        found = step(self, key, build)
        if found is not build:
            compiled.add((key[1].num_draft_tokens, LOOKUP if key[1].looks_up else DRAFT))
        return found

    monkeypatch.setattr(Traces, "step", spy)
    run.warm_up(p, run.Plan([Arm(OURS, k, 0.0) for k in ks], [(None, tiny.PROMPT)], 1, Options()))
    assert ({(k, DRAFT) for k in range(LARGEST + 1)} | {(k, LOOKUP) for k in LOOKUP_KS} <= compiled) == all_run


def test_what_was_counted_before_the_warm_up_is_not_traced_while_it_is_timed(monkeypatch):
    target = tiny.make("llama")
    p = Pair(target, tiny.noisy_copy(target))
    monkeypatch.setattr(Traces, "after", 24)
    arms.count_rounds(p, tiny.PROMPT, 4)
    plan, traced = run.Plan([Arm(OURS, 4, 0.0)], [(None, tiny.PROMPT)], 1, Options(max_tokens=80)), []
    run.warm_up(p, plan)
    compile_ = mx.compile
    monkeypatch.setattr(mx, "compile", lambda f: (traced.append(f.args[1]), compile_(f))[1])
    with arms.compile_after(24):
        for _ in range(3):
            arms.run(plan.arms[0], p, tiny.PROMPT, plan.options)
    assert not traced


@pytest.mark.parametrize("draft", ["same", "noisy", "deep heads", None])
def test_the_warm_up_has_run_all_that_auto_can_choose(draft, monkeypatch):
    """A round that is traced while it is timed counts as slow, and auto has many kinds of rounds."""
    ran, pair = [], helpers.pair(draft=draft)
    original = engine.Decoder._plan
    monkeypatch.setattr(engine.Decoder, "_plan", lambda self, choice: (ran.append((choice.k, choice.source)), original(self, choice))[1])
    run.warm_auto(pair, tiny.PROMPT, Options())
    largest = min(LARGEST, getattr(pair.draft, "largest", LARGEST)) if draft else 0
    assert {(k, DRAFT) for k in range(largest + 1)} | {(k, LOOKUP) for k in LOOKUP_KS} <= set(ran)


def test_a_warm_up_goes_on_where_replies_end_early(monkeypatch):
    pair = helpers.pair(draft="noisy")
    monkeypatch.setattr(pair, "end_ids", frozenset(helpers.decode(pair, tiny.PROMPT, max_tokens=6, num_draft_tokens=0)[1][5:]))
    every, before = [], run.EveryChoice.__init__
    monkeypatch.setattr(run.EveryChoice, "__init__", lambda self: (before(self), every.append(self))[0])
    run.warm_auto(pair, tiny.PROMPT, Options())
    assert every[0].turns > LARGEST + len(LOOKUP_KS)


def test_every_row_says_what_ran_and_greedy_replies_are_plain_ones(bench):
    """A10: mode, drafted and accepted in every row, and no length at which the draft is left out. A06: plain beside it."""
    code, out, err, found = bench("-k", "0,3", "-n", "2")
    record.check(found)
    assert code == 0 and len(found["runs"]) == 2 * 2 * 4 and "arms: about" in err and "left" in err
    for row in found["runs"]:
        drafting = row["engine"] == SPECULATIVE or row["k"] == 3
        assert (row["drafted"] > 0) == drafting and row["mode"] and row["tokens"] == 12
        assert row["draft_prompt_s"] is None or drafting  # A11
        assert row["identity"] is None if row["engine"] == PLAIN else row["identity"]["kind"] == "identical"
        assert sum(row["kept"]) == row["accepted"] <= row["drafted"]  # A101
    for name in (PLAIN, "mlx_spec k=0", "mlx_spec k=3", "mlx-lm-spec k=3"):
        assert f"| {name} " in out
    assert "not a Mac" in out or sys.platform == "darwin"


def test_k_0_never_asks_the_draft(bench, monkeypatch):
    """A09, A100: nothing was drafted, so the acceptance is n/a."""
    code, out, _, found = bench("-k", "0", "--baseline", "mlx-lm-plain")
    row = next(r for r in figures.rows(found) if r.arm == Arm(OURS, 0, 0.0))
    assert code == 0 and row.drafted == 0 and row.acceptance_rate is None and row.mode.startswith("plain")
    assert next(line for line in out.splitlines() if "mlx_spec k=0" in line).count("n/a") == 2  # predicted, drafts kept


@pytest.mark.parametrize("draft", ["draft", None])
def test_without_flags_the_draft_length_is_the_machines_own_choice(bench, draft, monkeypatch):
    monkeypatch.setattr(request, "measure", lambda pair, again=False: COSTS if draft else Costs(COSTS.rows_s, None))
    code, out, _, found = bench("--baseline", "mlx-lm-plain", draft=draft, prompts=["Copy this: abcabcabcabc"] * 2)
    kinds = {r["k"]: r["identity"]["kind"] for r in found["runs"] if r["engine"] == OURS}
    assert code == 0 and kinds == dict.fromkeys(["auto", 0, 4] if draft else ["auto", 0], "identical")
    assert all(r["looked_up"] <= r["drafted"] for r in found["runs"])


def test_sampled_replies_are_those_of_plain_decoding_with_the_same_seed(bench):
    _, _, _, found = bench("-k", "3", "--temp", "0.8", "--baseline", "mlx-lm-plain")
    kinds = {(r["engine"], r["k"]): r["identity"] and r["identity"]["kind"] for r in found["runs"]}
    assert kinds == {(PLAIN, 0): None, (OURS, 0): None, (OURS, 3): "identical"}
    _, _, _, found = bench("-k", "3", "--temp", "0.8", "--verify", "block")
    assert all(r["identity"] is None for r in found["runs"])


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_wrong_replies_are_bugs_without_a_speed_and_the_exit_code_is_1(bench, monkeypatch, temperature):
    """The control: a verification that keeps every draft."""
    monkeypatch.setattr(verify, "leading", lambda keep: mx.full(keep.shape[:1], keep.shape[1], dtype=mx.int32))
    code, out, _, found = bench("-k", "3", "--temp", temperature, "--baseline", "mlx-lm-plain")
    row = next(r for r in figures.rows(found) if r.arm.k == 3)
    assert code == 1 and row.bugs == 2 and row.speedup is None and "BUG: no speed" in out and "BUG: mine-1, mlx_spec k=3" in out and "k=0" in out.splitlines()[-1]


def test_a_reply_that_ends_too_early_is_a_bug(folders):
    pair = mlx_spec.load(folders / "target", folders / "draft")
    ids, arm = [1, 2, 3], Arm(OURS, 2, 0.0)
    whole = arms.theirs(pair, ids, Arm(PLAIN, 0, 0.0), Options(max_tokens=8))
    replies = {Arm(PLAIN, 0, 0.0): whole, arm: {"ids": whole["ids"][:4], "ended": True}}
    found = run._identity(pair, ids, arm, replies, Options(seed=0))
    assert found["kind"] == "BUG" and found["at"] == 4


def test_the_bench_counts_what_the_library_counts(folders):
    """A13: same ids, drafted and accepted."""
    pair = mlx_spec.load(folders / "target", folders / "draft")
    text = "Say ha fifty times."
    found = arms.run(Arm(OURS, 3, 0.0), pair, run.encoded(pair, [texts.Prompt("a", "b", text)])[0][1], Options(max_tokens=40))
    result = mlx_spec.generate(pair, [{"role": "user", "content": text}], max_tokens=40, num_draft_tokens=3)
    assert (found["ids"], found["drafted"], found["accepted"]) == (result.ids, result.stats.drafted, result.stats.accepted)


def test_arms_take_turns_in_every_place(folders, monkeypatch):
    """A12: interleaved, so that no arm always runs on a cold or a warm machine."""
    pair, order = mlx_spec.load(folders / "target", folders / "draft"), []
    original = run.run
    monkeypatch.setattr(run, "run", lambda arm, *rest: (order.append(str(arm)), original(arm, *rest))[1])
    prompts = [texts.Prompt(str(i), "chat", "Hello") for i in range(3)]
    plan = run.Plan(run.arms_of(pair, [0, 2], [0.0], []), run.encoded(pair, prompts), 1, Options(max_tokens=4))
    run.bench(pair, plan, None, {}, lambda text: None)
    timed = order[3:]  # after the warm-up
    assert sorted(order[:3]) == sorted(set(timed)) and len(timed) == 9
    assert all(len({timed[3 * turn + place] for turn in range(3)}) == 3 for place in range(3))


def test_a_round_is_one_evaluation_and_one_read_by_count(folders):
    found = arms.count_rounds(mlx_spec.load(folders / "target", folders / "draft"), [1, 2, 3], 2)
    assert (found["evaluations"], found["reads"]) == (1, 1) and found["host_ms"] > 0
    assert mx.eval.__module__ != arms.__name__  # put back


def test_ctrl_c_keeps_what_is_finished(bench, monkeypatch):
    original, calls = run._one_prompt, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(run, "_one_prompt", interrupted)
    code, out, _, found = bench("-k", "2")
    assert code == 130 and not found["finished"] and {r["prompt"] for r in found["runs"]} == {"mine-1"}
    assert "Interrupted" in out and "mlx_spec k=2" in out


@pytest.mark.parametrize("arguments, said", [
    (["-k", "0,65"], "num_draft_tokens"), (["-k", ""], "-k is empty"), (["-k", ","], "-k is empty"), (["--temp", "-1"], "temperature"), (["--temp", "warm"], "--temp takes"), (["-m", "-1"], "--max-tokens must"),
    (["--out", "none/x.json"], "folder"), (["-n", "0"], "-n must"), (["--each", "-1"], "--each must"), (["--plot", "x.pdf"], "--plot must"),
    (["--out", "x.txt"], "--out must"),
    (["--baseline", "vllm"], "mlx-lm-plain, mlx-lm-spec"), (["--prompts", "poetry"], "chat, code"), (["--compare", "none.json"], "none.json")])
def test_what_is_wrong_on_the_command_line_is_said_before_anything_is_loaded(arguments, said, capsys):
    assert cli.main(["bench", "--target", "./none", *arguments]) == 1
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


# --- figures


def test_advice_from_one_or_two_prompts_is_called_a_guess():
    found = made({("chat", 2): 1.5})
    assert "guess" not in figures.advice(found)
    found["runs"] = [r for r in found["runs"] if r["prompt"] == "chat-0"]
    assert figures.advice(found).endswith("with fewer than 3 prompts that is a guess.")


def test_what_reads_as_one_is_no_loss():
    shown = lambda gain: [line for line in render.markdown(made({("chat", 0): gain})).splitlines() if " k=0 " in line][0]  # noqa: E731
    assert "| 1.00 " in shown(0.997) and "a loss" not in shown(0.997) and "a loss" in shown(0.99)


def test_losses_are_said_and_acceptance_is_no_speed():
    """A06, A07, A08: a draft of which half is kept and that is slower everywhere but in code."""
    found = made({("chat", 2): 0.6, ("chat", 4): 0.5, ("code", 2): 1.5, ("code", 4): 1.8})
    out = render.markdown(found)
    chat, code = ([line for line in out.splitlines() if line.startswith(f"| {c} ") and "k=4" in line] for c in ("chat", "code"))
    assert "a loss" in chat[0] and "10 of 40" not in chat[0] and "30 of 120 (25%)" in chat[0] and "a loss" not in code[0]
    assert figures.advice(found) == "On this Apple M4 Pro use k=4 (1.25x, not certain); for chat leave speculation off (k=0)."
    found = made({("chat", 2): 0.6, ("edit", 2): 0.5, ("code", 2): 1.9, ("math", 2): 1.9, ("long", 2): 1.9})
    assert figures.advice(found).endswith("; for chat, edit leave speculation off (k=0).")
    found = made({(c, k): v for c in ("chat", "edit") for k, v in ((2, 1.3), (4, 1.1))} | {("code", 2): 1.2, ("code", 4): 1.8})
    assert figures.advice(found) == "On this Apple M4 Pro use k=2 (1.56x); for code use k=4 (2.16x)."
    assert "leave speculation off (k=0)" in figures.advice(made({("chat", 2): 0.6}))
    assert "leave speculation off (k=0)" in figures.advice(made({("chat", 0): 1.8, ("chat", 2): 1.5}))


def test_tokens_are_ids_and_prompt_time_is_apart():
    """A102: one formula for all arms, decoding by itself and from end to end."""
    row = next(r for r in figures.rows(made({("chat", 2): 1.0})) if r.arm.engine == PLAIN)
    assert row.tps == pytest.approx(20 / 2.0) and row.end_to_end_tps == pytest.approx(20 / 3.0)


def test_acceptance_is_counted_by_place_of_all_and_of_those_that_could_stand():
    """A100, A101: four rounds of 3 drafts with 0, 1, 2, 3 kept; a bonus is no draft."""
    origins = [o for kept in range(4) for o in ["accepted"] * kept + ["bonus" if kept == 3 else "correction"]]
    assert arms.by_position(origins) == {"judged": [4, 3, 2], "kept": [3, 2, 1]}
    counts = arms._counts([False, True, False, True, True, False, True, True, True, False], 3)
    assert (counts["rounds"], counts["drafted"], counts["accepted"], counts["judged"]) == (4, 12, 6, [4, 3, 2])
    runs = [r | arms.by_position(origins) | {"drafted_by_position": [4, 4, 4]} for r in made({("chat", 3): 1.0})["runs"]]
    row = next(r for r in figures.rows(made({("chat", 3): 1.0}) | {"runs": runs}) if r.arm.k == 3)
    assert row.kept == pytest.approx([3 / 4, 2 / 4, 1 / 4]) and row.stood == pytest.approx([3 / 4, 2 / 3, 1 / 2])


def test_the_prediction_is_tokens_over_what_the_rounds_cost():
    counts = {"rounds": 4, "drafted_by_position": [4, 4], "looked_up": 0}
    assert run.predicted(counts, 10, COSTS) == pytest.approx(10 / (4 * (0.02 + 2 * 0.1 + 1.2)))
    assert run.predicted(counts | {"drafted_by_position": [4, 3]}, 10, COSTS) == pytest.approx(
        10 / (3 * (0.02 + 0.2 + 1.2) + 0.02 + 0.1 + 1.1))
    assert run.predicted(counts | {"looked_up": 8}, 10, COSTS) == pytest.approx(10 / (4 * 1.2))
    assert run.predicted(counts | {"drafted_by_position": [4] * 9}, 10, COSTS) is None


def test_prompts_beside_which_the_machine_was_slower_are_marked():
    found = made({("chat", 2): 1.2})
    assert "MOVED" not in render.markdown(found)
    found["runs"][0]["probe_ms"] = found["runs"][1]["probe_ms"] = 5.6
    assert next(r for r in figures.rows(found) if r.arm.k == 2).moved == 1 and "MOVED" in render.markdown(found)


def test_two_runs_of_the_same_build_agree_even_with_two_prompts_a_kind():
    """Where prompts differ, as they do with drafts, an interval over prompts holds the other run's median; where all
    that differs is the clock, it does for about four of five, as 95 % intervals do."""
    draw = random.Random(0)
    once = lambda levels: [[x * (1 + draw.gauss(0, 0.015)) for x in two] for two in levels]  # noqa: E731

    def agree(levels):
        first, second = once(levels), once(levels)
        least = spread(first)
        return [interval(a, least)["low"] <= interval(b)["median"] <= interval(a, least)["high"] for a, b in zip(first, second)]

    assert all(agree([(1.1, 1.3), (1.15, 1.18), (1.2, 1.2), (1.0, 1.4)] * 3))
    assert sum(sum(agree([(1.0, 1.0)] * 6)) for _ in range(10)) >= 42
    assert interval([1.2]) == {"median": 1.2, "low": None, "high": None}


def build(name, speeds, runs=4, between=0.015, seed=0, **changes):
    """Records of a build whose processes differ; see `in_turns`."""
    draw = random.Random(seed)
    found = [made({key: x * (1 + draw.gauss(0, between)) for key, x in speeds.items()}, 0.02, seed + i, **changes) for i in range(runs)]
    return compare.Build(name, found)


def in_turns(*builds):
    for i, turn in enumerate(zip(*(b.records for b in builds))):
        for n, one in enumerate(turn):
            one["made"] = f"2026-01-01T{i:02}:{n:02}:00+00:00"
    return builds


SPEEDS = {(c, 2): 1.4 for c in texts.CATEGORIES[:4]}
SLOWED = {key: value * 0.95 for key, value in SPEEDS.items()}


def verdict(*builds):
    """The last word of the line over all prompts."""
    return next(line for line in compare.markdown(builds).splitlines() if line.startswith("| all ")).rstrip(" |").split()[-1]


def test_a_build_slowed_by_5_percent_is_told_apart_and_the_same_build_is_not():
    """Processes of one build differ by 1.5 % as a whole, so that each record alone is surer than it should be."""
    apart, alike = 0, 0
    for seed in range(0, 400, 20):
        base, again, slow = in_turns(build("base", SPEEDS, seed=seed), build("again", SPEEDS, seed=seed + 5), build("slow", SLOWED, seed=seed + 10))
        apart, alike = apart + (verdict(base, slow) == "slower"), alike + (verdict(base, again) not in ("slower", "faster"))
    assert apart >= 18 and alike >= 18


HALF = {key: 0.7 for key in SPEEDS}


def test_of_several_records_each_is_one_value():
    """Their interval is as wide as processes differ, whatever their prompts say."""
    width = lambda between: (lambda found: math.log(found["high"] / found["low"]))(  # noqa: E731
        compare.against(build("a", SPEEDS, 4, between), build("b", SPEEDS, 4, between, seed=50), Arm(OURS, 2, 0.0)))
    assert width(0.0) < 0.05 and width(0.1) > 0.14


@pytest.mark.parametrize("order, called", [("bs", False), ("bsbs", False), ("bsbsbs", True), ("bssbbs", True), ("sbbssb", True),
                                           ("bbbsss", False), ("bbbsbss", False), ("bbsbss", False)])
def test_a_difference_is_called_one_of_three_records_of_each_build_made_in_turns(order, called):
    """Half as fast; but one build after the other may have met another machine."""
    base, slow = build("base", SPEEDS, order.count("b")), build("slow", HALF, order.count("s"))
    left = {"b": iter(base.records), "s": iter(slow.records)}
    for i, letter in enumerate(order):
        next(left[letter])["made"] = f"2026-01-01T{i:02}:00:00+00:00"
    assert (verdict(base, slow) == "slower") == called == ("in turns" not in compare.markdown((base, slow)))
    for one in slow.records:
        one["card"] = CARD | {"chip": "Apple M5"}  # two machines need no turns
    assert (verdict(base, slow) == "slower") == (len(order) >= 6)


def test_a_few_prompts_are_no_proof_of_a_difference():
    """Three of a kind; and where one build ran on other prompts, those of both."""
    base, slow = in_turns(build("base", SPEEDS), build("slow", HALF))
    assert verdict(base, slow) == "slower" and compare.markdown((base, slow)).partition("`slower`")[0].count("slower") == 1
    for one in slow.records:
        one["runs"] = [r for r in one["runs"] if r["prompt"] in ("chat-0", "chat-1", "code-0", "math-0")]
    assert "slower" not in compare.markdown((base, slow)).partition("`slower`")[0]


def test_tokens_a_second_are_compared_on_one_machine_and_target_and_else_the_speed_over_plain():
    """What plain decoding did meanwhile is no build's own; of another machine it is the only measure."""
    base, other = build("a", SPEEDS, 2, 0.0), build("b", SPEEDS, 2, 0.0)
    for one in other.records:
        for r in one["runs"]:
            r["decode_s"] *= 2
    arm = Arm(OURS, 2, 0.0)
    assert compare.against(base, other, arm)["median"] == pytest.approx(0.5, rel=0.05)
    for changes in ({"card": CARD | {"chip": "Apple M5"}}, {"card": dict(CARD), "target": other.records[0]["target"] | {"bits": 8}}):
        for one in other.records:
            one |= changes
        assert compare.against(base, other, arm)["median"] == pytest.approx(1.0, rel=0.05)


def test_records_of_one_list_must_be_of_one_command_and_build(tmp_path, capsys):
    for i, changes in enumerate(({}, {"git": "abc"})):
        found = made(SPEEDS)
        found["card"] |= changes
        (tmp_path / f"{i}.json").write_text(json.dumps(found))
    paths = [str(tmp_path / f"{i}.json") for i in range(2)]
    assert cli.main(["bench", "--compare", *paths]) == 0
    for wrong, said in ((",".join(paths), "not of one build"), (",", "is empty")):
        assert cli.main(["bench", "--compare", wrong]) != 0
        assert said in capsys.readouterr().err


def test_the_variance_of_processes_is_in_a_difference_and_few_of_them_prove_little():
    few, many = (difference([1.0, 1.02] * n, [0.95, 0.97] * n) for n in (1, 4))
    assert few["low"] < 0.9 and few["high"] > 1 and 0.93 < many["low"] < many["median"] < many["high"] < 0.98
    # Student's t for four degrees of freedom is 2.776
    a, b = [0.99, 1.0, 1.01], [1.09, 1.1, 1.11]
    found, error = difference(a, b), (sum(statistics.variance([math.log(x) for x in side]) for side in (a, b)) / 3) ** 0.5
    assert math.log(found["high"] / found["median"]) == pytest.approx(2.776 * error, rel=0.02)


def test_a_spell_of_slowness_widens_the_interval_of_all_that_ran_in_it(monkeypatch):
    """Timings that go up and down together are worth less than as many that do so each for itself."""
    draw = random.Random(1)
    alone = [draw.gauss(0, 0.05) for _ in range(400)]
    carried = [0.0]
    for x in alone:
        carried.append(0.8 * carried[-1] + 0.6 * x)
    assert shared_error([0.3] * 9, 3, 1) == shared_error([0.3, 0.4], 3, 1) == 0.0
    assert shared_error(alone, 12, 1) < 0.01 < 0.025 < shared_error(carried[1:], 12, 1) < 0.05
    assert shared_error(carried[1:], 12, 4) == pytest.approx(shared_error(carried[1:], 12, 1) / 2)
    means = [statistics.mean(carried[i : i + 12]) for i in range(0, 396, 12)]  # what it claims, seen
    assert statistics.stdev(means) == pytest.approx(math.hypot(shared_error(carried[1:], 12, 1), 0.05 / 12**0.5), rel=0.4)
    monkeypatch.setattr(figures, "PROCESS", 0.0)
    steady, spelled = made({("chat", 0): 1.1}, repetitions=4), made({("chat", 0): 1.1}, repetitions=4)
    for one in spelled["runs"]:
        one["decode_s"] *= 1.1 ** (one["repetition"] > 1)
    width = lambda found: (lambda gain: gain["high"] - gain["low"])(figures.rows(found)[1].speedup)  # noqa: E731
    assert width(spelled) > width(steady) + 0.05


def test_what_a_process_cannot_see_of_itself_is_in_its_intervals_and_less_of_several():
    one, four = (compare.Build("a", [made({("chat", 0): 1.1}) for _ in range(n)]).pooled for n in (1, 4))
    widths = [math.log(gain["high"] / gain["low"]) for gain in (figures.rows(r)[1].speedup for r in (one, four))]
    assert widths == pytest.approx([2 * 1.96 * figures.PROCESS, 1.96 * figures.PROCESS], rel=0.05)


def test_an_interval_is_no_narrower_than_the_machine_was_steady(monkeypatch):
    monkeypatch.setattr(figures, "PROCESS", 0.0)
    steady, unsteady = made({("chat", 0): 1.1}), made({("chat", 0): 1.1})
    for one in unsteady["runs"]:
        one["probe_ms"] *= 1 + 0.1 * (one["prompt"] == "chat-1")
    width = lambda found: (lambda gain: gain["high"] - gain["low"])(figures.rows(found)[1].speedup)  # noqa: E731
    assert width(steady) < 1e-6 and width(unsteady) > 0.1


def test_a_prediction_has_what_plain_decoding_here_gains_in_it():
    found = made({("chat", 0): 1.1, ("chat", 2): 1.3}, predicted=1.2)
    assert next(r for r in figures.rows(found) if r.arm.k == 2).predicted == pytest.approx(1.2 * 1.1)
    assert next(r for r in figures.rows(found) if r.arm.k == 0).predicted is None
    alone = made({("chat", 2): 1.3}, predicted=1.2)
    assert next(r for r in figures.rows(alone) if r.arm.k == 2).predicted == pytest.approx(1.2)


def test_a_tie_is_told_with_its_gap_and_keeps_its_speed():
    found = made({("chat", 2): 1.2}, identity={"kind": "tie", "at": 7, "gap": 2e-4})
    row = next(r for r in figures.rows(found) if r.arm.k == 2)
    assert row.ties == 3 and row.speedup and not figures.bugs(found)
    assert "tie: chat-0, mlx_spec k=2, T=0, token 7: the two best choices differ by 0.0002." in render.markdown(found)


def test_a_wrong_build_has_no_place_in_a_comparison():
    base, wrong = made({("chat", 2): 1.2}), made({("chat", 2): 1.8}, identity={"kind": "BUG", "at": 7, "gap": 2.0})
    builds = compare.Build("a", [base]), compare.Build("b", [wrong])
    assert compare.against(*builds, Arm(OURS, 2, 0.0)) is None
    row = next(line for line in compare.markdown(builds).splitlines() if "k=2" in line)
    assert "BUG" in row and "1.5" not in row


def test_the_hosts_time_of_a_round_is_its_work_and_not_its_waiting(monkeypatch):
    """A submission may wait for the device; here it sleeps."""
    submit = engine.Decoder._submit
    monkeypatch.setattr(engine.Decoder, "_submit", lambda decoder: (time.sleep(0.2), submit(decoder)))
    assert 0 < arms.count_rounds(helpers.pair(), [1, 2, 3], 2, rounds=3)["host_ms"] < 200


# --- the record


def test_markdown_and_csv_are_renderings_of_the_json(bench):
    _, out, _, found = bench("-k", "2", "--temp", "0,0.8")
    assert render.markdown(found) == out
    table = list(csv.DictReader(io.StringIO(render.comma_separated(found))))
    assert len(table) == len(figures.rows(found)) and {row["k"] for row in table} == {"0", "2"}
    code, out, _, _ = bench("-k", "2", "-o", "jsonl")
    assert code == 0 and {json.loads(line)["category"] for line in out.splitlines()} == {"mine"}


@pytest.mark.parametrize("spoil, said", [
    (lambda r: r.pop("card"), "record must have exactly"), (lambda r: r["runs"][0].update(tokens=1.5), r"runs\[0\].tokens must be int"),
    (lambda r: r["runs"][0].update(decode_s=float("nan")), "decode_s"), (lambda r: r["card"].update(gpu_cores="8"), "gpu_cores"),
    (lambda r: r.update(version=2), "version 1"), (lambda r: r["runs"][0].update(k=None), "k")])
def test_a_record_is_checked_against_its_schema(spoil, said, tmp_path):
    found = made({("chat", 2): 1.0})
    (tmp_path / "good.json").write_text(json.dumps(found))
    assert record.read(str(tmp_path / "good.json")) == found
    spoil(found)
    (tmp_path / "bad.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match=said) as error:
        record.read(str(tmp_path / "bad.json"))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="none.json can't be read: No such file"):
        record.read(str(tmp_path / "none.json"))


def test_what_apples_tools_print_is_understood():
    assert card.gpu_cores(SYSTEM_PROFILER) == 30 and card.gpu_cores("") is None and card.gpu_cores("{}") is None
    assert card.power(PMSET_BATT) == "Battery Power" and card.power("") is None
    assert card.low_power(PMSET) is True and card.low_power(PMSET.replace("1\n disp", "0\n disp")) is False
    assert card.low_power(" powermode            2\n") is False and card.low_power("") is None
    assert card.nominal("Apple M3 Max", 30) == 300 and card.nominal("Apple M3 Max", 40) == 400
    assert card.nominal("Apple M5 Max", 32) is None and card.nominal("Apple M4", 10) == 120 and card.nominal(None, None) is None


@pytest.mark.skipif(sys.platform != "linux", reason="of a Linux machine")
def test_a_linux_machine_is_never_shown_as_a_mac():
    found = card.card()
    record.check(found, record.Card)
    assert "not a Mac" in found["system"] and found["blas"] == "openblas"
    assert found["bandwidth_nominal_gbs"] is found["gpu_cores"] is found["power"] is found["low_power"] is None


def test_the_models_of_a_record_have_bits_and_bytes_and_no_folders_of_this_machine(folders):
    model = mlx_spec.load(folders / "target").target
    found = card.model(model, str(folders / "target"))
    assert found["name"] == "target" and found["bits"] is None and found["revision"] is None and found["dtype"] == "float32"
    nn.quantize(model, 32, 4)
    smaller = card.model(model, None)
    assert smaller["bits"] == 4 and smaller["bytes"] < found["bytes"] / 4


def test_memory_is_timed_by_reading_it(monkeypatch):
    monkeypatch.undo()
    assert 0.1 < card.bandwidth(1) < 10_000


def test_a_plot_is_one_png_and_several_records_share_it(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    found = made({("chat", 2): 1.2, ("code", 2): 1.4})
    plot.plot([("a", found), ("b", found)], str(tmp_path / "a.png"))
    with image.open(tmp_path / "a.png") as drawn:
        assert drawn.size == (plot.WIDTH, 3 * plot.HEIGHT) and len(drawn.getcolors(10**6)) > 4
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ValueError, match="pip install pillow"):
        plot.plot([("a", found)], str(tmp_path / "b.png"))
