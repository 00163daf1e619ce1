"""Reads a llama-type GGUF file into an mlx-lm model and a tokenizer. Knows nothing of downloads or of pairs.

Reading the tensors is MLX's (`mx.load`), the model is mlx-lm's, the tokenizer Hugging Face's.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .errors import PairError, first_line

GROUP_SIZE = 32
_CONTROL, _USER_DEFINED = 3, 4
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def default_dtype() -> mx.Dtype:
    """float32 on the CPU (there it is memory-bound, like a GPU), bfloat16 on Metal.

    The environment variable MLX_SPEC_DTYPE (float32 or bfloat16) has the last word.
    """
    name = os.environ.get("MLX_SPEC_DTYPE") or ("bfloat16" if mx.metal.is_available() else "float32")
    if name not in ("float32", "bfloat16"):
        raise PairError(f"MLX_SPEC_DTYPE is {name!r}; use float32 or bfloat16")
    return getattr(mx, name)


def load_gguf(path: str | Path, dtype: mx.Dtype) -> tuple[nn.Module, TokenizerWrapper]:
    """The model, its weights unpacked to dtype and evaluated, and the tokenizer in the file at `path`. Raises PairError
    where it is cut short, or of another type than llama with a byte-level BPE tokenizer."""
    try:
        weights, meta = mx.load(str(path), return_metadata=True)
        meta = {key: value.tolist() if isinstance(value, mx.array) else value for key, value in meta.items()}
        for key, wanted in (("general.architecture", "llama"), ("tokenizer.ggml.model", "gpt2")):
            if meta.get(key) != wanted:
                raise ValueError(f"{key} is {meta.get(key)!r}, not {wanted!r}")
        weights = _unpacked(_renamed(weights), dtype)
        model = llama.Model(_model_args(meta, weights))
        model.load_weights(list(weights.items()))
        tokenizer = _tokenizer(meta)
    except (KeyError, ValueError, RuntimeError) as e:
        raise PairError(f"{path} can't be read as a llama GGUF file ({first_line(e)}): fetch it again, "
                        "or use the model's MLX folder instead") from e
    model.eval()
    mx.eval(model.parameters())
    return model, tokenizer


def _renamed(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    renamed = {}
    for name, value in weights.items():
        stem, _, kind = name.rpartition(".")
        head, _, rest = stem.partition(".")
        layer, _, part = rest.partition(".")
        if stem not in _NAMES and (head != "blk" or part not in _BLOCK_NAMES):
            raise ValueError(f"tensor {name} is not part of a llama model without scaled rotary embeddings")
        new = _NAMES.get(stem) or f"model.layers.{layer}.{_BLOCK_NAMES[part]}"
        renamed[f"{new}.{kind}"] = value
    return renamed


def _model_args(meta: dict[str, Any], weights: dict[str, mx.array]) -> llama.ModelArgs:
    about = {key.removeprefix("llama."): value for key, value in meta.items()}
    heads = about["attention.head_count"]
    return llama.ModelArgs(
        model_type="llama", vocab_size=weights["model.embed_tokens.weight"].shape[0],
        hidden_size=about["embedding_length"], intermediate_size=about["feed_forward_length"],
        num_hidden_layers=about["block_count"], max_position_embeddings=about["context_length"],
        num_attention_heads=heads, num_key_value_heads=about.get("attention.head_count_kv", heads),
        head_dim=about.get("attention.key_length"), rms_norm_eps=about["attention.layer_norm_rms_epsilon"],
        rope_theta=about.get("rope.freq_base", 10000.0),
        rope_traditional=True,  # GGUF permutes query and key rows for interleaved rotary pairs
        tie_word_embeddings="lm_head.weight" not in weights,
    )


def _unpacked(weights: dict[str, mx.array], dtype: mx.Dtype) -> dict[str, mx.array]:
    plain = {}
    for name, value in weights.items():
        stem, _, kind = name.rpartition(".")
        if kind == "weight" and f"{stem}.scales" in weights:
            # float16 scales would round the products before they reach float32.
            scales, biases = (weights[f"{stem}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
            bits = value.shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE)
            value = mx.dequantize(value, scales, biases, GROUP_SIZE, bits)
        if kind not in ("scales", "biases"):
            plain[name] = value.astype(dtype)
    return plain


def _pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer:
    if kind not in ("default", "gpt-2", "gpt2", "smollm"):
        raise ValueError(f"the pre-tokenizer {kind!r} is not known")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if kind == "smollm" else []
    return pre_tokenizers.Sequence([*digits, byte_level])


def _tokenizer(meta: dict[str, Any]) -> TokenizerWrapper:
    pieces, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(m.split(" ", 1)) for m in meta["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(pieces)}, merges=merges))
    core.pre_tokenizer = _pre_tokenizer(meta.get("tokenizer.ggml.pre", "default"))
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken(piece, normalized=False, special=kind == _CONTROL)
                     for piece, kind in zip(pieces, kinds) if kind in (_CONTROL, _USER_DEFINED)])
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {ours: meta.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in names.items()}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, clean_up_tokenization_spaces=False, model_max_length=meta["llama.context_length"],
        **{name: pieces[i] for name, i in ids.items() if i is not None})
    fast.chat_template = meta.get("tokenizer.chat_template")
    return TokenizerWrapper(fast, BPEStreamingDetokenizer)
