"""The card: the machine, the versions, the models, and how fast memory is. Unknown is None.

What Apple's tools print is parsed here and nowhere else.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from .. import __version__
from ..blas import blas_in_use
from ..names import find, locate
from .record import Card, Model

# GB/s, press figures: of the base chip, Pro, Max (by GPU cores where those decide) and Ultra.
BANDWIDTH: dict[str, tuple] = {
    "M1": (68, 200, 400, 800), "M2": (100, 200, 400, 800), "M3": (100, 150, {30: 300, 40: 400}, 819),
    "M4": (120, 273, {32: 410, 40: 546}, None), "M5": (153, 307, {40: 614}, None),
}
READ_MB = 256  # of the product that measures memory


def card() -> Card:
    mac = sys.platform == "darwin"
    chip, cores = _chip(), gpu_cores(said("system_profiler", "SPDisplaysDataType", "-json")) if mac else None
    return {
        "system": f"macOS {platform.mac_ver()[0]}" if mac else f"{platform.system()} {platform.machine()}, not a Mac",
        "chip": chip, "gpu_cores": cores, "memory_bytes": memory_bytes(),
        "power": power(said("pmset", "-g", "batt")) if mac else None,
        "low_power": low_power(said("pmset", "-g")) if mac else None,
        "device": mx.default_device().type.name, "blas": None if mac else blas_in_use()["blas"],
        "bandwidth_nominal_gbs": nominal(chip, cores) if mac else None, "bandwidth_gbs": bandwidth(),
        "python": platform.python_version(), "mlx": version("mlx"), "mlx_lm": version("mlx-lm"), "mlx_spec": __version__,
        "git": _git(Path(__file__).parents[2]),
    }


def model(module: Any, name: str | None) -> Model:
    """Facts of loaded weights. Of a path the last part, for a record is made to be shown; revision: the hub's."""
    weights = [w for _, w in tree_flatten(module.parameters())]
    bits = Counter(m.bits for _, m in module.named_modules() if hasattr(m, "bits"))
    kinds = Counter(str(w.dtype).removeprefix("mlx.core.") for w in weights if mx.issubdtype(w.dtype, mx.floating))
    shown = os.path.basename(os.path.abspath(name)) if name and os.path.exists(name) else name or "unnamed"
    return {"name": shown, "revision": name and _revision(name), "bits": bits.most_common(1)[0][0] if bits else None,
            "dtype": kinds.most_common(1)[0][0] if kinds else "unknown", "bytes": sum(w.nbytes for w in weights)}


def _revision(name: str) -> str | None:
    path = locate(name) if find(name) or not os.path.exists(name) else Path(name)
    _, found, rest = path.resolve().as_posix().partition("/snapshots/")
    return rest.split("/")[0] if found else None


def gpu_cores(displays: str) -> int | None:
    """Of `system_profiler SPDisplaysDataType -json`."""
    try:
        return next(int(d["sppci_cores"]) for d in json.loads(displays)["SPDisplaysDataType"] if "sppci_cores" in d)
    except (ValueError, KeyError, TypeError, StopIteration):
        return None


def power(battery: str) -> str | None:
    """Of `pmset -g batt`: AC Power or Battery Power."""
    found = re.search(r"drawing from '([^']+)'", battery)
    return found and found[1]


def low_power(settings: str) -> bool | None:
    """Of `pmset -g`; powermode, which some Macs have in place of lowpowermode, is 2 for high power."""
    found = re.search(r"^\s*(?:low)?powermode\s+(\d)", settings, re.M)
    return found and found[1] == "1"


def nominal(chip: str | None, cores: int | None) -> float | None:
    generation, _, kind = (chip or "").removeprefix("Apple ").partition(" ")
    found = dict(zip(("", "Pro", "Max", "Ultra"), BANDWIDTH.get(generation, ()))).get(kind)
    return found.get(cores) if isinstance(found, dict) else found


def memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def bandwidth(megabytes: int = READ_MB) -> float:
    """GB/s of a product of one row with a matrix of that size, which must be read once; the best of five."""
    width = 4096
    matrix, row, best = mx.ones((megabytes * 2**20 // (4 * width), width)), mx.ones((width, 1)), float("inf")
    mx.eval(matrix, row)
    for _ in range(5):
        began = time.perf_counter()
        mx.eval(matrix @ row)
        best = min(best, time.perf_counter() - began)
    return matrix.nbytes / best / 1e9


def _chip() -> str | None:
    if sys.platform == "darwin":
        return said("sysctl", "-n", "machdep.cpu.brand_string").strip() or None
    found = re.search(r"^model name\s*: (.+)$", said("cat", "/proc/cpuinfo"), re.M)
    return found and found[1].strip()


def _git(folder: Path) -> str | None:
    return said("git", "-C", str(folder), "describe", "--always", "--dirty").strip() if (folder / ".git").exists() else None


def said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
