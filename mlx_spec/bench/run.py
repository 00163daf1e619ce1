"""What runs, in which order, and what it is compared with.

Arms take turns prompt by prompt in rotating order; the machine is probed before every prompt.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any, Callable, Iterator, Sequence

from ..cache import read_bound
from ..costs import Costs
from ..identity import compare
from ..prompts import encode
from ..types import Options
from .arms import OURS, PLAIN, SPECULATIVE, Arm, compile_after, mlx_lm_drafts, run
from .record import Run
from .stats import Probe, rotated
from .texts import Prompt

WARM_TOKENS, WARM_BOUND = 24, 1024
THEIR_K = 2  # mlx-lm's own default, where no number was asked for
END = -1  # stands for an end token, so that a reply that ends too early differs


@dataclass(frozen=True)
class Plan:
    """What was asked for. prompts: with their ids."""

    arms: Sequence[Arm]
    prompts: Sequence[tuple[Prompt, list[int]]]
    repetitions: int
    options: Options
    delay_s: float = 0.0


def arms_of(pair: Any, ks: Sequence[int | str], temperatures: Sequence[float], baselines: Sequence[str]) -> list[Arm]:
    """Plain decoding first: every speed-up is over it. Above temperature 0 ours with k = 0 is there too, which has the
    noise that the others must agree with."""
    found = []
    theirs = [k for k in ks if k not in (0, "auto")] or [THEIR_K]
    if SPECULATIVE not in baselines or not mlx_lm_drafts(pair):
        theirs = []
    for t in temperatures:
        # Without a draft only "auto" may find something to propose.
        mine = dict.fromkeys([*([0] if t else []), *(k for k in ks if pair.draft is not None or k in (0, "auto"))])
        found += [Arm(PLAIN, 0, t), *(Arm(OURS, k, t) for k in mine), *(Arm(SPECULATIVE, k, t) for k in theirs)]
    return found


def encoded(pair: Any, prompts: Sequence[Prompt]) -> list[tuple[Prompt, list[int]]]:
    return [(p, encode(pair.tokenizer, p.messages, vocab_size=pair.vocab_size)[0]) for p in prompts]


def warm_up(pair: Any, plan: Plan) -> None:
    """Every arm once at each length of attention that short prompts reach; shapes seen here are compiled."""
    bounds = {read_bound(len(ids)): ids for _, ids in plan.prompts if len(ids) <= WARM_BOUND} or {0: plan.prompts[0][1]}
    options = plan.options.but(max_tokens=min(WARM_TOKENS, plan.options.max_tokens))
    with compile_after(1):
        for ids in bounds.values():
            for arm in plan.arms:
                run(arm, pair, ids, options)


def seconds(plan: Plan, costs: Costs, read_s: float) -> float:
    """How long it will take, every reply at its full length and at the speed of plain decoding; read_s: of a prompt token."""
    step = costs.rows_s[0] * plan.options.max_tokens
    each = sum(plan.delay_s + len(plan.arms) * (len(ids) * read_s + step) for _, ids in plan.prompts)
    return each * plan.repetitions


def runs(pair: Any, plan: Plan, costs: Costs, probe: Probe, tell: Callable[[int, int, float], None]) -> Iterator[Run]:
    """The runs of one prompt after the other. tell(done, in all, seconds left) after each prompt."""
    began, left = time.perf_counter(), [len(ids) + 8 * plan.options.max_tokens for _, ids in plan.prompts]
    total = sum(left) * plan.repetitions  # a token written costs about as much as eight read
    done, turn = 0, 0
    for repetition in range(plan.repetitions):
        for i, (prompt, ids) in enumerate(plan.prompts):
            time.sleep(plan.delay_s)
            yield from _one_prompt(pair, plan, costs, prompt, ids, turn, repetition, probe.read())
            done, turn = done + left[i], turn + 1
            used = time.perf_counter() - began
            tell(turn, plan.repetitions * len(plan.prompts), used / done * (total - done))


def _one_prompt(pair: Any, plan: Plan, costs: Costs, prompt: Prompt, ids: list[int], turn: int, repetition: int,
                probed: dict[str, float]) -> list[Run]:
    options = plan.options.but(seed=turn)
    replies = {arm: run(arm, pair, ids, options) for arm in rotated(plan.arms, turn)}
    found = []
    for arm in plan.arms:
        reply = {name: value for name, value in replies[arm].items() if name not in ("ids", "ended")}
        tokens = len(replies[arm]["ids"])
        found.append(reply | {
            "prompt": prompt.id, "category": prompt.category, "repetition": repetition, "engine": arm.engine, "k": arm.k,
            "temperature": arm.temperature, "prompt_tokens": len(ids), "tokens": tokens,
            "identity": _identity(pair, ids, arm, replies, options),
            "predicted": predicted(reply, tokens, costs.at(len(ids) + tokens // 2)),
            "probe_ms": probed["ms"], "load": probed["load"]})
    return found


def _identity(pair: Any, ids: list[int], arm: Arm, replies: dict[Arm, Any], options: Options) -> dict | None:
    """Greedy: against mlx-lm's plain reply. With `match`: against ours with k = 0 and the same seed."""
    wanted = Arm(OURS, 0, arm.temperature) if arm.temperature else Arm(PLAIN, 0, 0.0)
    comparable = arm.temperature == 0 or (arm.engine == OURS and options.verify == "match")
    if arm == wanted or not comparable:
        return None
    plain, got = ([*r["ids"], END] if r["ended"] else r["ids"] for r in (replies[wanted], replies[arm]))
    return asdict(compare(pair, ids, plain, got, options.but(temperature=arm.temperature), options.seed))


def predicted(run: dict[str, Any], tokens: int, costs: Costs) -> float | None:
    """The speed-up of a reply's own rounds: its tokens over what k draft steps and a pass over k + 1 rows cost in each,
    in target steps. None where a round was larger than what was timed."""
    by_place = run["drafted_by_position"]
    if not tokens or len(by_place) >= len(costs.rows_s) or by_place and costs.step_s is None:
        return None
    spent = run["rounds"] * costs.rows_s[0] + costs.start_s * sum(by_place[:1])
    for place, rounds in enumerate(by_place):
        spent += rounds * (costs.step_s + costs.rows_s[place + 1] - costs.rows_s[place])
    return tokens * costs.rows_s[0] / spent
