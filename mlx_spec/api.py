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


def stream_generate(pair: Pair | str, prompt: Prompt, **options: Any) -> Iterator[Chunk]:
    """Decode a reply, one chunk a round.

    pair: a `Pair`, or a name that `load` knows, kept loaded until another name is asked for.
    prompt: text, token ids, or chat messages ({"role", "content"}). options: see `Options`.

    Options and prompt are checked here, before the first chunk is asked for. Raises ValueError
    (an option or the prompt) or SpecError (a model that can't be loaded), one line each.
    """
    return _decoder(pair, prompt, options)[0].chunks()


def generate(pair: Pair | str, prompt: Prompt, **options: Any) -> Result:
    """Decode a reply and return it whole; arguments and errors as for `stream_generate`."""
    decoder, notes = _decoder(pair, prompt, options)
    chunks = list(decoder.chunks())
    tokens = tuple(t for chunk in chunks for t in chunk.tokens)
    text = "".join(chunk.text for chunk in chunks)
    return Result(text, tokens, chunks[-1].finish_reason, chunks[-1].stats, decoder.seed, notes)


def _decoder(pair: Pair | str, prompt: Prompt, options: Mapping[str, Any]) -> tuple[Decoder, tuple[str, ...]]:
    checked = Options.of(**options)
    pair = _named(pair) if isinstance(pair, str) else pair
    ids, notes = encode(pair.tokenizer, prompt, vocab_size=pair.vocab_size)
    return Decoder(pair, ids, checked), (*pair.notes, *notes)


def _named(name: str) -> Pair:
    with _keeping:
        if name not in _kept:
            pair = load(name)
            _kept.clear()  # one pair at a time: two would not fit on many Macs
            _kept[name] = pair
        return _kept[name]
