"""The multi-token-prediction head: a trained block that says the token after next.

Knows the head's arithmetic and its place in the session: its keys and values and the newest hidden
row are caches beside the model's own, so that they are parked, saved, snapshotted and cut with
them. Does not know which family's block it runs.

At position i the head reads the model's hidden row h_i (after the final norm, as the output head
reads it) and token t_{i+1}, writes row i of its own cache, and predicts t_{i+2}. Of a chain of
proposals only the first has a hidden row of the model; the others read the head's own output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from turbospark.cache.attend import Step
from turbospark.cache.recurrent import RowState
from turbospark.cache.specs import CacheSpec, RowSpec
from turbospark.cache.state import LayerStates
from turbospark.errors import NonFiniteLogitsError, SpeculationUnavailableError
from turbospark.families.base import DraftHead, Hold
from turbospark.kernels.likeliest import likeliest_reference
from turbospark.layers.weights import Weights
from turbospark.options import LiveToggles
from turbospark.speculation.drafter import Chooser, Proposal


def mtp_specs(head: DraftHead, config: Any, hidden: int) -> list[CacheSpec]:
    """What the head remembers: its block's keys and values, and the newest hidden row."""
    return [*head.memory(config), RowSpec(hidden)]


@dataclass
class _At:
    """The session as a layer sees it, at a position of the head's own."""

    step: Step
    layers: list[Any]


class MtpHead:
    """x = fc [norm_e(embed t) | norm_h(h)]; the block; a norm. Table and output head are the
    model's.
    """

    def __init__(
        self, head: DraftHead, config: Any, w: Weights, model: Any, first: int, hold: Hold
    ) -> None:
        eps, centred = head.norms(config)
        self.embed_tokens, self.lm_head = model.embed_tokens, model.lm_head
        self.embedding_norm = w.norm("mtp.pre_fc_norm_embedding.weight", eps, centred)
        self.hidden_norm = w.norm("mtp.pre_fc_norm_hidden.weight", eps, centred)
        self.fc = w.linear("mtp.fc")
        self.blocks = head.blocks(config, w, first, hold)
        self.norm = w.norm("mtp.norm.weight", eps, centred)

    def __call__(self, ids: mx.array, hidden: mx.array, at: _At) -> mx.array:
        """ids [1, L], hidden [1, L, H] after a final norm -> the same, one position on."""
        e, h = self.embedding_norm(self.embed_tokens(ids)), self.hidden_norm(hidden)
        x = self.fc(mx.concatenate([e, h], axis=-1))
        for block in self.blocks:
            x = block(x, at)
        return self.norm(x)

    def logits(self, hidden: mx.array) -> mx.array:
        """[1, L, H] -> float32 [1, L, vocab]."""
        return self.lm_head(hidden).astype(mx.float32)


class MtpDrafter:
    """Proposes by stepping the head; reads every pass of the model, so that it is never behind.

    `first` is the index of the head's caches among the session's layers. Between passes the head's
    cursor is one row behind the model's position: the row there waits for its token.
    """

    name = "mtp"
    has_probabilities = True
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        head: MtpHead,
        final_norm: Callable[[mx.array], mx.array],
        states: Callable[[], LayerStates],
        first: int,
        toggles: LiveToggles,
    ) -> None:
        self.head, self.final_norm, self.states = head, final_norm, states
        self.row = first + len(head.blocks)
        self.toggles = toggles
        self._drafted = (-1, 0)
        """Where the newest proposals were made, and how many rows the head wrote for them."""

    # --- reading the model's passes ---------------------------------------------------------------

    def watch(
        self, ids: mx.array, hidden: mx.array, taps: dict[int, mx.array], states: LayerStates
    ) -> None:
        """Prime the head with the rows of a pass; a verifying pass was primed by its proposals."""
        step, normed = states.step, self.final_norm(hidden)
        if not step.tape:
            self._prime(ids, normed, states)
        elif self._drafted[0] != step.start or step.rows > self._drafted[1]:
            raise SpeculationUnavailableError(
                f"a pass of {step.rows} rows at position {step.start} is to be verified, but the "
                f"MTP head drafted {self._drafted[1]} rows at {self._drafted[0]}"
            )
        self._newest(states).update(
            step,
            (mx.contiguous(normed[:, -1:]),),
            lambda kept: (mx.contiguous(normed[:, kept - 1 : kept]),),
        )

    def settle(self, rows: int, states: LayerStates) -> None:
        """The caches were cut with the model's; the head's rows before the cursor are right."""

    def _prime(self, ids: mx.array, normed: mx.array, states: LayerStates) -> None:
        """Write the head's rows of pairs (h_i, t_{i+1}) that this pass completes."""
        start = states.step.start
        if start == 0:
            ids, hidden, first = ids[:, 1:], normed[:, :-1], 0
        else:
            (newest,) = self._newest(states).saved
            hidden, first = mx.concatenate([newest, normed[:, :-1]], axis=1), start - 1
        rows = ids.shape[1]
        size = rows if self.toggles.mtp_batched_prime else 1
        for at in range(0, rows, max(1, size)):
            part = slice(at, at + size)
            self.head(ids[:, part], hidden[:, part], self._at(first + at, size, states))

    def _newest(self, states: LayerStates) -> RowState:
        newest: RowState = states.layers[self.row]
        return newest

    def _at(self, start: int, rows: int, states: LayerStates) -> _At:
        return _At(Step(start, rows, states.step.rows_attention), states.layers)

    # --- proposing --------------------------------------------------------------------------------

    def begin(self, ids: Sequence[int]) -> None:
        """Nothing: the prompt's passes were watched."""

    def propose(self, history: Sequence[int], count: int, choose: Chooser | None) -> list[Proposal]:
        """`count` proposals by count + 1 steps; the last writes the row that is needed when all
        are accepted. The likeliest are read back at once, drawn ones one by one.
        """
        states = self.states()
        base = states.position
        if base != len(history) - 1 or base == 0:
            raise SpeculationUnavailableError(
                f"the MTP head stands at position {base - 1}, but a history of {len(history)} "
                f"tokens is drafted at {len(history) - 2}"
            )
        (hidden,) = self._newest(states).saved
        token = mx.array([[history[-1]]])
        drawn: list[Proposal] = []
        likeliest: list[mx.array] = []
        for depth in range(count + 1):
            hidden = self.head(token, hidden, self._at(base - 1 + depth, 1, states))
            if depth == count:
                break
            row = self.head.logits(hidden)[0, 0]
            if choose is None:
                token = likeliest_reference(row).reshape(1, 1)
                likeliest.append(token)
            else:
                drawn.append(choose(np.asarray(row), [p.token for p in drawn]))
                token = mx.array([[drawn[-1].token]])
        self._drafted = (base, count + 1)
        if likeliest:
            mx.eval(likeliest)
            tokens = np.array(likeliest).ravel().tolist()
            # A head of NaN would propose some token without a word.
            if min(tokens) < 0:
                raise NonFiniteLogitsError(
                    "the MTP head's logits are not finite; its weights or the dtype are unfit"
                )
            return [Proposal(token) for token in tokens]
        return drawn

    def keep(self, rows: int) -> None:
        """Nothing: `settle` told."""
