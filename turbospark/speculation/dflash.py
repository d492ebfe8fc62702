"""The DFlash2 block drafter: all proposals of a round from one pass over masked rows.

Knows the drafter's arithmetic and its place in the session: keys and values of committed positions
are caches beside the model's own. Does not know which model it reads.

Context: for each committed position the model's stream after the tapped layers is joined, mixed and
normed, and gives each layer of the drafter a key and a value. Block: the newest token and masks, at
the positions that follow, attend to the context and, in both directions, to each other. Every norm
multiplies by its weight as stored. Embedding and output head are the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from turbospark.cache.kv import LinearKV, RingKV
from turbospark.cache.specs import CacheSpec, RingSpec
from turbospark.cache.state import LayerStates
from turbospark.errors import NonFiniteLogitsError, SpeculationUnavailableError
from turbospark.families.dflash_shapes import DflashConfig
from turbospark.layers.mlp import GatedMLP
from turbospark.layers.rope import make_rope
from turbospark.layers.weights import Weights
from turbospark.speculation.drafter import Chooser, Proposal


def dflash_specs(c: DflashConfig) -> list[CacheSpec]:
    """Keys and values of the newest positions, per layer."""
    return [RingSpec(c.kv_heads, c.head_dim, c.head_dim, c.window)] * c.layers


class Conv:
    """A short causal convolution over the block whose taps each row sets for itself.

    out[i] = sum over t of (base[side, t] + delta[i, side, t]) * x[i - t]; delta is one number per
    group of channels. Side 0 mixes a sublayer's input, side 1 its output.
    """

    def __init__(self, c: DflashConfig, w: Weights, name: str) -> None:
        self.taps, self.group = c.conv_taps, c.conv_group
        self.base = w.array(f"{name}.base_kernel")
        self.projection = w.linear(f"{name}.kernel_projection")

    def deltas(self, x: mx.array) -> mx.array:
        """[1, B, H] -> [1, B, 2, taps, H]."""
        found = self.projection(x).reshape(*x.shape[:2], 2, self.taps, -1)
        return mx.repeat(found, self.group, axis=-1)

    def __call__(self, x: mx.array, deltas: mx.array, side: int) -> mx.array:
        """x [1, B, H] -> the same; rows before the block are zeros."""
        out = (self.base[side, 0] + deltas[:, :, side, 0]) * x
        for tap in range(1, self.taps):
            before = mx.pad(x, [(0, 0), (tap, 0), (0, 0)])[:, : x.shape[1]]
            out = out + (self.base[side, tap] + deltas[:, :, side, tap]) * before
        return out


class Layer:
    """x += conv attention conv (norm x); x += conv mlp conv (norm x)."""

    def __init__(self, c: DflashConfig, w: Weights, name: str) -> None:
        self.heads, self.kv_heads, self.scale = c.heads, c.kv_heads, c.head_dim**-0.5
        attention = f"{name}.self_attn"
        self.q_proj, self.o_proj = w.linear(f"{attention}.q_proj"), w.linear(f"{attention}.o_proj")
        self.kv = w.fused([f"{attention}.{p}_proj" for p in "kv"])
        self.q_norm = w.norm(f"{attention}.q_norm.weight", c.eps)
        self.k_norm = w.norm(f"{attention}.k_norm.weight", c.eps)
        self.input_layernorm = w.norm(f"{name}.input_layernorm.weight", c.eps)
        self.post_attention_layernorm = w.norm(f"{name}.post_attention_layernorm.weight", c.eps)
        self.attention_conv = Conv(c, w, f"{name}.attention_conv")
        self.mlp_conv = Conv(c, w, f"{name}.mlp_conv")
        self.mlp = GatedMLP(w, f"{name}.mlp")
        self.rope = make_rope(c.head_dim, c.rope_theta, None, c.max_positions)

    def keys_values(self, x: mx.array, start: int) -> tuple[mx.array, mx.array]:
        """x [1, L, H] of positions from `start` on -> k, v [1, KV, L, D]."""
        k, v = (a.reshape(1, x.shape[1], self.kv_heads, -1) for a in self.kv(x))
        return self.rope(self.k_norm(k).swapaxes(1, 2), start), v.swapaxes(1, 2)

    def __call__(
        self, x: mx.array, start: int, context: tuple[mx.array, mx.array], mask: mx.array
    ) -> mx.array:
        """x [1, B, H] at positions from `start` on; mask [B, S + B] over context and block."""
        y = self.input_layernorm(x)
        deltas = self.attention_conv.deltas(y)
        x = x + self.attention_conv(
            self._attend(self.attention_conv(y, deltas, 0), start, context, mask), deltas, 1
        )
        y = self.post_attention_layernorm(x)
        deltas = self.mlp_conv.deltas(y)
        return x + self.mlp_conv(self.mlp(self.mlp_conv(y, deltas, 0)), deltas, 1)

    def _attend(
        self, y: mx.array, start: int, context: tuple[mx.array, mx.array], mask: mx.array
    ) -> mx.array:
        rows = y.shape[1]
        q = self.q_norm(self.q_proj(y).reshape(1, rows, self.heads, -1)).swapaxes(1, 2)
        k, v = (
            mx.concatenate([old.astype(new.dtype), new], axis=2)
            for old, new in zip(context, self.keys_values(y, start), strict=True)
        )
        out = mx.fast.scaled_dot_product_attention(
            self.rope(q, start), k, v, scale=self.scale, mask=mask[None, None]
        )
        return self.o_proj(out.swapaxes(1, 2).reshape(1, rows, -1))


class DflashModel:
    """The drafter's weights: context mixer, layers, final norm, selector."""

    def __init__(self, c: DflashConfig, w: Weights, model: Any) -> None:
        self.c, self.dtype = c, w.dtype
        self.embed_tokens, self.lm_head = model.embed_tokens, model.lm_head
        self.fc = w.linear("dflash.fc")
        self.hidden_norm = w.norm("dflash.hidden_norm.weight", c.eps)
        self.layers = [Layer(c, w, f"dflash.layers.{i}") for i in range(c.layers)]
        self.norm = w.norm("dflash.norm.weight", c.eps)
        selector = "dflash.candidate_selector"
        self.selector = w.linear(f"{selector}.hidden_projection")
        self.predecessors = w.array(f"{selector}.predecessor_codebook")
        self.successors = w.array(f"{selector}.successor_codebook")

    def context(self, taps: Sequence[mx.array]) -> mx.array:
        """Tapped streams, each [1, L, model's H] -> [1, L, H]."""
        joined = mx.concatenate([t.astype(self.dtype) for t in taps], axis=-1)
        return self.hidden_norm(self.fc(joined))

    def block(self, anchor: int, start: int, caches: Sequence[LinearKV | RingKV]) -> mx.array:
        """Hidden rows [1, block_size - 1, H], after the norm, of the masks after `anchor`."""
        c = self.c
        ids = mx.array([[anchor] + [c.mask_token] * (c.block_size - 1)])
        x = self.embed_tokens(ids).astype(self.dtype)
        mask = mx.array(visible(caches[0], start, c.block_size, c.window))
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, start, held(cache, start), mask)
        return self.norm(x)[:, 1:]

    def lattice(self, anchor: int, hidden: mx.array) -> tuple[mx.array, mx.array]:
        """hidden [1, n, H] -> candidate ids [n, k], best first, and scores float32 [n, k, k].

        scores[l, p, c]: candidate c of slot l after candidate p of the slot before.
        """
        logits = self.lm_head(hidden)[0].astype(mx.float32)
        ids = mx.argsort(-logits, axis=-1)[:, : self.c.top_k]
        unary = mx.take_along_axis(logits, ids, axis=-1)
        first = mx.broadcast_to(mx.array([[anchor]]), (1, ids.shape[1]))
        before = mx.concatenate([first.astype(ids.dtype), ids[:-1]])
        mixed = self.predecessors[before] * self.selector(hidden)[0][:, None]
        pairs = mixed.astype(mx.float32) @ self.successors[ids].astype(mx.float32).swapaxes(1, 2)
        return ids, unary[:, None] + pairs


def store(cache: LinearKV | RingKV, k: mx.array, v: mx.array, start: int) -> None:
    """Put k, v [1, KV, L, D] of positions from `start` on into a cache of at least L rows."""
    if isinstance(cache, RingKV):
        cache.ring.write(k, v, start)
    else:
        end = start + k.shape[2]
        cache.keys[:, :, start:end], cache.values[:, :, start:end] = k, v


def held(cache: LinearKV | RingKV, end: int) -> tuple[mx.array, mx.array]:
    """Keys and values of the newest positions before `end`, in the order of their slots."""
    keys, values = cache.arrays()
    rows = min(end, keys.shape[2])
    return keys[:, :, :rows], values[:, :, :rows]


def visible(cache: LinearKV | RingKV, end: int, block: int, window: int) -> np.ndarray:
    """Boolean [block, S + block]: which row of the block reads what. The block reads all of itself,
    and of the context what lies within the window.
    """
    capacity = cache.arrays()[0].shape[2]
    slots = np.arange(min(end, capacity))
    positions = slots + (end - 1 - slots) // capacity * capacity
    near = np.arange(end, end + block)[:, None] - positions < window
    return np.concatenate([near, np.ones((block, block), bool)], axis=1)


class DflashDrafter:
    """Proposes a block; reads the tapped layers of every pass. `first`: its first cache."""

    name = "dflash"
    has_probabilities = False

    def __init__(self, model: DflashModel, states: Callable[[], LayerStates], first: int) -> None:
        self.model, self.states, self.first = model, states, first
        self.taps = model.c.target_layers
        self._verified: tuple[int, list[mx.array]] | None = None

    def watch(
        self, ids: mx.array, hidden: mx.array, taps: dict[int, mx.array], states: LayerStates
    ) -> None:
        """Remember a pass as context; a verifying pass waits until it is known what stays."""
        found = [taps[layer] for layer in self.taps]
        self._verified = (states.step.start, found) if states.step.tape else None
        if not states.step.tape:
            self._remember(found, states.step.start, states)

    def settle(self, rows: int, states: LayerStates) -> None:
        """The first `rows` rows of the verifying pass are committed: they become context."""
        if self._verified is None or self._verified[0] + rows != states.position:
            raise SpeculationUnavailableError(
                f"{rows} rows are kept up to position {states.position}, but the block drafter "
                "did not see them verified"
            )
        start, found = self._verified
        self._verified = None
        self._remember([t[:, :rows] for t in found], start, states)

    def _remember(self, taps: list[mx.array], start: int, states: LayerStates) -> None:
        caches = self._caches(states)
        most = caches[0].arrays()[0].shape[2]
        skipped = max(0, taps[0].shape[1] - most)  # older rows than a ring holds
        context = self.model.context([t[:, skipped:] for t in taps])
        for layer, cache in zip(self.model.layers, caches, strict=True):
            store(cache, *layer.keys_values(context, start + skipped), start + skipped)

    def _caches(self, states: LayerStates) -> list[Any]:
        return states.layers[self.first : self.first + len(self.model.layers)]

    def begin(self, ids: Sequence[int]) -> None:
        """Nothing: the prompt's passes were watched."""

    def propose(self, history: Sequence[int], count: int, choose: Chooser | None) -> list[Proposal]:
        """The greedy walk through the block's candidates, `count` tokens of it."""
        states = self.states()
        if states.position != len(history) - 1:
            raise SpeculationUnavailableError(
                f"the block drafter holds {states.position} positions of a history of "
                f"{len(history)} tokens; expected {len(history) - 1}"
            )
        hidden = self.model.block(history[-1], states.position, self._caches(states))
        ids, scores = self.model.lattice(history[-1], hidden[:, :count])
        candidates, table = np.array(ids), np.array(scores)
        # NaN is never above anything: the walk would propose rubbish without a word.
        if not np.isfinite(table).all():
            raise NonFiniteLogitsError(
                "the block drafter's scores are not finite; its weights or the dtype are unfit"
            )
        proposals, at = [], 0
        for slot in range(len(candidates)):
            at = int(table[slot, at].argmax())
            proposals.append(Proposal(int(candidates[slot, at])))
        return proposals

    def keep(self, rows: int) -> None:
        """Nothing: `settle` told."""
