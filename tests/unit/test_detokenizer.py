"""Streaming text: pieces join to the whole, no piece is taken back, no half characters."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_level, sentence_piece
from tokenizers.decoders import DecodeStream

from turbospark.text.detokenizer import Detokenizer

BYTE_LEVEL = byte_level()
SENTENCE_PIECE = sentence_piece()
TEXTS = [
    "e\u0301x",  # a combining mark
    "\U0001f3f3\ufe0f\u200d\U0001f308",  # a joined emoji
    "\U0001f44d\U0001f3fd",  # a skin tone
    "社区",
    "ďábelské",
    "a b",
    " é a",
    "naïve 漢字 \U0001f44d",
]


def stream(backend, ids):
    detokenizer = Detokenizer(lambda some: backend.decode(some, skip_special_tokens=True))
    return [*(detokenizer.push(id_) for id_ in ids), detokenizer.flush()]


@pytest.mark.parametrize("backend", [BYTE_LEVEL, SENTENCE_PIECE], ids=["bytes", "pieces"])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text_without_replacement_characters(backend, text):
    ids = backend.encode(text, add_special_tokens=False).ids
    pieces = stream(backend, ids)
    assert "".join(pieces) == backend.decode(ids) == text
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=12))
def test_any_text_streams_to_its_whole_decode(text):
    for backend in (BYTE_LEVEL, SENTENCE_PIECE):
        ids = backend.encode(text, add_special_tokens=False).ids
        assert "".join(stream(backend, ids)) == backend.decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 258), max_size=10))
def test_pieces_equal_the_librarys_own_stream_and_add_its_missing_tail(ids):
    reference = DecodeStream(skip_special_tokens=True)
    pieces = stream(BYTE_LEVEL, ids)
    assert pieces[:-1] == [reference.step(BYTE_LEVEL, id_) or "" for id_ in ids]
    assert "".join(pieces) == BYTE_LEVEL.decode(ids)


def test_special_tokens_are_silent_and_do_not_break_a_character():
    eot = BYTE_LEVEL.token_to_id("<|im_end|>")
    first, *rest = BYTE_LEVEL.encode("é", add_special_tokens=False).ids
    assert stream(BYTE_LEVEL, [eot, first, eot, *rest, eot]) == ["", "", "", "é", "", ""]


def test_an_unfinished_character_comes_out_at_the_end():
    ids = BYTE_LEVEL.encode("a社", add_special_tokens=False).ids[:-1]
    assert stream(BYTE_LEVEL, ids) == ["a", "", "", "\ufffd"]
    assert "".join(stream(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)


def test_a_literal_replacement_character_is_text():
    ids = BYTE_LEVEL.encode("a\ufffd", add_special_tokens=False).ids
    assert "".join(stream(BYTE_LEVEL, ids)) == "a\ufffd"


def test_bytes_that_turn_invalid_are_survived_where_the_library_raises():
    def byte(value):
        return value + 1

    ids = [byte(0xC3), byte(0xA9), byte(0x80), SENTENCE_PIECE.token_to_id("b")]
    reference = DecodeStream(skip_special_tokens=True)
    with pytest.raises(Exception, match="Invalid prefix"):
        for id_ in ids:
            reference.step(SENTENCE_PIECE, id_)
    assert stream(SENTENCE_PIECE, ids) == ["", "é", "", "\ufffdb", ""]
    later = [*ids, SENTENCE_PIECE.token_to_id("▁a")]
    assert stream(SENTENCE_PIECE, later)[-2:] == [" a", ""], "spaces survive the recovery"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 263), max_size=10))
def test_any_ids_at_all_stream_without_an_error(ids):
    pieces = stream(SENTENCE_PIECE, ids)
    whole = SENTENCE_PIECE.decode(ids)
    if "\ufffd" not in whole:
        assert "".join(pieces) == whole
