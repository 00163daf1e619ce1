"""What all visitors share, the pair and what is being loaded, and what each has to himself.

Models are fetched in a thread of their own, so that the pair from before answers meanwhile; all
else is the arena's. MLX is imported with the first pair, not before.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any, Callable, Iterator

from ..errors import DownloadError, PairError, SpecError
from ..names import NO_DRAFT, catalogue, find, locate, short

WAIT_S = 0.25  # between two looks at the pair
READING = "reading the prompt"
DRAIN_S = 0.02  # without an event: the newest is shown


class Visitor:
    """One browser tab: its conversation, its last reply, how it wants to see it."""

    def __init__(self) -> None:
        self.session: Any = None
        self.reply: Any = None
        self.said: list[dict[str, str]] = []  # up to the turn that is answered, or was last
        self.formatted = False
        self.stopped = False
        self.busy = threading.Lock()

    def __deepcopy__(self, memo: dict) -> Visitor:
        return Visitor()  # each tab's begins empty

    @property
    def messages(self) -> list[dict[str, str]]:
        return list(self.session.messages) if self.session is not None else []

    def stop(self) -> None:
        self.stopped = True
        if self.session is not None:
            self.session.stop()

    def clear(self) -> None:
        """At once: a reply under way belongs to the conversation that is left behind."""
        self.stop()
        self.session = self.reply = None
        self.said = []

    def take_back(self) -> str | None:
        """Stop, and take the last user turn out of the conversation."""
        self.stop()
        with self.busy:
            return self.session.last_turn() if self.session is not None else None


class Loading:
    """A pair on its way, or the search for a draft, and whether it is still wanted."""

    def __init__(self, name: str, what: str = "loading"):
        self.name, self.what = name, what
        self.job, self.cancelled = None, False

    def cancel(self) -> None:
        self.cancelled = True
        if self.job is not None:
            self.job.cancel()

    def check(self) -> None:
        if self.cancelled:
            self.cancel()  # its job, which may have come after
            raise SpecError(f"{self.what} was cancelled")


class Stage:
    """arena: None until the first pair is loaded. kind: of the status, loading, ready, off (no draft) or bad.
    advice: which drafts fit which target, once somebody has asked."""

    def __init__(self, arena: Any = None, fetch: Callable[..., None] | None = None):
        self.arena, self._fetch = arena, fetch or fetch_models
        self.kind, self.status, self.pair_name = "bad", "no pair is loaded", ""
        self.advice: tuple[str, list[Any]] = ("", [])
        self._loading: Loading | None = None
        self._lock = threading.Lock()

    @property
    def loading(self) -> bool:
        return self._loading is not None

    @property
    def ready(self) -> bool:
        return self.arena is not None and self.arena.pair is not None

    @property
    def target(self) -> str:
        """As `load` takes it, of the pair that answers; empty without one."""
        return str(self.arena.pair.name) if self.ready else ""

    def load(self, target: str, draft: str | None = None) -> threading.Thread:
        """In place of what is being loaded now. The thread ends with it."""
        beside = " without a draft" if draft == NO_DRAFT else f" with {short(draft)}" if draft else ""
        return self._start(Loading(short(target) + beside), partial(self._load, target=target, draft=draft))

    def advise(self) -> threading.Thread:
        """Try every draft on this machine with the pair's target; replies wait meanwhile. The thread ends with it."""
        if self.loading:
            raise SpecError("wait for what is under way, or cancel it first")
        if not self.ready:
            raise SpecError("no pair is loaded: load the target first")
        self.advice = "", []
        return self._start(Loading(self.target, "the search for a draft"), self._advise)

    def _start(self, loading: Loading, work: Callable[[Loading], None]) -> threading.Thread:
        self.cancel()
        self._loading = loading
        self._say(loading, "loading", f"{loading.what}: {short(loading.name)} …")
        thread = threading.Thread(target=self._run, args=(loading, work), daemon=True)
        thread.start()
        return thread

    def cancel(self) -> None:
        if self._loading is not None:
            self._loading.cancel()

    def _say(self, loading: Loading, kind: str, status: str) -> None:
        if self._loading is loading:
            self.kind, self.status = kind, " ".join(status.split())

    def _fetching(self, loading: Loading, done: int, total: int) -> None:
        loading.check()
        share = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB ({done / total:.0%})" if total else f"{done / 1e6:.0f} MB"
        self._say(loading, "loading", f"fetching {loading.name}: {share}")

    def _run(self, loading: Loading, work: Callable[[Loading], None]) -> None:
        try:
            work(loading)
        except Exception as error:  # whatever a model's files can do; the page lives on
            reason = str(error) if isinstance(error, (SpecError, ValueError)) else f"{type(error).__name__}: {error}"
            still = f" · {self.pair_name} still answers" if self.ready else ""
            self._say(loading, "bad", reason + still)
        finally:
            if self._loading is loading:
                self._loading = None

    def _load(self, loading: Loading, target: str, draft: str | None) -> None:
        self._fetch(target, draft, partial(self._fetching, loading))
        self._say(loading, "loading", f"loading {loading.name} …")
        loading.job = self._arena().prepare(target, draft)
        loading.check()
        events = loading.job.result()
        if not events:  # it never started
            loading.check()
        notes = events[-1].notes
        off = any(note.startswith("draft off") for note in notes)
        self.pair_name = short(target) if off else loading.name
        self._say(loading, "off" if off else "ready", " · ".join((f"{self.pair_name} is ready", *notes)))

    def _advise(self, loading: Loading) -> None:
        from ..advise import PROMPTS, verdict

        loading.job, found = self.arena.advise(), None
        loading.check()
        for event in loading.job:
            if isinstance(event, tuple):
                draft, done = event
                self._say(loading, "loading", f"which draft fits {short(loading.name)}? trying {short(draft)}, {done} of {PROMPTS} prompts; replies wait")
            else:
                found = event
        if found is None:
            loading.check()
        self.advice = loading.name, found
        self._say(loading, "ready", verdict(loading.name, found))

    def _arena(self) -> Any:
        with self._lock:
            if self.arena is None:
                from ..arena import Arena

                self.arena = Arena()
            return self.arena

    def turn(self, visitor: Visitor, text: str, mode: str, options: dict[str, Any], system: str) -> Iterator[Any]:
        """A Reply again and again, or a string while it waits. What this visitor has under way is
        stopped first. Raises ValueError and SpecError, one line each."""
        visitor.stop()
        with visitor.busy:
            visitor.stopped, visitor.reply = False, None
            visitor.said = [*visitor.messages, {"role": "user", "content": text}]
            yield from self._wait(visitor)
            if visitor.stopped:
                return
            session = visitor.session = visitor.session or self.arena.session()
            job = self.arena.answer(session, text, mode, options, system)
            try:
                yield from self._follow(visitor, session, job)
            finally:
                job.cancel()

    def _wait(self, visitor: Visitor) -> Iterator[str]:
        while not self.ready and not visitor.stopped:
            if not self.loading:
                raise SpecError("no pair is loaded: choose one below")
            yield "waiting for the pair"
            time.sleep(WAIT_S)

    def _follow(self, visitor: Visitor, session: Any, job: Any) -> Iterator[Any]:
        """The newest event only, where a browser is slower than the device."""
        newest, place = None, 0
        for event in job.events(timeout=DRAIN_S):
            if visitor.session is not session:
                return  # cleared
            if isinstance(event, tuple):
                yield "{}, {} of {} tokens".format(READING, *event)
                continue
            if event is not None:
                newest = event
                if not event.done:
                    continue
            if newest is not None:
                visitor.reply, newest = newest, None
                yield visitor.reply
            elif job.place != place:
                place = job.place
                yield f"{place} before you" if place else ""
            elif place and visitor.stopped:
                return  # it never started


def fetch_models(target: str, draft: str | None, on_progress: Callable[[int, int], None]) -> None:
    """What is not on this machine yet. A draft that can't be had is for the loading to report."""
    locate(target, on_progress=on_progress)
    entry = find(target)
    other = draft or (entry and entry.draft_name)
    if other and other not in ("self", NO_DRAFT):
        with suppress(PairError, DownloadError):
            locate(other, on_progress=on_progress)


def best_pair() -> str:
    """The largest pair that is on this machine and fits it; else the smallest there is."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fitting = [entry.name for entry in catalogue() if entry.on_disk and entry.memory_bytes <= memory]
    return fitting[-1] if fitting else "demo"
