"""The type checker that conftest.py puts on the library's signatures: beartype, in which an int is also a float."""

import warnings

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep585DeprecationWarning

_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checker(function):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BeartypeDecorHintPep585DeprecationWarning)
        return _beartype(function)
