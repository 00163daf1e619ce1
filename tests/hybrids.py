"""Small random models of every architecture that keeps recurrent or convolution state, beside those of `tiny`."""

from functools import lru_cache

import tiny
from tiny import FOUR, FULL, MOE, SLIDING, WINDOW

from mlx_spec import architectures

LINEAR = dict(linear_num_value_heads=2, linear_num_key_heads=1, linear_key_head_dim=32, linear_value_head_dim=32, linear_conv_kernel_dim=4)
LATENT = dict(kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=32, num_key_value_heads=2)
BAILING = dict(
    MOE, **FOUR, num_shared_experts=1, first_k_dense_replace=1, layer_group_size=2, group_norm_size=2, n_group=1, topk_group=1, use_qk_norm=True,
    routed_scaling_factor=1.0,
)
MAMBA2 = dict(mamba_d_state=16, mamba_d_conv=4, mamba_n_groups=1, mamba_conv_bias=True, mamba_proj_bias=False)

CONFIGS = {
    # gated delta net
    "qwen3_next": dict(tiny.CONFIGS["qwen3_next"]),
    "qwen3_5": dict(LINEAR, **FOUR, full_attention_interval=2, rope_parameters=dict(type="default", rope_theta=10000.0, partial_rotary_factor=0.5)),
    "qwen3_5_moe": dict(
        LINEAR, **FOUR, **MOE, full_attention_interval=2, shared_expert_intermediate_size=32,
        rope_parameters=dict(type="default", rope_theta=10000.0, partial_rotary_factor=0.5),
    ),
    "kimi_linear": dict(
        LATENT, **FOUR, linear_attn_config=dict(kda_layers=[1, 3], full_attn_layers=[2, 4], num_heads=2, head_dim=32, short_conv_kernel_size=4),
        model_max_length=4096, num_experts=4, num_experts_per_token=2, moe_intermediate_size=32, num_shared_experts=1, first_k_dense_replace=1,
    ),
    "olmo_hybrid": dict(LINEAR, **FOUR, linear_allow_neg_eigval=True, attention_bias=False, layer_types=["linear_attention", FULL] * 2),
    # Mamba-2
    "mamba2": dict(tiny.CONFIGS["mamba2"]),
    "nemotron_h": dict(
        hybrid_override_pattern=list("M*M-M*"), attention_bias=False, mamba_num_heads=4, mamba_head_dim=32, mamba_proj_bias=False, ssm_state_size=16,
        conv_kernel=4, n_groups=1, mlp_bias=False, layer_norm_epsilon=1e-5, use_bias=False, use_conv_bias=True,
    ),
    "granitemoehybrid": dict(
        MAMBA2, **FOUR, layer_types=["mamba", "attention"] * 2, mamba_n_heads=4, mamba_d_head=32, attention_bias=False, embedding_multiplier=1.0,
        attention_multiplier=0.18, logits_scaling=1.0, residual_multiplier=1.0, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=64,
    ),
    "falcon_h1": dict(
        MAMBA2, **FOUR, mamba_d_ssm=128, mamba_d_head=32, mamba_n_heads=4, lm_head_multiplier=1.0, key_multiplier=1.0, embedding_multiplier=1.0,
        attention_out_multiplier=1.0, ssm_out_multiplier=1.0, ssm_in_multiplier=1.0, ssm_multipliers=[1.0] * 5, mlp_multipliers=[1.0, 1.0],
    ),
    "plamo2": dict(FOUR, hidden_size_per_head=32, mamba_d_state=16, mamba_d_conv=4, mamba_num_heads=4, mamba_step=2),
    # short convolutions
    "lfm2": dict(tiny.CONFIGS["lfm2"]),
    "lfm2_moe": dict(
        MOE, **FOUR, use_expert_bias=True, num_dense_layers=1, norm_eps=1e-5, conv_bias=False, conv_L_cache=3, layer_types=["conv", FULL] * 2,
    ),
    "gear": dict(FOUR, layer_types=["conv_mixer", FULL, "conv_mixer", SLIDING], query_pre_attn_scalar=32.0),
    "baichuan_m1": dict(FOUR, conv_window=2, sliding_window_layers=[1, 3]),
    # others, whose code knows no mask
    "jamba": dict(
        FOUR, attn_layer_offset=1, attn_layer_period=2, expert_layer_offset=1, expert_layer_period=2, mamba_d_conv=4, mamba_d_state=16, mamba_expand=2,
        num_experts=4, num_experts_per_tok=2,
    ),
    "mamba": dict(state_size=16, intermediate_size=128, conv_kernel=4, use_bias=False, use_conv_bias=True, time_step_rank=8),
    "rwkv7": dict(norm_eps=1e-5, a_low_rank_dim=16, v_low_rank_dim=16, gate_low_rank_dim=16, decay_low_rank_dim=16),
    "bailing_moe_linear": dict(BAILING),
    "bailing_hybrid": dict(BAILING, **LATENT, q_lora_rank=32),
    "longcat_flash_ngram": architectures.config("longcat_flash_ngram") | dict(num_layers=2),
    "recurrent_gemma": dict(
        FOUR, attention_bias=False, conv1d_width=4, logits_soft_cap=30.0, attention_window_size=WINDOW, block_types=["recurrent", "recurrent", "attention"],
    ),
}


@lru_cache(maxsize=None)
def make(name, seed=0):
    cfg = {"model_type": name} | tiny.BASE | CONFIGS[name]
    return tiny.randomise(tiny._build(cfg), seed)
