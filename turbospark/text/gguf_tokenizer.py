"""Tokenizer files for a model that came as GGUF: its `tokenizer.*` metadata, spelled anew.

Knows how GGUF names vocabularies and how tokenizer.json describes them. Does not know tensors,
GGUF's container or files: metadata comes in as plain Python values, files go out as bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from turbospark.errors import SourceError

# Token types of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

# --- how byte-level models cut text into words before merging -------------------------------------
# GGUF names the cutting in tokenizer.ggml.pre; the patterns are the models' own, from their
# tokenizer.json. Each pattern of a list cuts the pieces that the one before it left.

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PLAIN_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(digits: str, letters: str = r"\p{L}", rest: str = r"\p{L}\p{N}") -> str:
    """The llama 3 / Qwen shape: contractions, words, digits, punctuation, white space."""
    return (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}"
        rf"| ?[^\s{rest}]+[\r\n]*|{_SPACES}"
    )


def _cased_words(digits: str, contraction: str) -> str:
    """The o200k / Tekken shape: words also break where lower case turns to upper."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{upper}*{lower}+{contraction}|{lead}{upper}+{lower}*{contraction}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_SYMBOL_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
# Cased letters as DeepSeek's first tokenizers list them. In hexadecimal, because several have
# look-alikes that editors and normalisation quietly replace them with.
_CASED = """
    41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386
    388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA
    1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59
    1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC
    1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139
    213C-213F 2145-2149 214E 2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 A640-A66D A680-A69B
    A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F
    104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943
"""
_HAN_KANA = "4E00-9FA5 3040-309F 30A0-30FF"
_IDEOGRAPHS = "4E00-9FA5 800-4E00 AC00-D7FF"
_PUNCTUATION = "21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002"


def _characters(ranges: str) -> str:
    """A character class from hexadecimal code points and ranges of them."""
    escaped = re.sub(r"([0-9A-F]+)", r"\\x{\1}", ranges)
    return f"[{''.join(escaped.split())}]"


_PLAIN = (_PLAIN_WORDS,)
_DIGITS_THEN_PLAIN = (r"\p{N}", _PLAIN_WORDS)
_LLAMA3 = (_words(r"\p{N}{1,3}"),)
_QWEN2 = (_words(r"\p{N}"),)
_QWEN35 = (_words(r"\p{N}", r"\p{L}\p{M}", r"\p{L}\p{M}\p{N}"),)
_O200K = (_cased_words(r"\p{N}{1,3}", f"{_CONTRACTION}?"),)
_TEKKEN = (_cased_words(r"\p{N}", ""),)
_DEEPSEEK3 = (r"\p{N}{1,3}", f"{_characters(_HAN_KANA)}+", rf"{_SYMBOL_WORDS}[\r\n]*|{_SPACES}")
_SPARK = (
    r"\p{N}{1,3}",
    f"{_characters(_HAN_KANA)}+",
    rf"{_SYMBOL_WORDS}|[\r\n]|\s+(?!\S)|\s+",
    r"\p{N}",
)
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?{_characters(_CASED)}+",
    rf"\s?{_characters(_PUNCTUATION)}+",
    r"\s+$",
    f"{_characters(_IDEOGRAPHS)}+",
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", f"{_characters(_IDEOGRAPHS)}+", r"\p{N}")

PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "default": _PLAIN,
    "gpt-2": _PLAIN,
    "smollm": _DIGITS_THEN_PLAIN,
    "starcoder": _DIGITS_THEN_PLAIN,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "tekken": _TEKKEN,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": _QWEN35,
    "gpt-4o": _O200K,
    "llama4": _O200K,
    "minimax-m2": _O200K,
    "deepseek-llm": _DEEPSEEK,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK3,
    "spark2_5": _SPARK,
}
# A word that is a token is taken whole, before any merging.
_WHOLE_WORDS = (_LLAMA3, _O200K, _TEKKEN)
_COMPOSED = (_QWEN2, _QWEN35)  # their own files normalise to NFC first
_BOS_BY_DEFAULT = frozenset({"llama3", "llama-v3", "llama-bpe", "tekken"})

MODELS = ("gpt2", "llama", "gemma4")


def tokenizer_files_from_gguf(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json and generation_config.json of a GGUF file.

    `metadata`: key -> str, int, float, bool or list of those. Without `tokenizer.ggml.tokens` the
    result is empty. Raises SourceError, naming the key, for a vocabulary of an unknown kind and for
    lists that contradict each other.
    """
    if "tokenizer.ggml.tokens" not in metadata:
        return {}
    vocabulary = _Vocabulary(metadata)
    files = {
        "tokenizer.json": vocabulary.tokenizer(),
        "tokenizer_config.json": vocabulary.config(),
        "generation_config.json": vocabulary.generation(),
    }
    return {
        name: json.dumps(content, ensure_ascii=False).encode() for name, content in files.items()
    }


class _Vocabulary:
    """The `tokenizer.*` metadata, checked, and the three files made from it."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.model = str(self._get("model", ""))
        if self.model not in MODELS:
            raise SourceError(
                f"tokenizer.ggml.model is {self.model!r}; readable are {', '.join(MODELS)}"
            )
        self.pre = str(self._get("pre", "default"))
        if self.model == "gpt2" and self.pre not in PRE_TOKENIZERS:
            raise SourceError(
                f"tokenizer.ggml.pre is {self.pre!r}, an unknown way of cutting text into words; "
                f"known are {', '.join(sorted(PRE_TOKENIZERS))}"
            )
        self.tokens: Sequence[str] = self._get("tokens", ())
        self.types: Sequence[int] = self._get("token_type", [_NORMAL] * len(self.tokens))
        self._check_length("token_type", self.types)
        self.special = {
            name: self._special(name) for name in ("bos", "eos", "unknown", "padding", "eot", "eom")
        }

    def _get(self, name: str, default: Any) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}", default)

    def _check_length(self, name: str, values: Sequence[Any]) -> None:
        if len(values) != len(self.tokens):
            raise SourceError(
                f"tokenizer.ggml.{name} has {len(values)} entries, but tokenizer.ggml.tokens has "
                f"{len(self.tokens)}"
            )

    def _special(self, name: str) -> int | None:
        id_ = self._get(f"{name}_token_id", None)
        if id_ is None or id_ == 0xFFFFFFFF:  # GGUF's "none"
            return None
        if type(id_) is not int or not 0 <= id_ < len(self.tokens):
            raise SourceError(
                f"tokenizer.ggml.{name}_token_id is {id_!r}; expected a row of the "
                f"{len(self.tokens)} tokens"
            )
        return id_

    # --- tokenizer.json ---------------------------------------------------------------------------

    def tokenizer(self) -> dict[str, Any]:
        parts = self._byte_level() if self.model == "gpt2" else self._sentence_piece()
        model = {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": self._ids(),
            **parts.pop("model"),
        }
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added(),
            "normalizer": None,
            "pre_tokenizer": None,
            "post_processor": self._surroundings(),
            **parts,
            "model": model,
        }

    def _byte_level(self) -> dict[str, Any]:
        patterns = PRE_TOKENIZERS[self.pre]
        bytes_only = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        }
        cuts = [
            {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
            for p in patterns
        ]
        return {
            "normalizer": {"type": "NFC"} if patterns in _COMPOSED else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, bytes_only]},
            "decoder": bytes_only,
            "model": {"merges": self._listed_merges(), "ignore_merges": patterns in _WHOLE_WORDS},
        }

    def _sentence_piece(self) -> dict[str, Any]:
        """Text with ▁ for spaces, merged as a whole; what has no token falls back to bytes."""
        unknown = self.special["unknown"]
        prefixed = self.model == "llama" and bool(self._get("add_space_prefix", True))
        underscore = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        before = [{"type": "Prepend", "prepend": "▁"}] if prefixed else []
        space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
        after = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*before, underscore]},
            "decoder": {
                "type": "Sequence",
                "decoders": [space, {"type": "ByteFallback"}, {"type": "Fuse"}, *after],
            },
            "model": {
                "unk_token": None if unknown is None else self.tokens[unknown],
                "fuse_unk": True,
                "byte_fallback": _BYTE in self.types,
                "merges": self._scored_merges() if self.model == "llama" else self._listed_merges(),
            },
        }

    def _ids(self) -> dict[str, int]:
        """Token -> id. Rows that only pad the table have no token; of two equal ones the first."""
        ids: dict[str, int] = {}
        for id_, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind != _UNUSED:
                ids.setdefault(token, id_)
        return ids

    def _listed_merges(self) -> list[list[str]]:
        merges = self._get("merges", None)
        if merges is None:
            raise SourceError(f"tokenizer.ggml.merges is missing; model {self.model!r} needs it")
        # From index 1: a token may itself begin with a space, but never holds one further on.
        pairs = [(merge, merge.find(" ", 1)) for merge in map(str, merges)]
        for index, (merge, cut) in enumerate(pairs):
            if cut < 0:
                raise SourceError(
                    f"tokenizer.ggml.merges[{index}] is {merge!r}, not two pieces and a space"
                )
        return [[merge[:cut], merge[cut + 1 :]] for merge, cut in pairs]

    def _scored_merges(self) -> list[list[str]]:
        """Merges of a SentencePiece vocabulary: every split of every token, best score first.

        SentencePiece always joins the pair whose result scores highest; ranking the pairs by that
        score makes a list-driven merger take the same steps.
        """
        scores = self._get("scores", None)
        if scores is None:
            raise SourceError("tokenizer.ggml.scores is missing; model 'llama' needs it")
        self._check_length("scores", scores)
        mergeable = {token: id_ for token, id_ in self._ids().items() if self.types[id_] == _NORMAL}
        pairs = [
            (-scores[id_], -cut, cut - len(token), token[:cut], token[cut:])
            for token, id_ in mergeable.items()
            for cut in range(1, len(token))
            if token[:cut] in mergeable and token[cut:] in mergeable
        ]
        # Of equal scores SentencePiece joins the leftmost pair, so that runs grow from the left:
        # longer left parts go first.
        pairs.sort(key=lambda pair: pair[:3])
        return [[left, right] for *_, left, right in pairs]

    def _added(self) -> list[dict[str, Any]]:
        """Tokens found in text before anything is cut: control tokens and user-defined pieces."""
        kinds = {_CONTROL: True, _UNKNOWN: True, _USER: False}
        special = {id_: kinds[kind] for id_, kind in enumerate(self.types) if kind in kinds}
        special.update({id_: True for id_ in self.special.values() if id_ is not None})
        return [
            {
                "id": id_,
                "content": self.tokens[id_],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": special[id_],
            }
            for id_ in sorted(special)
        ]

    def _surroundings(self) -> dict[str, Any] | None:
        before = [self.special["bos"]] if self._adds_bos() else []
        after = [self.special["eos"]] if self._get("add_eos_token", False) else []
        ids = [id_ for id_ in (*before, *after) if id_ is not None]
        if not ids:
            return None
        tokens = {self.tokens[id_]: id_ for id_ in ids}

        def pieces(ids: Sequence[int | None], type_id: int) -> list[dict[str, Any]]:
            return [
                {"SpecialToken": {"id": self.tokens[id_], "type_id": type_id}}
                for id_ in ids
                if id_ is not None
            ]

        def text(name: str, type_id: int) -> list[dict[str, Any]]:
            body = {"Sequence": {"id": name, "type_id": type_id}}
            return [*pieces(before, type_id), body, *pieces(after, type_id)]

        return {
            "type": "TemplateProcessing",
            "single": text("A", 0),
            "pair": [*text("A", 0), *text("B", 1)],
            "special_tokens": {
                token: {"id": token, "ids": [id_], "tokens": [token]}
                for token, id_ in tokens.items()
            },
        }

    def _adds_bos(self) -> bool:
        if self.model == "gemma4":  # early files say no, and the model does not work without it
            return True
        default = self.model != "gpt2" or self.pre in _BOS_BY_DEFAULT
        return bool(self._get("add_bos_token", default))

    # --- the other two files ----------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
        config: dict[str, Any] = {
            f"{key}_token": self.tokens[id_]
            for name, key in names.items()
            if (id_ := self.special[name]) is not None
        }
        config["add_bos_token"] = self._adds_bos()
        config["add_eos_token"] = bool(self._get("add_eos_token", False))
        config["clean_up_tokenization_spaces"] = False
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        template = self._chat_template()
        if template is not None:
            config["chat_template"] = template
        return config

    def _chat_template(self) -> str | list[dict[str, str]] | None:
        """One template, or all of them by name when the file carries named ones too."""
        prefix = "tokenizer.chat_template."
        named = {
            key.removeprefix(prefix): text
            for key, text in self._metadata.items()
            if key.startswith(prefix)
        }
        default: str | None = self._metadata.get("tokenizer.chat_template")
        if not named:
            return default
        if default is not None:
            named = {"default": default, **named}
        return [{"name": name, "template": text} for name, text in named.items()]

    def generation(self) -> dict[str, Any]:
        ends = [self.special[name] for name in ("eos", "eot", "eom")]
        config: dict[str, Any] = {
            "eos_token_id": list(dict.fromkeys(id_ for id_ in ends if id_ is not None))
        }
        if self.special["bos"] is not None:
            config["bos_token_id"] = self.special["bos"]
        if self.special["padding"] is not None:
            config["pad_token_id"] = self.special["padding"]
        return config
