"""How many tokens to draft in the next round and where from; 0 is plain decoding.

A controller sees only what is already committed, so it never changes the law of the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Mapping, NamedTuple, Protocol, Sequence

from .costs import Costs, expected

DRAFT, LOOKUP = "draft", "lookup"
LARGEST = 8
LOOKUP_KS = (2, 4, 8)  # few, because every k is a shape of its own

# Acceptance until there is evidence, which gives IBM's 3-4 tokens for prose and 6-8 for code with a
# draft of a twentieth of the target (arXiv 2404.19124); of lookup, by the length of the match.
PRIOR = {"prose": 0.7, "code": 0.85}
MATCHES = {2: 0.35, 3: 0.5, 4: 0.65, 8: 0.8}
# What they weigh, in rounds: little for a draft, since one that is of no use is left the sooner.
PRIOR_ROUNDS = {DRAFT: 2.0, LOOKUP: 4.0}
PLACE_ROUNDS, KEPT_ROUNDS = 4.0, 12.0  # and the place before, and an earlier request
FADE = 0.98  # of the evidence, each time there is new

MARGIN = 1.03  # what another k must gain
FIRST_WAIT, LONGEST_WAIT = 16, 1024  # plain rounds between two probes
PROBES = 0.01  # of the time, at most, that probes of one kind of draft may lose
STRAY_PROBE = 4.0  # times what was promised: a longer one was disturbed by something else
SMOOTH, SHARE, STRAY = 0.1, 0.3, 1.25  # of the clock's corrections
SURE = (1.0,) * LARGEST
MISLED = 1.6
NEAR = 128  # tokens of depth that share one reading of the costs


class Choice(NamedTuple):
    """Of a round. matched: tokens that a lookup has found again. probe: made to learn from."""

    k: int
    source: str = DRAFT
    matched: int = 0
    probe: bool = False

    @property
    def drafts(self) -> bool:
        """Whether the draft proposes, not a lookup."""
        return self.k > 0 and self.source == DRAFT


class Controller(Protocol):
    """Chooses for the next round. largest: bounds every k, so that buffers can be sized; sources:
    all that it may choose."""

    largest: int
    sources: tuple[str, ...] = (DRAFT,)

    def begin(self) -> None:
        """Before the prompt is read."""

    def choose(self, length: int, limits: Mapping[str, int], matched: int) -> Choice:
        """length: of the context; limits: the largest k of each source that can be used."""

    def learn(self, choice: Choice, accepted: int, seconds: float) -> None:
        """How a round went, at most one round late."""


@dataclass
class Fixed(Controller):
    """Always the same k: reproducible."""

    k: int
    source: str = DRAFT

    @property
    def largest(self) -> int:
        return self.k

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)

    def choose(self, length: int, limits: Mapping[str, int], matched: int) -> Choice:
        return Choice(self.k, self.source, matched)


class Evidence:
    """How drafts of one kind fared: fading counts of those that were judged and those that stood,
    by place. idle: plain rounds since the last one; wait: those before the next probe; paid: the round
    of `Learnt` from which on what earlier probes lost is a small enough part of all."""

    def __init__(self, prior: float, rounds: float = PRIOR_ROUNDS[DRAFT]):
        self.judged = [rounds, *[0.0] * (LARGEST - 1)]
        self.stood = [n * prior for n in self.judged]
        self.wait, self.idle, self.paid = FIRST_WAIT, 0, 0.0

    def acceptance(self) -> list[float]:
        """Of each place once those before it stood; what is not known of a place is taken from the
        one before."""
        found = [self.stood[0] / self.judged[0]]
        for judged, stood in zip(self.judged[1:], self.stood[1:]):
            found.append((PLACE_ROUNDS * found[-1] + stood) / (PLACE_ROUNDS + judged))
        return found

    def see(self, choice: Choice, accepted: int) -> None:
        if choice.probe and accepted:
            self.fade(0.7)  # what was true when it was parked is not any more
            self.wait = self.idle = FIRST_WAIT
        elif choice.probe:
            self.wait, self.idle = min(2 * self.wait, LONGEST_WAIT), 0
        for i in range(min(accepted + 1, choice.k)):
            self.judged[i] = FADE * self.judged[i] + 1
            self.stood[i] = FADE * self.stood[i] + (i < accepted)

    def fade(self, by: float) -> None:
        self.judged, self.stood = ([by * n for n in counts] for counts in (self.judged, self.stood))


class Learnt:
    """What requests of one kind leave to the next. pace: seconds a round took over what its measured
    parts promise, by (source, k)."""

    def __init__(self, task: str = "prose"):
        self.task = task
        self.evidence: dict[tuple[str, int], Evidence] = {}
        self.pace: dict[tuple[str, int], float] = {(DRAFT, 0): 1.0}
        self.renewed = False  # whether the costs were timed a second time
        self.rounds = 0  # so far

    def of(self, source: str, matched: int) -> Evidence:
        length = max((n for n in MATCHES if n <= matched), default=0) if source == LOOKUP else 0
        prior = MATCHES[length] if source == LOOKUP else PRIOR[self.task]
        return self.evidence.setdefault((source, length), Evidence(prior, PRIOR_ROUNDS[source]))

    def begin(self) -> None:
        for found in self.evidence.values():
            found.fade(min(1.0, KEPT_ROUNDS / found.judged[0]))
            found.wait, found.idle = FIRST_WAIT, 0

    @property
    def misled(self) -> bool:
        """Whether rounds took so much longer or shorter than promised, against each other, that the
        costs must have been timed on a busy machine."""
        return not self.renewed and max(self.pace.values()) > MISLED * min(self.pace.values())

    def renew(self) -> None:
        self.pace, self.renewed = {(DRAFT, 0): 1.0}, True

    def pace_of(self, source: str, k: int) -> float:
        """Its own; before there is one, that of the nearest k."""
        near = [(abs(n - k) + LARGEST * (s != source and n > 0), f) for (s, n), f in self.pace.items()]
        return self.pace.get((source, k)) or min(near)[1]

    def time(self, source: str, k: int, ratio: float) -> None:
        before = self.pace_of(source, k)
        step = min(max(ratio / before, 1 / STRAY), STRAY) ** SMOOTH
        # In part it is the machine that has become slower, for all.
        self.pace = {key: f * step**SHARE for key, f in self.pace.items()} | {(source, k): before * step}


class Auto(Controller):
    """The k and the source with the most expected tokens a second, by measured costs and by how
    drafts have fared; plain decoding where nothing pays, with a probe now and then.

    costs: called when a request begins, with again=True where they proved wrong. clocked: whether round times correct them; False
    makes the choices follow from the tokens alone.
    """

    largest, sources = LARGEST, (DRAFT, LOOKUP)

    def __init__(self, costs: Callable[..., Costs], learnt: Learnt, clocked: bool = True):
        self._measured, self.learnt, self.clocked = costs, learnt, clocked
        self._now = Choice(0)
        self._depth = -NEAR

    def begin(self) -> None:
        if self.clocked and self.learnt.misled:
            self._costs = self._measured(again=True)
            self.learnt.renew()
        else:
            self._costs = self._measured()
        self.learnt.begin()

    def choose(self, length: int, limits: Mapping[str, int], matched: int) -> Choice:
        self.learnt.rounds += 1
        if length - self._depth >= NEAR:
            self._depth, self._here = length, self._costs.at(length)
        kinds = [Choice(0), *(Choice(k) for k in range(1, limits.get(DRAFT, 0) + 1))]
        best, rate = self._best(kinds)
        now = self._now if self._now in kinds else Choice(0)
        held = self._rate(now, self._acceptance(now))
        if rate > MARGIN * held:
            now, held = best, rate
        self._now = now
        if matched and limits.get(LOOKUP, 0):
            found, rate = self._best([Choice(k, LOOKUP, matched) for k in LOOKUP_KS if k <= limits[LOOKUP]])
            if rate > MARGIN * held:
                return found
            return self._probe(found, held) or self._rested(kinds, held)
        return self._rested(kinds, held)

    def _best(self, choices: Sequence[Choice]) -> tuple[Choice, float]:
        """And its tokens a second. All are of one kind."""
        acceptance = self._acceptance(choices[-1])
        return max(((c, self._rate(c, acceptance)) for c in choices), key=lambda found: found[1])

    def _acceptance(self, choice: Choice) -> Sequence[float]:
        return self.learnt.of(choice.source, choice.matched).acceptance() if choice.k else ()

    def _rate(self, choice: Choice, acceptance: Sequence[float]) -> float:
        pace = self.learnt.pace_of(choice.source, choice.k) if self.clocked else 1.0
        return expected(acceptance, choice.k) / (self._seconds(choice) * pace)

    def _seconds(self, choice: Choice) -> float:
        drafting = self._here.draft_s(choice.k) if choice.source == DRAFT else 0.0
        return drafting + self._here.rows_s[choice.k]

    def _rested(self, kinds: Sequence[Choice], held: float) -> Choice:
        """The draft as before; where it is parked, a probe of it when that is due."""
        if self._now.k or len(kinds) == 1:
            return self._now
        return self._probe(max(kinds, key=lambda c: self._rate(c, SURE)), held) or self._now

    def _probe(self, choice: Choice, held: float) -> Choice | None:
        """A short draft of a kind that was not tried for long, if it could ever pay."""
        found = self.learnt.of(choice.source, choice.matched)
        found.idle += 1
        if found.idle < found.wait or self.learnt.rounds < found.paid or self._rate(choice, SURE) <= held:
            return None
        return choice._replace(k=1 if choice.source == DRAFT else LOOKUP_KS[0], probe=True)

    def _spent(self, choice: Choice, seconds: float) -> float:
        """By a probe, in plain rounds: a draft that was left alone has much to read before it proposes."""
        promised, plain = self._seconds(choice), self._seconds(Choice(0))
        if not self.clocked:
            return promised / plain
        return min(max(promised, seconds), STRAY_PROBE * promised) / (plain * self.learnt.pace_of(DRAFT, 0))

    def learn(self, choice: Choice, accepted: int, seconds: float) -> None:
        if choice.k:
            found = self.learnt.of(choice.source, choice.matched)
            found.see(choice, accepted)
            if choice.probe:
                lost = self._spent(choice, seconds) - (accepted + 1)
                found.paid = max(found.paid, self.learnt.rounds) + lost / PROBES  # with two in flight both are owed
        if self.clocked:
            self.learnt.time(choice.source, choice.k, seconds / self._seconds(choice))
