"""Does `mlx_spec bench --compare` tell a build from one that is 5 % slower? The slow one sleeps in every round.

    python benchmarks/bench_power.py --out FOLDER [--runs 4] [--slower 0.05] [bench options, for example: -k 0 --quick]

Runs the bench as it is, again as it is, and slowed, in turns, --runs times each and each time in a process of its own;
writes base-1.json, again-1.json, slow-1.json, ... and compares them; records that are there already are not made again.
Says how far processes of one build agree, too. Exit code 0 if, over all prompts, the slow build is told apart and the same
one is not.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import time
from itertools import permutations
from pathlib import Path
from typing import Any, Callable, Sequence

from mlx_spec import cli
from mlx_spec.bench import compare, figures, record
from mlx_spec.bench.arms import OURS
from mlx_spec.bench.stats import rotated
from mlx_spec.engine import Decoder

BUILDS = ("base", "again", "slow")


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


def agreement(records: Sequence[record.Record]) -> str:
    """Of records of one build, over all prompts: how often one's interval holds another's median, and what differs
    between processes (standard deviations, relative)."""
    said = []
    for arm in dict.fromkeys(map(figures.arm_of, records[0]["runs"])):
        found = [row for r in records for row in figures.rows(r)[-len(set(map(figures.arm_of, r["runs"]))):] if row.arm == arm]
        part = f"{arm}: tokens/s {_varied([row.tps for row in found]):.1%}"
        if gains := [row.speedup for row in found if row.speedup]:
            held = [a["low"] <= b["median"] <= a["high"] for a, b in permutations(gains, 2) if a["low"] is not None]
            part += f", speed / plain {_varied([g['median'] for g in gains]):.1%}; {sum(held)} of {len(held)} pairs agree"
        said.append(part)
    return f"{len(records)} processes of one build differ in " + "; ".join(said)


def _varied(values: Sequence[float]) -> float:
    return statistics.stdev(map(math.log, values))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", required=True, metavar="FOLDER")
    options.add_argument("--runs", type=int, default=4, help="of each (%(default)s)")
    options.add_argument("--slower", type=float, default=0.05, help="share of a round (%(default)s)")
    options.add_argument("--child", type=float, help=argparse.SUPPRESS)
    args, bench = options.parse_known_args()
    if args.child is not None:
        if args.child:
            Decoder._read = slowed(args.child)
        return cli.main(["bench", *bench, "-o", "csv", "--out", args.out])
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: [str(folder / f"{name}-{i + 1}.json") for i in range(args.runs)] for name in BUILDS}
    for i in range(args.runs):
        for name in rotated(BUILDS, i):
            if not Path(paths[name][i]).exists() and (code := one(args.slower if name == "slow" else 0.0, bench, paths[name][i])):
                return code
    cli.main(["bench", "--compare", *map(",".join, paths.values())])
    base, again, slow = (compare.Build(name, [record.read(path) for path in found]) for name, found in paths.items())
    arms = [arm for arm in dict.fromkeys(map(figures.arm_of, base.records[0]["runs"])) if arm.engine == OURS]
    told = [(compare.against(base, again, arm), compare.against(base, slow, arm)) for arm in arms]
    right = all(same["low"] < 1 < same["high"] and worse["high"] < 1 for same, worse in told)
    print(agreement([*base.records, *again.records]))
    print("told apart" if right else "NOT told apart: more --runs")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
