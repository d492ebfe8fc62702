"""A model's tokenizer: text to ids, ids to text, and the ids that end a turn.

Knows the tokenizer files of an install. Does not know models: ids may exceed the model's rows or
fall short of them, and which ids a model accepts is checked where the model is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

from turbospark.errors import ModelFormatError, OptionError
from turbospark.install.files import TEMPLATES
from turbospark.text.detokenizer import Detokenizer
from turbospark.text.dialects import Dialect, detect
from turbospark.text.template import ChatTemplate


class Tokenizer:
    """Encodes, decodes and renders chats. Build one with `Tokenizer.load`."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any],
        generation: Mapping[str, Any],
        template_file: str | None,
        tools_file: str | None,
        config_eos: int | Iterable[int] | None,
    ) -> None:
        _repair_decoder(backend)
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.dialect: Dialect = detect(backend.token_to_id)
        self.bos_token = _content(config.get("bos_token"))
        self.eos_token = _content(config.get("eos_token"))
        self._prefix, self._suffix = self._surroundings(config.get("add_bos_token"))
        self.end_of_turn_id = self._first(self.dialect.end_of_turn)
        self.tool_stop_id = self._first((self.dialect.tool_stop,))
        self.eos_ids = self._union_of_ends(generation.get("eos_token_id"), config_eos)
        self.stop_ids = {id_: self._reason(id_) for id_ in sorted(self.eos_ids)}
        """End id -> stop reason, as `generation` reports it."""
        self.template = ChatTemplate.find(
            template_file, config.get("chat_template"), self.dialect.name, tools_file
        )

    @classmethod
    def load(
        cls, directory: str | Path, config_eos: int | Iterable[int] | None = None
    ) -> Tokenizer | None:
        """The tokenizer of an install or checkpoint folder; None when it has no tokenizer.json.

        `config_eos` is `eos_token_id` of the model's own configuration; None looks for it in a
        config.json beside the tokenizer. Raises ModelFormatError, naming the file, when one of the
        files is damaged.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            backend = tokenizers.Tokenizer.from_str(path.read_text("utf-8"))
        except Exception as error:  # the Rust side raises nothing more specific
            raise ModelFormatError(f"{path}: not a tokenizer ({error})") from None
        if config_eos is None:
            model = _read_json(directory / "config.json")
            text = model.get("text_config")
            inner = text.get("eos_token_id") if isinstance(text, dict) else None
            config_eos = model.get("eos_token_id", inner)
        return cls(
            backend,
            _read_json(directory / "tokenizer_config.json"),
            _read_json(directory / "generation_config.json"),
            _read_text(directory / "chat_template.jinja"),
            _read_text(directory / TEMPLATES / "tool_use.jinja"),
            config_eos,
        )

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token's spelling and id, added ones too."""
        return self._backend.get_vocab(with_added_tokens=True)

    # --- ids and text ---------------------------------------------------------------------------

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of `text`. `add_special` adds what the model expects around a raw prompt
        (usually a begin-of-text token); a rendered chat carries its own, so pass False there.
        Special tokens spelled out in the text are recognised.
        """
        try:
            ids = self._ids_of(text)
        except ValueError as error:
            raise OptionError(
                f"text {text[:40]!a} cannot be encoded by this tokenizer: {error}"
            ) from None
        return [*self._prefix, *ids, *self._suffix] if add_special else ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`. Ids without a token, such as a padded model's last rows, add nothing."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def detokenizer(self) -> Detokenizer:
        """A fresh stream that turns ids into text one by one."""
        return Detokenizer(self.decode)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; not the model's row count."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def token_to_id(self, token: str) -> int | None:
        """Id of a token by its exact spelling, or None."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def id_to_token(self, id_: int) -> str | None:
        """Spelling of an id, or None when the tokenizer has no such id."""
        found: str | None = self._backend.id_to_token(id_)
        return found

    def to_json(self) -> str:
        """The tokenizer as the text of a tokenizer.json."""
        return str(self._backend.to_str())

    @property
    def special_tokens(self) -> dict[int, str]:
        """Id -> spelling of the tokens that decoding leaves out."""
        added = self._backend.get_added_tokens_decoder()
        return {id_: token.content for id_, token in added.items() if token.special}

    # --- chats ----------------------------------------------------------------------------------

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        reasoning: str = "off",
        add_generation_prompt: bool = True,
        now: date | None = None,
    ) -> str:
        """The prompt text of a chat, in this model's own framing. See `ChatTemplate.render`."""
        return self.template.render(
            messages,
            tools=tools,
            reasoning=reasoning,
            add_generation_prompt=add_generation_prompt,
            bos_token=self.bos_token or "",
            eos_token=self.eos_token or "",
            now=now,
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """Token ids of a rendered chat; arguments as `render`."""
        return self.encode(self.render(messages, **kwargs), add_special=False)

    def _ids_of(self, text: str, special: bool = False) -> list[int]:
        """Ids by the Rust side, whose failures (no unknown token, lone surrogates) have no type."""
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=special).ids
        except Exception as error:
            raise ValueError(" ".join(str(error).split())) from None
        return ids

    # --- construction ---------------------------------------------------------------------------

    def _surroundings(self, add_bos: bool | None) -> tuple[list[int], list[int]]:
        """Ids put before and after a raw prompt; an explicit `add_bos_token` has the last word."""
        try:
            bare, full = self._ids_of("a"), self._ids_of("a", special=True)
        except ValueError as error:
            raise ModelFormatError(f"tokenizer.json cannot encode the letter a: {error}") from None
        cut = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        prefix, suffix = full[:cut], full[cut + len(bare) :]
        bos = self.token_to_id(self.bos_token) if self.bos_token else None
        if bos is not None and add_bos is True and bos not in prefix:
            prefix = [bos, *prefix]
        if bos is not None and add_bos is False:
            prefix = [id_ for id_ in prefix if id_ != bos]
        return prefix, suffix

    def _first(self, tokens: Iterable[str | None]) -> int | None:
        ids = (self.token_to_id(token) for token in tokens if token)
        return next((id_ for id_ in ids if id_ is not None), None)

    def _reason(self, id_: int) -> str:
        if id_ == self.end_of_turn_id:
            return "end_of_turn"
        return "tool_calls" if id_ == self.tool_stop_id else "eos"

    def _union_of_ends(
        self, generation_eos: int | Iterable[int] | None, config_eos: int | Iterable[int] | None
    ) -> frozenset[int]:
        """Every id that ends generation: no source replaces another."""
        dialect = self.dialect
        tokens = (self.eos_token, *dialect.end_of_turn, dialect.tool_stop, *dialect.stops)
        named = (self.token_to_id(token) for token in tokens if token)
        return frozenset(
            {id_ for id_ in named if id_ is not None}
            | _ids(generation_eos, "generation_config.json")
            | _ids(config_eos, "config.json")
        )


def load_with_stops(
    directory: Path, config_eos: int | Iterable[int] | None
) -> tuple[Tokenizer | None, Mapping[int, str]]:
    """The tokenizer of an install, if it has one, and end id -> stop reason.

    Raises ModelFormatError for a damaged file.
    """
    tokenizer = Tokenizer.load(directory, config_eos=config_eos)
    if tokenizer is not None:
        return tokenizer, tokenizer.stop_ids
    return None, _declared_stops(directory, config_eos)


def _declared_stops(
    directory: str | Path, config_eos: int | Iterable[int] | None
) -> dict[int, str]:
    """End id -> stop reason of an install without a tokenizer: what its configuration
    (`config_eos`) and its generation_config.json name.
    """
    generation = _read_json(Path(directory) / "generation_config.json").get("eos_token_id")
    ids = _ids(generation, "generation_config.json") | _ids(config_eos, "config.json")
    return dict.fromkeys(sorted(ids), "eos")


def _ids(value: Any, file: str) -> set[int]:
    """`eos_token_id` of a file: an id, a list of them, or null."""
    ids = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    if not all(type(id_) is int for id_ in ids):
        raise ModelFormatError(
            f"{file}: eos_token_id = {value!r:.80}; expected an integer or a list of integers"
        )
    return set(ids)


def _content(token: Any) -> str | None:
    """A token of tokenizer_config.json: a string, or an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_text(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        return path.read_text("utf-8")
    except ValueError as error:
        raise ModelFormatError(f"{path}: not UTF-8 ({error})") from None


def _read_json(path: Path) -> dict[str, Any]:
    text = _read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ModelFormatError(f"{path}: expected an object, found {type(value).__name__}")
    return value


def _kinds(part: Any) -> set[str]:
    """Type names in a tokenizer component, nested ones included."""
    if part is None:
        return set()
    found: set[str] = set()
    todo: list[Any] = [json.loads(part.__getstate__())]
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            if isinstance(node.get("type"), str):
                found.add(node["type"])
            todo.extend(node.values())
        elif isinstance(node, list):
            todo.extend(node)
    return found


def _repair_decoder(backend: tokenizers.Tokenizer) -> None:
    """Give the tokenizer the decoder that its own vocabulary needs.

    Some published files pair a byte-level vocabulary with a SentencePiece decoder ("Hello!ĠHow"),
    or the other way round. What splits the text on the way in says how the pieces are spelled.
    """
    splitters, decoder = _kinds(backend.pre_tokenizer), _kinds(backend.decoder)
    if "ByteLevel" in splitters:
        if "ByteLevel" not in decoder:
            backend.decoder = decoders.ByteLevel()
        return
    metaspace = "Metaspace" in splitters or "Prepend" in _kinds(backend.normalizer)
    if metaspace and not decoder & {"Metaspace", "Replace"}:
        spelled = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*spelled, decoders.Strip(" ", 1, 0)])
