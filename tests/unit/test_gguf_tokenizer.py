"""GGUF vocabularies: the tokenizer that is built encodes as a straightforward merger would."""

from __future__ import annotations

import json
import random
import unicodedata

import pytest
from tiny_tokenizers import byte_level
from tokenizers import Regex, pre_tokenizers

from turbospark.errors import SourceError
from turbospark.text.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_files_from_gguf
from turbospark.text.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SAMPLES = [
    "Hello, I'm you've WE'LL",
    "  two  spaces\n\n\nlines\r\n\ttabs ",
    "1234567 3.14 ½",
    "naïve Ελλ Привет 漢字かな 한국어 हिन्दी",
    "👍🏽 e\u0301 camelCase XMLHttp //!?\n/",
    "x\u00a0y \u200b",
    "",
    " ",
]


def build(metadata, folder) -> Tokenizer:
    for name, data in tokenizer_files_from_gguf(metadata).items():
        (folder / name).write_bytes(data)
    return Tokenizer.load(folder)


def gpt2(pre="gpt-2", merges=(), words=(), **extra):
    """Byte-level metadata: the alphabet, the merged words, then three control tokens."""
    tokens = [*ALPHABET, *(m.replace(" ", "") for m in merges), *words]
    tokens += ["<|end|>", "<|start|>", "<tool>", "[PAD9]"]
    types = [NORMAL] * (len(tokens) - 4) + [CONTROL, CONTROL, USER, UNUSED]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.eos_token_id": tokens.index("<|end|>"),
        "tokenizer.ggml.bos_token_id": tokens.index("<|start|>"),
        **{f"tokenizer.ggml.{k}": v for k, v in extra.items()},
    }


# --- byte level -------------------------------------------------------------------------------


def test_byte_level_text_round_trips_and_control_tokens_are_found(tmp_path):
    tokenizer = build(gpt2(merges=["h i", "Ġ hi"]), tmp_path)
    ids = tokenizer.encode("hi hi<|end|>é<tool>")
    assert [tokenizer.id_to_token(i) for i in ids] == [
        "hi", "Ġhi", "<|end|>", "Ã", "©", "<tool>",
    ]  # fmt: skip
    assert tokenizer.decode(ids) == "hi hié<tool>", "user-defined tokens are text"
    for text in SAMPLES:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_are_the_rows_of_the_table(tmp_path):
    metadata = gpt2(merges=["h i"])
    tokenizer = build(metadata, tmp_path)
    for id_, token in enumerate(metadata["tokenizer.ggml.tokens"]):
        assert tokenizer.token_to_id(token) == (None if token == "[PAD9]" else id_)


# The patterns of the models' own tokenizer.json files, written out (independent of the builder).
PUBLISHED = {
    "gpt-2": r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
    "llama-bpe": r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",  # noqa: E501
    "qwen2": r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",  # noqa: E501
    "qwen35": r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",  # noqa: E501
    "gpt-4o": r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+""",  # noqa: E501
    "tekken": r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+""",  # noqa: E501
}


def words_of(tokenizer_json: dict, text: str) -> list[str]:
    """The words that a built tokenizer.json cuts `text` into, as bytes spelled out."""
    state = json.loads(byte_level().to_str())
    state["pre_tokenizer"] = tokenizer_json["pre_tokenizer"]
    backend = type(byte_level()).from_str(json.dumps(state))
    return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


def spelled(word: str) -> str:
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in pieces.pre_tokenize_str(word))


@pytest.mark.parametrize("pre", sorted(PUBLISHED))
def test_words_are_cut_as_the_published_pattern_cuts_them(pre):
    built = json.loads(tokenizer_files_from_gguf(gpt2(pre))["tokenizer.json"])
    published = pre_tokenizers.Split(Regex(PUBLISHED[pre]), "isolated")
    rng = random.Random(5)
    pool = " \n\t\r'sSdD.,!?-/_aAzZéß漢か0 1٣½’\u0301ǅ"
    texts = SAMPLES + ["".join(rng.choices(pool, k=rng.randrange(1, 25))) for _ in range(200)]
    for text in texts:
        expected = [spelled(word) for word, _ in published.pre_tokenize_str(text)]
        assert words_of(built, text) == expected, repr(text)


def test_smollm_digits_stand_alone(tmp_path):
    built = json.loads(tokenizer_files_from_gguf(gpt2("smollm"))["tokenizer.json"])
    assert words_of(built, "a 123 b") == ["a", "Ġ", "1", "2", "3", "Ġb"]


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("deepseek-v3", "ab漢字12345, x\n\ny", ["ab", "漢字", "123", "45", ",", " x", "\n\n", "y"]),
        ("deepseek-llm", "ab 漢字123, x\n", ["ab", " ", "漢字", "123", ",", " x", "\n"]),
        ("spark2_5", "ab漢字123 x\n\ny", ["ab", "漢字", "1", "2", "3", " x", "\n", "\n", "y"]),
    ],
)
def test_patterns_in_sequence_cut_what_is_left(pre, text, words):
    built = json.loads(tokenizer_files_from_gguf(gpt2(pre))["tokenizer.json"])
    assert words_of(built, text) == [spelled(word) for word in words]


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_known_way_of_cutting_loses_nothing(pre, tmp_path):
    tokenizer = build(gpt2(pre, add_bos_token=False), tmp_path)
    for text in SAMPLES:
        composed = unicodedata.normalize("NFC", text) if "qwen" in pre else text
        assert tokenizer.decode(tokenizer.encode(text)) == composed


def test_whole_words_skip_merging_where_the_model_says_so(tmp_path):
    for pre, expected in (("llama-bpe", ["Ġxy"]), ("qwen2", ["Ġ", "x", "y"])):
        folder = tmp_path / pre
        folder.mkdir()
        tokenizer = build(gpt2(pre, words=["Ġxy"], add_bos_token=False), folder)
        assert [tokenizer.id_to_token(i) for i in tokenizer.encode(" xy")] == expected


# --- sentence pieces --------------------------------------------------------------------------


def pieces(words, scores, **extra):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(words)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * 259 + list(scores),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{k}": v for k, v in extra.items()},
    }


def merge_by_score(text: str, vocab: dict[str, float]) -> list[str]:
    """SentencePiece as described: join the best-scoring adjacent pair, leftmost first."""
    symbols = list(text)
    while True:
        pairs = [
            (-vocab[symbols[i] + symbols[i + 1]], i)
            for i in range(len(symbols) - 1)
            if symbols[i] + symbols[i + 1] in vocab
        ]
        if not pairs:
            return symbols
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


def closed_vocabulary(rng: random.Random) -> dict[str, float]:
    """Random pieces over three letters, each the join of two others, with distinct scores."""
    words = ["▁", "a", "b", "c"]
    while len(words) < 40:
        joined = rng.choice(words) + rng.choice(words)
        if len(joined) <= 6 and joined not in words:
            words.append(joined)
    scores = [-float(s) for s in rng.sample(range(1000), len(words))]
    return dict(zip(words, scores, strict=True))


def test_merging_follows_the_scores(tmp_path):
    rng = random.Random(7)
    for case in range(5):
        vocab = closed_vocabulary(rng)
        folder = tmp_path / str(case)
        folder.mkdir()
        tokenizer = build(
            pieces(vocab, vocab.values(), add_space_prefix=False, add_bos_token=False), folder
        )
        for _ in range(100):
            text = "".join(rng.choices("abc ", k=rng.randrange(1, 20)))
            got = [tokenizer.id_to_token(i) for i in tokenizer.encode(text)]
            assert got == merge_by_score(text.replace(" ", "▁"), vocab), repr(text)
            assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("longest", [3, 5, 8])
def test_equal_scores_join_from_the_left(tmp_path, longest):
    runs = {"▁" * n: -1e9 for n in range(2, longest + 1)}
    vocab = {"▁": -1.0, "a": -2.0, **runs}
    tokenizer = build(
        pieces(vocab, vocab.values(), add_space_prefix=False, add_bos_token=False), tmp_path
    )
    for n in range(1, 12):
        got = [tokenizer.id_to_token(i) for i in tokenizer.encode(" " * n + "a")]
        assert got == merge_by_score("▁" * n + "a", vocab)


def test_text_that_looks_like_a_byte_token_stays_text(tmp_path):
    words = [*"<0x41>", "<0", "<0x", "<0x4", "<0x41"]
    tokenizer = build(
        pieces(words, [-1.0] * len(words), add_space_prefix=False, add_bos_token=False), tmp_path
    )
    ids = tokenizer.encode("<0x41>")
    assert [tokenizer.id_to_token(i) for i in ids] == ["<0x41", ">"]
    assert tokenizer.decode(ids) == "<0x41>"


def test_the_space_prefix_is_added_and_taken_away_again(tmp_path):
    vocab = {"▁": -3.0, "a": -4.0, "▁a": -1.0}
    tokenizer = build(pieces(vocab, vocab.values()), tmp_path)
    ids = tokenizer.encode("a a")
    assert [tokenizer.id_to_token(i) for i in ids] == ["<s>", "▁a", "▁a"]
    assert tokenizer.decode(ids) == "a a"
    assert tokenizer.encode("a a", add_special=False) == ids[1:]


def test_characters_without_a_piece_fall_back_to_bytes(tmp_path):
    vocab = {"▁": -3.0, "a": -4.0}
    tokenizer = build(pieces(vocab, vocab.values(), add_bos_token=False), tmp_path)
    ids = tokenizer.encode("a漢\n")
    assert [tokenizer.id_to_token(i) for i in ids] == [
        "▁", "a", "<0xE6>", "<0xBC>", "<0xA2>", "<0x0A>",
    ]  # fmt: skip
    assert tokenizer.decode(ids) == "a漢\n"


def test_user_defined_pieces_are_cut_out_first(tmp_path):
    vocab = {"▁": -3.0, "a": -4.0}
    metadata = pieces(vocab, vocab.values(), add_bos_token=False, add_space_prefix=False)
    metadata["tokenizer.ggml.tokens"] += ["\n\n", "   "]
    metadata["tokenizer.ggml.token_type"] += [USER, USER]
    metadata["tokenizer.ggml.scores"] += [-1000.0, -1000.0]
    tokenizer = build(metadata, tmp_path)
    ids = tokenizer.encode("a\n\na    a")
    assert [tokenizer.id_to_token(i) for i in ids] == ["a", "\n\n", "a", "   ", "▁", "a"]
    assert tokenizer.decode(ids) == "a\n\na    a"


def test_gemma4_lists_its_merges_and_always_begins(tmp_path):
    tokens = ["<pad>", "<eos>", "<bos>", *(f"<0x{i:02X}>" for i in range(256))]
    tokens += ["▁", "a", "b", "▁a", "▁ab"]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [BYTE] * 256 + [NORMAL] * 5,
        "tokenizer.ggml.merges": ["▁ a", "▁a b"],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }
    tokenizer = build(metadata, tmp_path)
    ids = tokenizer.encode("ab ab\n")
    assert [tokenizer.id_to_token(i) for i in ids] == ["<bos>", "a", "b", "▁ab", "<0x0A>"]
    assert tokenizer.decode(ids) == "ab ab\n"


# --- the other files, and refusals --------------------------------------------------------------


def test_configuration_and_ends_are_carried_over(tmp_path):
    metadata = gpt2(eot_token_id=3, eom_token_id=3, padding_token_id=0)
    metadata["tokenizer.chat_template"] = "{{ messages[0].content }}"
    metadata["tokenizer.chat_template.tool_use"] = "T"
    files = {k: json.loads(v) for k, v in tokenizer_files_from_gguf(metadata).items()}
    end = metadata["tokenizer.ggml.eos_token_id"]
    assert files["generation_config.json"]["eos_token_id"] == [end, 3]
    config = files["tokenizer_config.json"]
    assert config["eos_token"] == "<|end|>" and config["bos_token"] == "<|start|>"
    assert config["add_bos_token"] is False
    assert [t["name"] for t in config["chat_template"]] == ["default", "tool_use"]
    tokenizer = build(metadata, tmp_path)
    assert tokenizer.eos_ids >= {end, 3}
    assert tokenizer.render([{"role": "user", "content": "x"}]) == "x"


@pytest.mark.parametrize(
    ("pre", "explicit", "begins"),
    [("llama-bpe", None, True), ("tekken", None, True), ("qwen2", None, False),
     ("llama-bpe", False, False), ("qwen2", True, True)],
)  # fmt: skip
def test_begin_tokens_follow_the_file_or_the_model_default(tmp_path, pre, explicit, begins):
    extra = {} if explicit is None else {"add_bos_token": explicit}
    metadata = gpt2(pre, **extra)
    tokenizer = build(metadata, tmp_path)
    bos = metadata["tokenizer.ggml.bos_token_id"]
    assert (tokenizer.encode("a")[0] == bos) is begins


def test_a_file_without_a_vocabulary_makes_no_files():
    assert tokenizer_files_from_gguf({"general.architecture": "llama"}) == {}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"pre": "mystery"}, "tokenizer.ggml.pre is 'mystery'"),
        ({"token_type": [1]}, "token_type has 1 entries"),
        ({"pre": ["qwen2"]}, r"tokenizer.ggml.pre is \"\['qwen2'\]\""),
        ({"eos_token_id": 10_000}, "eos_token_id is 10000"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["a b", "nospace"]}, r"merges\[1\] is 'nospace'"),
    ],
)
def test_vocabularies_that_cannot_be_read_are_refused_by_key(change, match):
    metadata = {**gpt2(), **{f"tokenizer.ggml.{k}": v for k, v in change.items()}}
    metadata = {k: v for k, v in metadata.items() if v is not None}
    with pytest.raises(SourceError, match=match) as caught:
        tokenizer_files_from_gguf(metadata)
    assert "\n" not in str(caught.value)


def test_missing_or_short_scores_are_refused():
    metadata = pieces({"a": 0.0}, [0.0])
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(SourceError, match="scores is missing"):
        tokenizer_files_from_gguf(metadata)
    with pytest.raises(SourceError, match="scores has 2 entries"):
        tokenizer_files_from_gguf({**metadata, "tokenizer.ggml.scores": [0.0, 0.0]})
