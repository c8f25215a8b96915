"""What was made from what, as Prefect's assets: tables of Snowflake, a dataset, the root of a run, a model's root.

An asset is named by where it is (``snowflake://…``, ``file:///…``, ``s3://…``), so that what other flows say of it
meets it. It is recorded by a small materializing task inside the one that made it, after it was made; what the server
can't take is logged and fails nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from prefect.assets import Asset, AssetProperties, add_asset_metadata, materialize
from prefect.cache_policies import CachePolicy
from prefect.logging import get_run_logger

from prefect_cortex_training.labels import RunLabels

MADE_BY = "cortex-training"


def files_asset(place: str) -> Asset:
    """The asset of a folder, a file or an ``s3://`` prefix."""
    if place.startswith("s3://"):
        return Asset(key="s3://" + quote(place.removeprefix("s3://").rstrip("/")).replace("%", "_"))
    path = Path(place).absolute()
    # Keys allow no blanks and no escapes either.
    return Asset(key="file://" + quote(str(path)).replace("%", "_"), properties=AssetProperties(name=path.name))


def table_asset(account: str, database: str | None, schema: str | None, table: str) -> Asset:
    """The asset of a table of Snowflake; `table` may itself name schema and database. Names without quotes are
    upper-cased, as Snowflake does.
    """
    named = [part.strip('"') if part.startswith('"') else part.upper() for part in table.split(".")]
    around = [name for name in (database, schema)[: max(3 - len(named), 0)] if name]
    key = f"snowflake://{account.lower()}/{'/'.join([*around, *named])}"
    return Asset(key=key, properties=AssetProperties(name=named[-1]))


async def record_made(labels: RunLabels, made: Asset, made_from: Sequence[Asset], facts: dict[str, Any]) -> None:
    """Say that `made` was made from `made_from` just now; `facts` are numbers and ids. Once for equal facts."""
    text = json.dumps([str(labels.flow_run_id), made.key, [a.key for a in made_from], facts], sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()

    @materialize(
        made,
        by=MADE_BY,
        asset_deps=list(made_from),
        name="record asset",
        task_run_name=f"asset {made.key.rpartition('/')[2]}",
        cache_policy=CachePolicy.from_cache_key_fn(lambda _context, _arguments: name),
        persist_result=True,
        result_serializer="json",
        log_prints=False,
    )
    async def say() -> str:
        add_asset_metadata(made, facts)
        return made.key

    try:
        await say()
    except Exception as error:
        get_run_logger().warning("asset %s could not be recorded: %s: %s", made.key, type(error).__name__, error)


async def remember_source(labels: RunLabels, job_id: str, source: Asset) -> None:
    """Note that the job was trained from `source`, for what is published of it later."""
    key = f"asset.{job_id}"
    if (await labels.read()).get(key) != source.key:
        await labels.write({key: source.key})


async def source_of(labels: RunLabels, job_id: str | None) -> list[Asset]:
    """What the flow run trained the job from, if it did."""
    key = (await labels.read()).get(f"asset.{job_id}")
    return [Asset(key=str(key))] if key is not None else []
