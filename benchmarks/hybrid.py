"""A target with recurrent layers: a round against its ideal, and the memory that rewinding takes.

Random weights in the shape of a small Qwen3.5 (gated delta net in three layers of four) with a draft
of the same kind. The ideal is the same round made of bare mlx-lm calls, which can't be rewound: one
pass over k + 1 rows and k draft steps, each timed as a dependent chain. Arms take turns.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import mlx_spec  # before mlx.core: it puts a fast BLAS in place

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models import qwen3_5

from arms import chain
from measure import each_prompt, machine, note, reached, report_machine, show, table
from mlx_spec.bench.arms import compile_after, filled
from mlx_spec.bench.stats import Probe, interval, median, rotated
from mlx_spec.engine import Decoder
from mlx_spec.recurrent.state import Recurrent
from mlx_spec.types import Options

IDEAL_TARGET = 0.85
CONTEXT = 64
VOCAB = 32768
TARGET = dict(layers=24, width=1024, heads=16)
DRAFT = dict(layers=4, width=512, heads=8)
QUICK = dict(layers=4, width=64, heads=2)


def model(seed: int, layers: int, width: int, heads: int) -> Any:
    """Sizes as in Qwen3.5 but for the vocabulary, whose large head would hide what the layers cost."""
    mx.random.seed(seed)
    args = dict(
        model_type="qwen3_5", hidden_size=width, intermediate_size=7 * width // 2, num_hidden_layers=layers, vocab_size=VOCAB,
        num_attention_heads=max(width // 128, 2), num_key_value_heads=2, head_dim=128, linear_num_value_heads=heads,
        linear_num_key_heads=heads, linear_key_head_dim=128, linear_value_head_dim=128, tie_word_embeddings=True)
    made = qwen3_5.Model(qwen3_5.ModelArgs.from_dict(args))
    made.update(tree_map(lambda w: w.astype(mx.float32), made.parameters()))
    mx.eval(made)
    return made.eval()


def prompt(turn: int) -> list[int]:
    return mx.random.randint(0, VOCAB, (CONTEXT,), key=mx.random.key(turn)).tolist()


def rounds(pair: Any, ids: list[int], k: int, count: int) -> dict[str, float]:
    """Seconds of a round, and the peak while rounds run over what is held between them."""
    decoder = Decoder(pair, ids, Options(max_tokens=None, num_draft_tokens=k))
    chunks = decoder.chunks()
    for _ in range(3):
        next(chunks)
    began, seconds = decoder.stats.rounds, decoder.stats.generation_s
    mx.reset_peak_memory()
    for _ in range(count):
        next(chunks)
    found = {"s": (decoder.stats.generation_s - seconds) / (decoder.stats.rounds - began), "peak": mx.get_peak_memory()}
    state = zip(decoder.context.round.layers, decoder.context.state.target)
    found["copy"] = sum(a.nbytes for layer, arrays in state if isinstance(layer, Recurrent) for a in arrays)
    chunks.close()
    decoder.free()
    return found


def one_prompt(pair: Any, ks: list[int], count: int, ids: list[int], turn: int) -> dict[str, Any]:
    target, draft = (filled(m, ids) for m in (pair.target, pair.draft))
    arms = {"draft": lambda: chain(pair.draft, draft, 1), "plain": lambda: rounds(pair, ids, 0, count)}
    for k in ks:
        arms[f"verify {k}"] = partial(chain, pair.target, target, k + 1)
        arms[f"round {k}"] = partial(rounds, pair, ids, k, count)
    return {name: arms[name]() for name in rotated(list(arms), turn)}


def report(records: list[dict], ks: list[int]) -> None:
    rows = []
    for k in ks:
        ideal = [r[f"verify {k}"] + k * r["draft"] for r in records]
        ratio = interval([i / r[f"round {k}"]["s"] for i, r in zip(ideal, records)])
        copies = max((r[f"round {k}"]["peak"] - r["plain"]["peak"]) / r["plain"]["copy"] for r in records)
        ms = [median(x) * 1e3 for x in ([r[f"round {k}"]["s"] for r in records], [r[f"verify {k}"] for r in records],
                                        [r["draft"] for r in records])]
        rows.append([k, show(ratio), reached(ratio["median"] >= IDEAL_TARGET, f">= {IDEAL_TARGET}"), *(f"{x:.1f}" for x in ms),
                     f"{copies:.1f}", reached(copies < k + 2, f"< {k + 2}")])
    table(["k", "ideal/round", "target", "round ms", "verify ms", "draft step ms", "peak over plain, copies of the state", "target"],
          rows)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--k", type=int, nargs="+", default=[2, 4])
    options.add_argument("--prompts", type=int, default=8)
    options.add_argument("--rounds", type=int, default=24, help="timed of each reply (%(default)s)")
    options.add_argument("--json", metavar="FILE", help="write everything raw")
    options.add_argument("--quick", action="store_true", help="tiny models, two prompts: does it work?")
    args = options.parse_args()
    if args.quick:
        args.prompts, args.rounds = 2, 4
    card = machine("float32")
    report_machine(card)
    pair = mlx_spec.Pair(*(model(seed, **(QUICK if args.quick else size)) for seed, size in enumerate((TARGET, DRAFT))))
    probe = Probe()
    note("warming up")
    with compile_after(1):
        for k in (0, *args.k):
            rounds(pair, prompt(args.prompts), k, 4)
    with compile_after(1 << 30):
        records = each_prompt([prompt(i) for i in range(args.prompts)], probe, partial(one_prompt, pair, args.k, args.rounds))
    report(records, args.k)
    probe.read()
    report_machine(card, probe)
    if args.json:
        Path(args.json).write_text(json.dumps({"machine": card, "records": records, "probe": probe.readings}, indent=1))


if __name__ == "__main__":
    main()
