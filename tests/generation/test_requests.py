"""Requests of the wrong kind are refused by the call, in one line, before anything is computed."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from turbospark import GenerationOptions, OpenOptions, Runner
from turbospark.errors import (
    ArchMismatchError,
    ContextOverflowError,
    OptionError,
    TokenIdError,
    UnsupportedError,
)


@pytest.fixture(scope="module")
def runner(installed: Callable[[str], Path]) -> Iterator[Runner]:
    with Runner.open(installed("llama-base"), OpenOptions(max_context=64)) as opened:
        yield opened


@pytest.mark.parametrize("prompt", [None, 5, 5.5, True, object()])
def test_a_prompt_that_cannot_be_listed_is_refused(runner: Runner, prompt: Any) -> None:
    with pytest.raises(TokenIdError, match=r"^prompt="):
        runner.stream(prompt)


def test_options_of_another_kind_are_refused(
    runner: Runner, installed: Callable[[str], Path]
) -> None:
    for options in (5, {}, OpenOptions()):
        with pytest.raises(OptionError, match=r"works: GenerationOptions"):
            runner.stream([1], options)
    for options in (5, {}, GenerationOptions()):
        with pytest.raises(OptionError, match=r"works: OpenOptions"):
            Runner.open(installed("llama-base"), options)


def test_options_of_an_open_may_be_keywords(installed: Callable[[str], Path]) -> None:
    install = installed("llama-base")
    with Runner.open(install, max_context=33, prefix_reuse=True) as opened:
        assert opened.options == OpenOptions(max_context=33, prefix_reuse=True)
    with Runner.open(install, OpenOptions(max_context=33, dtype="float32"), max_context=9) as again:
        assert again.options == OpenOptions(max_context=9, dtype="float32")
        assert again.max_context == 9
    with pytest.raises(OptionError, match=r"unknown option 'max_contex' .*did you mean 'max_cont"):
        Runner.open(install, max_contex=512)
    with pytest.raises(OptionError, match=r"max_context='lots' is not valid; works: an integer"):
        Runner.open(install, max_context="lots")


def test_a_cancel_that_cannot_be_called_is_refused_by_the_call(runner: Runner) -> None:
    with pytest.raises(OptionError, match="cancel=5"):
        runner.stream([1], cancel=5)


def test_prefix_reuse_takes_true_and_false_alone(runner: Runner) -> None:
    with pytest.raises(OptionError, match="prefix_reuse='yes'"):
        runner.prefix_reuse = "yes"
    assert runner.prefix_reuse is False


@pytest.mark.parametrize("model", [None, 5, b"x", "x" * 5000, "~no-such-user-here/x"])
def test_a_model_that_is_no_path_is_refused(model: Any) -> None:
    with pytest.raises(OptionError, match=r"^model"):
        Runner.open(model)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_runner_is_neither_copied_nor_pickled(runner: Runner, make: Callable[[Any], Any]) -> None:
    # Two runners over one engine would close it under each other.
    with pytest.raises(UnsupportedError, match=r"open .* again"):
        make(runner)


def test_a_forked_process_is_refused_where_it_would_wait_for_ever(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)
    for call in (lambda: runner.generate([1]), lambda: runner.step(1), runner.reset, runner.close):
        with pytest.raises(UnsupportedError, match="opened before this process was forked"):
            call()


@pytest.mark.parametrize("error", [ContextOverflowError(1, 2, 3), ArchMismatchError("a", 1, [2])])
def test_errors_with_fields_survive_the_way_to_another_process(error: ValueError) -> None:
    there = pickle.loads(pickle.dumps(error))
    assert (type(there), str(there), vars(there)) == (type(error), str(error), vars(error))
