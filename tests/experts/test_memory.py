"""Memory is what `runner.memory` promises, measured in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from turbospark import OpenOptions, Runner, synth
from turbospark.errors import OptionError
from turbospark.install.opening import Install

MIB = 1 << 20
MEASURE = """
import json, resource, sys
from pathlib import Path

import mlx.core as mx
from turbospark import OpenOptions, Runner

def peak():
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss remembers the process that started this one
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

mx.eval(mx.ones((16, 16)) @ mx.ones((16, 16)))
report = {"baseline": peak()}
if len(sys.argv) > 1:
    options = OpenOptions(**json.loads(sys.argv[2]))
    with Runner.open(sys.argv[1], options) as runner:
        result = runner.generate(
            [i % 500 for i in range(200)], temperature=0, max_new_tokens=12, ignore_eos=True
        )
        report.update(
            tokens=list(result.token_ids),
            planned=runner.memory.planned,
            experts=runner.memory.experts,
            text=str(runner.memory),
            requests=runner.phase_counters.expert_requests,
        )
report["peak"] = peak()
print(json.dumps(report))
"""


def measure(*arguments: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """336 MiB of experts."""
    return synth(
        "qwen3_moe",
        tmp_path_factory.mktemp("synth") / "large",
        layers=4, hidden=768, experts=128, top_k=4, expert_width=512, bits=4, progress=False,
    )  # fmt: skip


@pytest.mark.parametrize("residency", ["streamed", "mapped"])
def test_decoding_stays_within_the_printed_formula(large: Path, residency: str) -> None:
    baseline = measure()["peak"]
    slots = 8
    with Install.open(large) as install:
        strides = [layer.stride for layer in install.experts.layers.values()]
        stored = sum(strides) * 128
    options = {"expert_residency": residency, "expert_cache_slots": slots, "max_context": 256}
    found = measure(str(large), json.dumps(options))
    if residency == "streamed":
        assert found["experts"] == slots * sum(strides)
        assert f"8 slots x {sum(strides)} bytes (one record in 4 layers)" in found["text"]
    else:
        zero_copy = "zero-copy" in found["text"]
        assert zero_copy or "mapped (copied per use)" in found["text"]
        assert found["experts"] == (0 if zero_copy else slots * strides[0])
    assert stored >= 8 * found["experts"]
    assert found["requests"] > 128  # the prompt needed far more experts than there are slots
    assert len(found["tokens"]) == 12
    allowed = baseline + 1.05 * found["planned"] + 64 * MIB
    if residency == "streamed":
        assert found["peak"] <= allowed, (found["peak"] / MIB, allowed / MIB, found["text"])
        assert allowed < baseline + stored / 2  # loading the experts would not have passed


def test_the_report_adds_up(installed: Callable[[str], Path]) -> None:
    path = installed("mlx-qwen3_moe-base-4bit")
    options = OpenOptions(max_context=64, session_slots=2, prefix_reuse=True)
    for residency in ("streamed", "mapped", "resident"):
        with Runner.open(path, options.replace(expert_residency=residency)) as runner:
            report = runner.memory
            assert report.planned == report.weights + report.experts + report.kv
            text = str(report)
            assert "\n".join(line.split()[0] for line in text.splitlines()) == (
                "weights\nexperts\nkv\nplanned\nmlx"
            )
            assert "2 conversations of up to 64 tokens\n" in text
            if residency == "resident":
                assert "all experts of" in text
            assert runner.buffer_allocations > 0


def test_half_precision_on_a_cpu_is_refused_where_mlx_cannot_do_it(
    installed: Callable[[str], Path],
) -> None:
    for residency in ("streamed", "mapped", "resident"):
        options = OpenOptions(
            device="cpu", dtype="bfloat16", expert_residency=residency, max_context=64
        )
        with pytest.raises(OptionError, match=r"dtype=.bfloat16. on a CPU: .* not quantized"):
            Runner.open(installed("qwen3_moe-base"), options)
        with Runner.open(installed("mlx-qwen3_moe-base-4bit"), options) as runner:
            runner.prefill([1, 2, 3])
            runner.step(4)


SYNTH = """
import json, sys
from turbospark import synth
before = peak()
synth(
    "qwen3_moe", sys.argv[1], layers=2, hidden=512, experts=128, top_k=4, expert_width=512,
    bits=4, progress=False,
)
print(json.dumps(peak() - before))
"""


def test_synthetic_installs_of_any_size_are_written_in_little_memory(tmp_path: Path) -> None:
    code = MEASURE.split("report =")[0] + SYNTH
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "m")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    written = sum(file.stat().st_size for file in (tmp_path / "m").rglob("*.bin"))
    assert written > 100 * MIB
    assert json.loads(done.stdout) < 40 * MIB
