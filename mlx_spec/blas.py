"""Puts a fast BLAS in place of the one MLX's Linux build links; tells which is in use.

MLX's CPU backend on Linux multiplies float32 through the reference BLAS, where every row costs
the same and checking several tokens at once can't pay. Symbols that are global before `mlx.core`
is first imported win, so this module must be imported, and called, before it. Imports no MLX.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import glob
import os
import sys
import time
import warnings

_SETTING = "MLX_SPEC_BLAS"
_PATTERNS = ("/usr/lib/*-linux-gnu/openblas-pthread/libblas.so.3", "/usr/lib/*-linux-gnu/openblas-openmp/libblas.so.3",
             "/usr/lib64/libopenblas.so.0", "/usr/lib/libopenblas.so")
_LIBRARIES = ("openblas", "mkl_rt")
# Five rows cost the reference BLAS five times one row; a fast one, which waits for memory, about twice.
_REFERENCE_RATIO = 3.2

# glibc's mallopt: M_MMAP_MAX, M_TRIM_THRESHOLD, M_ARENA_MAX
_KEEP_MEMORY = ((-4, 0), (-1, 2**31 - 1), (-8, 1))

_path: str | None = None


def use_fast_blas() -> str | None:
    """Loads an installed OpenBLAS or MKL with global symbols; returns its path, None without one.

    Linux only. None too when `mlx.core` was imported first: then it has no effect. The environment
    variable MLX_SPEC_BLAS is `off`, or the path of a library to use.
    """
    global _path
    setting = os.environ.get(_SETTING, "").strip()
    if _path or not sys.platform.startswith("linux") or "mlx.core" in sys.modules or setting.lower() == "off":
        return _path
    for candidate in [setting] if setting else _candidates():
        try:
            ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        _path = candidate
        break
    if setting and not _path:
        warnings.warn(f"{_SETTING}: {setting} can't be loaded; MLX's own BLAS is in use", stacklevel=2)
    return _path


def work_side_by_side() -> None:
    """For long work on several streams at once: products on the thread that asks for them, and
    freed memory kept, because giving large buffers back and faulting them in again costs a fifth."""
    library = ctypes.CDLL(_path) if _path else None
    for name in ("openblas_set_num_threads", "MKL_Set_Num_Threads"):
        if library is not None and hasattr(library, name):
            getattr(library, name)(1)
    if sys.platform.startswith("linux"):
        for option, value in _KEEP_MEMORY:
            getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)(option, value)


def _candidates() -> list[str]:
    found = [path for pattern in _PATTERNS for path in sorted(glob.glob(pattern))]
    found += [f"{sys.prefix}/lib/libmkl_rt.so.2", f"{sys.prefix}/lib/libmkl_rt.so"]
    # find_library starts a process, so it is asked last.
    return [p for p in found if os.path.exists(p)] or [p for p in map(ctypes.util.find_library, _LIBRARIES) if p]


def blas_in_use() -> dict[str, str | float | None]:
    """Which BLAS multiplies float32, by timing a (5, 576) x (576, 49152) product.

    Returns {"blas": "openblas" | "mkl" | "fast" | "reference" | "metal", "ms": milliseconds,
    "path": the library or None}. "fast" is a BLAS put there by other means (LD_PRELOAD).
    """
    import mlx.core as mx

    one_row, ms = (_time_ms(mx, rows) for rows in (1, 5))
    if mx.default_device() == mx.gpu:
        return {"blas": "metal", "ms": ms, "path": None}
    if ms > _REFERENCE_RATIO * one_row:
        return {"blas": "reference", "ms": ms, "path": None}
    name = "fast" if _path is None else "mkl" if "mkl" in _path else "openblas"
    return {"blas": name, "ms": ms, "path": _path}


def _time_ms(mx, rows: int, repeats: int = 4) -> float:
    a, b = mx.ones((rows, 576)), mx.ones((49152, 576))
    mx.eval(a, b)
    times = [time.perf_counter()]
    for _ in range(repeats):
        mx.eval(a @ b.T)
        times.append(time.perf_counter())
    return min(after - before for before, after in zip(times, times[1:])) * 1e3
