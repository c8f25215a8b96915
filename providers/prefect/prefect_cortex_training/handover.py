"""A training run handed from its flow run to a driver, and the answer on its way back.

The plan goes through the run's root, which both must see: a driver that can't read it there would begin a second,
empty run under the same name. The answer goes through the flow run's labels, so that it is there when the flow run
comes back, whatever became of the driver.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from cortex_training.errors import ConfigurationError, CortexTrainingError
from cortex_training.identity import new_token
from cortex_training.training import RunFailed, TrainingPlan
from prefect_cortex_training.labels import Label, RunLabels, root_digest

VERSION = 1

DONE = "done"
FAILED = "failed"
LEFT = "left"
"""The driver can't drive this run; the flow run has to do it itself."""


def training_id(plan: TrainingPlan) -> str:
    """A short name of what is to be trained: another plan on the same root is other training."""
    text = json.dumps(plan.to_dict(), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def attempt_of(flow_run_id: UUID, root: str) -> str:
    """The name under which a flow run drives the run in `root`, in whatever process."""
    return hashlib.sha256(f"{flow_run_id}|train|{root_digest(root)}".encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Outcome:
    """How a training ended: ``done`` with a result, ``failed`` with an error, or ``left`` with the reason."""

    status: str
    result: dict[str, Any] | None = None
    error: str = ""
    message: str = ""

    def to_label(self) -> str:
        return json.dumps({"v": VERSION, **self.__dict__}, sort_keys=True)

    @classmethod
    def from_label(cls, text: str) -> Outcome:
        value = json.loads(text)
        if value.pop("v") != VERSION:
            raise ConfigurationError.of("trained label v", text[:60], f"this release reads version {VERSION}")
        return cls(**value)

    def result_or_raise(self) -> dict[str, Any] | None:
        """The result of a training that is done, None of one that was left. Raises RunFailed, or ConfigurationError
        for a plan that was refused.
        """
        if self.status == FAILED:
            if self.error == ConfigurationError.__name__:
                raise ConfigurationError(self.message, field="plan")
            raise RunFailed(self.message if self.error == RunFailed.__name__ else f"{self.error}: {self.message}")
        return self.result


def outcome_key(training: str, run_count: int) -> str:
    return f"trained.{training}.{run_count}"


def find_outcome(labels: Mapping[str, Label], training: str, run_count: int) -> Outcome | None:
    """The outcome of a training, if there is one. A failure counts for the try of the flow run that it ended: the next
    try trains on. What is done stays done.
    """
    found = {key: Outcome.from_label(str(labels[key])) for key in labels if key.startswith(f"trained.{training}.")}
    done = [outcome for outcome in found.values() if outcome.status == DONE]
    return done[0] if done else found.get(outcome_key(training, run_count))


async def nonce_of(labels: RunLabels, training: str, run_count: int) -> str:
    """What tells this handing-over from every other, also to a driver that sees an old copy of the root."""
    return str(await labels.remember(f"handover.{training}.{run_count}", new_token()[:16]))


def nonces_in(labels: Mapping[str, Label], training: str, run_count: int) -> list[str]:
    """Every nonce under which this training may have been handed over, in this try."""
    return [str(value) for key, value in labels.items() if key.startswith(f"handover.{training}.{run_count}.")]


def leave_plan(plan: TrainingPlan, attempt: str, nonce: str) -> None:
    """Put the plan into ``<root>/exec/<attempt>/plan.json``, durable on return. Blocks on the store."""
    from cortex_training.training.root import open_root

    document = {"v": VERSION, "nonce": nonce, "plan": plan.to_dict()}
    store = open_root(plan.root, plan.credentials)
    store.write(_plan_file(attempt), json.dumps(document, sort_keys=True, indent=1).encode())


def find_plan(root: str, attempt: str, nonces: list[str], root_credentials: str | None = None) -> TrainingPlan:
    """The plan that was left under one of `nonces`; raises ConfigurationError when it is not to be seen from here."""
    from cortex_training.publication import PublicationError
    from cortex_training.training.root import open_existing_root

    try:
        document = json.loads(open_existing_root(root, root_credentials).read(_plan_file(attempt)))
        nonce, plan = document["nonce"], document["plan"]
    except (OSError, PublicationError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"the plan in {root}/{_plan_file(attempt)} can't be read here ({_reason(error)}): use a root that "
            "flow runs and drivers see under the same path, or whose credentials both find",
            field="plan.root",
        ) from error
    if nonce not in nonces:
        raise ConfigurationError(
            f"{root}/{_plan_file(attempt)} is not the plan that the flow run has left: flow runs and drivers see "
            "different file systems under this path",
            field="plan.root",
        )
    return TrainingPlan.from_dict(plan)


def _reason(error: Exception) -> str:
    # What a store says tells which source of credentials gave none; of a file the path is in the message already.
    return f"{type(error).__name__}: {error}" if isinstance(error, CortexTrainingError) else type(error).__name__


def _plan_file(attempt: str) -> str:
    return f"exec/{attempt}/plan.json"
