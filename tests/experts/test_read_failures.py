"""Layer files that are cut, changed, removed or unreadable while a model runs: a named error, no
stale slot, and the right answer once the file is back.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from layouts import Store, request, uniform, write_layout

from turbospark import OpenOptions, Runner, synth
from turbospark.errors import (
    ChecksumMismatchError,
    FileSizeError,
    MissingFileError,
    OptionError,
    ReadError,
)
from turbospark.experts import mapped, reader
from turbospark.experts.policy import EMPTY

PROMPT = [5, 9, 100, 41, 7, 300, 21, 8]
TOKENS = 6


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("synth") / "model"
    return synth("qwen3_moe", path, bits=4, layers=2, top_k=2, progress=False)


@pytest.fixture
def install(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def generate(runner: Runner) -> list[int]:
    result = runner.generate(PROMPT, temperature=0, max_new_tokens=TOKENS, ignore_eos=True)
    return list(result.token_ids)


@pytest.fixture(scope="module")
def undisturbed(original: Path) -> list[int]:
    with Runner.open(original) as runner:
        return generate(runner)


@pytest.fixture(params=["streamed", "mapped"])
def runner(install: Path, request: pytest.FixtureRequest) -> Iterator[Runner]:
    options = OpenOptions(expert_residency=request.param, expert_cache_slots=4)
    with Runner.open(install, options) as opened:
        yield opened


def layer_file(runner: Runner, layer: int = 1) -> Path:
    return runner.path / "packed_experts" / f"layer_{layer:02d}.bin"


def fails(runner: Runner, text: str) -> str:
    """The error of a generation: one line that names file, expert, offset, expected and found."""
    with pytest.raises(ReadError, match=text) as caught:
        generate(runner)
    message = str(caught.value)
    assert "\n" not in message and "layer_01.bin: expert " in message
    assert all(word in message for word in ("offset", "expected", "found")), message
    if runner.expert_residency == "streamed":
        layer = runner._engine.store.layers[1]
        expert = int(message.split("expert ")[1].split()[0].strip(":"))
        assert layer.cache.slot_of(expert) is None  # the slot stayed empty
    return message


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(range(256)) * 64)


def remove(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    """Another file of the same size under the same name."""
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(bytes(len(data)))


DAMAGE = {"cut": cut, "overwritten": overwrite, "removed": remove, "replaced": replace}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_and_a_repaired_one_is_read_again(
    runner: Runner, undisturbed: list[int], damage: str
) -> None:
    path = layer_file(runner)
    good = path.read_bytes()
    assert generate(runner) == undisturbed
    DAMAGE[damage](path)
    fails(runner, "was removed|changed while open")
    # It is refused again for what it is now: too short, absent, or of another checksum.
    again = {"cut": "truncated", "removed": "No such file"}.get(damage, "checksum")
    fails(runner, again)
    path.write_bytes(good)
    assert generate(runner) == undisturbed
    assert generate(runner) == undisturbed


def test_damage_elsewhere_in_a_file_does_not_stop_what_is_whole(
    install: Path, undisturbed: list[int]
) -> None:
    """A touched file is read again, its records held against their checksums."""
    with Runner.open(install, OpenOptions(expert_cache_slots=4)) as runner:
        generate(runner)
        os.utime(layer_file(runner), (1, 1))
        fails(runner, "changed while open")
        assert generate(runner) == undisturbed


@pytest.fixture(params=["inline", "threads"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read by the caller, or in small pieces by the reading threads."""
    many = request.param == "threads"
    monkeypatch.setattr(reader, "cores", lambda: 16 if many else 1)
    monkeypatch.setattr(reader, "CHUNK", 5000)


def patched(monkeypatch: pytest.MonkeyPatch, answer: Callable[..., Any]) -> None:
    """`answer(real, fd, buffers, offset)` in place of preadv."""
    real = os.preadv

    def read(fd: int, buffers: Any, offset: int, *flags: int) -> int:
        return answer(lambda *args: real(*args, *flags), fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)


def open_streamed(install: Path) -> Runner:
    return Runner.open(install, OpenOptions(expert_cache_slots=4))


def test_an_input_output_error_is_named_and_passes(
    install: Path, undisturbed: list[int], monkeypatch: pytest.MonkeyPatch, way: None
) -> None:
    with open_streamed(install) as runner:
        broken = layer_file(runner).stat().st_ino

        def answer(real: Any, fd: int, buffers: Any, offset: int) -> int:
            if os.fstat(fd).st_ino == broken:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(fd, buffers, offset)

        with monkeypatch.context() as patch:
            patched(patch, answer)
            fails(runner, "Input/output error")
            fails(runner, "Input/output error")
        assert generate(runner) == undisturbed


def test_short_reads_are_continued(
    install: Path, undisturbed: list[int], monkeypatch: pytest.MonkeyPatch, way: None
) -> None:
    def answer(real: Any, fd: int, buffers: Any, offset: int) -> int:
        return real(fd, [memoryview(buffers[0])[:777]], offset)

    with open_streamed(install) as runner:
        patched(monkeypatch, answer)
        assert generate(runner) == undisturbed


def test_an_end_of_file_inside_a_record_is_named(
    install: Path, undisturbed: list[int], monkeypatch: pytest.MonkeyPatch, way: None
) -> None:
    with open_streamed(install) as runner:
        broken = layer_file(runner).stat().st_ino

        def answer(real: Any, fd: int, buffers: Any, offset: int) -> int:
            size = 100 if os.fstat(fd).st_ino == broken and offset % 5000 == 0 else None
            size = 0 if size is None and os.fstat(fd).st_ino == broken else size
            return real(fd, [memoryview(buffers[0])[:size]], offset) if size != 0 else 0

        with monkeypatch.context() as patch:
            patched(patch, answer)
            fails(runner, "cut short")
        assert generate(runner) == undisturbed


def test_pages_of_a_mapping_that_cannot_be_read_do_not_kill_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is cut between the check and the copy."""
    if mapped._MADV_POPULATE_READ is None or mapped.mx.metal.is_available():
        pytest.skip("needs Linux and a mapping that is copied")
    layout = write_layout(tmp_path, uniform(1), 8)
    store = Store(layout, "mapped")
    file = store.store.maps[0].file
    monkeypatch.setattr(file, "fd", lambda expert: store.store.maps[0]._fd)
    os.truncate(layout.layers[0].path, layout.layers[0].stride)
    ask = request(np.random.default_rng(0), 1, range(4, 8), 2)
    with pytest.raises(ReadError, match=r"expert \d at offset \d+: expected .* cannot be read"):
        store.ask(0, *ask)


# --- checksums ------------------------------------------------------------------------------------


@pytest.fixture
def corrupted(install: Path) -> Path:
    """One bit of every record of layer 1 is wrong."""
    path = install / "packed_experts" / "layer_01.bin"
    data = bytearray(path.read_bytes())
    stride = len(data) // 16
    for expert in range(16):
        data[expert * stride + 1000] ^= 4
    path.write_bytes(data)
    return install


@pytest.mark.parametrize(
    ("residency", "lookahead"), [("streamed", False), ("streamed", True), ("mapped", False)]
)
def test_a_corrupted_record_is_caught_per_read(
    corrupted: Path, residency: str, lookahead: bool
) -> None:
    options = OpenOptions(expert_residency=residency, verify_reads=True, expert_lookahead=lookahead)
    with Runner.open(corrupted, options) as runner:
        fails(runner, r"expected checksum [0-9a-f]{8}, found [0-9a-f]{8}; install it again")


def test_a_corrupted_record_is_caught_when_all_are_loaded(corrupted: Path) -> None:
    with pytest.raises(ReadError, match=r"layer_01\.bin: expert 0 at offset 0: expected checksum"):
        Runner.open(corrupted, OpenOptions(expert_residency="resident", verify_reads=True))


def test_a_corrupted_record_is_caught_by_full_verification(corrupted: Path) -> None:
    with pytest.raises(ChecksumMismatchError, match=r"layer_01\.bin"):
        Runner.open(corrupted, OpenOptions(verify="full"))
    Runner.open(corrupted).close()  # not asked for, not found


def test_verified_reads_need_checksums(install: Path) -> None:
    layout = install / "packed_experts" / "layout.json"
    text = layout.read_text()
    assert '"crc32":' in text
    layout.write_text(text.replace('"crc32":', '"crc33":'))
    Runner.open(install).close()
    with pytest.raises(OptionError, match=r"verify_reads=True needs a checksum .* layer 0"):
        Runner.open(install, OpenOptions(verify_reads=True))


# --- at open --------------------------------------------------------------------------------------


@pytest.mark.parametrize("residency", ["streamed", "mapped", "resident"])
def test_a_file_cut_or_gone_before_opening_is_refused_there(install: Path, residency: str) -> None:
    options = OpenOptions(expert_residency=residency)
    path = install / "packed_experts" / "layer_01.bin"
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(FileSizeError, match=r"layer_01\.bin: too long: expected \d+ bytes, found"):
        Runner.open(install, options)
    os.truncate(path, path.stat().st_size - 5000)
    with pytest.raises(FileSizeError, match=r"layer_01\.bin: truncated: expected \d+ bytes, found"):
        Runner.open(install, options)
    path.unlink()
    with pytest.raises(MissingFileError, match=r"layer_01\.bin"):
        Runner.open(install, options)


def test_a_read_that_fails_for_one_of_several_experts_keeps_none(tmp_path: Path) -> None:
    layout = write_layout(tmp_path, uniform(1), 8)
    store = Store(layout, slots=4, verify_reads=True)
    x, _, weights = request(np.random.default_rng(0), 1, range(8), 3)
    store.ask(0, x, [[0, 1, 2]], weights)
    with layout.layers[0].path.open("r+b") as file:
        file.seek(layout.layers[0].offset(5) + 10)
        file.write(b"\xff" * 16)
    with pytest.raises(ReadError, match="changed while open"):
        store.ask(0, x, [[0, 5, 6]], weights)
    with pytest.raises(ReadError, match="expert 5 at offset"):
        store.ask(0, x, [[0, 5, 6]], weights)
    held = store.store.layers[0].cache.held
    assert 5 not in held and 6 not in held and 0 in held and EMPTY in held
    store.ask(0, x, [[0, 1, 6]], weights)


def test_an_interrupted_wait_ends_its_reads_before_it_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task still reading after Ctrl-C would write into a slot that belongs to another expert."""
    monkeypatch.setattr(reader, "cores", lambda: 16)
    layout = write_layout(tmp_path, uniform(1), 32)
    expected = Store(layout, "resident")
    store = Store(layout, slots=8)
    asked = [request(np.random.default_rng(i), 1, range(8 * i, 8 * i + 8), 8) for i in range(2)]
    real, slow = os.preadv, Event()

    def lagging(fd: int, buffers: Any, offset: int) -> int:
        slow.wait(0.2)
        return real(fd, buffers, offset)

    def interrupted(tasks: Any) -> Any:
        monkeypatch.setattr(reader, "wait", wait)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", lagging)
        monkeypatch.setattr(reader, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.ask(0, *asked[0])
    for ask in asked[::-1]:
        assert np.array_equal(store.ask(0, *ask), expected.ask(0, *ask))
