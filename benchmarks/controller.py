"""Is `auto` as good as the best fixed draft length, and never slower than plain decoding?

Four pairs of the demo target: with its draft, with one made useless (its weights drawn at random), with one as slow as the
target (a noisy copy), and with none (prompt lookup alone). Arms take turns prompt by prompt, and the prompts go round the kinds
of text, so that what one reply taught is used on another kind. Greedy; only decoding is timed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Sequence

import mlx_spec  # before mlx.core: it puts a fast BLAS in place

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from arms import endless, noisy_copy
from measure import each_prompt, machine, note, reached, report_machine, show
from mlx_spec.bench import texts
from mlx_spec.bench.arms import by_position, compile_after
from mlx_spec.bench.render import lines
from mlx_spec.bench.run import warm_auto
from mlx_spec.bench.stats import Probe, interval, median, rotated
from mlx_spec.control import LARGEST
from mlx_spec.costs import measure
from mlx_spec.engine import Decoder
from mlx_spec.identity import compare
from mlx_spec.prompts import encode
from mlx_spec.types import Options

SKIPPED = 32  # first tokens of a reply, in which a controller may still be looking
AUTO, DEMO, USELESS, SLOW, NONE = "auto", "demo", "useless", "slow", "none"
PREDICTED_K = 3
COPIES = ("edit", "summarise")  # kinds of text whose replies repeat their prompts


class Arm(NamedTuple):
    pair: str
    k: int | str

    def __str__(self) -> str:
        return f"{self.pair} k={self.k}"


def load(names: Sequence[str]) -> dict[str, Any]:
    """The pairs asked for, of one target; the one without a draft, whose plain decoding the others are held against, always."""
    demo, useless = mlx_spec.load("demo"), mlx_spec.load("demo").draft
    target, tokenizer = demo.target, demo.tokenizer
    randomise(useless)
    made = {DEMO: lambda: demo, USELESS: lambda: mlx_spec.Pair(target, useless, tokenizer),
            SLOW: lambda: mlx_spec.Pair(target, noisy_copy(target), tokenizer), NONE: lambda: mlx_spec.Pair(target, None, tokenizer)}
    return {name: endless(pair()) for name, pair in made.items() if name in (*names, NONE)}


def randomise(draft: Any) -> None:
    """Weights of the same size that know nothing."""
    found = [(path, w) for path, w in tree_flatten(draft.parameters()) if mx.issubdtype(w.dtype, mx.floating) and w.ndim > 1]
    keys = mx.random.split(mx.random.key(0), len(found))
    draft.update(tree_unflatten([(p, (mx.std(w) * mx.random.normal(w.shape, key=k)).astype(w.dtype))
                                 for (p, w), k in zip(found, keys)]), strict=False)


def arms_of(pairs: Mapping[str, Any], ks: Sequence[int]) -> list[Arm]:
    fixed = [Arm(DEMO, k) for k in sorted({*ks, PREDICTED_K}) if DEMO in pairs and 0 < k <= getattr(pairs[DEMO].draft, "largest", LARGEST)]
    slow = [Arm(SLOW, PREDICTED_K)] * (SLOW in pairs)
    return [Arm(NONE, 0), *fixed, *slow, *(Arm(name, AUTO) for name in pairs)]


def reply(pair: Any, ids: Sequence[int], k: int | str, tokens: int) -> dict[str, Any]:
    """Ids, seconds, those of its later part by themselves, and what was drafted."""
    decoder, got, marks = Decoder(pair, ids, Options(max_tokens=tokens, num_draft_tokens=k)), [], [(0, 0.0)]
    for chunk in decoder.chunks():
        got += chunk.tokens
        marks.append((len(got), chunk.stats.generation_s))
    decoder.free()
    at, began = next((m for m in marks if m[0] >= min(SKIPPED, tokens // 2)), marks[0])
    count, seconds = marks[-1]
    stats = decoder.stats
    return {"ids": [t.id for t in got], "tps": count / seconds, "later_tps": (count - at) / (seconds - began),
            "seconds": seconds, "rounds": stats.rounds, "drafted": stats.drafted, "accepted": stats.accepted,
            "looked_up": stats.looked_up} | by_position([t.origin for t in got])


def one_prompt(pairs: Mapping[str, Any], arms: Sequence[Arm], prompts: Sequence[texts.Prompt], tokens: int, ids: list[int],
               turn: int) -> dict[str, Any]:
    runs = {str(a): reply(pairs[a.pair], ids, a.k, tokens) for a in rotated(arms, turn)}
    plain = runs[str(Arm(NONE, 0))]["ids"]
    verdicts = {name: str(compare(pairs[NONE], ids, plain, run["ids"])) for name, run in runs.items()}
    return {"kind": prompts[turn].category, "length": len(ids), "runs": runs, "verdicts": verdicts}


def ratio(records: Sequence[dict], a: Arm, b: Arm, figure: str = "tps") -> dict[str, float | None]:
    return interval([r["runs"][str(a)][figure] / r["runs"][str(b)][figure] for r in records])


def speed(records: Sequence[dict], arm: Arm) -> float:
    runs = [r["runs"][str(arm)] for r in records]
    return sum(len(run["ids"]) for run in runs) / sum(run["seconds"] for run in runs)


def against_fixed(kinds: Mapping[str, list[dict]], arms: Sequence[Arm]) -> str:
    """1: against the best fixed k of each kind of text, and of all of it."""
    fixed, cells = [a for a in arms if a.k != AUTO and a.pair in (DEMO, NONE)], []
    for kind, records in {**kinds, "all, one stream": [r for found in kinds.values() for r in found]}.items():
        best = max(fixed, key=partial(speed, records))
        found, wanted = speed(records, Arm(DEMO, AUTO)) / speed(records, best), 0.97 if kind in kinds else 1.0
        plain = speed(records, Arm(DEMO, AUTO)) / speed(records, Arm(NONE, 0))
        cells.append([kind, best.k, f"{found:.3f}", f"{plain:.2f}", reached(found >= wanted, f">= {wanted}")])
    return lines(["kind of text", "best fixed k", "auto / best fixed", "auto / plain", "target"], cells)


def against_plain(kinds: Mapping[str, list[dict]], names: Sequence[str]) -> str:
    """2: against plain decoding after the first tokens, the worst kind of text."""
    cells = []
    for name in names:
        found = {kind: ratio(records, Arm(name, AUTO), Arm(NONE, 0), "later_tps") for kind, records in kinds.items()}
        worst = min(found, key=lambda kind: found[kind]["median"])
        cells.append([name, worst, show(found[worst]), reached(found[worst]["median"] >= 0.98, ">= 0.98")])
    return lines(["draft", "worst kind", "auto / plain", "target"], cells)


def lookup_alone(kinds: Mapping[str, list[dict]]) -> str:
    """3: without a draft model."""
    cells = []
    for kind, records in kinds.items():
        found = ratio(records, Arm(NONE, AUTO), Arm(NONE, 0))
        wanted = 1.3 if kind in COPIES else 0.98
        share = sum(r["runs"][str(Arm(NONE, AUTO))]["accepted"] for r in records) / sum(
            len(r["runs"][str(Arm(NONE, AUTO))]["ids"]) for r in records)
        cells.append([kind, show(found), f"{share:.0%}", reached(found["median"] >= wanted, f">= {wanted}")])
    return lines(["kind of text", "auto / plain", "tokens that were looked up", "target"], cells)


def predictions(kinds: Mapping[str, list[dict]], pairs: Mapping[str, Any], tokens: int) -> str:
    """6: what costs and acceptance promise for a fixed k, and what came."""
    cells, near = [], 0
    for name in (name for name in (DEMO, SLOW) if name in pairs):
        for kind, records in kinds.items():
            arm, runs = Arm(name, PREDICTED_K), [r["runs"][str(Arm(name, PREDICTED_K))] for r in records]
            judged, kept = ([sum(sum(run[what][i : i + 1]) for run in runs) for i in range(PREDICTED_K)] for what in ("judged", "kept"))
            acceptance = [b / max(a, 1) for a, b in zip(judged, kept)]
            depth = int(median([r["length"] for r in records]) + tokens / 2)
            promised = measure(pairs[name]).at(depth).speedup(acceptance, PREDICTED_K)
            came = ratio(records, arm, Arm(NONE, 0))
            near += abs(promised / came["median"] - 1) <= 0.1
            cells.append([name, kind, " ".join(f"{a:.2f}" for a in acceptance), f"{promised:.2f}", show(came)])
    table = lines(["draft", "kind of text", "acceptance", "predicted", "measured"], cells)
    return f"{table}\n\n{near} of {len(cells)} within 10 %: {reached(near >= 0.9 * len(cells), '>= 9 of 10')}"


def report(records: list[dict], arms: Sequence[Arm], pairs: Mapping[str, Any], tokens: int) -> str:
    kinds = defaultdict(list)
    for r in records:
        kinds[r["kind"]].append(r)
    verdicts = [v for r in records for v in r["verdicts"].values()]
    differing = [v for v in verdicts if v != "identical"]
    drafted = [name for name in pairs if name != NONE]
    parts = {"Auto and the best fixed k": against_fixed(kinds, arms)} if DEMO in pairs else {}
    parts |= {"Auto and plain decoding": against_plain(kinds, drafted)} if drafted else {}
    parts |= {"Prompt lookup alone": lookup_alone(kinds)}
    parts |= {f"Predicted and measured, k = {PREDICTED_K}": predictions(kinds, pairs, tokens)} if {DEMO, SLOW} & set(pairs) else {}
    parts |= {"Identity": f"{len(verdicts) - len(differing)} of {len(verdicts)} replies are plain decoding's; "
                          f"else {sorted(set(differing)) or 'none'}"}
    return "\n\n".join(f"## {title}\n\n{text}" for title, text in parts.items())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options.add_argument("--kinds", nargs="+", choices=texts.CATEGORIES, default=[k for k in texts.CATEGORIES if k != "long"])
    options.add_argument("--pairs", nargs="+", choices=(DEMO, USELESS, SLOW, NONE), default=[DEMO, USELESS, SLOW, NONE])
    options.add_argument("--each", type=int, default=4, help="prompts of a kind (%(default)s)")
    options.add_argument("--tokens", type=int, default=128, help="of each reply (%(default)s)")
    options.add_argument("--k", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8])
    options.add_argument("--out", metavar="FILE.md", help="write the report there too")
    options.add_argument("--json", metavar="FILE", help="write everything raw")
    options.add_argument("--quick", action="store_true", help="two kinds, one prompt each, 12 tokens: does it work?")
    args = options.parse_args()
    if args.quick:
        args.kinds, args.each, args.tokens, args.k = ["chat", "edit"], 1, 12, [2]
    os.environ["MLX_SPEC_DTYPE"] = args.dtype
    card, pairs, probe = machine(args.dtype), load(args.pairs), Probe()
    report_machine(card)
    for name, pair in pairs.items():
        note(f"costs of {name}")
        measure(pair, again=True)
    found = texts.load(args.kinds, args.each)
    prompts = [p for turn in range(args.each) for p in found if [q for q in found if q.category == p.category].index(p) == turn]
    ids, arms = [encode(pairs[NONE].tokenizer, p.messages)[0] for p in prompts], arms_of(pairs, args.k)
    note("warming up")
    with compile_after(1):
        for arm in arms:
            reply(pairs[arm.pair], ids[0], arm.k, min(args.tokens, SKIPPED))
        for pair in pairs.values():
            warm_auto(pair, ids[0], Options())
    for pair in pairs.values():
        pair.learnt.clear()
    records = each_prompt(ids, probe, partial(one_prompt, pairs, arms, prompts, args.tokens))
    text = report(records, arms, pairs, args.tokens)
    print(text)
    probe.read()
    report_machine(card, probe)
    if args.out:
        facts = "\n".join(f"{name}: {value}  " for name, value in card.items())
        Path(args.out).write_text(f"# The draft length by itself\n\n{facts}\n\n{text}\n", encoding="utf-8")
    if args.json:
        Path(args.json).write_text(json.dumps({"machine": card, "records": records, "probe": probe.readings}, indent=1))


if __name__ == "__main__":
    main()
