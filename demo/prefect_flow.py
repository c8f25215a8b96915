"""``python -m demo.prefect_flow ORDER RESULT``: make the blocks that the flow reads, run the flow, write its result."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from prefect_snowflake import SnowflakeConnector, SnowflakeCredentials

from prefect_cortex_training import CortexTrainingCredentials


def main(order_file: str, result_file: str) -> None:
    order = json.loads(Path(order_file).read_text())
    snowflake = order["snowflake"]
    account = SnowflakeCredentials(account=snowflake["account"], user=snowflake["user"], password=snowflake["password"])
    SnowflakeConnector(
        credentials=account, database=snowflake["database"], schema=snowflake["schema"], warehouse="ANY"
    ).save("snowflake", overwrite=True)
    cortex = order["cortex"]
    CortexTrainingCredentials(
        host=cortex["host"], database=cortex["database"], schema_=cortex["schema"], pat=sys.stdin.read()
    ).save("cortex-training", overwrite=True)
    from finetune_from_snowflake import finetune_from_snowflake

    result = finetune_from_snowflake(**order["parameters"])
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
