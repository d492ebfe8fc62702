"""Key/value memory of block-sparse attention: every position, and an index key per full block.

Knows buffers, which rows are sparse, and when a block is full. Keys and values lie as they came or
packed, index keys always as they came. Does not know projections, norms or rope: the layer hands in
index queries, raw index keys and how block keys are made of their means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from turbospark.cache.attend import Step, causal_attention
from turbospark.cache.packed import Balance, PackedKV
from turbospark.cache.recurrent import CarriedState, Saved
from turbospark.cache.specs import PackedSpec, SparseSpec
from turbospark.kernels.qsa import Rule, choose, choose_and_attend


@dataclass(frozen=True)
class Index:
    """What selects blocks in one pass.

    `layer` is told when a score is not a number. queries [L, heads, D], ready; raw [L, D] keys
    before norm and rope; `block_keys` makes keys [blocks, D] of their means over each block and the
    number of the first.
    """

    layer: int
    queries: mx.array
    raw: mx.array
    block_keys: Callable[[mx.array, int], mx.array]


class PlainRows:
    """K and V [capacity, KV, D] as they came, position p in row p."""

    def __init__(self, spec: SparseSpec, capacity: int, dtype: mx.Dtype, kernels: bool) -> None:
        self.kernels = kernels
        shape = (capacity, spec.kv_heads, spec.head_dim)
        self.keys, self.values = mx.zeros(shape, dtype), mx.zeros(shape, dtype)

    def arrays(self) -> list[mx.array]:
        """The buffers; callers must not keep them."""
        return [self.keys, self.values]

    def rewind_refusal(self, furthest: int, to: int) -> str | None:
        """Rows stay until they are written over."""
        return None

    def written(self, position: int, furthest: int) -> list[mx.array]:
        """Copies of the rows that matter at `position`, for a file."""
        return [mx.contiguous(a[:position]) for a in self.arrays()]

    def refill(self, saved: list[mx.array]) -> None:
        """Put back what `written` gave."""
        keys, values = saved
        self.keys[: keys.shape[0]], self.values[: keys.shape[0]] = keys, values

    def write(self, k: mx.array, v: mx.array, step: Step) -> None:
        """Store rows k, v [L, KV, D]."""
        self.keys[step.start : step.end] = k
        self.values[step.start : step.end] = v

    def attend_all(self, q: mx.array, step: Step, scale: float) -> mx.array:
        """The leading rows [n, H, D] of the pass over every position they see."""
        end = step.start + q.shape[0]
        k, v = (a[:end].swapaxes(0, 1)[None] for a in (self.keys, self.values))
        out = causal_attention(q.swapaxes(0, 1)[None], k, v, scale, None, step)
        return out[0].swapaxes(0, 1)

    def attend_chosen(
        self, q: mx.array, queries: mx.array, keys: mx.array, start: int, rule: Rule, step: Step
    ) -> mx.array:
        """Rows [n, H, D] of positions from `start` on, each over the open block and those whose
        `keys` its index `queries` like best; the step is told a score that is not a number.
        """
        out, step.fault = choose_and_attend(
            q, self.keys, self.values, queries, keys, start, rule, step.fault, self.kernels
        )
        return out


class PackedRows:
    """The same, packed: what a row reads as a code depends on positions, not on who chose them."""

    def __init__(
        self, spec: PackedSpec, capacity: int, balance: Balance | None, kernels: bool
    ) -> None:
        self.kernels = kernels
        self.held = PackedKV(spec, capacity, balance)
        self.arrays, self.refill = self.held.arrays, self.held.refill
        self.written, self.rewind_refusal = self.held.written, self.held.rewind_refusal

    def write(self, k: mx.array, v: mx.array, step: Step) -> None:
        """Store rows k, v [L, KV, D]."""
        self.held.write(k.swapaxes(0, 1)[None], v.swapaxes(0, 1)[None], step)

    def attend_all(self, q: mx.array, step: Step, scale: float) -> mx.array:
        """As `PlainRows`."""
        return self.held.read(q.swapaxes(0, 1)[None], step, scale)[0].swapaxes(0, 1)

    def attend_chosen(
        self, q: mx.array, queries: mx.array, keys: mx.array, start: int, rule: Rule, step: Step
    ) -> mx.array:
        """As `PlainRows`."""
        ids, step.fault = choose(queries, keys, start, rule, step.fault, self.kernels)
        heads = q.swapaxes(0, 1)[None]
        return self.held.read_chosen(heads, ids, rule.ratio, start, step, rule.scale, self.kernels)


class SparseKV(CarriedState):
    """Keys and values of every position in `rows`; block keys [capacity / ratio, index_dim].

    Carried is only `open` [ratio - 1, index_dim]: raw index keys of the block that is not full.
    """

    def __init__(
        self,
        spec: SparseSpec,
        capacity: int,
        dtype: mx.Dtype,
        kernels: bool = False,
        balance: Balance | None = None,
    ) -> None:
        self.spec = spec
        self.rows: PlainRows | PackedRows
        if spec.packed is None:
            self.rows = PlainRows(spec, capacity, dtype, kernels)
        else:
            self.rows = PackedRows(spec.packed, capacity, balance, kernels)
        self.block_keys = mx.zeros((max(1, capacity // spec.ratio), spec.index_dim), dtype)
        super().__init__(lambda: (mx.zeros((max(1, spec.ratio - 1), spec.index_dim), dtype),))

    @property
    def open(self) -> mx.array:
        return self.saved[0]

    def arrays(self) -> list[mx.array]:
        """The buffers, to be evaluated or counted; callers must not keep them."""
        return [*self.rows.arrays(), self.block_keys, *self.saved]

    def rewind_refusal(self, furthest: int, to: int) -> str | None:
        """A block cut in two has lost the raw keys of its first part."""
        if to % self.spec.ratio:
            return f"position {to} is inside a block of {self.spec.ratio}; it needs a snapshot"
        return self.rows.rewind_refusal(furthest, to)

    def rows_refusal(self, furthest: int, to: int) -> str | None:
        """Packed rows do not become exact again."""
        return self.rows.rewind_refusal(furthest, to)

    def written(self, position: int, furthest: int) -> list[mx.array]:
        """Copies of the rows that matter at `position`, for a file."""
        blocks = max(1, position // self.spec.ratio)
        rows = self.rows.written(position, furthest)
        return [mx.contiguous(self.block_keys[:blocks]), *self.saved, *rows]

    def refill(self, saved: list[mx.array]) -> None:
        """Put back what `written` gave."""
        block_keys, carried, *rows = saved
        self.block_keys[: block_keys.shape[0]] = block_keys
        super().refill([carried])
        self.rows.refill(rows)

    def attend(
        self, q: mx.array, k: mx.array, v: mx.array, index: Index, step: Step, scale: float
    ) -> mx.array:
        """Write rows k, v [L, KV, D] of this step, then attend q [L, H, D] -> [L, H, D]."""
        self.rows.write(k, v, step)
        self._store_index(index, step)
        dense = step.rows
        if not step.force_dense:
            dense = min(max(self.spec.dense_keys - step.start, 0), step.rows)
        step.count("qsa_rows_dense", dense)
        step.count("qsa_rows_sparse", step.rows - dense)
        outputs = []
        if dense:
            outputs.append(self.rows.attend_all(q[:dense], step, scale))
        if dense < step.rows:
            outputs.append(self._attend_chosen(q, index, dense, step, scale))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)

    def _store_index(self, index: Index, step: Step) -> None:
        """Append raw index keys, and store the keys of blocks that they complete."""
        ratio = self.spec.ratio
        first, held = divmod(step.start, ratio)
        joined = mx.concatenate([self.open[:held], index.raw])
        full = joined.shape[0] // ratio
        if full:
            grouped = joined[: full * ratio].reshape(full, ratio, -1).astype(mx.float32)
            means = mx.mean(grouped, axis=1).astype(joined.dtype)
            self.block_keys[first : first + full] = index.block_keys(means, first)

        def opened(rows: int) -> Saved:
            """The raw keys of the block left open after `rows` rows of the pass."""
            count = held + rows
            left = joined[count // ratio * ratio : count]
            spare = self.open.shape[0] - left.shape[0]
            return (mx.pad(left, [(0, spare), (0, 0)]) if spare else mx.contiguous(left),)

        self.update(step, opened(step.rows), opened)

    def _attend_chosen(
        self, q: mx.array, index: Index, dense: int, step: Step, scale: float
    ) -> mx.array:
        """The rows from `dense` on, each over its best blocks and the open one."""
        ratio, chosen = self.spec.ratio, self.spec.chosen
        step.attention_calls += 1 if step.rows_attention else step.rows - dense
        every = dense == 0  # then nothing is cut off, which would cost launches
        out = self.rows.attend_chosen(
            q if every else q[dense:],
            index.queries if every else index.queries[dense:],
            self.block_keys,
            step.start + dense,
            Rule(ratio, chosen, scale, index.layer + 1),
            step,
        )
        seen = range(step.start + dense + 1, step.end + 1)
        step.count("qsa_blocks_scored", sum(visible // ratio for visible in seen))
        step.count("qsa_blocks_selected", chosen * (step.rows - dense))
        return out
