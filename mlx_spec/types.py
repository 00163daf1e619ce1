"""The records that cross module borders: options in, tokens, chunks, results and counts out.

Knows nothing of MLX, so that a command line or a page can import it in milliseconds.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Callable, Literal, Mapping, Sequence

Origin = Literal["accepted", "correction", "bonus", "plain"]
FinishReason = Literal["stop", "stop_string", "length", "cancelled"]

VERIFY_RULES = ("token", "block", "match")
MAX_DRAFT_TOKENS = 64
TASKS = ("prose", "code")
KV_BITS = (2, 3, 4, 5, 6, 8)
KV_GROUP_SIZES = (32, 64, 128)


def _need(ok: bool, name: str, wanted: str, got: Any) -> None:
    if not ok:
        raise ValueError(f"{name} must be {wanted}; got {got!r}")


def _as_tuple(name: str, wanted: str, value: Any) -> tuple:
    if isinstance(value, str):
        return (value,)
    if value is None:
        return ()
    _need(isinstance(value, Sequence), name, wanted, value)
    return tuple(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


@dataclass(frozen=True)
class Options:
    """How to decode one reply. Checked once, here; frozen, so that nothing changes under way.

    Names and meanings are mlx-lm's where mlx-lm has them.

    max_tokens: tokens at most; None or -1: no limit; 0: an empty result.
    temperature: 0 is greedy. top_p, top_k, min_p: filters, off at 1.0 (or 0), 0 and 0.
    seed: 0 to 2**64 - 1; None draws one, and the result says which.
    num_draft_tokens: tokens drafted a round, 0 (plain decoding) to 64; "auto": as many as pay, by
    what the models' parts cost on this machine, which is measured once.
    task: "prose" or "code", what "auto" expects at first. reproducible: "auto" by the tokens and the
    stored costs alone, not by clocks nor earlier replies; so too where the result's seed would not
    give the same text again otherwise (temperature above 0, another rule than match).
    verify: "block", "token" or "match"; at temperature 0 always "match" without noise.
    stop: strings that end the reply; they are not part of it.
    logits_processors: callables (tokens, logits) -> logits as in mlx-lm, see `sampling.pure`.
    kv_bits, kv_group_size, quantized_kv_start: quantised keys and values, as in mlx-lm.
    max_kv_size: bound of the caches, kept by a ring that never drops the first 4 tokens.
    should_cancel: asked before each prefill chunk and each round.
    on_progress: called with (prompt tokens read, prompt tokens in all).

    Raises ValueError that names the option and its range.
    """

    max_tokens: int | None = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    num_draft_tokens: int | Literal["auto"] = "auto"
    task: str = "prose"
    reproducible: bool = False
    verify: str = "block"
    stop: Sequence[str] = ()
    logits_processors: Sequence[Callable] = ()
    repetition_penalty: float | None = None
    repetition_context_size: int = 20
    presence_penalty: float | None = None
    presence_context_size: int = 20
    frequency_penalty: float | None = None
    frequency_context_size: int = 20
    logit_bias: Mapping[int, float] | None = None
    prefill_step_size: int = 2048
    max_kv_size: int | None = None
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 0
    should_cancel: Callable[[], bool] | None = None
    on_progress: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        self._check_length()
        self._check_sampling()
        self._check_penalties()
        self._check_cache()

    def _check_length(self) -> None:
        n, k, seed = self.max_tokens, self.num_draft_tokens, self.seed
        _need(n is None or (_is_int(n) and n >= -1), "max_tokens",
              "a whole number from 0, or -1 or None for no limit", n)
        if n == -1:
            object.__setattr__(self, "max_tokens", None)
        _need(k == "auto" or (_is_int(k) and 0 <= k <= MAX_DRAFT_TOKENS), "num_draft_tokens",
              f"a whole number from 0 to {MAX_DRAFT_TOKENS}, or \"auto\"", k)
        _need(self.task in TASKS, "task", "one of " + ", ".join(TASKS), self.task)
        _need(isinstance(self.reproducible, bool), "reproducible", "True or False", self.reproducible)
        _need(seed is None or (_is_int(seed) and 0 <= seed < 2**64), "seed",
              "a whole number from 0 to 2**64 - 1, or None", seed)
        stop = _as_tuple("stop", "a list of non-empty strings", self.stop)
        _need(all(isinstance(s, str) and s for s in stop), "stop", "a list of non-empty strings", self.stop)
        object.__setattr__(self, "stop", stop)

    def _check_sampling(self) -> None:
        t = self.temperature
        _need(_is_number(t) and 0 <= t < math.inf, "temperature", "a number from 0", t)
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            _need(_is_number(value) and 0 <= value <= 1, name, "a number from 0 to 1", value)
        _need(_is_int(self.top_k) and self.top_k >= 0, "top_k", "a whole number from 0 (off)", self.top_k)
        _need(self.verify in VERIFY_RULES, "verify", "one of " + ", ".join(VERIFY_RULES), self.verify)
        wanted = "a list of callables (tokens, logits) -> logits"
        processors = _as_tuple("logits_processors", wanted, self.logits_processors)
        _need(all(callable(p) for p in processors), "logits_processors", wanted, self.logits_processors)
        object.__setattr__(self, "logits_processors", processors)

    def _check_penalties(self) -> None:
        penalty = self.repetition_penalty
        _need(penalty is None or (_is_number(penalty) and 0 < penalty < math.inf), "repetition_penalty",
              "a number above 0 (1 is none), or None", penalty)
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _need(value is None or (_is_number(value) and abs(value) < math.inf), name, "a number, or None", value)
        for name in ("repetition", "presence", "frequency"):
            size = getattr(self, f"{name}_context_size")
            _need(_is_int(size) and size > 0, f"{name}_context_size", "a whole number from 1", size)
        bias = self.logit_bias
        _need(bias is None or (isinstance(bias, Mapping) and all(
            _is_int(i) and i >= 0 and _is_number(v) and (v == -math.inf or abs(v) < 1e30) for i, v in bias.items())),
            "logit_bias", "a mapping of token ids to numbers below 1e30 (-inf bans a token)", bias)
        object.__setattr__(self, "logit_bias", dict(bias) if bias else None)

    def _check_cache(self) -> None:
        step, size = self.prefill_step_size, self.max_kv_size
        _need(_is_int(step) and step > 0, "prefill_step_size", "a whole number from 1", step)
        _need(size is None or (_is_int(size) and size >= 8), "max_kv_size",
              "a whole number from 8, or None", size)
        bits, group = self.kv_bits, self.kv_group_size
        _need(bits is None or (_is_int(bits) and bits in KV_BITS), "kv_bits", f"one of {KV_BITS}, or None", bits)
        _need(_is_int(group) and group in KV_GROUP_SIZES, "kv_group_size", f"one of {KV_GROUP_SIZES}", group)
        start = self.quantized_kv_start
        _need(_is_int(start) and start >= 0, "quantized_kv_start", "a whole number from 0", start)
        _need(bits is None or size is None, "max_kv_size", "None when kv_bits is given", size)
        for name in ("should_cancel", "on_progress"):
            value = getattr(self, name)
            _need(value is None or callable(value), name, "a callable, or None", value)

    @classmethod
    def of(cls, **options: Any) -> Options:
        """Options from keywords; an unknown name is a ValueError that lists the known ones."""
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ValueError(f"unknown option {unknown[0]!r}; options are: {', '.join(known)}")
        return cls(**options)

    def but(self, **changes: Any) -> Options:
        return replace(self, **changes)


@dataclass(frozen=True)
class Token:
    """One emitted token. logprob: the target's, at temperature 1, before filters."""

    id: int
    logprob: float
    origin: Origin


@dataclass
class Stats:
    """Raw counts of one reply; rates are properties, None where there is nothing to divide.

    Counts hold what is in the reply and nothing past its end: accepted + corrections + bonuses +
    plain = generation_tokens. A round that drafted 4, kept 3 and was cut after 2 by the end of the
    reply counts 2 drafted and 2 accepted. looked_up, looked_up_accepted: those of drafted and
    accepted that prompt lookup proposed.
    """

    prompt_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    corrections: int = 0
    bonuses: int = 0
    plain: int = 0
    looked_up: int = 0
    looked_up_accepted: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    prompt_s: float | None = None
    draft_prompt_s: float | None = None
    generation_s: float = 0.0
    ttft_s: float | None = None
    peak_memory_bytes: int | None = None
    mode: str = "plain"
    _log: list[tuple[int, tuple[Origin, ...], bool, bool]] = field(default_factory=list, repr=False, compare=False)

    @property
    def generation_tokens(self) -> int:
        return self.accepted + self.corrections + self.bonuses + self.plain

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_round(self) -> float | None:
        return self.generation_tokens / self.rounds if self.rounds else None

    @property
    def prompt_tps(self) -> float | None:
        return self.prompt_tokens / self.prompt_s if self.prompt_s else None

    @property
    def generation_tps(self) -> float | None:
        """Tokens a second from the end of the prompt to the end of the reply: by the clock on the
        wall, so that what a caller does between two chunks counts too."""
        return self.generation_tokens / self.generation_s if self.generation_s else None

    def add_round(self, k: int, origins: Sequence[Origin], cut: bool = False, looked_up: bool = False) -> None:
        """Count one round: k drafted, `origins` of the tokens kept; cut: the reply ended inside it."""
        self._log.append((k, tuple(origins), cut, looked_up))
        self._count(k, origins, cut, looked_up)

    def drop(self, tokens: int) -> None:
        """Take back the last tokens: they turned out to lie inside a stop string."""
        log, self._log = self._log, []
        while tokens:
            k, origins, _, looked_up = log.pop()
            kept = origins[: max(len(origins) - tokens, 0)]
            tokens -= len(origins) - len(kept)
            if kept:
                log.append((k, kept, True, looked_up))
        for name in ("rounds", "drafted", "accepted", "corrections", "bonuses", "plain", "looked_up", "looked_up_accepted"):
            setattr(self, name, 0)
        self.drafted_by_position, self.accepted_by_position = [], []
        for entry in log:
            self.add_round(*entry)

    def _count(self, k: int, origins: Sequence[Origin], cut: bool, looked_up: bool) -> None:
        drafted, accepted = min(k, len(origins)) if cut else k, origins.count("accepted")
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.looked_up += drafted * looked_up
        self.looked_up_accepted += accepted * looked_up
        self.corrections += origins.count("correction")
        self.bonuses += origins.count("bonus")
        self.plain += origins.count("plain")
        for counts, n in ((self.drafted_by_position, drafted), (self.accepted_by_position, accepted)):
            counts.extend([0] * (drafted - len(counts)))
            for i in range(n):
                counts[i] += 1

    def copy(self) -> Stats:
        """A snapshot that later rounds do not change."""
        lists = {n: list(getattr(self, n)) for n in ("drafted_by_position", "accepted_by_position")}
        return replace(self, **lists, _log=[])

    def to_dict(self) -> dict[str, Any]:
        rates = ("generation_tokens", "acceptance_rate", "tokens_per_round", "prompt_tps", "generation_tps")
        counts = {name: value for name, value in asdict(self).items() if not name.startswith("_")}
        return counts | {name: getattr(self, name) for name in rates}


@dataclass(frozen=True)
class Chunk:
    """What one round added to the reply. The last chunk carries the finish reason."""

    text: str
    tokens: tuple[Token, ...]
    stats: Stats
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Result:
    """A whole reply. `print(result)` prints its text.

    notes: what a user should know of how it came about (plain-text mode, draft off, ...).
    """

    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason
    stats: Stats
    seed: int | None
    notes: tuple[str, ...] = ()

    @property
    def ids(self) -> list[int]:
        return [t.id for t in self.tokens]

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "tokens": [asdict(t) for t in self.tokens],
            "finish_reason": self.finish_reason,
            "stats": self.stats.to_dict(),
            "seed": self.seed,
            "notes": list(self.notes),
        }
