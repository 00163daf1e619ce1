"""What the page asks for: load a pair, answer a turn in one lane or race two, say how it went.

Everything here that touches MLX runs as a job of the worker. What goes out are plain records, at
most so many a second. Knows nothing of widgets.
"""

from __future__ import annotations

import secrets
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Callable

from .advise import advise
from .costs import measure
from .engine import Decoder
from .errors import SpecError
from .identity import Verdict, compare
from .memory import Memory, recall
from .pairs import Pair, load
from .prefill import Cancelled
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
    told apart; trail: (device seconds, tokens) over time."""

    detokenizer: Any
    pieces: list[tuple[str, tuple[Token, ...]]] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    finish_reason: str | None = None
    trail: list[tuple[float, int]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)

    @property
    def ids(self) -> list[int]:
        return [t.id for _, tokens in self.pieces for t in tokens]

    def add(self, chunk: Chunk, used_s: float) -> None:
        texts = self._texts(chunk)
        if "".join(texts) == chunk.text:
            self.pieces.extend((text, (token,)) for text, token in zip(texts, chunk.tokens))
        else:
            self.pieces.append((chunk.text, chunk.tokens))
        self.stats, self.finish_reason = chunk.stats, chunk.finish_reason
        self.trail.append((used_s, chunk.stats.generation_tokens))

    def _texts(self, chunk: Chunk) -> list[str]:
        """Of each token by itself. A character made of several tokens belongs to its last."""
        texts = []
        for token in chunk.tokens:
            self.detokenizer.add_token(token.id)
            texts.append(self.detokenizer.last_segment)
        if chunk.finish_reason and texts:
            self.detokenizer.finalize()
            texts[-1] += self.detokenizer.last_segment
        return texts


@dataclass
class Reply:
    """A turn's answer so far. verdict: of a finished race, where the texts can be compared; thinks:
    the prompt already ends inside a thinking block."""

    lanes: dict[str, View]
    options: Options
    seed: int
    thinks: bool
    notes: tuple[str, ...]
    verdict: Verdict | None = None
    done: bool = False

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
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()

    def prepare(self, target: str, draft: str | None = None) -> Job:
        """Events: (bytes done, bytes in all) while downloading, then the Pair. A draft that fails
        leaves the target answering, with a note."""

        def tell(job: Job, event: Any) -> None:
            if job.cancelled():
                raise SpecError("loading was cancelled")
            job.tell(event)

        def work(job: Job) -> None:
            pair = self._load(target, draft, draft_required=False, on_progress=lambda *sizes: tell(job, sizes))
            tell(job, pair)
            self.pair = pair
            for session in list(self._sessions):  # caches would keep the old weights in memory
                session.memories = {}

        return self.worker.ask(work)

    def advise(self) -> Job:
        """Events: (draft, prompts done) while drafts are tried on the pair's target, then a list of Advice, unless it was
        cancelled. Takes minutes, in which nothing else runs."""

        def work(job: Job) -> None:
            with suppress(Cancelled):
                job.tell(advise(self.pair, on_prompt=lambda *tried: job.tell(tried), should_cancel=job.cancelled))

        return self.worker.ask(work)

    def session(self) -> Session:
        session = Session()
        self._sessions.add(session)
        return session

    def answer(self, session: Session, text: str, mode: str, options: dict[str, Any], system: str = "") -> Job:
        """Events: (prompt tokens read, tokens in all) while there are more to read; a Reply again and again, the last one
        done. The turn joins the session when it ends, however it ends. Raises ValueError for a wrong option or an empty turn."""
        if not text.strip():
            raise ValueError("the message is empty: write something")
        checked = Options.of(**options)
        if checked.seed is None:
            checked = checked.but(seed=secrets.randbits(32))  # one for both lanes
        session.job = self.worker.ask(lambda job: self._answer(job, session, text, mode, checked, system))
        return session.job

    def _answer(self, job: Job, session: Session, text: str, mode: str, options: Options, system: str) -> None:
        pair = self.pair
        said = [*session.messages, {"role": "user", "content": text}]
        start = [{"role": "system", "content": system}] if system.strip() else []
        ids, notes = encode(pair.tokenizer, [*start, *said], vocab_size=pair.vocab_size)
        if options.num_draft_tokens == "auto" and SPECULATIVE in MODES[mode] and not pair.target_profile.reason:
            measure(pair)  # once a pair, and on nobody's clock
        # The last token stays pending: a short prompt, read at once, tells nothing.
        heard = options.but(should_cancel=job.cancelled,
                            on_progress=lambda read, of: 0 < read < of - 1 and job.tell((read, of)))
        lanes = [self._lane(name, session, ids, heard) for name in MODES[mode]]
        views = {lane.name: View(pair.tokenizer.detokenizer) for lane in lanes}
        thinks = pair.tokenizer.decode(ids[-16:]).rstrip().endswith("<think>")
        reply = Reply(views, options, options.seed, thinks, (*pair.notes, *notes))
        try:
            self._run(job, lanes, reply)
            if len(lanes) == 2 and reply.comparable and not job.cancelled():
                plain, drafted = (reply.lanes[name].ids for name in MODES[mode])
                reply.verdict = compare(pair, ids, plain, drafted, options, reply.seed)
            session.memories |= {lane.name: lane.decoder.leave() for lane in lanes}  # not after a fault
        finally:
            kept = reply.lanes[lanes[-1].name].text
            session.messages = [*said, {"role": "assistant", "content": kept}] if kept else said
        reply.done = True
        job.tell(reply)

    def _lane(self, name: str, session: Session, ids: list[int], options: Options) -> Lane:
        if name == PLAIN:
            options = options.but(num_draft_tokens=0)
        watch = Stopwatch()
        memory = recall(session.memories.pop(name, None), self.pair, ids, drafting=options.num_draft_tokens != 0)
        return Lane(name, Decoder(self.pair, ids, options, memory=memory, clock=watch), watch)

    def _run(self, job: Job, lanes: list[Lane], reply: Reply) -> None:
        told = 0.0
        for lane, chunk in race(lanes):
            reply.lanes[lane.name].add(chunk, lane.watch())
            if time.monotonic() - told >= UPDATE_S:
                told = time.monotonic()
                job.tell(reply.now())
