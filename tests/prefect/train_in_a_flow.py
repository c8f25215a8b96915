"""Train as a plan says, in a flow run of this process: ``train_in_a_flow.py <plan.json>``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from prefect import flow

from prefect_cortex_training import train


@flow(result_serializer="json")
def trains(plan: dict[str, Any]) -> dict[str, Any]:
    return train("cortex", plan)


if __name__ == "__main__":
    print(json.dumps(trains(json.loads(Path(sys.argv[1]).read_text()))), flush=True)
