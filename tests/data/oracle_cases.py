"""The list behind `make_oracles.py`: every case, and how its checkpoint is dressed.

Knows shards, dtypes, dialects, tensor names and quantizations. Does not know the configurations
(`oracle_configs`) or how weights and answers are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from oracle_configs import (
    DEEPSEEK,
    FULL,
    GEMMA4,
    GPT_OSS,
    HIDDEN,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    MUSE,
    QWEN2,
    QWEN3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_MOE,
    SPARK,
    VOCAB,
    WIDE,
    deepseek_v2,
    gemma3,
    gemma3_wrapped,
    gemma4,
    gpt_oss,
    llama,
    mistral,
    mixtral,
    muse_glimmer,
    muse_text,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen4_exp,
    spark2_5,
)


@dataclass(frozen=True)
class Case:
    """One folder of tests/data/oracles."""

    name: str
    config: dict[str, Any]
    tokens: int = 34
    reader: str = "causal"
    """"causal" or "image-text" (the transformers auto class), or "mlx" (mlx-lm answers)."""
    dialect: str = "hub"
    """"hub": config.json as `config` stands; "v5": as transformers 5 saves it."""
    shards: int = 1
    stores: dict[str, str] = field(default_factory=lambda: {"": "bfloat16"})
    """Dtype by the longest matching end of a tensor's name."""
    fuse_experts: bool = False
    mxfp4_experts: bool = False
    extra: Callable[[dict[str, Any]], dict[str, tuple[int, ...]]] | None = None
    """Tensors beyond the model's own that such checkpoints carry, by shape."""
    rename: Callable[[str], str | None] | None = None
    """Final tensor names (None drops), applied after the answers are computed."""
    final_config: dict[str, Any] | None = None
    quant: dict[str, Any] | None = None
    """mlx-lm convert settings; {} converts without quantizing."""

    @property
    def text(self) -> dict[str, Any]:
        return self.config.get("text_config", self.config)


# --- what published files do to names and dtypes ---

FLOAT_STATE = {"": "bfloat16", "A_log": "float32", "linear_attn.norm.weight": "float32"}


def unused_keys_and_values(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Published E-series files carry K/V tensors for layers that read another layer's cache."""
    text = config["text_config"]
    count, out = text["num_hidden_layers"], {}
    for i in range(count - text["num_kv_shared_layers"], count):
        full = text["layer_types"][i] == FULL
        width = text["global_head_dim"] if full else text["head_dim"]
        stem = f"model.language_model.layers.{i}.self_attn."
        for name in ("k_proj", "v_proj"):
            out[f"{stem}{name}.weight"] = (text["num_key_value_heads"] * width, HIDDEN)
        out[f"{stem}k_norm.weight"] = (width,)
    return out


def tower_on_top(name: str) -> str | None:
    """The names of mlx-community's conversions: `language_model.model.`, towers at top level."""
    if name.startswith("lm_head."):
        return "language_model." + name
    return name.removeprefix("model.").replace("language_model.", "language_model.model.", 1)


def text_only(name: str) -> str | None:
    return None if "vision" in name else tower_on_top(name)


def prediction_head(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Published files carry a multi-token-prediction head that plain decoding never reads."""
    return {
        "mtp.fc.weight": (HIDDEN, 2 * HIDDEN),
        "mtp.norm.weight": (HIDDEN,),
        "mtp.pre_fc_norm_embedding.weight": (HIDDEN,),
        "mtp.pre_fc_norm_hidden.weight": (HIDDEN,),
        "mtp.layers.0.input_layernorm.weight": (HIDDEN,),
    }


# --- the cases ------------------------------------------------------------------------------------


def plain_cases() -> Iterator[Case]:
    """Checkpoints as the hub has them, in bf16 and one file."""
    tables = (
        ("llama", llama, LLAMA), ("mistral", mistral, MISTRAL), ("qwen2", qwen2, QWEN2),
        ("qwen3", qwen3, QWEN3), ("mixtral", mixtral, MIXTRAL), ("qwen3_moe", qwen3_moe, QWEN3_MOE),
        ("deepseek_v2", deepseek_v2, DEEPSEEK),
    )  # fmt: skip
    for family, build, variants in tables:
        for variant, over in variants.items():
            yield Case(f"{family}-{variant}", build(**over))
    for variant, over in SPARK.items():
        yield Case(f"spark2_5-{variant}", spark2_5(**over), reader="mlx")
    for variant, over in GPT_OSS.items():
        config = gpt_oss(**over)
        yield Case(f"gpt_oss-{variant}", config, mxfp4_experts="quantization_config" in config)
    yield Case("gemma3-text", gemma3())
    yield Case("gemma3-wrapped", gemma3_wrapped(), reader="image-text")
    for variant in GEMMA4:
        extra = unused_keys_and_values if variant.startswith("e") else None
        yield Case(f"gemma4-{variant}", gemma4(variant), reader="image-text", extra=extra)
        yield Case(f"gemma4-{variant}-text", gemma4(f"{variant}-text"))
    yield Case("gemma4-12b", gemma4("12b"), reader="image-text")
    flat = muse_text() | dict(model_type="muse_glimmer")
    for variant in MUSE:
        case = Case(f"muse_glimmer-{variant}", muse_glimmer(variant), reader="image-text")
        if variant == "mlx":
            case = replace(case, rename=tower_on_top)
        if variant == "flat":
            case = replace(case, rename=text_only, final_config=flat)
        yield case
    for moe, variants in ((False, QWEN3_5), (True, QWEN3_5_MOE)):
        for variant in variants:
            case = Case(f"qwen3_5{'_moe' * moe}-{variant}", qwen3_5(variant, moe), tokens=68)
            if variant == "text":
                yield replace(case, stores=FLOAT_STATE)
            else:
                yield replace(case, reader="image-text", extra=prediction_head, fuse_experts=moe)
    yield from qwen4_cases()


def qwen4_cases() -> Iterator[Case]:
    """Chosen blocks and n-grams: both layouts, shards, the other config dialect, MLX's names."""
    base = Case("qwen4_exp-base", qwen4_exp("base"), tokens=44, reader="image-text",
                extra=prediction_head, stores=FLOAT_STATE)  # fmt: skip
    yield base
    yield Case("qwen4_exp-text", qwen4_exp("text"), tokens=44)
    yield replace(base, name="qwen4_exp-shards-v5", shards=2, dialect="v5")
    yield replace(base, name="qwen4_exp-mlx", rename=tower_on_top)


V5 = (
    "llama-llama3", "mistral-sliding", "qwen2-yarn", "qwen2-sliding", "qwen3_moe-mixed",
    "gpt_oss-mxfp4", "gemma3-wrapped", "gemma4-e2b", "gemma4-26b-a4b", "muse_glimmer-base",
    "deepseek_v2-lite", "qwen3_5-irregular",
)  # fmt: skip


def dressed_cases() -> Iterator[Case]:
    """The same checkpoints in the other config dialect, in shards, and in other dtypes."""
    plain = {case.name: case for case in plain_cases()}
    for name in V5:
        yield replace(plain[name], name=f"{name}-v5", dialect="v5")
    for name in ("qwen2-base", "gpt_oss-mxfp4"):
        yield replace(plain[name], name=f"{name}-shards", shards=2)
    for name, dtype in (("llama-base", "float16"), ("qwen2-base", "float32")):
        yield replace(plain[name], name=f"{name}-{dtype}", stores={"": dtype})


def affine(bits: int, group_size: int = 64) -> dict[str, Any]:
    return dict(q_bits=bits, q_group_size=group_size)


def mode(name: str, bits: int, group_size: int) -> dict[str, Any]:
    return dict(q_mode=name, q_bits=bits, q_group_size=group_size)


def uneven(path: str, module: Any) -> bool | dict[str, Any]:
    """Another width for every kind of matrix, and two left as they are."""
    widths = {"q_proj": (2, 32), "k_proj": (3, 64), "v_proj": (6, 32), "gate_proj": (5, 32),
              "down_proj": (8, 64), "embed_tokens": (6, 64)}  # fmt: skip
    leaf = path.rsplit(".", 1)[-1]
    if leaf in ("up_proj", "lm_head"):
        return False
    bits, group_size = widths.get(leaf, (4, 32))
    return dict(bits=bits, group_size=group_size)


def mlx_cases() -> Iterator[Case]:
    """What mlx-lm writes, for variants that it computes rightly."""
    heads = WIDE | dict(head_dim=32)
    routed = heads | dict(moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2)
    latent = WIDE | dict(kv_lora_rank=64, v_head_dim=16, moe_intermediate_size=64,
                         n_routed_experts=4)  # fmt: skip
    predicate = affine(4) | dict(quant_predicate=uneven)
    recipe = affine(4) | dict(quant_predicate="mixed_3_6")
    plain = {
        "llama-llama3-4bit": (llama(**LLAMA["llama3"] | heads), affine(4)),
        "qwen3-base-8bit-g32": (qwen3(**QWEN3["base"] | heads), affine(8, 32)),
        "qwen2-untied-uneven": (qwen2(**WIDE), predicate),
        "qwen3-untied-mixed_3_6": (qwen3(**heads), recipe),
        "mistral-nemo-mxfp4": (mistral(**MISTRAL["nemo"] | heads), mode("mxfp4", 4, 32)),
        "llama-yarn-mxfp8": (llama(**LLAMA["yarn"] | heads), mode("mxfp8", 8, 32)),
        "qwen3-base-nvfp4": (qwen3(**QWEN3["base"] | heads), mode("nvfp4", 4, 16)),
        "mixtral-base-4bit": (mixtral(**WIDE | dict(num_local_experts=4)), affine(4)),
        "qwen3_moe-base-4bit": (qwen3_moe(**routed), affine(4)),
        "deepseek_v2-lite-4bit": (deepseek_v2(**latent), affine(4)),
        "spark2_5-base-4bit": (spark2_5(**WIDE), affine(4)),
        "gemma3-text-4bit": (gemma3(**heads | dict(num_attention_heads=2)), affine(4)),
        "gemma4-31b-text-4bit": (gemma4("31b-text", **WIDE), affine(4)),
        "gpt_oss-truncate-8bit": (gpt_oss(truncate=True), affine(8)),
    }
    for name, (config, quant) in plain.items():
        yield Case(f"mlx-{name}", config, reader="mlx", quant=quant,
                   mxfp4_experts="quantization_config" in config)  # fmt: skip
    yield Case("mlx-qwen2-untied-4bit-shards", qwen2(**WIDE), reader="mlx", quant=affine(4),
               shards=2)  # fmt: skip
    yield from mlx_wrapped_cases()


def mlx_wrapped_cases() -> Iterator[Case]:
    top = dict(vocab_size=VOCAB)  # mlx-lm looks for gemma4's at the top level only
    moe = WIDE | dict(num_experts=4, moe_intermediate_size=64)
    linear = WIDE | dict(linear_value_head_dim=32, linear_num_value_heads=4)
    configs = {
        "gemma4-26b-a4b-4bit": gemma4("26b-a4b", **moe) | top,
        "gemma4-e2b-4bit": gemma4("e2b", **WIDE, hidden_size_per_layer_input=64) | top,
        "qwen3_5-base-4bit": qwen3_5("base", **linear),
        "qwen3_5_moe-base-4bit": qwen3_5(
            "base", True, **linear | moe | dict(shared_expert_intermediate_size=64)
        ),
    }
    for name, config in configs.items():
        yield Case(f"mlx-{name}", config, reader="mlx", quant=affine(4),
                   fuse_experts="moe" in name, tokens=68 if "qwen" in name else 34)  # fmt: skip
    muse = muse_glimmer("mlx", **WIDE, head_dim=32)
    yield Case("mlx-muse_glimmer-mlx-4bit", muse, reader="mlx", quant=affine(4),
               rename=tower_on_top)  # fmt: skip
    yield Case("mlx-qwen3_5-base-bf16", qwen3_5("base"), reader="mlx", quant={}, tokens=68)


def cases() -> list[Case]:
    """Every case; a folder's files that equal an earlier folder's become links to them."""
    return [*plain_cases(), *dressed_cases(), *mlx_cases()]
