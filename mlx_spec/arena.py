"""What the page asks for: load a pair, answer a turn in one lane or race two, say how it went.

Everything here that touches MLX runs as a job of the worker. What goes out are plain records, at
most so many a second. Knows nothing of widgets.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Sequence

from .engine import Decoder
from .errors import SpecError
from .identity import Verdict, compare
from .memory import Memory, recall
from .pairs import Pair, load
from .prompts import encode
from .race import Lane, Stopwatch, race
from .types import Chunk, Options, Stats, Token
from .worker import Job, Worker

PLAIN, SPECULATIVE = "plain", "speculative"
MODES = {"race": (PLAIN, SPECULATIVE), PLAIN: (PLAIN,), SPECULATIVE: (SPECULATIVE,)}
UPDATE_S = 0.08  # between two views of one reply


@dataclass
class View:
    """One lane as it is now. pieces: text and the tokens it was made of, one token where they can be
    told apart; used_s: device time so far; trail: (used_s, tokens) over time."""

    name: str
    pieces: list[tuple[str, tuple[Token, ...]]] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    used_s: float = 0.0
    finish_reason: str | None = None
    trail: list[tuple[float, int]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)

    @property
    def ids(self) -> list[int]:
        return [t.id for _, tokens in self.pieces for t in tokens]

    def add(self, chunk: Chunk, used_s: float, texts: Sequence[str] | None = None) -> None:
        """texts: of each of the chunk's tokens, where they are known."""
        if texts is not None:
            self.pieces.extend((text, (token,)) for text, token in zip(texts, chunk.tokens))
        elif chunk.text or chunk.tokens:
            self.pieces.append((chunk.text, chunk.tokens))
        self.stats, self.used_s = chunk.stats, used_s
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.trail.append((used_s, chunk.stats.generation_tokens))


class Speller:
    """The text of each token by itself, for chunks give one of all. A character made of several
    tokens belongs to its last."""

    def __init__(self, tokenizer: Any):
        self._detokenizer = tokenizer.detokenizer

    def texts(self, chunk: Chunk) -> list[str] | None:
        """None where they do not add up to the chunk's text."""
        texts = []
        for token in chunk.tokens:
            self._detokenizer.add_token(token.id)
            texts.append(self._detokenizer.last_segment)
        if chunk.finish_reason and texts:
            self._detokenizer.finalize()
            texts[-1] += self._detokenizer.last_segment
        return texts if "".join(texts) == chunk.text else None


@dataclass
class Reply:
    """A turn's answer so far. verdict: of a finished race, where the texts can be compared; thinks:
    the prompt already ends inside a thinking block."""

    lanes: dict[str, View]
    options: Options
    seed: int
    notes: tuple[str, ...] = ()
    verdict: Verdict | None = None
    done: bool = False
    thinks: bool = False

    def now(self) -> Reply:
        """As it is at this moment, which later chunks do not change."""
        lanes = {name: replace(v, pieces=list(v.pieces), trail=list(v.trail)) for name, v in self.lanes.items()}
        return replace(self, lanes=lanes)

    @property
    def speedup(self) -> float | None:
        """Speculative over plain, by decoding time and tokens of each."""
        rates = [self.lanes[name].stats.generation_tps for name in (PLAIN, SPECULATIVE) if name in self.lanes]
        return rates[1] / rates[0] if len(rates) == 2 and all(rates) else None

    @property
    def comparable(self) -> bool:
        """Whether both lanes must say the same: greedy, or the same noise for both."""
        return self.options.temperature == 0 or self.options.verify == "match"


class Session:
    """One visitor: what was said, and what each lane has read of it. Nobody else sees it."""

    def __init__(self) -> None:
        self.messages: list[dict[str, str]] = []
        self.memories: dict[str, Memory | None] = {}
        self.job: Job | None = None

    def clear(self) -> None:
        self.messages, self.memories = [], {}

    def last_turn(self) -> str | None:
        """Take back the last user turn and what was answered."""
        while self.messages:
            message = self.messages.pop()
            if message["role"] == "user":
                return message["content"]
        return None

    def stop(self) -> None:
        if self.job is not None:
            self.job.cancel()


class Arena:
    """The worker and the pair that answers; a new pair takes the old one's place when it is ready."""

    def __init__(self, loader: Callable[..., Pair] = load):
        self.worker, self.pair, self._load = Worker(), None, loader

    def prepare(self, target: str, draft: str | None = None) -> Job:
        """Events: (bytes done, bytes in all) while downloading, then the Pair. A draft that fails
        leaves the target answering, with a note."""

        def work(job: Job) -> None:
            def progress(done: int, total: int) -> None:
                if job.cancelled():
                    raise SpecError("loading was cancelled; the pair from before still answers")
                job.tell((done, total))

            pair = self._load(target, draft or None, draft_required=False, on_progress=progress)
            if job.cancelled():
                raise SpecError("loading was cancelled; the pair from before still answers")
            self.pair = pair
            job.tell(pair)

        return self.worker.ask(work)

    def session(self) -> Session:
        return Session()

    def answer(self, session: Session, text: str, mode: str, options: dict[str, Any], system: str = "") -> Job:
        """Events: a Reply again and again, the last one done. The turn joins the session when it
        ends, however it ends. Raises ValueError for a wrong option or an empty turn."""
        if not text.strip():
            raise ValueError("the message is empty: write something")
        checked = Options.of(**options)
        if checked.seed is None:
            checked = checked.but(seed=secrets.randbits(32))  # one for both lanes
        job = self.worker.ask(lambda job: self._answer(job, session, text, mode, checked, system))
        session.job = job
        return job

    def _answer(self, job: Job, session: Session, text: str, mode: str, options: Options, system: str) -> None:
        pair = self.pair
        if pair is None:
            raise SpecError("no pair is loaded yet")
        said = [*session.messages, {"role": "user", "content": text}]
        start = [{"role": "system", "content": system}] if system.strip() else []
        ids, notes = encode(pair.tokenizer, [*start, *said], vocab_size=pair.vocab_size)
        lanes = [self._lane(name, session, ids, options.but(should_cancel=job.cancelled)) for name in MODES[mode]]
        reply = Reply({lane.name: View(lane.name) for lane in lanes}, options, options.seed, (*pair.notes, *notes))
        reply.thinks = pair.tokenizer.decode(ids[-4:]).rstrip().endswith("<think>")
        try:
            self._run(job, lanes, reply, {lane.name: Speller(pair.tokenizer) for lane in lanes})
            if len(lanes) == 2 and reply.comparable and not job.cancelled():
                plain, drafted = (reply.lanes[name].ids for name in MODES[mode])
                reply.verdict = compare(pair, ids, plain, drafted, options, reply.seed)
        finally:
            for lane in lanes:
                session.memories[lane.name] = lane.decoder.leave()
            kept = reply.lanes[lanes[-1].name].text
            session.messages = [*said, {"role": "assistant", "content": kept}] if kept else said
        reply.done = True
        job.tell(reply)

    def _lane(self, name: str, session: Session, ids: list[int], options: Options) -> Lane:
        if name == PLAIN:
            options = options.but(num_draft_tokens=0)
        watch = Stopwatch()
        memory = recall(session.memories.pop(name, None), self.pair, ids, drafting=options.num_draft_tokens > 0)
        return Lane(name, Decoder(self.pair, ids, options, memory=memory, clock=watch), watch)

    def _run(self, job: Job, lanes: list[Lane], reply: Reply, spellers: dict[str, Speller]) -> None:
        told = 0.0
        for lane, chunk in race(lanes):
            reply.lanes[lane.name].add(chunk, lane.watch(), spellers[lane.name].texts(chunk))
            if time.monotonic() - told >= UPDATE_S:
                told = time.monotonic()
                job.tell(reply.now())
