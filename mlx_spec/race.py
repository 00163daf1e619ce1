"""Several replies on one device, fairly: each has had the same device time at every moment.

The one that has used least goes next, for a slice; what it has in flight is waited for before
another starts; its clock runs in its own slices only. So a reply's statistics are those of a run by
itself, and what the eye sees side by side is the true difference.
"""

from __future__ import annotations

import time
from typing import Callable, Iterator, NamedTuple, Sequence

from .engine import Decoder
from .types import Chunk

SLICE_S = 0.25


class Stopwatch:
    """A clock that stands still while others have the device."""

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now, self._used, self._since = now, 0.0, None

    def __call__(self) -> float:
        return self._used + (self._now() - self._since if self._since is not None else 0.0)

    def __enter__(self) -> Stopwatch:
        self._since = self._now()
        return self

    def __exit__(self, *error: object) -> None:
        self._used, self._since = self(), None


class Lane(NamedTuple):
    """A reply in the race; its decoder was made with this watch as its clock."""

    name: str
    decoder: Decoder
    watch: Stopwatch


def race(lanes: Sequence[Lane], slice_s: float = SLICE_S) -> Iterator[tuple[Lane, list[Chunk]]]:
    """Who moved, and what came: a slice at a time, until all are done. Closing it, or cancelling a
    decoder, ends the replies with what there is."""
    running = {lane.name: (lane, lane.decoder.chunks()) for lane in lanes}
    try:
        while running:
            lane, chunks = min(running.values(), key=lambda entry: entry[0].watch())
            found, done = _slice(lane, chunks, slice_s)
            if done:
                del running[lane.name]
            yield lane, found
    finally:
        for _, chunks in running.values():
            chunks.close()


def _slice(lane: Lane, chunks: Iterator[Chunk], slice_s: float) -> tuple[list[Chunk], bool]:
    found, end = [], lane.watch() + slice_s
    with lane.watch:
        while lane.watch() < end:
            chunk = next(chunks, None)
            if chunk is None:
                return found, True
            found.append(chunk)
        lane.decoder.settle()
    return found, False
