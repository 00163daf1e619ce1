"""What runs, in which order, and what it is compared with: a whole bench of one pair, from costs to record.

Arms take turns prompt by prompt in rotating order; the machine is probed before every prompt.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any, Callable, Iterator, Mapping, Sequence

from ..cache import read_bound
from ..compiled import Traces
from ..control import DRAFT, LARGEST, LOOKUP, LOOKUP_KS, Choice, Controller
from ..costs import ROWS, Costs, measure
from ..engine import Decoder
from ..identity import compare
from ..prompts import encode
from ..types import Options
from . import card as cards
from .arms import OURS, PLAIN, SPECULATIVE, Arm, compile_after, count_rounds, filled, mlx_lm_drafts, run
from .record import VERSION, Record, Run, check
from .stats import Probe, rotated
from .texts import Prompt

WARM_TOKENS, WARM_BOUND = 24, 1024
WARM_AUTO_TOKENS, WARM_REPLIES = 96, 16
AUTO = "auto"
THEIR_K, COUNTED_K = 2, 4  # where no number was asked for; the first is mlx-lm's own default
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
    theirs = [k for k in ks if k not in (0, AUTO)] or [THEIR_K]
    if SPECULATIVE not in baselines or not mlx_lm_drafts(pair):
        theirs = []
    found = []
    for t in temperatures:
        # Without a draft only "auto" may find something to propose.
        mine = dict.fromkeys([*([0] if t else []), *(k for k in ks if pair.draft is not None or k in (0, AUTO))])
        found += [Arm(PLAIN, 0, t), *(Arm(OURS, k, t) for k in mine), *(Arm(SPECULATIVE, k, t) for k in theirs)]
    return found


def encoded(pair: Any, prompts: Sequence[Prompt]) -> list[tuple[Prompt, list[int]]]:
    return [(p, encode(pair.tokenizer, p.messages, vocab_size=pair.vocab_size)[0]) for p in prompts]


def bench(pair: Any, plan: Plan, draft_name: str | None, arguments: dict[str, Any], note: Callable[[str], None]) -> Record:
    """note: is told what goes on. Ctrl-C while prompts run ends it with what there is."""
    note("measuring what a step costs")
    card, costs, first = cards.card(), measure(pair, again=True), plan.prompts[0][1]
    counted = [count_rounds(pair, first, k) for k in _counted(pair, plan)]
    note("warming up")
    warm_up(pair, plan)
    note(f"{len(plan.prompts)} prompt{'s' * (len(plan.prompts) > 1)}, {len(plan.arms)} arms: about {_time(_seconds(pair, plan, costs, first))}")
    found, finished = [], True
    tell = lambda done, of, left: note(f"prompt {done} of {of}, about {_time(left)} left")  # noqa: E731
    try:
        with compile_after(Traces.after):
            for row in runs(pair, plan, costs, Probe(), tell):
                found.append(row)
    except KeyboardInterrupt:
        finished = False
    target = cards.model(pair.target, pair.name)
    draft = None if pair.draft is None else cards.model(pair.draft, draft_name)
    record: Record = {
        "version": VERSION, "made": datetime.now(timezone.utc).isoformat(timespec="seconds"), "finished": finished,
        "arguments": arguments, "card": card, "target": target, "draft": draft,
        "costs": costs_of(costs, counted, card, target, draft), "runs": found, "notes": list(pair.notes),
    }
    check(record)
    return record


def _counted(pair: Any, plan: Plan) -> list[int]:
    """The draft lengths whose rounds are counted: those that run and whose costs are known."""
    if pair.draft is None or pair.draft_profile.reason or pair.target_profile.reason:
        return []
    wanted = [arm.k for arm in plan.arms if arm.k and arm.k != AUTO] or [COUNTED_K]
    return sorted({min(k, ROWS - 1, getattr(pair.draft, "largest", None) or k) for k in wanted})


def costs_of(costs: Costs, counted: Sequence[dict], card: Any, target: Any, draft: Any) -> dict[str, Any]:
    """A record's part on costs."""
    depths = [{"tokens": c.depth, "rows_ms": [s * 1e3 for s in c.rows_s], "step_ms": c.step_s and c.step_s * 1e3,
               "start_ms": c.start_s * 1e3, "c": c.c, "v": [c.v(m + 1) for m in range(len(c.rows_s))]}
              for c in (costs, costs.deep) if c is not None]
    rounds = [r | {"draft_ms": costs.draft_s(r["k"]) * 1e3, "target_ms": costs.rows_s[r["k"]] * 1e3} for r in counted]
    read, k = card["bandwidth_gbs"] * 1e9, max((r["k"] for r in counted), default=0)
    return {"depths": depths, "rounds": rounds, "ceiling_plain_tps": read / target["bytes"],
            "ceiling_rounds_per_s": read / (target["bytes"] + k * draft["bytes"]) if k else None}


class EveryChoice(Controller):
    """What `auto` can choose, one after the other: so that nothing is run for the first time while it is timed."""

    largest, sources = LARGEST, (DRAFT, LOOKUP)

    def __init__(self) -> None:
        self.turns = 0

    def choose(self, length: int, limits: Mapping[str, int], matched: int) -> Choice:
        lookups = [Choice(k, LOOKUP) for k in LOOKUP_KS if k <= limits.get(LOOKUP, 0)]
        self._kinds = [*map(Choice, range(limits.get(DRAFT, 0) + 1)), *lookups, Choice(0)]
        self.turns += 1
        return self._kinds[self.turns % len(self._kinds)]

    @property
    def done(self) -> bool:
        return self.turns > len(self._kinds)

    def learn(self, choice: Choice, accepted: int, seconds: float) -> None:
        pass


def warm_up(pair: Any, plan: Plan) -> None:
    """Every arm once at each length of attention that short prompts reach; shapes seen here are compiled."""
    bounds = {read_bound(len(ids)): ids for _, ids in plan.prompts if len(ids) <= WARM_BOUND} or {0: plan.prompts[0][1]}
    options = plan.options.but(max_tokens=min(WARM_TOKENS, plan.options.max_tokens))
    with compile_after(1):
        for ids in bounds.values():
            for arm in plan.arms:
                run(arm, pair, ids, options)
                if arm.k == AUTO:
                    warm_auto(pair, ids, options)


def warm_auto(pair: Any, ids: Sequence[int], options: Options) -> None:
    every = EveryChoice()
    for _ in range(WARM_REPLIES):  # one may end early
        decoder = Decoder(pair, ids, options.but(max_tokens=WARM_AUTO_TOKENS), controller=every)
        list(decoder.chunks())
        decoder.free()
        if decoder.stats.mode.startswith("plain") or every.done:
            break


def _seconds(pair: Any, plan: Plan, costs: Costs, ids: list[int]) -> float:
    """How long it will take, every reply at its full length and at the speed of plain decoding."""
    began = time.perf_counter()
    filled(pair.target, ids)
    read_s = (time.perf_counter() - began) / len(ids)
    step = costs.rows_s[0] * plan.options.max_tokens
    each = sum(plan.delay_s + len(plan.arms) * (len(ids) * read_s + step) for _, ids in plan.prompts)
    return each * plan.repetitions


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def runs(pair: Any, plan: Plan, costs: Costs, probe: Probe, tell: Callable[[int, int, float], None]) -> Iterator[Run]:
    """The runs of one prompt after the other. tell(done, in all, seconds left) after each prompt."""
    turns = [(n, *prompt) for n in range(plan.repetitions) for prompt in plan.prompts]
    work = [len(ids) + 8 * plan.options.max_tokens for *_, ids in turns]  # a token written costs about as much as eight read
    began = time.perf_counter()
    for turn, (repetition, prompt, ids) in enumerate(turns):
        time.sleep(plan.delay_s)
        yield from _one_prompt(pair, plan, costs, prompt, ids, turn, repetition, probe.read())
        done = sum(work[: turn + 1])
        tell(turn + 1, len(turns), (time.perf_counter() - began) / done * (sum(work) - done))


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
    """The speed-up of a reply's own rounds: its tokens over what the draft's steps and a pass over k + 1 rows cost in each,
    in target steps; looking up is free. None where a round was larger than what was timed."""
    by_place = run["drafted_by_position"]
    drafted = sum(by_place) - run["looked_up"]
    if not tokens or len(by_place) >= len(costs.rows_s) or drafted and costs.step_s is None:
        return None
    spent = run["rounds"] * costs.rows_s[0]
    for place, rounds in enumerate(by_place):
        spent += rounds * (costs.rows_s[place + 1] - costs.rows_s[place])
    if drafted:  # a round is taken to be looked up as often as a token
        spent += drafted * (costs.step_s + costs.start_s * by_place[0] / sum(by_place))
    return tokens * costs.rows_s[0] / spent
