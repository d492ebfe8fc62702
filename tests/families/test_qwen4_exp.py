"""Qwen 4 beyond its oracles' logits: what is refused, where rows and experts live, going back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from oracle_folders import ORACLES, Oracle
from safetensors.numpy import save_file

from turbospark import OpenOptions, Runner, convert, synth
from turbospark.errors import MissingFileError, SourceError, TurbosparkError, UnsupportedError
from turbospark.families import family_for_model_type
from turbospark.families.config import ConfigReader, normalize_config
from turbospark.install.opening import Install
from turbospark.install.row_table import file_name

FAMILY = family_for_model_type("qwen4_exp")
ORACLE = Oracle(ORACLES / "qwen4_exp-base")
ROOM = {"max_context": 160, "device": "cpu", "dtype": "float32"}


def config(**changes: Any) -> ConfigReader:
    return ConfigReader(normalize_config(ORACLE.config) | changes)


def opened(path: Path, **options: Any) -> Runner:
    return Runner.open(path, OpenOptions(**ROOM, **options))


@pytest.fixture(scope="module")
def path(installed: Callable[[str], Path]) -> Path:
    return installed("qwen4_exp-base")


# --- configurations -------------------------------------------------------------------------------


def test_a_published_configuration_is_read_and_recorded() -> None:
    c = FAMILY.read_config(config())
    a = FAMILY.arch(c)
    assert (a.family, a.hc_mult, a.hc_lowrank) == ("qwen4exp", 3, 12)
    assert (a.ca_index_top_k, a.ca_index_budget, a.ca_csa_compress_rate) == (4, 16, 4)
    assert (a.ple_layer_ids, a.ple_eos_token_id, a.ple_ngram_size) == ((3,), 7, 3)
    assert a.full_attention_layer_mask == (2, 1, 2, 1) and a.linear_output_gate_sigmoid
    again = ConfigReader(FAMILY.config_from_arch(a) | {"rms_norm_eps": 3e-5})
    assert FAMILY.arch(FAMILY.read_config(again)) == a


def test_every_name_of_a_sparse_layer_means_the_same() -> None:
    kinds = ["linear_attention", "qwen_sparse_attention", "linear_attention", "indexed_attention"]
    assert FAMILY.read_config(config(layer_types=kinds)) == FAMILY.read_config(config())
    spaced = FAMILY.read_config(config(layer_types=None, full_attention_interval=2))
    assert spaced == FAMILY.read_config(config())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"output_gate_type": "tanh"}, "output_gate_type = 'tanh' is not supported"),
        ({"layer_types": ["linear_attention"] * 3 + ["chunked"]}, r"layer_types\[3\] = 'chunked'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "type = 'yarn' is not supported"),
        ({"hc_count": 1}, "hc_count = 1; expected at least 2"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok = 6 exceeds num_experts = 5"),
        ({"indexer_budget": None}, "required keys indexer_budget are missing"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads = 2 is not supported"),
        ({"indexer_budget": 18}, "indexer_budget = 18 is not a multiple of"),
        ({"indexer_head_dim": 4}, "turns 8 dimensions; supported: an even number up to 4"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads = 5 is not a multiple"),
        ({"num_key_value_heads": 3}, "4 attention heads over 3 key/value heads"),
        ({"ple_layer_ids": [2]}, "ple_layer_ids has 2; supported: linear_attention layers"),
        ({"ple_layer_ids": [5]}, "ple_layer_ids has 5; supported"),
        ({"ple_layer_ids": ["3"]}, "expected whole numbers"),
        ({"ple_embed_dim": 50}, "ple_embed_dim = 50 is not a multiple of 6 heads"),
        ({"eos_token_id": None}, "required key eos_token_id is missing"),
        ({"eos_token_id": []}, r"eos_token_id = \[\]; expected token ids"),
        ({"ngram_vocab_size_base": 1 << 40}, "tables below 2\\^31 rows"),
        ({"heads_per_ngram": 1 << 20}, "supported: 4096 heads in all"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TurbosparkError, match=words):
        FAMILY.read_config(config(**changes))


def test_full_attention_without_an_indexer_is_refused() -> None:
    names = ("n_heads", "kv_heads", "head_dim", "budget", "compress_ratio")
    with pytest.raises(UnsupportedError, match="need indexer_n_heads and its four companions"):
        FAMILY.read_config(config(**dict.fromkeys(f"indexer_{n}" for n in names)))


# --- conversion -----------------------------------------------------------------------------------


def altered(
    folder: Path,
    change: Callable[[dict[str, np.ndarray]], None],
    settings: Callable[[dict[str, Any]], None] = lambda config: None,
) -> Path:
    """A float32 copy of the oracle's checkpoint with some tensors and settings changed."""
    raw = mx.load(str(ORACLE.path / "model.safetensors"))
    floating = (mx.bfloat16, mx.float32)
    tensors = {
        n: np.array(a.astype(mx.float32) if a.dtype in floating else a) for n, a in raw.items()
    }
    change(tensors)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = ORACLE.config
    settings(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_multipliers_of_another_model_are_refused(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        (name,) = [n for n in tensors if n.endswith("layer_multipliers")]
        tensors[name][1] += 2

    with pytest.raises(SourceError, match=r"layer_multipliers holds .* of another model"):
        convert(altered(tmp_path / "c", change), tmp_path / "i", progress=False)
    assert not (tmp_path / "i").exists()


def test_a_missing_run_of_rows_is_named(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        (name,) = [n for n in tensors if "shard_1." in n]
        del tensors[name]

    with pytest.raises(SourceError, match="part 1 of its rows is missing"):
        convert(altered(tmp_path / "c", change), tmp_path / "i", progress=False)


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("head", [True, False])
def test_a_head_that_is_there_is_used_where_the_configuration_contradicts_itself(
    outer: bool, head: bool, tmp_path: Path, path: Path
) -> None:
    """transformers 5 follows the outer level, 4 the inner one, and both write either."""
    table = "model.language_model.embed_tokens.weight"

    def change(tensors: dict[str, np.ndarray]) -> None:
        if not head:
            tensors[table] = tensors.pop("lm_head.weight")

    def said(config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = outer
        config["text_config"]["tie_word_embeddings"] = not outer

    made = convert(altered(tmp_path / "c", change, said), tmp_path / "i", progress=False)
    with opened(made) as a, opened(path) as b:
        assert a.arch.tie_word_embeddings == (not head)
        if head:
            assert np.array_equal(np.array(a.score(ORACLE.ids)), np.array(b.score(ORACLE.ids)))


def test_a_table_in_one_piece_is_read_too(tmp_path: Path, path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        names = sorted(n for n in tensors if "ngram_embedding.shard_" in n)
        whole = names[0].replace("shard_0.weight", "weight")
        tensors[whole] = np.concatenate([tensors.pop(name) for name in names])

    one = convert(altered(tmp_path / "c", change), tmp_path / "i", progress=False)
    ids = ORACLE.ids
    with opened(one) as a, opened(path) as b:
        assert np.array_equal(np.array(a.score(ids)), np.array(b.score(ids)))


def test_convolutions_may_lie_as_mlx_keeps_them(tmp_path: Path, path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        for name in [n for n in tensors if n.endswith("conv1d.weight")]:
            tensors[name] = np.ascontiguousarray(tensors[name].swapaxes(1, 2))

    turned = convert(altered(tmp_path / "c", change), tmp_path / "i", progress=False)
    ids = ORACLE.ids
    with opened(turned) as a, opened(path) as b:
        assert np.array_equal(np.array(a.score(ids)), np.array(b.score(ids)))


def test_the_table_is_a_file_of_its_own_and_not_held_in_memory(path: Path) -> None:
    with Install.open(path) as install:
        assert file_name(2) in install.manifest.files
        assert not any("ngram_embedding" in name for name in install.resident.names)
    with opened(path) as mapped, opened(path, ngram_table="resident") as resident:
        assert (mapped.resolved.ngram_table, resident.resolved.ngram_table) == (
            "mapped",
            "resident",
        )
        table = resident.memory.weights - mapped.memory.weights
        assert table == 64 * 8 * 2 * 5 or table > 0
        ids = ORACLE.ids
        assert np.array_equal(np.array(mapped.score(ids)), np.array(resident.score(ids)))


def test_an_install_without_its_table_is_refused(tmp_path: Path, path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for item in path.rglob("*"):
        target = copy / item.relative_to(path)
        if item.is_dir():
            target.mkdir()
        else:
            target.write_bytes(item.read_bytes())
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["files"][file_name(2)]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(MissingFileError, match=r"packed_rows/layer_02\.bin, which holds"):
        opened(copy)


def test_quantizing_takes_groups_that_divide_a_row(tmp_path: Path) -> None:
    wide = {"ple_embed_dim": 768, "heads_per_ngram": 4}  # rows of 96
    made = synth("qwen4_exp_text", tmp_path / "m", bits=4, settings=wide, progress=False)
    with Install.open(made) as install:
        (table,) = FAMILY.table_shapes(FAMILY.read_config(ConfigReader(install.config))).items()
        layer, (name, shape) = table
        assert str(install.row_table(layer, name, shape).fmt) == "affine 4-bit group 32 bfloat16"
    with opened(made, expert_residency="resident") as runner:
        assert np.isfinite(np.array(runner.prefill(list(range(1, 100))))).all()


# --- running --------------------------------------------------------------------------------------


@pytest.mark.parametrize("residency", ["streamed", "mapped"])
def test_experts_may_live_anywhere(residency: str, path: Path) -> None:
    ids = ORACLE.ids
    with opened(path, expert_residency="resident") as runner:
        want = np.array(runner.score(ids))
    with opened(path, expert_residency=residency, expert_cache_slots=3) as runner:
        assert np.array_equal(np.array(runner.score(ids)), want)


def test_pruned_experts_are_counted_by_the_configuration(tmp_path: Path) -> None:
    made = synth("qwen4_exp_text", tmp_path / "m", experts=7, top_k=3, progress=False)
    with opened(made) as runner:
        assert runner.arch.num_experts == 7
        runner.prefill([1, 2, 3])
        assert runner.phase_counters.expert_requests > 0


def test_force_dense_acts_above_the_budget_alone_and_can_be_flipped(path: Path) -> None:
    ids = ORACLE.ids + ORACLE.greedy_ids
    with opened(path) as runner:
        assert runner.toggles.has_effect("qsa_force_dense")
        sparse = np.array(runner.score(ids))
        counted = runner.phase_counters
        assert counted.qsa_rows_sparse == 2 * (len(ids) - 19) and counted.qsa_rows_dense == 2 * 19
        assert counted.qsa_blocks_selected == 4 * counted.qsa_rows_sparse
        runner.toggles.qsa_force_dense = True
        dense = np.array(runner.score(ids))
        assert runner.phase_counters.qsa_rows_sparse == counted.qsa_rows_sparse
        assert np.array_equal(dense[:19], sparse[:19])
        assert np.abs(dense[19:] - sparse[19:]).max() > 1e-3
        # Keys of blocks are kept up to date, so that a flip leaves both arms what they are.
        runner.reset()
        runner.toggles.qsa_force_dense = False
        runner.prefill(ids[:30])
        runner.toggles.qsa_force_dense = True
        runner.step(ids[30])
        runner.toggles.qsa_force_dense = False
        assert np.isfinite(np.array(runner.step(ids[31]))).all()


def test_a_prefix_is_taken_up_from_a_snapshot(path: Path) -> None:
    ids = ORACLE.ids
    other = [*ids[:-3], 9, 10, 11, 12]
    with opened(path) as fresh, opened(path, prefix_reuse=True) as runner:
        fresh.generate(ids, max_new_tokens=4, temperature=0)
        want = fresh.generate(other, max_new_tokens=4, temperature=0)
        runner.generate(ids, max_new_tokens=4, temperature=0)
        got = runner.generate(other, max_new_tokens=4, temperature=0)
        assert got.reused_prefix_tokens == len(ids) - 16 and want.reused_prefix_tokens == 0
        assert got.token_ids == want.token_ids


def test_conversations_side_by_side_keep_their_own_state(path: Path) -> None:
    one, two = ORACLE.ids, ORACLE.ids[::-1]
    with opened(path) as alone:
        first = alone.generate(one, max_new_tokens=6, temperature=0).token_ids
    with opened(path, session_slots=2, prefix_reuse=True) as runner:
        head = runner.generate(one, max_new_tokens=3, temperature=0).token_ids
        runner.generate(two, max_new_tokens=3, temperature=0)
        rest = runner.generate(one + head, max_new_tokens=3, temperature=0)
        assert rest.reused_prefix_tokens >= len(one)
        assert head + rest.token_ids == first


def test_a_saved_session_goes_on_inside_a_block(path: Path, tmp_path: Path) -> None:
    ids = ORACLE.ids
    for cut in (22, 31):
        with opened(path) as runner:
            runner.prefill(ids[:cut])
            runner.save_session(tmp_path / "s")
            want = np.array(runner.prefill(ids[cut:]))
        with opened(path) as runner:
            assert runner.load_session(tmp_path / "s") == cut
            assert np.array_equal(np.array(runner.prefill(ids[cut:])), want)


def test_reset_forgets_every_piece_of_state(path: Path) -> None:
    ids = ORACLE.ids
    with opened(path) as runner:
        want = np.array(runner.prefill(ids[:43]))
        engine = runner._engine
        assert engine is not None
        assert all(np.array(a).any() for a in engine.states.arrays())
        runner.reset()
        runner.prefill([5] * 31)
        runner.reset()
        assert not any(np.array(a).any() for state in engine.states.layers for a in state.saved[:1])
        assert np.array_equal(np.array(runner.prefill(ids[:43])), want)
