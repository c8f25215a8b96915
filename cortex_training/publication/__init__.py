"""Checkpoint publication: a save counts when its entry is in the log, and the latest is the greatest (epoch, step)."""

from cortex_training.publication.entries import Entry
from cortex_training.publication.errors import (
    CredentialsError,
    DownloadError,
    LogError,
    PublicationError,
    RootError,
    SaveError,
    SaveGone,
    StoreError,
)
from cortex_training.publication.export import download_checkpoint
from cortex_training.publication.frameworks import FRAMEWORKS, Framework
from cortex_training.publication.into_store import export_save
from cortex_training.publication.log import Epoch, PublicationLog
from cortex_training.publication.probe import probe
from cortex_training.publication.prune import prune
from cortex_training.publication.roots import open_store
from cortex_training.publication.save import SavedFile, SaveManifest
from cortex_training.publication.store import Listing, PosixStore, Store
from cortex_training.publication.watch import Watch

__all__ = [
    "FRAMEWORKS",
    "CredentialsError",
    "DownloadError",
    "Entry",
    "Epoch",
    "Framework",
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
    "SaveGone",
    "StoreError",
    "Watch",
    "download_checkpoint",
    "export_save",
    "open_store",
    "probe",
    "prune",
]
