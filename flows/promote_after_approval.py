"""Promote the latest fine-tuned model once a person has said so. Copy this file and change it.

    latest publication of `candidates` -> a page about it -> somebody answers -> export -> publish in `production`

Served, the flow run is suspended while it waits for the answer: no process waits. Run as a script, it waits itself.
Answer in the UI (the Resume button asks), or from Python with `prefect.flow_runs.resume_flow_run(id, run_input={...})`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, pause_flow_run, suspend_flow_run
from prefect.artifacts import create_markdown_artifact
from prefect.input import RunInput

from cortex_training import ConfigurationError
from prefect_cortex_training import can_suspend, export, publish, resolve


class Approval(RunInput):
    """What the person is asked for."""

    approved: bool
    reason: str = ""


@flow(name="promote-after-approval", persist_result=True, result_serializer="json")
def promote_after_approval(
    candidates: str,
    production: str,
    *,
    cortex: str = "cortex-training",
    min_step: int = 1,
    answer_within_s: int = 3 * 86_400,
) -> dict[str, Any]:
    """Publish the latest model of `candidates` in `production`, if a person approves; returns what was decided.

    Args:
        candidates: root where fine-tuned models are published, e.g. `models` of `finetune_from_snowflake`.
        production: root that serves production. It must exist.
        cortex: name of a `CortexTrainingCredentials` block.
        min_step: a candidate with fewer steps is no candidate.
        answer_within_s: seconds until nobody's answer is a no: the flow run fails.
    """
    if not Path(production).is_dir():
        raise ConfigurationError.of("production", production, "this folder does not exist; create it or mount it first")
    # The one that is asked about is the one that is promoted, whatever is published meanwhile.
    candidate = resolve(candidates, min_step=min_step)
    if candidate is None:
        raise ConfigurationError.of(
            "candidates", candidates, f"no model of at least step {min_step} is published there"
        )
    show(candidate)
    if can_suspend():
        answer = suspend_flow_run(wait_for_input=Approval, timeout=answer_within_s, key="approval")
    else:
        answer = pause_flow_run(wait_for_input=Approval, timeout=answer_within_s, key="approval", poll_interval=1)
    decision = {"candidate": candidate["entry"], "approved": answer.approved, "reason": answer.reason}
    if not answer.approved:
        get_run_logger().info("%s is not promoted: %s", candidate["entry"], answer.reason or "no reason given")
        return decision
    exported = export(cortex, candidate["job_id"], candidate["checkpoint_id"], root=production)
    entry = publish(production, exported["save"], epoch=exported["epoch"], step=exported["step"])
    return decision | {"entry": entry, "model": f"{production}/{exported['save']}"}


def show(candidate: dict[str, Any]) -> None:
    """Tell the person what the question is about."""
    lines = [f"| {name} | {candidate[name]} |" for name in ("entry", "step", "job_id", "checkpoint_id", "location")]
    create_markdown_artifact(
        key="promotion-candidate",
        markdown="\n".join(["Promote this model?", "", "| | |", "| --- | --- |", *lines]),
        description="The model that waits for approval",
    )


if __name__ == "__main__":
    promote_after_approval.serve(name="promotion", tags=["cortex-training"])
