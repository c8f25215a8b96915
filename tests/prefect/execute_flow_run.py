"""Execute one flow run of the flow to copy, in this process, as a runner's child does: ``execute_flow_run.py <id>``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.flow_engine import run_flow

FLOWS = Path(__file__).parents[2] / "flows"


def load_flow() -> Any:
    spec = importlib.util.spec_from_file_location("finetune_from_snowflake", FLOWS / "finetune_from_snowflake.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.finetune_from_snowflake


def execute(flow_run_id: UUID) -> None:
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(flow_run_id)
    run_flow(load_flow(), flow_run=run, parameters=run.parameters)


if __name__ == "__main__":
    execute(UUID(sys.argv[1]))
