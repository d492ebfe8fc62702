"""What opening a model with routed experts resolves, refuses and releases."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turbospark import OpenOptions, Runner
from turbospark.errors import OptionError, RunnerClosedError
from turbospark.experts.reader import DiskMeter

NAME = "qwen3_moe-base"
SMALL = OpenOptions(max_context=64)


def test_slots_are_what_was_asked_up_to_the_number_of_experts(
    installed: Callable[[str], Path],
) -> None:
    path = installed(NAME)  # 6 experts, top 3
    for asked, found in ((3, 3), (5, 5), (6, 6), (500, 6), ("auto", 6)):
        with Runner.open(path, SMALL.replace(expert_cache_slots=asked)) as runner:
            assert runner.expert_cache_slots == runner.resolved.expert_cache_slots == found
            assert runner.expert_residency == "streamed"
            assert runner.resolved.expert_mapping is None
    with pytest.raises(OptionError, match=r"expert_cache_slots=2 is too few: .* 3 of 6 experts"):
        Runner.open(path, SMALL.replace(expert_cache_slots=2))


def test_automatic_residency_is_never_reported_as_such(installed: Callable[[str], Path]) -> None:
    with Runner.open(installed(NAME), SMALL.replace(expert_residency="auto")) as runner:
        assert runner.expert_residency in ("streamed", "mapped")


def test_disk_bytes_are_measured_on_request(installed: Callable[[str], Path]) -> None:
    if not DiskMeter.PATH.exists():
        pytest.skip("needs /proc/self/io")
    path = installed(NAME)
    with Runner.open(path, SMALL) as runner:
        runner.prefill([1, 2, 3])
        assert runner.phase_counters.expert_io_bytes_physical is None
    options = OpenOptions.from_env({"TURBOSPARK_EXPERT_DISK_IO": "1"}, max_context=64)
    assert options.expert_disk_io
    with Runner.open(path, options) as runner:
        runner.prefill([1, 2, 3])
        seen = runner.phase_counters
        assert seen.expert_io_samples > 0 and seen.expert_io_bytes_physical is not None
    with Runner.open(path, options) as runner:
        phases = runner.generate([1, 2, 3], max_new_tokens=2).phases
        assert phases.expert_io_samples > 0
        assert phases.expert_io_bytes_physical == runner.phase_counters.expert_io_bytes_physical


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (NAME, {"swa_ring_capacity": 40}, "swa_ring_capacity=40 has no effect: no layer"),
        (NAME, {"ngram_table": "resident"}, "ngram_table='resident' has no effect"),
        (
            NAME,
            {"expert_lookahead": True, "expert_residency": "mapped"},
            "expert_lookahead=True has no effect with expert_residency='mapped'",
        ),
        ("llama-base", {"expert_lookahead": True}, "has no effect: this model has no routed"),
    ],
)
def test_options_without_effect_are_refused(
    installed: Callable[[str], Path], name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        Runner.open(installed(name), SMALL.replace(**changes))


def test_resident_experts_are_all_held_whatever_a_cache_would_keep(
    installed: Callable[[str], Path],
) -> None:
    options = SMALL.replace(expert_residency="resident", expert_cache_slots=4)
    with Runner.open(installed(NAME), options) as runner:
        assert runner.expert_cache_slots == runner.arch.num_experts > 4


def test_disk_bytes_are_refused_where_they_cannot_be_measured(
    installed: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskMeter, "PATH", Path("/nowhere/io"))
    with pytest.raises(OptionError, match="expert_disk_io=True needs /nowhere/io"):
        Runner.open(installed(NAME), SMALL.replace(expert_disk_io=True))


def test_a_wrong_value_of_the_variable_is_refused_by_its_name() -> None:
    with pytest.raises(OptionError, match="TURBOSPARK_EXPERT_DISK_IO='yes' is not valid"):
        OpenOptions.from_env({"TURBOSPARK_EXPERT_DISK_IO": "yes"})
    assert not OpenOptions.from_env({"TURBOSPARK_EXPERT_DISK_IO": "0"}).expert_disk_io


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (counting, not walking)


@pytest.mark.parametrize(
    ("residency", "lookahead"),
    [("streamed", False), ("streamed", True), ("mapped", False), ("resident", False)],
)
def test_closing_releases_files_and_experts(
    installed: Callable[[str], Path], residency: str, lookahead: bool
) -> None:
    if not Path("/proc/self/fd").exists():
        pytest.skip("counts /proc/self/fd")
    path = installed(NAME)
    before = open_files()
    gc.disable()  # closing must not depend on the collector
    try:
        runner = Runner.open(
            path, SMALL.replace(expert_residency=residency, expert_lookahead=lookahead)
        )
        runner.prefill([1, 2, 3])
        runner.step(4)
        store = weakref.ref(runner._engine.store)
        runner.close()
        assert open_files() == before
        assert store() is None or not getattr(store(), "layers", None)
    finally:
        gc.enable()
    with pytest.raises(RunnerClosedError):
        runner.step(1)
