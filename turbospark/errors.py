"""Every error a user can meet. Knows words only; imports nothing of the house.

One line each: what was asked, what was found, where, and what would work.
"""

from __future__ import annotations


class TurbosparkError(ValueError):
    """Base of all errors raised on purpose by turbospark."""


# --- options and requests -------------------------------------------------------------------------


class OptionError(TurbosparkError):
    """An option has a value that cannot be honoured."""


class UnsupportedError(TurbosparkError):
    """Something meaningful was asked that this build, family or back end does not do."""


class UnsupportedArchitectureError(UnsupportedError):
    """The checkpoint's architecture is not one of the families."""


class MissingDependencyError(TurbosparkError):
    """An optional package is needed; the message names the extra that brings it."""


class EmptyPromptError(TurbosparkError):
    """A prompt without tokens."""


class ContextOverflowError(TurbosparkError):
    """prompt + max_new_tokens does not fit max_context; carries the three numbers."""

    def __init__(self, prompt_tokens: int, max_new_tokens: int, max_context: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.max_new_tokens = max_new_tokens
        self.max_context = max_context
        super().__init__(
            f"{prompt_tokens} tokens + {max_new_tokens} new tokens = "
            f"{prompt_tokens + max_new_tokens} exceeds max_context {max_context}; "
            "shorten the prompt, lower max_new_tokens or open with a larger max_context"
        )

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.prompt_tokens, self.max_new_tokens, self.max_context)


class TokenIdError(TurbosparkError):
    """A token id outside the model's vocabulary."""


class TokenizerMissingError(TurbosparkError):
    """A text call on an install that carries no tokenizer."""


class NonFiniteLogitsError(TurbosparkError):
    """The model produced NaN or infinite logits."""


class NonFiniteScoresError(TurbosparkError):
    """An indexer's block scores have a NaN, so that no block is the best."""


class RunnerBusyError(TurbosparkError):
    """A second generation was started where it cannot be serialised."""


class SessionBrokenError(TurbosparkError):
    """A pass failed half-way; the cache it left cannot be continued."""


class SessionFileError(TurbosparkError):
    """A saved session that cannot be written, or does not belong here, or is damaged."""


class SteeringFileError(TurbosparkError):
    """A control-vector file that cannot be read or written, or is not one."""


class RunnerClosedError(TurbosparkError):
    """A call on a closed runner."""


class SpeculationUnavailableError(TurbosparkError):
    """Speculation was asked for and cannot run; the message says why."""


# --- sources of a conversion ----------------------------------------------------------------------


class SourceError(TurbosparkError):
    """A checkpoint that cannot be converted: damaged, incomplete, or holding unknown tensors."""


class InstallExistsError(TurbosparkError):
    """The destination of a conversion already exists."""


# --- installs -------------------------------------------------------------------------------------


class ModelFormatError(TurbosparkError):
    """A .gturbo directory that cannot be opened."""


class ModelNotFoundError(ModelFormatError):
    """No directory at that path, and no installed model of that name."""


class PartialInstallError(ModelFormatError):
    """No manifest.json: the install was never completed."""


class NotAGTurboDirectoryError(ModelFormatError):
    """manifest.json does not carry the GTURBO magic."""


class UnsupportedVersionError(ModelFormatError):
    """A manifest version other than 1.x."""


class UnknownFlagError(ModelFormatError):
    """manifest.flags has a key this reader does not know."""


class UnsupportedCapabilityError(ModelFormatError):
    """An install of another product (for example image generation)."""


class ArchMismatchError(ModelFormatError):
    """One field of the manifest's architecture differs from what was expected."""

    def __init__(self, field: str, expected: object, actual: object) -> None:
        self.field = field
        self.expected = expected
        self.actual = actual
        super().__init__(f"manifest.arch.{field} = {_debug(actual)}; expected {_debug(expected)}")

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.field, self.expected, self.actual)


class ExpertStrideError(ModelFormatError):
    """An expert record stride that is not a multiple of the page size."""


class MissingFileError(ModelFormatError):
    """A file that the manifest requires is not there."""


class FileSizeError(ModelFormatError):
    """A file is shorter or longer than declared (truncated or changed)."""


class ChecksumMismatchError(ModelFormatError):
    """A file's SHA-256 differs from the manifest's."""


class ReceiptInvalidError(ModelFormatError):
    """verified-install.json does not vouch for this install."""


class IndexCorruptError(ModelFormatError):
    """The resident index, a layout or other metadata contradicts itself."""


class MissingTensorError(ModelFormatError):
    """A tensor that the family needs is not in the install."""


class TensorShapeError(ModelFormatError):
    """A tensor's shape or byte size is not what the configuration implies."""


class ReadError(ModelFormatError):
    """Reading an install failed (I/O error, short read, file removed while running)."""


def _debug(value: object) -> str:
    """As the original prints it: strings quoted, floats with a decimal, lists bracketed."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_debug(v) for v in value) + "]"
    return repr(value)
