"""Drafts on hidden states in a folder: config.json and model.safetensors, in 16, 8 or 4 bits.

Knows the kinds there are and how their weights are packed. Knows nothing of their targets, nor of
training: `about` is kept for those who do.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import dequantize_model, load_model

from ..errors import PairError, SpecError, first_line, writing
from ..folder import check_weights, read_json
from .heads import Heads, HeadsArgs
from .mlp import Mlp, MlpArgs

KINDS = {"mlx_spec_heads": (Heads, HeadsArgs), "mlp_speculator": (Mlp, MlpArgs)}
GROUPS = (64, 32)  # weights that share a scale; what neither divides stays in 16 bits


def is_saved(folder: Path) -> bool:
    """Whether a folder holds such a draft; False where its config can't be read."""
    try:
        return read_json(folder / "config.json").get("model_type") in list(KINDS)
    except PairError:
        return False


def about(folder: Path) -> dict[str, Any]:
    """What `save` was told about the draft. Empty for a published checkpoint."""
    found = read_json(folder / "config.json").get("mlx_spec")
    return found if isinstance(found, dict) else {}


def load_saved(folder: Path) -> Heads | Mlp:
    """The draft, not yet bound to a target, its weights evaluated. Raises PairError, one line."""
    path = folder / "config.json"
    kind = read_json(path).get("model_type")
    if kind not in list(KINDS):
        raise PairError(f"{path}: model type {kind!r} is no draft on hidden states; there are {' and '.join(KINDS)}")
    check_weights(folder)
    try:
        module, _ = load_model(folder, get_model_classes=lambda config: KINDS[kind])
    except Exception as e:
        raise PairError(f"{path} does not fit the weights beside it ({first_line(e)}); download it again") from e
    if mx.default_device().type == mx.cpu:
        dequantize_model(module)  # quantised products are slow there
    mx.eval(module)
    if not mx.issubdtype(module.ids.dtype, mx.integer) or module.ids.min().item() < 0:
        raise PairError(f"{folder}: its output ids are no token ids; download it again")
    return module


def save(folder: Path, module: nn.Module, bits: int = 16, facts: dict[str, Any] | None = None,
         tokenizer: Any = None) -> None:
    """Write a draft, whole or not at all; `module` stays as it is. Raises SpecError.

    module: not quantised; a language model comes with its tokenizer. bits: 16, 8 or 4. facts: for people and
    notes, what JSON can hold; "target" names the model that it was made for.
    """
    if bits not in (16, 8, 4):
        raise SpecError(f"a draft is saved in 16, 8 or 4 bits; got {bits}")
    if (folder / "config.json").exists() and not (is_saved(folder) or about(folder)):
        raise SpecError(f"{folder} holds another model: choose another folder")
    copy = type(module)(module.args)
    # Of the two half precisions the one with more digits, unless a weight has the other already.
    copy.update(tree_map(lambda w: w.astype(mx.float16) if w.dtype == mx.float32 else w, module.parameters()))
    config = {k: v for k, v in asdict(module.args).items() if v is not None} | {"mlx_spec": facts or {}}
    if bits < 16:
        config["quantization"] = _pack(copy, bits)
    with writing(folder, kinds=(RuntimeError,)):
        _write(folder, dict(tree_flatten(copy.parameters())), config, tokenizer)


def _pack(module: nn.Module, bits: int) -> dict[str, Any]:
    """Quantise what can be; the facts as config.json holds them."""
    packing: dict[str, Any] = dict(group_size=GROUPS[0], bits=bits, mode="affine")

    def facts(name: str, layer: nn.Module) -> dict | bool:
        sizes = [g for g in GROUPS if hasattr(layer, "to_quantized") and layer.weight.shape[-1] % g == 0]
        if sizes and sizes[0] != GROUPS[0]:
            packing[name] = dict(group_size=sizes[0], bits=bits)
        return dict(group_size=sizes[0], bits=bits) if sizes else False

    nn.quantize(module, class_predicate=facts)
    return packing


def _write(folder: Path, weights: dict[str, mx.array], config: dict[str, Any], tokenizer: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        # All files are whole before any takes its place, and a rename needs no room.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as scratch:
            mx.save_safetensors(f"{scratch}/model.safetensors", weights, {"format": "mlx"})
            if tokenizer is not None:
                tokenizer.save_pretrained(scratch)
            Path(scratch, "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
            for path in sorted(Path(scratch).iterdir()):
                os.replace(path, folder / path.name)
    finally:
        with suppress(OSError):
            folder.rmdir()  # where nothing is in it
