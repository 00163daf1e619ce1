"""`mlx_spec advise`: the drafts on this machine, and which one to use."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from shlex import quote

from ..bench import texts

HELP = "which draft fits this target?"
USAGE = "--target MODEL [--drafts DIR ...] [options]"
ABOUT = """Try every draft on this machine (the hub's cache, --drafts, the catalogue's) that has the target's tokenizer, predict
from measured costs and acceptance how much faster it makes the target, prompt lookup included, and print the command for the
best. k = 0: the draft adds nothing to lookup. Nothing is downloaded but the target. Close everything else first."""


def fill(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", metavar="MODEL", required=True, help="a pair's name, owner/name on the hub, an mlx-lm folder or a .gguf file")
    add("--drafts", metavar="DIR", nargs="+", default=[], help="folders of drafts, or drafts")
    add("--prompts", metavar="LIST", default=",".join(texts.CATEGORIES[:4]),
        help="kinds of text, or .jsonl files, separated by commas; 8 prompts are used")
    add("--json", action="store_true", help="a JSON list in place of the table")


def run(args: argparse.Namespace) -> int:
    from ..advise import advise, verdict
    from ..names import short
    from ..pairs import load

    texts.load(args.prompts.split(","), 1)  # what is wrong with them is said before anything is loaded
    found = advise(load(args.target, False), args.drafts, args.prompts.split(","),
                   lambda name, done: print(f"trying {short(name)}", file=sys.stderr, flush=True) if not done else None)
    if args.json:
        print(json.dumps([asdict(a) for a in found], indent=1), flush=True)
        return 0
    rows = [("draft", "predicted", "k", "acceptance", "c")]
    for a in found:
        numbers = (f"{a.speedup:.2f}x", str(a.k), " ".join(f"{x:.2f}" for x in a.acceptance[:4]) or "-",
                   "-" if a.c is None else f"{a.c:.3f}")
        rows.append((short(a.draft), *((f"can't be used: {a.error}",) if a.error else numbers)))
    widths = [max(len(row[i]) for row in rows if len(row) > 2) for i in range(5)]
    for row in rows:
        print("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip())
    print("\nacceptance: by place in the round, of four drafts a round; c: a draft step over a target step")
    print(verdict(args.target, found), flush=True)
    if found[0].helps:
        print(f"mlx_spec generate --target {quote(args.target)} --draft {quote(found[0].name)} --prompt ...", flush=True)
    return 0
