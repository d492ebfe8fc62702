"""Tokenizers small enough to write by hand, and the files of a folder that holds one."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_level(specials: tuple[str, ...] = SPECIALS) -> Tokenizer:
    """One token per byte, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(specials))
    return backend


def sentence_piece() -> Tokenizer:
    """<unk>, 256 byte tokens, then a few words with ▁; the decoder strips the first space."""
    vocab = {"<unk>": 0, **{f"<0x{i:02X}>": i + 1 for i in range(256)}}
    for piece in ("▁", "a", "b", "▁a", "▁b", "é", "▁é"):
        vocab[piece] = len(vocab)
    merges = [("▁", "a"), ("▁", "b"), ("▁", "é")]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


def write(
    folder: Path,
    backend: Tokenizer | None = None,
    config: dict | None = None,
    generation: dict | None = None,
    model_config: dict | None = None,
    template: str | None = None,
) -> Path:
    """A folder with the given tokenizer files."""
    (folder / "tokenizer.json").write_text((backend or byte_level()).to_str())
    contents = {
        "tokenizer_config.json": config,
        "generation_config.json": generation,
        "config.json": model_config,
    }
    for name, content in contents.items():
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
