"""Text in, text out: `generate` and `stream_generate`."""

from __future__ import annotations

import threading
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
    gives the whole reply, reading on to its end; `close()` ends it early and frees the engine.
    """

    def __init__(self, decoder: Decoder, notes: tuple[str, ...]):
        self.seed, self.notes = decoder.seed, notes
        self._chunks, self._seen = decoder.chunks(), []

    def __next__(self) -> Chunk:
        self._seen.append(next(self._chunks))
        return self._seen[-1]

    def close(self) -> None:
        self._chunks.close()

    def result(self) -> Result:
        for _ in self:
            pass
        last = self._seen[-1]
        text = "".join(chunk.text for chunk in self._seen)
        tokens = tuple(t for chunk in self._seen for t in chunk.tokens)
        return Result(text, tokens, last.finish_reason, last.stats, self.seed, self.notes)


def stream_generate(pair: Pair | str, prompt: Prompt, **options: Any) -> Stream:
    """Decode a reply, one chunk a round.

    pair: a `Pair`, or a name that `load` knows, kept loaded until another name is asked for.
    prompt: text, token ids, or chat messages ({"role", "content"}). options: see `Options`.

    Options and prompt are checked here, before the first chunk is asked for. Raises ValueError
    (an option or the prompt) or SpecError (a model that can't be loaded), one line each.
    """
    checked = Options.of(**options)
    pair = _named(pair) if isinstance(pair, str) else pair
    ids, notes = encode(pair.tokenizer, prompt, vocab_size=pair.vocab_size)
    return Stream(Decoder(pair, ids, checked), (*pair.notes, *notes))


def generate(pair: Pair | str, prompt: Prompt, **options: Any) -> Result:
    """Decode a reply and return it whole; arguments and errors as for `stream_generate`."""
    return stream_generate(pair, prompt, **options).result()


def _named(name: str) -> Pair:
    with _keeping:
        if name not in _kept:
            pair = load(name)
            _kept.clear()  # one pair at a time: two would not fit on many Macs
            _kept[name] = pair
        return _kept[name]
