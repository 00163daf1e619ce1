"""Is this machine set up well? One finding a line, each with what to do about it."""

from __future__ import annotations

import os
import shutil
import sys
import urllib.error
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any, Iterator, NamedTuple

import mlx.core as mx
from huggingface_hub import constants

from .bench.card import low_power, memory_bytes, said
from .blas import blas_in_use, use_fast_blas
from .hub import cache_folder, is_offline, readable
from .names import Entry

TIMEOUT_S = 3
TESTED = {"mlx": "0.32.4", "mlx-lm": "0.32.2"}
ROOM = 2_000_000_000  # bytes on a disk below which a download is likely to fail


class Finding(NamedTuple):
    """todo: None where all is well."""

    name: str
    found: str
    todo: str | None = None


def findings(entry: Entry) -> Iterator[Finding]:
    """For running one pair of the catalogue here. Takes some seconds; products and the network are tried."""
    yield from (_device(), _memory(entry), *map(_version, TESTED))
    if sys.platform == "darwin":
        yield _power(said("pmset", "-g"))
    else:
        yield from (_blas(blas_in_use()), _compiler(shutil.which("g++") or shutil.which("clang++")))
    yield from (_hub(entry), *map(_folder, {"models": Path(constants.HF_HUB_CACHE), "cache": cache_folder()}.items()))


def _device() -> Finding:
    if mx.metal.is_available():
        return Finding("device", f"Metal, {mx.device_info()['device_name']}")
    todo = "use Python for arm64 on a Mac with Apple silicon, from Terminal without Rosetta" if sys.platform == "darwin" else None
    return Finding("device", "no Metal: MLX runs on the CPU", todo)


def _memory(entry: Entry, total: int | None = None) -> Finding:
    """total: bytes; None: of this machine, and on a Mac what its GPU may hold."""
    total = total or mx.device_info().get("max_recommended_working_set_size") or memory_bytes()
    return Finding("memory", f"{readable(total)}; {entry.name} needs about {readable(entry.memory_bytes)}",
                   None if entry.memory_bytes <= total else "choose a smaller pair, see `mlx_spec pairs`")


def _version(package: str) -> Finding:
    found, wanted = version(package), TESTED[package]
    return Finding(package, found, None if found == wanted else
                   f"pip install {package}=={wanted}: others are untested here, and MLX before 0.32 can write caches at "
                   "stale offsets on Metal")


def _power(settings: str) -> Finding:
    state = low_power(settings)
    return Finding("power", {None: "unknown", True: "low-power mode", False: "full"}[state],
                   "turn off Low Power Mode in System Settings, Battery: it slows the GPU" if state else None)


def _blas(found: dict[str, Any]) -> Finding:
    todo = None
    if found["blas"] == "reference" and (path := use_fast_blas()):
        todo = f"{path} is loaded and yet slow: something else keeps the cores busy, ask again when it is done"
    elif found["blas"] == "reference":
        todo = "apt-get install libopenblas0-pthread, or set MLX_SPEC_BLAS; import mlx_spec before mlx.core"
    return Finding("BLAS", f"{found['blas']} by timing, {found['ms']:.0f} ms for a product of 5 rows", todo)


def _compiler(path: str | None) -> Finding:
    return Finding("compiler", path or "none", None if path else "apt-get install g++: without it mx.compile does nothing")


def _hub(entry: Entry) -> Finding:
    if is_offline():
        return Finding("hub", "not asked, HF_HUB_OFFLINE is set", None if entry.on_disk else f"unset it to download {entry.name}")
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=TIMEOUT_S).close()
    except urllib.error.HTTPError:  # it answered
        pass
    except (OSError, ValueError) as e:
        return Finding("hub", f"{constants.ENDPOINT} can't be reached ({e})", None if entry.on_disk else
                       "check the network or HTTPS_PROXY, or set HF_ENDPOINT to a mirror")
    return Finding("hub", f"{constants.ENDPOINT} answers; {entry.name} is {'' if entry.on_disk else 'not '}on this machine")


def _folder(named: tuple[str, Path]) -> Finding:
    name, folder = named
    setting = {"models": "HF_HOME", "cache": "MLX_SPEC_CACHE"}[name]
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    if not os.access(there, os.W_OK):
        return Finding(name, f"{folder} can't be written", f"set {setting} to another folder")
    todo = f"free some space, or set {setting} to a folder on another disk" if free < ROOM else None
    return Finding(name, f"{folder}, {readable(free)} free", todo)
