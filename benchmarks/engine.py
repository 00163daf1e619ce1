"""The engine against its ideal and against mlx-lm, as ratios from one run on one machine.

Arms take turns prompt by prompt, in rotating order; only decoding is timed. End tokens are ignored,
so that every reply has the same length. Warm-up is outside: shapes seen there are compiled, and a
shape that first appears in a timed reply stays eager.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Callable

import mlx_spec  # noqa: F401  before mlx.core: it puts a fast BLAS in place

from arms import (NEVER, NOISE, Models, Setting, chat_prompts, costs, ideal_seconds, load, long_text, ours, part,
                  plain_ours, plain_theirs, theirs, warm_up)
from identity import Reply, difference, report_identity
from measure import each_prompt, machine, note, parser, reached, report_machine, show, table
from mlx_spec.bench.arms import compile_after, filled
from mlx_spec.bench.stats import Probe, interval, median, rotated
from mlx_spec.compiled import Traces
from mlx_spec.engine import Decoder
from mlx_spec.types import Options

IDEAL_TARGET = {0.0: 0.95, 0.8: 0.90}
PLAIN_TARGET = 0.98
BUILD_ROUNDS = 5


def one_prompt(models: Models, settings: list[Setting], tokens: int, ids: list[int], turn: int) -> dict[str, Any]:
    plain = plain_theirs(models.pairs["none"], ids, tokens)
    context = ids + plain["ids"][: tokens // 2]
    caches = {id(p.draft): filled(p.draft, context) for p in models.pairs.values() if p.draft is not None}
    runs = {}
    for setting in rotated(settings, turn):
        pair, run = models.pairs[setting.draft], {}
        arms = {"costs": partial(costs, pair, caches, setting.k),
                "ours": partial(ours, pair, ids, setting, tokens, turn),
                "theirs": partial(theirs, pair, ids, setting, tokens, turn)}
        for name in rotated(list(arms), turn):
            run[name] = arms[name]()
        run["ideal_s"] = ideal_seconds(run["ours"], run["costs"], setting.k)
        if setting.temperature == 0:
            run["ours"]["difference"] = difference(models.pairs["none"], ids, plain["ids"], run["ours"]["ids"])
            run["theirs"]["difference"] = difference(models.pairs["none"], ids, plain["ids"], run["theirs"]["ids"])
        runs[str(setting)] = run
    return {"prompt": turn, "prompt_tokens": len(ids), "plain": plain, "runs": runs}


def gain(way: Callable[..., dict], models: Models, settings: list[Setting], prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Speed with a way of running rounds / without, for every setting."""
    ratios: dict[str, list[float]] = {str(s): [] for s in settings}
    for turn, ids in enumerate(prompts):
        for setting in rotated(settings, turn):
            run = {on: way(models.pairs[setting.draft], ids, setting, tokens, turn, on)["seconds"]
                   for on in rotated([True, False], turn)}
            ratios[str(setting)].append(run[False] / run[True])
        note(f"prompt {turn + 1} of {len(prompts)}")
    return {name: interval(values) for name, values in ratios.items()}


def compiled(pair: Any, ids: list[int], setting: Setting, tokens: int, turn: int, on: bool) -> dict[str, Any]:
    """A reply whose rounds are those that the warm-up compiled, or eager ones."""
    kept, pair.compiled = pair.compiled, pair.compiled if on else Traces()
    try:
        with compile_after(NEVER):
            return ours(pair, ids, setting, tokens, turn)
    finally:
        pair.compiled = kept


WAYS = {"run-ahead": (ours, "a second round in flight / none"), "compiled": (compiled, "compiled rounds / eager ones, traces not counted")}


def plain_at(pair: Any, starts: list[list[int]], tokens: int, probe: Probe) -> list[dict]:
    """num_draft_tokens=0 and mlx-lm's plain decoding from the same caches; starts[0] holds the others
    where they are its beginnings, so that a long context is read once."""
    base, records = filled(pair.target, starts[0][:-1]), []
    for turn, ids in enumerate([starts[0], *starts]):  # the first is the warm-up
        if turn:
            probe.read()
        if starts[0][: len(ids)] != ids:
            base = filled(pair.target, ids[:-1])
        arms = {"ours": lambda: plain_ours(pair, ids, tokens, part(base, len(ids) - 1)),
                "theirs": lambda: plain_theirs(pair, ids, tokens, part(base, len(ids) - 1))}
        with compile_after(NEVER if turn else 1):
            run = {name: arms[name]() for name in rotated(list(arms), turn)}
        same = difference(pair, ids, run["theirs"]["ids"], run["ours"]["ids"])
        records.append({"context": len(ids), "difference": same} | run)
    return records[1:]


def build_times(pair: Any, ids: list[int], setting: Setting, rounds: int = BUILD_ROUNDS) -> dict[str, float]:
    """Host time to build a round, nothing else running: `rounds` eager ones of a shape, its trace, and
    as many compiled."""
    calls, original, kept = [], Decoder._step, pair.compiled

    def timed_step(decoder: Decoder, plan: Any) -> Any:
        step = original(decoder, plan)

        def call(state: tuple) -> tuple:
            started = time.perf_counter()
            out = step(state)
            calls.append((plan, type(step) is not partial, started, time.perf_counter() - started))
            return out

        return call

    options = Options(max_tokens=5 * rounds * (setting.k + 1), num_draft_tokens=setting.k,
                      temperature=setting.temperature, seed=0,
                      should_cancel=lambda: len(calls) > 4 * rounds)
    Decoder._step, pair.compiled = timed_step, Traces()
    try:
        with compile_after(rounds + 1):
            list(Decoder(pair, ids, options, run_ahead=False).chunks())
    finally:
        Decoder._step, pair.compiled = original, kept
    return _summary(calls)


def _summary(calls: list[tuple]) -> dict[str, float]:
    eager, compiled, traces, lasted, extra, seen = [], [], [], [], [], set()
    for (plan, is_compiled, started, seconds), after in zip(calls, calls[1:]):
        whole = after[2] - started
        if not is_compiled:
            eager.append(seconds)
        elif plan in seen:
            compiled.append(seconds)
            lasted.append(whole)
        else:
            seen.add(plan)
            traces.append(seconds)
            extra.append(whole)
    return {"eager_ms": median(eager) * 1e3, "compiled_ms": median(compiled) * 1e3, "trace_ms": median(traces) * 1e3,
            "first_round_extra_ms": (median(extra) - median(lasted)) * 1e3}


# the report


def report_settings(records: list[dict], settings: list[Setting], tokens: int) -> dict[str, Any]:
    """A row per setting; returns the figures."""
    figures, ratios, speeds = {}, [], []
    for setting in settings:
        runs = [r["runs"][str(setting)] for r in records]
        ideal = interval([run["ideal_s"] / run["ours"]["seconds"] for run in runs])
        peer = interval([run["theirs"]["seconds"] / run["ours"]["seconds"] for run in runs])
        plain = interval([r["plain"]["seconds"] / r["runs"][str(setting)]["ours"]["seconds"] for r in records])
        figures[str(setting)] = {"ours/ideal": ideal, "ours/mlx-lm speculative": peer, "ours/mlx-lm plain": plain}
        ratios.append([setting, show(ideal), reached_ideal(setting, ideal), show(peer), reached_peer(setting, peer),
                       show(plain)])
        speeds.append([setting, *(_rate(runs, name) for name in ("ours", "theirs")),
                       f"{_per_round(runs, 'ours'):.2f} / {_per_round(runs, 'theirs'):.2f}",
                       *(f"{tokens / median(s):.2f}" for s in ([run["ours"]["seconds"] for run in runs],
                         [run["theirs"]["seconds"] for run in runs], [run["ideal_s"] for run in runs])),
                       *(f"{median([run['costs'][c] for run in runs]) * 1e3:.0f}" for c in ("draft_s", "target_s", "verify_s"))])
    print("ratios of speeds: median over the prompts [95 % bootstrap interval]; more than 1: ours is faster")
    table(["setting", "ours/ideal", "target", "ours/mlx-lm speculative", "target", "ours/mlx-lm plain"], ratios)
    print("accepted = accepted / drafted; tokens per second on this machine's CPU or GPU as named above")
    table(["setting", "accepted", "mlx-lm", "tokens a round, both", "tok/s", "mlx-lm", "ideal", "draft ms", "target ms",
           "verify ms"], speeds)
    return figures


def _rate(runs: list[dict], name: str) -> str:
    drafted = sum(run[name]["drafted"] for run in runs)
    return f"{sum(run[name]['accepted'] for run in runs) / drafted:.3f}"


def _per_round(runs: list[dict], name: str) -> float:
    return sum(len(run[name]["ids"]) for run in runs) / sum(run[name]["rounds"] for run in runs)


def reached_ideal(setting: Setting, ratio: dict[str, float]) -> str:
    target = IDEAL_TARGET[setting.temperature]
    return reached(ratio["median"] >= target, f">= {target:.2f}")


def reached_peer(setting: Setting, ratio: dict[str, float]) -> str:
    if setting.temperature == 0:
        return reached(ratio["high"] >= 1, "upper end >= 1.0")
    return "" if setting.draft == "self" else reached(ratio["median"] > 1.1, "> 1.1")


def report_plain(lengths: dict[int, list[dict]]) -> dict[str, Any]:
    figures, rows = {}, []
    for length, records in lengths.items():
        ratio = figures[str(length)] = interval([r["theirs"]["seconds"] / r["ours"]["seconds"] for r in records])
        speeds = [len(records[0][n]["ids"]) / median([r[n]["seconds"] for r in records]) for n in ("ours", "theirs")]
        rows.append([length, show(ratio), reached(ratio["median"] >= PLAIN_TARGET, f">= {PLAIN_TARGET}"),
                     *(f"{s:.2f}" for s in speeds)])
    print("plain decoding: num_draft_tokens=0 / mlx-lm's generate_step")
    table(["context", "ours/mlx-lm", "target", "tok/s", "mlx-lm"], rows)
    return figures


def report_build(build: dict[str, dict[str, float]]) -> None:
    print("host time to build a round, ms; trace: the first call of a compiled shape; "
          "first round: how much longer it lasts")
    table(["setting", "eager", "compiled", "trace", "first round"],
          [[name, *(f"{ms:.1f}" for ms in times.values())] for name, times in build.items()])


def replies(records: list[dict], lengths: dict[int, list[dict]]) -> list[Reply]:
    greedy = [Reply(name, r["prompt"], who, run[who]["difference"]) for r in records for name, run in r["runs"].items()
              for who in ("ours", "theirs") if "difference" in run[who]]
    return greedy + [Reply(f"plain at {n}", i, "ours", r["difference"]) for n, rs in lengths.items()
                     for i, r in enumerate(rs)]


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--context", type=int, default=4000, help="of long plain decoding (%(default)s)")
    options.add_argument("--k", type=int, nargs="+", default=[2, 4])
    options.add_argument("--drafts", nargs="+", choices=("self", "noisy"), default=["self", "noisy"])
    options.add_argument("--only", choices=("speculative", "plain", "build", *WAYS), help="one part of the report")
    options.add_argument("--quick", action="store_true", help="two prompts, 16 tokens, k = 4: does it work?")
    args = options.parse_args()
    if args.quick:
        args.prompts, args.tokens, args.context, args.k = 2, 16, 600, [4]
    return args


def main() -> None:
    args = arguments()
    os.environ["MLX_SPEC_DTYPE"] = args.dtype
    card = machine(args.dtype)
    report_machine(card | {"noise": NOISE})
    models, probe = load(), Probe()
    text = long_text(models.tokenizer, max(args.context, 4000))
    prompts = chat_prompts(models.tokenizer, args.prompts)
    settings = [Setting(d, k, t) for d, k, t in product(args.drafts, args.k, args.temperatures)]
    parts = [args.only] if args.only else ["build", "plain", "speculative"]
    raw: dict[str, Any] = {"machine": card, "noise": NOISE, "arguments": vars(args)}
    build, lengths, records, gains = {}, {}, [], {}
    if "build" in parts:
        note("host time")
        build = {str(s): build_times(models.pairs[s.draft], text[:60], s) for s in settings if s.draft == "noisy"}
    if "plain" in parts:
        lengths = plain_lengths(models.pairs["none"], text, args, probe)
    for name in WAYS.keys() & set(parts):
        warm_up(models.pairs, settings, text)
        way, title = WAYS[name]
        gains[name] = gain(way, models, settings, prompts, args.tokens)
        print(f"{title}: ratios of speeds")
        table(["setting", "ratio"], [[setting, show(ratio)] for setting, ratio in gains[name].items()])
    if "speculative" in parts:
        warm_up(models.pairs, settings, text)
        with compile_after(NEVER):
            records = each_prompt(prompts, probe, partial(one_prompt, models, settings, args.tokens))
    raw |= {"build": build, "ways": gains, "plain": lengths, "speculative": records, "figures": {}}
    if records:
        raw["figures"] |= report_settings(records, settings, args.tokens)
    if lengths:
        raw["figures"] |= {"plain": report_plain(lengths)}
    if records or lengths:
        report_identity(replies(records, lengths))
    if build:
        report_build(build)
    probe.read()
    report_machine(card, probe)
    if args.json:
        Path(args.json).write_text(json.dumps(raw | {"probe": probe.readings, "moved": probe.moved()}, indent=1))


def plain_lengths(pair: Any, text: list[int], args: argparse.Namespace, probe: Probe) -> dict[int, list[dict]]:
    """Short contexts from different places of the text; long ones that end at different places."""
    tokens, n = min(args.tokens, 64), args.prompts
    short = [text[i : i + 200] for i in range(0, 350 * n, 350)]
    long = [text[: args.context - 29 * i] for i in range(n)]
    found = {}
    for length, starts in ((200, short), (args.context, long)):
        note(f"plain decoding at {length} tokens")
        found[length] = plain_at(pair, starts, tokens, probe)
    return found


if __name__ == "__main__":
    main()
