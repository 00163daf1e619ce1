"""What the benchmarks run and time: the engine, mlx-lm, and bare calls of the models.

Decoding only: from the end of the prefill to the last token, on both sides.
"""

from __future__ import annotations

import time
from itertools import takewhile
from pathlib import Path
from typing import Any, Mapping, NamedTuple, Sequence

import mlx_spec  # before mlx.core: it puts a fast BLAS in place

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from measure import note
from mlx_lm.models.cache import KVCache, trim_prompt_cache
from mlx_spec.bench import arms, texts
from mlx_spec.bench.arms import by_position, compile_after, is_model
from mlx_spec.engine import Decoder
from mlx_spec.memory import Memory
from mlx_spec.prompts import encode
from mlx_spec.types import Options

# Of the noisy copy, relative to each matrix's standard deviation. Greedy acceptance on the ten
# prompts in float32, 56 tokens each: .74 at k = 2, .60 at k = 4.
NOISE = 0.06
NOISE_SEED = 7
STEPS, IDLE_STEPS = 8, 2  # of a chain: timed, and run before
WARM_TOKENS, WARM_TOKENS_THEIRS = 32, 12
WARM_LENGTHS = (60, 236)  # both lengths of attention that the prompts' replies reach
NEVER = arms.NEVER


class Setting(NamedTuple):
    draft: str
    k: int
    temperature: float

    def __str__(self) -> str:
        return f"k={self.k} {self.draft:5} T={self.temperature}"


class Models(NamedTuple):
    pairs: dict[str, Any]  # by draft: self, noisy, none
    tokenizer: Any


def load() -> Models:
    """The demo target with itself, with a noisy copy and with nothing as its draft; no end tokens."""
    plain = mlx_spec.load("demo", draft=False)
    pairs = {"none": plain}
    for name, draft in (("self", plain.target), ("noisy", noisy_copy(plain.target))):
        pairs[name] = mlx_spec.Pair(plain.target, draft, plain.tokenizer)
    for pair in pairs.values():
        endless(pair)
    return Models(pairs, plain.tokenizer)


def endless(pair: Any) -> Any:
    """No token ends a reply, of ours or of mlx-lm's."""
    pair.end_ids, pair.tokenizer.eos_token_ids = frozenset(), []
    return pair


def noisy_copy(model: Any) -> Any:
    """A second set of weights that agrees in part."""
    weights = tree_flatten(model.parameters())
    keys = mx.random.split(mx.random.key(NOISE_SEED), len(weights))
    copy = type(model)(model.args)
    copy.update(tree_unflatten([(path, _noisy(w, key)) for (path, w), key in zip(weights, keys)]))
    mx.eval(copy)
    return copy.eval()


def _noisy(weight: mx.array, key: mx.array) -> mx.array:
    wide = weight.astype(mx.float32)
    scale = NOISE * mx.std(wide) if weight.ndim > 1 else 0
    return (wide + scale * mx.random.normal(weight.shape, key=key)).astype(weight.dtype)


def chat_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    return [encode(tokenizer, prompt.messages)[0] for prompt in texts.load(["chat"], count)]


def long_text(tokenizer: Any, length: int) -> list[int]:
    """Real text: the prompts, then the package's own source."""
    found = [prompt.text for prompt in texts.load(["chat"])]
    found += [path.read_text() for path in sorted(Path(mlx_spec.__file__).parent.glob("*.py"))]
    return tokenizer.encode("\n\n".join(found)[: 6 * length])[:length]


def warm_up(pairs: Mapping[str, Any], settings: Sequence[Setting], text: list[int],
            tokens: int = WARM_TOKENS) -> None:
    """Every arm once."""
    note("warming up")
    with compile_after(1):
        for setting in settings:
            pair = pairs[setting.draft]
            for length in WARM_LENGTHS:
                ours(pair, text[:length], setting, tokens, 0)
            if is_model(pair.draft):
                theirs(pair, text[: WARM_LENGTHS[-1]], setting, WARM_TOKENS_THEIRS, 0)
    plain_theirs(pair, text[: WARM_LENGTHS[-1]], WARM_TOKENS_THEIRS)


def ours(pair: Any, ids: list[int], setting: Setting, tokens: int, seed: int,
         run_ahead: bool | None = None) -> dict[str, Any]:
    options = Options(max_tokens=tokens, temperature=setting.temperature, seed=seed, num_draft_tokens=setting.k)
    decoder = Decoder(pair, ids, options, run_ahead=run_ahead)
    reply = [token for chunk in decoder.chunks() for token in chunk.tokens]
    stats = decoder.stats
    # A last round that was cut counts only the drafts inside the reply; its work was k.
    cut = len(list(takewhile(lambda t: t.origin == "accepted", reversed(reply))))
    return {"ids": [t.id for t in reply], "seconds": stats.generation_s, "rounds": stats.rounds,
            "drafted": stats.drafted, "accepted": stats.accepted,
            "drafts_run": stats.drafted + (setting.k - cut if cut else 0),
            "drafted_by_position": stats.drafted_by_position} | by_position([t.origin for t in reply])


def theirs(pair: Any, ids: list[int], setting: Setting, tokens: int, seed: int) -> dict[str, Any]:
    """mlx-lm's speculative decoding."""
    return _theirs(pair, ids, arms.Arm(arms.SPECULATIVE, setting.k, setting.temperature), tokens, seed)


def plain_theirs(pair: Any, ids: list[int], tokens: int, caches: list | None = None, *, temperature: float = 0,
                 seed: int = 0) -> dict[str, Any]:
    """mlx-lm's plain decoding."""
    return _theirs(pair, ids, arms.Arm(arms.PLAIN, 0, temperature), tokens, seed, caches)


def _theirs(pair: Any, ids: list[int], arm: arms.Arm, tokens: int, seed: int, caches: list | None = None) -> dict:
    run = arms.theirs(pair, ids, arm, Options(max_tokens=tokens, seed=seed), caches)
    return run | {"seconds": run["decode_s"]}


def chain(model: Any, caches: list, rows: int) -> float:
    """Seconds of one bare call on `rows` rows: each call's argmax feeds the next, the cache is trimmed
    after it, and the next call is built while this one runs."""
    y, started = mx.zeros((1, rows), mx.uint32), 0.0
    for i in range(IDLE_STEPS + STEPS):
        if i == IDLE_STEPS:
            mx.eval(y)
            started = time.perf_counter()
        y = mx.argmax(model(y, cache=caches), axis=-1)
        mx.async_eval(y)
        trim_prompt_cache(caches, rows)
    mx.eval(y)
    return (time.perf_counter() - started) / STEPS


def costs(pair: Any, caches: dict[int, list], k: int) -> dict[str, float]:
    """Bare calls: a draft step, a target step, and the target's pass over k + 1 rows."""
    target, draft = caches[id(pair.target)], caches[id(pair.draft)]
    return {"draft_s": chain(pair.draft, draft, 1), "target_s": chain(pair.target, target, 1),
            "verify_s": chain(pair.target, target, k + 1)}


def ideal_seconds(run: dict[str, Any], cost: dict[str, float], k: int) -> float:
    """What the same rounds would take as bare calls: rounds x (k draft steps + a verify). The last
    rounds of a reply may draft fewer, so drafts are counted and the verify's rows interpolated."""
    per_row = (cost["verify_s"] - cost["target_s"]) / k
    return run["rounds"] * cost["target_s"] + run["drafts_run"] * (cost["draft_s"] + per_row)


def plain_ours(pair: Any, ids: list[int], tokens: int, caches: list) -> dict[str, Any]:
    options = Options(max_tokens=tokens, num_draft_tokens=0)
    chunks = list(Decoder(pair, ids, options, memory=Memory(pair, ids[:-1], caches, [], 0)).chunks())
    return {"ids": [t.id for c in chunks for t in c.tokens], "seconds": chunks[-1].stats.generation_s}


def part(caches: list[KVCache], length: int) -> list[KVCache]:
    """A copy of the first `length` positions."""
    copies = [KVCache() for _ in caches]
    for copy, cache in zip(copies, caches):
        copy.keys, copy.values, copy.offset = cache.keys + 0, cache.values + 0, length
    mx.eval([c.state for c in copies])
    return copies
