"""How a tensor is stored: the one table of formats, their geometry and their tags in an install.

Knows bits, groups and byte counts. Does not know MLX arrays, files or models.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

from turbospark.errors import UnsupportedError

RAW_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Raw:
    """An unquantized tensor of one float dtype."""

    dtype: str

    def __str__(self) -> str:
        return self.dtype

    def plane_bytes(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Bytes of (weight, scales, biases) for a tensor of logical `shape`."""
        return prod(shape) * RAW_BYTES[self.dtype], 0, 0


@dataclass(frozen=True)
class Quant:
    """A tensor quantized along its last axis the way MLX packs it (LSB first, row major).

    affine: value = scale * q + bias, companions of `scale_dtype` per `group_size` columns.
    mxfp4, mxfp8, nvfp4: one uint8 scale per group and no bias; `scale_dtype` is "uint8".
    """

    mode: str
    bits: int
    group_size: int
    scale_dtype: str

    def __str__(self) -> str:
        if self.mode != "affine":
            return self.mode
        return f"affine {self.bits}-bit group {self.group_size} {self.scale_dtype}"

    @property
    def has_biases(self) -> bool:
        return self.mode == "affine"

    def check_columns(self, columns: int, what: str) -> None:
        """Refuse a row length that this format cannot pack."""
        if columns % self.group_size or columns * self.bits % 32:
            raise UnsupportedError(
                f"{what}: {columns} columns cannot be stored as {self}; "
                f"columns must be a multiple of {self.group_size}"
            )

    def words(self, columns: int) -> int:
        """uint32 words in one row of `columns` values."""
        return columns * self.bits // 32

    def plane_bytes(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Bytes of (weight, scales, biases) for a tensor of logical `shape`."""
        rows = prod(shape[:-1])
        scales = rows * (shape[-1] // self.group_size) * SCALE_BYTES[self.scale_dtype]
        return rows * self.words(shape[-1]) * 4, scales, scales if self.has_biases else 0


Format = Raw | Quant

SCALE_BYTES = {**RAW_BYTES, "uint8": 1}

# Geometries MLX executes (checked by quantize + quantized_matmul on 0.32.4).
AFFINE_BITS = (1, 2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)
MXFP4 = Quant("mxfp4", 4, 32, "uint8")
MXFP8 = Quant("mxfp8", 8, 32, "uint8")
NVFP4 = Quant("nvfp4", 4, 16, "uint8")
MODES = {"mxfp4": MXFP4, "mxfp8": MXFP8, "nvfp4": NVFP4}

# Tags 1-25 are the original's; ours start at 64, so an original reader refuses them by tag.
_ORIGINAL: dict[int, Format] = {
    1: Raw("bfloat16"),
    2: Raw("float16"),
    3: Raw("float32"),
    4: Quant("affine", 4, 64, "bfloat16"),
    5: Quant("affine", 8, 64, "bfloat16"),
    15: Quant("affine", 1, 128, "float16"),
    16: Quant("affine", 2, 128, "float16"),
}
_OURS: dict[int, Format] = {
    64 + i: Quant("affine", bits, group, dtype)
    for i, (bits, group, dtype) in enumerate(product(AFFINE_BITS, AFFINE_GROUPS, RAW_BYTES))
}
_OURS.update({128: MXFP4, 129: MXFP8, 130: NVFP4})

FORMATS: dict[int, Format] = {**_OURS, **_ORIGINAL}
# _ORIGINAL comes last so that a geometry with two tags is written with the original's.
TAGS: dict[Format, int] = {fmt: tag for tag, fmt in FORMATS.items()}

# Tags the original reads and MLX has no kernel for: GGUF block types, refused by this name.
BLOCK_TAGS = {
    6: "Q8_0", 7: "Q4_K", 8: "Q6_K", 9: "Q4_0", 10: "IQ3_XXS", 11: "IQ4_NL", 12: "IQ4_XS",
    13: "Q5_K", 14: "MXFP4", 17: "Q2_K", 18: "IQ2_XXS", 19: "IQ2_XS", 20: "IQ1_S", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ1_M", 24: "Q3_K", 25: "Q2_0",
}  # fmt: skip


def affine(bits: int, group_size: int, scale_dtype: str = "bfloat16") -> Quant:
    """The affine format of that geometry; refuses what MLX cannot execute."""
    if bits not in AFFINE_BITS or group_size not in AFFINE_GROUPS:
        raise UnsupportedError(
            f"affine quantization with bits={bits}, group_size={group_size} is not executable; "
            f"bits one of {AFFINE_BITS}, group_size one of {AFFINE_GROUPS}"
        )
    return Quant("affine", bits, group_size, scale_dtype)
