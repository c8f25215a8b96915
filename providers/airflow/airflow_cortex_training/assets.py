"""What a pipeline makes, as Airflow assets: a log of publications, and a dataset to train on.

A log's URI is ``cortex-training://file/mnt/finetune/models`` for a folder, ``cortex-training://s3/bucket/prefix`` for a
bucket. Tables that are trained on keep the URI their own provider gives them (``snowflake://...``).

An event is about something that is there: it is added at run time by the task that made it, or by a watcher that found
it, never at the end of a task that merely succeeded. Events may come twice, when a task that published is cleared and
finds the entry there; the entry in their extra tells.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from airflow.sdk import Asset, AssetAlias, AssetWatcher

from cortex_training.errors import ConfigurationError

if TYPE_CHECKING:
    from airflow.providers.common.compat.openlineage.facet import Dataset
    from airflow.sdk import Context

    from cortex_training.publication import Entry, Store

SCHEME = "cortex-training"
_STORES = ("file", "s3")

DEFAULT_POLL_S = 15.0


def publications(root: str, *, name: str | None = None, extra: dict[str, Any] | None = None) -> Asset:
    """The publication log at `root`, an absolute path or ``s3://bucket/prefix``.

    Two assets are the same when name and URI are: give `name` everywhere or nowhere. Raises `ConfigurationError`.
    """
    return create_asset(root=root, name=name, extra=extra)


def watched_publications(
    root: str, *, name: str | None = None, credentials: str | None = None, poll_s: float = DEFAULT_POLL_S
) -> Asset:
    """The publication log at `root`, watched: whatever publishes there, each new entry becomes an event.

    A DAG with ``schedule=watched_publications(...)`` runs for publications of Airflow, of Prefect, of the command line.
    What was published before the first look is not reported. Triggerers must see `root`.

    Args:
        root: as in `publications`. It may not exist yet.
        name: of the asset; default its URI.
        credentials: where those of an ``s3://`` root are found, ``kind:location,...``: ``airflow:CONN_ID``, or a place
            that triggerers see.
        poll_s: seconds between two looks.
    """
    from airflow_cortex_training.triggers.publication_events import CortexTrainingPublicationEventTrigger

    asset = publications(root, name=name)
    given: dict[str, Any] = {"credentials": credentials} if credentials else {}
    trigger = CortexTrainingPublicationEventTrigger(root=root, asset=asset.name, poll_s=poll_s, **given)
    trigger.check()
    asset.watchers = [AssetWatcher(name=f"{SCHEME}-publications", trigger=trigger)]
    return asset


def dataset(manifest: str, extra: dict[str, Any] | None = None) -> Asset:
    """A built dataset, by the absolute path of its ``manifest.json``."""
    return Asset(uri=f"file://{_absolute('manifest', manifest)}", extra=extra)


def announce(outlets: Iterable[Any], context: Context, asset: Asset, extra: Mapping[str, Any]) -> None:
    """Say that `asset` was updated, as far as the task declared it.

    An `AssetAlias` among the outlets gets an event about `asset`: this is how a root that is known at run time only
    becomes an asset. An outlet that is `asset` itself gets `extra` for the event that Airflow makes of it.
    """
    for outlet in outlets:
        if isinstance(outlet, AssetAlias):
            context["outlet_events"][outlet].add(asset, extra=dict(extra))
        elif isinstance(outlet, Asset) and outlet.uri == asset.uri:
            context["outlet_events"][outlet].extra.update(extra)


def about(entry: Entry, store: Store) -> dict[str, Any]:
    """What an event says of a publication: ids and numbers, under a kilobyte."""
    from cortex_training.publication import PublicationError, SaveManifest

    said: dict[str, Any] = {"entry": entry.name, "location": entry.location, "epoch": entry.epoch, "step": entry.step}
    try:
        manifest = SaveManifest.read(store, entry.save)
    except PublicationError:
        # Pruned a moment ago, or published without a manifest: the entry is what happened.
        return said
    return {
        **said,
        "job_id": manifest.job_id,
        "checkpoint_id": manifest.checkpoint_id,
        "checkpoint_type": manifest.checkpoint_type,
    }


# What `get_provider_info` names: how Airflow checks, makes and translates such URIs.


def create_asset(*, root: str, name: str | None = None, extra: dict[str, Any] | None = None) -> Asset:
    if root.startswith("s3://"):
        uri = f"{SCHEME}://s3/{root.removeprefix('s3://').strip('/')}"
    else:
        uri = f"{SCHEME}://file{_absolute('root', root)}"
    named: dict[str, Any] = {"name": name} if name else {}
    return Asset(uri=uri, extra=extra, **named)


def sanitize_uri(uri: SplitResult) -> SplitResult:
    """Raises `ValueError` for what is no ``cortex-training://file/path`` or ``cortex-training://s3/bucket/prefix``."""
    if uri.netloc not in _STORES:
        raise ValueError(
            f"URI {uri.geturl()}: after {SCHEME}:// comes one of {', '.join(_STORES)}, then the path of a log"
        )
    if uri.path.strip("/") == "" or uri.query:
        raise ValueError(f"URI {uri.geturl()}: a publication log has a path, and no query")
    return uri._replace(path=posixpath.normpath("/" + uri.path.strip("/")))


def convert_asset_to_openlineage(asset: Asset, lineage_context: Any) -> Dataset:
    """The storage behind the asset, under the name that every other producer of lineage uses for it."""
    from airflow.providers.common.compat.openlineage.facet import Dataset

    namespace, name = storage_of(asset.uri)
    return Dataset(namespace=namespace, name=name)


def storage_of(uri: str) -> tuple[str, str]:
    """OpenLineage's namespace and name of what an asset of this module is stored in."""
    parts = urlsplit(uri)
    if parts.scheme == SCHEME and parts.netloc == "s3":
        bucket, _, prefix = parts.path.lstrip("/").partition("/")
        return f"s3://{bucket}", prefix or "/"
    return "file", parts.path


def _absolute(what: str, path: str) -> str:
    if not path.startswith("/"):
        raise ConfigurationError.of(what, path, "an asset needs an absolute path, or s3://bucket/prefix")
    return posixpath.normpath("/" + path.strip("/"))
