"""mlx_spec: speculative decoding for MLX. The same text, sooner.

    pair = mlx_spec.load("demo")
    print(mlx_spec.generate(pair, "Why is the sky blue?"))

Names are imported when they are first used, so that a command line can start in milliseconds.
"""

from importlib import import_module as _import_module

from .blas import use_fast_blas as _use_fast_blas

__version__ = "0.1.0"

_HOMES = {
    "generate": "api", "stream_generate": "api", "Chat": "chat",
    "load": "pairs", "Pair": "pairs", "catalogue": "pairs", "pull": "pairs",
    "pure": "sampling",
    "Options": "types", "Result": "types", "Chunk": "types", "Token": "types", "Stats": "types",
    "SpecError": "errors", "PairError": "errors", "DownloadError": "errors",
}
__all__ = sorted(_HOMES)

# Must come before mlx.core is first imported, by anyone.
_use_fast_blas()


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(_import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return [*globals(), *_HOMES]
