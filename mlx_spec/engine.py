"""The loop: build, submit, read, emit. The only file that evaluates a round.

    submit r      one mx.async_eval of the round's graph
    submit r + 1  built before r is read: no shape depends on what r decides ("run-ahead")
    read r        one small int32 array
    emit          from here on everything is Python integers

Knows nothing of how a round drafts or verifies, nor how a pair was loaded.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import deque
from functools import partial
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import mlx.core as mx
import numpy as np

from . import request, sampling
from .cache import read_bound
from .compiled import signature
from .context import CATCH_UP, Context
from .control import DRAFT, LOOKUP, Choice, Controller
from .drafters.lookup import Seen
from .emit import Emission, Emitter
from .errors import SpecError
from .hidden import Inside
from .memory import Memory
from .prefill import Cancelled
from .round import Plan, Round, State
from .sampling import Sampling
from .stepwise import stepwise
from .types import Chunk, FinishReason, Options, Stats, Token

CLEAR_EVERY = 256  # tokens between two returns of MLX's freed buffers, as in mlx-lm

# MLX evaluates for one caller at a time; held while a round is built, submitted or read, never
# over a yield.
_device = threading.RLock()


class Flight(NamedTuple):
    """A round that was submitted and not yet read."""

    plan: Plan
    choice: Choice
    packed: mx.array
    submitted: float


class Decoder:
    """One reply of a pair to a prompt of token ids.

    memory: what an earlier reply left; its ids must begin the prompt. drafter, controller: in place
    of the pair's draft model, and of what the options say of k. run_ahead: whether a second round is in
    flight; None: on a GPU, for on a CPU host and device are the same cores and there is no idle
    time to win, while a draft that knows how the last round went has fewer rows to read. clock: what
    the statistics' seconds are taken from.
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
        run_ahead: bool | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        request.check(pair, ids, options)
        self.pair, self.options, self.clock = pair, options, clock
        self.history = list(ids)
        self.length = len(ids)  # tokens read back so far, prompt and reply
        self.controller = controller or request.controller(pair, options)
        self.run_ahead = mx.default_device().type == mx.gpu if run_ahead is None else run_ahead
        self.seed = secrets.randbits(32) if options.seed is None else options.seed
        self.stats = Stats(prompt_tokens=len(ids))
        self.emitter = Emitter(pair.tokenizer, pair.end_ids, options.stop, options.max_tokens)
        self.finish: FinishReason | None = None
        self.flights: deque[Flight] = deque()
        self.missed = 0  # committed tokens that the draft has not read, at most
        self.unread = 1  # rows of states that a listener has not read, at most
        self.chosen: Choice | None = None
        self.cleared = 0
        self.processors = (*sampling.penalties(options), *options.logits_processors)
        # A processor of the user's wants the exact history; one that may keep state, more than that.
        self.exact_history = bool(options.logits_processors)
        self.stepwise = not all(sampling.is_pure(p) for p in options.logits_processors)
        self.limits, self.stats.mode = request.sources(pair, ids, options, self.controller, drafter)
        self.k_max = max(self.limits.values(), default=0)
        self.seen = Seen(ids if LOOKUP in self.limits else ())
        self.read_at = -math.inf  # when the last round was read
        self.cancelling = False
        heard = options.but(should_cancel=self.is_cancelled)
        self.context = Context(pair, heard, self._round(drafter), self.k_max, memory)

    # what this request runs on

    def _round(self, drafter: Any) -> Round:
        pair, options = self.pair, self.options
        if DRAFT not in self.limits:
            drafter = None
        elif drafter is None:
            drafter = pair.drafter()
        target = pair.target_profile.model
        if drafter is not None and drafter.hears:
            target = Inside(target, drafter.depths)
        processors = () if self.stepwise else self.processors
        return Round(
            pair.target_profile.runs(target), pair.target_profile.layers, drafter, Sampling.of(options),
            options.verify, pair.vocab_size, processors, sampling.context_size(options),
        )

    # the loop

    def chunks(self) -> Iterator[Chunk]:
        """One chunk a round; the last one carries the finish reason."""
        if self.options.max_tokens == 0:
            self.finish = "length"
            yield Chunk("", (), self._snapshot(), self.finish)
            return
        try:
            with _device:
                if self.k_max:
                    self.controller.begin()
                started = self.clock()
                mx.reset_peak_memory()
                self.context.read(self.history, self.seed)
            self.stats.draft_prompt_s = self.context.draft_prompt_s
            self.stats.prompt_s = self.clock() - started
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
        now = self.clock() - started
        if self.stats.ttft_s is None:
            self.stats.ttft_s = now
        self.stats.generation_s = now - self.stats.prompt_s

    def _snapshot(self) -> Stats:
        self.stats.peak_memory_bytes = mx.get_peak_memory()
        return self.stats.copy()

    def _fill(self) -> None:
        """Keep a round in flight, and a second behind it where nothing waits for the first."""
        if self.is_cancelled():
            self.finish = "cancelled"
            return
        if not self.flights:
            self.context.switch(self.length)
            self._submit()
        if self._may_run_ahead():
            self._submit()

    def cancel(self) -> None:
        """End the reply before its next round or prefill chunk; from any thread."""
        self.cancelling = True

    def is_cancelled(self) -> bool:
        asked = self.options.should_cancel
        return self.cancelling or (asked is not None and asked())

    def _may_run_ahead(self) -> bool:
        if not self.run_ahead or self.exact_history or self.context.until_switch(self.length) is not None:
            return False
        left = self.emitter.left
        if left is not None and left <= self.flights[-1].plan.num_draft_tokens + 1:
            return False
        # A draft that may have missed much, or more than there is, must wait for the count.
        return not self._choose().drafts or self.missed < min(CATCH_UP, self._readable())

    def _submit(self) -> None:
        submitted, choice, context = self.clock(), self._allowed(self._choose()), self.context
        plan, self.chosen = self._plan(choice), None
        context.make_room(self.length + (len(self.flights) + 1) * (self.k_max + 1))
        step, state = self._step(plan), context.spend()
        new_state, packed = step(state)
        del state
        mx.async_eval(packed, new_state)
        context.state = State(*new_state)
        self.flights.append(Flight(plan, choice, packed, submitted))

    def _read(self) -> tuple[Choice, list[Token]]:
        _, choice, packed, submitted = self.flights.popleft()
        values, now = packed.tolist()[0], self.clock()
        seconds, self.read_at = now - max(submitted, self.read_at), now
        k = choice.k
        accepted, ids = values[0], values[1 : k + 2]
        logprobs = np.array(values[k + 2 :], dtype=np.int32).view(np.float32).tolist()[: accepted + 1]
        if not all(map(math.isfinite, logprobs)):
            raise self._impossible()
        assert 0 <= accepted <= k and all(0 <= i < self.pair.vocab_size for i in ids[: accepted + 1])
        if self.k_max:
            self.controller.learn(choice, accepted, seconds)
        if not any(flight.choice.drafts for flight in self.flights):
            # Until now every draft counted as kept: the draft has not read its last one, nor a looked up one.
            self.missed -= int(accepted < k) if choice.drafts else k - accepted
        last = "plain" if k == 0 else "bonus" if accepted == k else "correction"
        return choice, [Token(*t) for t in zip(ids, logprobs, ["accepted"] * accepted + [last])]

    def _impossible(self) -> SpecError:
        """A token that its own law rules out: the logits were not numbers, or nothing was left to draw."""
        if self.processors:
            return SpecError("the logits left no token to choose, or were not numbers: check logit_bias, "
                             "the penalties and the logits processors")
        return SpecError("the model gave logits that are not numbers: its files may be damaged, download it again")

    def _emit(self) -> Emission:
        if self.finish == "cancelled":
            return self.emitter.close("cancelled")
        choice, tokens = self._read()
        emission = self.emitter.feed(tokens)
        kept = tokens[: emission.kept]
        self.length += len(tokens)
        self.history += [t.id for t in kept]
        if LOOKUP in self.limits:
            self.seen.add(t.id for t in kept)
        self.stats.add_round(choice.k, [t.origin for t in kept], len(kept) < len(tokens), choice.source == LOOKUP)
        if emission.dropped:
            self.stats.drop(emission.dropped)
            del self.history[-emission.dropped :]
        self.finish = emission.finish_reason
        if self.length - self.cleared >= CLEAR_EVERY:
            self.cleared = self.length
            mx.clear_cache()
        return emission

    def settle(self) -> None:
        """Wait for what is in flight, so that the device is free for somebody else."""
        with _device:
            mx.eval([flight.packed for flight in self.flights])

    def _drain(self) -> None:
        with _device:
            self.settle()
            self.flights.clear()
            mx.clear_cache()

    # deciding a round

    def _plan(self, choice: Choice) -> Plan:
        k, looks_up = choice.k, choice.k > 0 and choice.source == LOOKUP
        catch_up = self._catch_up(choice) if self.context.drafts_with_a_model else 1
        length = self.length if self.exact_history else None
        return Plan(k, catch_up, read_bound(self._longest() + k + 1), length, looks_up, self._leave_unread(choice))

    def _leave_unread(self, choice: Choice) -> int:
        """The room for states that a listener leaves for a later round, as many rows as a round can have; 0: it reads."""
        drafter, rows, room = self.context.drafter, choice.k + 1, self.k_max + 1
        if not (self.context.hears and drafter.layers) or choice.drafts or self.unread + rows > room:
            self.unread = rows
            return 0
        self.unread += rows
        return room

    def _catch_up(self, choice: Choice) -> int:
        """How many tokens a draft model reads again in a round."""
        if not choice.drafts:
            self.missed += choice.k + 1
            return 1
        if self.missed >= CATCH_UP:
            assert not self.flights  # the tokens must be known
            start = self.length - 1 - self.missed
            self.context.catch_up(self.history[start : self.length - 1], start)
            self.missed = 0
        bucket = self._bucket()
        self.missed = 1
        return bucket

    def _longest(self) -> int:
        """The most tokens there can be once every round in flight is done."""
        return self.length + sum(f.plan.num_draft_tokens + 1 for f in self.flights)

    def _choose(self) -> Choice:
        """For the next round; asked once, however often it is looked at."""
        if self.chosen is None:
            matched = self.seen.matched()
            self.chosen = self.controller.choose(self._longest(), self.limits, matched) if self.k_max else Choice(0)
        return self.chosen

    def _allowed(self, choice: Choice) -> Choice:
        k = min(choice.k, self.limits.get(choice.source, 0))
        limit = self.pair.draft_max_length
        if k and choice.drafts and limit is not None and self.context.drafts_with_a_model and (
                self._longest() + k + 1 > limit):
            self.stats.mode = f"speculative, then without the draft: the draft reads at most {limit} tokens"
            del self.limits[DRAFT]
            k = 0
        if not self.flights and self.emitter.left is not None:
            k = min(k, self.emitter.left - 1)
        until = self.context.until_switch(self.length)
        k = k if until is None else min(k, until)
        return choice._replace(k=k) if k else Choice(0)

    def _bucket(self) -> int:
        """How many tokens the draft reads again: what it missed and the pending one, rounded up to
        a power of two so that few shapes occur, where there are as many and it may."""
        needed = self.missed + 1
        if not self.context.drafter.rounds_up:
            return needed
        bucket = 1 << (needed - 1).bit_length()
        return bucket if bucket <= self._readable() else needed

    def _readable(self) -> int:
        """How many tokens there are for sure, once the rounds in flight are done, that a draft can read again: not those of
        the prompt's prefill, which left of a window's past only what the next token sees."""
        return self.length + len(self.flights) - self.stats.prompt_tokens + 1

    def _step(self, plan: Plan) -> Callable:
        """The function that builds this round: compiled once its shape has proved to be common."""
        if self.stepwise:
            return stepwise(self.context.round, self.processors, plan, self.history)
        build = partial(_build, self.context.round, plan)
        if self.exact_history or self.pair.target_profile.reason:
            return build
        return self.pair.compiled.step((signature(self.context.round, self.options), plan), build)

    def free(self) -> None:
        """Give the caches back to MLX and MLX's to the system, where no later turn builds on them."""
        with _device:
            self.context.state = None
            self.context.past.clear()
            mx.clear_cache()

    def leave(self) -> Memory | None:
        """What a later turn can build on; the decoder is spent."""
        with _device:
            self._drain()
            return self.context.leave(self.history, self.missed, self.length - len(self.history))


def _build(round: Round, plan: Plan, state: tuple) -> tuple[tuple, mx.array]:
    new_state, packed = round(State(*state), plan)
    return tuple(new_state), packed
