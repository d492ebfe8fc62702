"""The multi-token-prediction head in numpy, of dense models and of mixtures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import heads
import mlx.core as mx
import numpy as np

from turbospark import Runner
from turbospark.speculation.drafter import Proposal

MATRICES = ("gate", "up", "down")


def gated(y: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """down (silu(gate y) * up y)."""
    scores = gate @ y
    return down @ (scores / (1 + np.exp(-scores)) * (up @ y))


class NumpyHead:
    """The head in float64, row by row, without a cache. `stored` is what an install made of a
    tensor of the checkpoint.
    """

    def __init__(
        self, path: Path, stored: Callable[[str, mx.array], mx.array] = lambda name, value: value
    ) -> None:
        source = path.with_name(path.name + "-source")
        tensors = mx.load(str(source / "model.safetensors"))
        values = {k: stored(k, v).astype(mx.float32) for k, v in tensors.items()}
        self.t = {k: np.array(v, np.float64) for k, v in values.items()}
        config = heads.json.loads((source / "config.json").read_text())
        self.c = config.get("text_config", config)
        rope = self.c.get("rope_parameters", self.c)
        self.theta = rope["rope_theta"]
        self.turned = int(self.c["head_dim"] * rope.get("partial_rotary_factor", 0.25))
        self.embed = next(v for k, v in self.t.items() if k.endswith("embed_tokens.weight"))
        self.out = self.t.get("lm_head.weight", self.embed)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        eps = self.c["rms_norm_eps"]
        scale = 1 + self.t[f"mtp.{name}.weight"]  # centred
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.t[f"mtp.{name}.weight"].T

    def turn(self, x: np.ndarray, position: int) -> np.ndarray:
        half = self.turned // 2
        angle = position / self.theta ** (np.arange(half) * 2 / self.turned)
        a, b = x[..., :half], x[..., half : self.turned]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., self.turned :]], -1)

    def __call__(self, tokens: Sequence[int], hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pairs (t_{i+1}, h_i) of positions 0.. -> (logits, normed hidden) of the last one."""
        heads_, kv = self.c["num_attention_heads"], self.c["num_key_value_heads"]
        d, layer = self.c["head_dim"], "layers.0"
        e = self.norm(self.embed[list(tokens)], "pre_fc_norm_embedding")
        x = (
            np.concatenate([e, self.norm(hidden, "pre_fc_norm_hidden")], -1)
            @ self.t["mtp.fc.weight"].T
        )
        y = self.norm(x, f"{layer}.input_layernorm")
        keys, values = [], []
        for i, row in enumerate(y):
            k = self.linear(row, f"{layer}.self_attn.k_proj").reshape(kv, d)
            keys.append(self.turn(self.norm(k, f"{layer}.self_attn.k_norm"), i))
            values.append(self.linear(row, f"{layer}.self_attn.v_proj").reshape(kv, d))
        both = self.linear(y[-1], f"{layer}.self_attn.q_proj").reshape(heads_, 2 * d)
        q = self.turn(self.norm(both[:, :d], f"{layer}.self_attn.q_norm"), len(y) - 1)
        outs = []
        for h in range(heads_):
            g = h // (heads_ // kv)
            scores = np.array([q[h] @ k[g] for k in keys]) * d**-0.5
            mass = np.exp(scores - scores.max())
            outs.append((mass / mass.sum()) @ np.array([v[g] for v in values]))
        gated = np.array(outs) / (1 + np.exp(-both[:, d:]))
        x = x[-1] + self.linear(gated.reshape(-1), f"{layer}.self_attn.o_proj")
        y = self.norm(x, f"{layer}.post_attention_layernorm")
        x = self.norm(x + self.feed_forward(y, f"{layer}.mlp"), "norm")
        return self.out @ x, x

    def feed_forward(self, y: np.ndarray, name: str) -> np.ndarray:
        """y [H]: of a mixture the best experts by softmax, and the gated shared one."""
        if f"mtp.{name}.gate.weight" not in self.t:
            return gated(y, *(self.t[f"mtp.{name}.{p}_proj.weight"] for p in MATRICES))
        scores = np.exp(self.linear(y, f"{name}.gate"))
        best = np.argsort(-scores)[: self.c["num_experts_per_tok"]]
        routed = [
            scores[e] * gated(y, *(self.expert(f"mtp.{name}.experts", p, int(e)) for p in MATRICES))
            for e in best
        ]
        shared = gated(y, *(self.t[f"mtp.{name}.shared_expert.{p}_proj.weight"] for p in MATRICES))
        share = 1 / (1 + np.exp(-self.linear(y, f"{name}.shared_expert_gate")))
        return sum(routed) / scores[best].sum() + share * shared

    def expert(self, name: str, projection: str, e: int) -> np.ndarray:
        """One expert's matrix, stored apart or in a stack."""
        apart = self.t.get(f"{name}.{e}.{projection}_proj.weight")
        if apart is not None:
            return apart
        if projection == "down":
            return self.t[f"{name}.down_proj"][e]
        gate, up = np.split(self.t[f"{name}.gate_up_proj"][e], 2)
        return gate if projection == "gate" else up


def hidden_rows(runner: Runner, ids: Sequence[int]) -> np.ndarray:
    """The model's own rows after its final norm, from a pass without the drafter."""
    engine = runner._engine
    assert engine is not None
    states = engine.states
    states.begin(len(ids))
    rows = engine.model.final_norm(engine.model(mx.array([list(ids)]), states))
    out = np.array(rows[0], np.float64)
    states.reset()
    return out


def head_rows(runner: Runner, ids: Sequence[int], count: int) -> list[np.ndarray]:
    """The logits from which the open head drafts `count` tokens (7, 8, ...) behind `ids`."""
    engine, rows = runner._engine, []
    assert engine is not None and engine.watcher is not None

    def choose(row: np.ndarray, before: Sequence[int]) -> Proposal:
        rows.append(np.array(row))
        return Proposal(7 + len(before))

    with engine.working():
        engine.watcher.propose(list(ids), count, choose)
    return rows
