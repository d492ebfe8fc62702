"""Whole conversions: what stood in the checkpoint stands in the install, and nothing half-done.

Independent reference: the arrays a checkpoint was made from, and the `gguf` package's decoder.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from checkpoints import (
    EXPERTS,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    LLAMA,
    MOE,
    llama_tensors,
    moe_tensors,
    permute,
    save_folder,
    save_gguf,
    store_experts,
)
from tiny_tokenizers import write as write_tokenizer

from turbospark.conversion import convert
from turbospark.conversion.safetensors import SafetensorsSource
from turbospark.errors import (
    InstallExistsError,
    ModelFormatError,
    OptionError,
    SourceError,
    TurbosparkError,
    UnsupportedArchitectureError,
    UnsupportedError,
)
from turbospark.install.opening import Install
from turbospark.install.planes import Planes, empty_planes, host_view

ROLES = ("gate", "up", "down")


def dense(planes: Planes) -> np.ndarray:
    return np.array(planes.dense(mx.float32))


def expert(install: Install, layer: int, role: str, index: int) -> np.ndarray:
    """One projection of one expert out of its record, as float32."""
    assert install.experts is not None
    packed = install.experts.layers[layer]
    record = np.empty(packed.stride, np.uint8)
    packed.read_record_into(index, record)
    tensor = packed.tensor(role)
    planes = empty_planes(tensor.fmt, tensor.shape)
    for suffix, array in zip(("", "_scales", "_biases"), planes.arrays(), strict=False):
        part = packed.tensor(role + suffix)
        host_view(array)[:] = record[part.offset : part.offset + part.size]
    return dense(planes)


def run(source: Path, dest: Path, **options: Any) -> Path:
    return convert(source, dest, progress=False, **options)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_folder(tmp_path / "llama", llama_tensors(), LLAMA)


# --- Hugging Face ---------------------------------------------------------------------------------


def test_a_dense_checkpoint_arrives_bit_for_bit(llama: Path, tmp_path: Path) -> None:
    tensors = llama_tensors()
    with Install.open(run(llama, tmp_path / "out.gturbo"), verify="full") as install:
        assert set(install.resident.names) == set(tensors)
        for name, array in tensors.items():
            planes = install.resident.read(name)
            assert str(planes.fmt) == "float32"
            np.testing.assert_array_equal(dense(planes), array)
        assert install.experts is None and install.arch.hidden_size == HIDDEN
        assert install.config["model_type"] == "llama"
        assert install.manifest.extension["source"]["kind"] == "huggingface"
        assert install.manifest.extension["hasTokenizer"] is False


@pytest.mark.parametrize("storage", ["single", "stacked", "fused"])
def test_experts_arrive_however_they_were_stored(tmp_path: Path, storage: str) -> None:
    resident, experts = moe_tensors()
    tensors = resident | store_experts(experts, storage)
    source = save_folder(tmp_path / "moe", tensors, MOE)
    with Install.open(run(source, tmp_path / "out.gturbo")) as install:
        assert set(install.resident.names) == set(resident)
        for (layer, role), stack in experts.items():
            for e in range(EXPERTS):
                np.testing.assert_array_equal(expert(install, layer, role, e), stack[e])


def test_sidecars_are_copied_and_other_files_are_not(llama: Path, tmp_path: Path) -> None:
    copied = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json")
    write_tokenizer(llama, config={"bos_token": None}, template="{{ messages }}")
    (llama / "README.md").write_text("no")
    with Install.open(run(llama, tmp_path / "out.gturbo")) as install:
        for name in copied:
            assert install.sidecar(name).read_bytes() == (llama / name).read_bytes()  # type: ignore[union-attr]
        assert install.sidecar("README.md") is None
        assert install.manifest.extension["hasTokenizer"] is True


@pytest.mark.parametrize(
    ("name", "text", "refusal"),
    [
        ("tokenizer.json", "{}", r"tokenizer\.json: not a tokenizer"),
        ("generation_config.json", '{"eos_token_id": "end"}', r"eos_token_id = 'end'"),
    ],
)
def test_what_an_open_would_refuse_is_refused_before_weights_are_read(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, refusal: str
) -> None:
    (llama / name).write_text(text)
    monkeypatch.setattr(SafetensorsSource, "read", None)
    with pytest.raises(ModelFormatError, match=refusal):
        run(llama, tmp_path / "out.gturbo")
    assert not list(tmp_path.glob("out.gturbo*"))


def test_a_sidecar_of_absurd_size_is_refused(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (llama / "tokenizer.json").write_text("x" * 2000)
    monkeypatch.setattr("turbospark.conversion.safetensors.MAX_SIDECAR_BYTES", 1999)
    with pytest.raises(SourceError, match=r"tokenizer\.json: 2000 bytes; expected at most 1999"):
        run(llama, tmp_path / "out.gturbo")


def test_a_sentencepiece_only_tokenizer_is_reported(llama: Path, tmp_path: Path) -> None:
    (llama / "tokenizer.model").write_bytes(b"x")
    with pytest.warns(UserWarning, match=r"tokenizer\.model but no tokenizer\.json"):
        run(llama, tmp_path / "out.gturbo")


def test_storage_settings_of_the_source_do_not_reach_the_install(
    llama: Path, tmp_path: Path
) -> None:
    with Install.open(run(llama, tmp_path / "out.gturbo")) as install:
        assert "torch_dtype" not in install.config and "quantization" not in install.config


# --- MLX ------------------------------------------------------------------------------------------


def mlx_checkpoint(path: Path, geometry: dict[tuple[int, str], dict[str, Any]]) -> dict[str, Any]:
    """An MLX-quantized MoE: experts by `geometry`, everything else plain. Returns its planes."""
    resident, experts = moe_tensors()
    tensors = {n: mx.array(a).astype(mx.bfloat16) for n, a in resident.items()}
    config: dict[str, Any] = MOE | {"quantization": {"bits": 4, "group_size": 32}}
    planes = {}
    for (layer, role), stack in experts.items():
        settings = geometry.get((layer, role), {"bits": 4, "group_size": 32})
        name = f"model.layers.{layer}.mlp.switch_mlp.{role}_proj"
        parts = mx.quantize(mx.array(stack).astype(mx.bfloat16), **settings)
        tensors.update(
            zip((f"{name}.weight", f"{name}.scales", f"{name}.biases"), parts, strict=True)
        )
        config["quantization"][name] = settings
        up = [parts[0], *(p.astype(mx.float32) for p in parts[1:])]
        planes[layer, role] = np.array(mx.dequantize(*up, **settings))
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(path / "model.safetensors"), tensors)
    return planes


def test_experts_of_different_width_keep_their_own_geometry_and_stride(tmp_path: Path) -> None:
    """Layer 0 all 4-bit, layer 1 down 8-bit of another group, gate and up of different widths."""
    geometry = {
        (1, "down"): {"bits": 8, "group_size": 32},
        (1, "gate"): {"bits": 8, "group_size": 64},
        (1, "up"): {"bits": 2, "group_size": 32},
    }
    expected = mlx_checkpoint(tmp_path / "mlx", geometry)
    with Install.open(run(tmp_path / "mlx", tmp_path / "out.gturbo")) as install:
        assert install.manifest.extension["source"]["kind"] == "mlx"
        for (layer, role), stack in expected.items():
            for e in range(EXPERTS):
                np.testing.assert_array_equal(expert(install, layer, role, e), stack[e])
        records = [install.experts.layers[i].record for i in range(LAYERS)]  # type: ignore[union-attr]
        assert records[0].used < records[1].used
        assert str(records[1].tensors["up"].fmt) == "affine 2-bit group 32 bfloat16"


# --- GGUF -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_a_gguf_arrives_with_the_values_the_reference_decodes(tmp_path: Path, kind: str) -> None:
    tensors = llama_tensors()
    source = save_gguf(tmp_path / "m.gguf", tensors, kind)
    quant = gguf.GGMLQuantizationType[kind]
    with Install.open(run(source, tmp_path / "out.gturbo")) as install:
        assert set(install.resident.names) == set(tensors)
        for name, array in tensors.items():
            if array.ndim == 2:
                stored = gguf.quantize(array, quant)
                array = gguf.dequantize(stored, quant).reshape(array.shape)
            np.testing.assert_array_equal(dense(install.resident.read(name)), array, name)
        assert install.manifest.extension["source"]["kind"] == "gguf"


def test_quantizing_and_permuting_rows_commute() -> None:
    """What the test above relies on: blocks run along rows, so whole rows move."""
    matrix = llama_tensors()["model.layers.0.self_attn.q_proj.weight"]
    quant = gguf.GGMLQuantizationType.Q4_0
    a = gguf.dequantize(gguf.quantize(permute(matrix, HEADS), quant), quant)
    b = permute(gguf.dequantize(gguf.quantize(matrix, quant), quant), HEADS)
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(permute(matrix, HEADS), permute(matrix, KV_HEADS))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16"])
def test_gguf_experts_arrive(tmp_path: Path, kind: str) -> None:
    resident, experts = moe_tensors()
    source = save_gguf(tmp_path / "m.gguf", resident, kind, "qwen3moe", experts)
    quant = gguf.GGMLQuantizationType[kind]
    with Install.open(run(source, tmp_path / "out.gturbo")) as install:
        for (layer, role), stack in experts.items():
            decoded = gguf.dequantize(gguf.quantize(stack, quant), quant).reshape(stack.shape)
            for e in range(EXPERTS):
                np.testing.assert_array_equal(expert(install, layer, role, e), decoded[e])


def test_a_scale_too_large_for_half_restarts_with_wider_companions(tmp_path: Path) -> None:
    tensors = llama_tensors()
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name] * np.float32(30000)
    source = save_gguf(tmp_path / "m.gguf", tensors, "Q4_0")
    quant = gguf.GGMLQuantizationType.Q4_0
    with Install.open(run(source, tmp_path / "out.gturbo")) as install:
        planes = install.resident.read(name)
        assert str(planes.fmt) == "affine 4-bit group 32 float32"
        expected = gguf.dequantize(gguf.quantize(tensors[name], quant), quant)
        np.testing.assert_array_equal(dense(planes), expected)
        other = install.resident.entry("model.layers.0.mlp.up_proj.weight")
        assert str(other.fmt) == "affine 4-bit group 32 float16"


def test_a_gguf_without_vocabulary_has_no_tokenizer(tmp_path: Path) -> None:
    source = save_gguf(tmp_path / "m.gguf", llama_tensors(), "F16")
    with Install.open(run(source, tmp_path / "out.gturbo")) as install:
        assert install.manifest.extension["hasTokenizer"] is False


# --- quantizing -----------------------------------------------------------------------------------


def mlx_quantized(array: np.ndarray, **settings: Any) -> np.ndarray:
    parts = mx.quantize(mx.array(array), **settings)
    return np.array(
        mx.dequantize(*parts, **settings, **({"dtype": mx.float32} if "mode" in settings else {}))
    )


def test_bits_quantize_matrices_as_mlx_does_and_leave_vectors(llama: Path, tmp_path: Path) -> None:
    tensors = llama_tensors()
    with Install.open(run(llama, tmp_path / "out.gturbo", bits=4, group_size=32)) as install:
        for name, array in tensors.items():
            planes = install.resident.read(name)
            if array.ndim == 1:
                assert str(planes.fmt) == "float32"
                np.testing.assert_array_equal(dense(planes), array)
            else:
                assert str(planes.fmt) == "affine 4-bit group 32 float32"
                expected = mlx_quantized(array, bits=4, group_size=32)
                np.testing.assert_array_equal(dense(planes), expected)


def test_rows_are_quantized_in_blocks_without_a_seam(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turbospark.conversion.transfer._BLOCK_VALUES", 3 * HIDDEN)
    array = llama_tensors()["model.embed_tokens.weight"]
    with Install.open(run(llama, tmp_path / "out.gturbo", bits=8, group_size=32)) as install:
        got = dense(install.resident.read("model.embed_tokens.weight"))
        np.testing.assert_array_equal(got, mlx_quantized(array, bits=8, group_size=32))


@pytest.mark.parametrize("storage", ["single", "fused"])
def test_experts_are_quantized_and_routers_get_eight_bits(tmp_path: Path, storage: str) -> None:
    resident, experts = moe_tensors()
    source = save_folder(tmp_path / "moe", resident | store_experts(experts, storage), MOE)
    with Install.open(run(source, tmp_path / "out.gturbo", bits=4, group_size=32)) as install:
        router = install.resident.entry("model.layers.0.mlp.gate.weight")
        assert str(router.fmt) == "affine 8-bit group 32 float32"
        for (layer, role), stack in experts.items():
            for e in range(EXPERTS):
                expected = mlx_quantized(stack[e], bits=4, group_size=32)
                np.testing.assert_array_equal(expert(install, layer, role, e), expected)


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_float_modes_quantize_as_mlx_does(llama: Path, tmp_path: Path, mode: str) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    with Install.open(run(llama, tmp_path / "out.gturbo", mode=mode)) as install:
        planes = install.resident.read(name)
        assert str(planes.fmt) == mode
        np.testing.assert_array_equal(
            dense(planes), mlx_quantized(llama_tensors()[name], mode=mode)
        )


def formats(path: Path) -> dict[str, str]:
    with Install.open(path) as install:
        return {name: str(install.resident.entry(name).fmt) for name in install.resident.names}


def test_overrides_choose_per_tensor_and_the_last_match_counts(llama: Path, tmp_path: Path) -> None:
    overrides = {
        "model.layers.*": {"bits": 8, "group_size": 32},
        "*.input_layernorm.weight": None,
        "*.post_attention_layernorm.weight": None,
        "model.layers.1.mlp.down_proj.weight": {"mode": "mxfp4"},
        "lm_head.weight": None,
    }
    got = formats(run(llama, tmp_path / "out.gturbo", bits=4, group_size=64, overrides=overrides))
    assert got["model.embed_tokens.weight"] == "affine 4-bit group 64 float32"
    assert got["lm_head.weight"] == got["model.layers.0.input_layernorm.weight"] == "float32"
    assert got["model.layers.0.mlp.down_proj.weight"] == "affine 8-bit group 32 float32"
    assert got["model.layers.1.mlp.down_proj.weight"] == "mxfp4"


@pytest.mark.parametrize(
    "asked",
    [
        {"bits": True}, {"bits": 4.0}, {"bits": "4"}, {"bits": 4, "group_size": []},
        {"mode": []}, {"overrides": 5}, {"overrides": {5: None}}, {"overrides": {"*": 5}},
        {"overrides": {"*": {"mode": []}}}, {"overrides": {"*": {"bits": {}}}},
    ],
)  # fmt: skip
def test_settings_of_the_wrong_kind_are_refused(
    llama: Path, tmp_path: Path, asked: dict[str, Any]
) -> None:
    with pytest.raises(OptionError):
        run(llama, tmp_path / "out.gturbo", **asked)


def test_overrides_alone_quantize_only_what_they_match(llama: Path, tmp_path: Path) -> None:
    got = formats(run(llama, tmp_path / "out.gturbo", overrides={"lm_head.weight": {"bits": 8}}))
    assert {n for n, f in got.items() if f != "float32"} == {"lm_head.weight"}


def test_expert_overrides_use_canonical_names(tmp_path: Path) -> None:
    resident, experts = moe_tensors()
    source = save_folder(tmp_path / "moe", resident | store_experts(experts, "single"), MOE)
    overrides = {"model.layers.1.mlp.experts.down_proj.weight": {"bits": 8, "group_size": 32}}
    with Install.open(run(source, tmp_path / "out.gturbo", overrides=overrides)) as install:
        layers = install.experts.layers  # type: ignore[union-attr]
        assert str(layers[1].tensor("down").fmt) == "affine 8-bit group 32 float32"
        assert str(layers[1].tensor("up").fmt) == str(layers[0].tensor("down").fmt) == "float32"


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "odd bits": ({"bits": 7}, "bits=7, group_size=64 is not executable"),
    "odd group": ({"bits": 4, "group_size": 48}, "group_size=48 is not executable"),
    "group without bits": ({"group_size": 32}, "group_size=32 was given without bits"),
    "unknown mode": ({"mode": "q4_k"}, "mode 'q4_k' is unknown; affine, mxfp4"),
    "bits of mxfp4": ({"mode": "mxfp4", "bits": 8}, "mxfp4 has bits=4; got 8"),
    "columns": (
        {"bits": 4, "group_size": 128}, "64 columns, group_size 128; works: group_size [32, 64]",
    ),
    "override matches nothing": ({"overrides": {"nope.*": None}}, "match no tensor: nope.*"),
    "override of a vector": ({"overrides": {"model.norm.weight": {"bits": 4}}}, "not a matrix"),
    "override without bits": ({"overrides": {"lm_head.weight": {}}}, "needs bits"),
    "override typo": ({"overrides": {"lm_head.weight": {"bit": 4}}}, "unknown setting 'bit'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_options_that_cannot_be_honoured_are_refused(
    llama: Path, tmp_path: Path, case: str
) -> None:
    options, message = BAD_OPTIONS[case]
    with pytest.raises((OptionError, UnsupportedError)) as error:
        run(llama, tmp_path / "out.gturbo", **options)
    assert message in str(error.value)
    assert not list(tmp_path.glob("out*"))


def test_quantizing_what_is_already_quantized_is_refused(tmp_path: Path) -> None:
    first = save_gguf(tmp_path / "m.gguf", llama_tensors(), "Q4_0")
    with pytest.raises(OptionError, match="every matrix is already quantized"):
        run(first, tmp_path / "out.gturbo", bits=8)
    with pytest.raises(OptionError, match="already affine 4-bit"):
        run(first, tmp_path / "out.gturbo", overrides={"lm_head.weight": {"bits": 8}})


def test_the_manifest_describes_a_geometry_the_original_knows(tmp_path: Path) -> None:
    """Only bf16 companions in groups of 64 at one width per component can be said in its words."""
    folder = tmp_path / "bf16"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    narrow = {n: mx.array(a).astype(mx.bfloat16) for n, a in llama_tensors().items()}
    mx.save_safetensors(str(folder / "model.safetensors"), narrow)

    def block(name: str, **options: Any) -> dict[str, Any] | None:
        with Install.open(run(folder, tmp_path / name, bits=4, **options)) as install:
            assert install.manifest.extension["quant"]["formats"]
            return install.manifest.quant

    known = block("a.gturbo")
    assert known is not None
    assert known["attention"] == {
        "weightBits": 4, "scheme": "affine", "scaleType": "bf16", "biasType": "bf16",
        "groupSize": 64,
    }  # fmt: skip
    assert block("b.gturbo", group_size=32) is None
    assert block("c.gturbo", overrides={"*.q_proj.weight": None}) is None


# --- checkpoints that do not fit ------------------------------------------------------------------


def broken(tmp_path: Path, change: Any, config: dict[str, Any] = LLAMA) -> Path:
    tensors = llama_tensors()
    change(tensors)
    return save_folder(tmp_path / "broken", tensors, config)


Q = "model.layers.0.self_attn.q_proj.weight"
MISFITS: dict[str, tuple[Any, list[str]]] = {
    "unknown": (
        lambda t: t.update({"model.extra": t[Q], "other.weight": t[Q]}),
        ["2 unknown: model.extra (F32 [64, 64]), other.weight"],
    ),
    "missing": (lambda t: t.pop(Q), [f"1 missing: {Q}"]),
    "misshapen": (
        lambda t: t.update({Q: t[Q][:32]}), [f"{Q} has shape [32, 64]; expected [64, 64]"],
    ),
    "twice": (
        lambda t: t.update({"model.language_model." + Q.removeprefix("model."): t[Q]}),
        ["1 provided twice", Q],
    ),
    "several faults": (
        lambda t: (t.pop(Q), t.update({"x": t["lm_head.weight"]})),
        ["1 unknown: x", f"1 missing: {Q}"],
    ),
    "integers": (
        lambda t: t.update({Q: t[Q].astype(np.int32)}),
        ["1 tensors have a type that is not converted", f"{Q} (I32)"],
    ),
    "doubles": (lambda t: t.update({Q: t[Q].astype(np.float64)}), [f"{Q} (F64)"]),
    "an expert": (
        lambda t: t.update({"model.layers.0.mlp.experts.0.up_proj.weight": t[Q]}), ["1 unknown"],
    ),
    "many": (
        lambda t: t.update({f"x{i:03d}": np.zeros(1, np.float32) for i in range(100)}),
        ["100 unknown: x000", "x019 (F32 [1]) and 80 more"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_a_table_of_contents_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, messages = MISFITS[case]
    source = broken(tmp_path, change)
    no_weight_is_read(monkeypatch)
    with pytest.raises((SourceError, UnsupportedError)) as error:
        run(source, tmp_path / "out.gturbo")
    for message in messages:
        assert message in str(error.value)
    assert not list(tmp_path.glob("out*"))


def no_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("turbospark.conversion.safetensors.read_into", refuse)
    monkeypatch.setattr("turbospark.conversion.gguf.read_into", refuse)


EXPERT_FAULTS: dict[str, tuple[Any, str]] = {
    "one gone": (
        lambda t: t.pop("model.layers.1.mlp.experts.2.up_proj.weight"),
        "model.layers.1.mlp.experts.up_proj.weight of 1 experts (2)",
    ),
    "a layer gone": (
        lambda t: [t.pop(f"model.layers.1.mlp.experts.{e}.up_proj.weight") for e in range(EXPERTS)],
        "1 missing: model.layers.1.mlp.experts.up_proj.weight",
    ),
    "one too many": (
        lambda t: t.update(
            {"model.layers.1.mlp.experts.4.up_proj.weight": np.zeros((32, 64), np.float32)}
        ),
        "1 unknown: model.layers.1.mlp.experts.4.up_proj.weight (of 4 experts)",
    ),
    "another format": (
        lambda t: t.update(
            {"model.layers.1.mlp.experts.1.up_proj.weight": np.zeros((32, 64), np.float16)}
        ),
        "experts of a layer must agree",
    ),
    "another shape": (
        lambda t: t.update(
            {"model.layers.1.mlp.experts.1.up_proj.weight": np.zeros((31, 64), np.float32)}
        ),
        "has shape [31, 64]; expected [32, 64]",
    ),
}


@pytest.mark.parametrize("case", EXPERT_FAULTS)
def test_experts_that_do_not_fit_are_refused_by_name(tmp_path: Path, case: str) -> None:
    change, message = EXPERT_FAULTS[case]
    resident, experts = moe_tensors()
    tensors = resident | store_experts(experts, "single")
    change(tensors)
    with pytest.raises(SourceError) as error:
        run(save_folder(tmp_path / "moe", tensors, MOE), tmp_path / "out.gturbo")
    assert message in str(error.value)


@pytest.mark.parametrize(("storage", "shown"), [("stacked", "switch_mlp"), ("fused", "gate_up")])
def test_a_stack_of_another_number_of_experts_is_refused(
    tmp_path: Path, storage: str, shown: str
) -> None:
    resident, experts = moe_tensors()
    tensors = resident | store_experts({k: v[:3] for k, v in experts.items()}, storage)
    with pytest.raises(SourceError, match=rf"{shown}.* holds \[3, .*expected 4 experts"):
        run(save_folder(tmp_path / "moe", tensors, MOE), tmp_path / "out.gturbo")


def test_a_copy_of_the_table_beside_a_tied_table_is_left_out(tmp_path: Path) -> None:
    tensors = llama_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    source = save_folder(tmp_path / "m", tensors, LLAMA | {"tie_word_embeddings": True})
    assert "lm_head.weight" not in formats(run(source, tmp_path / "out.gturbo"))


def test_another_head_beside_a_tied_table_is_refused(tmp_path: Path) -> None:
    tensors = llama_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["lm_head.weight"][-1, -1] += 1
    source = save_folder(tmp_path / "m", tensors, LLAMA | {"tie_word_embeddings": True})
    with pytest.raises(SourceError, match=r"lm_head\.weight differs .* tie_word_embeddings"):
        run(source, tmp_path / "out.gturbo")
    assert not (tmp_path / "out.gturbo").exists()


def test_types_of_tensors_that_are_left_out_do_not_matter(tmp_path: Path) -> None:
    tensors = llama_tensors() | {"model.rotary_emb.inv_freq": np.zeros(8)}
    run(save_folder(tmp_path / "m", tensors, LLAMA), tmp_path / "out.gturbo")


# --- sources that are none ------------------------------------------------------------------------


def test_an_unsupported_architecture_is_refused_before_any_weight_is_looked_at(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llamma"}))
    (folder / "model.safetensors").write_bytes(b"not even a header")
    with pytest.raises(UnsupportedArchitectureError, match=r"'llamma'.*nearest: llama; supported"):
        run(folder, tmp_path / "out.gturbo")


def test_an_unsupported_gguf_architecture_is_refused(tmp_path: Path) -> None:
    source = save_gguf(tmp_path / "m.gguf", {}, "F32", "bert")
    with pytest.raises(UnsupportedArchitectureError, match=r"'bert'.*supported: "):
        run(source, tmp_path / "out.gturbo")


def test_metadata_of_the_wrong_kind_is_a_source_error(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for add in (writer.add_block_count, writer.add_embedding_length, writer.add_head_count):
        add(0)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(SourceError, match="GGUF metadata"):
        run(tmp_path / "m.gguf", tmp_path / "out.gturbo")


def make(path: Path, *names: str) -> Path:
    path.mkdir()
    for name in names:
        (path / name).write_bytes(b"x")
    return path


NOT_SOURCES: dict[str, tuple[Any, str]] = {
    "nothing": (lambda p: p / "nope", "does not exist"),
    "a text file": (lambda p: make(p / "d", "a.txt") / "a.txt", "is a .txt file"),
    "an empty folder": (lambda p: make(p / "d"), "folder without config.json"),
    "ggufs": (lambda p: make(p / "d", "a.gguf"), "name the file itself, such as a.gguf"),
    "an install": (lambda p: make(p / "d", "manifest.json"), "already a .gturbo install"),
    "a device": (lambda p: Path(os.devnull), "is neither a folder nor a file"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_SOURCES)
def test_what_is_not_a_checkpoint_is_refused_with_what_is_accepted(
    tmp_path: Path, case: str
) -> None:
    path, message = NOT_SOURCES[case]
    with pytest.raises(SourceError) as error:
        run(path(tmp_path), tmp_path / "out.gturbo")
    assert message in str(error.value)
    assert "expected a folder with config.json and safetensors, or a .gguf file" in str(error.value)


# --- nothing half-done ----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, MemoryError])
def test_an_interrupted_conversion_leaves_nothing(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    from turbospark.install.resident import ResidentWriter

    written = []
    real = ResidentWriter.write

    def write(self: ResidentWriter, name: str, planes: Planes) -> None:
        if len(written) == 5:
            raise error
        written.append(name)
        real(self, name, planes)

    monkeypatch.setattr(ResidentWriter, "write", write)
    before = {p.name for p in tmp_path.iterdir()}
    seen = TurbosparkError if error is OSError else error  # a disk's refusal gets our words
    with pytest.raises(seen):
        run(llama, tmp_path / "out.gturbo")
    assert {p.name for p in tmp_path.iterdir()} == before


def test_a_killed_conversion_leaves_nothing_that_opens(llama: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle of writing; the next conversion tidies up and succeeds."""
    dest = tmp_path / "out.gturbo"
    script = (
        "import sys, time\n"
        "from turbospark.install.resident import ResidentWriter\n"
        "real = ResidentWriter.write\n"
        "def write(self, name, planes):\n"
        "    real(self, name, planes)\n"
        "    print('writing', flush=True)\n"
        "    time.sleep(60)\n"
        "ResidentWriter.write = write\n"
        "from turbospark.conversion import convert\n"
        "convert(sys.argv[1], sys.argv[2], progress=False)\n"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", script, str(llama), str(dest)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as child:
        assert child.stdout is not None and child.stdout.readline() == b"writing\n"
        child.send_signal(signal.SIGKILL)
    assert not dest.exists()
    left = list(tmp_path.glob("out.gturbo*"))
    assert len(left) == 1
    with pytest.raises(ModelFormatError):
        Install.open(left[0])
    run(llama, dest)
    assert [p.name for p in tmp_path.glob("out.gturbo*")] == ["out.gturbo"]


def test_an_existing_install_is_kept_unless_forced(llama: Path, tmp_path: Path) -> None:
    dest = run(llama, tmp_path / "out.gturbo")
    before = (dest / "manifest.json").read_bytes()
    with pytest.raises(InstallExistsError, match="pass force"):
        run(llama, dest, bits=8, group_size=32)
    assert (dest / "manifest.json").read_bytes() == before
    run(llama, dest, bits=8, group_size=32, force=True)
    assert (dest / "manifest.json").read_bytes() != before


def test_an_existing_destination_is_refused_before_the_source_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "out.gturbo").mkdir()
    with pytest.raises(InstallExistsError):
        run(tmp_path / "no such source", tmp_path / "out.gturbo")


def test_a_failed_replacement_keeps_the_old_install(llama: Path, tmp_path: Path) -> None:
    dest = run(llama, tmp_path / "out.gturbo")
    before = (dest / "manifest.json").read_bytes()
    source = broken(tmp_path, lambda t: t.pop(Q))
    with pytest.raises(SourceError):
        run(source, dest, force=True)
    assert (dest / "manifest.json").read_bytes() == before


def test_a_disk_too_small_is_refused_with_both_numbers(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("turbospark.conversion.run.shutil.disk_usage", lambda path: usage)
    with pytest.raises(TurbosparkError, match=r"needs \d+ bytes, the disk has 1000 free"):
        run(llama, tmp_path / "out.gturbo")


def test_the_bar_counts_every_byte(llama: Path, tmp_path: Path, capsys: Any) -> None:
    convert(llama, tmp_path / "out.gturbo", progress=True)
    assert "100%" in capsys.readouterr().err


def test_a_tiny_conversion_takes_under_two_seconds(llama: Path, tmp_path: Path) -> None:
    start = time.perf_counter()
    run(llama, tmp_path / "out.gturbo")
    assert time.perf_counter() - start < 2
