"""The architecture description of an install: every field, its manifest spelling, its match.

Knows names, types and defaults of gturbo's `arch` object. Does not know how any family computes.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from turbospark.errors import (
    ArchMismatchError,
    IndexCorruptError,
    TurbosparkError,
    UnsupportedArchitectureError,
)
from turbospark.install.files import printable

FAMILY_WIRES = (
    "gemma4",
    "qwen36",
    "deepseekV4Flash",
    "llama",
    "qwen3moe",
    "gptOss",
    "qwen35",
    "museGlimmer",
    "qwen4exp",
    "spark2_5",
    "qwen3",
    "minimax_m2",
    "qwen2",
    "deepseek2",
    "qwen3_vl",
)
"""The frozen on-disk names of the families."""

OWN_WIRES = ("gemma3",)
"""Families that only turbospark writes; the format's original readers refuse them as unknown."""

KNOWN_WIRES = FAMILY_WIRES + OWN_WIRES

PRODUCTION_PAIRS = frozenset(
    {
        (30, 2816),  # gemma4 26B-A4B
        (40, 2048),  # qwen36 35B-A3B
        (48, 2560),  # qwen4exp 125B-A6B
        (48, 2048),  # qwen3moe 30B-A3B
        (32, 4096),  # llama: Mixtral 8x7B
        (24, 2880),  # gptOss 20b
        (62, 3072),  # minimax_m2
        (27, 2048),  # deepseek2 V2-Lite
        (43, 4096),  # deepseekV4Flash
        (64, 5120),  # qwen35 27B
        (36, 2560),  # qwen3 4B, qwen3_vl 4B, spark2_5 4B
        (28, 3584),  # qwen2 2.5-7B
        (52, 6656),  # museGlimmer 30B
    }
)
"""(numLayers, hiddenSize) of the shipped baselines: such installs must carry a quant block."""

_IRREGULAR = {
    "intermediate_size": "ffnIntermediate",
    "num_kv_heads": "numKVHeads",
    "num_full_kv_heads": "numFullKVHeads",
    "ca_csa_compress_rate": "caCSACompressRate",
    "ca_hca_compress_rate": "caHCACompressRate",
}


def manifest_key(field: str) -> str:
    """The manifest's spelling of an ArchConfig field."""
    if field in _IRREGULAR:
        return _IRREGULAR[field]
    head, *rest = field.split("_")
    return head + "".join(part.capitalize() for part in rest)


Int = Annotated[int, Field(ge=0, le=2**63 - 1)]
Float = Annotated[float, Field(allow_inf_nan=False)]
Ints = Annotated[tuple[Int, ...], Field(max_length=65536, strict=False)]
Text = Annotated[str, Field(max_length=256)]


class ArchConfig(BaseModel):
    """Shape and behaviour of one model, as `manifest.arch` records it.

    Fields are declared in the documented order of comparison. The first block is required; of the
    second an absent key means Gemma 4's value, of the rest it means none.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        alias_generator=manifest_key,
        populate_by_name=True,
    )

    # --- core, required
    hidden_size: Int
    intermediate_size: Int
    moe_intermediate_size: Int
    num_heads: Int
    num_kv_heads: Int
    num_full_kv_heads: Int
    head_dim: Int
    full_head_dim: Int
    vocab_size: Int
    sliding_window: Int
    final_logit_softcap: Float
    rope_theta: Float
    full_rope_theta: Float
    partial_rotary_factor: Float
    num_layers: Int
    num_experts: Int
    top_k_experts: Int
    tie_word_embeddings: bool
    attention_k_eq_v: bool
    hidden_activation: Text
    full_attention_layer_mask: Ints
    # --- family behaviour, Gemma 4 when absent
    family: Text = "gemma4"
    attn_output_gate: bool = False
    attention_scale: Float = 1.0
    embedding_scaled_by_sqrt_hidden: bool = True
    router_scaled: bool = True
    ffn_sandwich_norms: bool = True
    shared_expert_gated: bool = False
    rope_neox_subdim: bool = False
    # --- linear attention
    linear_num_k_heads: Int = 0
    linear_num_v_heads: Int = 0
    linear_key_head_dim: Int = 0
    linear_value_head_dim: Int = 0
    linear_conv_kernel_size: Int = 0
    linear_output_gate_sigmoid: bool = False
    # --- multi-head latent attention
    mla_kv_lora_rank: Int = 0
    mla_q_lora_rank: Int = 0
    mla_nope_head_dim: Int = 0
    mla_rope_head_dim: Int = 0
    mla_v_head_dim: Int = 0
    # --- leading dense layers
    num_dense_leading_layers: Int = 0
    dense_lead_intermediate_size: Int = 0
    # --- compressed attention and indexer
    ca_q_lora_rank: Int = 0
    ca_o_lora_rank: Int = 0
    ca_o_groups: Int = 0
    ca_rope_head_dim: Int = 0
    ca_index_n_heads: Int = 0
    ca_index_kv_heads: Int = 0
    ca_index_head_dim: Int = 0
    ca_index_top_k: Int = 0
    ca_index_budget: Int = 0
    ca_csa_compress_rate: Int = 0
    ca_hca_compress_rate: Int = 0
    ca_compress_rope_theta: Float = 0.0
    ca_rope_scaling_factor: Float = 0.0
    ca_rope_scaling_original_max: Int = 0
    ca_rope_scaling_beta_fast: Float = 0.0
    ca_rope_scaling_beta_slow: Float = 0.0
    # --- hyper-connections
    hc_mult: Int = 0
    hc_lowrank: Int = 0
    hc_sinkhorn_iters: Int = 0
    hc_eps: Float = 0.0
    # --- n-gram table
    ple_ngram_size: Int = 0
    ple_heads_per_ngram: Int = 0
    ple_ngram_vocab_size_base: Int = 0
    ple_make_divisible_by: Int = 0
    ple_split_ngram_parts: Int = 0
    ple_embed_dim: Int = 0
    ple_conv_kernel_size: Int = 0
    ple_layer_ids: Ints = ()
    ple_seed: Int = 0
    ple_eos_token_id: Int = 0
    # --- misc
    num_hash_routed_layers: Int = 0
    router_scoring_func: Text = "softmax"
    routed_scaling_factor: Float = 1.0
    swiglu_limit: Float = 0.0
    # --- rope scaling (YaRN)
    rope_scaling_factor: Float = 0.0
    rope_scaling_original_context: Int = 0
    rope_scaling_beta_fast: Float = 0.0
    rope_scaling_beta_slow: Float = 0.0
    rope_scaling_mscale: Float = 0.0
    # --- vision
    vision_depth: Int = 0
    vision_hidden_size: Int = 0
    vision_intermediate_size: Int = 0
    vision_num_heads: Int = 0
    vision_patch_size: Int = 0
    vision_temporal_patch_size: Int = 0
    vision_in_channels: Int = 0
    vision_spatial_merge_size: Int = 0
    vision_num_position_embeddings: Int = 0
    vision_out_hidden_size: Int = 0
    vision_mrope_section: Ints = (0, 0, 0)
    vision_start_token_id: Int = 0
    vision_end_token_id: Int = 0
    vision_image_token_id: Int = 0
    vision_video_token_id: Int = 0
    vision_deepstack_visual_indexes: Ints = ()

    @field_validator("vision_mrope_section")
    @classmethod
    def _three_sections(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(value) not in (0, 3):
            raise ValueError(f"needs 3 values, found {len(value)}")
        return value or (0, 0, 0)

    @field_validator("vision_deepstack_visual_indexes")
    @classmethod
    def _three_mergers(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(value) > 3:
            raise ValueError(f"at most 3 deepstack mergers, found {len(value)}")
        return value

    @property
    def has_vision(self) -> bool:
        """Whether the install carries a vision tower."""
        return self.vision_depth > 0

    def to_manifest(self) -> dict[str, Any]:
        """Every field under its manifest key; whole floats as integers, the rest as they are."""
        return {manifest_key(name): _plain(getattr(self, name)) for name in FIELDS}

    @classmethod
    def from_manifest(cls, arch: object) -> ArchConfig:
        """Read `manifest.arch`. Unknown keys are ignored, a known key in wrong case is refused.

        Raises IndexCorruptError, ArchMismatchError (mask), UnsupportedArchitectureError (family).
        """
        if not isinstance(arch, dict):
            raise IndexCorruptError("manifest.arch must be an object")
        known = {key: arch[key] for key in _KEYS if key in arch}
        for key in arch:
            right = _FOLDED.get(str(key).lower())
            if key not in known and right is not None:
                raise IndexCorruptError(f"manifest.arch has key {key}; the spelling is {right}")
        _check_mask(known)
        try:
            config = cls.model_validate(known)
        except ValidationError as err:
            raise validation_error("manifest.arch", err) from None
        if config.family not in KNOWN_WIRES:
            raise UnsupportedArchitectureError(
                f'manifest.arch.family = "{printable(config.family)}"; '
                f"this build knows {', '.join(KNOWN_WIRES)}"
            )
        layers, masked = config.num_layers, len(config.full_attention_layer_mask)
        if layers != masked:
            raise IndexCorruptError(
                f"manifest.arch.fullAttentionLayerMask has {masked} values; numLayers is {layers}"
            )
        return config


FIELDS = tuple(ArchConfig.model_fields)
"""Field names in the order of comparison."""

_KEYS = tuple(manifest_key(name) for name in FIELDS)
_FOLDED = {key.lower(): key for key in _KEYS}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def _check_mask(arch: dict[str, Any]) -> None:
    key = "fullAttentionLayerMask"
    mask = arch.get(key)
    if isinstance(mask, list) and any(type(v) is int and not 0 <= v <= 255 for v in mask):
        raise ArchMismatchError(key, "values in 0..255", mask[:64])


def validation_error(where: str, err: ValidationError) -> TurbosparkError:
    """The first of pydantic's complaints as one line of ours."""
    first = err.errors(include_url=False)[0]
    path = ".".join(str(part) for part in (where, *first["loc"]))
    if first["type"] == "missing":
        return IndexCorruptError(f"{printable(path)} is missing")
    found = printable(repr(first["input"]))
    return IndexCorruptError(f"{printable(path)} = {found[:80]}: {printable(first['msg'])}")


def check_match(expecting: ArchConfig, actual: ArchConfig) -> None:
    """Compare field by field, exactly; the first difference raises ArchMismatchError."""
    for name in FIELDS:
        want, found = getattr(expecting, name), getattr(actual, name)
        if want != found:
            raise ArchMismatchError(manifest_key(name), want, found)
