"""What notebooks show: complete, escaped, readable on light and dark, and true to the numbers."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models

from turbospark import (
    GenerationResult,
    PhaseCounters,
    Runner,
    display,
    generation,
    notebook,
    opening,
    progress,
    watch,
)
from turbospark.counters import PHASE_WORDS, PHASES
from turbospark.memory import MemoryReport
from turbospark.speculation.stats import SpeculationStats
from turbospark.steering.vectors import SteeringPolicy, SteeringSet

HOSTILE = "<script>alert('x')</script> & \"quoted\"\n<b>bold</b>"
COUNTERS = PhaseCounters(
    calls=10, passes=4, total_ns=8_000_000, build_ns=2_000_000, final_wait_ns=5_000_000,
    sampling_ns=1_000_000, expert_requests=40, expert_hits=30, expert_io_bytes_requested=3 << 20,
)  # fmt: skip
RESULT = GenerationResult(
    token_ids=[1, 2, 3, 4], text=HOSTILE, stop_reason="stop_string", prompt_tokens=20,
    prefill_seconds=0.5, decode_seconds=2.0, stop_string="</b>", seed=7, reused_prefix_tokens=5,
    phases=COUNTERS,
)  # fmt: skip
MEMORY = MemoryReport(
    weights=3 << 20,
    experts=0,
    kv=1 << 20,
    active=5 << 20,
    peak=6 << 20,
    cache=0,
    kv_formula="1 < 2",
)


class Page(HTMLParser):
    """Tags in order, with a check that they are balanced, and the text between them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    path = tiny_models.talking(tmp_path_factory.mktemp("d") / "<i>tiny & mine.gturbo")
    with Runner.open(path, max_context=256) as opened:
        yield opened


@pytest.fixture(scope="module")
def everything(runner: Runner) -> dict[str, display.Shown]:
    return {
        "runner": runner,
        "result": RESULT,
        "counters": COUNTERS,
        "memory": MEMORY,
        "resolved": runner.resolved,
        "speculation": STATS,
        "steering": POLICY,
    }


def test_resolved_options_show_experts_only_where_there_are_some(
    runner: Runner, installed: Callable[[str], Path]
) -> None:
    with Runner.open(installed("qwen3_moe-base"), max_context=32) as moe:
        for shown in (str(moe.resolved), moe.resolved._repr_html_()):
            assert "expert_residency" in shown and "expert_cache_slots" in shown
    for shown in (str(runner.resolved), runner.resolved._repr_html_()):
        assert "max_context" in shown and "expert" not in shown
    assert runner.resolved.as_dict()["expert_residency"] == "streamed"


NAMES = ("runner", "result", "counters", "memory", "resolved", "speculation", "steering")


@pytest.mark.parametrize("name", NAMES)
def test_a_display_is_balanced_html_of_its_own(
    name: str, everything: dict[str, display.Shown]
) -> None:
    html = everything[name]._repr_html_()
    page = Page(html)
    assert set(page.tags) <= {"div", "span", "b", "table", "tbody", "tr", "td"}
    assert not re.search(r"https?:|src=|url\(|@import|class=|on\w+=", html)


@pytest.mark.parametrize("name", NAMES)
def test_text_stands_beside_the_html(name: str, everything: dict[str, display.Shown]) -> None:
    shown = everything[name]
    assert shown._repr_mimebundle_() == {"text/plain": str(shown), "text/html": shown._repr_html_()}


def test_what_models_and_files_say_is_escaped(runner: Runner) -> None:
    for shown in (RESULT, runner):
        html = shown._repr_html_()
        assert "<script" not in html and "<i>" not in html and "<b>bold" not in html
    text = Page(RESULT._repr_html_()).text
    assert HOSTILE in text and "stop_string: '</b>'" in text
    assert "<i>tiny & mine.gturbo" in Page(runner._repr_html_()).text


def luminance(colour: str) -> float:
    """Relative luminance as WCAG defines it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("page", ["#ffffff", "#1e1e1e", "#111111"])
def test_bars_stand_out_on_light_and_on_dark_pages(page: str) -> None:
    for colour in display.PALETTE:
        high, low = sorted((luminance(colour), luminance(page)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 3, colour
    assert len(set(display.PALETTE)) == len(PHASES) == len(display.PALETTE)


@pytest.mark.parametrize("name", NAMES)
def test_text_takes_the_colour_of_the_page(name: str, everything: dict[str, display.Shown]) -> None:
    html = everything[name]._repr_html_()
    assert set(re.findall(r"(?<![-\w])color:([^;\"]+)", html)) <= {"inherit"}


def widths(html: str) -> list[float]:
    return [float(number) for number in re.findall(r"flex:0 1 ([\d.]+)%", html)]


def test_the_bar_of_phases_has_their_shares() -> None:
    html = COUNTERS._repr_html_()
    assert widths(html) == [25.0, 62.5, 12.5]
    text = Page(html).text
    for words in ("8.0 ms for 10 tokens in 4 passes", "62.5%", "0.500 ms/token", "(75.0%)"):
        assert words in text
    assert "router" not in text.replace("layer's router", "")  # phases that took no time
    assert 'aria-label="build 2.0 ms, 25.0%, final_wait 5.0 ms' in html


def test_every_phase_has_a_place_and_words() -> None:
    found = {name for name in vars(COUNTERS) if name.endswith("_ns") and "gpu" not in name}
    assert found == {f"{name}_ns" for name in (*PHASE_WORDS, "total")}


def test_the_bar_of_memory_has_what_is_planned() -> None:
    html = MEMORY._repr_html_()
    assert widths(html) == [75.0, 25.0]
    text = Page(html).text
    assert "4.0 MiB planned" in text and "5.0 MiB now, 6.0 MiB at most" in text and "1 < 2" in text
    assert "experts" not in text


def test_a_result_shows_its_speeds_and_its_end() -> None:
    text = Page(RESULT._repr_html_()).text
    assert "20 tokens, 5 reused in 0.50 s, 30.0 tokens/s" in text
    assert "4 tokens in 2.00 s, 2.0 tokens/s" in text and "seed7" in text and "75.0%" in text


STATS = SpeculationStats(
    "lookup", 2, rounds=10, offered=(10, 8), matched=(8, 2), committed=20, rollbacks=6,
    draft_seconds=0.5, verify_seconds=1.5,
)  # fmt: skip
POLICY = SteeringPolicy.single(
    SteeringSet.of({1: np.array([3.0, 4.0]), 3: np.array([0.0, 10.0])}), "add", 0.5
)


def test_speculation_shows_acceptance_and_where_its_time_went() -> None:
    html = STATS._repr_html_()
    assert widths(html) == [25.0, 75.0]
    text = Page(html).text
    for words in ("10, 2.00 tokens each", "10 of 18 judged proposals", "80%, 25%", "lookup, up to"):
        assert words in text
    assert "no rounds" in Page(SpeculationStats("lookup", 2)._repr_html_()).text


def test_a_steering_policy_shows_the_lengths_of_its_directions() -> None:
    html = POLICY._repr_html_()
    assert str(POLICY) == "add@0.5 on 2 layers" and str(SteeringPolicy()) == "off"
    assert re.findall(r'title="([^"]+)"', html) == ["layer 1: 5", "layer 3: 10"]
    assert re.findall(r"height:([\d.]+)%", html) == ["50.0", "100.0"]
    assert "add@0.5 on 2 layers" in Page(html).text and "off" in SteeringPolicy()._repr_html_()


def test_a_steered_runner_shows_its_coefficients(installed: Callable[[str], Path]) -> None:
    with Runner.open(installed("llama-base"), max_context=32) as plain:
        hidden = plain.arch.hidden_size
    directions = {1: np.ones(hidden, np.float32)}
    policy = SteeringPolicy.single(SteeringSet.of(directions), "add", 0.1)
    with Runner.open(installed("llama-base"), max_context=32, steering=policy) as steered:
        steered.prefill([1, 2, 3])
        html = steered._repr_html_()
        ((found,), *_) = [c for c in steered.steering_coefficients or [] if c[0] is not None]
    assert found is not None and f"layer 1: {found:.4g}" in html
    assert "add@0.1 on 1 of" in Page(html).text


def test_counters_of_nothing_can_be_shown() -> None:
    assert widths(PhaseCounters()._repr_html_()) == []


def test_a_runner_shows_what_is_open_and_then_that_it_is_closed(tmp_path: Path) -> None:
    with Runner.open(tiny_models.wordless(tmp_path / "w.gturbo"), max_context=40) as opened:
        opened.prefill([1] * 10)
        html = opened._repr_html_()
        text = Page(html).text
        assert "10 of 40 tokens" in text and "2 of width 64" in text and "experts" not in text
        assert widths(html)[0] == 25.0 and "llama (llama) on cpu, float32" in text
    assert opened.closed and "closed" in Page(opened._repr_html_()).text


def test_a_mixture_shows_where_its_experts_live(installed: Callable[[str], Path]) -> None:
    with Runner.open(installed("qwen3_moe-base"), max_context=32) as opened:
        text = Page(opened._repr_html_()).text
    assert re.search(r"\d+ per layer, \d+ per token; streamed, \d+ slots per layer", text)


# --- streams and bars -----------------------------------------------------------------------------


def test_watching_in_a_terminal_prints_the_text_as_it_comes(
    runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    found = watch(runner, "hello", **asked)
    assert found.token_ids == runner.generate("hello", **asked).token_ids
    printed = capsys.readouterr().out
    assert printed.startswith(f"{found.text}\n") and "stopped max_tokens" in printed


def test_stopping_a_watched_answer_keeps_what_was_said(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def take(self: Any, event: Any) -> None:
        seen.append(event)
        if len(seen) == 4:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(notebook._Lines, "take", take)
    found = watch(runner, "hello", max_new_tokens=50, ignore_eos=True, temperature=0)
    assert found.stop_reason == "cancelled" and 1 <= found.new_tokens < 50


def test_a_cell_draws_the_prompt_the_text_and_the_result(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []

    class Handle:
        def update(self, shown: Any) -> None:
            drawn.append(shown)

    ipython = pytest.importorskip("IPython")
    monkeypatch.setattr(ipython.display, "display", lambda *_, display_id: Handle())
    monkeypatch.setattr(notebook, "in_notebook", lambda: True)
    monkeypatch.setattr(notebook, "PERIOD", 0.0)
    found = watch(runner, "hello", max_new_tokens=6, ignore_eos=True, temperature=0)
    assert drawn[-1] is found
    assert "prompt 5 of 5 tokens" in drawn[0].data
    texts = [Page(shown.data).text for shown in drawn[1:-1]]
    assert len(texts) >= 6 and texts[0].startswith("Answer1 tokens …")
    assert texts[5].startswith("Answer6 tokens, ") and texts[-1].endswith(found.text)


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool, Any]]:
    """(what, shown, bar) of every progress bar."""
    made: list[tuple[str, bool, Any]] = []
    real = progress.bar

    def bar(what: str, total: int, unit: str, shown: bool = True, **settings: Any) -> Any:
        made.append((what, shown, real(what, total, unit, shown, **settings)))
        return made[-1][2]

    monkeypatch.setattr(opening, "bar", bar)
    monkeypatch.setattr(generation, "bar", bar)
    return made


def test_opening_reports_every_byte_that_is_read(
    installed: Callable[[str], Path], bars: list[tuple[str, bool, Any]]
) -> None:
    options = {"max_context": 32, "expert_residency": "resident"}
    with Runner.open(installed("qwen3_moe-base"), progress=True, **options):
        (what, shown, bar), *_ = bars
    assert (what, shown) == ("qwen3_moe-base", True)
    assert bar.n == pytest.approx(bar.total, rel=0.2) and bar.n > 1 << 17
    with Runner.open(installed("qwen3_moe-base"), **options):
        assert [shown for _, shown, _ in bars] == [True, False]


def test_progress_of_a_generation_changes_nothing_of_it(
    runner: Runner, bars: list[tuple[str, bool, Any]]
) -> None:
    asked = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    plain = runner.generate("hello", **asked).token_ids
    assert bars == []
    assert runner.generate("hello", progress=True, **asked).token_ids == plain
    done = [(what, bar.n, bar.total) for what, _, bar in bars]
    assert done == [("prompt", 5, 5), ("answer", 8, 8)]


def test_bars_of_conversions_are_drawn_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    for shown in (False, True):
        with progress.bar("m.gturbo", 3 << 20, "B", shown) as bar:
            bar.update(3 << 20)
        assert ("m.gturbo: 100%" in capsys.readouterr().err) is shown
