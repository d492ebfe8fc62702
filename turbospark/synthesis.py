"""Random installs of any family and size, for tests, demonstrations and benchmarks.

Knows a small configuration of every model type and how to draw planes of any format. Does not
know files: it is a source like any checkpoint, and the converter writes the install.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from turbospark.conversion.opening import Checkpoint
from turbospark.conversion.plan import Plan, Provider, Table, expert_name, role_shape, roles
from turbospark.conversion.quantize import ROUTER, Overrides, QuantRequest, choose_formats
from turbospark.conversion.run import Origin, write_install
from turbospark.conversion.source import SourceTensor
from turbospark.dtypes import RAW_BYTES, Format, Quant, Raw
from turbospark.errors import OptionError
from turbospark.families import family_for_model_type
from turbospark.families.base import Family
from turbospark.families.config import ConfigReader
from turbospark.install.planes import MX_DTYPES, Planes, empty_planes, host_view, quantize
from turbospark.install.staging import check_destination

# --- configurations -------------------------------------------------------------------------------

_DENSE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096, "tie_word_embeddings": False, "rope_theta": 10000.0,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64,
}  # fmt: skip
_SLIDE3 = ["sliding_attention"] * 3 + ["full_attention"]
_ROPES = {
    "full_attention": {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 1.0},
}  # fmt: skip
_QWEN_DELTA: dict[str, Any] = _DENSE | {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "partial_rotary_factor": 0.25, "attn_output_gate": True,
    "full_attention_interval": 4,
}  # fmt: skip
_GEMMA4: dict[str, Any] = {k: v for k, v in _DENSE.items() if k != "rope_theta"} | {
    "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 64,
    "layer_types": _SLIDE3, "global_head_dim": 64, "num_global_key_value_heads": 1,
    "rope_parameters": {
        "full_attention": _ROPES["full_attention"] | {"rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
    "attention_k_eq_v": True, "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0, "use_double_wide_mlp": False, "enable_moe_block": True,
    "num_experts": 16, "top_k_experts": 4, "moe_intermediate_size": 64,
}  # fmt: skip

# Small, complete configurations; lists by layer are patterns that repeat.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _DENSE,
    "mistral": _DENSE | {"sliding_window": 64},
    "qwen2": _DENSE,
    "qwen3": _DENSE,
    "mixtral": _DENSE | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": _DENSE | _EXPERTS | {"norm_topk_prob": True, "decoder_sparse_step": 1},
    "gpt_oss": _DENSE | {
        "attention_bias": True, "num_local_experts": 8, "num_experts_per_tok": 4,
        "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"],
        "swiglu_limit": 7.0,
    },
    "gemma3_text": _DENSE | {
        "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 64, "layer_types": _SLIDE3, "query_pre_attn_scalar": 32,
        "rope_local_base_freq": 10000.0,
    },
    "gemma4_text": _GEMMA4,
    "muse_glimmer_text": _DENSE | {
        "hidden_activation": "silu", "sliding_window": 64, "layer_types": _SLIDE3,
        "final_logit_softcapping": 30.0, "qk_scale_factor": 3.87, "output_multiplier": 0.2,
        "post_norm_eps": 1e-8,
    },
    "qwen3_5_text": _QWEN_DELTA,
    "qwen3_5_moe_text": _QWEN_DELTA | _EXPERTS | {"shared_expert_intermediate_size": 128},
    "qwen4_exp_text": _QWEN_DELTA | _EXPERTS | {
        "shared_expert_intermediate_size": 64, "output_gate_type": "sigmoid", "hc_count": 4,
        "hc_lowrank": 64, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 32,
        "indexer_budget": 64, "indexer_compress_ratio": 4, "ple_layer_ids": [2],
        "ple_embed_dim": 256, "ple_conv_kernel_size": 4, "ngram_size": 3, "heads_per_ngram": 4,
        "ngram_vocab_size_base": 500, "make_ngram_vocab_size_divisible_by": 16,
        "split_ngram_parts": 4, "seed": 1234, "eos_token_id": 2,
    },
    "deepseek_v2": _DENSE | {
        "first_k_dense_replace": 1, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16, "v_head_dim": 32, "moe_intermediate_size": 64,
        "n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 4,
        "num_key_value_heads": 4, "topk_method": "greedy", "norm_topk_prob": False,
        "routed_scaling_factor": 1.0, "scoring_func": "softmax",
    },
    "spark2_5": _DENSE | {
        "hidden_act": "gelu", "tie_word_embeddings": True, "sliding_window": 64,
        "layer_types": _SLIDE3, "gate_attn_act_mode": "sigmoid", "headwise_attn_output_gate": True,
        "rope_parameters": _ROPES,
    },
}  # fmt: skip

# Options -> the config.json key that a model type has for them, the first that it has.
_KEYS = {
    "layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "width": ("intermediate_size",),
    "vocab": ("vocab_size",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "top_k": ("top_k_experts", "num_experts_per_tok"),
    "expert_width": ("moe_intermediate_size", "intermediate_size"),
}


def synth_config(
    model_type: str, sizes: Mapping[str, int | None], settings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """config.json of a synthetic model: the small one of its type, resized.

    The type of a model with an image tower, such as qwen4_exp, gives its text half.
    Raises OptionError for a size that the model type has no key for.
    """
    if model_type not in CONFIGS:
        whole, model_type = model_type, f"{model_type}_text"
        if model_type not in CONFIGS:
            raise OptionError(
                f"no synthetic configuration for {whole!r}; known: {', '.join(CONFIGS)}"
            )
    config = {"model_type": model_type, **CONFIGS[model_type]}
    for option, value in sizes.items():
        key = next((k for k in _KEYS[option] if k in config), None)
        routed = any(k in config for k in _KEYS["experts"])
        if value is not None and (key is None or (option == "expert_width" and not routed)):
            raise OptionError(f"{option}={value}: {model_type} has no such size")
        if value is not None and key is not None:
            config[key] = value
    count = config["num_hidden_layers"]
    if "layer_types" in config:
        pattern = config["layer_types"]
        config["layer_types"] = [pattern[i % len(pattern)] for i in range(count)]
        config["layer_types"][-1] = "full_attention"
    return {**config, **(settings or {})}


def synth(
    model_type: str,
    dest: str | Path,
    *,
    layers: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    width: int | None = None,
    vocab: int | None = None,
    experts: int | None = None,
    top_k: int | None = None,
    expert_width: int | None = None,
    settings: Mapping[str, Any] | None = None,
    bits: int | None = None,
    group_size: int | None = None,
    mode: str = "affine",
    overrides: Overrides | None = None,
    dtype: str = "bfloat16",
    seed: int = 0,
    router_skew: float = 0.0,
    force: bool = False,
    progress: bool = True,
) -> Path:
    """Write an install with random weights, the same for the same arguments; returns `dest`.

    Sizes replace those of a small configuration of `model_type`; `settings` replaces any other
    key of config.json. Formats are chosen as in `convert`, from weights of `dtype`; quantized
    planes are drawn directly. Only one tensor, or one expert's projection, is in memory.

    Random routers choose all experts alike. With `router_skew` > 0, rows of a router are multiplied
    by rank ** -router_skew, ranks being drawn per layer, so that some experts are chosen more
    often: with 0.75, 16 of 128 slots hit about half the time, as has been reported of real models.

    Raises OptionError, UnsupportedError, InstallExistsError.
    """
    if not 0 <= router_skew < math.inf:
        raise OptionError(f"router_skew={router_skew} must be a finite number >= 0")
    if dtype not in RAW_BYTES:
        raise OptionError(f"dtype={dtype!r}; one of {', '.join(RAW_BYTES)}")
    request = QuantRequest.of(bits, group_size, mode, overrides)
    dest = Path(dest).expanduser()
    check_destination(dest, force)
    sizes = {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads,
        "head_dim": head_dim, "width": width, "vocab": vocab, "experts": experts,
        "top_k": top_k, "expert_width": expert_width,
    }  # fmt: skip
    config = synth_config(model_type, sizes, settings)
    family = family_for_model_type(model_type)
    family_config = family.read_config(ConfigReader(config, f"synthetic {model_type}"))
    raw = Raw(dtype)
    plan = _add_tables(_plan(family, family_config, raw), family, family_config, raw)
    formats = choose_formats(plan, request)
    source = RandomSource(model_type, config, seed, _formatted(plan, formats), router_skew)
    checkpoint = Checkpoint(source, family, family.pieces, family_config, source.plan)
    return write_install(checkpoint, dest, QuantRequest(None, {}), force, progress, Origin())


def _plan(family: Family, config: Any, raw: Raw) -> Plan:
    """Every canonical tensor as its own provider; experts come from stacks."""
    plan = Plan()
    for name, shape in family.weight_shapes(config).items():
        tensor = SourceTensor(name, shape, raw, str(raw), raw.plane_bytes(shape)[0])
        plan.resident[name] = Provider(tensor, raw, shape)
    for layer, experts in family.expert_shapes(config).items():
        plan.experts[layer] = {}
        for role in roles(experts):
            shape, name = role_shape(experts, role), expert_name(layer, role)
            size = experts.count * raw.plane_bytes(shape)[0]
            tensor = SourceTensor(name, (experts.count, *shape), raw, str(raw), size)
            plan.experts[layer][role] = [
                Provider(tensor, raw, shape, expert) for expert in range(experts.count)
            ]
    return plan


def _add_tables(plan: Plan, family: Family, config: Any, raw: Raw) -> Plan:
    """The plan with every table as one run of rows."""
    for layer, (name, shape) in family.table_shapes(config).items():
        tensor = SourceTensor(name, shape, raw, str(raw), raw.plane_bytes(shape)[0])
        plan.tables[layer] = Table(name, shape, (Provider(tensor, raw, shape),))
    return plan


def _formatted(plan: Plan, formats: Mapping[str, Format]) -> Plan:
    """The same plan with sources that hold the chosen formats already."""

    def stored(provider: Provider) -> Provider:
        fmt, tensor = formats[provider.source.name], provider.source
        size = sum(fmt.plane_bytes(tensor.shape))
        return replace(provider, fmt=fmt, source=replace(tensor, fmt=fmt, nbytes=size))

    routed = {
        layer: {role: [stored(p) for p in providers] for role, providers in by_role.items()}
        for layer, by_role in plan.experts.items()
    }
    tables = {
        layer: replace(table, parts=tuple(stored(p) for p in table.parts))
        for layer, table in plan.tables.items()
    }
    return Plan({name: stored(p) for name, p in plan.resident.items()}, routed, tables)


# --- the source -----------------------------------------------------------------------------------


class RandomSource:
    """A checkpoint that draws what is read from it; see `conversion.source.TensorSource`.

    Each tensor (each expert of a stack) has a generator of its own, so that order does not matter.
    """

    kind = "synthetic"

    def __init__(
        self,
        model_type: str,
        config: dict[str, Any],
        seed: int,
        plan: Plan,
        router_skew: float = 0.0,
    ) -> None:
        self.path = Path(model_type)
        self.config = config
        self.seed = seed
        self.plan = plan
        self.router_skew = router_skew
        self.sidecars: dict[str, bytes] = {}

    @property
    def tensors(self) -> dict[str, SourceTensor]:
        """Every tensor by its canonical name; experts as stacks."""
        stacks = [p[0] for by_role in self.plan.experts.values() for p in by_role.values()]
        tables = [part for table in self.plan.tables.values() for part in table.parts]
        providers = [*self.plan.resident.values(), *stacks, *tables]
        return {p.source.name: p.source for p in providers}

    def read(self, name: str, expert: int | None = None, rows: slice | None = None) -> Planes:
        """Random planes of a whole tensor or one expert; `rows` of it when asked."""
        tensor = self._find(name, expert)
        shape = tensor.shape if expert is None else tensor.shape[1:]
        seeds = (self.seed, zlib.crc32(name.encode()), 0 if expert is None else expert + 1)
        draw = np.random.SFC64(np.random.SeedSequence(seeds))
        fmt = tensor.fmt
        if isinstance(fmt, Quant):
            planes = _random_quant(draw, fmt, shape)
        else:
            assert fmt is not None  # `_plan` gives every tensor a format
            planes = _random_raw(np.random.Generator(draw), fmt, shape, name)
        if self.router_skew and ROUTER.search(name):
            planes = _skewed(planes, np.random.Generator(draw), self.router_skew)
        return planes if rows is None else planes.rows(rows)

    def _find(self, name: str, expert: int | None) -> SourceTensor:
        if expert is None:
            return self.tensors[name]
        layer, role = name.split(".")[2], name.split(".")[-2].removesuffix("_proj")
        role += "_bias" if name.endswith(".bias") else ""
        return self.plan.experts[int(layer)][role][expert].source

    def close(self) -> None:
        """Nothing is open."""


def _skewed(planes: Planes, draw: np.random.Generator, skew: float) -> Planes:
    """Rows multiplied by rank ** -skew, ranks in random order."""
    ranks = draw.permutation(planes.shape[0]) + 1
    values = planes.dense(mx.float32) * mx.array((ranks**-skew)[:, None].astype(np.float32))
    if isinstance(planes.fmt, Quant):
        return quantize(values, planes.fmt)
    values = values.astype(MX_DTYPES[planes.fmt.dtype])
    mx.eval(values)
    return Planes(planes.fmt, planes.shape, values)


def _random_raw(draw: np.random.Generator, fmt: Raw, shape: tuple[int, ...], name: str) -> Planes:
    """Uniform values: variance 1 / columns for matrices, around 1 for norms, small for biases."""
    planes = empty_planes(fmt, shape)
    view = host_view(planes.weight).view(f"V{RAW_BYTES[fmt.dtype]}")
    if len(shape) > 1:
        middle, reach = 0.0, _reach(shape)
    else:
        middle, reach = (0.0, 0.05) if name.endswith("bias") else (1.0, 0.5)
    step = 1 << 22
    for start in range(0, view.size, step):
        count = min(step, view.size - start)
        values = draw.random(count, dtype=np.float32) * (2 * reach) + (middle - reach)
        part = mx.array(values).astype(MX_DTYPES[fmt.dtype])
        mx.eval(part)
        view[start : start + count] = host_view(part).view(view.dtype)
    return planes


def _reach(shape: tuple[int, ...]) -> float:
    """Half the width of a uniform law of variance 1 / columns."""
    return math.sqrt(3 / shape[-1])


def _random_quant(draw: np.random.SFC64, fmt: Quant, shape: tuple[int, ...]) -> Planes:
    """Uniform codes with one scale, of about the same variance as `_random_raw` gives."""
    planes = empty_planes(fmt, shape)
    words = host_view(planes.weight).view(np.uint32)
    step = 1 << 22
    for start in range(0, words.size, step):
        count = min(step, words.size - start)
        raw = draw.random_raw(-(-count // 2)).view(np.uint32)
        words[start : start + count] = raw[:count]
    reach, std = _reach(shape), 1 / math.sqrt(shape[-1])
    scales = planes.arrays()[1]
    if fmt.mode == "affine":
        scale, bias = 2 * reach / (2**fmt.bits - 1), -reach
        filled = [mx.full(scales.shape, value, scales.dtype) for value in (scale, bias)]
        mx.eval(filled)
        return Planes(fmt, shape, planes.weight, *filled)
    if fmt.mode == "mxfp8":
        words &= np.uint32(0xBFBFBFBF)  # the top exponent bit, so that no code is NaN
    # Uniform codes have a root mean square of 2.9 (e2m1) or 0.6 (e4m3 below 2).
    power = round(math.log2(std / (0.6 if fmt.mode == "mxfp8" else 2.9)))
    byte = 127 + power if fmt.mode != "nvfp4" else (max(power, -6) + 7) << 3  # e8m0 or e4m3
    host_view(scales)[:] = byte
    return planes
