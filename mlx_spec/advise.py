"""Which draft of those on this machine makes a target faster, and by how much: predicted from
measured costs and from how often its tokens stand on a few real prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

from huggingface_hub import CacheNotFound, scan_cache_dir
from mlx_lm.utils import load_tokenizer

from .bench import texts
from .bench.arms import by_position
from .control import LARGEST, LOOKUP_KS, Fixed
from .costs import Costs, best, measure
from .drafters.lookup import Seen
from .drafters.saved import is_saved
from .engine import Decoder
from .errors import PairError, SpecError, first_line
from .hub import cached_repo
from .names import NO_DRAFT, catalogue, find, locate, short
from .pairs import Pair, compare_tokenizers, join
from .prefill import Cancelled
from .prompts import encode
from .types import Options, Token

LOOKUP = "prompt lookup"
PROMPTS, TOKENS = 8, 48  # and so many of each reply
TRIED_K = 4  # where acceptance is read off; further places are taken to be like the last
WORTH = 1.02  # less is not told from noise
Replied = tuple[Sequence[int], Sequence[int]]  # a prompt and its greedy reply


@dataclass(frozen=True)
class Advice:
    """One draft. speedup: over plain decoding, predicted for k drafts a round and prompt lookup where it finds something,
    as `auto` has them; k = 0: the draft would be left alone. acceptance: by place, each once those before
    it stood. error: why it can't be used."""

    draft: str
    k: int = 0
    speedup: float = 1.0
    acceptance: tuple[float, ...] = ()
    c: float | None = None
    error: str | None = None

    @property
    def name(self) -> str:
        """As `load` takes it."""
        return NO_DRAFT if self.draft == LOOKUP else self.draft

    @property
    def helps(self) -> bool:
        return self.k > 0 and self.speedup >= WORTH


def advise(pair: Pair, folders: Sequence[str | Path] = (), prompts: Sequence[str] = texts.CATEGORIES[:4],
           on_prompt: Callable[[str, int], None] = lambda draft, done: None,
           should_cancel: Callable[[], bool] | None = None) -> list[Advice]:
    """Every draft for a pair's target, the best first, then those that can't be used.

    folders: where drafts are, beside the hub's cache and the catalogue; a draft itself, or a folder
    of them. prompts: kinds of `bench/texts.py`, or .jsonl files; 8 in all are used. on_prompt: told,
    before each prompt, the draft and how many prompts it has done. should_cancel: asked every round.
    Evaluates, and loads one draft at a time. Raises ValueError and SpecError where the target or the
    prompts are of no use, and Cancelled.
    """
    if pair.target_profile.reason:
        raise SpecError(f"{pair.name} decodes plainly with every draft: {pair.target_profile.reason}")
    ids = [encode(pair.tokenizer, p.messages, vocab_size=pair.vocab_size)[0] for p in _prompts(prompts)]
    names = list(candidates(str(pair.name), folders))
    reply = partial(_reply, Options(max_tokens=TOKENS, should_cancel=should_cancel))
    alone = Pair(pair.target, None, pair.tokenizer, name=pair.name)
    on_prompt(LOOKUP, 0)
    replies = [(i, [t.id for t in reply(alone, i, 0)]) for i in _told(ids, partial(on_prompt, LOOKUP))]
    costs = measure(alone, again=True)
    _, k, gain = _predict(costs, (), replies)
    found = [Advice(LOOKUP, k, gain)]
    for name in names:
        on_prompt(name, 0)
        try:
            _check(pair, locate(name))
            found.append(_try(join(alone, name), name, reply, replies, costs, partial(on_prompt, name)))
        except SpecError as e:
            found.append(Advice(name, error=str(e)))
    return sorted(found, key=lambda a: (a.error is not None, not a.helps, -a.speedup))


def candidates(target: str, folders: Sequence[str | Path] = ()) -> Iterator[str]:
    """Names, as `locate` takes them, of what is on this machine and smaller than the target."""
    entry, seen, path, given = find(target), set(), locate(target), models_in(folders)
    names = [e.draft_name for e in catalogue() if e.draft != "self" and target in (e.name, e.target)]
    try:
        names += [r.repo_id for r in scan_cache_dir().repos if r.repo_type == "model"]
    except CacheNotFound:
        pass
    for name in (*names, *given):
        here = Path(name) if Path(name).is_absolute() else cached_repo(name)
        if here and here.resolve() not in seen and (entry is None or name != entry.target) and _size(here) < _size(path):
            seen.add(here.resolve())
            yield name


def models_in(folders: Sequence[str | Path]) -> list[str]:
    """Model folders, and those in folders of them. Raises PairError."""
    found = []
    for folder in map(Path, folders):
        inside = [folder] if (folder / "config.json").exists() else sorted(p.parent for p in folder.glob("*/config.json"))
        if not inside:
            raise PairError(f"{folder} holds no models: give a folder with a config.json, or one of such folders")
        found += [str(p.resolve()) for p in inside]
    return found


def _size(path: Path) -> int:
    return sum(p.stat().st_size for p in path.glob("*.safetensors")) if path.is_dir() else path.stat().st_size


def verdict(target: str, found: Sequence[Advice]) -> str:
    """What to do, in a sentence."""
    best, target = found[0], short(target)
    if not best.helps:
        return f"none helps here: leave {target} to decode plainly, or train a draft for it (mlx_spec train --help)"
    gain = f"makes {target} {best.speedup:.2f}x as fast, as predicted"
    return f"prompt lookup without a draft {gain}" if best.draft == LOOKUP else f"{short(best.draft)} {gain}, prompt lookup included"


def _prompts(names: Sequence[str]) -> list[texts.Prompt]:
    """As many of each kind."""
    return texts.load(names, -(-PROMPTS // len(names)) if names else None)[:PROMPTS]


def _check(pair: Pair, path: Path) -> None:
    """The tokenizers alone first: weights take long to load. Raises PairError."""
    if path.is_dir() and not is_saved(path):
        try:
            tokenizer = load_tokenizer(path)
        except Exception as e:
            raise PairError(f"its tokenizer can't be read ({first_line(e)})") from e
        compare_tokenizers(pair.tokenizer, tokenizer)


def _told(prompts: Sequence[Any], tell: Callable[[int], None]) -> Iterator[Any]:
    """Each one, after how many are done; none are while a draft is still loaded."""
    for done, prompt in enumerate(prompts):
        if done:
            tell(done)
        yield prompt


def _try(pair: Pair, name: str, reply: Callable, replies: Sequence[Replied], alone: Costs, tell: Callable[[int], None]) -> Advice:
    if pair.draft_profile.reason:
        raise PairError(pair.draft_profile.reason)
    runs = [by_position([t.origin for t in reply(pair, ids, TRIED_K)]) for ids, _ in _told(replies, tell)]
    judged, kept = ([sum(sum(run[what][i : i + 1]) for run in runs) for i in range(TRIED_K)] for what in ("judged", "kept"))
    found = [b / a for a, b in zip(judged, kept) if a]
    limit = getattr(pair.draft, "largest", LARGEST)
    acceptance = (found + [found[-1]] * LARGEST)[: min(limit, LARGEST)] if found else []
    own = measure(pair, again=True)
    scale = alone.rows_s[0] / own.rows_s[0]  # of a machine that has become slower or faster since
    costs = replace(alone, step_s=scale * own.step_s, start_s=scale * own.start_s)
    k, _, gain = _predict(costs, acceptance, replies)
    return Advice(name, k, gain, tuple(acceptance), costs.c)


def _reply(options: Options, pair: Pair, ids: Sequence[int], k: int) -> list[Token]:
    decoder = Decoder(pair, ids, options, controller=Fixed(k))
    got = [token for chunk in decoder.chunks() for token in chunk.tokens]
    if decoder.finish == "cancelled":
        raise Cancelled
    return got


def _predict(costs: Costs, acceptance: Sequence[float], replies: Sequence[Replied]) -> tuple[int, int, float]:
    """(k of the draft, k of lookup, speed-up) of the two together, on replies that are known: a round without a match is the
    draft's, or plain. 0: it does not pay."""
    drafted, gain = best(costs, acceptance)
    token_s = costs.rows_s[0] / gain
    plain = sum(len(reply) for _, reply in replies) * costs.rows_s[0]
    spent = {k: sum(_replayed(costs, ids, reply, k, token_s) for ids, reply in replies) for k in (0, *LOOKUP_KS)}
    looked_up = min(spent, key=spent.get)
    return drafted, looked_up, plain / spent[looked_up] if plain else 1.0


def _replayed(costs: Costs, ids: Sequence[int], reply: Sequence[int], k: int, token_s: float) -> float:
    """Seconds. token_s: of a token that is not looked up."""
    seen, seconds, at = Seen(ids), 0.0, 0
    while at < len(reply):
        wanted, found = reply[at : at + k + 1], seen.continuation(k)
        kept = next((i for i, (a, b) in enumerate(zip(found, wanted)) if a != b), min(len(found), len(wanted)))
        seconds += costs.rows_s[k] if found else token_s
        seen.add(reply[at : at + kept + 1])
        at += kept + 1
    return seconds
