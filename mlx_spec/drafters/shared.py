"""What a drafter on hidden states borrows from its target: the embedding, and rows of the head."""

from __future__ import annotations

from typing import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn

from ..errors import PairError
from ..hidden import embedding, head, output, trunk
from ..shapes import Float, Integer


class Shared:
    """No module, so that the target's weights are not taken for the drafter's own. embed: token ids to vectors. head
    and whole: (rows, dim) final states to the target's logits of `ids`, in their order, and of all."""

    def __init__(self, target: nn.Module, ids: Integer[mx.array, "reduced"], dim: int, depths: Sequence[int] = ()):
        self.ids = ids
        weights, found = output(target), embedding(target)
        if not weights or not found:
            raise PairError("the target's embedding and head are not where a draft on hidden states could share them")
        self.embed, rows = found[1], weights.weight.shape[0]
        _check(target, self.embed(mx.array([0])).shape[-1], rows, ids, dim, depths)
        self.reduced = ids.shape[0] < rows
        self.whole = head(target, getattr(weights, "as_linear", weights))
        self.head = head(target, _rows(weights, ids)) if self.reduced else self.whole

    def spread(self, logits: Float[mx.array, "batch reduced"], vocab: int) -> Float[mx.array, "batch vocab"]:
        """Logits of all ids: the others are impossible."""
        if not self.reduced:
            return logits
        # Ids that may not be emitted, of a padded head, go to a column that is cut off again.
        full = mx.full((logits.shape[0], vocab + 1), -mx.inf, dtype=logits.dtype)
        places = mx.broadcast_to(mx.minimum(self.ids, vocab)[None], logits.shape)
        return mx.put_along_axis(full, places, logits, axis=1)[:, :vocab]


def _check(target: nn.Module, width: int, rows: int, ids: mx.array, dim: int, depths: Sequence[int]) -> None:
    """A draft that was made for another target. Raises PairError."""
    layers, last = len(getattr(trunk(target), "layers", ())), int(mx.max(ids).item())
    if width != dim:
        wrong = f"was made for hidden states of width {dim}, the target's are {width} wide"
    elif depths and not 0 < min(depths) <= max(depths) <= layers:
        wrong = f"reads the target after layers {', '.join(map(str, depths))}, and it shows {layers}"
    elif last >= rows:
        wrong = f"knows token id {last}, the target has {rows} ids"
    else:
        return
    raise PairError(f"this draft {wrong}: use the target that it was trained for")


def _rows(weights: nn.Module, ids: mx.array) -> Callable:
    """A product with these rows of the target's output weights, in the form they have."""
    part = {n: weights[n][ids] for n in ("weight", "scales", "biases", "bias") if weights.get(n) is not None}
    mx.eval(part)
    bias = part.pop("bias", 0)
    if "scales" not in part:
        return lambda x: x @ part["weight"].T + bias
    facts = dict(group_size=weights.group_size, bits=weights.bits, mode=getattr(weights, "mode", "affine"))
    return lambda x: mx.quantized_matmul(x, part["weight"], part["scales"], part.get("biases"), **facts) + bias
