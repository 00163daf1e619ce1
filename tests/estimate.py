"""How long training takes and how much it needs, from sizes alone: an estimate, and it says so.

Counts products only and supposes a share of the chip's peak, so expect the right order of
magnitude. Imports no MLX.
"""

from __future__ import annotations

from typing import Any, NamedTuple

SHARE = 0.35  # of peak arithmetic or bandwidth that real runs reach, roughly
WRITERS = 32  # texts that the target writes side by side
ROW_BYTES = 24  # for each id and row of a batch: logits, laws and their slopes


class Sizes(NamedTuple):
    """Of a target. weights: in its trunk; bytes: of the whole model as it is stored."""

    dim: int
    weights: int
    bytes: int

    @classmethod
    def of(cls, config: dict[str, Any], bits: float = 16) -> Sizes:
        """From a config.json of the usual names; a mixture of experts counts as if it were dense."""
        dim, heads = config["hidden_size"], config["num_attention_heads"]
        head, kv = config.get("head_dim", dim // heads), config.get("num_key_value_heads", heads)
        block = dim * head * (2 * heads + 2 * kv) + 3 * dim * config["intermediate_size"]
        weights = config["num_hidden_layers"] * block
        embeddings = dim * config["vocab_size"] * (1 if config.get("tie_word_embeddings") else 2)
        return cls(dim, weights, int((weights + embeddings) * bits / 8))


class Estimate(NamedTuple):
    """Seconds by stage, bytes of memory at most, bytes on disk."""

    text_s: float
    states_s: float
    train_s: float
    memory_bytes: float
    disk_bytes: float


def estimate(target: Sizes, student_weights: int, *, tokens: int, epochs: float, unroll: int, vocab: int, states: int,
             batch_tokens: int, tflops: float, bandwidth_gb_s: float, own_text: bool = True) -> Estimate:
    """tokens: answer tokens; a prompt adds about a third. student_weights: of one step, without the
    output head. states: depths that are read, the final one included."""
    peak, everything = tflops * 1e12 * SHARE, 1.33 * tokens
    written = tokens * max(target.bytes / WRITERS / (bandwidth_gb_s * 1e9 * SHARE), 2 * target.weights / peak)
    step = 6 * student_weights + 4 * target.dim * vocab
    learnt = epochs * everything * (unroll * step + 2 * target.dim * vocab) / peak
    memory = target.bytes + 16 * student_weights + batch_tokens * vocab * ROW_BYTES
    return Estimate(written if own_text else 0.0, everything * 2 * target.weights / peak, learnt, memory,
                    everything * target.dim * states * 2)
