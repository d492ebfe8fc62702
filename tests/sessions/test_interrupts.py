"""An interrupt at any evaluation of a pass leaves a runner that any thread can use (C24)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from conversation import KINDS, open_cpu
from test_threads import GREEDY, PROMPT, elsewhere


@pytest.mark.parametrize("name", [*KINDS, "mixtral-base"])
def test_after_an_interrupt_every_thread_gets_the_answer_of_a_fresh_runner(
    name: str, installed: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_cpu(installed(name)) as runner:
        expected = runner.generate(PROMPT, **GREEDY).token_ids
        for place in range(1, 12):
            left = [place]
            real = mx.eval

            def interrupted(*arrays: Any, left: list[int] = left, real: Any = real) -> None:
                left[0] -= 1
                if left[0] == 0:
                    raise KeyboardInterrupt
                real(*arrays)

            with monkeypatch.context() as patch:
                patch.setattr(mx, "eval", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    runner.generate(PROMPT, **GREEDY)
            assert elsewhere(lambda: runner.generate(PROMPT, **GREEDY).token_ids) == expected
            assert runner.generate(PROMPT, **GREEDY).token_ids == expected
