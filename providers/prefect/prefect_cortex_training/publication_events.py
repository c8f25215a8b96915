"""An event for each publication, for automations and for whoever looks."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid5

from prefect.events import emit_event

from prefect_cortex_training.labels import root_digest

PUBLISHED = "cortex-training.checkpoint.published"
_NAMESPACE = UUID("3d2f5a64-8d1c-5c1e-a1a7-5b0f6c7b2a90")


def tell_published(
    flow_run_id: UUID, root: str, entry: str, *, job_id: str | None = None, checkpoint_id: str | None = None
) -> None:
    """Say that `entry` is published in `root`. Said again, it is the same event: its id follows from what happened."""
    facts: dict[str, Any] = {"root": root, "entry": entry, "job_id": job_id, "checkpoint_id": checkpoint_id}
    emit_event(
        event=PUBLISHED,
        resource={
            "prefect.resource.id": f"cortex-training.publication.{root_digest(root)}.{entry}",
            "prefect.resource.name": entry,
            "cortex-training.root": root,
        },
        related=[
            {"prefect.resource.id": f"prefect.flow-run.{flow_run_id}", "prefect.resource.role": "flow-run"},
            {"prefect.resource.id": f"cortex-training.root.{root_digest(root)}", "prefect.resource.role": "root"},
        ],
        payload={name: value for name, value in facts.items() if value is not None},
        id=uuid5(_NAMESPACE, f"{flow_run_id}|{root}|{entry}"),
    )
