"""When a retry is worth it, and how long to wait for it: the type of what went wrong decides.

Operators raise `AirflowFailException` for what no retry can mend, so that a task without a policy does not repeat it
either. The policy is about the rest: how soon, and what DAG code of yours may raise that was made with the client.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import ExceptionRetryPolicy, RetryAction, RetryRule

_ERRORS = "cortex_training.errors"
_PUBLICATION = "cortex_training.publication.errors"


def _fail(reason: str, *names: str) -> RetryRule:
    return RetryRule(exception=list(names), action=RetryAction.FAIL, reason=reason)


def _retry(delay: timedelta, reason: str, *names: str) -> RetryRule:
    return RetryRule(exception=list(names), action=RetryAction.RETRY, retry_delay=delay, reason=reason)


# By name: the DAG's serialised form holds names, and the rules of a policy are compared in the order they stand here.
CORTEX_TRAINING_RETRY_POLICY = ExceptionRetryPolicy(
    rules=[
        _fail("the arguments are wrong", f"{_ERRORS}.ConfigurationError"),
        _fail("the credential is refused", f"{_ERRORS}.AuthError", f"{_PUBLICATION}.CredentialsError"),
        _fail("the service does not know the id", f"{_ERRORS}.NotFoundError"),
        _fail("the call may have been executed, a second one would count double", f"{_ERRORS}.OutcomeUnknown"),
        _fail("chunks of a call are not what they were", f"{_ERRORS}.ChunkGroupConflictError"),
        _fail("the state of the job forbids the call", f"{_ERRORS}.ConflictError"),
        _fail("the publication log or a save is broken", f"{_PUBLICATION}.LogError", f"{_PUBLICATION}.SaveError"),
        _retry(timedelta(minutes=5), "the service asks for fewer requests", f"{_ERRORS}.RateLimitedError"),
        _retry(
            timedelta(minutes=1),
            "the service or a store did not answer",
            f"{_ERRORS}.TransportError",
            f"{_ERRORS}.ServiceError",
            f"{_PUBLICATION}.StoreError",
            f"{_PUBLICATION}.RootError",
            f"{_PUBLICATION}.DownloadError",
        ),
        _retry(timedelta(minutes=1), "the job ended; a retry replaces it", f"{_ERRORS}.JobFailed"),
        _retry(
            timedelta(seconds=15),
            "the wait ended, the work goes on: a retry finds it again",
            f"{_ERRORS}.DeadlineExceeded",
            "airflow.sdk.exceptions.TaskDeferralError",
        ),
    ]
)
"""For ``retry_policy=`` of tasks, or of a DAG's ``default_args``. How often is still ``retries``' to say."""
