"""Checkpoint publication: a save counts when its entry is in the log, and the latest is the greatest (epoch, step)."""

from cortex_training.publication.entries import Entry
from cortex_training.publication.errors import (
    CredentialsError,
    DownloadError,
    LogError,
    PublicationError,
    RootError,
    SaveError,
    StoreError,
)
from cortex_training.publication.export import download_checkpoint
from cortex_training.publication.log import Epoch, PublicationLog
from cortex_training.publication.roots import open_store
from cortex_training.publication.save import SavedFile, SaveManifest
from cortex_training.publication.store import Listing, PosixStore, Store

__all__ = [
    "CredentialsError",
    "DownloadError",
    "Entry",
    "Epoch",
    "Listing",
    "LogError",
    "PosixStore",
    "PublicationError",
    "PublicationLog",
    "RootError",
    "SaveError",
    "SaveManifest",
    "SavedFile",
    "Store",
    "StoreError",
    "download_checkpoint",
    "open_store",
]
