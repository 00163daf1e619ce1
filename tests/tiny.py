"""Small random models, one for every architecture the tests need, and the tokenizer that goes with them.

A random model usually repeats two or three ids for ever, accepts every draft, and so hides every cache fault. These are scaled until a greedy rollout
wanders. It knows mlx-lm's model classes and, of mlx_spec, the table of small configs that `pairs --architectures` runs.
"""

import importlib
import json
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import KVCache
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_spec import architectures

VOCAB = 259  # 256 bytes, <bos>, <eos>, <pad>
BOS, EOS, PAD = 256, 257, 258
WINDOW = 16

TINY_SW, TINY_HYB = "llama_sw", "qwen3_next"  # windows next to full layers, recurrent layers next to full ones
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

FOUR = dict(num_hidden_layers=4)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)
DEEPSEEK_MOE = MOE | dict(n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1, routed_scaling_factor=1.0)
SHARED_KEYS = dict(
    num_hidden_layers=6,
    num_kv_shared_layers=2,
    layer_types=[SLIDING, FULL] * 3,
    hidden_size_per_layer_input=16,
    vocab_size_per_layer_input=VOCAB,
    final_logit_softcapping=30.0,
)
LATENT = dict(num_key_value_heads=2, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=32, qk_nope_head_dim=32)
MINISTRAL_ROPE = dict(rope_theta=10000.0, rope_type="default", llama_4_scaling_beta=0.1, original_max_position_embeddings=WINDOW)

# name -> what its config has beyond BASE. `model_type` defaults to the name; with a `text_config`, everything nests in it.
CONFIGS = {
    # full layers only
    "llama": dict(),
    "qwen2": dict(),
    "qwen3": dict(),
    "qwen3_moe": dict(MOE, decoder_sparse_step=1, mlp_only_layers=[0]),
    "phi3": dict(),
    "glm4_moe": dict(
        DEEPSEEK_MOE, num_hidden_layers=3, first_k_dense_replace=1, rope_scaling=None, use_qk_norm=True, attention_bias=True,
        partial_rotary_factor=0.5,
    ),
    "deepseek_v3": dict(DEEPSEEK_MOE, **LATENT, v_head_dim=32, first_k_dense_replace=1),
    "minicpm3": dict(
        LATENT, scale_depth=1.4, scale_emb=1.0, dim_model_base=64,
        rope_scaling={"type": "longrope", "original_max_position_embeddings": 2048, "long_factor": [1.0] * 16, "short_factor": [1.0] * 16},
    ),
    "gemma2": dict(query_pre_attn_scalar=32),
    # full layers and sliding windows
    "llama_sw": dict(model_type="llama", layer_types=[SLIDING, FULL] * 2, **FOUR),
    "ministral3": dict(layer_types=[SLIDING, FULL] * 2, rope_parameters=MINISTRAL_ROPE, **FOUR),
    "mistral3": dict(text_config=dict(model_type="ministral3", rope_parameters=MINISTRAL_ROPE)),
    "mistral3_llama": dict(model_type="mistral3", text_config=dict(model_type="llama")),
    "gemma3_text": dict(sliding_window_pattern=2, query_pre_attn_scalar=32, **FOUR),
    "gpt_oss": dict(MOE, num_local_experts=4, layer_types=[SLIDING, FULL] * 2, **FOUR),
    "exaone4": dict(sliding_window_pattern="LG", layer_types=[SLIDING, FULL] * 2, rope_scaling={"rope_type": "default"}, **FOUR),
    "olmo3": dict(layer_types=[SLIDING, FULL] * 2, **FOUR),
    "cohere2": dict(sliding_window_pattern=2, logit_scale=1.0, **FOUR),
    "mimo_v2_flash": dict(
        DEEPSEEK_MOE, **FOUR, hybrid_layer_pattern=[0, 1, 1, 0], moe_layer_freq=[0, 1, 1, 1], add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False, sliding_window_size=WINDOW, layernorm_epsilon=1e-5, swa_rope_theta=10000.0, swa_num_attention_heads=2,
        swa_num_key_value_heads=2, v_head_dim=32, swa_head_dim=32, swa_v_head_dim=32, partial_rotary_factor=0.5,
        scoring_func="sigmoid", topk_method="noaux_tc",
    ),
    "laguna": dict(MOE, layer_types=[FULL, SLIDING] * 2, shared_expert_intermediate_size=32, **FOUR),
    # layers that read the keys of an earlier one
    "gemma3n": dict(text_config=dict(
        SHARED_KEYS, model_type="gemma3n_text", activation_sparsity_pattern=[0.5] * 2 + [0.0] * 4, altup_num_inputs=3, altup_coef_clip=120.0,
        altup_correct_scale=True, altup_active_idx=0, laurel_rank=8, rope_local_base_freq=10000.0,
    )),
    "gemma4_text": dict(SHARED_KEYS, global_head_dim=64),
    "gemma4": dict(text_config=dict(SHARED_KEYS, model_type="gemma4_text", global_head_dim=64)),
    "afm7": dict(hidden_dim=64, num_layers=4, num_kv_reuse_layers=2, num_heads=2, num_kv_heads=1),
    # rotary scaling that depends on the length
    "internlm3": dict(rope_scaling={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=32),
    "internlm2": dict(rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=32),
    # several caches in a layer, attention in chunks, positions that are counted in Python
    **{name: architectures.config(name) for name in ("minimax_m3_vl", "llama4", "llama4_text")},
    "gpt_bigcode": architectures.config("gpt_bigcode") | dict(n_layer=2),
    "deepseek_v32": architectures.config("deepseek_v32") | dict(num_hidden_layers=2),
    "longcat_flash": architectures.config("longcat_flash") | dict(num_layers=2),
    # caches that cannot be rewound
    "qwen3_next": dict(
        MOE, **FOUR, linear_num_value_heads=2, linear_num_key_heads=1, linear_key_head_dim=32, linear_value_head_dim=32, linear_conv_kernel_dim=4,
        decoder_sparse_step=1, mlp_only_layers=[], shared_expert_intermediate_size=32, partial_rotary_factor=0.5, full_attention_interval=2,
    ),
    "mamba2": dict(
        num_heads=4, state_size=16, conv_kernel=4, n_groups=1, use_bias=False, use_conv_bias=True, layer_norm_epsilon=1e-5,
        time_step_limit=[0.001, 10.0], time_step_rank="auto", intermediate_size=128,
    ),
    "lfm2": dict(
        layer_types=["conv", FULL] * 2, norm_eps=1e-5, conv_bias=False, conv_L_cache=3, block_dim=64, block_ff_dim=96, block_multiple_of=32,
        block_ffn_dim_multiplier=1.0, block_auto_adjust_ff_dim=False, **FOUR,
    ),
}

RECURRENT = ("qwen3_next", "mamba2", "lfm2")
LENGTH_DEPENDENT = ("internlm2", "internlm3")  # one pass over many rows gives other logits than single rows
EXACT = tuple(name for name in CONFIGS if name not in RECURRENT + LENGTH_DEPENDENT)

# Standard deviations: of the logits, of a matrix's output for unit input, of norm weights around 1. Norms of queries and keys are SHARP times larger:
# soft attention averages over the whole context, and then a rollout falls into a short loop.
HEAD, MATRIX, NORM, SHARP = 4.0, 1.8, 0.5, 1.7

HEADS = ("lm_head.weight", "output.weight")
EMBEDDINGS = ("embed_tokens.weight", "model.embedding.weight")
FINAL_NORMS = ("model.norm.weight", "output_norm.weight", "embedding_norm.weight")
NORMS_PLUS_ONE = ("gemma2", "gemma3_text")  # their norms multiply by 1 + weight
SHARP_OF = {"gemma3n": 1.0, "gemma4": 0.6, "gemma4_text": 0.6}  # their attention does not divide by sqrt(head_dim)

NOISE = 0.02  # of `noisy_copy`: .4 to .8 of its greedy choices agree, with these exceptions:
NOISE_OF = {
    **dict.fromkeys(("gemma2", "gemma3n", "mamba2", "lfm2"), 0.05),
    **dict.fromkeys(("qwen2", "cohere2"), 0.03),
    **dict.fromkeys(("longcat_flash", "minimax_m3_vl"), 0.01),
    "gpt_bigcode": 0.1,
    **dict.fromkeys(("gpt_oss", "mimo_v2_flash", "laguna"), 0.015),
}
NOISE_KEY = 1_000_000  # keeps the noise of one seed apart from the weights of that seed


def config(name: str, **overrides) -> dict:
    """The config.json of one tiny model."""
    flat = {"model_type": name} | BASE | CONFIGS[name] | overrides
    text = flat.pop("text_config", None)
    if text is None:
        return flat
    outer = {"model_type": flat.pop("model_type"), "vocab_size": flat["vocab_size"]}
    return outer | {"text_config": flat | text | overrides}


def _build(cfg: dict) -> nn.Module:
    module = importlib.import_module(f"mlx_lm.models.{cfg['model_type']}")
    return module.Model(module.ModelArgs.from_dict(json.loads(json.dumps(cfg))))


def _random(path: str, weight: mx.array, *, tied: bool, plus_one: bool, sharp: float, key: mx.array) -> mx.array:
    """A weight's random value, by what it is used for."""
    noise = mx.random.normal(weight.shape, key=key)
    if path.endswith("wpe.weight"):  # the only thing that keeps gpt_bigcode from repeating itself
        return 8 * noise
    if weight.ndim >= 2:
        is_head = path.endswith(EMBEDDINGS if tied else HEADS)
        return noise * (HEAD if is_head else MATRIX) * weight.shape[-1] ** -0.5
    if path.endswith(FINAL_NORMS):  # random signs, or with a tied head the newest token would be the likeliest again
        return (noise if tied else 1 + NORM * noise) - plus_one
    if path.endswith(("q_norm.weight", "k_norm.weight")):
        return sharp * (1 + NORM * noise) - plus_one
    if path.endswith(("quant_key_scale", "quant_value_scale")):
        return 0.05 * weight  # afm7 rounds keys and values to multiples of this
    if path.endswith(("bias", "A_log")):
        return NORM * noise
    return weight + NORM * noise


def make(name: str, seed: int = 0, **overrides) -> nn.Module:
    """A random float32 model of the architecture, evaluated. Overrides change its config."""
    return randomise(_build(config(name, **overrides)), seed)


def randomise(model: nn.Module, seed: int) -> nn.Module:
    """Give every weight a random value, and evaluate."""
    weights = tree_flatten(model.parameters())
    traits = dict(
        tied=not any(path.endswith(HEADS) for path, _ in weights),
        plus_one=model.model_type in NORMS_PLUS_ONE,
        sharp=SHARP_OF.get(model.model_type, SHARP),
    )
    keys = mx.random.split(mx.random.key(seed), len(weights))
    new = [(path, _random(path, w, key=k, **traits).astype(mx.float32)) for (path, w), k in zip(weights, keys)]
    model.update(tree_unflatten(new))
    mx.eval(model.parameters())
    return model.eval()


def noisy_copy(model: nn.Module, scale: float | None = None, seed: int = 1) -> nn.Module:
    """A draft that agrees in part: a copy with noise of `scale` times each weight's standard deviation."""
    scale = NOISE_OF.get(model.model_type, NOISE) if scale is None else scale
    copy = type(model)(getattr(model, "args", None) or model.config)
    weights = tree_flatten(model.parameters())
    keys = mx.random.split(mx.random.key(NOISE_KEY + seed), len(weights))
    new = [(path, w + scale * mx.std(w) * mx.random.normal(w.shape, key=k)) for (path, w), k in zip(weights, keys)]
    copy.update(tree_unflatten(new))
    mx.eval(copy.parameters())
    return copy.eval()


ARCHITECTURES = {name: partial(make, name) for name in CONFIGS}


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

    table (V, V): logits after each token; (T, V) with `by_position`: logits after each position, the last row from there on.
    The ids fed are written to its cache.
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


class ScriptLayer(nn.Module):
    """Changes nothing, and writes what it sees to its cache."""

    def __call__(self, x: mx.array, cache=None) -> mx.array:
        if cache is not None:
            cache.update_and_fetch(x[:, None], x[:, None])
        return x


class ScriptTrunk(nn.Module):
    """Hidden states that are one-hot vectors of the tokens."""

    def __init__(self, vocab: int):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, vocab)
        self.embed_tokens.weight = mx.eye(vocab)
        self.layers = [ScriptLayer()]

    def __call__(self, tokens: mx.array, cache=None) -> mx.array:
        x = self.embed_tokens(tokens)
        for layer, c in zip(self.layers, cache or [None]):
            x = layer(x, c)
        return x


class ScriptStates(nn.Module):
    """A ScriptModel with a trunk and a head, for drafts on hidden states. table (V, V): logits after each token."""

    def __init__(self, table):
        super().__init__()
        table = mx.array(table, dtype=mx.float32)
        self.model = ScriptTrunk(len(table))
        self.lm_head = nn.Linear(*table.shape, bias=False)
        self.lm_head.weight = table.T
        mx.eval(self.parameters())

    def make_cache(self) -> list[KVCache]:
        return [KVCache()]

    def __call__(self, tokens: mx.array, cache=None) -> mx.array:
        return self.lm_head(self.model(tokens, cache))
