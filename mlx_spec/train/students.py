"""New drafts of the three kinds, sized after their target.

A student is what `loss.py` trains: `unroll`, `logits`, `ids`, `shared`, and the weights to learn.
Knows nothing of text, disks or loops.
"""

from __future__ import annotations

from typing import Any, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..drafters.heads import Heads, HeadsArgs
from ..drafters.mlp import Mlp, MlpArgs
from ..errors import SpecError
from ..hidden import trunk
from .pruned import config_args, make_draft, width

KINDS = ("draft", "heads", "mlp")
MLP_STEPS = 4


def make(kind: str, target: nn.Module, ids: mx.array, *, layers: int | None, depths: Sequence[int], seed: int) -> Any:
    """A new student, bound to its target. Raises SpecError and PairError."""
    mx.random.seed(seed)  # nn.Module draws first weights from the global state
    if kind == "draft":
        return make_draft(target, ids, layers)
    student = _heads(target, ids, layers or 1, depths) if kind == "heads" else _mlp(target, ids, layers or MLP_STEPS)
    student.ids = ids
    student.bind(target, mx.float32)
    return student


def read_depths(kind: str, target: nn.Module, depths: Sequence[int] | None) -> tuple[int, ...]:
    """After which layers the target is read: low, middle and high, as in EAGLE-3, for heads."""
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


def _mlp(target: nn.Module, ids: mx.array, steps: int) -> Mlp:
    dim = width(target)
    return Mlp(MlpArgs(emb_dim=dim, inner_dim=dim, n_predict=steps, vocab_size=ids.shape[0], tie_weights=True,
                       scale_input=True, reduced=True))


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
