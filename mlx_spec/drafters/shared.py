"""What a drafter on hidden states borrows from its target: the embedding, and rows of the head."""

from __future__ import annotations

from typing import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn

from ..errors import PairError
from ..hidden import trunk
from ..shapes import Float, Integer


class Shared:
    """No module, so that the target's weights are not taken for the drafter's own.

    ids: the output ids, in the order of the drafter's logits.
    """

    def __init__(self, target: nn.Module, ids: Integer[mx.array, "reduced"], dim: int, depths: Sequence[int] = ()):
        self.ids = ids
        self.embed = _embedding(target)
        head = _output(target) or self.embed
        self.head = _rows(head, ids)
        self.reduced = ids.shape[0] < head.weight.shape[0]
        width = self.embed(mx.array([0])).shape[-1]
        if width != dim:
            raise PairError(f"this draft was made for hidden states of width {dim}, the target's are {width} wide: "
                            "use the target that it was trained for")
        layers = len(getattr(trunk(target), "layers", ()))
        if depths and not 0 < min(depths) <= max(depths) <= layers:
            raise PairError(f"this draft reads the target after layers {', '.join(map(str, depths))}, and it shows "
                            f"{layers}: use the target that it was trained for")

    def spread(self, logits: Float[mx.array, "batch reduced"], vocab: int) -> Float[mx.array, "batch vocab"]:
        """Logits of all ids: the others are impossible."""
        if not self.reduced:
            return logits
        # Ids that may not be emitted, of a padded head, go to a column that is cut off again.
        full = mx.full((logits.shape[0], vocab + 1), -mx.inf, dtype=logits.dtype)
        places = mx.broadcast_to(mx.minimum(self.ids, vocab)[None], logits.shape)
        return mx.put_along_axis(full, places, logits, axis=1)[:, :vocab]


def _embedding(target: nn.Module) -> nn.Module:
    kinds = (nn.Embedding, nn.QuantizedEmbedding)
    found = [m for m in trunk(target).children().values() if isinstance(m, kinds)]
    if not found:
        raise PairError("the target's embedding is not where a draft on hidden states could share it")
    return max(found, key=lambda m: m.weight.shape[0])


def _rows(head: nn.Module, ids: mx.array) -> Callable:
    """The target's output head for these ids only, its weights in the form they have."""
    rows, last = head.weight.shape[0], int(mx.max(ids).item())
    if last >= rows:
        raise PairError(f"this draft knows token id {last}, the target has {rows} of them: "
                        "use the target that it was trained for")
    if ids.shape[0] == rows:
        return getattr(head, "as_linear", head)
    part = {name: head[name][ids] for name in ("weight", "scales", "biases", "bias") if head.get(name) is not None}
    mx.eval(part)
    bias = part.pop("bias", 0)
    if "scales" not in part:
        return lambda x: x @ part["weight"].T + bias
    facts = dict(group_size=head.group_size, bits=head.bits, mode=getattr(head, "mode", "affine"))
    return lambda x: mx.quantized_matmul(x, part["weight"], part["scales"], part.get("biases"), **facts) + bias


def _output(target: nn.Module) -> nn.Module | None:
    while target is not None:
        if isinstance(getattr(target, "lm_head", None), (nn.Linear, nn.QuantizedLinear)):
            return target.lm_head
        target = getattr(target, "language_model", None)
    return None
