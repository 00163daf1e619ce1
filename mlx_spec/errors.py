"""Messages for people: every error a user can cause is one line that says what to do.

Knows nothing of models or MLX. `SpecError` is what loading and pairing raise; a wrong
option is a plain `ValueError`, because that is what a Python caller expects.
"""

from contextlib import contextmanager
from pathlib import Path
from typing import Iterator


class SpecError(Exception):
    """Something outside the program is not as it should be; the message says what to do."""


class PairError(SpecError):
    """Two models that can't work together, or a model that can't be loaded."""


class DownloadError(SpecError):
    """A model that could not be fetched."""


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(" ".join(lines[:2]).split())[:200]


@contextmanager
def writing(path: Path, cure: str = "make room, or choose another folder", kinds: tuple = ()) -> Iterator[None]:
    """Turns a full disk, and errors of these kinds, into a SpecError; MLX's own writes raise RuntimeError."""
    try:
        yield
    except (OSError, *kinds) as e:
        raise SpecError(f"{path} can't be written ({getattr(e, 'strerror', None) or first_line(e)}): {cure}") from e
