"""A draft of the target's own type: some of its layers, with its embedding and head.

It starts from the target's weights and is distilled; embedding and head stay as they are, so that
beside the target they need no memory of their own. mlx-lm loads it like any model.
"""

from __future__ import annotations

import copy
from typing import Any, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..drafters.shared import Shared
from ..errors import SpecError, first_line
from ..hidden import Inside, embedding, output, trunk

SHARE = 6  # one layer in so many is kept, unless told otherwise


class Pruned(nn.Module):
    """A student that is a language model; every step of its draft is the same."""

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
        """Through the target's output rows, which are its own too."""
        return self.shared.head(state)


def width(target: nn.Module) -> int:
    """Of its hidden states."""
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
        module = modules[owner]
        if hasattr(module, "scales"):
            if leaf in ("scales", "biases"):
                continue
            if leaf == "weight":
                weight = mx.dequantize(weight, module.scales, module.get("biases"), module.group_size, module.bits, module.mode)
        before, mark, after = path.partition("layers.")
        number, _, rest = after.partition(".")
        if number in places:
            path = f"{before}layers.{places[number]}.{rest}"
        if not number.isdigit() or number in places:
            found.append((path, weight.astype(mx.float32)))
    return found
