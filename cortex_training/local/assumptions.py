"""What nobody outside knows of the real service, and what this one does about it.

Each question has a switch, so that a pipeline can be tried against every answer. `docs/local-service.md` opens with the
same table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args, get_type_hints


@dataclass(frozen=True)
class Assumptions:
    """One field a question; the first answer of each is the default."""

    job_ids: Literal["honoured", "ignored"] = "honoured"
    """A job id sent with create: used, with 409 on a duplicate; or replaced by the service's own."""
    accumulation: Literal["add", "refuse"] = "add"
    """A second forward-backward before a step: gradients of per-call means add; or the request fails."""
    request_order: Literal["arrival", "shuffled"] = "arrival"
    """Which of a sub-job's waiting requests is next: the oldest; or any."""
    chunk_groups: Literal["kept", "evict_completed"] = "kept"
    """A group that was executed: known as long as the job runs; or forgotten, so that sending it again is new."""
    worker_restart: Literal["both", "gradients", "groups"] = "both"
    """What a worker that restarts forgets: accumulated gradients and chunk groups; or one of them alone."""
    load_gradients: Literal["keep", "clear"] = "keep"
    """Gradients accumulated when a checkpoint is loaded."""
    global_steps: Literal["restored", "continues", "zero"] = "restored"
    """The step counter after a load: the checkpoint's; the running job's own; or 0."""
    checkpoint_ids: Literal["uuid", "global_step"] = "uuid"
    """`cp_<uuid>`, or `global_step<n>`, which a later save at the same step overwrites."""
    save_result: Literal["full", "stage_path"] = "full"
    """Whether a save's result names `checkpoint_id`, or only the stage path that holds it."""
    ended_job_polls: Literal["refused", "served"] = "refused"
    """Polling a request of a job that is not running."""
    state_names: Literal["plain", "enum"] = "plain"
    """`running`, or `JOB_STATE_RUNNING` and `REQUEST_STATE_RUNNING`."""
    unlisted_states: Literal["named", "numbered"] = "named"
    """`cancelling`, which the reference does not list, by its name, or as the number of an unknown enum value."""
    config_numbers: Literal["as_sent", "floats"] = "as_sent"
    """Whole numbers in a job's sub-jobs: as they were sent, or as 2048.0."""
    zero_fields: Literal["present", "omitted"] = "present"
    """Fields that are false, zero or empty, which a gateway may leave out of its JSON."""
    log_probability: Literal["supported", "refused"] = "supported"
    """Sub-jobs of the type `log_probability`, which newer clients say are not supported at present."""
    submitter: Literal["named", "absent"] = "named"
    """`submitted_by` and `owner_role` of jobs."""

    def with_choices(self, choices: Sequence[str]) -> Assumptions:
        """Apply ``question=answer`` texts. Raises ValueError naming the question or the answers it has."""
        chosen: dict[str, str] = {}
        answers_of = answers()
        for choice in choices:
            question, _, answer = choice.partition("=")
            name = question.strip().replace("-", "_")
            if name not in answers_of:
                raise ValueError(
                    f"{choice!r}: there is no question {question!r}; there are {', '.join(sorted(answers_of))}"
                )
            if answer not in answers_of[name]:
                raise ValueError(f"{choice!r}: the answers to {question!r} are {', '.join(answers_of[name])}")
            chosen[name] = answer
        return replace(self, **chosen)  # type: ignore[arg-type]


def answers() -> dict[str, tuple[str, ...]]:
    """Every question with its possible answers, the default first."""
    hints = get_type_hints(Assumptions)
    return {question.name: get_args(hints[question.name]) for question in fields(Assumptions)}
