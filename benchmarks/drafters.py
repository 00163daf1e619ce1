"""Drafts of the demo target against each other and against mlx-lm, as ratios from one run on one machine.

Arms take turns prompt by prompt, in rotating order; only decoding is timed; end tokens are ignored. mlx-lm's plain
decoding is timed beside every draft, and its median counts. The prompts are this project's own, so that no draft can
have been trained on them.
"""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Mapping, Sequence

import mlx_spec  # before mlx.core: it puts a fast BLAS in place

import mlx.core as mx
from arms import (NEVER, WARM_TOKENS, Setting, chat_prompts, endless, long_text, ours, plain_theirs,
                  theirs, warm_up)
from draft_report import Arm, figures_of, replies, report_parts, report_speeds, report_targets, report_training
from identity import difference, report_identity
from measure import each_prompt, machine, note, parser, report_machine, table
from mlx_lm.utils import dequantize_model
from mlx_spec.bench.arms import compile_after, is_model
from mlx_spec.bench.stats import Probe, rotated
from mlx_spec.costs import draft_step, target_rows
from mlx_spec.train.batches import load as load_batch
from mlx_spec.train.loss import Score, score
from mlx_spec.train.states import States, collect, make_card
from mlx_spec.train.text import read

MAX_LENGTH, STEPS = 512, 3  # of a held-out text in tokens; of a draft that is judged


def load(folders: Sequence[str], dtype: str) -> dict[str, Any]:
    """A pair for each draft, by name; all have one target, and no end tokens."""
    plain, pairs = mlx_spec.load("demo", draft=False), {}
    short = [Path(f).resolve().name for f in folders]
    for folder, name in zip(folders, short if len(set(short)) == len(short) else folders):
        loaded = mlx_spec.load("demo", draft=folder)
        if is_model(loaded.draft):  # the others are widened when they are bound
            dequantize_model(loaded.draft).set_dtype(getattr(mx, dtype))
        pairs[name] = endless(mlx_spec.Pair(plain.target, loaded.draft, plain.tokenizer))
        note("\n".join([f"{name}: {folder}", *(n for n in loaded.notes if n not in plain.notes)]))
    return pairs


def arms_of(pairs: Mapping[str, Any], ks: Sequence[int], temperatures: Sequence[float]) -> list[Arm]:
    found = []
    for temperature in temperatures:
        for name, pair in pairs.items():
            settings = [Setting(name, k, temperature) for k in ks if k <= getattr(pair.draft, "largest", k)]
            found.append(Arm("plain", Setting(name, 0, temperature)))
            sides = ("ours", "theirs") if is_model(pair.draft) else ("ours",)
            found += [Arm(who, setting) for who in sides for setting in settings]
    return found


def one_prompt(pairs: Mapping[str, Any], arms: Sequence[Arm], tokens: int, ids: list[int], turn: int) -> dict:
    """A record: seconds and counts of every arm, by its name, and what the parts cost beside them."""
    context = len(ids) + tokens // 2
    jobs = {str(arm): partial(run_arm, arm, pairs[arm.setting.draft], ids, tokens, turn) for arm in arms}
    jobs["costs"] = partial(part_costs, pairs, max(a.setting.k for a in arms) + 1, context)
    runs = {name: jobs[name]() for name in rotated(list(jobs), turn * max(1, len(jobs) // 10))}
    for arm in arms:
        if arm.setting.temperature == 0 and arm.who != "plain":
            pair, run, wanted = pairs[arm.setting.draft], runs[str(arm)], runs[str(arm.plain)]["ids"]
            run["difference"] = difference(pair, ids, wanted, run["ids"])
    return {"prompt": turn, "prompt_tokens": len(ids), "costs": runs.pop("costs"), "runs": runs}


def run_arm(arm: Arm, pair: Any, ids: list[int], tokens: int, seed: int) -> dict[str, Any]:
    if arm.who == "plain":
        return plain_theirs(pair, ids, tokens, temperature=arm.setting.temperature, seed=seed)
    return (ours if arm.who == "ours" else theirs)(pair, ids, arm.setting, tokens, seed)


def part_costs(pairs: Mapping[str, Any], rows: int, context: int) -> dict[str, Any]:
    """Seconds of the target's pass over 1 to `rows` rows, and of each draft's step."""
    one = next(iter(pairs.values()))
    return {"rows_s": [target_rows(one, m + 1, context) for m in range(rows)],
            "step_s": {name: draft_step(pair, context) for name, pair in pairs.items()}}


def held_out(pairs: Mapping[str, Any], path: str) -> dict[str, Score]:
    """How many greedy drafts are right on the last twentieth of a text's lines, which no draft was trained on:
    of what the target wrote at temperature 0."""
    tokenizer = next(iter(pairs.values())).tokenizer
    texts = list(read(path, tokenizer, MAX_LENGTH))
    judged = [t for t in texts[len(texts) - len(texts) // 20 :] if t.temperature == 0]
    found = {}
    for name, pair in pairs.items():
        if is_model(pair.draft):
            continue
        with TemporaryDirectory() as folder:
            store = States(Path(folder), make_card("demo", pair.draft.depths, pair.draft.args.hidden_size, path))
            collect(store, pair.target, pair.draft.depths, iter(judged))
            steps = getattr(pair.draft, "largest", STEPS)
            parts = [score(pair.draft, load_batch(*store.open(), store.rows[i : i + 4]), steps)
                     for i in range(0, len(store), 4)]
        found[name] = sum(parts[1:], parts[0])
    return found


def report_held_out(found: Mapping[str, Score]) -> None:
    print("greedy drafts kept on held-out text of the target, by step, if those before stood; rows judged")
    table(["draft", "kept", "rows"], [[name, " ".join(f"{a:.3f}" for a in s.acceptance), f"{s.rows[0]:.0f}"]
                                      for name, s in found.items()])


def arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--drafts", nargs="+", required=True, metavar="FOLDER", help="drafts of the demo target")
    options.add_argument("--k", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="as far as a draft goes")
    options.add_argument("--held-out", metavar="FILE", help="a .jsonl(.gz) of the target's own text, to judge by its end")
    options.add_argument("--quick", action="store_true", help="one prompt, 8 tokens, k = 1 and 2: does it work?")
    args = options.parse_args()
    if args.quick:
        args.prompts, args.tokens, args.k = 1, 8, [1, 2]
    return args


def main() -> None:
    args = arguments()
    os.environ["MLX_SPEC_DTYPE"] = args.dtype
    card = machine(args.dtype)
    report_machine(card | {"prompts": "benchmarks/prompts/chat.jsonl, none of them trained on"})
    pairs, probe = load(args.drafts, args.dtype), Probe()
    tokenizer = next(iter(pairs.values())).tokenizer
    arms = arms_of(pairs, args.k, args.temperatures)
    settings = [a.setting for a in arms if a.who == "ours"]
    warm_up(pairs, settings, long_text(tokenizer, 300), min(args.tokens, WARM_TOKENS))
    with compile_after(NEVER):
        records = each_prompt(chat_prompts(tokenizer, args.prompts), probe,
                              partial(one_prompt, pairs, arms, args.tokens))
    probe.read()
    found = figures_of(records, arms)
    report_training(dict(zip(pairs, args.drafts)))
    if args.held_out:
        report_held_out(held_out(pairs, args.held_out))
    report_parts(found, records)
    report_speeds(found)
    report_targets(found, records)
    report_identity(replies(records, arms))
    report_machine(card, probe)
    if args.json:
        raw = {"machine": card, "arguments": vars(args), "records": records, "probe": probe.readings,
               "moved": probe.moved(), "figures": {str(arm): figures for arm, figures in found.items()}}
        Path(args.json).write_text(json.dumps(raw, indent=1))


if __name__ == "__main__":
    main()
