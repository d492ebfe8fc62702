"""An install made by the original's documented rules opens and yields its exact values."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from handmade import EXPERTS, HIDDEN, LAYERS, PAGE, WIDTH, Original

from turbospark.dtypes import Raw, affine
from turbospark.errors import MissingTensorError, ReadError
from turbospark.install.opening import Install
from turbospark.install.planes import Planes, host_view


@pytest.fixture
def original(tmp_path: Path) -> Original:
    return Original(tmp_path / "tiny.gturbo")


def test_config_is_empty_and_arch_takes_the_documented_defaults(original: Original) -> None:
    with Install.open(original.path, verify="full") as install:
        assert install.config == {}
        assert install.arch.family == "qwen3moe"
        assert install.arch.intermediate_size == 256
        assert install.arch.router_scaled is True  # absent: Gemma 4's value
        assert install.arch.mla_kv_lora_rank == 0  # absent: none
        assert install.arch.router_scoring_func == "softmax"
        assert install.manifest.model_id == "someone/tiny-moe"


def test_resident_tensors_decode_to_the_values_computed_by_hand(original: Original) -> None:
    with Install.open(original.path) as install:
        assert set(install.resident.names) == {
            "model.embed_tokens.weight",
            "model.norm.weight",
            "router",
        }
        embedding = install.resident.read("model.embed_tokens.weight")
        assert embedding.fmt == affine(4, 64) and embedding.shape == (64, HIDDEN)
        np.testing.assert_allclose(
            np.array(embedding.dense(mx.float32)), original.embedding.values(), atol=1e-6
        )
        router = install.resident.read("router")
        assert router.fmt == affine(8, 64)
        np.testing.assert_allclose(
            np.array(router.dense(mx.float32)), original.router.values(), atol=1e-5
        )
        norm = install.resident.read("model.norm.weight")
        assert norm.fmt == Raw("bfloat16") and norm.shape == (HIDDEN,)
        np.testing.assert_allclose(np.array(norm.dense(mx.float32)), original.norm, rtol=1 / 128)


def test_expert_records_decode_to_the_values_computed_by_hand(original: Original) -> None:
    with Install.open(original.path) as install:
        assert install.experts is not None
        assert install.bytes_per_slot == LAYERS * PAGE
        for index, layer in install.experts.layers.items():
            assert (layer.count, layer.stride) == (EXPERTS, PAGE)
            for expert in range(EXPERTS):
                buffer = np.zeros(layer.stride, np.uint8)
                layer.read_record_into(expert, buffer)
                for role in ("gate", "up", "down"):
                    planes = record_planes(layer, role, buffer)
                    assert planes.fmt == affine(4, 64)
                    np.testing.assert_allclose(
                        np.array(planes.dense(mx.float32)),
                        original.experts[index][expert][role].values(),
                        atol=1e-6,
                    )


def record_planes(layer, role: str, buffer: np.ndarray) -> Planes:
    """Cut one projection out of a record with nothing but the published offsets."""
    arrays = []
    for name in (role, f"{role}_scales", f"{role}_biases"):
        plane = layer.tensor(name)
        array = mx.zeros(plane.plane_shape, dtype=getattr(mx, plane.dtype))
        mx.eval(array)
        host_view(array)[:] = buffer[plane.offset : plane.offset + plane.size]
        arrays.append(array)
    head = layer.tensor(role)
    return Planes(head.fmt, head.shape, *arrays)


def test_experts_are_found_by_their_declared_offset_not_by_their_order(tmp_path: Path) -> None:
    def swap(layout: dict) -> None:
        experts = layout["layers"][0]["experts"]
        experts[0]["offset"], experts[3]["offset"] = experts[3]["offset"], experts[0]["offset"]
        experts.reverse()

    original = Original(tmp_path / "swapped", edit_layout=swap)
    with Install.open(original.path) as install:
        layer = install.experts.layers[0]
        buffer = np.zeros(layer.stride, np.uint8)
        layer.read_record_into(3, buffer)
        found = np.array(record_planes(layer, "up", buffer).dense(mx.float32))
        np.testing.assert_allclose(found, original.experts[0][0]["up"].values(), atol=1e-6)


def test_expert_and_stride_keys_may_be_absent(tmp_path: Path) -> None:
    def strip(layout: dict) -> None:
        for layer in layout["layers"]:
            del layer["expertStride"]
            for expert in layer["experts"]:
                del expert["expert"], expert["physicalRank"]

    with Install.open(Original(tmp_path / "plain", edit_layout=strip).path) as install:
        assert install.experts.layers[1].offset(2) == 2 * PAGE
        assert install.experts.layers[1].tensor("down").shape == (HIDDEN, WIDTH)


def test_names_and_experts_outside_the_install_are_refused_by_name(original: Original) -> None:
    with Install.open(original.path) as install:
        with pytest.raises(MissingTensorError, match=r"lm_head\.weight"):
            install.resident.read("lm_head.weight")
        layer = install.experts.layers[0]
        for bad in (-1, EXPERTS):
            with pytest.raises(ReadError, match=rf"expert {bad} .* 0\.\.3"):
                layer.read_record_into(bad, np.zeros(PAGE, np.uint8))
        with pytest.raises(ReadError, match="buffer of 8 bytes"):
            layer.read_record_into(0, np.zeros(8, np.uint8))


def test_reads_after_close_and_after_truncation_are_errors_not_zeros(original: Original) -> None:
    install = Install.open(original.path)
    with (original.path / "packed_experts" / "layer_01.bin").open("r+b") as file:
        file.truncate(PAGE * 3 + 100)
    with (original.path / "model_weights.bin").open("r+b") as file:
        file.truncate(PAGE + 10)
    with pytest.raises(ReadError, match=r"layer_01\.bin.*expected 16384 bytes .* found 100"):
        install.experts.layers[1].read_record_into(3, np.zeros(PAGE, np.uint8))
    with pytest.raises(ReadError, match=r"model_weights\.bin: tensor router"):
        install.resident.read("router")
    install.close()
    install.close()
    with pytest.raises(ReadError, match="closed"):
        install.resident.read("router")
    with pytest.raises(ReadError, match="closed"):
        install.experts.layers[0].read_record_into(0, np.zeros(PAGE, np.uint8))
