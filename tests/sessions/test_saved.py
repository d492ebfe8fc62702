"""Conversations written to disk: they come back to the bit, and only where they belong."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from conversation import KINDS, answer, open_cpu, same, tokens_of, window
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle_folders import ORACLES, Oracle

from turbospark import Runner, convert, session_files
from turbospark.errors import OptionError, SessionBrokenError, SessionFileError

WARM = {"prefix_reuse": True, "prefill_chunk": 32}


def prompt_of(name: str, count: int = 90) -> list[int]:
    return tokens_of(Oracle(ORACLES / name), count)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("turned", [False, True])
def test_a_conversation_goes_on_in_another_runner_as_if_it_had_never_stopped(
    name: str, turned: bool, installed: Callable[[str], Path], tmp_path: Path
) -> None:
    path, file, prompt = installed(name), tmp_path / "talk.safetensors", prompt_of(name)
    options = dict(WARM)
    with open_cpu(path) as plain:
        narrow = window(plain)
    if turned:
        options["swa_ring_capacity"] = narrow + 20 if narrow else None
    with open_cpu(path, **options) as first, open_cpu(path, **options) as second:
        begun = answer(first, prompt, 4)
        first.save_session(file)
        held = [*prompt, *begun.tokens[:3]]
        for following in (
            [*held, 5, 6],
            [*held[:84], (held[84] + 1) % 90, 7],  # a recurrent model goes back to a snapshot
        ):
            assert second.load_session(file) == len(held)
            assert second.position == len(held)
            first.load_session(file)
            mine, theirs = answer(first, following, 4), answer(second, following, 4)
            assert theirs.kept == mine.kept > 0
            assert same(theirs, mine)
            second.prefix_reuse = False
            assert same(theirs, answer(second, following, 4))
            second.prefix_reuse = True


def test_steps_continue_a_loaded_conversation_without_reuse(
    installed: Callable[[str], Path], tmp_path: Path
) -> None:
    for name in KINDS:
        with open_cpu(installed(name)) as first, open_cpu(installed(name)) as second:
            first.prefill(prompt_of(name))
            first.save_session(tmp_path / name)
            second.load_session(tmp_path / name)
            assert np.array_equal(np.array(first.step(3)), np.array(second.step(3)))


def test_a_prompt_that_forgets_a_loaded_session_warns(
    installed: Callable[[str], Path], tmp_path: Path
) -> None:
    with open_cpu(installed("llama-base")) as runner:
        runner.prefill([1, 2, 3])
        runner.save_session(tmp_path / "talk")
        runner.load_session(tmp_path / "talk")
        with pytest.warns(
            UserWarning, match=r"session of 3 tokens.* set runner.prefix_reuse = True"
        ):
            runner.generate([1, 2, 3, 4], max_new_tokens=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            runner.generate([1, 2, 3, 4], max_new_tokens=1)
            runner.load_session(tmp_path / "talk")
            runner.prefix_reuse = True
            result = runner.generate([1, 2, 3, 4], max_new_tokens=1)
        assert result.reused_prefix_tokens == 3


def test_only_the_written_part_is_stored(installed: Callable[[str], Path], tmp_path: Path) -> None:
    file = tmp_path / "short"
    with open_cpu(installed("llama-base"), max_context=2000) as runner:
        runner.prefill([1, 2, 3, 4, 5])
        runner.save_session(file)
        per_token = runner.memory.kv // 2000
    assert 5 * per_token < file.stat().st_size < 5 * per_token + 2000
    arrays, metadata = mx.load(str(file), format="safetensors", return_metadata=True)
    assert arrays["tokens"].tolist() == [1, 2, 3, 4, 5]
    assert metadata["position"] == "5" and metadata["dtype"] == "float32"


def test_going_back_before_saving_does_not_let_a_ring_forget_what_it_lost(
    installed: Callable[[str], Path], tmp_path: Path
) -> None:
    ring = {"prefix_reuse": True, "swa_ring_capacity": 9 + 30}
    turn = prompt_of("mistral-sliding", 80)
    with open_cpu(installed("mistral-sliding"), **ring) as runner:
        answer(runner, turn, 1)
        assert answer(runner, [*turn[:50], 99], 1).kept == 50
        runner.save_session(tmp_path / "ring")
        runner.load_session(tmp_path / "ring")
        assert answer(runner, [*turn[:22], 99, 1], 1).kept == 0


def test_the_present_conversation_is_parked_where_there_is_room(
    installed: Callable[[str], Path], tmp_path: Path
) -> None:
    a, b = [1, 2, 3, 4], [5, 6, 7, 8]
    options = {"prefix_reuse": True, "session_slots": 2}
    with open_cpu(installed("llama-base"), **options) as runner:
        answer(runner, a, 1)
        runner.save_session(tmp_path / "a")
        runner.reset()
        answer(runner, b, 1)
        runner.load_session(tmp_path / "a")
        assert answer(runner, [*b, 9], 1).kept == 4
        assert answer(runner, [*a, 9], 1).kept == 4


# --- where it does not belong ---------------------------------------------------------------------


def refusal(runner: Runner, file: Path) -> str:
    """The message that `file` is refused with; the live conversation must not notice."""
    assert runner._engine is not None
    session = runner._engine.pool.live
    tokens, position = list(session.record.tokens), runner.position
    held = [mx.array(a) for a in session.states.arrays()]
    mx.eval(held)
    with pytest.raises(SessionFileError) as caught:
        runner.load_session(file)
    assert runner._engine.pool.live is session
    assert (session.record.tokens, runner.position) == (tokens, position)
    assert not session.record.tainted
    for before, after in zip(held, session.states.arrays(), strict=True):
        assert mx.array_equal(before, after)
    message = str(caught.value)
    assert str(file) in message and "\n" not in message
    return message


def test_a_file_of_another_install_is_refused(
    installed: Callable[[str], Path], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(ORACLES / "llama-base", source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"rope_theta": 20000.0}))
    other = convert(source, tmp_path / "other", progress=False)
    with open_cpu(installed("llama-base")) as first, open_cpu(other) as second:
        first.prefill([1, 2, 3])
        second.prefill([4, 5])
        first.save_session(tmp_path / "talk")
        message = refusal(second, tmp_path / "talk")
    assert re.search(r"made with install '.+' \([0-9a-f]{12}\), but this runner has", message)
    assert "has install 'other' (" in message and "open the install that made it" in message


def test_a_file_of_another_dtype_is_refused(
    installed: Callable[[str], Path], tmp_path: Path
) -> None:
    with (
        open_cpu(installed("llama-base")) as first,
        open_cpu(installed("llama-base"), dtype="bfloat16") as second,
    ):
        first.prefill([1, 2, 3])
        first.save_session(tmp_path / "talk")
        message = refusal(second, tmp_path / "talk")
    assert "made with dtype float32, but this runner has dtype bfloat16" in message


def test_a_file_of_another_layout_is_refused(
    installed: Callable[[str], Path], tmp_path: Path
) -> None:
    path = installed("mistral-sliding")
    with (
        open_cpu(path, swa_ring_capacity=20) as first,
        open_cpu(path, swa_ring_capacity=30) as second,
        open_cpu(path, max_context=40) as third,
    ):
        first.prefill(prompt_of("mistral-sliding", 50))
        first.save_session(tmp_path / "talk")
        message = refusal(second, tmp_path / "talk")
        assert "tensor layers.0.0 is F32 [1, 2, 20, 8], but this runner holds F32" in message
        assert "same max_context and swa_ring_capacity" in message
        message = refusal(third, tmp_path / "talk")
        assert "holds 50 tokens, but this runner has max_context 40" in message


def test_nothing_and_a_failed_session_are_not_saved(
    installed: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "talk"
    with open_cpu(installed("llama-base")) as runner:
        with pytest.raises(SessionFileError, match="nothing to save"):
            runner.save_session(file)
        runner.prefill([1, 2, 3])
        with pytest.raises(SessionFileError, match="cannot be written: there is no folder"):
            runner.save_session(tmp_path / "no" / "such" / "folder")
        assert runner._engine is not None
        runner._engine.pool.live.record.taint()
        with pytest.raises(SessionBrokenError, match="cannot be saved"):
            runner.save_session(file)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    installed: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "talk"
    with open_cpu(installed("llama-base")) as runner:
        runner.prefill([1, 2, 3])
        runner.save_session(file)
        before = file.read_bytes()
        runner.step(4)

        def full(name: str, *_: object) -> None:
            Path(name).write_bytes(b"half")
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(mx, "save_safetensors", full)
            with pytest.raises(SessionFileError, match="No space left on device"):
                runner.save_session(file)
        assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]
        runner.save_session(file)
        assert runner.load_session(file) == 4 and list(tmp_path.iterdir()) == [file]


def test_a_failure_while_filling_the_caches_leaves_no_half_conversation(
    installed: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_cpu(installed("llama-base"), prefix_reuse=True) as runner:
        first = answer(runner, [1, 2, 3], 2)
        runner.save_session(tmp_path / "talk")

        def fail(*_: object) -> None:
            raise MemoryError

        monkeypatch.setattr(session_files, "put", fail)
        with pytest.raises(MemoryError):
            runner.load_session(tmp_path / "talk")
        again = answer(runner, [1, 2, 3], 2)
        assert again.kept == 0 and same(again, first)


# --- damaged and hostile files --------------------------------------------------------------------


@pytest.fixture(scope="module")
def hybrid(installed: Callable[[str], Path]) -> Iterator[Runner]:
    """A runner with recurrent and full layers, in the middle of a conversation."""
    with open_cpu(installed("qwen3_5-base"), **WARM) as runner:
        answer(runner, prompt_of("qwen3_5-base", 40), 2)
        yield runner


@pytest.fixture(scope="module")
def good(hybrid: Runner, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("saved") / "good"
    hybrid.save_session(file)
    return file.read_bytes()


def with_header(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The file with a changed header; a change that moves data is the change's own business."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def meta(**changes: str) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["__metadata__"].update(changes)


def entry(name: str, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].update(changes)


HOSTILE = {
    "another format": (meta(format="turbospark-session-9"), "is not a session file"),
    "no metadata": (lambda h: h.pop("__metadata__"), "is not a session file"),
    "metadata of another kind": (lambda h: h.update(__metadata__=[]), "is not a session file"),
    "a negative position": (meta(position="-1"), "must be whole numbers"),
    "a position in words": (meta(position="four"), "must be whole numbers"),
    "a huge position": (meta(position="9" * 30), "must be whole numbers"),
    "no tokens": (meta(position="0"), "contradict each other"),
    "more than the context": (meta(position="161", furthest="161"), "holds 161 tokens"),
    "furthest before position": (meta(furthest="1"), "contradict each other"),
    "another position": (meta(position="40"), "tensor layers.2.0 is F32"),
    "snapshots past the end": (meta(snapshots="24 42"), "contradict each other"),
    "snapshots out of order": (meta(snapshots="40 24"), "contradict each other"),
    "too many snapshots": (meta(snapshots="1 2 3 4 5"), "contradict each other"),
    "a snapshot less": (meta(snapshots="24 40"), "has an unknown tensor snapshots"),
    "a snapshot more": (meta(snapshots="1 24 32 40"), "lacks tensor snapshots.3"),
    "a missing tensor": (lambda h: h.pop("layers.1.0"), "lacks tensor layers.1.0"),
    "an unknown tensor": (
        lambda h: h.update({"evil\x1b[2J": h["tokens"]}), r"unknown tensor evil\\x1b"
    ),
    "another dtype": (entry("layers.1.0", dtype="F16"), "is F16"),
    "an absurd shape": (entry("layers.1.0", shape=[1 << 60, 1 << 60]), "but this runner holds"),
    "a shape that is no list": (entry("tokens", shape=None), "but this runner holds"),
    "an entry that is no object": (lambda h: h.update(tokens=3), "but this runner holds"),
    "offsets that are no pair": (entry("tokens", data_offsets=[0]), "not a pair of integers"),
    "offsets in fractions": (entry("tokens", data_offsets=[0.0, 4.0]), "not a pair of integers"),
    "offsets of another size": (entry("tokens", data_offsets=[0, 4]), "has 4 bytes"),
    "offsets far away": (
        entry("tokens", data_offsets=[1 << 50, (1 << 50) + 164]), "of the data; expected"
    ),
    "negative offsets": (entry("tokens", data_offsets=[-164, 0]), "of the data; expected"),
    "another digest": (meta(sha256="0" * 64), "does not have|do not have the recorded SHA-256"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused_by_name(
    case: str, hybrid: Runner, good: bytes, tmp_path: Path
) -> None:
    change, expected = HOSTILE[case]
    file = tmp_path / "bad"
    file.write_bytes(with_header(good, change))
    assert re.search(expected, refusal(hybrid, file))


def test_any_change_of_the_metadata_is_refused(hybrid: Runner, good: bytes, tmp_path: Path) -> None:
    """The digest covers what says where arrays belong, not their bytes alone."""
    (length,) = struct.unpack("<Q", good[:8])
    said = json.loads(good[8 : 8 + length])["__metadata__"]
    assert said["snapshots"] == "24 32 40"
    changes = {name: [f"{value}x", ""] for name, value in said.items()}
    changes["snapshots"] += ["23 31 39", "24  32 40"]
    changes["furthest"] += ["42", "041"]
    changes["another"] = ["1"]
    file = tmp_path / "metadata"
    for name, values in changes.items():
        for value in values:
            file.write_bytes(with_header(good, meta(**{name: value})))
            refusal(hybrid, file)
    file.write_bytes(with_header(good, lambda h: h["__metadata__"].pop("furthest")))
    refusal(hybrid, file)


def test_the_digest_is_that_of_the_metadata_names_and_bytes(good: bytes) -> None:
    (length,) = struct.unpack("<Q", good[:8])
    header, body = json.loads(good[8 : 8 + length]), good[8 + length :]
    said = header.pop("__metadata__")
    recorded = said.pop("sha256")
    digest = hashlib.sha256(json.dumps(sorted(map(list, said.items()))).encode())
    for name in sorted(header):
        start, end = header[name]["data_offsets"]
        digest.update(name.encode() + body[start:end])
    assert digest.hexdigest() == recorded


@pytest.mark.parametrize("name", ["a\0b", None, 3, "x" * 300])
def test_what_is_no_path_is_refused_and_nothing_is_written(
    name: Any, hybrid: Runner, tmp_path: Path
) -> None:
    path = tmp_path / name if isinstance(name, str) else name
    with pytest.raises(OptionError, match="path"):
        hybrid.save_session(path)
    with pytest.raises(OptionError, match="path"):
        hybrid.load_session(path)
    assert list(tmp_path.iterdir()) == []


def test_a_name_too_long_to_be_written_aside_is_refused(hybrid: Runner, tmp_path: Path) -> None:
    with pytest.raises(SessionFileError, match="cannot be written"):
        hybrid.save_session(tmp_path / ("x" * 250))
    assert list(tmp_path.iterdir()) == []


def test_the_unchanged_file_is_accepted(hybrid: Runner, good: bytes, tmp_path: Path) -> None:
    file = tmp_path / "good"
    file.write_bytes(with_header(good, lambda header: None))
    assert hybrid.load_session(file) == 41


def test_tokens_outside_the_vocabulary_are_refused(
    hybrid: Runner, good: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "tokens"
    for token in (-1, hybrid.vocab_size):
        file.write_bytes(good)
        arrays, metadata = mx.load(str(file), format="safetensors", return_metadata=True)
        arrays["tokens"] = arrays["tokens"] + (token - arrays["tokens"][0]) * mx.array(
            [1] + [0] * 40
        )
        mx.eval(arrays)
        metadata["sha256"] = session_files._digest(arrays, metadata)
        mx.save_safetensors(str(tmp_path / "x.safetensors"), arrays, metadata)
        message = refusal(hybrid, tmp_path / "x.safetensors")
        assert f"outside the vocabulary 0..{hybrid.vocab_size - 1}" in message


def test_files_that_are_not_files_are_refused(hybrid: Runner, tmp_path: Path) -> None:
    missing = refusal(hybrid, tmp_path / "missing")
    assert "No such file" in missing and missing.count(str(tmp_path / "missing")) == 1
    assert "not a regular file" in refusal(hybrid, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal(hybrid, tmp_path / "pipe")
    (tmp_path / "empty").write_bytes(b"")
    assert "is not a session file: it has 0 bytes" in refusal(hybrid, tmp_path / "empty")
    (tmp_path / "notes.md").write_text("# Notes\n" * 9)
    message = refusal(hybrid, tmp_path / "notes.md")
    assert "is not a session file, or cut short" in message and "has 72" in message
    assert message.count(str(tmp_path)) == 1
    (tmp_path / "header").write_bytes(struct.pack("<Q", 2) + b"[]")
    assert "is not a session file: header: expected" in refusal(hybrid, tmp_path / "header")
    for length in (0, 9, 1 << 40, (1 << 64) - 1):
        (tmp_path / "header").write_bytes(struct.pack("<Q", length) + b"{}")
        refusal(hybrid, tmp_path / "header")


def test_every_truncation_and_a_longer_file_are_refused(
    hybrid: Runner, good: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "cut"
    for size in {*range(0, len(good), max(1, len(good) // 40)), 7, 8, 9, len(good) - 1}:
        file.write_bytes(good[:size])
        refusal(hybrid, file)
    file.write_bytes(good + b"\0")
    assert "too long: expected" in refusal(hybrid, file)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_flipped_byte_is_refused_or_harmless(
    data: st.DataObject, hybrid: Runner, good: bytes, tmp_path: Path
) -> None:
    at = data.draw(st.integers(0, len(good) - 1))
    bits = data.draw(st.integers(1, 255))
    file = tmp_path / "flipped"
    file.write_bytes(good[:at] + bytes([good[at] ^ bits]) + good[at + 1 :])
    with suppress(SessionFileError):  # a space of the header may become another white space
        hybrid.load_session(file)
    hybrid.save_session(file)
    digests = [re.search(b'"sha256":"([0-9a-f]+)"', d) for d in (good, file.read_bytes())]
    assert digests[0] and digests[1] and digests[0][1] == digests[1][1]
