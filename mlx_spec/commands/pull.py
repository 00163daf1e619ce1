"""`mlx_spec pull`: download a pair."""

from __future__ import annotations

import argparse
import sys

HELP = "download a pair"
USAGE = "NAME"
ABOUT = "Download a pair by its name, or one hub repository. The size is said first; where it is comes to stdout."


def fill(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a pair's name (see `mlx_spec pairs`) or owner/name on the hub")


def run(args: argparse.Namespace) -> int:
    from ..names import find, pull
    from ..hub import readable

    entry = find(args.name)
    if entry is not None:
        print(f"{entry.name}: {readable(entry.size_bytes)}, {entry.licence}; "
              f"running it takes about {readable(entry.memory_bytes)} of memory", file=sys.stderr, flush=True)
    for path in pull(args.name):
        print(path, flush=True)
    return 0
