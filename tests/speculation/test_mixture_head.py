"""The head of a mixture: routed experts of its own, kept, counted and computed as numpy does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import heads
import mlx.core as mx
import numpy as np
import pytest
from numpy_heads import NumpyHead, head_rows, hidden_rows

from turbospark import DraftPolicies, OpenOptions, Runner, convert, resolve
from turbospark.errors import SourceError, SpeculationUnavailableError
from turbospark.install.opening import Install

CPU: dict[str, Any] = {"max_context": 160, "device": "cpu", "dtype": "float32"}
GREEDY: dict[str, Any] = {"max_new_tokens": 25, "temperature": 0, "ignore_eos": True}
PROMPT = [int(i) for i in np.random.default_rng(3).integers(0, 90, 37)]
STREAMED = {"expert_residency": "streamed", "expert_cache_slots": 2}
QUANT = {"bits": 4, "group_size": 32}
Made = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Installs by what they are made of, each made once."""
    found: dict[str, Path] = {}

    def make(**settings: Any) -> Path:
        key = json.dumps(settings, sort_keys=True)
        if key not in found:
            path = tmp_path_factory.mktemp("mixture") / "model"
            found[key] = heads.install(path, base=heads.MIXTURE, **settings)
        return found[key]

    return make


def opened(path: Path, width: int = 4, **options: Any) -> Runner:
    speculation = DraftPolicies(mtp=width)
    return Runner.open(path, OpenOptions(**CPU, speculation=speculation, **options))


def stored(name: str, value: mx.array) -> mx.array:
    """What 4 bits make of a matrix, and 8 of a router, by MLX's own quantizer."""
    if value.ndim < 2 or "conv" in name or "visual" in name:
        return value
    bits = 8 if name.endswith((".gate.weight", "shared_expert_gate.weight")) else 4
    packed = mx.quantize(value, group_size=32, bits=bits)
    return mx.dequantize(
        *(a.astype(mx.float32) if i else a for i, a in enumerate(packed)), 32, bits
    )


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize(
    ("apart", "quant", "options"),
    [
        (False, None, {"expert_residency": "resident"}),
        (True, None, STREAMED),
        (False, QUANT, {"expert_residency": "mapped"}),
        (True, QUANT, STREAMED),
    ],
    ids=["stacked", "apart", "stacked-4bit", "apart-4bit"],
)
def test_the_head_of_a_mixture_says_what_a_numpy_head_says(
    made: Made, apart: bool, quant: dict[str, Any] | None, options: dict[str, Any], batched: bool
) -> None:
    path = made(honest=False, apart=apart, quant=quant, width=32)
    reference = NumpyHead(path) if quant is None else NumpyHead(path, stored)
    with opened(path, 3, **options) as runner:
        runner.toggles.mtp_batched_prime = batched
        runner.prefill(PROMPT, chunk=9)
        rows = head_rows(runner, [*PROMPT, 9], 3)
        runner.reset()
        hidden = hidden_rows(runner, PROMPT)
    tokens = [*PROMPT[1:], 9]
    for depth, row in enumerate(rows):
        logits, last = reference(tokens, hidden)
        np.testing.assert_allclose(row, logits, atol=1e-4)
        tokens, hidden = [*tokens, 7 + depth], np.concatenate([hidden, last[None]])


def test_both_ways_of_storing_experts_give_the_same_install(made: Made) -> None:
    one, other = (made(honest=False, quant=QUANT, width=32, apart=apart) for apart in (False, True))
    with Install.open(one) as stacked, Install.open(other) as apart:
        names = [name for name in stacked.resident.names if name.startswith("mtp.")]
        assert len(names) == 20 and set(stacked.resident.names) == set(apart.resident.names)
        for name in names:
            for a, b in zip(
                stacked.resident.read(name).arrays(),
                apart.resident.read(name).arrays(),
                strict=True,
            ):
                np.testing.assert_array_equal(
                    np.array(a.view(mx.uint8)), np.array(b.view(mx.uint8))
                )
        assert stacked.config["mtp_norm_convention"] == "centred"


@pytest.mark.parametrize("options", [{}, STREAMED], ids=["auto", "streamed"])
@pytest.mark.parametrize("width", range(1, 9))
def test_a_mixture_head_that_knows_its_model_is_accepted_and_changes_nothing(
    made: Made, width: int, options: dict[str, Any]
) -> None:
    with opened(made(honest=True), width, **options) as runner:
        drafted = runner.generate(PROMPT, **GREEDY)
        plain = runner.generate(PROMPT, **GREEDY, draft_tokens=0)
        assert drafted.token_ids == plain.token_ids and len(set(plain.token_ids)) > 2
        assert drafted.kv_backed_token_ids == plain.kv_backed_token_ids
        stats = drafted.speculation
        assert stats is not None and stats.per_position_acceptance == (1,) * width
        assert drafted.phases.passes == 1 + stats.rounds == 1 - (-24 // (width + 1))


@pytest.mark.parametrize("width", range(1, 9))
def test_a_mixture_head_that_knows_nothing_changes_nothing(made: Made, width: int) -> None:
    options = {**STREAMED, "prefix_reuse": True}
    with opened(made(honest=False, apart=True), width, **options) as runner:
        drafted = runner.generate(PROMPT, **GREEDY)
        held = runner.memory.experts
        follow = [*PROMPT, *drafted.token_ids, 5, 6]
        again = runner.generate(follow, **GREEDY)
        assert again.reused_prefix_tokens == len(PROMPT) + 24
        runner.reset()
        plain = runner.generate(PROMPT, **GREEDY, draft_tokens=0)
        assert drafted.token_ids == plain.token_ids
        assert again.token_ids == runner.generate(follow, **GREEDY, draft_tokens=0).token_ids
        assert drafted.speculation is not None and drafted.speculation.rollbacks > 0
        # The head's experts hit always; of the model's own every miss was read, and no more.
        phases = drafted.phases
        stride = held // (2 * 3)  # slots, layers
        read = (phases.expert_requests - phases.expert_hits) * stride
        assert runner.memory.experts == held and phases.expert_io_bytes_requested == read > 0


def test_the_heads_experts_count_as_weights_and_only_where_it_is_open(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, planned = made(honest=False), []
    monkeypatch.setattr(
        resolve, "check_load", lambda load, context, guard: planned.append(load.weights)
    )
    undrafted = OpenOptions(**CPU, **STREAMED)
    with opened(path, **STREAMED) as drafting, Runner.open(path, undrafted) as plain:
        text = json.loads((path.with_name("model-source") / "config.json").read_text())
        shapes = heads.head_shapes(text["text_config"]).values()
        bytes_of_head = 4 * sum(int(np.prod(shape)) for shape in shapes)
        assert drafting.memory.weights - plain.memory.weights == bytes_of_head
        assert planned[0] - planned[1] == bytes_of_head
        assert planned == [drafting.memory.weights, plain.memory.weights]
        assert drafting.memory.experts == plain.memory.experts


# --- refusals -------------------------------------------------------------------------------------


def changed(path: Path, edit: heads.Edit, apart: bool = True) -> Path:
    """A checkpoint whose tensors `edit` has changed."""
    source = heads.checkpoint(path, honest=False, base=heads.MIXTURE, apart=apart)
    return heads.edited(source, edit)


EXPERTS = "mtp.layers.0.mlp.experts."


def test_a_head_that_lacks_one_expert_is_refused_by_the_name_of_the_matrix(tmp_path: Path) -> None:
    source = changed(tmp_path / "s", lambda t: [t.pop(f"{EXPERTS}3.up_proj.weight")])
    path = convert(source, tmp_path / "m", progress=False)
    with pytest.raises(
        SpeculationUnavailableError,
        match=r"only 19 of the 20 .*experts\.up_proj\.weight is missing",
    ):
        opened(path)
    with Runner.open(path, OpenOptions(**CPU)) as runner:
        assert runner.generate([1, 2], max_new_tokens=2).new_tokens == 2


def widened(name: str, axis: int) -> Callable[[dict[str, mx.array]], None]:
    def edit(tensors: dict[str, mx.array]) -> None:
        tensors[name] = mx.concatenate([tensors[name]] * 2, axis=axis)

    return edit


@pytest.mark.parametrize(
    ("apart", "edit", "words"),
    [
        (True, widened(f"{EXPERTS}2.gate_proj.weight", 0), r"gate_proj.*: 96 rows of .32. columns"),
        (True, widened(f"{EXPERTS}2.down_proj.weight", 1), r"down_proj.*160 rows of .16, 32. col"),
        (False, widened(f"{EXPERTS}down_proj", 0), r"experts.down_proj has shape .10, 32, 16."),
        (
            True,
            lambda t: t.update({f"{EXPERTS}9.up_proj.weight": t.pop(f"{EXPERTS}4.up_proj.weight")}),
            r"up_proj.weight: part 4 of its rows is missing",
        ),
        (
            True, lambda t: t.update({f"{EXPERTS}0.up_proj.weight": mx.zeros((16, 32))}),
            r"up_proj.weight: parts are stored in different formats",
        ),
        (
            True, lambda t: t.update({f"{EXPERTS}up_proj": mx.zeros((5, 16, 32))}),
            r"provided twice: mtp.layers.0.mlp.experts.up_proj.weight",
        ),
        (True, lambda t: t.update({f"{EXPERTS}1.up_proj.weight": mx.zeros((4,))}), "expected rows"),
    ],
    ids=["rows", "columns", "count", "number", "format", "twice", "vector"],
)  # fmt: skip
def test_experts_of_a_head_that_do_not_fit_are_refused_before_anything_is_written(
    apart: bool, edit: Callable[[dict[str, mx.array]], Any], words: str, tmp_path: Path
) -> None:
    source = changed(tmp_path / "s", edit, apart)
    with pytest.raises(SourceError, match=words):
        convert(source, tmp_path / "m", progress=False)
    assert not (tmp_path / "m").exists()


def test_a_head_of_two_layers_is_refused(tmp_path: Path) -> None:
    source = heads.checkpoint(tmp_path / "s", honest=False, base=heads.MIXTURE)
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 2
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpeculationUnavailableError, match="mtp drafter of other than one layer"):
        opened(convert(source, tmp_path / "m", progress=False))
