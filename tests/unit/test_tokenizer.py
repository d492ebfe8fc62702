"""Loading a tokenizer: ends of a turn from every source, decoders that fit, damaged files."""

from __future__ import annotations

import json

import pytest
from tiny_tokenizers import byte_level, sentence_piece, write
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, processors

from turbospark.errors import ModelFormatError, OptionError
from turbospark.text.tokenizer import Tokenizer


def test_a_folder_without_tokenizer_json_has_no_tokenizer(tmp_path):
    assert Tokenizer.load(tmp_path) is None


def test_every_source_of_end_tokens_counts(tmp_path):
    write(
        tmp_path,
        config={"eos_token": "<|endoftext|>"},
        generation={"eos_token_id": [7]},
        model_config={"eos_token_id": [5, 9]},
    )
    tokenizer = Tokenizer.load(tmp_path)
    end, _, eot = (
        tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    )
    assert tokenizer.eos_ids == {5, 7, 9, end, eot}
    assert tokenizer.stop_ids[eot] == "end_of_turn" == tokenizer.stop_ids[tokenizer.end_of_turn_id]
    assert {tokenizer.stop_ids[i] for i in (5, 7, 9, end)} == {"eos"}


def test_the_callers_eos_stands_in_for_config_json(tmp_path):
    write(tmp_path, model_config={"eos_token_id": 5})
    assert 5 not in Tokenizer.load(tmp_path, config_eos=6).eos_ids
    assert 6 in Tokenizer.load(tmp_path, config_eos=6).eos_ids
    nested = write(tmp_path, model_config={"text_config": {"eos_token_id": 8}})
    assert 8 in Tokenizer.load(nested).eos_ids


@pytest.mark.parametrize(
    ("specials", "dialect", "end", "tool"),
    [
        (("<|im_start|>", "<|im_end|>"), "chatml", "<|im_end|>", None),
        (("<|start_header_id|>", "<|eot_id|>"), "llama3", "<|eot_id|>", None),
        (("<start_of_turn>", "<end_of_turn>", "<eos>"), "gemma", "<end_of_turn>", None),
        (("<|turn>", "<turn|>", "<|tool_response>"), "gemma4", "<turn|>", "<|tool_response>"),
        (("<s>", "</s>"), "mistral", "</s>", None),
        (("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"), "deepseek",
         "<｜end▁of▁sentence｜>", None),
        (("<|start|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|end|>"),
         "harmony", "<|return|>", "<|call|>"),
        (("<|start|>", "<|message|>", "<|eot|>", "<|eom|>"), "muse", "<|eot|>", None),
        (("<|end_of_text|>",), "plain", None, None),
    ],
)  # fmt: skip
def test_dialects_are_told_apart_by_their_markers(tmp_path, specials, dialect, end, tool):
    tokenizer = Tokenizer.load(write(tmp_path, byte_level(specials)))
    assert tokenizer.dialect.name == dialect
    assert tokenizer.end_of_turn_id == (tokenizer.token_to_id(end) if end else None)
    assert tokenizer.tool_stop_id == (tokenizer.token_to_id(tool) if tool else None)
    if tool:
        assert tokenizer.stop_ids[tokenizer.tool_stop_id] == "tool_calls"
    if dialect == "harmony":
        assert tokenizer.token_to_id("<|end|>") not in tokenizer.stop_ids


@pytest.mark.parametrize("strips", [(), (decoders.Strip(" ", 1, 0),)], ids=["", "strip"])
def test_a_sentencepiece_decoder_on_a_byte_level_vocabulary_is_replaced(tmp_path, strips):
    backend = byte_level()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strips]
    )
    ids = backend.encode("Hello! How\nare you", add_special_tokens=False).ids
    assert "Ġ" in backend.decode(ids), "the fault is real"
    tokenizer = Tokenizer.load(write(tmp_path, backend))
    assert tokenizer.decode(ids) == "Hello! How\nare you"
    stream = tokenizer.detokenizer()
    assert "".join(map(stream.push, ids)) + stream.flush() == "Hello! How\nare you"


@pytest.mark.parametrize("decoder", [decoders.ByteLevel(), None])
def test_a_decoder_that_leaves_underscores_is_replaced(tmp_path, decoder):
    backend = sentence_piece()
    if decoder is None:
        state = json.loads(backend.to_str())
        state["decoder"] = None
        backend = type(backend).from_str(json.dumps(state))
    else:
        backend.decoder = decoder
    ids = backend.encode("a b é", add_special_tokens=False).ids
    assert "▁" in backend.decode(ids), "the fault is real"
    assert Tokenizer.load(write(tmp_path, backend)).decode(ids) == "a b é"


def test_a_raw_prompt_gets_what_the_files_say_and_a_chat_nothing(tmp_path):
    backend = byte_level(("<s>", "</s>", *("<|im_start|>", "<|im_end|>")))
    bos = backend.token_to_id("<s>")
    plain = backend.encode("hi", add_special_tokens=False).ids
    tokenizer = Tokenizer.load(
        write(tmp_path, backend, {"bos_token": "<s>", "add_bos_token": True})
    )
    assert tokenizer.encode("hi") == [bos, *plain]
    assert tokenizer.encode("hi", add_special=False) == plain
    assert tokenizer.encode("") == [bos]
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", bos), ("</s>", bos + 1)]
    )
    config = {"bos_token": {"content": "<s>"}}
    assert Tokenizer.load(write(tmp_path, backend, config)).encode("hi") == [bos, *plain, bos + 1]
    config["add_bos_token"] = False
    assert Tokenizer.load(write(tmp_path, backend, config)).encode("hi") == [*plain, bos + 1]


def test_padding_and_truncation_of_the_file_are_ignored(tmp_path):
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    assert len(Tokenizer.load(write(tmp_path, backend)).encode("abcdefgh")) == 8


def test_ids_past_the_vocabulary_decode_to_nothing(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path))
    (a,) = tokenizer.encode("a")
    assert tokenizer.decode([a, tokenizer.vocab_size + 5, a]) == "aa"
    assert tokenizer.id_to_token(tokenizer.vocab_size + 5) is None
    stream = tokenizer.detokenizer()
    assert [stream.push(i) for i in (a, tokenizer.vocab_size + 5, a)] == ["a", "", "a"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "not json"),
        ("tokenizer_config.json", "{"),
        ("generation_config.json", "[]"),
        ("generation_config.json", '{"eos_token_id": 1.5}'),
        ("generation_config.json", '{"eos_token_id": [[1]]}'),
        ("config.json", "{"),
        ("config.json", '{"text_config": {"eos_token_id": "x"}}'),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path, name, content):
    write(tmp_path)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelFormatError, match=name) as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_chat_is_rendered_and_encoded_with_its_special_tokens(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path))
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    start, end = tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|im_end|>")
    assert ids[0] == start and ids.count(start) == 2 and ids.count(end) == 1
    assert tokenizer.decode(ids) == "user\nhi\nassistant\n"


def test_a_text_that_has_no_ids_is_refused_in_one_line(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path))
    with pytest.raises(OptionError, match=r"'\\ud800' cannot be encoded"):
        tokenizer.encode("\ud800")
    backend = Backend(models.WordLevel({"a": 0}, unk_token="?"))
    known = Tokenizer.load(write(tmp_path, backend))
    assert known.encode("a") == [0]
    with pytest.raises(OptionError, match="'b' cannot be encoded"):
        known.encode("b")
    backend = Backend(models.WordLevel({"b": 0}, unk_token="?"))
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json cannot encode"):
        Tokenizer.load(write(tmp_path, backend))


def test_a_deeply_nested_sidecar_is_not_valid_json(tmp_path):
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text("[" * 100_000)
    with pytest.raises(ModelFormatError, match="not valid JSON"):
        Tokenizer.load(tmp_path)
