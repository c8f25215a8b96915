"""How answers are spelled: the same facts in each of the forms that clients have met."""

from __future__ import annotations

from typing import Any

from cortex_training.local.assumptions import Assumptions
from cortex_training.states import JobState

_UNLISTED = {JobState.CANCELLING.value: 8}
"""States that the reference does not list, and the number a gateway that does not know them passes on."""


class Spelling:
    """Spells jobs, polls and capacity as the service's assumptions say."""

    def __init__(self, assumptions: Assumptions) -> None:
        self._assumptions = assumptions

    def job(self, described: dict[str, Any]) -> dict[str, Any]:
        """A job as `Job.describe` gives it."""
        spelled = {**described, "status": self._job_state(described["status"])}
        if self._assumptions.submitter == "absent":
            del spelled["submitted_by"], spelled["owner_role"]
        spelled["sub_jobs"] = [self._sub_job(one) for one in described["sub_jobs"]]
        return self._without_zeros(spelled)

    def poll(self, page: dict[str, Any]) -> dict[str, Any]:
        """A page as `Request.page` gives it."""
        state = page["status"]
        named = f"REQUEST_STATE_{state.upper()}" if self._assumptions.state_names == "enum" else state
        return self._without_zeros({**page, "status": named})

    def capacity(self, report: dict[str, Any]) -> dict[str, Any]:
        return self._without_zeros(report)

    def _sub_job(self, described: dict[str, Any]) -> dict[str, Any]:
        spelled = {**described, "status": self._job_state(described["status"])}
        return _with_floats(spelled) if self._assumptions.config_numbers == "floats" else spelled

    def _job_state(self, state: str) -> str | int:
        if self._assumptions.unlisted_states == "numbered" and state in _UNLISTED:
            return _UNLISTED[state]
        return f"JOB_STATE_{state.upper()}" if self._assumptions.state_names == "enum" else state

    def _without_zeros(self, answer: dict[str, Any]) -> dict[str, Any]:
        if self._assumptions.zero_fields == "present":
            return answer
        return {name: value for name, value in answer.items() if value or isinstance(value, float)}


def _with_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: one if name == "status" else _with_floats(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_with_floats(one) for one in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
