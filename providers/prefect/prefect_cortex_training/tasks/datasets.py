"""Rows of a Snowflake table become a dataset."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from cortex_training.errors import ConfigurationError
from prefect_cortex_training.durable import task_pair
from prefect_cortex_training.labels import RunLabels
from prefect_cortex_training.lineage import files_asset, record_made, table_asset
from prefect_cortex_training.snowflake import aload_snowflake_connector


async def _build_dataset(
    snowflake: str,
    query: str,
    *,
    out: str,
    tokenizer: str,
    max_seq_len: int,
    seed: int = 0,
    overlong: str = "error",
    connect_options: dict[str, Any] | None = None,
    tables: list[str] | None = None,
) -> dict[str, Any]:
    """Tokenize and pack the rows of a query; returns ``{"manifest", "content_sha256", "rows", "sequences", "tokens"}``.

    Args: snowflake: name of a `SnowflakeConnector` block of prefect-snowflake, which must be installed. query: SELECT
    whose rows have ``prompt`` and ``completion``, or ``messages``, or ``text``. Give it an ORDER BY: rows in another
    order make another dataset. out: folder to write; the folder above it must exist. tokenizer: folder with
    ``tokenizer.json``. max_seq_len: longest packed sequence, in tokens. overlong: what becomes of a longer row:
    ``error``, ``truncate`` or ``skip``. connect_options: further arguments of ``snowflake.connector.connect``, e.g.
    host, port and protocol. Secrets belong in the block. tables: what the query reads, for the lineage: the dataset is
    recorded as an asset made from these tables.

    Rows go from the cursor into shards block by block; none of them passes through Prefect.
    """
    folder = Path(out)
    if not folder.parent.is_dir():
        raise ConfigurationError.of(
            "out", out, f"the folder above it, {folder.parent}, does not exist; create or mount it first"
        )
    # The connector is loaded out here: in a worker thread there is no event loop for a block to be loaded on.
    connector = await aload_snowflake_connector(snowflake)
    manifest = await asyncio.to_thread(
        _build, connector, connect_options or {}, query, folder, tokenizer, max_seq_len, seed, overlong
    )
    if flow_run.id:
        account = connector.credentials.account
        read = [table_asset(account, connector.database, connector.schema_, table) for table in tables or ()]
        facts = {name: getattr(manifest, name) for name in ("content_sha256", "rows", "sequences", "tokens")}
        await record_made(RunLabels(flow_run.id), files_asset(out), read, facts)
    get_run_logger().info(
        "dataset %s: %d rows, %d sequences, %d tokens", folder, manifest.rows, manifest.sequences, manifest.tokens
    )
    return {
        "manifest": str(folder / "manifest.json"),
        "content_sha256": manifest.content_sha256,
        "rows": manifest.rows,
        "sequences": manifest.sequences,
        "tokens": manifest.tokens,
    }


def _build(
    connector: Any,
    connect_options: dict[str, Any],
    query: str,
    folder: Path,
    tokenizer: str,
    max_seq_len: int,
    seed: int,
    overlong: Any,
) -> Any:
    from cortex_training.datasets import build_dataset as build

    with connector.get_connection(**connect_options) as connection, connection.cursor() as cursor:
        cursor.execute(query)
        return build(
            cursor,
            folder,
            tokenizer=tokenizer,
            max_seq_len=max_seq_len,
            seed=seed,
            overlong=overlong,
            source=f"snowflake://{connector.database}/{connector.schema_}",
        )


build_dataset, abuild_dataset = task_pair("build_dataset", retries=2)(_build_dataset)
