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


def race(lanes: Sequence[Lane], slice_s: float = SLICE_S) -> Iterator[tuple[Lane, Chunk]]:
    """Each chunk as it comes, and whose it is, until all are done. What the caller does with it is
    nobody's time. Closing this, or cancelling a decoder, ends the replies with what there is."""
    running = {lane.name: (lane, lane.decoder.chunks()) for lane in lanes}
    try:
        while running:
            lane, chunks = min(running.values(), key=lambda entry: entry[0].watch())
            end = lane.watch() + slice_s
            while lane.name in running and lane.watch() < end:
                with lane.watch:
                    chunk = next(chunks, None)
                if chunk is None:
                    del running[lane.name]
                else:
                    yield lane, chunk
            with lane.watch:
                lane.decoder.settle()
    finally:
        for _, chunks in running.values():
            chunks.close()
