"""Publication roots as tasks and triggers open them: a directory, or a bucket whose credentials Airflow may hold.

To the sources of credentials that the library knows (``secret:``, ``file:``, ``vault:``) comes one:
``airflow:CONN_ID``, a connection of type ``aws`` or of any type with an access key as login and a secret key as
password.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowNotFoundException
from airflow.sdk.log import mask_secret

from cortex_training.errors import ConfigurationError
from cortex_training.publication.credentials import NoAnswer, add_kind

if TYPE_CHECKING:
    from cortex_training.publication import PublicationLog, Store

AIRFLOW_KIND = "airflow"


def open_root(root: str, credentials: str | None = None) -> Store:
    """The store behind `root`. Blocks; in the triggerer call it in a thread.

    `credentials` is a list ``kind:location,…``, needed for ``s3://`` and refused elsewhere. Raises
    `ConfigurationError`, and `cortex_training.publication.PublicationError` when the root or a source is unusable.
    """
    from cortex_training.publication import open_store

    if not isinstance(root, str) or not root.strip():
        raise ConfigurationError.of("root", root, "give a directory or s3://BUCKET/PREFIX")
    return open_store(root.strip(), credentials)


def open_log(root: str, credentials: str | None = None) -> PublicationLog:
    """The publication log of `root`. Raises as `open_root` does."""
    from cortex_training.publication import PublicationLog

    return PublicationLog(open_root(root, credentials))


@dataclass(frozen=True)
class AirflowConnection:
    """``airflow:CONN_ID``: credentials of a store in an Airflow connection. It is read again when they are refused."""

    conn_id: str

    @property
    def name(self) -> str:
        return f"{AIRFLOW_KIND}:{self.conn_id}"

    def fields(self) -> Mapping[str, str]:
        try:
            connection = BaseHook.get_connection(self.conn_id)
        except AirflowNotFoundException:
            raise NoAnswer(f"there is no connection {self.conn_id!r}") from None
        extra = connection.extra_dejson
        found = {
            "access_key_id": connection.login or extra.get("aws_access_key_id"),
            "secret_access_key": connection.password or extra.get("aws_secret_access_key"),
            "session_token": extra.get("aws_session_token"),
            "endpoint": _endpoint(extra),
            "region": extra.get("region_name"),
        }
        for secret in ("secret_access_key", "session_token"):
            if found[secret]:
                mask_secret(found[secret])
        return {name: str(value) for name, value in found.items() if value}


# Here, so that a training plan may name a connection too, wherever an operator or a trigger of this package runs.
add_kind(AIRFLOW_KIND, AirflowConnection)


def _endpoint(extra: Mapping[str, Any]) -> Any:
    """A bucket's own endpoint, wherever the AWS connection form lets one put it."""
    service = extra.get("service_config")
    s3 = service.get("s3") if isinstance(service, Mapping) else None
    own = s3.get("endpoint_url") if isinstance(s3, Mapping) else None
    return own or extra.get("endpoint_url") or extra.get("host")
