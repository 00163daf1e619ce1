"""How many tokens to draft in the next round; 0 is plain decoding.

A controller sees only what is already committed, so it never changes the law of the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Controller(Protocol):
    """Chooses k for the next round; `largest` bounds every choice, so that buffers can be sized."""

    largest: int

    def choose(self) -> int: ...


@dataclass
class Fixed:
    """Always the same k: reproducible."""

    k: int

    @property
    def largest(self) -> int:
        return self.k

    def choose(self) -> int:
        return self.k
