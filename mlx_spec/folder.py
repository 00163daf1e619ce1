"""Loads an MLX model folder through mlx-lm; every fault that it would trip over is one line that names the file."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_adapters, load_config, load_model, load_tokenizer
from safetensors import SafetensorError, safe_open

from .errors import PairError, first_line

_AGAIN = "download it again"


def load_folder(folder: Path, *, trust_remote_code: bool = False) -> tuple[nn.Module, TokenizerWrapper]:
    """The model and tokenizer in `folder`, weights evaluated. Raises PairError."""
    config = read_json(folder / "config.json")
    if not (config.get("model_type") or config.get("model_file")):
        raise PairError(f"{folder / 'config.json'} names no model_type: not a language model for mlx-lm")
    check_weights(folder)
    try:
        model, _ = load_model(folder, trust_remote_code=trust_remote_code)
        tokenizer = load_tokenizer(folder, {"trust_remote_code": trust_remote_code},
                                   eos_token_ids=_end_ids(config, load_config(folder)))
    except Exception as e:
        raise _explain(folder, e) from e
    return model, tokenizer


def apply_adapter(model: nn.Module, adapter_path: str | Path) -> nn.Module:
    """The model with the adapter of mlx-lm's format in that folder. Raises PairError."""
    folder = Path(adapter_path).expanduser()
    if not (folder / "adapter_config.json").exists():
        raise PairError(f"{folder} has no adapter_config.json: not an adapter folder")
    _check_shard(folder / "adapters.safetensors")
    try:
        return load_adapters(model, str(folder)).eval()
    except Exception as e:
        raise PairError(f"the adapter {folder} does not fit the model ({first_line(e)})") from e


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. Raises PairError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
        return content
    except (OSError, ValueError) as e:
        raise PairError(f"{path} can't be read ({first_line(e)}); {_AGAIN}") from e


def check_weights(folder: Path) -> None:
    """Whether the files that hold the weights are there and whole. Raises PairError."""
    index = folder / "model.safetensors.index.json"
    named = read_json(index).get("weight_map", {}).values() if index.exists() else ()
    shards = {*folder.glob("model*.safetensors"), *(folder / name for name in named)}
    if not shards:
        raise PairError(f"{folder} has no model*.safetensors: the weights are missing; {_AGAIN}")
    for shard in sorted(shards):
        if not shard.exists():
            raise PairError(f"{shard} is missing, but {index.name} names it; {_AGAIN}")
        _check_shard(shard)


def _check_shard(path: Path) -> None:
    try:
        safe_open(path, framework="np")  # compares what the header promises with the file's length
    except (SafetensorError, OSError) as e:
        raise PairError(f"{path} is not a whole safetensors file: cut short or damaged "
                        f"({first_line(e)}); {_AGAIN}") from e


def _end_ids(*configs: dict[str, Any]) -> list[int]:
    """Union of the configs' end tokens: mlx-lm lets generation_config.json replace config.json's."""
    ends = [config.get("eos_token_id") for config in configs]
    return sorted({i for end in ends for i in (end if isinstance(end, list) else [end])} - {None})


def _explain(folder: Path, error: Exception) -> PairError:
    text, release = str(error), f"mlx-lm {version('mlx-lm')}"
    if text.startswith("Model type "):
        return PairError(f"{folder}: model type {text.split()[2]!r} is not supported by {release}; choose another model")
    if "trust_remote_code" in text:
        return PairError(f"{folder} brings its own Python code: read it, then allow it with trust_remote_code")
    if any(s in text for s in ("Expected shape", "parameters not in model", "Missing")):
        return PairError(f"{folder / 'config.json'} does not fit the weights beside it ({first_line(error)}); {_AGAIN}")
    return PairError(f"{folder} can't be loaded by {release} ({type(error).__name__}: {first_line(error)})")
