"""Models that some other program has downloaded from the Hugging Face hub. Nothing here uses the network."""

from __future__ import annotations

import os
import re
from pathlib import Path

_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?", re.ASCII)


def cached_model(model_id: str) -> Path | None:
    """The folder of a downloaded model, at the revision that ``main`` was when it was downloaded.

    None unless its configuration and its safetensors weights are there: a download that was broken off, weights that
    are pickle, or a name that is no id.
    """
    if not _ID.fullmatch(model_id) or ".." in model_id:
        return None
    repository = _cache() / f"models--{model_id.replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text().strip()
    except OSError:
        return None
    if not re.fullmatch(r"[0-9a-f]{40}", revision):
        return None
    folder = repository / "snapshots" / revision
    # Entries are links to blobs, and a link whose blob is missing is no file.
    weights = [path for path in folder.glob("*.safetensors") if path.is_file()]
    return folder if weights and (folder / "config.json").is_file() else None


def _cache() -> Path:
    """Where huggingface_hub keeps what it downloads, by the same variables."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if named:
        return Path(named).expanduser()
    home = os.environ.get("HF_HOME")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home or Path(base) / "huggingface").expanduser() / "hub"
