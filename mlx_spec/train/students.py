"""New drafts of the three kinds, sized after their target.

A student is what `loss.py` trains: `unroll`, `logits`, `ids`, `shared`, and the weights to learn.
Knows nothing of text, disks or loops.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from ..drafters.heads import Heads, HeadsArgs
from ..drafters.mlp import Mlp, MlpArgs
from ..drafters.saved import load_saved
from ..drafters.shared import Shared
from ..errors import SpecError, first_line
from ..hidden import Inside, embedding, output, trunk

KINDS = ("draft", "heads", "mlp")
MLP_STEPS = 4
SHARE = 6  # a draft keeps one of so many layers, unless told otherwise


def make(kind: str, target: nn.Module, ids: mx.array, *, layers: int | None, depths: Sequence[int], seed: int) -> Any:
    """A new student, bound to its target. Raises SpecError and PairError."""
    mx.random.seed(seed)  # nn.Module draws first weights from the global state
    if kind == "draft":
        return make_draft(target, ids, layers)
    if kind == "heads":
        student = _heads(target, ids, layers or 1, depths)
    else:
        student = Mlp(MlpArgs(width(target), layers or MLP_STEPS, ids.shape[0], tie_weights=True, scale_input=True,
                              reduced=True))
    student.ids = ids
    student.bind(target, mx.float32)
    return student


def begun(kind: str, target: nn.Module, folder: Path, depths: Sequence[int]) -> Heads | Mlp:
    """A draft that was trained before, as a student again. Raises SpecError and PairError."""
    student = load_saved(folder)
    wanted = {"heads": Heads, "mlp": Mlp}.get(kind)
    if wanted is None or not isinstance(student, wanted) or tuple(student.depths) != tuple(depths):
        raise SpecError(f"{folder} is not one of kind {kind} that reads the target after layers "
                        f"{', '.join(map(str, depths)) or 'none'}: name its kind and depths, or leave out --begin")
    dequantize_model(student)
    student.bind(target, mx.float32)
    return student.train()


def read_depths(kind: str, target: nn.Module, depths: Sequence[int] | None) -> tuple[int, ...]:
    """After which layers heads read the target: low, middle and high, as in EAGLE-3."""
    if kind != "heads":
        return ()
    layers = len(getattr(trunk(target), "layers", ()))
    if depths is None:
        depths = sorted({2, layers // 2, layers - 3}) if layers >= 8 else ()
    if depths and not 1 <= min(depths) <= max(depths) <= layers:
        raise SpecError(f"--depths must lie between 1 and {layers} for this target; got {', '.join(map(str, depths))}")
    return tuple(sorted(set(depths)))


def _heads(target: nn.Module, ids: mx.array, layers: int, depths: Sequence[int]) -> Heads:
    dim, facts = width(target), config_args(getattr(target, "args", None))
    head_dim = 64 if dim % 64 == 0 else dim // (facts.get("num_attention_heads") or 1)
    heads = dim // head_dim
    kv_heads = next(n for n in range(max(heads // 3, 1), heads + 1) if heads % n == 0)
    return Heads(HeadsArgs(dim, ids.shape[0], list(depths), layers, facts.get("intermediate_size") or 4 * dim, heads,
                           kv_heads, head_dim, facts.get("rope_theta") or 10000.0))


def frequent_ids(tokens: np.ndarray, rows: np.ndarray, count: int, total: int) -> mx.array:
    """The ids that occur most in the answers, filled up with the lowest others, in order."""
    seen = np.zeros(total, np.int64)
    for start, prompt, length, _ in rows:
        seen += np.bincount(tokens[start + prompt : start + length], minlength=total)[:total]
    order = np.argsort(-seen, kind="stable")[: min(count, total)]
    return mx.array(np.sort(order).astype(np.int32))


def scale_norms(student: Heads, states: np.ndarray) -> None:
    """Begin where the target is: its states come in with unit spread in every direction, and the
    last norm gives them the spread that its output weights expect."""
    sample = states[: 1 << 13].astype(np.float32)
    for norm, part in zip(student.inward_norms, np.moveaxis(sample, 1, 0)):
        part = part / np.sqrt(np.square(part).mean(axis=-1, keepdims=True) + 1e-6)
        norm.weight = mx.array(1 / (part.std(axis=0) + 1e-3))
    student.norm.weight = mx.array(sample[:, -1].std(axis=0))


class Pruned(nn.Module):
    """A draft of the target's own type: some of its layers, distilled, with its embedding and head, which stay
    as they are: beside the target they need no memory of their own. mlx-lm loads it like any model."""

    def __init__(self, model: nn.Module, target: nn.Module, ids: mx.array):
        super().__init__()
        self.model, self.ids = model, ids
        self.shared = Shared(target, ids, width(target))
        self.freeze(keys="ids", recurse=False)
        embedding(model)[1].freeze()
        output(model).freeze()

    def unroll(self, tokens: mx.array, states: Sequence[mx.array], steps: int) -> list[mx.array]:
        """Row i of step s: its own state after token i + s."""
        final = Inside(self.model).states(tokens)[-1]
        return [mx.roll(final, -s, axis=1) for s in range(steps)]

    def logits(self, state: mx.array, step: int = 0) -> mx.array:
        return self.shared.head(state)


def width(target: nn.Module) -> int:
    return embedding(target)[1](mx.array([0])).shape[-1]


def make_draft(target: nn.Module, ids: mx.array, layers: int | None) -> Pruned:
    """The target without most of its layers. Raises SpecError where its type can't be cut so."""
    total = len(getattr(trunk(target), "layers", ()))
    count = layers or max(1, total // SHARE)
    if not 0 < count < total:
        raise SpecError(f"--layers must be 1 to {total - 1}, fewer than the target has; got {count}")
    # Evenly spread; a lone one is the last, whose output the head knows.
    chosen = [round(i * (total - 1) / (count - 1)) for i in range(count)] if count > 1 else [total - 1]
    try:
        model = type(target)(_cut(target.args, chosen, total))
        model.load_weights(_weights(target, chosen), strict=True)
        mx.eval(model.parameters())
    except Exception as e:
        raise SpecError(f"a target of type {getattr(target, 'model_type', '?')} can't be cut to {count} layers "
                        f"({first_line(e)}); use --kind heads") from e
    return Pruned(model, target, ids)


def config_args(args: Any) -> dict[str, Any]:
    """The config of the text part by name, to be read or changed; empty where there is none."""
    inner = getattr(args, "text_config", None)
    return inner if isinstance(inner, dict) else getattr(inner or args, "__dict__", {})


def _cut(args: Any, chosen: Sequence[int], total: int) -> Any:
    """The config with the chosen layers only: their number, and every list that has one item a layer."""
    args = copy.deepcopy(args)
    facts = config_args(args)
    for name, value in facts.items():
        if name in ("num_hidden_layers", "num_layers", "n_layers") and value == total:
            facts[name] = len(chosen)
        elif isinstance(value, list) and len(value) == total:
            facts[name] = [value[i] for i in chosen]
    return args


def _weights(target: nn.Module, chosen: Sequence[int]) -> list[tuple[str, mx.array]]:
    """The target's weights in float32, layers renumbered."""
    modules = dict(target.named_modules())
    places, found = {str(i): new for new, i in enumerate(chosen)}, []
    for path, weight in tree_flatten(target.parameters()):
        owner, _, leaf = path.rpartition(".")
        m = modules[owner]
        if hasattr(m, "scales") and leaf in ("scales", "biases"):
            continue
        if hasattr(m, "scales") and leaf == "weight":
            weight = mx.dequantize(weight, m.scales, m.get("biases"), m.group_size, m.bits, m.mode)
        before, mark, after = path.partition("layers.")
        number, _, rest = after.partition(".")
        if number in places:
            path = f"{before}layers.{places[number]}.{rest}"
        if not number.isdigit() or number in places:
            found.append((path, weight.astype(mx.float32)))
    return found
