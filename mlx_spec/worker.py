"""The one thread that owns MLX: jobs in, events out, cancel.

MLX's streams belong to a thread, and a web server hops threads, so whatever loads or decodes goes
through here. One job runs at a time, in the order of asking; each knows its place in the line.
Knows nothing of pairs, chats or pages: a job is a function.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from typing import Any, Callable, Iterator

_END = object()


class Job:
    """Something that was asked for. Iterate for its events; they end when it does, or with the
    exception that it ended with."""

    def __init__(self, work: Callable[[Job], None], worker: Worker):
        self._work, self._worker = work, worker
        self._events: queue.SimpleQueue = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self.error: BaseException | None = None

    def tell(self, event: Any) -> None:
        """From the job: an event for whoever asked."""
        self._events.put(event)

    def cancel(self) -> None:
        """From any thread. One that waits in line never starts."""
        self._cancelled.set()

    def cancelled(self) -> bool:
        """To be asked by the job, as `should_cancel`."""
        return self._cancelled.is_set()

    @property
    def place(self) -> int:
        """How many jobs are before this one; 0: it runs, or is done."""
        return self._worker.place(self)

    def events(self, timeout: float | None = None) -> Iterator[Any]:
        """What it tells; None where nothing came for `timeout` seconds."""
        while True:
            try:
                event = self._events.get(timeout=timeout)
            except queue.Empty:
                yield None
                continue
            if event is _END:
                if self.error is not None:
                    raise self.error
                return
            yield event

    __iter__ = events

    def result(self) -> list[Any]:
        """All events, at the end."""
        return list(self.events())

    def _run(self) -> None:
        try:
            if not self.cancelled():
                self._work(self)
        except BaseException as error:  # the asker's to handle; the thread lives on
            self.error = error
        finally:
            self._events.put(_END)


class Worker:
    """Runs jobs in a thread of its own until it is closed."""

    def __init__(self) -> None:
        self._line: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="mlx", daemon=True)
        self._thread.start()

    def ask(self, work: Callable[[Job], None]) -> Job:
        """Put a job at the end of the line. Raises RuntimeError when the worker is closed."""
        job = Job(work, self)
        with self._changed:
            if self._closed:
                raise RuntimeError("the worker is closed")
            self._line.append(job)
            self._changed.notify_all()
        return job

    def place(self, job: Job) -> int:
        with self._changed:
            waiting = [j for j in self._line if not j.cancelled() or j is job]
            return waiting.index(job) if job in waiting else 0

    def close(self) -> None:
        """Cancel everything and wait for the end of the thread."""
        with self._changed:
            self._closed = True
            for job in self._line:
                job.cancel()
            self._changed.notify_all()
        self._thread.join()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._line or self._closed)
                if not self._line:
                    return
                job = self._line[0]
            job._run()
            with self._changed:
                self._line.popleft()
