"""A small random model of each architecture that the installed mlx-lm has, and how each is handled.

mlx-lm's argument classes take from a config what they know, so one table of small sizes serves
most of them; what else an architecture needs stands in OWN. How a model is handled is found by
running it, never listed. Knows mlx-lm's models folder and the probe.
"""

from __future__ import annotations

import json
import pkgutil
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stdout
from dataclasses import MISSING, fields
from importlib import import_module
from io import StringIO
from multiprocessing import get_context
from types import ModuleType
from typing import Any, Iterator, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
from mlx.utils import tree_flatten, tree_map_with_path

from .folder import first_line
from .probe import profile

VOCAB, WINDOW, LAYERS = 259, 16, 4
FULL, SLIDING = "full_attention", "sliding_attention"
LARGEST = 20_000_000  # weights: more would not be a small model, but a size that the table misses

# A size, under each of the names that the classes have for it; and other fields that some require.
# A head is 32 wide, so that keys can be quantised in groups of 32.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "num_vocab", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "hidden_dim", "n_embd", "d_model", "model_dim", "block_dim", "dim_model_base"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_hidden_size", "intermediate_size_mlp", "dense_intermediate_size",
                     "shared_intermediate_size", "ff_intermediate_size", "block_ff_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_transformer_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads", "swa_num_attention_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_attention_groups", "swa_num_key_value_heads"), 1),
    **dict.fromkeys(("head_dim", "swa_head_dim", "swa_v_head_dim", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "q_lora_rank",
                     "kv_lora_rank", "o_lora_rank", "index_head_dim", "hidden_size_per_head", "kv_channels", "rotary_dim", "linear_key_head_dim",
                     "linear_value_head_dim", "mamba_head_dim", "mamba_d_head"), 32),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size", "moe_hidden_size",
                     "moe_shared_expert_intermediate_size", "share_expert_dim"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "linear_num_value_heads",
                     "mamba_num_heads", "mamba_n_heads"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "linear_num_key_heads",
                     "index_n_heads", "mamba_expand", "num_kv_shared_layers", "n_shared_head", "o_groups"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert", "n_group", "topk_group", "first_k_dense_replace",
                     "decoder_sparse_step", "moe_layer_freq", "n_groups", "mamba_n_groups", "num_kv_reuse_layers", "zero_expert_num",
                     "ngram_vocab_size_ratio"), 1),
    **dict.fromkeys(("sliding_window", "window_size", "sliding_window_size", "attention_window_size", "attention_chunk_size", "index_topk",
                     "ssm_state_size", "state_size", "mamba_d_state", "loop_window_size"), WINDOW),
    **dict.fromkeys(("conv_kernel", "linear_conv_kernel_dim", "mamba_d_conv", "conv1d_width", "conv_L_cache"), 4),
    **dict.fromkeys(("a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "decay_low_rank_dim", "laurel_rank", "hidden_size_per_layer_input"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "block_size", "model_max_length"), 4096),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rope_local_base_freq", "swa_rope_theta"), 10000.0),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "post_norm_eps"), 1e-5),
    **dict.fromkeys(("routed_scaling_factor", "logits_scaling", "attention_multiplier", "embedding_multiplier", "residual_multiplier",
                     "scale_emb", "output_multiplier", "rotary_pct", "partial_rotary_factor", "scale_depth", "block_ffn_dim_multiplier"), 1.0),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "conv_bias", "use_qkv_bias", "mamba_proj_bias", "use_cla", "use_expert_bias",
                     "block_auto_adjust_ff_dim", "linear_allow_neg_eigval", "use_mixed_mlp_moe", "tie_word_embeddings"), False),
    **dict.fromkeys(("use_conv_bias", "use_qk_norm", "qk_norm", "post_norm", "norm_topk_prob"), True),
    **dict.fromkeys(("logits_soft_cap", "final_logit_softcapping", "gegelu_limit"), 30.0),
    "layer_types": [SLIDING, FULL] * 2,
    "mlp_only_layers": [], "rope_scaling": None, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "hidden_act": "relu2",
}

ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
MINISTRAL = ROPE | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": WINDOW}
DELTA = dict(num_heads=2, head_dim=32, short_conv_kernel_size=4, kda_layers=[1, 3], full_attn_layers=[2, 4], gate_lower_bound=-5.0)
# In place of a text_config's own class: the architecture that reads it.
TEXT = {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "lfm2-vl": "lfm2", "mistral3": "ministral3", "pixtral": "llama", "qwen2_vl": "qwen2",
        "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe", "kimi_k25": "deepseek_v3", "qwen3_5_moe": "qwen3_5"}
OWN: dict[str, dict[str, Any]] = {
    "baichuan_m1": dict(sliding_window_layers=[1, 3], conv_window=2),
    **dict.fromkeys(("bailing_hybrid", "bailing_moe_linear"), dict(layer_group_size=2, group_norm_size=1, num_key_value_heads=2)),
    "cohere2": dict(sliding_window_pattern=2, logit_scale=1.0),
    "dbrx": dict(ffn_config=dict(ffn_hidden_size=64, moe_num_experts=4, moe_top_k=2), attn_config=dict(kv_n_heads=1, clip_qkv=8.0, rope_theta=1e4)),
    "deepseek_v2": dict(rope_scaling=dict(factor=2.0, original_max_position_embeddings=2048, beta_fast=32, beta_slow=1, mscale=0.7, mscale_all_dim=0.7)),
    "deepseek_v41": dict(compress_ratios=[0] * LAYERS, kv_source_layer_ids=[], index_source_layer_ids=[], head_dim=64, qk_rope_head_dim=32),
    "exaone4": dict(sliding_window_pattern="LG", rope_scaling=dict(rope_type="default")),
    "exaone_moe": dict(is_moe_layer=[False, True] * 2),
    "falcon_h1": dict(mamba_d_ssm=128),
    "gemma3_text": dict(sliding_window_pattern=2, query_pre_attn_scalar=32),
    "gemma3n": dict(num_hidden_layers=6, layer_types=[SLIDING, FULL] * 3, activation_sparsity_pattern=[0.5, 0.5, 0, 0, 0, 0], altup_num_inputs=3,
                    altup_coef_clip=120.0, altup_correct_scale=True, altup_active_idx=0),
    "gemma4_text": dict(num_hidden_layers=6, layer_types=[SLIDING, FULL] * 3, global_head_dim=64),
    "glm_moe_dsa": dict(rope_parameters=ROPE),
    "granitemoehybrid": dict(layer_types=["mamba", "attention"] * 2, mamba_n_heads=4, mamba_d_head=32, mamba_proj_bias=False, mamba_d_state=16,
                             mamba_d_conv=4, mamba_n_groups=1, mamba_conv_bias=True, shared_intermediate_size=32, num_local_experts=4,
                             num_experts_per_tok=2),
    "hunyuan": dict(cla_share_factor=2, rope_scaling=dict(type="dynamic", factor=1.0, alpha=1000.0)),
    "internlm2": dict(rope_scaling=dict(type="dynamic", factor=2.0), max_position_embeddings=32),
    "internlm3": dict(rope_scaling=dict(rope_type="dynamic", factor=2.0), max_position_embeddings=32),
    "jamba": dict(attn_layer_offset=1, attn_layer_period=2, expert_layer_offset=1, expert_layer_period=2),
    "kimi_k3": dict(hidden_act="situ", linear_attn_config=DELTA, activation_situ_beta=1.0, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=32,
                    qk_rope_head_dim=32, v_head_dim=32, num_experts=4, moe_intermediate_size=32, attn_res_block_size=2),
    "kimi_linear": dict(linear_attn_config=DELTA, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32),
    **dict.fromkeys(("lfm2", "lfm2_moe"), dict(layer_types=["conv", FULL] * 2, intermediate_size=96, block_multiple_of=32, num_dense_layers=1)),
    "llama": dict(layer_types=[SLIDING, FULL] * 2, sliding_window=WINDOW),
    **dict.fromkeys(("llama4", "llama4_text"), dict(interleave_moe_layer_step=2, num_experts_per_tok=1, no_rope_layers=[1, 1, 1, 0], floor_scale=8)),
    **dict.fromkeys(("longcat_flash", "longcat_flash_ngram"), dict(
        attention_method="MLA", zero_expert_type="identity", mla_scale_q_lora=True, mla_scale_kv_lora=True, hidden_size=96)),
    "mamba": dict(time_step_rank=8),
    "mamba2": dict(time_step_limit=[0.001, 10.0], time_step_rank="auto", num_heads=4, head_dim=32),
    "mellum": dict(rope_parameters={FULL: ROPE, SLIDING: ROPE}),
    "mimo_v2_flash": dict(hybrid_layer_pattern=[0, 1, 1, 0], moe_layer_freq=[0, 1, 1, 1], add_swa_attention_sink_bias=True,
                          add_full_attention_sink_bias=False),
    "minicpm3": dict(rope_scaling=dict(type="longrope", original_max_position_embeddings=2048, long_factor=[1.0] * 16, short_factor=[1.0] * 16)),
    "minimax_m3_vl": dict(index_block_size=4, index_topk_blocks=3, index_n_heads=1, index_head_dim=32),
    "ministral3": dict(rope_parameters=MINISTRAL),
    "mistral4": dict(rope_parameters=MINISTRAL),
    "muse_spark": dict(rope_parameters=ROPE, layer_rope_theta=[1e4, 0, 1e4, 0]),
    "nemotron-nas": dict(block_configs=[dict(attention=dict(n_heads_in_group=2), ffn=dict(ffn_mult=1.0))] * 2
                         + [dict(attention=dict(no_op=True), ffn=dict(ffn_mult=1.0))] * 2),
    "nemotron_h": dict(hybrid_override_pattern=["M", "*", "E", "-"], moe_intermediate_size=32, moe_shared_expert_intermediate_size=32, n_group=1,
                       n_routed_experts=4, n_shared_experts=1, topk_group=1, num_experts_per_tok=2, norm_topk_prob=True, routed_scaling_factor=1.0),
    "nemotron": dict(partial_rotary_factor=0.5),
    "openelm": dict(ffn_dim_divisor=32, num_query_heads=[2] * LAYERS, num_kv_heads=[1] * LAYERS, ffn_multipliers=[1.0] * LAYERS),
    "phi3small": dict(vocab_size=100352, dense_attention_every_n_layers=2),
    "plamo2": dict(full_attention_idx=[1, 3]),
    "qwen3_5": dict(full_attention_interval=2),
    "qwen3_5_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32),
    "qwen3_next": dict(full_attention_interval=2, partial_rotary_factor=0.5),
    "recurrent_gemma": dict(block_types=["recurrent", "attention"]),
    "spark2_5": dict(rope_parameters={FULL: ROPE, SLIDING: ROPE}, hidden_act="gelu"),
    "step3p5": dict(attention_other_setting=dict(num_attention_heads=2, num_attention_groups=1), moe_layers_enum="1,3"),
}


ONE_PASS, PLAIN, NOT_TRIED = "exact in one pass", "plain only", "not tried"


class Verdict(NamedTuple):
    """How an architecture is handled, one of the three above, and why it is not exact."""

    name: str
    handled: str
    reason: str | None = None


def verdicts() -> Iterator[Verdict]:
    """Of every architecture, in the order of their names. Each is run in another process, which it
    may end; what ends two is not tried."""
    pool = _pool()
    for name in names():
        for _ in range(2):
            try:
                found = pool.submit(verdict, name).result()
                break
            except BrokenProcessPool:
                pool, found = _pool(), Verdict(name, NOT_TRIED, "it ends the process that runs it")
        if found is not None:
            yield found
    pool.shutdown()


def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def verdict(name: str) -> Verdict | None:
    """Run a small model of it; None for a module that is no architecture."""
    said = StringIO()
    try:
        with redirect_stdout(said):
            module = _module(name)
        if not (hasattr(module, "ModelArgs") and hasattr(module, "Model")):
            return None
        found = profile(build(name))
    except SystemExit:  # where a package is missing that the module needs
        return Verdict(name, NOT_TRIED, f"its code ends the process: {first_line(said.getvalue())}")
    except Exception as e:
        return Verdict(name, NOT_TRIED, f"its small model can't be run here ({type(e).__name__}: {first_line(e)})")
    return Verdict(name, PLAIN if found.reason else ONE_PASS, found.reason)


def names() -> list[str]:
    """The modules among mlx-lm's models."""
    return [m.name for m in pkgutil.iter_modules(mlx_lm.models.__path__)]


def _module(name: str) -> ModuleType:
    return import_module(f"mlx_lm.models.{name}")


def config(name: str) -> dict[str, Any]:
    """The config.json of a small model."""
    module = _module(name)
    if "text_config" not in {f.name for f in fields(module.ModelArgs)}:
        return {"model_type": name} | _fields(module.ModelArgs, OWN.get(name, {}))
    if name in TEXT:
        text = config(TEXT[name])
        text = text.get("text_config", text) | OWN.get(name, {})
    else:
        text = {"model_type": name} | _fields(_text_args(module), OWN.get(name, {}))
    return {"model_type": name, "vocab_size": VOCAB, "text_config": text}


def _text_args(module: ModuleType) -> type:
    found = [c for n, c in vars(module).items() if n.startswith("Text") and n.endswith(("Args", "Config"))]
    if not found:
        raise ValueError("what its text_config holds is not known")
    return found[0]


def _fields(args: type, own: dict[str, Any]) -> dict[str, Any]:
    """What a class requires, and what it would otherwise make large."""
    found = {f.name: SMALL[f.name] for f in fields(args) if f.name in SMALL and (
        (f.default is MISSING and f.default_factory is MISSING)
        or f.name in ("head_dim", "num_key_value_heads", "rope_theta", "tie_word_embeddings")
        or (type(f.default) is int and f.default > SMALL[f.name]))}
    return found | own


def build(name: str) -> nn.Module:
    """A small model with random weights, evaluated. Raises whatever mlx-lm's code does, and ValueError."""
    module = _module(name)
    model = module.Model(module.ModelArgs.from_dict(json.loads(json.dumps(config(name)))))
    size = sum(w.size for _, w in tree_flatten(model.parameters()))
    if size > LARGEST:
        raise ValueError(f"its small model would have {size:,} weights")
    keys = iter(mx.random.split(mx.random.key(0), 2000))
    model.update(tree_map_with_path(lambda path, w: _random(w, next(keys)), model.parameters()))
    mx.eval(model)
    return model.eval()


def _random(weight: mx.array, key: mx.array) -> mx.array:
    if not mx.issubdtype(weight.dtype, mx.floating):
        return weight
    noise = mx.random.normal(weight.shape, key=key)
    return 1.5 * noise * weight.shape[-1] ** -0.5 if weight.ndim > 1 else weight.astype(mx.float32) + 0.3 * noise
