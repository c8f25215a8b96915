"""A tokenizer folder: its files, its special tokens, and the hash that tells two of them apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cortex_training.errors import ConfigurationError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class Tokenizer:
    """What `load_tokenizer` read from a folder; `sha256` is `tokenizer_sha256` of that folder."""

    folder: Path
    sha256: str
    special_tokens: dict[str, str]
    """The text of bos_token, eos_token, pad_token and unk_token, of those that the folder defines."""
    chat_template: str | None
    eos_token_id: int
    pad_token_id: int
    """The id of pad_token, or of eos_token where the tokenizer has no padding token."""
    encode: Callable[[str], list[int]]
    """Token ids of a text on its own, with nothing added."""
    encode_opening: Callable[[str], list[int]]
    """Token ids of a text that opens a sequence: with the bos token where this tokenizer adds one."""


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Read ``tokenizer.json`` and the special tokens and chat template beside it.

    Raises ConfigurationError when the folder or ``tokenizer.json`` is missing or unreadable, or when there is no eos
    token.
    """
    folder = Path(folder)
    settings = _settings(folder)
    backend = _backend(folder)
    special = {name: token for name in _SPECIAL_TOKENS if (token := _token_text(settings.get(name)))}
    ids = {name: backend.token_to_id(token) for name, token in special.items()}
    if ids.get("eos_token") is None:
        raise ConfigurationError(
            f"tokenizer: {folder} defines no eos_token that tokenizer.json knows (found {special.get('eos_token')!r}); "
            "completions need one to end with: set eos_token in tokenizer_config.json"
        )
    eos_id = int(ids["eos_token"])
    pad_id = ids.get("pad_token")

    def encode(text: str) -> list[int]:
        return list(backend.encode(text, add_special_tokens=False).ids)

    def encode_opening(text: str) -> list[int]:
        ids = list(backend.encode(text, add_special_tokens=True).ids)
        # Some tokenizers close every text with eos; a prompt that ends so would teach the model to answer after the
        # end.
        return ids[:-1] if len(ids) > 1 and ids[-1] == eos_id and not text.endswith(special["eos_token"]) else ids

    return Tokenizer(
        folder=folder,
        sha256=tokenizer_sha256(folder),
        special_tokens=special,
        chat_template=_chat_template(folder, settings),
        eos_token_id=eos_id,
        pad_token_id=eos_id if pad_id is None else int(pad_id),
        encode=encode,
        encode_opening=encode_opening,
    )


def tokenizer_sha256(folder: str | Path) -> str:
    """SHA-256, in hex, over everything in `folder` that decides which tokens a row becomes.

    That is ``tokenizer.json`` byte for byte, the special tokens and the chat template; a folder copied with other
    files around it keeps its hash.
    """
    folder = Path(folder)
    settings = _settings(folder)
    deciding = {
        "tokenizer.json": hashlib.sha256(_tokenizer_json(folder).read_bytes()).hexdigest(),
        "special_tokens": {name: _token_text(settings.get(name)) for name in _SPECIAL_TOKENS},
        "chat_template": _chat_template(folder, settings),
    }
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


def _tokenizer_json(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigurationError(
            f"tokenizer: {folder} {'has no tokenizer.json' if folder.is_dir() else 'is not a folder'}; pass the folder "
            "that the model's save_pretrained or the tokenizer's save_pretrained wrote"
        )
    return path


def _backend(folder: Path) -> Any:
    path = _tokenizer_json(folder)
    try:
        import tokenizers
    except ImportError:
        raise ConfigurationError(
            "building a dataset needs the tokenizers package: pip install 'cortex-training-client[datasets]'"
        ) from None
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigurationError(f"tokenizer: {path} cannot be read ({error}); save the tokenizer again") from error
    # A saved tokenizer remembers the padding and truncation of its last use; both would change what a row becomes.
    backend.no_padding()
    backend.no_truncation()
    return backend


def _settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json over special_tokens_map.json, the older place of the special tokens."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigurationError(f"tokenizer: {path} is not JSON ({error}); save the tokenizer again") from error
        settings.update({key: value for key, value in read.items() if value is not None})
    return settings


def _token_text(token: Any) -> str | None:
    """A special token is written as its text, or as an object that holds it under `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((item.get("template") for item in template if item.get("name") == "default"), None)
    return template if isinstance(template, str) else None
