"""The block types of GGUF: how many bytes hold how many values, and what they become in MLX.

Knows bits of blocks as numpy arrays; every repacking keeps the values exactly. Does not know
files or names. Q2_K, Q3_K and Q6_K scale 16 values at a time, which no MLX format does: the
`gguf` package decodes them to float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from turbospark.dtypes import MXFP4, Format, Quant, Raw
from turbospark.errors import MissingDependencyError

Blocks = np.ndarray  # uint8 [blocks, bytes of one block]
Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # packed bytes, scales, biases

FLOAT32 = Raw("float32")


@dataclass(frozen=True)
class Codec:
    """One GGUF type. `unpack` maps blocks to the planes of `target`, one group per row.

    Packed codes come as uint8 [groups, bytes of 32 values]; scales and biases as [groups], in
    float32 for affine targets (narrowed by the caller) and uint8 for mxfp4.
    """

    name: str
    values: int
    nbytes: int
    target: Format
    unpack: Callable[[Blocks], Parts] | None = None

    @property
    def needs_package(self) -> bool:
        """Whether only the `gguf` package decodes this type."""
        return self.unpack is None and self.values > 1


# --- packing --------------------------------------------------------------------------------------


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """[n, b] bytes -> [n, 2b] codes, all low nibbles before all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _pack4(codes: np.ndarray) -> np.ndarray:
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _pack5(codes: np.ndarray) -> np.ndarray:
    """[n, 32] codes below 32 -> [n, 20] bytes, eight codes in five bytes, lowest bits first."""
    c = codes.reshape(len(codes), 4, 8).astype(np.uint8)
    out = np.empty((len(codes), 4, 5), dtype=np.uint8)
    out[..., 0] = c[..., 0] | (c[..., 1] << 5)
    out[..., 1] = (c[..., 1] >> 3) | (c[..., 2] << 2) | (c[..., 3] << 7)
    out[..., 2] = (c[..., 3] >> 1) | (c[..., 4] << 4)
    out[..., 3] = (c[..., 4] >> 4) | (c[..., 5] << 1) | (c[..., 6] << 6)
    out[..., 4] = (c[..., 6] >> 2) | (c[..., 7] << 3)
    return out.reshape(len(codes), 20)


def _half(blocks: Blocks, at: int) -> np.ndarray:
    """The fp16 number at byte `at` of each block, as float32."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")[:, 0].astype(np.float32)


# --- the types ------------------------------------------------------------------------------------


def _q4_0(blocks: Blocks) -> Parts:
    d = _half(blocks, 0)
    return _pack4(_nibbles(blocks[:, 2:])), d, d * np.float32(-8)


def _q4_1(blocks: Blocks) -> Parts:
    return _pack4(_nibbles(blocks[:, 4:])), _half(blocks, 0), _half(blocks, 2)


def _high_bits(packed: np.ndarray) -> np.ndarray:
    """[n, 4] bytes -> [n, 32] bits moved to position 4."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << 4


def _q5_0(blocks: Blocks) -> Parts:
    d = _half(blocks, 0)
    codes = _nibbles(blocks[:, 6:]) | _high_bits(blocks[:, 2:6])
    return _pack5(codes), d, d * np.float32(-16)


def _q5_1(blocks: Blocks) -> Parts:
    codes = _nibbles(blocks[:, 8:]) | _high_bits(blocks[:, 4:8])
    return _pack5(codes), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Blocks) -> Parts:
    d = _half(blocks, 0)
    return blocks[:, 2:] ^ 0x80, d, d * np.float32(-128)  # flipping the sign bit adds 128


def _mxfp4(blocks: Blocks) -> Parts:
    return _pack4(_nibbles(blocks[:, 1:])), blocks[:, 0].copy(), None


def _k_scales(blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """Float32 (scale, bias) [8 n] of the 32-value groups of Q4_K and Q5_K superblocks.

    Eight 6-bit scales and eight 6-bit minima sit in twelve bytes: the low six bits of bytes
    0-3 and 4-7 are the first four of each, bytes 8-11 and their top bits the last four.
    """
    packed = blocks[:, 4:16]
    low, mid, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=1)
    minima = np.concatenate([mid & 63, (high >> 4) | ((mid >> 2) & 48)], axis=1)
    d, dmin = _half(blocks, 0)[:, None], _half(blocks, 2)[:, None]
    return (d * scales).ravel(), (-dmin * minima).ravel()  # exact: 11 + 6 bits in float32


def _k_nibbles(packed: np.ndarray) -> np.ndarray:
    """[n, 128] bytes -> [8 n, 32] codes; each 32 bytes hold one group low, the next high."""
    pairs = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(-1, 32)


def _q4_k(blocks: Blocks) -> Parts:
    return _pack4(_k_nibbles(blocks[:, 16:])), *_k_scales(blocks)


def _q5_k(blocks: Blocks) -> Parts:
    # Bit g of byte j of the high-bit field belongs to value j of group g.
    shifts = np.arange(8, dtype=np.uint8)[None, :, None]
    high = ((blocks[:, None, 16:48] >> shifts) & 1) << 4
    return _pack5(_k_nibbles(blocks[:, 48:]) | high.reshape(-1, 32)), *_k_scales(blocks)


def _affine(bits: int, scale_dtype: str) -> Quant:
    return Quant("affine", bits, 32, scale_dtype)


CODECS: dict[int, Codec] = {
    0: Codec("F32", 1, 4, FLOAT32),
    1: Codec("F16", 1, 2, Raw("float16")),
    30: Codec("BF16", 1, 2, Raw("bfloat16")),
    2: Codec("Q4_0", 32, 18, _affine(4, "float16"), _q4_0),
    3: Codec("Q4_1", 32, 20, _affine(4, "float16"), _q4_1),
    6: Codec("Q5_0", 32, 22, _affine(5, "float16"), _q5_0),
    7: Codec("Q5_1", 32, 24, _affine(5, "float16"), _q5_1),
    8: Codec("Q8_0", 32, 34, _affine(8, "float16"), _q8_0),
    12: Codec("Q4_K", 256, 144, _affine(4, "float32"), _q4_k),
    13: Codec("Q5_K", 256, 176, _affine(5, "float32"), _q5_k),
    39: Codec("MXFP4", 32, 17, MXFP4, _mxfp4),
    10: Codec("Q2_K", 256, 84, FLOAT32),
    11: Codec("Q3_K", 256, 110, FLOAT32),
    14: Codec("Q6_K", 256, 210, FLOAT32),
}

# Types that exist and are not converted, for messages.
OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip


def type_name(code: int) -> str:
    """The name of a GGUF type; a code nobody defined is called by its number."""
    if code in CODECS:
        return CODECS[code].name
    return OTHER_TYPES.get(code, f"type {code}")


def load_decoder() -> Any:
    """The `gguf` package's dequantizer. Raises MissingDependencyError naming the extra."""
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError as error:
        raise MissingDependencyError(
            "Q2_K, Q3_K and Q6_K tensors need the gguf package: pip install 'turbospark[gguf]'"
        ) from error
    return lambda blocks, name: quants.dequantize(blocks, GGMLQuantizationType[name])
