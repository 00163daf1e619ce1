"""What both models have read: the caches of one request, from the prompt to the next turn.

Prefill on mlx-lm's caches, adoption by the device, growth, the switch to quantised caches, and the
way back. The engine decides when; here is how. Everything that evaluates here happens between
rounds, not in one.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import Any, Callable, Sequence

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from . import sampling
from .cache import Native, Quantized, Several, adopt, convert, flat, grow, read_bound, rung
from .window import Ring
from .drafters.model import ModelDrafter, RecurrentDrafter
from .drafters.reader import Reader
from .memory import Memory
from .prefill import prefill
from .recurrent.state import Recurrent
from .probe import KEEP, Profile, prompt_cache, why_not_quantised
from .round import Round, State
from .types import Options

CATCH_UP = 16  # tokens that a draft may miss before it reads them in passes of their own
MIN_SLACK = 8  # a ring's room is made for at least this k, so that requests share shapes
AHEAD = 1024  # tokens of the reply that buffers are made for at first


class Context:
    """The device's side of a request. k_max: the most tokens that will be drafted in a round."""

    def __init__(self, pair: Any, options: Options, rounds: Round, k_max: int, memory: Memory | None = None):
        self.pair, self.options, self.memory = pair, options, memory
        self.k_max = k_max
        self.slack = 2 * (max(k_max, MIN_SLACK) + 1)
        self.round = replace(rounds, layers=self._layers(pair.target_profile))
        self.state: State | None = None
        self.past: deque[State] = deque(maxlen=2)  # of the last rounds, what can't be rewound
        self.capacity = 0
        self.draft_prompt_s: float | None = None

    @property
    def drafter(self) -> Any:
        return self.round.drafter

    @property
    def drafts_with_a_model(self) -> bool:
        return isinstance(self.drafter, ModelDrafter)

    @property
    def hears(self) -> bool:
        return self.drafter is not None and self.drafter.hears

    # the prompt

    def read(self, ids: Sequence[int], seed: int) -> None:
        """Prefill target and draft and make the first state; the last token stays pending."""
        total = len(ids)
        limit = AHEAD if self.options.max_tokens is None else min(self.options.max_tokens, AHEAD)
        self.capacity = rung(total + limit + 2 * (self.k_max + 1))
        progress = self.options.on_progress or (lambda read, of: None)
        progress(0, total)
        reader = self._reader(ids) if self.hears else None
        target = self._read_target(ids, lambda read: progress(read, total), reader)
        drafter = self._heard(reader, total) if reader else self._read_draft(ids)
        progress(total, total)
        history = mx.array([[*ids, *[0] * (self.capacity - total)]], dtype=mx.uint32)
        greedy = self.round.sampling.greedy
        keys = mx.zeros((3, 2), mx.uint32) if greedy else sampling.make_keys(seed)
        self.state = State(history, mx.array([total]), keys, target, drafter)
        mx.eval(list(self.state))

    def _read_target(self, ids: Sequence[int], progress: Callable[[int], None], reader: Reader | None) -> list:
        caches, known = self._remembered("target", ids) or (prompt_cache(self.pair.target, self.options.max_kv_size), 0)
        told = lambda read: progress(known + read)  # noqa: E731
        if reader is None:
            prefill(self.pair.target, caches, ids[known:-1], self.options, told)
        else:
            prefill(reader, caches, ids[known:-1], self.options, told, lambda: reader.arrays)
        layers = self._layers_of(self.pair.target_profile, caches)
        self.round = replace(self.round, layers=layers)
        return adopt(layers, caches, self.capacity)

    def _reader(self, ids: Sequence[int]) -> Reader:
        """The target with the drafter's module reading along."""
        size, layers = self.options.max_kv_size, self.pair.draft_profile.layers
        fresh = [KVCache() if size is None else RotatingKVCache(size, keep=KEEP) for _ in layers], None
        (caches, last), _ = self._remembered("draft", ids) or (fresh, 0)
        return Reader(self.drafter.model, self.pair.target, caches, last)

    def _heard(self, reader: Reader, total: int) -> Any:
        """A listener's first state: the newest token is still to be read, with the last states."""
        if self.drafter.layers:
            self._redraft(self._layers(self.pair.draft_profile))
        caches = adopt(self.drafter.layers, reader.caches, self.capacity)
        return self.drafter.hear(caches, reader.last, mx.array([total - 1]))

    def _read_draft(self, ids: Sequence[int]) -> Any:
        if self.drafter is None:
            return ()
        if not self.drafts_with_a_model:
            return self.drafter.start(ids, self.capacity)
        started, model = time.perf_counter(), self.pair.draft
        caches, known = self._remembered("draft", ids) or (prompt_cache(model, self.options.max_kv_size), 0)
        options = self.options if self._packs_draft else self.options.but(kv_bits=None)
        prefill(model, caches, [min(i, self.drafter.vocab - 1) for i in ids[known:-1]], options)
        self._redraft(self._layers_of(self.pair.draft_profile, caches))
        state = self.drafter.begin(adopt(self.drafter.layers, caches, self.capacity), len(ids) - 1)
        self.draft_prompt_s = time.perf_counter() - started
        return state

    def _remembered(self, role: str, ids: Sequence[int]) -> tuple[list, int] | None:
        """The caches that an earlier turn left for a model, and how many of these ids are in them."""
        if self.memory is None or not getattr(self.memory, role):
            return None
        assert self.memory.pair is self.pair  # see `recall`
        assert list(ids[: len(self.memory.ids)]) == self.memory.ids
        known = len(self.memory.ids) if role == "target" else self.memory.draft_length
        return getattr(self.memory, role), known

    # which caches

    def _layers(self, profile: Profile, quantised: bool = False) -> tuple:
        options = self.options
        bits = options.kv_bits if quantised else None
        return profile.for_request(self.slack, options.max_kv_size, bits, options.kv_group_size)

    def _layers_of(self, profile: Profile, caches: list) -> tuple:
        """The layers for what a prefill left: mlx-lm quantises once a cache is long enough."""
        if profile.reason:
            return tuple(Native(c) for c in caches)
        return self._layers(profile, any(isinstance(c, QuantizedKVCache) for c in caches))

    def _redraft(self, layers: tuple) -> None:
        self.round = replace(self.round, drafter=replace(self.drafter, layers=layers))

    @property
    def _packs_draft(self) -> bool:
        options, profile = self.options, self.pair.draft_profile
        return options.kv_bits is not None and why_not_quantised(
            self.pair, profile, options.kv_bits, options.kv_group_size) is None

    # between rounds

    def until_switch(self, length: int) -> int | None:
        """Drafts that a round may hold before full caches become quantised; None: they will not."""
        if self.options.kv_bits is None or any(isinstance(x, Quantized) for x in self.round.layers):
            return None
        return max(self._switch_at - length, 0)

    @property
    def _switch_at(self) -> int:
        return max(self.options.quantized_kv_start, 1)

    def switch(self, length: int) -> None:
        """Quantise the caches at the same token as mlx-lm would, so that the text is the same."""
        if self.until_switch(length) is None or length - 1 < self._switch_at:
            return
        layers = self._layers(self.pair.target_profile, quantised=True)
        convert(layers, self.state.target)
        self.round = replace(self.round, layers=layers)
        if self.drafts_with_a_model and self._packs_draft:
            layers = self._layers(self.pair.draft_profile, quantised=True)
            convert(layers, self.drafter.caches(self.state.drafter))
            self._redraft(layers)

    def catch_up(self, tokens: Sequence[int], start: int) -> None:
        """The draft reads tokens that it missed, in pieces that its rings can take."""
        for i in range(0, len(tokens), CATCH_UP):
            piece = tokens[i : i + CATCH_UP]
            drafter = self.drafter.read(self.state.drafter, piece, start + i, read_bound(start + len(tokens)))
            self.state = self.state._replace(drafter=drafter)
            mx.eval(drafter)

    def make_room(self, needed: int) -> None:
        """MLX does not check array offsets: a write past the end corrupts the heap. No `assert`,
        which `python -O` takes out."""
        if needed > self.capacity:
            self._grow(rung(needed))
        if not needed <= self.capacity == self.state.history.shape[1]:
            raise AssertionError(f"{needed} positions needed, buffers hold {self.state.history.shape[1]}")

    def _grow(self, capacity: int) -> None:
        state = self.state
        pad = mx.zeros((state.history.shape[0], capacity - state.history.shape[1]), state.history.dtype)
        history = mx.concatenate([state.history, pad], axis=1)
        mx.eval(history)
        grow(self.round.layers, state.target, capacity)
        if self.drafter is not None:
            self.drafter.grow(state.drafter, capacity)
        self.state = state._replace(history=history)
        self.capacity = capacity

    def spend(self) -> tuple:
        """The state for a round to take over: a buffer with a second owner is copied, not written in
        place. Recurrent states, which every round makes anew, stay here too: a reply may end inside it."""
        state, self.state = self.state, None
        if self._recurrent:
            self.past.append(self._still(state))
        return tuple(state)

    @property
    def _recurrent(self) -> bool:
        return any(isinstance(x, Recurrent) for x in flat((*self.round.layers, *getattr(self.drafter, "layers", ()))))

    def _still(self, state: State) -> State:
        """What of a state no length can cut."""
        drafter = None
        if isinstance(self.drafter, RecurrentDrafter):
            drafter = _only_recurrent(self.drafter.layers, state.drafter[0]), state.drafter[1]
        return State(None, state.length, None, _only_recurrent(self.round.layers, state.target), drafter)

    # a later turn

    def leave(self, ids: Sequence[int], missed: int, dropped: int) -> Memory | None:
        """The caches rewound to all of `ids` but the last; None where they can't be. Spends the context.

        missed: tokens that the draft may not have read. dropped: tokens after `ids` that were read back.
        """
        if self.state is None or self.pair.target_profile.reason:
            return None
        kept = len(ids) - 1
        states = [*self.past, self._still(self.state)] if self._recurrent else []
        still = next((s for s in reversed(states) if s.length.item() - 1 <= kept), None)
        kept = still.length.item() - 1 if still else kept
        if states and not still or not self._turns_back(dropped + len(ids) - kept):
            return None
        target = _handed_back(self.round.layers, self.state.target, still and still.target, kept)
        draft, read = [], max(kept - max(missed, 1), 0)
        if self.hears:
            draft, read = self.drafter.leave(self.state, kept, read_bound(len(ids) + 2 * self.k_max)), kept
        elif self.drafts_with_a_model and read:
            caches, at = self.drafter.caches(self.state.drafter), None
            if still and still.drafter:
                at, read = still.drafter[0], still.drafter[1].item()
            draft = _handed_back(self.drafter.layers, caches, at, read)
        self.state = None
        self.past.clear()
        return Memory(self.pair, list(ids[:kept]), target, draft, read)

    def _turns_back(self, tokens: int) -> bool:
        """Whether what a window still holds reaches that far; a round in flight may have written k more."""
        layers = (*self.round.layers, *getattr(self.drafter, "layers", ()))
        return tokens + self.k_max <= self.slack or not any(isinstance(x, Ring) for x in flat(layers))


def _only_recurrent(layers: Sequence, state: Sequence) -> list:
    return [_only_recurrent(x.parts, arrays) if isinstance(x, Several) else arrays if isinstance(x, Recurrent) else ()
            for x, arrays in zip(layers, state)]


def _with_recurrent(layers: Sequence, state: Sequence, still: Sequence) -> list:
    return [_with_recurrent(x.parts, a, b) if isinstance(x, Several) else b if isinstance(x, Recurrent) else a
            for x, a, b in zip(layers, state, still)]


def _handed_back(layers: Sequence, state: Sequence, still: Sequence | None, length: int) -> list[Any]:
    """mlx-lm's caches with `length` tokens; recurrent states from `still`, which has just as many."""
    return [layer.hand_back(a, length) for layer, a in zip(layers, _with_recurrent(layers, state, still or state))]
