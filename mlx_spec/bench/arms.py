"""One reply of one engine, timed: this library's, mlx-lm's plain one, mlx-lm's speculative one.

Reading the prompt and decoding are timed apart, and alike on all sides: all of the prompt but its
last token is read, and decoding lasts from there to the reply's last token. Tokens are ids.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager
from typing import Any, Iterator, NamedTuple, Sequence

import mlx.core as mx
from mlx_lm.generate import stream_generate
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from .. import engine
from ..compiled import Traces
from ..prefill import prefill
from ..types import Options

OURS, PLAIN, SPECULATIVE = "mlx_spec", "mlx-lm-plain", "mlx-lm-spec"
NEVER = 1 << 30


class Arm(NamedTuple):
    """k: drafted tokens a round or "auto"; 0 for mlx-lm's plain decoding."""

    engine: str
    k: int | str
    temperature: float

    def __str__(self) -> str:
        return self.engine if self.engine == PLAIN else f"{self.engine} k={self.k}"


def run(arm: Arm, pair: Any, ids: Sequence[int], options: Options) -> dict[str, Any]:
    """A reply's ids, seconds and raw counts; `ended`: by an end token, which is not among the ids."""
    if arm.engine == OURS:
        return ours(pair, ids, options.but(temperature=arm.temperature, num_draft_tokens=arm.k))
    return theirs(pair, ids, arm, options)


def ours(pair: Any, ids: Sequence[int], options: Options) -> dict[str, Any]:
    decoder = engine.Decoder(pair, ids, options)
    tokens = [token for chunk in decoder.chunks() for token in chunk.tokens]
    decoder.free()
    s = decoder.stats
    return {
        "ids": [t.id for t in tokens], "ended": decoder.finish == "stop", "prompt_s": s.prompt_s,
        "draft_prompt_s": s.draft_prompt_s, "ttft_s": s.ttft_s, "decode_s": s.generation_s, "rounds": s.rounds,
        "drafted": s.drafted, "accepted": s.accepted, "looked_up": s.looked_up, "drafted_by_position": s.drafted_by_position,
        "mode": s.mode, "peak_memory_bytes": s.peak_memory_bytes,
    } | by_position([t.origin for t in tokens])


def theirs(pair: Any, ids: Sequence[int], arm: Arm, options: Options, caches: list | None = None) -> dict[str, Any]:
    """mlx-lm's `stream_generate`, on caches that hold the prompt; with the pair's draft or without. caches: of the
    target, filled already."""
    drafting = {"draft_model": pair.draft, "num_draft_tokens": arm.k} if arm.engine == SPECULATIVE else {}
    mx.reset_peak_memory()
    mx.random.seed(options.seed or 0)
    times = [time.perf_counter()]
    caches = caches or filled(pair.target, ids[:-1])
    times.append(time.perf_counter())
    caches += filled(pair.draft, ids[:-1]) if drafting else []
    times.append(time.perf_counter())
    replies = stream_generate(pair.target, pair.tokenizer, mx.array(ids[-1:]), options.max_tokens, prompt_cache=caches,
                              sampler=make_sampler(temp=arm.temperature), **drafting)
    got, flags, ended = _followed(replies, pair.end_ids, times)
    mx.eval([c.state for c in caches])  # a step is still in flight
    began, target, start, first, *_ = times
    return {
        "ids": got, "ended": ended, "prompt_s": start - began, "draft_prompt_s": start - target if drafting else None,
        "ttft_s": first - began, "decode_s": times[-1] - start, "mode": arm.engine,
        "peak_memory_bytes": mx.get_peak_memory(),
    } | _counts(flags, arm.k)


def _followed(replies: Any, end_ids: Any, times: list[float]) -> tuple[list[int], list[bool], bool]:
    """Tokens, whether each was drafted, and whether an end token came; the times of them all are added."""
    got, flags, ended = [], [], False
    for reply in replies:
        times.append(time.perf_counter())
        if ended := reply.token in end_ids:
            break
        got.append(reply.token)
        flags.append(reply.from_draft)
    replies.close()
    return got, flags, ended


def _counts(flags: Sequence[bool], k: Any) -> dict[str, Any]:
    """What mlx-lm drafted, from its flags: a round ends with a token that was not drafted."""
    origins, run_length = [], 0
    for drafted in flags:
        origins.append("accepted" if drafted else "bonus" if run_length == k else "correction")
        run_length = run_length + 1 if drafted else 0
    rounds = len(flags) - sum(flags) + bool(flags and flags[-1])
    empty = {"judged": [], "kept": []}
    return {"rounds": rounds, "drafted": rounds * k, "accepted": sum(flags), "looked_up": 0, "drafted_by_position": [rounds] * k
            } | (by_position(origins) if k else empty)


def by_position(origins: Sequence[str]) -> dict[str, list[int]]:
    """By place in the round: drafts whose predecessors were all kept, and those of them that were kept."""
    judged, kept, place = Counter(), Counter(), 0
    for origin in origins:
        if origin in ("accepted", "correction"):
            judged[place] += 1
            kept[place] += origin == "accepted"
        place = place + 1 if origin == "accepted" else 0
    return {name: [counts[i] for i in range(len(judged))] for name, counts in (("judged", judged), ("kept", kept))}


def filled(model: Any, ids: Sequence[int]) -> list:
    """mlx-lm's caches with these tokens in them."""
    caches = make_prompt_cache(model)
    prefill(model, caches, ids, Options())
    return caches


def mlx_lm_drafts(pair: Any) -> bool:
    """Whether mlx-lm can speculate with the pair: its draft is a language model, all caches go back."""
    return is_model(pair.draft) and all(can_trim_prompt_cache(make_prompt_cache(m)) for m in (pair.target, pair.draft))


def is_model(draft: Any) -> bool:
    """A language model, not a reader of the target's hidden states."""
    return draft is not None and not hasattr(draft, "bind")


@contextmanager
def compile_after(uses: int) -> Iterator[None]:
    """Compile a shape at its so many-th use, and forget none: there are more arms than a pair remembers."""
    kept = Traces.after, Traces.most
    Traces.after, Traces.most = uses, NEVER
    try:
        yield
    finally:
        Traces.after, Traces.most = kept


def count_rounds(pair: Any, ids: Sequence[int], k: int, rounds: int = 8) -> dict[str, float]:
    """Evaluations and host reads of a round, counted, and the host's milliseconds of work to build and submit one: of its
    thread's own time, because a submission may wait for the device."""
    decoder = engine.Decoder(pair, ids, Options(max_tokens=None, num_draft_tokens=k))
    chunks, seen, submits, submit = decoder.chunks(), Counter(), [], decoder._submit
    next(chunks)

    def timed() -> None:
        began = time.thread_time()
        submit()
        submits.append(time.thread_time() - began)

    decoder._submit = timed
    with _spying(seen):
        done = sum(1 for _, _ in zip(range(rounds), chunks))
    chunks.close()
    decoder.free()
    return {"k": k, "evaluations": seen["evaluations"] / max(done, 1), "reads": seen["reads"] / max(done, 1),
            "host_ms": min(submits, default=0.0) * 1e3}


@contextmanager
def _spying(seen: Counter) -> Iterator[None]:
    spied = [(mx, "eval", "evaluations"), (mx, "async_eval", "evaluations"),
             *((mx.array, name, "reads") for name in ("item", "tolist", "__bool__", "__int__", "__float__"))]
    originals = [getattr(owner, name) for owner, name, _ in spied]

    def spy(original: Any, label: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen[label] += 1
            return original(*args, **kwargs)
        return call

    try:
        for (owner, name, label), original in zip(spied, originals):
            setattr(owner, name, spy(original, label))
        yield
    finally:
        for (owner, name, _), original in zip(spied, originals):
            setattr(owner, name, original)
