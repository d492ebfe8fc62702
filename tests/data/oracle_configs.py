"""Tiny config.json contents, one builder and one table of variants per family.

Knows the keys that each family's published files carry. Every decisive number differs from its
class default, so code that assumes a default is caught. Does not know how the checkpoints are
dressed or made.
"""

from __future__ import annotations

from typing import Any

VOCAB = 101
HIDDEN = 32
WIDE = dict(hidden_size=64, intermediate_size=64)
"""Overrides for quantized trees: every width divides by 64."""
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


def kinds(pattern: str) -> list[str]:
    return [{"s": SLIDING, "f": FULL, "l": LINEAR}[letter] for letter in pattern]


def decoder(model_type: str, architecture: str, **over: Any) -> dict[str, Any]:
    """What every Llama-lineage config.json has."""
    config = dict(
        architectures=[architecture], model_type=model_type, vocab_size=VOCAB, hidden_size=HIDDEN,
        intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        hidden_act="silu", max_position_embeddings=2048, rms_norm_eps=3e-5, rope_theta=30000.0,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, torch_dtype="bfloat16",
    )  # fmt: skip
    return config | over


def yarn(factor: float, original: int = 4096, **over: Any) -> dict[str, Any]:
    scaling = dict(rope_type="yarn", factor=factor, original_max_position_embeddings=original)
    return scaling | over


# --- dense ----------------------------------------------------------------------------------------

LLAMA3_ROPE = dict(
    rope_type="llama3", factor=8.0, high_freq_factor=4.0, low_freq_factor=1.0,
    original_max_position_embeddings=64,
)  # fmt: skip
LLAMA = {
    "base": {},
    "llama3": dict(head_dim=16, rope_theta=3000.0, rope_scaling=LLAMA3_ROPE,
                   tie_word_embeddings=True, max_position_embeddings=512, eos_token_id=[2, 3]),
    "linear": dict(rope_scaling=dict(type="linear", factor=4.0)),
    "yarn": dict(rope_scaling=yarn(8.0, beta_fast=3.0, beta_slow=0.25),
                 max_position_embeddings=32768),
    "bias": dict(attention_bias=True, mlp_bias=True),
    "headdim": dict(head_dim=24),
}  # fmt: skip
MISTRAL = {
    "sliding": dict(sliding_window=9),
    "nemo": dict(sliding_window=None, head_dim=24, rope_theta=1e6),
}
UNWINDOWED = dict(use_sliding_window=False, sliding_window=32768, max_window_layers=2)
WINDOWED = dict(use_sliding_window=True, sliding_window=9, max_window_layers=1)
QWEN2 = {
    "base": dict(tie_word_embeddings=True),
    "untied": {},
    "sliding": WINDOWED,
    "yarn": dict(rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=4096),
                 max_position_embeddings=16384),
}  # fmt: skip
QWEN3 = {
    "base": dict(tie_word_embeddings=True),
    "untied": {},
    "bias": dict(attention_bias=True),
    "sliding": WINDOWED,
    "yarn": dict(rope_scaling=yarn(4.0), max_position_embeddings=16384),
}


def llama(**over: Any) -> dict[str, Any]:
    return decoder("llama", "LlamaForCausalLM", attention_bias=False, mlp_bias=False) | over


def mistral(**over: Any) -> dict[str, Any]:
    return decoder("mistral", "MistralForCausalLM", **over)


def qwen2(**over: Any) -> dict[str, Any]:
    return decoder("qwen2", "Qwen2ForCausalLM", **UNWINDOWED) | over


def qwen3(**over: Any) -> dict[str, Any]:
    base = dict(head_dim=24, attention_bias=False, rope_scaling=None)
    return decoder("qwen3", "Qwen3ForCausalLM", **base, **UNWINDOWED) | over


def spark2_5(**over: Any) -> dict[str, Any]:
    rope = {
        FULL: dict(rope_theta=6e5, partial_rotary_factor=0.25, rope_type="default"),
        SLIDING: dict(rope_theta=9000.0, partial_rotary_factor=1.0, rope_type="default"),
    }
    config = decoder(
        "spark2_5", "Spark2_5ForCausalLM", num_hidden_layers=4, head_dim=32, num_attention_heads=2,
        num_key_value_heads=1, hidden_act="gelu", gate_attn_act_mode="sigmoid",
        headwise_attn_output_gate=True, sliding_window=9, layer_types=kinds("ssfs"),
        rope_parameters=rope, attention_bias=False, mlp_bias=False, tie_word_embeddings=True,
    )  # fmt: skip
    del config["rope_theta"]
    return config | over


SPARK = {
    "base": {},
    "untied": dict(tie_word_embeddings=False),
    "bias": dict(attention_bias=True, mlp_bias=True),
}

# --- mixtures -------------------------------------------------------------------------------------

MIXTRAL = {"base": {}, "sliding": dict(sliding_window=9)}
QWEN3_MOE = {
    "base": {},
    "nonorm": dict(norm_topk_prob=False),
    "mixed": dict(decoder_sparse_step=2, mlp_only_layers=[3], num_hidden_layers=4),
    "yarn": dict(rope_scaling=yarn(4.0), max_position_embeddings=16384),
}
GPT_OSS = {"mxfp4": {}, "truncate": dict(truncate=True), "bf16": dict(packed=False)}
DEEPSEEK_YARN = dict(
    type="yarn", factor=8.0, beta_fast=3, beta_slow=0.25, mscale=0.707, mscale_all_dim=0.707,
    original_max_position_embeddings=4096,
)  # fmt: skip
DEEPSEEK = {
    "lite": {},
    "full": dict(q_lora_rank=48, n_group=3, topk_group=2, topk_method="group_limited_greedy",
                 routed_scaling_factor=4.0),
    "noyarn": dict(rope_scaling=None),
    "mscale": dict(rope_scaling=DEEPSEEK_YARN | dict(mscale=1.0, mscale_all_dim=0.5)),
}  # fmt: skip


def mixtral(**over: Any) -> dict[str, Any]:
    base = dict(num_local_experts=6, num_experts_per_tok=2, intermediate_size=32,
                sliding_window=None, rope_theta=1e6)  # fmt: skip
    return decoder("mixtral", "MixtralForCausalLM", **base | over)


def qwen3_moe(**over: Any) -> dict[str, Any]:
    base = dict(
        head_dim=24, attention_bias=False, decoder_sparse_step=1, mlp_only_layers=[],
        moe_intermediate_size=32, norm_topk_prob=True, num_experts=6, num_experts_per_tok=3,
        rope_scaling=None, use_sliding_window=False, sliding_window=None, max_window_layers=2,
    )  # fmt: skip
    return decoder("qwen3_moe", "Qwen3MoeForCausalLM", **base | over)


def gpt_oss(truncate: bool = False, packed: bool = True, **over: Any) -> dict[str, Any]:
    """`packed` leaves the experts in mxfp4, as published."""
    base = dict(
        hidden_size=64 if packed else HIDDEN, head_dim=16, intermediate_size=32,
        num_hidden_layers=3, layer_types=kinds("sfs"), attention_bias=True,
        initial_context_length=256, max_position_embeddings=4096,
        sliding_window=9, num_local_experts=4, num_experts_per_tok=2, experts_per_token=2,
        rope_theta=90000.0, swiglu_limit=7.0, pad_token_id=0,
        rope_scaling=yarn(16.0, 256, beta_fast=8.0, beta_slow=0.5, truncate=truncate),
    )  # fmt: skip
    config = decoder("gpt_oss", "GptOssForCausalLM", **base | over)
    if packed:
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
        config["quantization_config"] = dict(
            quant_method="mxfp4", modules_to_not_convert=[*kept, "lm_head"]
        )
    return config


def deepseek_v2(**over: Any) -> dict[str, Any]:
    base = dict(
        num_hidden_layers=3, rms_norm_eps=1e-3, rope_theta=20000.0, rope_scaling=DEEPSEEK_YARN,
        max_position_embeddings=32768,
        num_key_value_heads=4, attention_bias=False, first_k_dense_replace=1, kv_lora_rank=32,
        q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
        moe_intermediate_size=16, moe_layer_freq=1, n_routed_experts=6, n_shared_experts=2,
        num_experts_per_tok=3, n_group=1, topk_group=1, topk_method="greedy",
        norm_topk_prob=False, routed_scaling_factor=1.0, scoring_func="softmax",
    )  # fmt: skip
    return decoder("deepseek_v2", "DeepseekV2ForCausalLM", **base | over)


# --- gemma ----------------------------------------------------------------------------------------


def gemma3(**over: Any) -> dict[str, Any]:
    base = dict(
        num_hidden_layers=4, num_key_value_heads=1, head_dim=24, rms_norm_eps=2e-3,
        sliding_window=9,
        sliding_window_pattern=3, query_pre_attn_scalar=20, rope_theta=400000.0,
        rope_local_base_freq=9000.0, hidden_activation="gelu_pytorch_tanh",
        final_logit_softcapping=None, attn_logit_softcapping=None, attention_bias=False,
        tie_word_embeddings=True, eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    config = decoder("gemma3_text", "Gemma3ForCausalLM", **base | over)
    del config["hidden_act"]
    return config


def gemma3_wrapped() -> dict[str, Any]:
    """The 4B and larger: a vision tower beside it, and linear scaling on global layers only."""
    text = gemma3(rope_scaling=dict(rope_type="linear", factor=8.0), layer_types=kinds("sfssf"),
                  num_hidden_layers=5)  # fmt: skip
    del text["architectures"], text["sliding_window_pattern"]
    vision = dict(model_type="siglip_vision_model", hidden_size=16, intermediate_size=16,
                  num_hidden_layers=1, num_attention_heads=2, image_size=16,
                  patch_size=8)  # fmt: skip
    return dict(
        architectures=["Gemma3ForConditionalGeneration"], model_type="gemma3", text_config=text,
        vision_config=vision, mm_tokens_per_image=4, image_token_index=200, boi_token_index=201,
        eoi_token_index=202, tie_word_embeddings=True, torch_dtype="bfloat16",
    )  # fmt: skip


GEMMA4 = {
    "26b-a4b": dict(attention_k_eq_v=True, num_global_key_value_heads=1, enable_moe_block=True,
                    num_experts=6, top_k_experts=2, moe_intermediate_size=16,
                    use_bidirectional_attention="vision"),
    "31b": dict(attention_k_eq_v=True, num_key_value_heads=4, num_global_key_value_heads=1,
                use_bidirectional_attention="vision"),
    "e2b": dict(num_hidden_layers=5, layer_types=kinds("sfssf"), num_key_value_heads=1,
                num_kv_shared_layers=2, hidden_size_per_layer_input=16, use_double_wide_mlp=True),
    "e4b": dict(num_hidden_layers=4, layer_types=kinds("sfsf"), num_kv_shared_layers=2,
                hidden_size_per_layer_input=16),
}  # fmt: skip
UNIFIED_LACKS = (
    "hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block",
    "num_experts", "top_k_experts", "moe_intermediate_size",
)  # fmt: skip


def gemma4_text(**over: Any) -> dict[str, Any]:
    rope = {
        FULL: dict(partial_rotary_factor=0.25, rope_theta=4e4, rope_type="proportional"),
        SLIDING: dict(rope_theta=900.0, rope_type="default"),
    }
    config = dict(
        model_type="gemma4_text", vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        global_head_dim=32, num_global_key_value_heads=None, layer_types=kinds("ssf"),
        hidden_activation="gelu_pytorch_tanh", max_position_embeddings=4096, rms_norm_eps=2e-3,
        rope_parameters=rope, sliding_window=9, final_logit_softcapping=12.0,
        attention_bias=False, attention_k_eq_v=False, num_kv_shared_layers=0,
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=VOCAB,
        use_double_wide_mlp=False, enable_moe_block=False, num_experts=None, top_k_experts=None,
        moe_intermediate_size=None, use_bidirectional_attention=None, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=2, eos_token_id=1, dtype="bfloat16",
    )  # fmt: skip
    return config | over


def gemma4(variant: str, **over: Any) -> dict[str, Any]:
    if variant.endswith("-text"):
        text = gemma4_text(**GEMMA4[variant.removesuffix("-text")] | over)
        return text | dict(architectures=["Gemma4ForCausalLM"])
    wrapper = dict(image_token_id=200, video_token_id=201, audio_token_id=202, boi_token_id=203,
                   eoi_token_id=204, tie_word_embeddings=True, dtype="bfloat16")  # fmt: skip
    if variant == "12b":  # no tower: pictures enter through a projection
        text = gemma4_text(**GEMMA4["31b"] | dict(model_type="gemma4_unified_text") | over)
        text = {k: v for k, v in text.items() if k not in UNIFIED_LACKS}
        return dict(architectures=["Gemma4UnifiedForConditionalGeneration"],
                    model_type="gemma4_unified", text_config=text, **wrapper)  # fmt: skip
    vision = dict(model_type="gemma4_vision", hidden_size=16, intermediate_size=16, patch_size=4,
                  num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
                  position_embedding_size=16)  # fmt: skip
    return dict(
        architectures=["Gemma4ForConditionalGeneration"], model_type="gemma4",
        text_config=gemma4_text(**GEMMA4[variant] | over), vision_config=vision,
        audio_config=None, boa_token_id=205, eoa_token_index=206, **wrapper,
    )  # fmt: skip


# --- muse -----------------------------------------------------------------------------------------

MUSE = ("base", "backward", "tied", "mlx", "flat")


def muse_text(spelled: bool = True, tied: bool = False, **over: Any) -> dict[str, Any]:
    count = 5  # not a multiple of 4: counting the pattern from the front gives another one
    text = dict(
        model_type="muse_glimmer_text", vocab_size=VOCAB, hidden_size=HIDDEN,
        intermediate_size=48, num_hidden_layers=count, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, hidden_activation="silu", attention_bias=False,
        max_position_embeddings=4096, rms_norm_eps=2e-4, post_norm_eps=4e-3, sliding_window=9,
        rope_parameters=dict(rope_theta=4000.0, rope_type="default"), qk_scale_factor=2.9,
        final_logit_softcapping=9.0, output_multiplier=0.31, tie_word_embeddings=tied,
        bos_token_id=1, eos_token_id=2, dtype="bfloat16",
    )  # fmt: skip
    if spelled:
        text["layer_types"] = kinds("fsssf")
        text["layer_rope_theta"] = [0 if kind == FULL else 4000.0 for kind in text["layer_types"]]
    return text | over


def muse_glimmer(variant: str, **over: Any) -> dict[str, Any]:
    tied = variant == "tied"
    vision = dict(model_type="muse_glimmer_vision", patch_size=4, pos_emb_height=4,
                  pos_emb_width=4, num_attention_heads=2, num_hidden_layers=1, hidden_size=16,
                  intermediate_size=16, max_position_embeddings=16)  # fmt: skip
    return dict(
        architectures=["MuseGlimmerForConditionalGeneration"], model_type="muse_glimmer",
        text_config=muse_text(variant != "backward", tied, **over), vision_config=vision,
        out_hidden_size=HIDDEN, projector_hidden_size=16, projector_hidden_act="gelu",
        image_token_id=200, video_token_id=201, tie_word_embeddings=tied, dtype="bfloat16",
    )  # fmt: skip


# --- qwen3.5 --------------------------------------------------------------------------------------

QWEN3_5 = ("base", "text", "tied", "irregular")
QWEN3_5_MOE = ("base", "text", "irregular")


def qwen3_5_text(moe: bool, variant: str, **over: Any) -> dict[str, Any]:
    rope = dict(mrope_interleaved=True, mrope_section=[2, 1, 1], partial_rotary_factor=0.25,
                rope_theta=700.0, rope_type="default")  # fmt: skip
    text = dict(
        model_type="qwen3_5_text", vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        hidden_act="silu", max_position_embeddings=4096, rms_norm_eps=3e-5, attention_bias=False,
        attn_output_gate=True, full_attention_interval=3, layer_types=kinds("llf"),
        linear_conv_kernel_dim=4, linear_key_head_dim=32, linear_value_head_dim=16,
        linear_num_key_heads=2, linear_num_value_heads=6, mamba_ssm_dtype="float32",
        mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, partial_rotary_factor=0.25,
        rope_parameters=rope, tie_word_embeddings=variant == "tied", eos_token_id=2,
        dtype="bfloat16",
    )  # fmt: skip
    if variant == "irregular":  # the list is the truth, whatever the interval says
        text["layer_types"] = kinds("lfl")
    if moe:
        del text["intermediate_size"]
        text |= dict(model_type="qwen3_5_moe_text", moe_intermediate_size=16, num_experts=5,
                     shared_expert_intermediate_size=32, num_experts_per_tok=2)  # fmt: skip
    return text | over


def qwen4_exp_text(variant: str, **over: Any) -> dict[str, Any]:
    rope = dict(mrope_interleaved=True, mrope_section=[2, 1, 1], partial_rotary_factor=0.5,
                rope_theta=700.0, rope_type="default")  # fmt: skip
    text = dict(
        model_type="qwen4_exp_text", vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, hidden_act="silu",
        max_position_embeddings=4096, rms_norm_eps=3e-5, attention_bias=False,
        layer_types=kinds("lflf"), linear_conv_kernel_dim=4, linear_key_head_dim=32,
        linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=6,
        num_experts=5, num_experts_per_tok=2, norm_topk_prob=True, moe_intermediate_size=16,
        shared_expert_intermediate_size=32, hc_count=3, hc_lowrank=12, output_gate_type="sigmoid",
        ple_layer_ids=[3], ple_embed_dim=48, ple_conv_kernel_size=3, ngram_size=3,
        heads_per_ngram=3, ngram_vocab_size_base=50, make_ngram_vocab_size_divisible_by=16,
        split_ngram_parts=4, seed=77, indexer_n_heads=3, indexer_kv_heads=1, indexer_head_dim=32,
        indexer_budget=16, indexer_compress_ratio=4, rope_parameters=rope,
        tie_word_embeddings=False, eos_token_id=7, dtype="bfloat16",
    )  # fmt: skip
    if variant == "text":  # the other choice of everything
        del text["output_gate_type"]
        text |= dict(ple_layer_ids=[3, 1], ngram_size=4, heads_per_ngram=2, indexer_budget=15,
                     indexer_compress_ratio=3, tie_word_embeddings=True, attention_bias=True,
                     norm_topk_prob=False, eos_token_id=[7, 2])  # fmt: skip
    return text | over


def qwen4_exp(variant: str, **over: Any) -> dict[str, Any]:
    text = qwen4_exp_text(variant, **over)
    if variant == "text":
        return text | dict(architectures=["Qwen4ExpForCausalLM"])
    vision = dict(
        model_type="qwen4_exp_vision", depth=1, hidden_size=16, intermediate_size=16, num_heads=2,
        in_channels=3, patch_size=2, spatial_merge_size=1, temporal_patch_size=1,
        out_hidden_size=HIDDEN, num_position_embeddings=16,
    )  # fmt: skip
    return dict(
        architectures=["Qwen4ExpForConditionalGeneration"], model_type="qwen4_exp",
        text_config=text, vision_config=vision, image_token_id=200, video_token_id=201,
        vision_start_token_id=202, vision_end_token_id=203, tie_word_embeddings=False,
        dtype="bfloat16",
    )  # fmt: skip


def qwen3_5(variant: str, moe: bool = False, **over: Any) -> dict[str, Any]:
    text, stem = qwen3_5_text(moe, variant, **over), "Qwen3_5Moe" if moe else "Qwen3_5"
    if variant == "text":
        return text | dict(architectures=[f"{stem}ForCausalLM"])
    model_type = "qwen3_5_moe" if moe else "qwen3_5"
    vision = dict(
        model_type=f"{model_type}_vision", deepstack_visual_indexes=[], depth=1, hidden_size=16,
        intermediate_size=16, num_heads=2, in_channels=3, patch_size=2, spatial_merge_size=1,
        temporal_patch_size=1, out_hidden_size=HIDDEN, num_position_embeddings=16,
    )  # fmt: skip
    return dict(
        architectures=[f"{stem}ForConditionalGeneration"], model_type=model_type, text_config=text,
        vision_config=vision, image_token_id=200, video_token_id=201, vision_start_token_id=202,
        vision_end_token_id=203, tie_word_embeddings=variant == "tied", dtype="bfloat16",
    )  # fmt: skip
