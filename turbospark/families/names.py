"""Source tensor names of every dialect brought to one spelling.

Knows wrappers (`model.language_model.`, `language_model.model.`), towers to leave out, and the
three ways experts are stored. Does not know any family's own tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from turbospark.families.base import Piece
from turbospark.install.planes import Planes

# Parts of multimodal and training checkpoints that text generation never reads.
_IGNORED = re.compile(
    r"^(model\.)?(visual|vision_tower|vision_model|vision_adapter|vision_projection|vision_embedder"
    r"|embed_vision|audio_tower|embed_audio|multi_modal_projector)\."
    r"|rotary_emb\.inv_freq$"
)
_WRAPPERS = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_EXPERTS = re.compile(
    r"^model\.layers\.(?P<layer>\d+)\.(?:mlp|block_sparse_moe|feed_forward)?\.?"
    r"(?:experts\.switch_glu|experts|switch_mlp)\.(?:(?P<expert>\d+)\.)?"
    r"(?P<matrix>gate_up_proj|gate_proj|up_proj|down_proj|w1|w2|w3)"
    r"(?P<suffix>\.weight|\.bias|_bias|)$"
)
_ROLES = {
    "gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down",
    "w2": "down",
}  # fmt: skip


def plain_name(name: str) -> str | None:
    """The name without wrappers; None when it belongs to a part that is left out."""
    if _IGNORED.search(name):
        return None
    for prefix, plain in _WRAPPERS:
        if name.startswith(prefix):
            return plain + name[len(prefix) :]
    return name


def expert_pieces(name: str, width: int) -> tuple[Piece, ...] | None:
    """Pieces of a routed-expert tensor (`name` plain); None when it is not one.

    Reads per-expert, stacked and fused storage; a fused matrix holds `width` rows of gate, then as
    many of up.
    """
    match = _EXPERTS.match(name)
    if match is None:
        return None
    layer = int(match["layer"])
    expert = None if match["expert"] is None else int(match["expert"])
    tail = "_bias" if "bias" in match["suffix"] else ""
    if match["matrix"] == "gate_up_proj":
        gate, up = slice(0, width), slice(width, 2 * width)
        return (
            Piece(layer=layer, role="gate" + tail, expert=expert, rows=gate),
            Piece(layer=layer, role="up" + tail, expert=expert, rows=up),
        )
    role = _ROLES[match["matrix"]] + tail
    return (Piece(layer=layer, role=role, expert=expert),)


def unpermute_rows(heads: int) -> Callable[[Planes], Planes]:
    """Undo GGUF's interleaved q/k rows of the llama architecture, head by head."""

    def transform(planes: Planes) -> Planes:
        rows = planes.shape[0]
        width = rows // heads
        i = np.arange(width)
        within = (i % (width // 2)) * 2 + i // (width // 2)
        index = (np.arange(heads)[:, None] * width + within[None, :]).reshape(-1)
        return planes.rows(mx.array(index.astype(np.uint32)))

    return transform
