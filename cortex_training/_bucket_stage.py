"""An experiment run's files, read from the bucket behind its stage with credentials that Snowflake gives for it.

For machines without the Snowflake connector, and for credentials that it does not take. Only S3 is known. The
credentials are short-lived secrets: they are used here and nowhere shown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cortex_training._network import ca_file, proxy_for
from cortex_training.errors import ConfigurationError, ProtocolError
from cortex_training.settings import ClientSettings


def credentials_query(run_uri: str) -> str:
    """The statement whose only value is the credentials for a run's files."""
    return "SELECT SYSTEM$GET_VSTAGE_WRITE_CREDS('" + run_uri.replace("\\", "\\\\").replace("'", "''") + "')"


class BucketStage:
    """Files below ``s3://<bucket>/<prefix>``, by their path relative to it.

    `granted` is the value of `credentials_query`: JSON with `locationType`, `location`, `region`, perhaps `endPoint`,
    and `creds`. Raises `ProtocolError` for anything else.
    """

    def __init__(self, settings: ClientSettings, run_uri: str, granted: object) -> None:
        stage = _object(granted)
        kind = stage.get("locationType")
        if not isinstance(kind, str) or kind.upper() != "S3":
            raise ProtocolError(
                f"the experiment's files lie in a store of the kind {kind!r}; without the Snowflake connector only S3 "
                "can be read: pip install 'cortex-training-client[snowflake]'"
            )
        location = stage.get("location")
        text = location.removeprefix("s3://").strip("/") if isinstance(location, str) else ""
        self._bucket, _, prefix = text.partition("/")
        if not self._bucket:
            raise ProtocolError("the stage's credentials name no bucket")
        self._prefix = f"{prefix}/" if prefix else ""
        self._run_uri = run_uri
        self._client = _s3_client(settings, stage)

    def uri(self, path: str) -> str:
        return f"{self._run_uri}{path}"

    def s3_uri(self, path: str) -> str | None:
        return f"s3://{self._bucket}/{self._prefix}{path}"

    def files(self, root: str) -> list[str]:
        from botocore.exceptions import BotoCoreError, ClientError

        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=f"{self._prefix}{root}/"
        )
        try:
            keys = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        except (BotoCoreError, ClientError) as error:
            raise ProtocolError(f"s3://{self._bucket}/{self._prefix}{root}/ cannot be listed: {error}") from None
        # A folder may have a key of its own, with nothing in it.
        return [key.removeprefix(self._prefix) for key in keys if not key.endswith("/")]

    def download(self, path: str, folder: Path) -> Path:
        target = folder / "object"
        body = self._client.get_object(Bucket=self._bucket, Key=f"{self._prefix}{path}")["Body"]
        with target.open("wb") as file, body:
            for block in body.iter_chunks(1024 * 1024):
                file.write(block)
        return target

    def close(self) -> None:
        self._client.close()


def _object(granted: object) -> Mapping[str, Any]:
    try:
        value = json.loads(granted) if isinstance(granted, str) else granted
    except ValueError:
        value = None
    if not isinstance(value, Mapping):
        # Not shown: it was to hold credentials.
        raise ProtocolError("the stage's credentials are not a JSON object")
    return value


def _s3_client(settings: ClientSettings, stage: Mapping[str, Any]) -> Any:
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise ConfigurationError(
            "a job's files are read with the Snowflake connector or with boto3, and neither is installed: "
            "pip install 'cortex-training-client[snowflake]' or 'cortex-training-client[s3]'"
        ) from None
    creds = stage.get("creds")
    names = ("AWS_KEY_ID", "AWS_SECRET_KEY", "AWS_TOKEN")
    found = [creds.get(name) for name in names] if isinstance(creds, Mapping) else [None]
    if not all(isinstance(value, str) and value for value in found):
        raise ProtocolError(f"the stage's credentials do not hold {', '.join(names)}")
    endpoint = _endpoint(stage.get("endPoint"))
    proxy = proxy_for(settings, endpoint or "https://s3.amazonaws.com")
    return boto3.session.Session().client(
        "s3",
        aws_access_key_id=found[0],
        aws_secret_access_key=found[1],
        aws_session_token=found[2],
        region_name=stage.get("region") or None,
        endpoint_url=endpoint,
        verify=ca_file(settings) or settings.verify_ssl,
        config=Config(
            proxies={"http": proxy, "https": proxy} if proxy else {},
            connect_timeout=settings.request_timeout[0],
            read_timeout=settings.request_timeout[1],
            retries={"mode": "standard", "max_attempts": 5},
        ),
    )


def _endpoint(value: object) -> str | None:
    if not isinstance(value, str) or not value:
        return None
    return value if "://" in value else f"https://{value}"
