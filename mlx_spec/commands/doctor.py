"""`mlx_spec doctor`: what was found, and below it what to do."""

from __future__ import annotations

import argparse

from . import FAILED

HELP = "is this machine set up well?"
USAGE = "[--pair NAME]"
ABOUT = "Check device, memory, versions, power, BLAS, hub and folders. The exit code is 1 where there is something to do."


def fill(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pair", metavar="NAME", default="demo", help="what is to run, see `mlx_spec pairs`")


def run(args: argparse.Namespace) -> int:
    from ..doctor import findings
    from ..names import need

    bad = False
    for finding in findings(need(args.pair)):
        print(f"{'!' if finding.todo else ' '} {finding.name:<9} {finding.found}", flush=True)
        if finding.todo:
            print(f"            -> {finding.todo}", flush=True)
        bad |= finding.todo is not None
    return FAILED if bad else 0
