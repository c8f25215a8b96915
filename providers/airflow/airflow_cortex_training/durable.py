"""What a task instance must still know after its process died: one small record in Airflow's task state store.

XComs are deleted when a try begins and attributes die with the worker, so neither can tell a retry what the try
before it sent. The record does. It is written *before* the call it speaks of, and it carries the *generation* of the
task instance: an automatic retry has the generation of the record and goes on with its ids; a cleared task has
another one and must not.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowFailException

if TYPE_CHECKING:
    from airflow.sdk import Context

RECORD_KEY = "cortex_training"
RECORD_VERSION = 1
TOKEN_KEY = "cortex_training_token"
"""XCom that tells a trigger's ``on_kill`` which remote thing, of which generation, belongs to the task now."""

MAX_RECORD_BYTES = 4096


class DurableRecord:
    """The record of the running task instance.

    `current` is the record as the present generation wrote it, or None. `superseded` is what an earlier generation
    left: the user cleared the task since, so its ids must be settled, never adopted.
    """

    def __init__(self, context: Context) -> None:
        self.task_instance = context["ti"]
        store = context.get("task_state_store")
        if store is None:
            raise AirflowFailException(
                f"task {self.task_instance.task_id}: this Airflow gives tasks no state store, so a retry could not "
                "know what the try before it sent. The Cortex Training provider needs Airflow 3.3 or newer."
            )
        self._store = store
        self.generation = generation(context)
        self.current: dict[str, Any] | None = None
        self.superseded: dict[str, Any] | None = None
        self._load()

    def _load(self) -> None:
        found = self._store.get(RECORD_KEY)
        if not isinstance(found, dict):
            return
        if found.get("v") != RECORD_VERSION:
            raise AirflowFailException(
                f"task {self.task_instance.task_id}: its record in the task state store has version "
                f"{found.get('v')!r}, this release reads {RECORD_VERSION}. Finish the run with the release that wrote "
                f"it, or delete the key {RECORD_KEY!r} there after making sure that its job is cancelled."
            )
        if is_same_generation(found.get("generation"), self.generation):
            self.current = found
        else:
            self.superseded = found

    def write(self, **fields: Any) -> None:
        """Replace the record; it is durable when this returns. Ids and numbers only: users can read it in the UI."""
        record = {"v": RECORD_VERSION, "generation": self.generation, **fields}
        size = len(json.dumps(record))
        if size > MAX_RECORD_BYTES:
            raise ValueError(
                f"a record of {size} bytes was to be stored, {MAX_RECORD_BYTES} are allowed: store ids only"
            )
        self._store.set(RECORD_KEY, record)
        self.current = record

    def update(self, **fields: Any) -> None:
        """Write the record again with some fields changed."""
        known = {k: v for k, v in (self.current or {}).items() if k not in ("v", "generation")}
        self.write(**{**known, **fields})

    def publish_token(self, remote_id: str) -> None:
        """Tell the triggers of this task instance what it owns now; see `triggers.kill`."""
        self.task_instance.xcom_push(key=TOKEN_KEY, value={"id": remote_id, "generation": self.generation})


def generation(context: Context) -> list[int]:
    """Changes when a user clears the task, and not on an automatic retry.

    Clearing raises the number of tries that the task instance may have. `DagRun.clear_number` is no part of it: it
    rises when any task of the run is cleared, and would take the retries of all others for clears.
    """
    return [int(context["ti"].max_tries)]


def is_same_generation(one: Any, other: Any) -> bool:
    """Whether two stored generations are one; earlier releases stored the run's clear number as a second item."""
    return isinstance(one, list) and isinstance(other, list) and one[:1] == other[:1]
