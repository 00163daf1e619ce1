"""Does `mlx_spec bench --compare` tell a build from one that is 5 % slower? The slow one sleeps in every round.

    python benchmarks/bench_power.py --out FOLDER [--slower 0.05] [bench options, for example: -k 1 --prompts chat,code -n 2]

Runs the bench three times, each in a process of its own: as it is, again, and slowed; writes base.json, again.json
and slow.json and compares them. Exit code 0 if, over all prompts, the slow one is told apart and the second run is not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable

from mlx_spec import cli
from mlx_spec.bench import compare, figures, record
from mlx_spec.bench.arms import OURS
from mlx_spec.engine import Decoder


def slowed(share: float) -> Callable[[Any], Any]:
    """Decoder._read, and after it a sleep of this share of the round's time."""
    original = Decoder._read

    def read(decoder: Decoder) -> Any:
        found, now = original(decoder), time.perf_counter()
        last = getattr(decoder, "last_read", None)
        if last is not None:
            time.sleep(share * (now - last))
        decoder.last_read = time.perf_counter()
        return found

    return read


def one(share: float, bench: list[str], path: str) -> int:
    """A bench in a process of its own, as somebody who compares two builds would run it."""
    return subprocess.run([sys.executable, __file__, "--out", path, "--child", str(share), *bench]).returncode


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", required=True, metavar="FOLDER")
    options.add_argument("--slower", type=float, default=0.05, help="share of a round (%(default)s)")
    options.add_argument("--child", type=float, help=argparse.SUPPRESS)
    args, bench = options.parse_known_args()
    if args.child is not None:
        if args.child:
            Decoder._read = slowed(args.child)
        return cli.main(["bench", *bench, "-o", "csv", "--out", args.out])
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(folder / f"{name}.json") for name in ("base", "again", "slow")]
    for path in paths:
        if code := one(args.slower if path == paths[-1] else 0.0, bench, path):
            return code
    cli.main(["bench", "--compare", *paths])
    base, again, slow = map(record.read, paths)
    arms = [arm for arm in dict.fromkeys(map(figures.arm_of, base["runs"])) if arm.engine == OURS]
    told = [(compare.against(base, again, arm), compare.against(base, slow, arm)) for arm in arms]
    right = all(same["low"] < 1 < same["high"] and worse["high"] < 1 for same, worse in told)
    print("told apart" if right else "NOT told apart: more prompts (--each 0) or repetitions (-n 3)")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
