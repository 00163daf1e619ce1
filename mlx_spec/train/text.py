"""Text that a draft learns from: read from files, or written by the target itself, a text or a batch at a time.

Knows file formats and chat templates. Knows nothing of drafts, hidden states or training.
"""

from __future__ import annotations

import gzip
import json
import zlib
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterable, Iterator, NamedTuple, Sequence

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import SpecError, writing
from ..pairs import Pair
from ..prompts import clean, encode, turn_end
from .states import KEPT, Example, cores

LINES, DOCUMENTS = (".jsonl", ".jsonl.gz"), (".txt", ".md")
BLOCK = 1 << 16  # characters of a document that are encoded at once
BATCH = 64  # texts written side by side: the most that a killed run loses
TURN_TOKENS, TURN_TEMPERATURES = 128, (0.9, 1.0)
ANSWER_TOKENS, ANSWER_TEMPERATURES = 224, (0.0, 0.4, 0.6, 0.8)
# How a user may begin. Left to itself a target's users ask for advice, most of them; every other turn
# begins with one of these, so that a draft also learns how its target writes code, sums and stories.
OPENERS = tuple(json.loads(Path(__file__).with_name("openers.json").read_text(encoding="utf-8")))
BARREN = 8  # batches without one new turn, after which asking on is useless

NO_FORM = 'it must be JSON: {"prompt", "answer"}, {"messages"} or {"text"}, in text or token ids'
NO_TURNS = "this target makes up no user turns: it has no chat template or ends none; pass --data with prompts or text"


def read(path: str | Path, tokenizer: TokenizerWrapper | None, max_length: int,
         vocab_size: int | None = None) -> Iterator[Example]:
    """The texts of a .jsonl, .jsonl.gz, .txt or .md file, or of a folder's, in sorted order.

    A JSON line is {"prompt", "answer"} in token ids (with "temperature" where the target wrote the
    answer) or in text; {"messages"}, whose last assistant turn is the answer; or {"text"}, all answer.
    Prompts without an answer come with an empty one: see `answers`. Documents are cut into pieces of
    max_length tokens, answers to what is left beside their prompt. Raises SpecError, one line.
    """
    path, empty = Path(path), True
    for file in (path, *sorted(path.rglob("[!.]*"))):
        if file.name.endswith(LINES + DOCUMENTS) and file.is_file():
            for example in chain.from_iterable(_fitted(t, max_length) for t in _texts(file, tokenizer, vocab_size)):
                empty = False
                yield example
    if empty:
        raise SpecError(f"{path} does not exist or has no text to learn from: give .jsonl(.gz), .txt or .md files")


def _texts(file: Path, tokenizer: TokenizerWrapper | None, vocab_size: int | None) -> Iterator[Example]:
    is_lines, number = file.name.endswith(LINES), 0
    try:
        with (gzip.open if file.name.endswith(".gz") else open)(file, "rt", encoding="utf-8-sig") as f:
            blocks = f if is_lines else iter(lambda: f.read(BLOCK) + f.readline(BLOCK), "")
            for number, block in enumerate(blocks, 1):
                if block.strip():
                    yield _text(json.loads(block) if is_lines else {"text": block}, tokenizer, vocab_size)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as e:
        raise SpecError(f"{file} can't be read: {getattr(e, 'strerror', None) or e}") from e
    except (ValueError, TypeError, LookupError) as e:
        raise SpecError(f"{file}, line {number}: {e if type(e) is ValueError else NO_FORM}") from e


def _text(line: dict, tokenizer: TokenizerWrapper | None, vocab_size: int | None) -> Example:
    """A line's text, of any length. Raises ValueError, and others where a line has none of the forms."""
    if "messages" in line:
        prompt, answer = line["messages"], None
        if prompt[-1]["role"] == "assistant":
            prompt, answer = prompt[:-1], prompt[-1]["content"]
    elif "prompt" in line:
        prompt, answer = line["prompt"], line.get("answer")
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
    else:
        return Example([], _ids(line["text"], tokenizer, vocab_size, start=True))
    prompt_tokens = encode(tokenizer, prompt, vocab_size=vocab_size)[0]
    answer_tokens = _ids(answer, tokenizer, vocab_size)
    if isinstance(answer, str):
        ends = (turn_end(tokenizer), tokenizer.eos_token_id)
        answer_tokens += [i for i in ends if i is not None][:1]
    temperature = line.get("temperature")
    return Example(prompt_tokens, answer_tokens, None if temperature is None else float(temperature))


def _ids(text: Any, tokenizer: TokenizerWrapper | None, vocab_size: int | None, start: bool = False) -> list[int]:
    if isinstance(text, str) and tokenizer is not None:
        return list(tokenizer.encode(clean(text), add_special_tokens=start, verbose=False))
    return encode(None, text, vocab_size=vocab_size)[0] if text else []


def _fitted(text: Example, max_length: int) -> list[Example]:
    if text.prompt:
        room = max_length - len(text.prompt)
        return [text._replace(answer=text.answer[:room])] if room > 0 else []
    # A lone last token is left out: nothing comes before it that it could be learnt from.
    return [Example([], text.answer[i : i + max_length]) for i in range(0, len(text.answer) - 1, max_length)]


def answers(pair: Pair, prompts: Iterable[list[int]], seed: int, max_tokens: int = ANSWER_TOKENS,
            temperatures: Sequence[float] = ANSWER_TEMPERATURES) -> Iterator[Example]:
    """What the target answers to each prompt, in order, end token included; the temperatures take turns."""
    for batch in _batches(prompts):
        texts = _written(pair, batch, (seed, zlib.crc32(repr(batch).encode())), max_tokens, temperatures, pair.end_ids)
        yield from map(Example, batch, texts, cycle(temperatures))


def write(pair: Pair, folder: str | Path, tokens: int, seed: int, prompts: Iterable[list[int]] | None = None,
          on_progress: Callable[[int], None] = lambda tokens: None) -> Path:
    """Have the target write until text.jsonl in the folder holds so many answer tokens.

    prompts: what to answer, less text when they run out; None: the target makes them up. An earlier call with
    this target, seed and prompts is continued, to the same text as in one go; one with others is overwritten.
    on_progress: called with the tokens there are. Raises SpecError, one line.
    """
    path, given = Path(folder) / "text.jsonl", None if prompts is None else _batches(prompts)
    first = given and next(given, [])
    # What the text depends on, the first prompts standing for all. To `read` it is an empty text.
    head = {"text": [], "target": pair.name or type(pair.target).__module__, "seed": seed,
            "prompts": zlib.crc32(repr(first).encode())}
    with writing(path, KEPT):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab+") as file:
            number, done, seen = _resume(file, json.dumps(head).encode() + b"\n")
            batches = islice(chain([first], given), number, None) if given else _turns(pair, seed, seen)
            while done < tokens and (batch := next(batches, None)):
                examples = list(answers(pair, batch, seed))
                file.write("".join(json.dumps(e._asdict()) + "\n" for e in examples).encode() + b"\n")
                file.flush()
                done += sum(len(e.answer) for e in examples)
                on_progress(done)
    return path


def _batches(prompts: Iterable[list[int]]) -> Iterator[list[list[int]]]:
    prompts = iter(prompts)
    return iter(lambda: list(islice(prompts, BATCH)), [])


def _resume(file: BinaryIO, head: bytes) -> tuple[int, int, set[int]]:
    """Batches, answer tokens and hashes of the prompts that a file holds. An empty line ends a batch;
    one that was cut short is taken off, and so is everything under another head."""
    file.seek(0)
    if file.readline() != head:
        file.truncate(file.seek(0))
        file.write(head)
    number, tokens, seen, whole, lines = 0, 0, set(), file.tell(), []
    while line := file.readline():
        lines.append(line)
        if line == b"\n":
            examples = [json.loads(text) for text in lines[:-1]]
            tokens += sum(len(e["answer"]) for e in examples)
            seen |= {hash(tuple(e["prompt"])) for e in examples}
            number, whole, lines = number + 1, file.tell(), []
    file.truncate(whole)
    return number, tokens, seen


def _turns(pair: Pair, seed: int, seen: set[int]) -> Iterator[list[list[int]]]:
    """Prompts that the target makes up, by batches, no two alike: it continues its chat template from where a
    user begins to write (Magpie, Xu et al. 2024, arXiv 2406.08464). seen: hashes of those there are, which say
    where to go on. Raises SpecError when it makes up none."""
    tokenizer, opening, barren = pair.tokenizer, _opening(pair), 0
    begun = [list(tokenizer.encode(text, add_special_tokens=False)) for text in OPENERS]
    ends = pair.end_ids | {i for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
    while barren < BARREN:
        starts = _starts(begun, (seed, len(seen), barren))
        texts = _written(pair, [opening + start for start in starts], (seed, len(seen), barren), TURN_TOKENS,
                         TURN_TEMPERATURES, ends)
        said = [tokenizer.decode(start + text[:-1]).strip() for start, text in zip(starts, texts) if text[-1] in ends]
        prompts = [encode(tokenizer, [{"role": "user", "content": turn}])[0] for turn in said if turn]
        new = {h: prompt for prompt in prompts if (h := hash(tuple(prompt))) not in seen}
        seen.update(new)
        barren = 0 if new else barren + 1
        if new:
            yield list(new.values())
    raise SpecError(NO_TURNS)


def _starts(begun: list[list[int]], seeds: tuple[int, ...]) -> list[list[int]]:
    """What the turns of a batch begin with: nothing for every other one."""
    chosen = np.random.default_rng(seeds).integers(len(begun), size=BATCH)
    return [begun[chosen[row]] if row % 4 < 2 else [] for row in range(BATCH)]


def _opening(pair: Pair) -> list[int]:
    """The chat template up to where a user begins to write; a last space belongs to the first word's token."""
    try:
        text = pair.tokenizer.apply_chat_template([{"role": "user", "content": "zebra"}], tokenize=False)
        before = text[: text.rindex("zebra")].rstrip(" ")
    except Exception as e:
        raise SpecError(NO_TURNS) from e
    return encode(pair.tokenizer, list(pair.tokenizer.encode(before, add_special_tokens=False)))[0]


def _written(pair: Pair, prompts: list[list[int]], seeds: tuple[int, ...], max_tokens: int,
             temperatures: Sequence[float], ends: frozenset[int]) -> list[list[int]]:
    """What the target writes after each prompt. All rows stand at the same position: while a prompt has
    tokens left, they replace the drawn ones. So nothing is padded, which some of mlx-lm's models get wrong."""
    key = mx.random.key(int(np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0]))
    texts, writing = [[] for _ in prompts], set(range(len(prompts)))
    at, parts = min(map(len, prompts)) - 1, _parts(pair, prompts, temperatures)
    column = [prompt[at] for prompt in prompts]
    while writing:
        key, now = mx.random.split(key)
        drawn = []
        for number, part in enumerate(parts):
            with mx.stream(part.core):
                drawn.append(part.step(column, mx.random.split(now, len(parts))[number]))
        mx.eval(drawn)
        column = [i for d in drawn for i in d.tolist()]
        at += 1
        for row, prompt in enumerate(prompts):
            if at < len(prompt):
                column[row] = prompt[at]
            elif row in writing:
                texts[row].append(column[row])
                if column[row] in ends or len(texts[row]) == max_tokens:
                    writing.remove(row)
    return texts


class _Part(NamedTuple):
    """Some rows of a batch with caches of their own: a core's share."""

    pair: Pair
    core: mx.Stream
    rows: slice
    heat: mx.array
    cache: list

    def step(self, column: list[int], key: mx.array) -> mx.array:
        """The rows' next tokens, from the newest ones of the whole batch."""
        logits = self.pair.target(mx.array(column[self.rows])[:, None], cache=self.cache)[:, -1, : self.pair.vocab_size]
        return mx.argmax(logits + self.heat * mx.random.gumbel(logits.shape, key=key), axis=-1)


def _parts(pair: Pair, prompts: list[list[int]], temperatures: Sequence[float]) -> list[_Part]:
    """The batch in a part for each core, all prompts read up to the last token of the shortest."""
    heat, at = [t for _, t in zip(prompts, cycle(temperatures))], min(map(len, prompts)) - 1
    each, parts = -(-len(prompts) // len(cores())), []
    for core, start in zip(cores(), range(0, len(prompts), each)):
        rows = slice(start, start + each)
        with mx.stream(core):
            parts.append(_Part(pair, core, rows, mx.array(heat[rows])[:, None], make_prompt_cache(pair.target)))
            if at:
                pair.target(mx.array([prompt[:at] for prompt in prompts[rows]]), cache=parts[-1].cache)
    mx.eval([c.state for part in parts for c in part.cache if at])  # so no logits are computed
    return parts
