"""What benchmarks/drafters.py makes of its records: figures, targets, tables.

A record is one prompt's: runs by the name of their arm, and costs. Knows nothing of models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Sequence

import mlx_spec  # noqa: F401  before mlx.core: it puts a fast BLAS in place

from arms import Setting
from identity import Reply, is_bug
from measure import reached, show, table
from mlx_spec.bench.run import predicted
from mlx_spec.bench.stats import interval, median
from mlx_spec.costs import Costs

GAIN = {0.0: 1.25, 0.8: 1.1}  # over mlx-lm's plain decoding, by temperature
AIM = 1.4  # greedy
OF_PREDICTED = 0.95
KINDS = {"mlx_spec_heads": "heads", "mlp_speculator": "mlp"}


class Arm(NamedTuple):
    who: str  # ours, theirs, plain: mlx-lm's
    setting: Setting

    def __str__(self) -> str:
        return f"{self.who} {self.setting}"

    @property
    def plain(self) -> Arm:
        """What is timed beside it."""
        return Arm("plain", self.setting._replace(k=0))


def median_costs(records: Sequence[dict], draft: str) -> Costs:
    """In target steps, so that step_s is c."""
    costs = [r["costs"] for r in records]
    rows = tuple(median([c["rows_s"][m] / c["rows_s"][0] for c in costs]) for m in range(len(costs[0]["rows_s"])))
    return Costs(rows, median([c["step_s"][draft] / c["rows_s"][0] for c in costs]))


def predicted_gain(run: dict[str, Any], costs: Costs) -> float:
    return predicted(run | {"looked_up": 0}, len(run["ids"]), costs)  # k is fixed


def acceptance(runs: Sequence[dict]) -> list[float]:
    """By place in the round, given that the drafts before were kept; over all replies."""
    places = max(len(run["judged"]) for run in runs)
    kept, judged = ([sum(run[name][i] for run in runs if i < len(run[name])) for i in range(places)]
                    for name in ("kept", "judged"))
    return [a / b for a, b in zip(kept, judged)]


def figures_of(records: Sequence[dict], arms: Sequence[Arm]) -> dict[Arm, dict[str, Any]]:
    """gain: over mlx-lm's plain decoding. bug: a greedy reply of ours is wrong, so there is no speed."""
    found = {}
    for arm in arms:
        if arm.who == "plain":
            continue
        runs = [r["runs"][str(arm)] for r in records]
        gains = [plain_s(r, arm.setting.temperature) / run["seconds"] for r, run in zip(records, runs)]
        found[arm] = {"gain": interval(gains), "bug": any(map(is_bug, replies(records, [arm]))),
                      "tokens_per_round": sum(len(run["ids"]) for run in runs) / sum(run["rounds"] for run in runs)}
        if arm.who == "ours":
            costs = median_costs(records, arm.setting.draft)
            predicted = [predicted_gain(run, costs) for run in runs]
            found[arm] |= {"predicted": interval(predicted), "acceptance": acceptance(runs),
                           "measured/predicted": interval([gain / p for gain, p in zip(gains, predicted)])}
    return found


def plain_s(record: dict[str, Any], temperature: float) -> float:
    return median([run["seconds"] for name, run in record["runs"].items()
                   if name.startswith("plain") and name.endswith(f"T={temperature}")])


def plain_steps(records: Sequence[dict], temperature: float) -> float:
    """Of one of its tokens, in target steps: more than 1 where mlx-lm is slower than bare calls of the target."""
    tokens = len(next(iter(records[0]["runs"].values()))["ids"])
    return median([plain_s(r, temperature) / tokens / r["costs"]["rows_s"][0] for r in records])


def temperatures(found: Mapping[Arm, dict]) -> list[float]:
    return list(dict.fromkeys(arm.setting.temperature for arm in found))


def replies(records: Sequence[dict], arms: Sequence[Arm]) -> list[Reply]:
    return [Reply(str(arm.setting), r["prompt"], arm.who, r["runs"][str(arm)]["difference"])
            for r in records for arm in arms if "difference" in r["runs"][str(arm)]]


def best(found: Mapping[Arm, dict], who: str, temperature: float, draft: str | None = None) -> Arm | None:
    """The fastest arm, of one draft or of all; the largest median, so a little flattered."""
    mine = [a for a, f in found.items() if a.who == who and a.setting.temperature == temperature and not f["bug"]
            and draft in (None, a.setting.draft)]
    return max(mine, key=lambda a: found[a]["gain"]["median"], default=None)


def paired(records: Sequence[dict], arm: Arm, other: Arm) -> dict[str, float]:
    """Speed of one over speed of the other."""
    return interval([r["runs"][str(other)]["seconds"] / r["runs"][str(arm)]["seconds"] for r in records])


# the report


def report_training(folders: Mapping[str, str]) -> None:
    """What a folder's config.json keeps of its training."""
    rows = []
    for name, folder in folders.items():
        path = Path(folder) / "config.json"
        config = json.loads(path.read_text()) if path.exists() else {}
        facts = config.get("mlx_spec") or {}
        size = sum(f.stat().st_size for f in path.parent.glob("*.safetensors"))
        rates = [_by_place(facts.get(key, [])) for key in ("acceptance_by_step", "overlap_by_step")]
        rows.append([name, KINDS.get(config.get("model_type"), "draft"), *rates, facts.get("judged_rows", "-"),
                     f"{size:,}", facts.get("training_s", "-")])
    print("from the training report, not measured here: held-out text, by step (greedy: if the earlier ones stood)")
    table(["draft", "kind", "greedy acceptance", "sum min(p, q)", "judged rows", "bytes", "training s"], rows)


def _by_place(rates: Sequence[float]) -> str:
    return " ".join(f"{rate:.3f}" for rate in rates) or "-"


def report_parts(found: Mapping[Arm, dict], records: Sequence[dict]) -> None:
    costs = {arm.setting.draft: median_costs(records, arm.setting.draft) for arm in found}
    rows = next(iter(costs.values())).rows_s
    print("costs in target steps, medians over the prompts; c: a draft's step; v(m): the target's pass over m rows")
    table(["draft", "c", *(f"v({m + 1})" for m in range(len(rows)))],
          [[name, f"{c.c:.3f}", *(f"{v:.3f}" for v in rows)] for name, c in costs.items()])
    for temperature in temperatures(found):
        print(f"mlx-lm's plain decoding, T={temperature}: {plain_steps(records, temperature):.3f} target steps a "
              "token; measured/predicted has this factor in it")
    print()
    print("acceptance by place in the round, given that the drafts before were kept, at the draft's largest k")
    ours = sorted((arm for arm in found if arm.who == "ours"), key=lambda arm: arm.setting.k)
    largest = {(arm.setting.draft, arm.setting.temperature): arm for arm in ours}
    table(["setting", "acceptance"], [[arm.setting, _by_place(found[arm]["acceptance"])] for arm in largest.values()])


def report_speeds(found: Mapping[Arm, dict]) -> None:
    print("speed over mlx-lm's plain decoding: median over the prompts [95 % bootstrap interval]; below 1: a loss")
    print("predicted: what the same replies' rounds give by c and v(m)")
    rows = []
    for arm, f in found.items():
        ratios = ["-" if f["bug"] or name not in f else show(f[name])
                  for name in ("gain", "predicted", "measured/predicted")]
        rows.append([arm.setting, "ours" if arm.who == "ours" else "mlx-lm", f"{f['tokens_per_round']:.2f}", *ratios,
                     _remark(found, arm)])
    table(["setting", "by", "tokens a round", "speed / plain", "predicted", "measured/predicted", ""], rows)


def _remark(found: Mapping[Arm, dict], arm: Arm) -> str:
    if found[arm]["bug"]:
        return "BUG: no speed"
    top = best(found, arm.who, arm.setting.temperature, arm.setting.draft)
    return ", ".join(["best k"] * (arm == top) + ["a loss"] * (found[arm]["gain"]["median"] < 1))


def report_targets(found: Mapping[Arm, dict], records: Sequence[dict]) -> None:
    """Each draft at its best k, and what mlx-lm's own speculative decoding reaches."""
    rows = [target_row(found, records, *key)
            for key in dict.fromkeys((arm.setting.temperature, arm.setting.draft) for arm in found)]
    print("targets, each draft at its best k; *: the best draft, which the targets are for")
    table(["setting", "speed / plain", "target", "measured/predicted", "target", "ours / mlx-lm speculative",
           "target"], rows)
    for temperature in temperatures(found):
        peer = best(found, "theirs", temperature)
        if peer is not None:
            print(f"mlx-lm speculative at its best, {peer.setting}: {show(found[peer]['gain'])} of its plain one")
    print()


def target_row(found: Mapping[Arm, dict], records: Sequence[dict], temperature: float, draft: str) -> list[Any]:
    arm, peer = best(found, "ours", temperature, draft), best(found, "theirs", temperature)
    if arm is None:
        return [f"{draft} T={temperature}", "BUG: no speed", *[""] * 5]
    gain, close = found[arm]["gain"], found[arm]["measured/predicted"]
    against = ["-", "no draft for mlx-lm"]
    if peer is not None:
        ratio = paired(records, arm, peer)
        against = [show(ratio), reached(ratio["low"] > 1, "lower end > 1")]
    mark = " *" if arm == best(found, "ours", temperature) else ""
    return [f"{arm.setting}{mark}", show(gain), reached_gain(gain["median"], temperature), show(close),
            reached(close["median"] >= OF_PREDICTED, f">= {OF_PREDICTED}"), *against]


def reached_gain(gain: float, temperature: float) -> str:
    wanted = GAIN[temperature]
    if temperature:
        return reached(gain > wanted, f"> {wanted}")
    return reached(gain >= wanted, f">= {wanted}; aim {AIM}: {'yes' if gain >= AIM else 'NO'}")
