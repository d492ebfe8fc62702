"""Between the projections and attention: head norms, rope, and the rows of k and v stored.

In this order: the same in plain MLX, the body, the two launches made of it, the choice. Knows heads
and buffers; does not know projections or attention.

An MLX kernel returns new arrays; MLX's own way to store a row is `slice_update`, two more launches
per buffer (on CUDA one computes the offset). `launch_store` writes the rows into the buffers it is
given instead, which MLX does not see: q is the launch's output, so attention over q comes after,
and a step must be evaluated before its buffers are used in any other way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from turbospark.kernels.choices import backend
from turbospark.kernels.source import (
    SIMD,
    Kernel,
    Launch,
    Plan,
    Value,
    ceil_div,
    constant,
    constant_ints,
)

SIMDGROUPS = 4
BACKENDS = ("cuda",)


@dataclass(frozen=True)
class Heads:
    """Query and key heads of `dim`; norms [dim] of each q and k head, or None."""

    query: int
    key: int
    dim: int
    q_norm: mx.array | None = None
    k_norm: mx.array | None = None
    eps: float = 0.0

    @property
    def kind(self) -> tuple[int, int, int, bool, bool]:
        """What a kernel is compiled for."""
        return (self.query, self.key, self.dim, self.q_norm is not None, self.k_norm is not None)


@dataclass(frozen=True)
class Turn:
    """Rope over the leading `dims`: periods float32 [dims / 2], reciprocal frequencies.

    Pairs are (i, i + dims / 2), or (2i, 2i + 1) when interleaved; `factor` multiplies cos and sin.
    """

    dims: int
    periods: mx.array
    interleaved: bool = False
    factor: float = 1.0

    @property
    def kind(self) -> tuple[int, bool]:
        """What a kernel is compiled for."""
        return (self.dims, self.interleaved)


# --- reference ------------------------------------------------------------------------------------


def rope_kv_reference(
    qkv: mx.array,
    keys: mx.array,
    values: mx.array,
    length: mx.array,
    heads: Heads,
    turn: Turn,
    ring: bool = False,
) -> tuple[mx.array, mx.array, mx.array]:
    """q and k normed and rotated; k and v stored at their positions.

    Shapes: qkv [1, M, (H + 2 KV) * D]; keys, values [1, KV, capacity, D]; length int32 [1],
    positions so far with these M -> q [1, H, M, D] and the two buffers. A ring stores position p
    in row p % capacity.
    """
    rows, dim = qkv.shape[1], heads.dim
    split = [heads.query * dim, (heads.query + heads.key) * dim]
    q, k, v = (a.reshape(1, rows, -1, dim).swapaxes(1, 2) for a in mx.split(qkv, split, axis=-1))
    if heads.q_norm is not None:
        q = mx.fast.rms_norm(q, heads.q_norm, heads.eps).astype(qkv.dtype)
    if heads.k_norm is not None:
        k = mx.fast.rms_norm(k, heads.k_norm, heads.eps).astype(qkv.dtype)
    q, k = (_rotate(a, turn, length - rows) for a in (q, k))
    for m in range(rows):
        at = length - rows + m
        at = at % keys.shape[2] if ring else at
        part = slice(m, m + 1)
        keys = mx.slice_update(keys, k[:, :, part].astype(keys.dtype), at, [2])
        values = mx.slice_update(values, v[:, :, part].astype(values.dtype), at, [2])
    return q, keys, values


def _rotate(x: mx.array, turn: Turn, start: mx.array) -> mx.array:
    if turn.factor != 1.0:
        x = mx.concatenate([x[..., : turn.dims] * turn.factor, x[..., turn.dims :]], axis=-1)
    return mx.fast.rope(
        x,
        turn.dims,
        traditional=turn.interleaved,
        base=None,
        scale=1.0,
        offset=start,
        freqs=turn.periods,
    )


# --- kernel ---------------------------------------------------------------------------------------

# One simdgroup per head and row; a lane holds whole pairs, so that nothing is exchanged.
BODY = r"""
  constexpr int HALF = ROT / 2;
  constexpr int PAIRS = (HALF + 31) / 32;
  constexpr int REST = (D - ROT + 31) / 32;
  const int lane = int(thread_index_in_simdgroup);
  const int all = H + 2 * KV;
  const int head = int(threadgroup_position_in_grid.x) * SG + int(simdgroup_index_in_threadgroup);
  const int m = int(threadgroup_position_in_grid.y);
  const int position = length[0] - M + m;
  const bool is_q = head < H;
  const bool is_k = head >= H && head < H + KV;
  auto from = qkv + (m * all + ts_min(head, all - 1)) * D;

  float a[PAIRS], b[PAIRS], c[REST + 1];
  float square = 0.0f;
  TS_UNROLL
  for (int i = 0; i < PAIRS; i++) {
    const int p = ts_min(i * 32 + lane, HALF - 1);
    a[i] = float(from[INTERLEAVED ? 2 * p : p]);
    b[i] = float(from[INTERLEAVED ? 2 * p + 1 : p + HALF]);
    if (i * 32 + lane < HALF) square = ts_fma(a[i], a[i], ts_fma(b[i], b[i], square));
  }
  TS_UNROLL
  for (int i = 0; i < REST; i++) {
    const int d = ROT + i * 32 + lane;
    c[i] = float(from[ts_min(d, D - 1)]);
    if (d < D) square = ts_fma(c[i], c[i], square);
  }
  square = ts_simd_sum(square);

  const bool normed = (is_q && Q_NORM) || (is_k && K_NORM);
  const float scale = normed ? ts_rsqrt(square / float(D) + numbers[0]) : 1.0f;
  STORE
  TS_UNROLL
  for (int i = 0; i < PAIRS; i++) {
    const int p = i * 32 + lane;
    if (p < HALF && head < all) {
      const int d0 = INTERLEAVED ? 2 * p : p;
      const int d1 = INTERLEAVED ? 2 * p + 1 : p + HALF;
      float x = a[i] * scale;
      float y = b[i] * scale;
      if (normed) {
        x *= float(is_q ? q_norm[d0] : k_norm[d0]);
        y *= float(is_q ? q_norm[d1] : k_norm[d1]);
      }
      if (is_q || is_k) {
        const float angle = float(position) * (1.0f / periods[p]);
        const float cosine = ts_cos(angle) * numbers[1];
        const float sine = ts_sin(angle) * numbers[1];
        const float turned = x * cosine - y * sine;
        y = x * sine + y * cosine;
        x = turned;
      }
      to[d0] = T(x);
      to[d1] = T(y);
    }
  }
  TS_UNROLL
  for (int i = 0; i < REST; i++) {
    const int d = ROT + i * 32 + lane;
    if (d < D && head < all) {
      float x = c[i] * scale;
      if (normed) x *= float(is_q ? q_norm[d] : k_norm[d]);
      to[d] = T(x);
    }
  }
"""

RETURNED = """
  auto k_to = k + ((head - H) * M + m) * D;
  auto v_to = v + ((head - H - KV) * M + m) * D;
  auto to = is_q ? q + (head * M + m) * D : is_k ? k_to : v_to;
"""
STORED = """
  const int capacity = sizes[0];
  const int64_t slot = RING ? position % capacity : position;
  auto k_to = ts_writable(keys) + (int64_t(head - H) * capacity + slot) * D;
  auto v_to = ts_writable(values) + (int64_t(head - H - KV) * capacity + slot) * D;
  auto to = is_q ? q + (head * M + m) * D : is_k ? k_to : v_to;
"""
INPUTS = ("qkv", "length", "periods", "q_norm", "k_norm", "numbers")
ROTATE_KERNEL = Kernel("rope", INPUTS, ("q", "k", "v"), BODY.replace("STORE", RETURNED))
STORE_KERNEL = Kernel(
    "rope_kv",
    (*INPUTS, "keys", "values", "sizes"),
    ("q",),
    BODY.replace("STORE", STORED),
    updates=("keys", "values"),
)


def launch_rotate(qkv: mx.array, length: mx.array, heads: Heads, turn: Turn) -> Launch:
    """q [1, H, M, D], k and v [1, KV, M, D] as new arrays."""
    p = plan(ROTATE_KERNEL, qkv.shape[1], qkv.dtype, heads.kind, turn.kind, False)
    return Launch(p, _inputs(qkv, length, heads, turn))


def launch_store(
    qkv: mx.array,
    keys: mx.array,
    values: mx.array,
    length: mx.array,
    heads: Heads,
    turn: Turn,
    ring: bool = False,
) -> Launch:
    """q [1, H, M, D] as a new array; k and v into `keys` and `values`, of qkv's dtype."""
    p = plan(STORE_KERNEL, qkv.shape[1], qkv.dtype, heads.kind, turn.kind, ring)
    buffers = [keys, values, constant_ints(keys.shape[2])]
    return Launch(p, _inputs(qkv, length, heads, turn) + buffers)


def _inputs(qkv: mx.array, length: mx.array, heads: Heads, turn: Turn) -> list[mx.array]:
    norms = [qkv if n is None else n for n in (heads.q_norm, heads.k_norm)]
    return [qkv, length, turn.periods, *norms, constant(heads.eps, turn.factor)]


@lru_cache(maxsize=1024)
def plan(
    kernel: Kernel,
    rows: int,
    dtype: mx.Dtype,
    heads: tuple[int, int, int, bool, bool],
    turn: tuple[int, bool],
    ring: bool,
) -> Plan:
    """What a launch fixes for that many rows."""
    query, key, dim, q_norm, k_norm = heads
    template: dict[str, Value] = {
        "T": dtype,
        "H": query,
        "KV": key,
        "D": dim,
        "M": rows,
        "ROT": turn[0],
        "SG": SIMDGROUPS,
        "INTERLEAVED": turn[1],
        "Q_NORM": q_norm,
        "K_NORM": k_norm,
        "RING": ring,
    }
    kv = ((1, key, rows, dim), dtype)
    outputs = (((1, query, rows, dim), dtype), kv, kv)[: len(kernel.outputs)]
    groups = (ceil_div(query + 2 * key, SIMDGROUPS), rows, 1)
    return Plan(kernel, template, groups, SIMD * SIMDGROUPS, outputs)


# --- choice ---------------------------------------------------------------------------------------


def rope(
    qkv: mx.array, length: mx.array, heads: Heads, turn: Turn
) -> tuple[mx.array, mx.array, mx.array]:
    """The rows of `rope_kv_reference`, not stored: q [1, H, M, D], k and v [1, KV, M, D]."""
    where = backend(mx.default_device())
    if where in BACKENDS:
        q, k, v = launch_rotate(qkv, length, heads, turn).run(where)
        return q, k, v
    rows = qkv.shape[1]
    empty = mx.zeros((1, heads.key, rows, heads.dim), dtype=qkv.dtype)
    q, k, v = rope_kv_reference(qkv, empty, empty, length, heads, turn, ring=True)
    at = (length - rows + mx.arange(rows)) % rows
    return q, mx.take(k, at, axis=2), mx.take(v, at, axis=2)


def rope_kv(
    qkv: mx.array,
    keys: mx.array,
    values: mx.array,
    length: mx.array,
    heads: Heads,
    turn: Turn,
    ring: bool = False,
) -> tuple[mx.array, mx.array, mx.array]:
    """`rope_kv_reference`; where the kernel runs, the buffers returned are those given, written."""
    where = backend(mx.default_device())
    if where not in BACKENDS or keys.dtype != qkv.dtype:
        return rope_kv_reference(qkv, keys, values, length, heads, turn, ring)
    q = launch_store(qkv, keys, values, length, heads, turn, ring).run(where)[0]
    return q, keys, values
