"""The loop: prefill, build, submit, read, emit. The only file that evaluates a round.

    submit r      one mx.async_eval of the round's graph
    submit r + 1  built before r is read: no shape depends on what r decides ("run-ahead")
    read r        one small int32 array
    emit          from here on everything is Python integers

Knows nothing of how a round drafts or verifies, nor how a pair was loaded.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from dataclasses import replace
from functools import partial
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import QuantizedKVCache

from . import sampling
from .cache import Native, Quantized, adopt, convert, grow, read_bound, rung
from .control import Controller, Fixed
from .drafters.model import ModelDrafter
from .emit import Emission, Emitter
from .errors import SpecError
from .prefill import Cancelled, prefill
from .probe import Profile, prompt_cache, why_not_quantised
from .round import Plan, Round, State
from .sampling import Sampling
from .stepwise import stepwise
from .types import Chunk, FinishReason, Options, Stats, Token

# A trace costs a few rounds, so a shape is compiled once it has been run this often; replies
# shorter than that stay eager.
COMPILE_AFTER = 8
CLEAR_EVERY = 256  # tokens between two returns of MLX's freed buffers, as in mlx-lm
CATCH_UP = 16  # tokens that a draft may miss before it reads them in rounds of their own
MIN_SLACK = 8  # a ring's room is made for at least this k, so that requests share shapes
AHEAD = 1024  # tokens of the reply that buffers are made for at first

# MLX evaluates for one caller at a time; held while a round is built, submitted or read, never
# over a yield.
_device = threading.RLock()


class Flight(NamedTuple):
    """A round that was submitted and not yet read."""

    plan: Plan
    packed: mx.array


class Memory(NamedTuple):
    """What a reply leaves for a later turn: mlx-lm's caches and the tokens that are in them."""

    ids: list[int]
    target: list[Any]
    draft: list[Any]
    draft_length: int


class Decoder:
    """One reply of a pair to a prompt of token ids.

    memory: what an earlier reply left; its ids must begin the prompt. drafter, controller and
    run_ahead: a drafter in place of the pair's draft model, another k each round, no second round
    in flight.
    """

    def __init__(
        self,
        pair: Any,
        ids: Sequence[int],
        options: Options,
        *,
        memory: Memory | None = None,
        drafter: Any = None,
        controller: Controller | None = None,
        run_ahead: bool = True,
    ):
        check(pair, ids, options)
        self.pair, self.options, self.memory = pair, options, memory
        self.history = list(ids)
        self.controller = controller or Fixed(options.num_draft_tokens)
        self.sampling = Sampling.of(options)
        self.seed = secrets.randbits(32) if options.seed is None else options.seed
        self.run_ahead = run_ahead
        self.stats = Stats(prompt_tokens=len(ids))
        self.emitter = Emitter(pair.tokenizer, pair.end_ids, options.stop, options.max_tokens)
        self.finish: FinishReason | None = None
        self.flights: deque[Flight] = deque()
        self.state: State | None = None
        self.length = len(ids)  # tokens read back so far, prompt and reply
        self.missed = 0  # committed tokens that the draft has not read, at most
        self.chosen: int | None = None
        self.cleared = 0
        self._set_up(drafter)

    # what this request runs on

    def _set_up(self, drafter: Any) -> None:
        pair, options = self.pair, self.options
        self.k_max = self._largest(drafter)
        self.slack = 2 * (max(self.k_max, MIN_SLACK) + 1)
        self.drafter = drafter if self.k_max else None
        if drafter is None and self.k_max:
            layers = self._layers(pair.draft_profile)
            self.drafter = ModelDrafter(pair.draft, layers, pair.draft_vocab_size)
        processors = tuple(options.logits_processors)
        self.stepwise = not all(sampling.is_pure(p) for p in processors)
        self.exact_history = bool(processors)
        if self.stepwise and self.k_max:
            self.stats.mode = "speculative, position by position (a logits processor may keep state)"
        self.round = Round(
            pair.target, self._layers(pair.target_profile), self.drafter, self.sampling, options.verify,
            pair.vocab_size, () if self.stepwise else (*sampling.penalties(options), *processors),
            sampling.context_size(options),
        )

    def _layers(self, profile: Profile, quantised: bool = False) -> tuple:
        options = self.options
        bits = options.kv_bits if quantised else None
        return profile.for_request(self.slack, options.max_kv_size, bits, options.kv_group_size)

    def _largest(self, drafter: Any) -> int:
        """The largest k that can come; 0, and the reason in the statistics, where none can."""
        reason = self._why_plain(drafter)
        self.stats.mode = f"plain ({reason})" if reason else "speculative"
        return 0 if reason else self.controller.largest

    def _why_plain(self, drafter: Any) -> str | None:
        pair = self.pair
        if pair.target_profile.reason:
            return f"the target decodes plainly: {pair.target_profile.reason}"
        if self.controller.largest == 0:
            return "no draft tokens asked for"
        if drafter is not None:
            return None
        if pair.draft is None:
            return "no draft"
        if pair.draft_profile.reason:
            return f"the draft can't be used: {pair.draft_profile.reason}"
        limit = pair.draft_max_length
        if limit is not None and len(self.history) + 2 > limit:
            return f"the draft reads at most {limit} tokens and the prompt has {len(self.history)}"
        return None

    # the loop

    def chunks(self) -> Iterator[Chunk]:
        """One chunk a round; the last one carries the finish reason."""
        started = time.perf_counter()
        if self.options.max_tokens == 0:
            self.finish = "length"
            yield Chunk("", (), self._snapshot(), self.finish)
            return
        try:
            with _device:
                mx.reset_peak_memory()
                self._prefill()
            self.stats.prompt_s = time.perf_counter() - started
            while self.finish is None:
                with _device:
                    self._fill()
                    emission = self._emit()
                self._clock(started)
                yield Chunk(emission.text, emission.tokens, self._snapshot(), self.finish)
        except Cancelled:
            self.finish = "cancelled"
            yield Chunk("", (), self._snapshot(), self.finish)
        finally:
            self._drain()

    def _clock(self, started: float) -> None:
        now = time.perf_counter() - started
        if self.stats.ttft_s is None:
            self.stats.ttft_s = now
        self.stats.generation_s = now - self.stats.prompt_s

    def _snapshot(self) -> Stats:
        self.stats.peak_memory_bytes = mx.get_peak_memory()
        return self.stats.copy()

    def _fill(self) -> None:
        """Keep a round in flight, and a second behind it where nothing waits for the first."""
        if self.options.should_cancel is not None and self.options.should_cancel():
            self.finish = "cancelled"
            return
        self._switch()
        if not self.flights:
            self._submit()
        if self._may_run_ahead():
            self._submit()

    def _may_run_ahead(self) -> bool:
        if not self.run_ahead or self.exact_history or self._until_switch() is not None:
            return False
        if self._choose() and self.missed >= CATCH_UP:
            return False
        left = self.emitter.left
        return left is None or left > self.flights[-1].plan.num_draft_tokens + 1

    def _submit(self) -> None:
        plan = self._plan()
        self._make_room(plan)
        step, state = self._step(plan), tuple(self.state)
        self.state = None  # a buffer with a second owner is copied, not written in place
        new_state, packed = step(state)
        del state
        mx.async_eval(packed, new_state)
        self.state = State(*new_state)
        self.flights.append(Flight(plan, packed))

    def _read(self) -> tuple[int, list[Token]]:
        plan, packed = self.flights.popleft()
        values = packed.tolist()[0]
        k = plan.num_draft_tokens
        accepted, ids = values[0], values[1 : k + 2]
        logprobs = np.array(values[k + 2 :], dtype=np.int32).view(np.float32).tolist()[: accepted + 1]
        if any(x != x for x in logprobs):
            raise SpecError("the model gave logits that are not numbers: its files may be damaged, download it again")
        assert 0 <= accepted <= k and all(0 <= i < self.pair.vocab_size for i in ids[: accepted + 1])
        if k and not self.flights:
            self.missed = int(accepted == k)
        last = "plain" if k == 0 else "bonus" if accepted == k else "correction"
        return k, [Token(*t) for t in zip(ids, logprobs, ["accepted"] * accepted + [last])]

    def _emit(self) -> Emission:
        if self.finish == "cancelled":
            return self.emitter.close("cancelled")
        k, tokens = self._read()
        emission = self.emitter.feed(tokens)
        kept = tokens[: emission.kept]
        self.length += len(tokens)
        self.history += [t.id for t in kept]
        self.stats.add_round(k, [t.origin for t in kept], cut=len(kept) < len(tokens))
        if emission.dropped:
            self.stats.drop(emission.dropped)
            del self.history[-emission.dropped :]
        self.finish = emission.finish_reason
        if self.length - self.cleared >= CLEAR_EVERY:
            self.cleared = self.length
            mx.clear_cache()
        return emission

    def _drain(self) -> None:
        with _device:
            while self.flights:
                mx.eval(self.flights.popleft().packed)
            mx.clear_cache()

    # deciding a round

    def _plan(self) -> Plan:
        longest = self._longest()
        k = self._choose()
        self.chosen = None
        catch_up = 1
        if k:
            if self.missed >= CATCH_UP:
                self._catch_up()
            catch_up = self._bucket()
            self.missed = 1
        else:
            self.missed += 1
        return Plan(k, catch_up, read_bound(longest + k + 1), self.length if self.exact_history else None)

    def _longest(self) -> int:
        """The most tokens there can be once every round in flight is done."""
        return self.length + sum(f.plan.num_draft_tokens + 1 for f in self.flights)

    def _choose(self) -> int:
        """k of the next round; asked once, however often it is looked at."""
        if self.chosen is None:
            self.chosen = self._allowed(min(self.controller.choose(), self.k_max)) if self.k_max else 0
        return self.chosen

    def _allowed(self, k: int) -> int:
        limit = self.pair.draft_max_length
        if k and limit is not None and isinstance(self.drafter, ModelDrafter) and self._longest() + k + 1 > limit:
            self.stats.mode = f"speculative, then plain: the draft reads at most {limit} tokens"
            return 0
        if not self.flights and self.emitter.left is not None:
            k = min(k, self.emitter.left - 1)
        until = self._until_switch()
        return k if until is None else min(k, until)

    def _bucket(self) -> int:
        """How many tokens the draft reads again: what it missed and the pending one, rounded up to
        a power of two so that few shapes occur, where the history is that long."""
        needed = self.missed + 1
        bucket = 1 << (needed - 1).bit_length()
        return bucket if bucket <= self.length else needed

    def _catch_up(self) -> None:
        """After a stretch of plain rounds the draft reads what it missed before the round, in
        pieces that its rings can take. Only with nothing in flight: the tokens must be known."""
        assert not self.flights
        start = self.length - 1 - self.missed
        for i in range(start, self.length - 1, CATCH_UP):
            piece = self.history[i : min(i + CATCH_UP, self.length - 1)]
            drafter = self.drafter.read(self.state.drafter, piece, i, read_bound(self.length))
            self.state = self.state._replace(drafter=drafter)
            mx.eval(drafter)
        self.missed = 0

    def _make_room(self, plan: Plan) -> None:
        """MLX does not check array offsets: a write past the end corrupts the heap."""
        needed = self.length + (len(self.flights) + 1) * (self.k_max + 1)
        if needed > self.capacity:
            self._grow(rung(needed))
        assert needed <= self.capacity <= self.state.history.shape[1]
        assert self._longest() + plan.num_draft_tokens + 1 <= self.capacity

    def _grow(self, capacity: int) -> None:
        history, length, keys, target, drafter = self.state
        pad = mx.zeros((history.shape[0], capacity - history.shape[1]), history.dtype)
        history = mx.concatenate([history, pad], axis=1)
        mx.eval(history)
        grow(self.round.layers, target, capacity)
        if self.drafter is not None:
            self.drafter.grow(drafter, capacity)
        self.state = State(history, length, keys, target, drafter)
        self.capacity = capacity

    def _step(self, plan: Plan) -> Callable:
        """The function that builds this round: compiled once its shape has proved to be common."""
        if self.stepwise:
            return stepwise(self.round, self.options.logits_processors, plan, self.history)
        build = partial(_build, self.round, plan)
        if self.exact_history or self.pair.target_profile.reason:
            return build
        uses = self.pair.compiled.setdefault((self._signature(), plan), [0, build])
        uses[0] += 1
        if uses[0] == COMPILE_AFTER:
            uses[1] = mx.compile(uses[1])
        return uses[1]

    def _signature(self) -> tuple:
        """What a compiled round depends on beside its plan and the shapes of its arrays."""
        r, o = self.round, self.options
        drafter = (r.drafter.layers, r.drafter.vocab) if type(r.drafter) is ModelDrafter else id(r.drafter)
        bias = tuple(sorted(o.logit_bias.items())) if o.logit_bias else None
        penalties = (o.repetition_penalty, o.repetition_context_size, o.presence_penalty,
                     o.presence_context_size, o.frequency_penalty, o.frequency_context_size)
        return r.layers, drafter, r.sampling, r.rule, r.context, bias, penalties

    # the prompt, and what is left for a later turn

    def _prefill(self) -> None:
        pair, total = self.pair, len(self.history)
        self.capacity = rung(total + min(self.options.max_tokens or AHEAD, AHEAD) + 2 * (self.k_max + 1))
        progress = self.options.on_progress or (lambda read, of: None)
        progress(0, total)
        target = self._read_prompt(pair.target, self._caches(pair.target, "target"), self._known("target"),
                                   lambda read: progress(read, total))
        layers = self._layers_of(pair.target_profile, target)
        self.round = replace(self.round, layers=layers)
        arrays = adopt(layers, target, self.capacity)
        drafter = self._prefill_drafter()
        progress(total, total)
        history = mx.array([self.history + [0] * (self.capacity - total)], dtype=mx.uint32)
        keys = mx.zeros((3, 2), mx.uint32) if self.sampling.greedy else sampling.make_keys(self.seed)
        self.state = State(history, mx.array([total]), keys, arrays, drafter)
        mx.eval(list(self.state))

    def _prefill_drafter(self) -> Any:
        if self.drafter is None:
            return ()
        if not isinstance(self.drafter, ModelDrafter):
            return self.drafter.start(self.history, self.capacity)
        started, pair = time.perf_counter(), self.pair
        caches = self._read_prompt(pair.draft, self._caches(pair.draft, "draft"), self._known("draft"))
        layers = self._layers_of(pair.draft_profile, caches)
        self.drafter = replace(self.drafter, layers=layers)
        self.round = replace(self.round, drafter=self.drafter)
        arrays = adopt(layers, caches, self.capacity)
        self.stats.draft_prompt_s = time.perf_counter() - started
        return arrays

    def _caches(self, model: Any, role: str) -> list[Any]:
        kept = getattr(self.memory, role, None)
        return kept or prompt_cache(model, self.options.max_kv_size)

    def _known(self, role: str) -> int:
        """How many prompt tokens an earlier turn has left in the caches."""
        if self.memory is None or not getattr(self.memory, role):
            return 0
        assert self.history[: len(self.memory.ids)] == self.memory.ids
        return len(self.memory.ids) if role == "target" else self.memory.draft_length

    def _read_prompt(self, model: Any, caches: list, known: int, progress: Callable = lambda read: None) -> list:
        options = self.options
        if model is self.pair.draft and not self._quantisable(self.pair.draft_profile):
            options = options.but(kv_bits=None)
        text = self.history[known:-1]
        if model is self.pair.draft and model is not self.pair.target:
            text = [min(i, self.pair.draft_vocab_size - 1) for i in text]
        prefill(model, caches, text, options, lambda read: progress(known + read))
        return caches

    def _quantisable(self, profile: Profile) -> bool:
        bits, size = self.options.kv_bits, self.options.kv_group_size
        return bits is not None and why_not_quantised(self.pair, profile, bits, size) is None

    def _layers_of(self, profile: Profile, caches: list) -> tuple:
        """The layers for what the prefill left: mlx-lm quantises once a cache is long enough."""
        if profile.reason:
            return tuple(Native(c) for c in caches)
        return self._layers(profile, any(isinstance(c, QuantizedKVCache) for c in caches))

    def _until_switch(self) -> int | None:
        """Drafts allowed before full caches become quantised; None when they will not."""
        if self.options.kv_bits is None or any(isinstance(x, Quantized) for x in self.round.layers):
            return None
        start = max(self.options.quantized_kv_start, 1)
        return max(start - self.length, 0)

    def _switch(self) -> None:
        """Quantise the caches at the same token as mlx-lm would, so that the text is the same."""
        start = max(self.options.quantized_kv_start, 1)
        if self._until_switch() is None or self.length - 1 < start:
            return
        layers = self._layers(self.pair.target_profile, quantised=True)
        convert(layers, self.state.target)
        self.round = replace(self.round, layers=layers)
        if isinstance(self.drafter, ModelDrafter) and self._quantisable(self.pair.draft_profile):
            layers = self._layers(self.pair.draft_profile, quantised=True)
            convert(layers, self.state.drafter)
            self.drafter = replace(self.drafter, layers=layers)
            self.round = replace(self.round, drafter=self.drafter)

    def leave(self) -> Memory | None:
        """The caches after a finished reply, rewound to its last token but one; the decoder is spent."""
        if self.state is None or self.pair.target_profile.reason:
            return None
        self._drain()
        kept = len(self.history) - 1
        target = [layer.hand_back(a, kept) for layer, a in zip(self.round.layers, self.state.target)]
        draft, read = [], 0
        if isinstance(self.drafter, ModelDrafter):
            read = max(kept - max(self.missed, 1), 0)
            draft = [layer.hand_back(a, read) for layer, a in zip(self.drafter.layers, self.state.drafter)]
        self.state = None
        return Memory(self.history[:kept], target, draft, read)


def _build(round: Round, plan: Plan, state: tuple) -> tuple[tuple, mx.array]:
    new_state, packed = round(State(*state), plan)
    return tuple(new_state), packed


def check(pair: Any, ids: Sequence[int], options: Options) -> None:
    """What only a request and a pair together can show to be wrong. Raises ValueError, one line."""
    if not ids:
        raise ValueError("the prompt is empty: give at least one token")
    if not 0 <= options.top_k < pair.vocab_size:
        raise ValueError(f"top_k must be 0 (off) to {pair.vocab_size - 1} for this model; got {options.top_k}")
    for name, values in (("prompt", ids), ("logit_bias", options.logit_bias or ())):
        bad = next((i for i in values if not 0 <= i < pair.vocab_size), None)
        if bad is not None:
            raise ValueError(f"{name}: token id {bad} is not one of this model's, 0 to {pair.vocab_size - 1}")
    if options.stop and pair.tokenizer is None:
        raise ValueError("stop: strings can't be found without a tokenizer; make the pair with one")
    if options.max_kv_size is not None:
        _check_bounded(pair, options)
    if options.kv_bits is not None:
        reason = why_not_quantised(pair, pair.target_profile, options.kv_bits, options.kv_group_size)
        if reason:
            raise ValueError(f"kv_bits can't be used with this target: {reason}; leave it out")


def _check_bounded(pair: Any, options: Options) -> None:
    profiles = {"target": pair.target_profile}
    if pair.draft is not None and options.num_draft_tokens:
        profiles["draft"] = pair.draft_profile
    for role, p in profiles.items():
        if p.reason or p.windowed:
            raise ValueError(f"max_kv_size can't be honoured: the {role} makes caches of its own kind; leave it out")
