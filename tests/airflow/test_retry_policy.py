"""What a retry is worth, by the type of what went wrong."""

from __future__ import annotations

import datetime
import json

import pytest
from airflow.sdk import DAG, RetryAction
from airflow.sdk.exceptions import TaskDeferralError

from airflow_cortex_training.operators.jobs import CortexTrainingCancelJobOperator
from airflow_cortex_training.retry_policy import CORTEX_TRAINING_RETRY_POLICY as POLICY
from cortex_training import errors
from cortex_training.publication import CredentialsError, DownloadError, LogError, RootError, SaveGone, StoreError

FAIL, RETRY, DEFAULT = RetryAction.FAIL, RetryAction.RETRY, RetryAction.DEFAULT


@pytest.mark.parametrize(
    ("error", "action", "delay_s"),
    [
        (errors.ConfigurationError("x"), FAIL, None),
        (errors.AuthError(status=401), FAIL, None),
        (errors.NotFoundError(status=404), FAIL, None),
        (errors.ConflictError(status=409), FAIL, None),
        (errors.ChunkGroupConflictError(status=409), FAIL, None),
        (errors.OutcomeUnknown(operation="step", job_id="j", reason="r", hint="h"), FAIL, None),
        (LogError("x"), FAIL, None),
        (SaveGone("x"), FAIL, None),
        (CredentialsError("x"), FAIL, None),
        (errors.RateLimitedError(status=429), RETRY, 300),
        (errors.ServiceError(status=503), RETRY, 60),
        (errors.TransportError("x"), RETRY, 60),
        (StoreError("x"), RETRY, 60),
        (RootError("x"), RETRY, 60),
        (DownloadError("x"), RETRY, 60),
        (errors.JobFailed(job_id="j", state="failed"), RETRY, 60),
        (errors.DeadlineExceeded("x"), RETRY, 15),
        (TaskDeferralError("x"), RETRY, 15),
        (errors.RequestFailed(job_id="j", request_id="r", state="failed"), DEFAULT, None),
        (ValueError("somebody else's"), DEFAULT, None),
    ],
)
def test_every_kind_of_error_has_its_answer(error: Exception, action: RetryAction, delay_s: float | None) -> None:
    decision = POLICY.evaluate(error, 1, 3)
    assert decision.action == action
    assert (decision.retry_delay.total_seconds() if decision.retry_delay else None) == delay_s


def test_no_rule_is_out_of_reach() -> None:
    """Every exception that a rule names exists, and the rule is the first that matches it."""
    for rule in POLICY.rules:
        for kind in rule._resolve_exception_classes():
            bare = kind.__new__(kind)
            assert next(other for other in POLICY.rules if other.matches(bare)) is rule, kind
        assert len(rule._resolve_exception_classes()) == len(rule._specs)


def test_it_is_stored_with_the_dag() -> None:
    from airflow.serialization.serialized_objects import DagSerialization

    with DAG(
        "policy",
        schedule=None,
        start_date=datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
        default_args={"retry_policy": POLICY},
    ) as dag:
        CortexTrainingCancelJobOperator(task_id="cancel", job_id="j")
    json.dumps(DagSerialization.to_dict(dag))
    assert dag.get_task("cancel").retry_policy is POLICY
