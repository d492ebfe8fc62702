"""Stop strings: nothing of them shown, nothing else lost, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbospark.text.stops import StopMatcher


def run(stops, pieces):
    matcher = StopMatcher(stops)
    shown = []
    for piece in pieces:
        shown.append(matcher.push(piece))
        if matcher.matched is not None:
            return shown, matcher.matched
    return [*shown, matcher.finish()], None


def reference(stops, text):
    """Character by character: the first moment at which some stop string is complete."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if done:
            longest = max(done, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.lists(st.text("ab", max_size=4), max_size=4),
    st.lists(st.text("abc", max_size=5), max_size=8),
)
def test_the_result_does_not_depend_on_how_the_text_is_cut(stops, pieces):
    shown, matched = run(stops, pieces)
    assert ("".join(shown), matched) == reference(stops, "".join(pieces))


def test_only_what_could_become_a_stop_is_held_back():
    matcher = StopMatcher(["END"])
    assert matcher.push("the E") == "the "
    assert matcher.push("N") == ""
    assert matcher.push("d. E") == "ENd. "
    assert matcher.push("ND more") == "" and matcher.matched == "END"
    assert matcher.push("later") == "" and matcher.finish() == ""


def test_the_end_releases_a_beginning_that_came_to_nothing():
    assert run(["\n\nUser:"], ["answer\n", "\nUse"]) == (["answer", "", "\n\nUse"], None)


def test_the_stop_completed_first_wins():
    assert run(["abcd", "bc"], ["abcd"]) == (["a"], "bc")
    assert run(["c", "bc"], ["abc"]) == (["a"], "bc")


@pytest.mark.parametrize("stops", [[], [""], ["", ""]])
def test_empty_stops_never_match(stops):
    assert run(stops, ["a", "", "b"]) == (["a", "", "b", ""], None)
