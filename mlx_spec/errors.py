"""Messages for people: every error a user can cause is one line that says what to do.

Knows nothing of models or MLX. `SpecError` is what loading and pairing raise; a wrong
option is a plain `ValueError`, because that is what a Python caller expects.
"""


class SpecError(Exception):
    """Something outside the program is not as it should be; the message says what to do."""


class PairError(SpecError):
    """Two models that can't work together, or a model that can't be loaded."""


class DownloadError(SpecError):
    """A model that could not be fetched."""
