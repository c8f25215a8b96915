"""What a flow run shows of itself on the Prefect server, one artifact for each thing."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.context import TaskRunContext

from prefect_cortex_training.labels import RunLabels


class KeptArtifact:
    """One artifact of a flow run, made when it is first shown and updated after that.

    Its id is remembered in a label, so that a run that comes back after a crash goes on with the same artifact.
    """

    def __init__(self, labels: RunLabels, key: str, kind: str) -> None:
        """`key`: its name among all artifacts, lower-case letters, digits and dashes. `kind`: ``progress``, ``table``,
        ``image`` or another of Prefect's types.
        """
        self._labels = labels
        self._key = key
        self._kind = kind
        self._id: UUID | None = None

    async def show(self, data: Any, description: str) -> None:
        """Make or update it; `data` is what Prefect wants for this kind."""
        if self._id is None:
            known = (await self._labels.read()).get(f"artifact.{self._key}")
            self._id = UUID(str(known)) if known is not None else None
        if self._id is None:
            self._id = await self._create(data, description)
            await self._labels.write({f"artifact.{self._key}": str(self._id)})
        else:
            async with get_client() as client:
                await client.update_artifact(self._id, ArtifactUpdate(data=data, description=description))

    async def _create(self, data: Any, description: str) -> UUID:
        task = TaskRunContext.get()
        wanted = ArtifactCreate(
            key=self._key,
            type=self._kind,
            description=description,
            data=data,
            flow_run_id=self._labels.flow_run_id,
            task_run_id=task.task_run.id if task is not None else None,
        )
        async with get_client() as client:
            return (await client.create_artifact(wanted)).id
