"""Text that a draft learns from: read from files, or written by the target itself.

Knows file formats, chat templates and mlx-lm's batched generation. Knows nothing of drafts, hidden
states or training. Texts pass through one by one or a batch at a time, whatever their number.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from contextlib import closing, contextmanager
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Sequence

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import SpecError
from ..pairs import Pair
from ..prompts import clean, encode, turn_end
from .states import Example

Sampler = Callable[[mx.array], mx.array]

LINES, DOCUMENTS = (".jsonl", ".jsonl.gz"), (".txt", ".md")
BLOCK = 1 << 16  # characters of a document that are encoded at once

BATCH = 32  # texts written side by side: the most that a killed run loses
BATCH_TOKENS = 1 << 14  # whose keys and values are in memory at once: 2 GB for an 8B target
TURN_TOKENS, TURN_TEMPERATURES = 128, (0.9, 1.0)
ANSWER_TOKENS, ANSWER_TEMPERATURES = 224, (0.0, 0.4, 0.6, 0.8)
BARREN = 8  # batches without one new turn, after which asking on is useless
TURN, ANSWER = range(2)  # separate draws, so that no answer meets a turn's noise

NO_TEMPLATE = "this target has no chat template, so it can't make up user turns: pass --data with documents"
NO_TURNS = "this target makes up no user turns that it ends: pass --data with prompts or documents"


def read(path: str | Path, tokenizer: TokenizerWrapper | None, max_length: int,
         vocab_size: int | None = None) -> Iterator[Example]:
    """The texts of a .jsonl, .jsonl.gz, .txt or .md file, or of a folder's, in sorted order.

    A JSON line is {"prompt", "answer"} in token ids (with "temperature" where the target wrote the
    answer) or in text; {"messages"}, whose last assistant turn is the answer; or {"text"}, a
    document, which is all answer. Prompts without an answer come with an empty one: see `answers`.
    Documents are cut into pieces of max_length tokens, answers where prompt and answer reach it;
    prompts that alone reach it are left out. Raises SpecError, one line.
    """
    path = Path(path)
    if not path.exists():
        raise SpecError(f"{path} does not exist: give a .jsonl file, or a folder of .jsonl, .txt or .md files")
    if path.is_file() and not path.name.endswith(LINES + DOCUMENTS):
        raise SpecError(f"{path} can't be read: text comes in {', '.join(LINES + DOCUMENTS)} files")
    ends = [] if tokenizer is None else [turn_end(tokenizer), tokenizer.eos_token_id]
    return _read_files(path, _Form(tokenizer, max_length, vocab_size, [i for i in ends if i is not None][:1]))


def _read_files(path: Path, form: _Form) -> Iterator[Example]:
    empty = True
    for file in [path] if path.is_file() else sorted(path.rglob("[!.]*")):
        if not file.name.endswith(LINES + DOCUMENTS) or not file.is_file():
            continue
        try:
            for example in _lines(file, form) if file.name.endswith(LINES) else _document(file, form):
                empty = False
                yield example
        except (OSError, EOFError, zlib.error) as e:
            raise SpecError(f"{file} can't be read: {getattr(e, 'strerror', None) or e}") from e
        except ValueError as e:
            reason = "not UTF-8 text, convert it first" if isinstance(e, UnicodeDecodeError) else e
            raise SpecError(f"{file}: {reason}") from e
    if empty:
        raise SpecError(f"{path} has no text to learn from: give token ids, prompts, conversations or documents")


def _lines(file: Path, form: _Form) -> Iterator[Example]:
    with (gzip.open if file.name.endswith(".gz") else open)(file, "rt", encoding="utf-8-sig") as f:
        for number, line in enumerate(f, 1):
            try:
                examples = form.examples(json.loads(line)) if line.strip() else []
            except json.JSONDecodeError as e:
                raise SpecError(f"{file}, line {number} is not JSON ({e.msg}): every line must be one object") from e
            except ValueError as e:
                raise SpecError(f"{file}, line {number}: {e}") from e
            yield from examples


def _document(file: Path, form: _Form) -> Iterator[Example]:
    """A file that is one text, of any size: encoded block by block, parted at ends of lines."""
    held: list[int] = []
    with open(file, encoding="utf-8-sig") as f:
        for number, text in enumerate(iter(lambda: f.read(BLOCK) + f.readline(BLOCK), "")):
            held += form.ids(text, start=number == 0)
            whole = len(held) // form.max_length * form.max_length
            yield from form.pieces(held[:whole])
            del held[:whole]
    yield from form.pieces(held)


class _Form(NamedTuple):
    """How a line becomes texts to learn from; a ValueError says what is wrong with it.

    end: what follows an answer that is given as text.
    """

    tokenizer: TokenizerWrapper | None
    max_length: int
    vocab_size: int | None
    end: list[int]

    def examples(self, line: Any) -> list[Example]:
        if not isinstance(line, dict) or not line.keys() & {"messages", "prompt", "text"}:
            raise ValueError('has none of the keys "prompt", "messages" and "text"')
        if "messages" in line:
            return self.conversation(line["messages"])
        if "prompt" not in line:
            return self.pieces(self.ids(line["text"], start=True))
        prompt, answer = line["prompt"], line.get("answer")
        if isinstance(prompt, str) and isinstance(answer, (str, type(None))):
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            return self.conversation(turns[: 1 if answer is None else 2])
        answer = [] if answer is None else answer
        if not isinstance(prompt, list) or not isinstance(answer, list) or not prompt:
            raise ValueError('"prompt" and "answer" must both be text, or both lists of token ids')
        return self.cut(self.checked(prompt), self.checked(answer), line.get("temperature"))

    def conversation(self, messages: Any) -> list[Example]:
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise ValueError('"messages" must be a list of {"role", "content"}')
        answered = messages[-1:] if messages and messages[-1].get("role") == "assistant" else []
        asked = messages[: len(messages) - len(answered)]
        if not any(m.get("role") == "user" for m in asked):
            raise ValueError('"messages" has no user turn to answer')
        if self.tokenizer is None or not self.tokenizer.has_chat_template:
            raise ValueError('prompts need a chat template, and this target has none: give {"text"} or token ids')
        answer = [i for m in answered for i in self.ids(m.get("content")) + self.end]
        return self.cut(encode(self.tokenizer, asked)[0], answer)

    def ids(self, text: Any, start: bool = False) -> list[int]:
        if not isinstance(text, str):
            raise ValueError(f"text must be a string; got {type(text).__name__}")
        if self.tokenizer is None:
            raise ValueError("text needs a tokenizer, and this target has none: give token ids")
        return list(self.tokenizer.encode(clean(text), add_special_tokens=start, verbose=False)) if text else []

    def checked(self, ids: list[Any]) -> list[int]:
        limit = self.vocab_size or 2**31
        for i in ids:
            if type(i) is not int or not 0 <= i < limit:
                raise ValueError(f"token ids must be from 0 to {limit - 1}; got {i!r:.40}: made for another target?")
        return ids

    def cut(self, prompt: list[int], answer: list[int], temperature: Any = None) -> list[Example]:
        if temperature is not None and (not isinstance(temperature, (int, float)) or not 0 <= temperature < 1e6):
            raise ValueError(f'"temperature" must be a number from 0; got {temperature!r:.40}')
        room = self.max_length - len(prompt)
        return [Example(prompt, answer[:room], temperature)] if room > 0 else []

    def pieces(self, ids: list[int]) -> list[Example]:
        """A lone token is left out: nothing comes before it that it could be learnt from."""
        found = [ids[i : i + self.max_length] for i in range(0, len(ids), self.max_length)]
        return [Example([], piece) for piece in found if len(piece) > 1]


def user_turns(pair: Pair, count: int, seed: int) -> Iterator[list[int]]:
    """Prompts that the target makes up, no two alike: it continues its chat template from where a
    user begins to write (Magpie, Xu et al. 2024, arXiv 2406.08464). Raises SpecError when it can't."""
    return islice(chain.from_iterable(_Author(pair, seed).turns(set())), count)


def answers(pair: Pair, prompts: Iterable[list[int]], seed: int, max_tokens: int = ANSWER_TOKENS,
            temperatures: Sequence[float] = ANSWER_TEMPERATURES) -> Iterator[Example]:
    """What the target answers to each prompt, in order; the temperatures take turns.

    An answer ends with the end token where the target ended it, and has max_tokens otherwise.
    """
    author = _Author(pair, seed)
    for number, batch in enumerate(_batches(iter(prompts))):
        yield from author.answers(batch, number, max_tokens, temperatures)


def write(pair: Pair, folder: str | Path, tokens: int, seed: int, prompts: Iterable[list[int]] | None = None,
          on_progress: Callable[[int], None] = lambda tokens: None) -> Path:
    """Have the target write until text.jsonl in the folder holds so many answer tokens.

    prompts: what to answer, the same at every call, less text when they run out; None: the target
    makes them up. An earlier call with this target, seed and prompts is continued, to the same text
    as in one go; one with others is overwritten. on_progress: called with the tokens there are.
    Raises SpecError, one line, when the disk is full or the target makes up no prompts.
    """
    author = _Author(pair, seed)
    source = None if prompts is None else iter(prompts)
    first = None if source is None else list(islice(source, BATCH))
    book = _Book(Path(folder), _card(pair, seed, first))
    if source is None:
        batches = author.turns(book.seen(), book.batches)
    else:
        batches = _batches(islice(chain(first, source), book.batches * BATCH, None))
    try:
        while book.tokens < tokens and (batch := next(batches, None)) is not None:
            book.append(author.answers(batch, book.batches))
            on_progress(book.tokens)
    finally:
        book.cut()
    return book.path


def _batches(prompts: Iterator[list[int]]) -> Iterator[list[list[int]]]:
    return iter(lambda: list(islice(prompts, BATCH)), [])


def _card(pair: Pair, seed: int, first: list[list[int]] | None) -> dict:
    """Everything that the text depends on. first: the first prompts, which stand for all."""
    prompts = "made up" if first is None else hashlib.sha256(json.dumps(first).encode()).hexdigest()
    return {"target": pair.name or type(pair.target).__module__, "seed": seed, "prompts": prompts, "batch": BATCH,
            "turn_tokens": TURN_TOKENS, "turn_temperatures": list(TURN_TEMPERATURES),
            "answer_tokens": ANSWER_TOKENS, "answer_temperatures": list(ANSWER_TEMPERATURES)}


class _Author:
    """The target as a writer. What a row draws depends on the seed, the batch and the row alone."""

    def __init__(self, pair: Pair, seed: int):
        self.pair, self.seed, self.can_batch = pair, seed, _can_batch(pair)

    def turns(self, seen: set[int], first: int = 0) -> Iterator[list[list[int]]]:
        """Prompts, batch by batch from number `first` on. seen: hashes of those there are."""
        opening, ends = _opening(self.pair)
        barren = 0
        for number in count(first):
            texts = self._write([opening] * BATCH, (TURN, number), TURN_TOKENS, TURN_TEMPERATURES, ends)
            made = {hash(tuple(p)): p for p in (self._prompt(text, ends) for text in texts) if p}
            new = [prompt for h, prompt in made.items() if h not in seen]
            seen |= made.keys()
            barren = 0 if new else barren + 1
            if barren == BARREN:
                raise SpecError(NO_TURNS)
            yield new

    def _prompt(self, turn: list[int], ends: frozenset[int]) -> list[int] | None:
        """A user turn as a prompt; None of one that is unfinished, empty or holds a special token."""
        tokenizer = self.pair.tokenizer
        if turn[-1] not in ends or not _special_ids(tokenizer).isdisjoint(turn[:-1]):
            return None
        text = tokenizer.decode(turn[:-1]).strip()
        return encode(tokenizer, [{"role": "user", "content": text}])[0] if text else None

    def answers(self, prompts: list[list[int]], number: int, max_tokens: int = ANSWER_TOKENS,
                temperatures: Sequence[float] = ANSWER_TEMPERATURES) -> list[Example]:
        texts = self._write(prompts, (ANSWER, number), max_tokens, temperatures, self.pair.end_ids)
        return [Example(prompt, text, temperatures[row % len(temperatures)])
                for row, (prompt, text) in enumerate(zip(prompts, texts))]

    def _write(self, prompts: list[list[int]], place: tuple[int, int], max_tokens: int,
               temperatures: Sequence[float], ends: frozenset[int]) -> list[list[int]]:
        samplers = [_sampler(temperatures[row % len(temperatures)], self.pair.vocab_size, (self.seed, *place, row))
                    for row in range(len(prompts))]
        if self.can_batch and prompts:
            return _together(self.pair.target, prompts, samplers, max_tokens, ends)
        return [_alone(self.pair.target, p, s, max_tokens, ends) for p, s in zip(prompts, samplers)]


def _special_ids(tokenizer: TokenizerWrapper) -> set[int]:
    return {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}


def _opening(pair: Pair) -> tuple[list[int], frozenset[int]]:
    """The chat template up to where a user begins to write, and the tokens that end a user's turn."""
    tokenizer, sentinel = pair.tokenizer, "zebra"
    if tokenizer is None or not tokenizer.has_chat_template:
        raise SpecError(NO_TEMPLATE)
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": sentinel}], tokenize=False)
        before, after = text.rsplit(sentinel, 1)
        # A last space is part of the first word's token, so it is left to the target.
        opening = encode(tokenizer, list(tokenizer.encode(before.rstrip(" "), add_special_tokens=False)))[0]
    except Exception as e:
        raise SpecError(NO_TURNS) from e
    closing_ids = tokenizer.encode(after.lstrip(), add_special_tokens=False)[:1]
    return opening, pair.end_ids | _special_ids(tokenizer).intersection(closing_ids)


def _sampler(temperature: float, vocab_size: int, seeds: tuple[int, ...]) -> Sampler:
    """Draws from the ids that the tokenizer knows: a head may have more rows."""
    key = mx.random.key(int(np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0]))

    def draw(logprobs: mx.array) -> mx.array:
        nonlocal key
        logprobs = logprobs[..., :vocab_size].astype(mx.float32)
        if not temperature:
            return mx.argmax(logprobs, axis=-1)
        key, now = mx.random.split(key)
        return mx.random.categorical(logprobs * (1 / temperature), key=now)

    return draw


def _together(target: Any, prompts: list[list[int]], samplers: list[Sampler], max_tokens: int,
              ends: frozenset[int]) -> list[list[int]]:
    width = max(BATCH_TOKENS // (max(map(len, prompts)) + max_tokens), 1)
    generator = BatchGenerator(target, stop_tokens=[[i] for i in sorted(ends)], max_tokens=max_tokens,
                               completion_batch_size=width, prefill_batch_size=width)
    with closing(generator):
        found: dict[int, list[int]] = {i: [] for i in generator.insert(prompts, samplers=samplers)}
        while responses := generator.next_generated():
            for response in responses:
                found[response.uid].append(response.token)
    return list(found.values())


def _alone(target: Any, prompt: list[int], sampler: Sampler, max_tokens: int, ends: frozenset[int]) -> list[int]:
    found: list[int] = []
    for token, _ in generate_step(mx.array(prompt), target, max_tokens=max_tokens, sampler=sampler):
        found.append(token)
        if token in ends:
            break
    return found


def _can_batch(pair: Pair) -> bool:
    """Tried, on prompts of unequal length: of mlx-lm's models some raise in a batch, and some go wrong."""
    prompts = [[i % pair.vocab_size for i in range(length)] for length in (9, 4)]
    together, alone = ([], []), ([], [])
    try:
        _together(pair.target, prompts, [_watching(laws) for laws in together], 2, frozenset())
    except Exception:
        return False
    for prompt, laws in zip(prompts, alone):
        _alone(pair.target, prompt, _watching(laws), 2, frozenset())
    apart = [mx.abs(a - b).sum().item() for both in zip(together, alone) for a, b in zip(*both)]
    # Far above what rounding does in half precision, far below what a wrong mask does.
    return max(apart) < 0.2


def _watching(laws: list[mx.array]) -> Sampler:
    """A sampler that remembers what it was to draw from, and always draws the same."""

    def draw(logprobs: mx.array) -> mx.array:
        laws.append(mx.exp(logprobs.astype(mx.float32)))
        return mx.ones(logprobs.shape[:-1], mx.uint32)

    return draw


@contextmanager
def _advice(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise SpecError(f"{folder}: {e.strerror or e}; make room and run it again with --resume (what was written is "
                        "kept), or choose another folder") from e


class _Book:
    """text.jsonl, which grows a batch at a time, and text.json, the card that says what counts of it.

    The card is replaced when the text is on the disk: a run that is killed anywhere leaves at most
    an end that doesn't count, which `cut` takes off.
    """

    def __init__(self, folder: Path, card: dict):
        self.card, self.path, self.card_path = card, folder / "text.jsonl", folder / "text.json"
        with _advice(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            if not self._continues():
                self._count(0, 0, 0)
        self.cut()

    def _continues(self) -> bool:
        try:
            held = json.loads(self.card_path.read_text())
            self.batches, self.tokens, self.size = held.pop("batches"), held.pop("tokens"), held.pop("bytes")
            return held == self.card and self.path.stat().st_size >= self.size
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            return False

    def _count(self, batches: int, tokens: int, size: int) -> None:
        new = self.card_path.with_suffix(".new")
        new.write_text(json.dumps(self.card | {"batches": batches, "tokens": tokens, "bytes": size}, indent=1))
        os.replace(new, self.card_path)
        self.batches, self.tokens, self.size = batches, tokens, size

    def seen(self) -> set[int]:
        """Hashes of the prompts there are; of numbers, so the same in every process."""
        with _advice(self.path.parent), open(self.path) as f:
            return {hash(tuple(json.loads(line)["prompt"])) for line in f}

    def append(self, examples: list[Example]) -> None:
        lines = (json.dumps(e._asdict(), separators=(",", ":")) + "\n" for e in examples)
        block = "".join(lines).encode()
        with _advice(self.path.parent):
            with open(self.path, "ab") as f:
                f.write(block)
                f.flush()
                os.fsync(f.fileno())
            self._count(self.batches + 1, self.tokens + sum(len(e.answer) for e in examples), self.size + len(block))

    def cut(self) -> None:
        """By the card on the disk: an interrupt may have come between it and what is known here."""
        with _advice(self.path.parent):
            if self._continues():
                os.truncate(self.path, self.size)
