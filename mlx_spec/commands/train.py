"""`mlx_spec train` on a terminal: its flags, its progress, its report. Imports no MLX until it runs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from . import CTRL_C

HELP = "make a draft for a target"
USAGE = "--target MODEL --kind {draft,heads,mlp} --out DIR [options]"
ABOUT = """Train a draft for a target, on text that the target writes itself or on --data, and report what it will
gain. Ctrl-C keeps a checkpoint; models/README.md says how long it takes and how much memory it needs."""


def run(args: argparse.Namespace) -> int:
    from ..train.loop import Schedule
    from ..train.run import Recipe, train

    schedule, facts = ({f.name: getattr(args, f.name) for f in fields(kind) if hasattr(args, f.name)}
                       for kind in (Schedule, Recipe))
    recipe = Recipe(**facts, schedule=Schedule(**schedule))
    try:
        report = train(recipe, _Bar().tell)
    except KeyboardInterrupt:
        print(f"\nmlx_spec: stopped; what there is lies in {recipe.work}, go on with --resume", file=sys.stderr)
        return CTRL_C
    print(file=sys.stderr)
    print(json.dumps(report.to_dict(), indent=1) if args.json else _trained(report, recipe.out), flush=True)
    return 0


class _Bar:
    """One line on a terminal, a line every so often elsewhere."""

    def __init__(self) -> None:
        self.live, self.said, self.stage = sys.stderr.isatty(), 0.0, ""

    def tell(self, stage: Any) -> None:
        now, new = time.monotonic(), stage.name != self.stage
        if new or now - self.said >= (0.2 if self.live else 30) or stage.done == stage.total:
            before = "" if not self.live else "\n" if new and self.stage else "\r"
            self.said, self.stage = now, stage.name
            print(before + _stage(stage), end="\x1b[K" if self.live else "\n", file=sys.stderr, flush=True)


def _stage(stage: Any) -> str:
    p = stage.progress
    if p is None:
        what = {"text": "the target writes", "states": "hidden states"}[stage.name]
        return f"{what}: {stage.done}{f' of {stage.total}' if stage.total else ''} tokens"
    filled = round(24 * p.step / p.steps)
    judged = "" if p.score is None else f", first draft kept {p.score.acceptance[0]:.1%}"
    return (f"training [{'#' * filled:.<24}] step {p.step} of {p.steps}, loss {p.loss:.3f}{judged}, "
            f"{p.tokens_per_s:.0f} tokens/s, {p.left_s / 60:.0f} min left")


def _trained(report: Any, out: Path) -> str:
    score, costs, rows = report.score, report.costs, range(2, len(report.costs.rows_s) + 1)
    kept, overlap = (" ".join(f"{v:.1%}" for v in values) for values in (score.acceptance, score.sampled))
    gain = f"{report.speedup:.2f} times plain with {report.k} draft tokens" if report.k else "none: plain decoding is faster"
    return f"""\
acceptance:  {kept} (greedy, by step, those before it kept; {score.rows[0]:.0f} held-out rows)
overlap:     {overlap} (sum of min(p, q): temperature 1)
costs:       c = {costs.c:.3f}, a draft step in target steps; v(2..{rows[-1]}) = {" ".join(f"{costs.v(m):.2f}" for m in rows)}, on this machine
predicted:   {gain}, greedy
draft:       {out}; use it with --draft-model {out}"""


def fill(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what").add_argument
    add("--target", metavar="MODEL", required=True, help="owner/name on the hub, a folder, a .gguf file, a pair's name")
    add("--kind", choices=("draft", "heads", "mlp"), required=True,
        help="draft: some of the target's layers; heads: a layer on its hidden states, as in EAGLE; "
             "mlp: a multi-head speculator")
    add("--out", type=Path, metavar="DIR", required=True,
        help="where the draft goes; DIR/work holds text, states, checkpoint")
    add("--layers", type=int, metavar="N", help="of a draft (default: a sixth of the target's) or heads (default: 1); "
                                                "of an mlp, its steps (default: 4)")
    add("--vocab", type=int, default=8192, metavar="N",
        help="output ids, the most frequent ones; fewer make a step cheaper")
    add("--depths", type=int, nargs="*", metavar="N", help="with heads: layers after which the target is read, beside "
                                                           "its end (default: low, middle, high)")
    add("--bits", type=int, choices=(16, 8, 4), default=8, help="of the saved weights")
    add = parser.add_argument_group("text").add_argument
    add("--tokens", type=_count, default="2M", metavar="N", help="answer tokens, as 500000, 500K or 2M")
    add("--data", type=Path, metavar="PATH", help="a .jsonl file or a folder of .jsonl, .txt, .md: prompts, conversations, "
                                                  "documents (default: the target makes up user turns)")
    add("--own", type=_count, default=0, metavar="N", help="answer tokens that the target writes beside --data")
    add("--max-length", type=int, default=512, metavar="N", help="tokens of a text at most")
    add = parser.add_argument_group("training").add_argument
    add("--begin", type=Path, metavar="DIR", help="an earlier draft of this kind to go on from (default: new weights)")
    add("--epochs", type=float, default=3.0, metavar="X", help="times over the text")
    add("--batch-tokens", type=int, default=4096, metavar="N", help="tokens of a step")
    add("--learning-rate", type=float, default=1e-3, metavar="X", help="at its highest")
    add("--unroll", type=int, default=3, metavar="N", help="with heads: draft tokens trained for")
    add("--every", type=int, default=100, metavar="N", help="steps between checkpoints")
    add("--seed", type=int, default=0, metavar="N", help="of weights, text and order")
    add("--resume", action="store_true", help="go on from the checkpoint in DIR/work")
    add("--json", action="store_true", help="the report as one JSON record on stdout")


def _count(text: str) -> int:
    """500000, 500K, 2M."""
    unit = {"K": 1_000, "M": 1_000_000}.get(text[-1:].upper(), 1)
    try:
        return round(float(text[:-1] if unit > 1 else text) * unit)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, such as 500K or 2M") from None
