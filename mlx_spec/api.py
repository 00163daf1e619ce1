"""Text in, text out: `generate` and `stream_generate`."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

from .engine import Decoder
from .pairs import Pair, load
from .prompts import encode
from .types import Chunk, Options, Result

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]

_kept: dict[str, Pair] = {}
_keeping = threading.Lock()


class Stream(Iterator[Chunk]):
    """A reply under way: iterate for its chunks, one a round.

    seed: of every draw. notes: what a user should know of how the reply comes about. `result()`
    gives the whole reply, reading on to its end, or what there is after `close()`, which ends it
    early, from any thread, and frees the engine.
    """

    def __init__(self, decoder: Decoder, notes: tuple[str, ...]):
        self.seed, self.notes = decoder.seed, notes
        self._decoder, self._chunks, self._seen = decoder, decoder.chunks(), []

    def __next__(self) -> Chunk:
        try:
            self._seen.append(next(self._chunks))
        except StopIteration:
            self._free()
            raise
        return self._seen[-1]

    def close(self) -> None:
        self._decoder.cancel()
        try:
            self._chunks.close()
            self._free()
        except ValueError:  # another thread is in the middle of a round, and will end after it
            pass

    def _free(self) -> None:
        self._decoder.free()

    def result(self) -> Result:
        for _ in self:
            pass
        finish = self._decoder.finish or "cancelled"
        text = "".join(chunk.text for chunk in self._seen)
        tokens = tuple(t for chunk in self._seen for t in chunk.tokens)
        return Result(text, tokens, finish, self._decoder.stats.copy(), self.seed, self.notes)


def stream_generate(pair: Pair | str | Path, prompt: Prompt, **options: Any) -> Stream:
    """Decode a reply, one chunk a round.

    pair: a `Pair`, or a name that `load` knows, kept loaded until another name is asked for.
    prompt: text, token ids, or chat messages ({"role", "content"}). options: see `Options`.

    Options and prompt are checked here, before the first chunk is asked for. Raises ValueError
    (an option or the prompt) or SpecError (a model that can't be loaded), one line each.
    """
    checked = Options.of(**options)
    if isinstance(pair, (str, Path)):
        pair = _named(str(pair))
    elif not isinstance(pair, Pair):
        raise ValueError(f"pair must be a Pair, or the name of one; got {type(pair).__name__}")
    ids, notes = encode(pair.tokenizer, prompt, vocab_size=pair.vocab_size)
    return Stream(Decoder(pair, ids, checked), (*pair.notes, *notes))


def generate(pair: Pair | str | Path, prompt: Prompt, **options: Any) -> Result:
    """Decode a reply and return it whole; arguments and errors as for `stream_generate`."""
    return stream_generate(pair, prompt, **options).result()


def _named(name: str) -> Pair:
    with _keeping:
        if name not in _kept:
            pair = load(name)
            _kept.clear()  # one pair at a time: two would not fit on many Macs
            _kept[name] = pair
        return _kept[name]
