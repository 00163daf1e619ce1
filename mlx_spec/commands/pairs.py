"""`mlx_spec pairs`: the catalogue, or mlx-lm's architectures, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Sequence

HELP = "list the pairs that have a name"
USAGE = "[--architectures] [--json]"
ABOUT = "List the pairs that have a name: what is downloaded, the memory a chat needs, whether it is on this machine."


def fill(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="a JSON list in place of the table; sizes in bytes")
    parser.add_argument("--architectures", action="store_true",
                        help="how each architecture of the mlx-lm that is installed is handled, found by running small "
                             "random models of it; this takes a minute or two")


def run(args: argparse.Namespace) -> int:
    if args.architectures:
        return _architectures(args.json)
    from ..hub import readable
    from ..names import catalogue

    if args.json:
        shown = ("name", "target", "draft", "target_bytes", "draft_bytes", "memory_bytes", "licence", "note", "on_disk")
        print(json.dumps([{name: getattr(e, name) for name in shown} for e in catalogue()], indent=1), flush=True)
        return 0
    rows = [("name", "target", "size", "draft", "size", "memory", "here", "licence")]
    for e in catalogue():
        draft = ("the target itself", "-") if e.draft == "self" else (e.draft, readable(e.draft_bytes))
        rows.append((e.name, e.target, readable(e.target_bytes), *draft, readable(e.memory_bytes),
                     "yes" if e.on_disk else "no", e.licence))
    _print(rows)
    return 0


def _print(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip(), flush=True)


def _architectures(as_json: bool) -> int:
    from ..architectures import verdicts

    found = []
    for verdict in verdicts():
        found.append(verdict)
        if sys.stderr.isatty():
            print(f"\r{len(found)}: {verdict.name:40}", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if as_json:
        print(json.dumps([v._asdict() for v in found], indent=1), flush=True)
    else:
        _print([("architecture", "handled", "why"), *((v.name, v.handled, v.reason or "") for v in found)])
    return 0
