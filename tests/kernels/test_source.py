"""Plans of kernels: what MLX is asked to compile, and when it is asked again."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from cases import normal

from turbospark.kernels import router_topk


def test_inputs_of_another_type_get_a_kernel_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def build(name: str, **_: Any) -> Any:
        made.append(name)
        return lambda inputs, **how: [mx.zeros(s) for s in how["output_shapes"]]

    monkeypatch.setattr(mx.fast, "metal_kernel", build)
    for dtype in (mx.float32, mx.bfloat16, mx.float32):
        router_topk.launch(normal((1, 33), dtype, 0), 4, True, 1.0).run("metal")
    assert len(made) == 2 and len(set(made)) == 2
    router_topk.launch(normal((1, 34), mx.float32, 0), 4, True, 1.0).run("metal")
    assert len(set(made)) == 3
