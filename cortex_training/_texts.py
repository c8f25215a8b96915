"""Texts to token ids, for readable payloads.

``tokenizer`` is a folder or a model name, or ``{"model_name" | "name" | "path": …, "use_fast", "revision"}``. A folder
with ``tokenizer.json`` needs the tokenizers package only; anything else goes through transformers. Code that comes with
a model is never run.

``padding`` is ``"max_length"`` (the default, needs ``max_length``), ``"longest"`` or true, or false; ``truncation``
(true) cuts to ``max_length``; ``add_special_tokens`` is true; ``batch_size`` takes that many texts, over and over from
the first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cortex_training.errors import ConfigurationError

TEXT_FIELDS = {"texts", "tokenizer", "padding", "max_length", "truncation", "add_special_tokens", "batch_size"}

Ids: TypeAlias = npt.NDArray[np.int64]
_PADDING = {True: "longest", "longest": "longest", "max_length": "max_length", False: None, "do_not_pad": None}


@dataclass(frozen=True, slots=True)
class _Tokenizer:
    name: str
    encode: Callable[[str, bool], list[int]]
    """Token ids of one text; the second argument adds the tokenizer's special tokens."""
    truncated: Callable[[str, bool, int], list[int]]
    """The same, at most so many."""
    pad_id: int | None
    pads_left: bool


def tokenize_texts(fields: Mapping[str, Any]) -> tuple[Ids, Ids]:
    """Token ids and attention mask, both ``[batch, sequence]``, of ``fields["texts"]``.

    Raises ConfigurationError that names the field, its value and the fix.
    """
    texts = _texts(fields)
    max_length = _positive(fields, "max_length")
    padding = _padding(fields)
    if padding == "max_length" and max_length is None:
        raise ConfigurationError.of("max_length", None, "must be a positive integer, or set padding to 'longest'")
    special = _flag(fields, "add_special_tokens")
    tokenizer = _load(fields["tokenizer"])
    if max_length is not None and _flag(fields, "truncation"):
        rows = [tokenizer.truncated(text, special, max_length) for text in texts]
    else:
        rows = [tokenizer.encode(text, special) for text in texts]
    width = max_length if padding == "max_length" and max_length is not None else max(map(len, rows))
    return _padded(rows, width, padding, tokenizer)


def _padded(rows: list[list[int]], width: int, padding: str | None, tokenizer: _Tokenizer) -> tuple[Ids, Ids]:
    for index, row in enumerate(rows):
        if len(row) > width:
            raise ConfigurationError(
                f"texts[{index}] has {len(row)} tokens, more than max_length {width}: raise it or allow truncation",
                field="max_length",
            )
        if len(row) < width and padding is None:
            raise ConfigurationError(
                f"texts[{index}] has {len(row)} tokens and another {width}: set padding to 'longest' or 'max_length'",
                field="padding",
            )
        if len(row) < width and tokenizer.pad_id is None:
            raise ConfigurationError(
                f"tokenizer {tokenizer.name} has neither a padding nor an end token to pad with: give texts of "
                "equal length, or set pad_token in its tokenizer_config.json",
                field="tokenizer",
            )
    ids = np.full((len(rows), width), tokenizer.pad_id or 0, np.int64)
    mask = np.zeros((len(rows), width), np.int64)
    for index, row in enumerate(rows):
        place = slice(width - len(row), width) if tokenizer.pads_left else slice(0, len(row))
        ids[index, place] = row
        mask[index, place] = 1
    return ids, mask


def _load(spec: object) -> _Tokenizer:
    options = {"path": spec} if isinstance(spec, str) else spec
    if not isinstance(options, Mapping):
        raise ConfigurationError.of("tokenizer", spec, "must be a folder, a model name, or an object with one")
    unknown = set(options) - {"model_name", "name", "path", "trust_remote_code", "use_fast", "revision"}
    if unknown:
        raise ConfigurationError.of("tokenizer", spec, f"has unknown field(s) {sorted(map(str, unknown))}")
    if options.get("trust_remote_code"):
        raise ConfigurationError.of("tokenizer.trust_remote_code", True, "code of a model is never run; remove it")
    name = next((options[key] for key in ("model_name", "name", "path") if options.get(key)), None)
    if not isinstance(name, str):
        raise ConfigurationError.of("tokenizer.model_name", name, "is required: a folder or a model name")
    if (Path(name) / "tokenizer.json").is_file():
        return _from_folder(Path(name))
    return _from_transformers(name, options)


def _from_folder(folder: Path) -> _Tokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigurationError(
            "texts need the tokenizers package: pip install 'cortex-training-client[datasets]'", field="tokenizer"
        ) from None
    try:
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        settings = _settings(folder)
    except Exception as error:  # the library raises bare Exception
        raise ConfigurationError.of("tokenizer", str(folder), f"cannot be read: {error}") from error
    backend.no_padding()
    backend.no_truncation()

    def encode(text: str, special: bool) -> list[int]:
        return list(backend.encode(text, add_special_tokens=special).ids)

    def truncated(text: str, special: bool, length: int) -> list[int]:
        # The room for special tokens is the library's to know.
        backend.enable_truncation(length, direction=settings.get("truncation_side") or "right")
        try:
            return encode(text, special)
        finally:
            backend.no_truncation()

    tokens = (_token_text(settings.get(name)) for name in ("pad_token", "eos_token"))
    ids = (backend.token_to_id(token) for token in tokens if token is not None)
    return _Tokenizer(
        name=str(folder),
        encode=encode,
        truncated=truncated,
        pad_id=next((token_id for token_id in ids if token_id is not None), None),
        pads_left=settings.get("padding_side") == "left",
    )


def _settings(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        if path.is_file():
            settings |= json.loads(path.read_text(encoding="utf-8"))
    return settings


def _token_text(token: object) -> str | None:
    """A special token is written as its text, or as an object that holds it under ``content``."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _from_transformers(name: str, options: Mapping[str, Any]) -> _Tokenizer:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigurationError.of(
            "tokenizer", name, "is no folder with a tokenizer.json; other tokenizers need: pip install transformers"
        ) from None
    chosen = {key: options[key] for key in ("use_fast", "revision") if options.get(key) is not None}
    try:
        loaded = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **chosen)
    except (OSError, ValueError) as error:
        raise ConfigurationError.of("tokenizer", name, f"cannot be loaded: {error}") from error
    pad_id = loaded.pad_token_id if loaded.pad_token_id is not None else loaded.eos_token_id
    return _Tokenizer(
        name=name,
        encode=lambda text, special: list(loaded(text, add_special_tokens=special)["input_ids"]),
        truncated=lambda text, special, length: list(
            loaded(text, add_special_tokens=special, truncation=True, max_length=length)["input_ids"]
        ),
        pad_id=pad_id,
        pads_left=loaded.padding_side == "left",
    )


def _texts(fields: Mapping[str, Any]) -> list[str]:
    texts = fields.get("texts")
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ConfigurationError.of("texts", texts, "must be a non-empty list of strings")
    batch_size = _positive(fields, "batch_size")
    return texts if batch_size is None else [texts[index % len(texts)] for index in range(batch_size)]


def _padding(fields: Mapping[str, Any]) -> str | None:
    value = fields.get("padding", "max_length")
    if not isinstance(value, str | bool) or value not in _PADDING:
        raise ConfigurationError.of("padding", value, "must be 'max_length', 'longest' or true, or false")
    return _PADDING[value]


def _positive(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError.of(name, value, "must be a positive integer")
    return value


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, True)
    if not isinstance(value, bool):
        raise ConfigurationError.of(name, value, "must be true or false")
    return value
