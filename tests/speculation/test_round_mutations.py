"""What is easily got wrong in a round, planted one at a time: each must be noticed.

A row names what looks for the mistake and replaces text in the source of one of our functions; what
looks is first shown to be content without the mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import blocks
import heads
import mlx.core as mx
import numpy as np
import pytest
import test_acceptance_laws as laws
from numpy_heads import NumpyHead, head_rows, hidden_rows
from planting import plant
from test_block_drafter import NumpyDrafter, tables
from test_steered_drafters import STEERING, steered_pass
from toys import LIES, Toy, open_with, prompt_of, right, teach

from turbospark import DraftPolicies, OpenOptions, Runner, convert
from turbospark.cache.kv import RingKV
from turbospark.cache.state import LayerStates
from turbospark.engine import Engine
from turbospark.errors import TurbosparkError
from turbospark.generation import _Run
from turbospark.speculation.acceptance import Rejection
from turbospark.speculation.dflash import DflashDrafter
from turbospark.speculation.draft_model import DraftModel
from turbospark.speculation.drafter import Proposal
from turbospark.speculation.mtp import MtpDrafter
from turbospark.speculation.rounds import Rounds

CPU: dict[str, Any] = {"max_context": 160, "device": "cpu", "dtype": "float32"}
GREEDY: dict[str, Any] = {"max_new_tokens": 21, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Installs with a knowing MTP head, and with a random block drafter."""
    root = tmp_path_factory.mktemp("carried")
    folder = blocks.drafter(root / "drafter")
    source = heads.checkpoint(root / "plain", honest=False)
    paths = {
        "mtp": heads.install(root / "mtp", honest=True),
        "random mtp": heads.install(root / "random", honest=False),
        "dflash": convert(source, root / "dflash", drafter=folder, progress=False),
    }
    return paths.__getitem__


class Looker:
    """What looks for a mistake: each method says whether all is as it should be."""

    def __init__(self, installed: Callable[[str], Path], carried: Callable[[str], Path]) -> None:
        self.installed, self.carried = installed, carried

    # --- laws -------------------------------------------------------------------------------------

    def impossible_token(self) -> bool:
        return laws.at([0.0, 0.5], [1, 0], laws.drawn(1, [0.5, 0.5])) == (0, False)

    def ratio(self) -> bool:
        p, proposal = [0.4, 0.6], laws.drawn(0, [0.8, 0.2])
        return laws.at([0.49], p, proposal) == (0, True) and not laws.at([0.51, 0], p, proposal)[1]

    def law(self) -> bool:
        found, noise = laws.distance(laws.rejection, {})
        return bool(found < 1.6 * noise)

    # --- rounds -----------------------------------------------------------------------------------

    def answers(self, name: str, count: int = 30, **options: Any) -> bool:
        """Text, cache and figures of drafted answers, for proposals that are true for a while."""
        prompt = prompt_of(name, count)
        with open_with(self.installed(name), Toy(), 5, **options) as runner:
            plain = runner.generate(prompt, **GREEDY, draft_tokens=0)
            teach(runner, plain.token_ids, LIES["right then wrong"])
            drafted = runner.generate(prompt, **GREEDY)
            stats = drafted.speculation
            assert stats is not None
            figures = (stats.rounds, stats.committed, stats.rollbacks, stats.accepted)
            return (
                drafted.token_ids == plain.token_ids
                and drafted.kv_backed_token_ids == plain.kv_backed_token_ids
                and figures == (7, 20, 6, 13)
                and stats.offered == (7, 6, 6, 0, 0)
                and stats.matched == (7, 6, 0, 0, 0)
            )

    def plain_layers(self) -> bool:
        return self.answers("llama-base")

    def recurrent_layers(self) -> bool:
        return self.answers("qwen3_5-base")

    def turned_rings(self) -> bool:
        return self.answers("mistral-sliding", 70)

    def small_rings(self) -> bool:
        """A ring with less slack than a round goes back must refuse, not answer."""
        prompt, slack = prompt_of("mistral-sliding", 70), {"swa_ring_capacity": 9}
        with open_with(self.installed("mistral-sliding"), Toy(), 5, **slack) as runner:
            plain = runner.generate(prompt, **GREEDY, draft_tokens=0)
            teach(runner, plain.token_ids, LIES["wrong"])
            with pytest.raises(TurbosparkError, match="passes the ring's slack"):
                runner.generate(prompt, **GREEDY)
        return True

    def ends(self) -> bool:
        """An end token in the middle of an accepted block."""
        prompt = prompt_of("qwen3_5-base")
        with open_with(self.installed("qwen3_5-base"), Toy(), 5) as runner:
            plain = runner.generate(prompt, **GREEDY, draft_tokens=0)
            stop = {**GREEDY, "stop_token_ids": (plain.token_ids[3],)}
            teach(runner, plain.token_ids, right)
            drafted = runner.generate(prompt, **stop)
            held = [*prompt, *plain.token_ids[:3]]
            return (
                drafted.token_ids == plain.token_ids[:3]
                and drafted.stop_reason == "eos"
                and drafted.kv_backed_token_ids == held
                and drafted.kv_position == len(held)
            )

    def penalties(self) -> bool:
        prompt = prompt_of("llama-base")
        asked = {**GREEDY, "presence_penalty": 1.5}
        with open_with(self.installed("llama-base"), Toy(), 5) as runner:
            plain = runner.generate(prompt, **asked, draft_tokens=0)
            teach(runner, plain.token_ids, right)
            return runner.generate(prompt, **asked).token_ids == plain.token_ids

    def limits(self) -> bool:
        prompt = prompt_of("llama-base")
        with open_with(self.installed("llama-base"), Toy(), 5, max_context=40) as runner:
            asked = {**GREEDY, "max_new_tokens": 5}
            plain = runner.generate(prompt, **asked, draft_tokens=0)
            teach(runner, [*plain.token_ids, *range(9)], right)
            drafted = runner.generate(prompt, **asked)
            return drafted.token_ids == plain.token_ids and drafted.phases.calls == 30 + 4

    def copies(self) -> bool:
        """Going back copies no buffer: what a round takes is little beside what caches hold."""
        return all(
            self._taken(name, options) < 1 / 8
            for name, options in (
                ("llama-base", {}),
                ("mistral-sliding", {"swa_ring_capacity": 60_000}),
                ("qwen3_5-base", {}),
            )
        )

    def _taken(self, name: str, options: dict[str, Any]) -> float:
        prompt = prompt_of(name)
        with open_with(self.installed(name), Toy(), 5, max_context=65_536, **options) as runner:
            plain = runner.generate(prompt, **GREEDY, draft_tokens=0)
            teach(runner, plain.token_ids, LIES["right then wrong"])
            mx.reset_peak_memory()
            before = mx.get_active_memory()
            stats = runner.generate(prompt, **GREEDY).speculation
            assert stats is not None and stats.rollbacks > 0
            return (mx.get_peak_memory() - before) / runner.memory.kv

    # --- drafters ---------------------------------------------------------------------------------

    def head(self) -> bool:
        """A head that knows its model is always right, and its rows are as if fed now: its `fc`
        hands on embeddings alone, so that its own chain gives the same ones.
        """
        options = OpenOptions(**CPU, speculation=DraftPolicies(mtp=3))
        with Runner.open(self.carried("mtp"), options) as runner:
            asked = {**GREEDY, "max_new_tokens": 18}
            drafted = runner.generate(prompt_of("qwen3_5-base", 37), **asked)
            stats, held = drafted.speculation, self._head_rows(runner)
            runner.reset()
            runner.prefill(drafted.kv_backed_token_ids)
            pairs = zip(held, self._head_rows(runner), strict=True)
            return (
                stats is not None
                and stats.per_position_acceptance == (1, 1, 1)
                and all(np.array_equal(a, b) for a, b in pairs)
            )

    @staticmethod
    def _head_rows(runner: Runner) -> list[np.ndarray]:
        engine = runner._engine
        assert engine is not None
        *_, kv, newest = engine.states.layers
        rows = [np.array(a[:, :, : engine.position - 1]) for a in (kv.keys, kv.values)]
        return [*rows, np.array(newest.saved[0])]

    def head_cut(self) -> bool:
        """After a pass was cut the newest hidden row is that of its last row kept."""
        path, prompt = self.carried("random mtp"), prompt_of("qwen3_5-base", 20)
        with Runner.open(path, OpenOptions(**CPU, speculation=DraftPolicies(mtp=3))) as runner:
            runner.prefill(prompt)
            engine = runner._engine
            assert engine is not None and engine.watcher is not None
            with engine.working():
                proposals = engine.watcher.propose([*prompt, 9], 3, None)
            fed = [9, *(p.token for p in proposals)]
            engine.verify(fed)
            engine.keep(2)
            *_, newest = self._head_rows(runner)
            runner.reset()
            hidden = hidden_rows(runner, [*prompt, *fed[:2]])
        return bool(np.abs(newest[0, 0] - hidden[-1]).max() < 1e-5)

    def head_logits(self) -> bool:
        path, prompt = self.carried("random mtp"), prompt_of("qwen3_5-base", 20)
        with Runner.open(path, OpenOptions(**CPU, speculation=DraftPolicies(mtp=3))) as runner:
            runner.prefill(prompt, chunk=7)
            row = head_rows(runner, [*prompt, 9], 1)[0]
            runner.reset()
            hidden = hidden_rows(runner, prompt)
        expected, _ = NumpyHead(path)([*prompt[1:], 9], hidden)
        return bool(np.abs(row - expected).max() < 1e-4)

    def taps(self) -> bool:
        """What a block drafter proposes after steered rounds."""
        path, prompt = self.carried("dflash"), prompt_of("qwen3_5-base", 20)
        options = OpenOptions(**CPU, speculation=DraftPolicies(dflash=4), steering=STEERING)
        with Runner.open(path, options) as runner:
            held = runner.generate(prompt, **GREEDY).kv_backed_token_ids
            engine = runner._engine
            assert engine is not None and engine.watcher is not None
            with engine.working():
                found = [p.token for p in engine.watcher.propose([*held, 11], 4, None)]
            _, streams = steered_pass(runner, held)
        taps = np.concatenate([streams[0], streams[2]], -1)
        expected, _ = NumpyDrafter(path.with_name("drafter"), *tables(path))(11, taps, 4)
        return found == expected

    def second_model(self) -> bool:
        """A draft model proposes what it says of the history, whatever it proposed before."""
        path, prompt = self.installed("qwen3_5-base"), prompt_of("qwen3_5-base")
        options = OpenOptions(**CPU, speculation=DraftPolicies(draft_model=path))
        asked = {**GREEDY, "presence_penalty": 1.5}  # the model's choice, not the draft model's
        with Runner.open(path, options) as runner:
            assert runner._drafting is not None
            drafter, made = runner._drafting.drafter, []
            propose = drafter.propose

            def recorded(history: Any, count: int, choose: Any) -> list[Proposal]:
                made.append((list(history), propose(history, count, choose)))
                return made[-1][1]

            drafter.propose = recorded  # type: ignore[method-assign]
            stats = runner.generate(prompt, **asked).speculation
            assert stats is not None and stats.rollbacks > 0
        with Runner.open(path, OpenOptions(**CPU)) as alone:
            for history, proposals in made:
                said = alone.generate(history, **{**GREEDY, "max_new_tokens": len(proposals)})
                if said.token_ids != [p.token for p in proposals]:
                    return False
        return True


KEEP = (LayerStates, "keep_rows")
TAKE = (Rounds, "token")
MISTAKES: dict[str, tuple[str, Any, str, str, str]] = {
    # The law.
    "accepted at equality": ("impossible_token", Rejection, "take", "< own", "<= own"),
    "p and q the wrong way round": (
        "ratio", Rejection, "take", "float(proposal.probability(token)[0]) < own",
        "own < float(proposal.probability(token)[0])",
    ),
    "a correction drawn from p": (
        "law", Rejection, "take", "p - proposal.probability(ids)", "p",
    ),
    "a verdict without chance": (
        "law", Rejection, "take", "next(self.uniforms) * float", "0.5 * float",
    ),
    "proposals that are the likeliest, judged as drawn": (
        "law", Rejection, "chooser", "_draw(ids, q, next(self.uniforms))", "int(ids[q.argmax()])",
    ),
    # The round.
    "the bonus from the row before": (
        "plain_layers", *TAKE, "self._rows[at]", "self._rows[max(0, at - 1)]",
    ),
    "the bonus from the last row": (
        "plain_layers", *TAKE, "self._rows[at]",
        "self._rows[at if proposal is None or at == 0 else -1]",
    ),
    "nothing cut off": ("plain_layers", *KEEP, "self.position = to", "pass"),
    "a row too few kept": ("plain_layers", Rounds, "_close", "self.model.keep(rows)",
                           "self.model.keep(max(1, rows - 1))"),
    "a row too many kept": ("plain_layers", Rounds, "_close", "self.model.keep(rows)",
                            "self.model.keep(min(fed, rows + 1))"),
    "the record of what is cached not cut": (
        "ends", Engine, "keep", "self.pool.live.record.rewind_to(self.position)", "pass",
    ),
    "no recurrent rewind": (
        "recurrent_layers", *KEEP, "cache.keep_rows(step.start, rows)", "cache.tape = None",
    ),
    "the ring not rewound": ("turned_rings", *KEEP, "self.position = to", "pass"),
    "a ring that goes back past its slack": (
        "small_rings", RingKV, "rewind_refusal", "furthest - to <= slack", "True",
    ),
    "an end token inside a block ignored": (
        "ends", _Run, "_next_token", "events = sink.commit(token)",
        "ends, sink._ends = sink._ends, {} if self._rounds and self._rounds._rows is not None "
        "else sink._ends\n    events = sink.commit(token)\n    sink._ends = ends",
    ),
    "rows past the end kept": (
        "ends", Rounds, "stop", "max(1, self._accepted)", "len(self._proposals) + 1",
    ),
    "the end token kept": ("ends", Rounds, "stop", "max(1, self._accepted)", "self._accepted + 1"),
    "penalties of the round's beginning": (
        "penalties", *TAKE, "self.law.take(row, proposal, history, prompt_len)",
        "self.law.take(row, proposal, history[: len(history) - at], prompt_len)",
    ),
    "more proposed than may come": ("limits", Rounds, "_open", "left - 1", "left + 8"),
    "buffers held for going back": (
        "copies", Rounds, "_open", "self._proposals = []",
        "self._proposals = []\n"
        "    self.held = [[a[:] for a in c.arrays()] for c in self.model.states.layers]",
    ),
    # The figures.
    "acceptance counted one position on": (
        "plain_layers", *TAKE, "self.tally.matched[at]", "self.tally.matched[at + 1]",
    ),
    "all proposals counted as judged": (
        "plain_layers", *TAKE, "self.tally.offered[at] += 1",
        "self.tally.offered = [n + (at == 0) for n in self.tally.offered]",
    ),
    "tokens counted without corrections": (
        "plain_layers", *TAKE, "self.tally.committed += 1",
        "self.tally.committed += proposal is None",
    ),
    "every round counted as rolled back": (
        "plain_layers", Rounds, "_close", "rows < fed", "True",
    ),
    # Drafters.
    "a head not primed": (
        "head_logits", MtpDrafter, "watch", "self._prime(ids, normed, states)", "pass",
    ),
    "a head primed one row on": ("head_logits", MtpDrafter, "_prime", "start - 1", "start"),
    "a head that reads the stream before the norm": (
        "head_logits", MtpDrafter, "watch", "self.final_norm(hidden)", "hidden",
    ),
    "a head's last row not written": (
        "head", MtpDrafter, "propose", "range(count + 1)", "range(count)",
    ),
    "a head that reads the last row of a cut pass": (
        "head_cut", MtpDrafter, "watch", "normed[:, kept - 1 : kept]", "normed[:, -1:]",
    ),
    "taps before steering": (
        "taps", Engine, "_after_layer", "read(layer, steer(layer, hidden))",
        "steer(layer, read(layer, hidden))",
    ),
    "context written where the round ended": (
        "taps", DflashDrafter, "settle", "start, states)", "start + 1, states)",
    ),
    "a second model that is not taken back": (
        "second_model", DraftModel, "keep", "self.model.pool.live.restore(", "(",
    ),
}  # fmt: skip


@pytest.fixture
def looker(installed: Callable[[str], Path], carried: Callable[[str], Path]) -> Looker:
    return Looker(installed, carried)


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.mark.parametrize("name", sorted({what for what, *_ in MISTAKES.values()}))
def test_without_a_mistake_all_is_as_it_should_be(looker: Looker, name: str) -> None:
    assert getattr(looker, name)()


@pytest.mark.parametrize("title", MISTAKES)
def test_a_planted_mistake_is_noticed(
    looker: Looker, title: str, patch: pytest.MonkeyPatch
) -> None:
    name, *where = MISTAKES[title]
    plant(patch, *where)
    # A round that breaks is noticed too.
    with suppress(ValueError, IndexError, pytest.fail.Exception):
        assert not getattr(looker, name)()
