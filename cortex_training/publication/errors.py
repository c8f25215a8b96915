"""What can go wrong with a publication log. Each class is exit status 1 of ``cortex-publish``; usage errors are 2."""

from __future__ import annotations

from cortex_training.errors import ConfigurationError, CortexTrainingError


class PublicationError(CortexTrainingError):
    """Anything about a root, a store, credentials, a save, or the contents of a log."""


class RootError(PublicationError):
    """A root that is not a directory, not a valid ``s3://`` URL, or names another scheme."""


class LogError(PublicationError):
    """The log holds something that is not an entry or an epoch. Never skipped: a skipped name could be the latest."""


class StoreError(PublicationError):
    """The store could not do what was asked: no space, no permission, a refused request."""


class StoreNotInstalled(StoreError, ConfigurationError):
    """The package that such a store needs is not installed here: waiting does not help."""


class SaveError(PublicationError):
    """A save that is missing, outside the root, or whose marker or manifest is broken."""


class SaveGone(SaveError):
    """A save that is not there, or was removed while it was being published."""


class CredentialsError(PublicationError):
    """A credential source that is malformed or wrong, or a list of sources of which none answered."""


class DownloadError(PublicationError):
    """The files of a checkpoint could not be fetched. Names the file, never its link: a link is a secret."""
