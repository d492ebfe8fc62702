"""A row or a few through decoder layers of the llama kind, in seven to nine steps per layer.

norm and q/k/v; rope and store; attention in two; o and residual; then norm, gate/up and activation;
down and residual. Routed experts take four for the last two: norm and router, top-k, gate/up, down.
Where `chained` says so the steps of a layer are one launch. Knows packed matrices, what stands
around them, and caches of keys and values. Does not know which family asks. The kernels choose by
device; where none runs the same steps are plain MLX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from turbospark.cache.packed import PackedKV
from turbospark.cache.state import LayerStates
from turbospark.experts.base import ExpertStore
from turbospark.experts.resident import ResidentExperts
from turbospark.kernels import expert_mlp as routed
from turbospark.kernels.chain import BACKENDS, as_one, counters
from turbospark.kernels.choices import Choices, backend
from turbospark.kernels.decode_attention import HEAD_DIMS, Rules, decode_attention
from turbospark.kernels.fused import Around, Parts
from turbospark.kernels.qmv import plan, qmv
from turbospark.kernels.rope_kv import Heads, Turn, rope, rope_kv
from turbospark.kernels.router_topk import router_topk
from turbospark.kernels.router_topk import takes as topk_takes
from turbospark.layers.linear import AnyLinear, FusedLinear, QuantizedLinear
from turbospark.layers.norm import RMSNorm
from turbospark.layers.rope import Rope

AfterLayer = Callable[[int, mx.array], mx.array]
Layer = Callable[[mx.array, LayerStates], mx.array]


def product(
    x: mx.array,
    linear: QuantizedLinear,
    norm: RMSNorm | None = None,
    glu: str | None = None,
    residual: mx.array | None = None,
) -> mx.array:
    """glu(linear(norm x)) + residual. Shapes: x [..., K] -> [..., N], or N / 2 with `glu`."""
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    around = Around(weight, eps, linear.bias, glu, residual)
    return qmv(x, linear.fmt, linear.weight, linear.scales, linear.biases, around)


def fits(linear: AnyLinear, dtype: mx.Dtype, norm: bool, glu: str | None, residual: bool) -> bool:
    """Whether one row of `dtype` times the matrix, with that around it, is one launch here."""
    if not isinstance(linear, QuantizedLinear) or linear.weight.ndim != 2 or not linear.transpose:
        return False
    where = backend(mx.default_device())
    rows, words = linear.weight.shape
    x = (1, 1, words * 32 // linear.fmt.bits)
    parts = Parts(norm, linear.bias is not None, glu, residual)
    return where == "cpu" or plan(where, linear.fmt, rows, x, dtype, parts) is not None


# --- parts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FusedMLP:
    """x + down(glu(gate_up(norm x)))."""

    norm: RMSNorm
    gate_up: QuantizedLinear
    down: QuantizedLinear
    glu: str

    def __call__(self, x: mx.array) -> mx.array:
        """[1, M, H] -> [1, M, H]."""
        return product(product(x, self.gate_up, self.norm, self.glu), self.down, residual=x)


def fused_mlp(
    norm: RMSNorm, gate_up: FusedLinear, down: AnyLinear, glu: str, dtype: mx.Dtype
) -> FusedMLP | None:
    """The parts as launches; None where their formats do not allow it."""
    joined = gate_up.parts[0]
    if len(gate_up.parts) > 1 or not isinstance(joined, QuantizedLinear):
        return None
    if not isinstance(down, QuantizedLinear) or not fits(down, dtype, False, None, True):
        return None
    return FusedMLP(norm, joined, down, glu) if fits(joined, dtype, True, glu, False) else None


@dataclass(frozen=True)
class FusedExperts:
    """x + the routed experts of norm x, all in memory; a softmax router chooses `top_k`."""

    norm: RMSNorm
    router: AnyLinear
    top_k: int
    normalize: bool
    store: ResidentExperts
    experts: routed.Experts

    @property
    def is_launches(self) -> bool:
        """Whether routing too is nothing but launches of kernels."""
        router = self.router
        return isinstance(router, QuantizedLinear) and topk_takes(
            router.weight.shape[0], self.top_k
        )

    def __call__(self, x: mx.array) -> mx.array:
        """[1, M, H] -> [1, M, H]."""
        rows = x.reshape(x.shape[1:])
        if isinstance(self.router, QuantizedLinear):
            inputs, around = rows, routed.Around(self.norm.weight, self.norm.eps, residual=rows)
            scores = product(rows, self.router, self.norm)
        else:
            inputs, around = self.norm(rows), routed.Around(residual=rows)
            scores = self.router(inputs)
        ids, weights = router_topk(scores, self.top_k, self.normalize)
        return routed.expert_mlp(inputs, ids, weights, self.experts, around).reshape(x.shape)


def fused_experts(
    norm: RMSNorm,
    router: AnyLinear,
    top_k: int,
    normalize: bool,
    store: ExpertStore,
    layer: int,
    glu: str,
    dtype: mx.Dtype,
) -> FusedExperts | None:
    """The parts as launches; None where experts are not resident or not packed alike."""
    if not isinstance(store, ResidentExperts):
        return None
    experts = store.packed(layer, glu)
    if experts is None or not routed.takes(experts, 1):
        return None
    if isinstance(router, QuantizedLinear) and not fits(router, dtype, True, None, False):
        return None
    return FusedExperts(norm, router, top_k, normalize, store, experts)


@dataclass(frozen=True)
class FusedLayer:
    """One decoder layer; the residual stream is in its inputs and outputs."""

    norm: RMSNorm
    qkv: QuantizedLinear
    heads: Heads
    turn: Turn
    scale: float
    o_proj: QuantizedLinear
    mlp: FusedMLP | FusedExperts

    def __call__(
        self, x: mx.array, keys: mx.array, values: mx.array, length: mx.array, window: int | None
    ) -> tuple[mx.array, mx.array, mx.array]:
        """The next residual stream, and the buffers with this pass's rows.

        Shapes: x [1, M, H]; keys, values [1, KV, capacity, D]; length int32 [1], positions with
        these M; a `window` says that the buffers are rings. Where a kernel stores the rows the
        buffers returned are those given.
        """
        rules = Rules(self.scale, window or 0, ring=window is not None)
        qkv = product(x, self.qkv, self.norm)
        q, keys, values = rope_kv(qkv, keys, values, length, self.heads, self.turn, rules.ring)
        attended = decode_attention(q, keys, values, length, rules)
        return self.mlp(product(attended, self.o_proj, residual=x)), keys, values

    def is_chain(self, where: str, x: mx.array, keys: mx.array) -> bool:
        """Whether `__call__` is nothing but launches of kernels that back end `where` can run as
        one. More rows would want more shared memory than a chain has.
        """
        launches = isinstance(self.mlp, FusedMLP) or self.mlp.is_launches
        return where in BACKENDS and x.shape[1] == 1 and keys.dtype == x.dtype and launches

    def over_packed(self, x: mx.array, cache: PackedKV, length: mx.array) -> mx.array:
        """The next residual stream over a packed cache, prepared for this pass."""
        qkv = product(x, self.qkv, self.norm)
        q, k, v = rope(qkv, length, self.heads, self.turn)
        turned = cache.turn(q, k, v, length, self.scale)
        attended = cache.attended(turned, length, x.dtype)
        return self.mlp(product(attended, self.o_proj, residual=x))


def fused_layer(
    norm: RMSNorm,
    qkv: FusedLinear,
    heads: Heads,
    rope: Rope,
    scale: float,
    o_proj: AnyLinear,
    mlp: FusedMLP | FusedExperts | None,
    dtype: mx.Dtype,
) -> FusedLayer | None:
    """The parts as launches; None where one of them has to stay as it is."""
    joined = qkv.parts[0]
    if mlp is None or len(qkv.parts) > 1 or not isinstance(joined, QuantizedLinear):
        return None
    if not isinstance(o_proj, QuantizedLinear) or not fits(o_proj, dtype, False, None, True):
        return None
    if backend(mx.default_device()) != "cpu" and heads.dim not in HEAD_DIMS:
        return None
    turn = Turn(rope.dims, rope.periods, rope.interleaved, rope.attention_factor)
    if not fits(joined, dtype, True, None, False):
        return None
    return FusedLayer(norm, joined, heads, turn, scale, o_proj, mlp)


class NormedHead:
    """The final norm and the output head: one launch for few rows where the head is packed."""

    def __init__(self, norm: RMSNorm, linear: AnyLinear, kernels: Choices, dtype: mx.Dtype) -> None:
        self.norm, self.linear = norm, linear
        self.rows = kernels.fused_rows if fits(linear, dtype, True, None, False) else None

    def __call__(self, x: mx.array) -> mx.array:
        """[1, M, H] -> [1, M, vocab]."""
        linear = self.linear
        if self.rows is None or x.shape[1] > self.rows or not isinstance(linear, QuantizedLinear):
            return linear(self.norm(x))
        return product(x, linear, self.norm)


# --- all layers -----------------------------------------------------------------------------------


class FusedDecode:
    """All layers of a model, fused where they can be, for passes of at most `fused_rows` rows.

    With `compiled` and every layer fused, one row runs through all of them as one graph that was
    traced once: the host then makes no layer's graph anew for each token.
    """

    def __init__(
        self, layers: Sequence[Layer], fused: Sequence[FusedLayer | None], kernels: Choices
    ) -> None:
        self.layers = layers
        self.fused = fused
        self.rows = kernels.fused_rows
        self.compiled = kernels.compiled and None not in fused
        self._counters = counters() if kernels.chained else None
        self.count = sum(layer is not None for layer in fused)
        """Layers that are fused."""
        routed_by = [layer.mlp for layer in fused if layer and isinstance(layer.mlp, FusedExperts)]
        self._routed = [(m.store, m.top_k, len(routed_by)) for m in routed_by[:1]]
        self._traced: dict[tuple[int | None, ...], Callable[..., Any]] = {}

    def takes(self, states: LayerStates) -> bool:
        """Whether the pass begun on `states` may run here."""
        step, windows = states.step, states.windows
        if self.rows is None or step.rows > self.rows or windows is None or not self.count:
            return False
        if any(isinstance(c, PackedKV) and not c.by_kernels(step) for c in states.layers):
            return False
        if step.rows == 1:
            return True
        # A row must not overwrite what an earlier one still reads.
        slack = [c.capacity - w + 1 for c, w in zip(states.layers, windows, strict=True) if w]
        return step.rows_attention and step.rows <= min(slack, default=step.rows)

    def __call__(
        self, x: mx.array, states: LayerStates, after_layer: AfterLayer | None = None
    ) -> mx.array:
        """[1, M, H] -> [1, M, H] behind the last layer."""
        step = states.step
        self._count(states)
        packed = any(isinstance(cache, PackedKV) for cache in states.layers)
        if self.compiled and step.rows == 1 and after_layer is None and not packed:
            return self._run_traced(x, states)
        for i, (fused, plain, cache) in enumerate(
            zip(self.fused, self.layers, states.layers, strict=True)
        ):
            if fused is None or states.windows is None:
                x = plain(x, states)
            elif isinstance(cache, PackedKV):
                cache.prepare(step)
                x = fused.over_packed(x, cache, states.length())
            else:
                keys, values = cache.arrays()
                x, *buffers = run_layer(
                    fused, x, keys, values, states.length(), states.windows[i], self._counters
                )
                cache.put(*buffers)
                del keys, values, buffers
            if after_layer is not None:
                x = after_layer(i, x)
        return x

    def _count(self, states: LayerStates) -> None:
        step = states.step
        step.fused_layers += self.count
        step.attention_calls += self.count
        for store, ranks, layers in self._routed:  # one store, and one rule for all layers
            store.count(step.rows * layers, ranks, passes=layers)

    def _run_traced(self, x: mx.array, states: LayerStates) -> mx.array:
        windows = states.windows
        assert windows is not None
        run = self._traced.get(windows)
        if run is None:
            run = self._traced[windows] = mx.compile(traceable(self.fused, windows, self._counters))
        x, following, written = run(x, states.length_words(), states.arrays())
        states.follow(following)
        if written:
            for i, cache in enumerate(states.layers):
                cache.put(*written[2 * i : 2 * i + 2])
        return x


def run_layer(
    layer: FusedLayer,
    x: mx.array,
    keys: mx.array,
    values: mx.array,
    length: mx.array,
    window: int | None,
    count: mx.array | None,
) -> tuple[mx.array, mx.array, mx.array]:
    """The layer's result, by one launch if there are counters and the layer can."""
    where = backend(mx.default_device())
    if count is None or not layer.is_chain(where, x, keys):
        return layer(x, keys, values, length, window)
    x = as_one(where, count, lambda: layer(x, keys, values, length, window)[0])
    return x, keys, values


def traceable(
    layers: Sequence[FusedLayer | None],
    windows: tuple[int | None, ...],
    count: mx.array | None = None,
) -> Callable[..., tuple[mx.array, mx.array, list[mx.array]]]:
    """x [1, 1, H], length int32 [4], all buffers -> x, the next length, and the buffers if they are
    new arrays. With `count` a layer is one launch if it can. Refers to nothing that refers to it.
    """

    def run(
        x: mx.array, words: mx.array, buffers: list[mx.array]
    ) -> tuple[mx.array, mx.array, list[mx.array]]:
        written: list[mx.array] = []
        length = words[:1]
        for i, (layer, window) in enumerate(zip(layers, windows, strict=True)):
            assert layer is not None
            keys, values = buffers[2 * i : 2 * i + 2]
            x, *stored = run_layer(layer, x, keys, values, length, window, count)
            if stored[0] is not keys:
                written += stored
        return x, words + 1, written

    return run
