"""Cancel the jobs of flow runs that ended without cleaning up, by an automation instead of a watcher.

    python cancel_jobs_of_ended_runs.py [end ...]

serves a small flow, and creates an automation on the Prefect server that runs it for each flow run with the tag
`cortex-training` that is cancelled, fails or crashes (or only for the ends that are named). Of a run that was suspended
no hook is ever called; the server sees its end all the same. Give the tag to your deployments: the server's events name
the tags that a flow run began with.

A flow run that failed may be retried, and would go on with the job that is there: leave `Failed` and `Crashed` out if
that is what you want, and let the jobs' idle timeout be their end.
"""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta
from uuid import UUID

from prefect import flow
from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.events import EventTrigger, Posture
from prefect.events.actions import RunDeployment
from prefect.runner import Runner

from prefect_cortex_training import cancel_jobs_of_flow_run

ENDS = ("Cancelled", "Failed", "Crashed")
NAME = "cancel-jobs-of-ended-runs"
TAG = "cortex-training"


@flow(name=NAME)
def cancel_jobs_of_ended_run(flow_run_id: str) -> None:
    """Cancel what the labels of a flow run name."""
    cancel_jobs_of_flow_run(flow_run_id)


def automation(deployment_id: UUID, ends: list[str]) -> Automation:
    """What the server does at the end of a tagged flow run."""
    return Automation(
        name=NAME,
        description="Flow runs that were suspended, or whose runner died, can't cancel their jobs themselves.",
        trigger=EventTrigger(
            expect={f"prefect.flow-run.{end}" for end in ends},
            match_related={"prefect.resource.role": "tag", "prefect.resource.id": f"prefect.tag.{TAG}"},
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[
            RunDeployment(
                source="selected",
                deployment_id=deployment_id,
                parameters={
                    "flow_run_id": {
                        "__prefect_kind": "jinja",
                        "template": "{{ event.resource.id.split('.')[-1] }}",
                    }
                },
            )
        ],
    )


async def main(ends: list[str]) -> None:
    runner = Runner(name=NAME)
    deployment_id = await runner.aadd_flow(cancel_jobs_of_ended_run, name="automation")
    async with get_client() as client:
        for earlier in await client.read_automations_by_name(NAME):
            await client.delete_automation(earlier.id)
    await automation(deployment_id, ends).acreate()
    await runner.start()


if __name__ == "__main__":
    unknown = sorted(set(sys.argv[1:]) - set(ENDS))
    if unknown:
        sys.exit(f"cancel_jobs_of_ended_runs.py: {unknown[0]!r} is no end of a flow run; use {', '.join(ENDS)}")
    asyncio.run(main(sys.argv[1:] or list(ENDS)))
