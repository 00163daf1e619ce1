"""Small random models, one for every architecture the tests need, and the tokenizer that goes with them.

A random model usually repeats two or three ids for ever, accepts every draft, and so hides every cache fault. These are scaled until a greedy rollout
wanders. It knows mlx-lm's model classes and nothing of mlx_spec.
"""

import importlib
import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import KVCache
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCAB = 259  # 256 bytes, <bos>, <eos>, <pad>
BOS, EOS, PAD = 256, 257, 258
WINDOW = 16
PROMPT = list(b"The quick brown fox")

FULL, SLIDING = "full_attention", "sliding_attention"

# What most architectures share. A head is 32 wide, so keys can be quantised in groups of 32.
BASE = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    sliding_window=WINDOW,
)

# name -> what its config has beyond BASE. `model_type` defaults to the name; `text_config` nests everything else.
CONFIGS = {
    "llama": dict(),
    "llama_sw": dict(model_type="llama", num_hidden_layers=4, layer_types=[SLIDING, FULL] * 2),
    "qwen3": dict(),
    "gemma3_text": dict(num_hidden_layers=4, sliding_window_pattern=2, query_pre_attn_scalar=32),
}

TINY_SW = "llama_sw"

# Gains: standard deviation of logits, of a matrix's output for unit input, of norm weights around 1.
HEAD, MATRIX, NORM = 4.0, 2.0, 0.5

NOISE = 0.025  # of `noisy_copy`: about .4 to .8 of its greedy choices agree


def config(name: str, **overrides) -> dict:
    """The config.json of one tiny model."""
    flat = {"model_type": name} | BASE | CONFIGS[name] | overrides
    text = flat.pop("text_config", None)
    if text is None:
        return flat
    outer = {"model_type": flat.pop("model_type"), "vocab_size": flat["vocab_size"]}
    return outer | {"text_config": flat | text}


def _build(cfg: dict) -> nn.Module:
    module = importlib.import_module(f"mlx_lm.models.{cfg['model_type']}")
    return module.Model(module.ModelArgs.from_dict(json.loads(json.dumps(cfg))))


def _random(path: str, weight: mx.array, tied: bool, key: mx.array) -> mx.array:
    """A weight's random value, by what it is used for."""
    noise = mx.random.normal(weight.shape, key=key)
    if weight.ndim >= 2:
        gain = HEAD if path.endswith("lm_head.weight") or (tied and path.endswith("embed_tokens.weight")) else MATRIX
        return noise * gain * weight.shape[-1] ** -0.5
    if tied and path.endswith("model.norm.weight"):
        return noise  # signs decorrelate the newest token from itself, or a tied head would repeat it
    return weight + NORM * noise


def make(name: str, seed: int = 0, **overrides) -> nn.Module:
    """A random float32 model of the architecture, evaluated. Overrides change its config."""
    return randomise(_build(config(name, **overrides)), seed)


def randomise(model: nn.Module, seed: int) -> nn.Module:
    """Give every weight a random value, and evaluate."""
    weights = tree_flatten(model.parameters())
    tied = not any(path.endswith("lm_head.weight") for path, _ in weights)
    keys = mx.random.split(mx.random.key(seed), len(weights))
    new = [(path, _random(path, w, tied, k).astype(mx.float32)) for (path, w), k in zip(weights, keys)]
    model.update(tree_unflatten(new))
    mx.eval(model.parameters())
    return model.eval()


def noisy_copy(model: nn.Module, scale: float = NOISE, seed: int = 1) -> nn.Module:
    """A draft that agrees in part: a copy with noise of `scale` times each weight's standard deviation."""
    copy = type(model)(model.args)
    weights = tree_flatten(model.parameters())
    keys = mx.random.split(mx.random.key(seed), len(weights))
    new = [(path, w + scale * mx.std(w) * mx.random.normal(w.shape, key=k)) for (path, w), k in zip(weights, keys)]
    copy.update(tree_unflatten(new))
    mx.eval(copy.parameters())
    return copy.eval()


ARCHITECTURES = {name: (lambda seed=0, name=name, **over: make(name, seed, **over)) for name in CONFIGS}


# --- tokenizer and folder

CHAT_TEMPLATE = (
    "{% for m in messages %}<bos>{{ m['role'] }}\n{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
)


def _byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in printable]
    return [chr(b) if b in printable else chr(256 + hidden.index(b)) for b in range(256)]


def hf_tokenizer(eos: str = "<eos>", chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """One id a byte, plus <bos>, <eos> and <pad>: no merges. `eos` is any token of it."""
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(_byte_alphabet())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<bos>", "<eos>", "<pad>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token=eos,
        pad_token="<pad>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def byte_tokenizer(eos_token_ids=None, **options) -> TokenizerWrapper:
    """The byte tokenizer as mlx-lm wraps it. Options as for `hf_tokenizer`."""
    return TokenizerWrapper(hf_tokenizer(**options), BPEStreamingDetokenizer, eos_token_ids=eos_token_ids)


def write_folder(
    path,
    name: str = "llama",
    *,
    seed: int = 0,
    vocab_size: int = VOCAB,
    model: nn.Module | None = None,
    eos: int | list[int] | None = EOS,
    tokenizer_eos: str = "<eos>",
    generation_config: dict | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    dtype: mx.Dtype = mx.float32,
    **overrides,
) -> Path:
    """Write a folder that `mlx_lm.load` reads: weights of `model`, or of `make(name, seed)` (then with `overrides`)."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    overrides["vocab_size"] = vocab_size
    model = model or make(name, seed, **overrides)
    weights = {p: w.astype(dtype) for p, w in tree_flatten(model.parameters())}
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    cfg = config(name, **overrides) | ({} if eos is None else {"eos_token_id": eos})
    (path / "config.json").write_text(json.dumps(cfg, indent=1))
    if generation_config is not None:
        (path / "generation_config.json").write_text(json.dumps(generation_config))
    hf_tokenizer(tokenizer_eos, chat_template).save_pretrained(path)
    return path


def padded_pair(name: str = "llama", seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """Target and draft whose heads have 264 and 320 rows for the 259 ids of the one tokenizer."""
    return make(name, seed, vocab_size=264), make(name, seed + 1, vocab_size=320)


class ScriptModel(nn.Module):
    """A fake model whose logits are looked up: no weights, so a test can say what is likely where.

    table (V, V): logits after each token; (T, V) with `by_position`: logits after each position, the last row from there on. The ids fed are written to its cache.
    """

    def __init__(self, table, by_position: bool = False):
        super().__init__()
        self._table = mx.array(table, dtype=mx.float32)
        self._by_position = by_position
        self.layers = [nn.Module()]
        mx.eval(self._table)

    def make_cache(self) -> list[KVCache]:
        return [KVCache()]

    def __call__(self, tokens: mx.array, cache=None) -> mx.array:
        batch, length = tokens.shape
        rows = tokens
        if self._by_position:
            positions = mx.arange(length) + (cache[0].offset if cache else 0)
            rows = mx.broadcast_to(mx.minimum(positions, self._table.shape[0] - 1), (batch, length))
        if cache:
            ids = mx.broadcast_to(tokens.astype(mx.float32)[:, None, :, None], (batch, 1, length, 4))
            cache[0].update_and_fetch(ids, ids)
        return self._table[rows]
