"""`mlx_spec pairs`: the catalogue as a table or as JSON."""

from __future__ import annotations

import argparse
import json

HELP = "list the pairs that have a name"
USAGE = "[--json]"
ABOUT = "List the pairs that have a name: what is downloaded, the memory a chat needs, whether it is on this machine."


def fill(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="a JSON list in place of the table; sizes in bytes")


def run(args: argparse.Namespace) -> int:
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
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip(), flush=True)
    return 0
