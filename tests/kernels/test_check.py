"""The check of kernels on a GPU: its references, its verdict, and what it says without a GPU."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from cases import error, floats

from turbospark.dtypes import MXFP4, affine
from turbospark.kernels import (
    check,
    check_chain,
    check_delta,
    check_packed,
    expert_matrix,
    qmv_matrix,
)
from turbospark.kernels.decode_attention import Rules


def test_without_a_gpu_it_names_the_emulator(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([]) == 0
    assert "pytest tests/kernels" in capsys.readouterr().out


CHECKS = {
    "qmv": lambda: check._qmv(qmv_matrix, 2, (32, 256), affine(4, 64), mx.float32, True),
    "qmv mxfp4": lambda: check._qmv(qmv_matrix, 1, (32, 96), MXFP4, mx.float32, False),
    "experts": lambda: check._experts(expert_matrix, 2, 3, (64, 64), affine(4, 32), mx.float32),
    "attention": lambda: check._attention(2, 2, 64, 40, 64, Rules(0.125)),
    "ring": lambda: check._attention(1, 2, 64, 90, 64, Rules(0.1, 32, True), sinks=True),
    "chain": lambda: check_chain._feed_forward(128, 192),
    "rope": check._rope,
    "a delta net's output": lambda: next(check_delta.step_checks()),
    "a delta net's past": lambda: list(check_delta.step_checks())[1],
    "a delta net's memory": lambda: list(check_delta.step_checks())[2],
    "a delta net's rows": lambda: next(check_delta.rows_checks(5)),
    "the memory after them": lambda: list(check_delta.rows_checks(5))[1],
    "packed": lambda: check_packed._packed(2, 2, 64, 150, (4, 3), 3),
    "turned": check_packed._turned,
    "encoded keys": lambda: check_packed._encoded(True),
    "encoded values": lambda: check_packed._encoded(False),
}


@pytest.mark.parametrize("name", CHECKS)
def test_mlx_and_float64_agree_about_every_check(name: str) -> None:
    made = CHECKS[name]()
    got = floats(made.own()).reshape(made.want.shape)
    # Two products one after the other in the chain.
    products = 2 if made.kernel == "chain" else 1
    assert error(got, made.want) < products * (1e-5 if made.dtype == mx.float32 else 2e-2)


def test_every_check_bears_a_name_that_can_be_asked_for() -> None:
    names = [name for group in check.CHECKS for name in group]
    assert {make().kernel for make in CHECKS.values()} <= set(names)
    assert {c.kernel for c in check.small_checks()} == {"router_topk", "rope_kv", "likeliest"}


def test_a_kernel_that_fails_is_named_and_the_next_one_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(where: str) -> mx.array:
        raise RuntimeError(f"cannot build\nx:3: error: no such function on {where}\nand more")

    ones = lambda *_: mx.ones((1,))  # noqa: E731
    checks = [
        check.Check("chain", "one", mx.float32, run, ones, np.ones(1), 4) for run in (broken, ones)
    ]
    monkeypatch.setattr(check, "backend", lambda device: "metal")
    monkeypatch.setattr(check, "CHECKS", {("chain",): lambda: checks})
    assert check.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "FAILED: x:3: error: no such function on metal" in lines[
        2
    ] and "and more" not in "".join(lines)
    assert lines[3].startswith("chain") and "FAILED" not in lines[3] and lines[4] == "1 wrong"


def test_a_kernel_that_does_not_run_here_is_not_all_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "backend", lambda device: "metal")
    assert check.main(["--kernel", "chain"]) == 1
    assert "nothing checked: chain does not run on metal" in capsys.readouterr().out


def test_router_weights_agree() -> None:
    for made in list(check.small_checks())[:2]:
        assert error(floats(made.own()), made.want) < 1e-6


def test_a_kernel_is_wrong_beyond_rounding_and_mlx() -> None:
    made = check.Check("k", "s", mx.bfloat16, mx.array, mx.array, np.ones(1), 1000)
    row = lambda mine, own: check.Row(made, mine, own, 1.0, 1.0)  # noqa: E731
    assert row(8e-3, 0.0).right and row(2.9e-2, 2e-2).right
    assert not row(9e-3, 0.0).right and not row(3.1e-2, 2e-2).right
    assert not row(float("nan"), 1.0).right
    assert str(row(1.0, 0.0)).endswith("WRONG") and "WRONG" not in str(row(0.0, 0.0))
