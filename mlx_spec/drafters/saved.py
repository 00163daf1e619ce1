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
from mlx_lm.utils import dequantize_model

from ..errors import PairError, SpecError
from ..folder import check_weights, first_line, read_json
from .heads import Heads, HeadsArgs
from .mlp import Mlp, MlpArgs

KINDS = {"mlx_spec_heads": (HeadsArgs, Heads), "mlp_speculator": (MlpArgs, Mlp)}
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
    config = read_json(path)
    if config.get("model_type") not in list(KINDS):
        raise PairError(f"{path}: model type {config.get('model_type')!r} is no draft on hidden states; "
                        f"there are {' and '.join(KINDS)}")
    check_weights(folder)
    try:
        module = _filled(folder, config)
    except Exception as e:
        raise PairError(f"{path} does not fit the weights beside it ({first_line(e)}); download it again") from e
    mx.eval(module)
    if not mx.issubdtype(module.ids.dtype, mx.integer) or module.ids.min().item() < 0:
        raise PairError(f"{folder}: its output ids are no token ids; download it again")
    return module


def _filled(folder: Path, config: dict[str, Any]) -> Heads | Mlp:
    make_args, make = KINDS[config["model_type"]]
    module, weights = make(make_args.from_dict(config)), {}
    for shard in sorted(folder.glob("model*.safetensors")):
        weights |= mx.load(str(shard))
    if hasattr(module, "sanitize"):
        weights = module.sanitize(weights)
    packing = config.get("quantization")
    if packing:
        _pack_like(module, packing, weights)
    module.load_weights(list(weights.items()))
    if mx.default_device().type == mx.cpu:
        dequantize_model(module)  # quantised products are slow there
    return module.eval()


def _pack_like(module: nn.Module, packing: dict[str, Any], weights: dict[str, mx.array]) -> None:
    """As mlx-lm reads it: facts for all, and by name for those that differ."""
    nn.quantize(module, packing["group_size"], packing["bits"],
                class_predicate=lambda name, _: packing.get(name, f"{name}.scales" in weights))


def save(folder: Path, module: Heads | Mlp, bits: int = 16, about: dict[str, Any] | None = None) -> None:
    """Write the draft so that `load_saved` finds it; `module` stays as it is.

    module: not quantised. bits: 16, 8 or 4. about: for people and notes, what JSON can hold;
    "target" names the model that it was made for. Whole or not at all. Raises SpecError.
    """
    if bits not in (16, 8, 4):
        raise SpecError(f"a draft is saved in 16, 8 or 4 bits; got {bits}")
    if (folder / "config.json").exists() and not is_saved(folder):
        raise SpecError(f"{folder} holds another model: choose another folder")
    copy = type(module)(module.args)
    copy.update(tree_map(_half, module.parameters()))
    config = asdict(module.args) | {"mlx_spec": about or {}}
    if bits < 16:
        config["quantization"] = _pack(copy, bits)
    _write(folder, dict(tree_flatten(copy.parameters())), config)


def _half(weight: mx.array) -> mx.array:
    """Half precision; of the two the one with more digits, unless it has the other already."""
    return weight.astype(mx.float16) if weight.dtype == mx.float32 else weight


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


def _write(folder: Path, weights: dict[str, mx.array], config: dict[str, Any]) -> None:
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Both are whole before either takes its place, and a rename needs no room.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as scratch:
            mx.save_safetensors(f"{scratch}/model.safetensors", weights, {"format": "mlx"})
            Path(scratch, "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
            for name in ("model.safetensors", "config.json"):
                os.replace(Path(scratch, name), folder / name)
    except (OSError, RuntimeError) as e:  # MLX's own writes raise the latter
        if new:
            with suppress(OSError):
                folder.rmdir()
        raise SpecError(f"{folder} can't be written ({first_line(e)}): make room, or choose another folder") from e
