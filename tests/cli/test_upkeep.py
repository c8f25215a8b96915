"""login, doctor, sweep, conformance, downloads."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

import pytest

from cortex_training.client import CortexTrainingClient
from cortex_training.conformance import Interview
from cortex_training.training import sweep


def test_login_remembers_a_file_for_its_owner_alone(run: Any, tmp_path: Path, service: Any, environment: Any) -> None:
    environment.delenv("CORTEX_TRAINING_BASE_URL")
    environment.delenv("CORTEX_TRAINING_DATABASE")
    config = tmp_path / "connection.json"
    config.write_text(json.dumps({"base_url": service.url, "database": "DB"}))
    done = run("login", str(config), "--check")
    assert done.document == {"config_path": str(config), "logged_in": True}
    state = tmp_path / "config" / "cortex-training" / "login.json"
    assert state.stat().st_mode & 0o777 == 0o600
    service.answers["GET", "/job-1"] = {"status": "running"}
    assert run("get", "job-1").document == {"status": "running"}
    assert run("--config", str(config), "login").code == 0
    assert run("--connection", "profile", "login").document["connection"] == "profile"
    assert json.loads(state.read_text()) == {"connection": "profile"}


@pytest.mark.parametrize("arguments", [["login"], ["--connection", "p", "login", "FILE"], ["login", "/does/not/exist"]])
def test_login_refuses_what_it_cannot_remember(run: Any, tmp_path: Path, arguments: list[str]) -> None:
    assert run(*arguments).code == 1
    assert not (tmp_path / "config").exists()


def test_login_keeps_the_old_state_when_the_check_fails(run: Any, tmp_path: Path) -> None:
    config = tmp_path / "connection.json"
    config.write_text(json.dumps({"base_url": "http://user:x@h", "database": "DB"}))
    assert run("login", str(config), "--check").code == 1
    assert not (tmp_path / "config").exists()


def test_doctor_says_what_is_fine_and_what_is_not(run: Any, service: Any, environment: Any) -> None:
    service.answers["GET", "/cortex-training"] = {"jobs": []}
    service.answers["GET", ""] = {"jobs": [{"job_id": "j"}]}
    done = run("doctor")
    assert done.code == 0, done.out
    found = {check["check"]: check for check in done.document["checks"]}
    assert found["distributions"]["detail"] == "cortex-training-client"
    assert found["credential"]["detail"] == "1 jobs"
    assert re.fullmatch(r"[+-]\d+ s", found["clock"]["detail"])
    service.answers["GET", ""] = (401, {"code": "390144", "message": "bad token"})
    done = run("doctor")
    assert done.code == 1
    assert "bad token" in json.dumps(done.document)


def test_doctor_notices_both_distributions(run: Any, service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"cortex_training": ["cortex-training", "cortex-training-client"]}
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: both)
    done = run("doctor")
    assert done.code == 1
    assert "pip uninstall -y cortex-training cortex-training-client" in done.out


def test_doctor_notices_a_wrong_clock(run: Any, service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CortexTrainingClient, "clock_skew_s", lambda self: 3600.0)
    done = run("doctor")
    assert done.code == 1
    assert "3600 s ahead" in done.out


def jobs_of(*ages_h: float | None) -> dict[str, Any]:
    now = datetime.datetime.now(datetime.UTC)
    jobs = []
    for index, age in enumerate(ages_h):
        created = None if age is None else (now - datetime.timedelta(hours=age)).isoformat()
        jobs.append({"job_id": f"job-{index}", "status": "running", "created_at": created, "submitted_by": "ANN"})
    return {"jobs": jobs}


def test_sweep_finds_old_active_jobs_and_cancels_only_when_told(run: Any, service: Any) -> None:
    listing = jobs_of(30, 1, None, 50)
    listing["jobs"].append({**listing["jobs"][0], "job_id": "ended", "status": "cancelled"})
    service.answers["GET", ""] = listing
    done = run("sweep")
    assert [job["job_id"] for job in done.document["found"]] == ["job-0", "job-3"]
    assert done.document["cancelled"] == []
    assert not [call for call in service.calls if call.method == "POST"]
    done = run("sweep", "--older-than", "144000", "--user", "ann", "--cancel")
    assert done.document["cancelled"] == ["job-3"]
    assert [call.path for call in service.calls if call.method == "POST"] == ["/job-3:cancel"]


def test_sweep_can_be_narrowed(run: Any, service: Any) -> None:
    service.answers["GET", "/job-0/experiment-run"] = {"experiment_name": "DB.PUBLIC.NIGHTLY_A"}
    service.answers["GET", "/job-1/experiment-run"] = {"experiment_name": "other"}
    service.answers["GET", ""] = jobs_of(30, 30)
    assert [job["job_id"] for job in run("sweep", "--experiment", "nightly").document["found"]] == ["job-0"]
    assert run("sweep", "--user", "bob").document["found"] == []


@pytest.mark.parametrize("selector", [[], ["--user", ""], ["--experiment", ""]])
def test_a_sweep_cancels_nobodys_jobs_before_it_is_told_whose(run: Any, service: Any, selector: list[str]) -> None:
    service.answers["GET", ""] = jobs_of(30)
    done = run("sweep", "--cancel", *selector)
    assert done.code == 1
    assert "--experiment" in done.err
    assert "--user" in done.err
    assert service.calls == []


def test_a_sweep_takes_the_credentials_of_roots_in_a_bucket(
    run: Any, service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def owned(roots: list[str], credentials: str | None) -> frozenset[str]:
        asked.append((roots, credentials))
        return frozenset({"job-0"})

    monkeypatch.setattr(sweep, "owned_jobs", owned)
    service.answers["GET", ""] = jobs_of(30, 30)
    done = run("sweep", "--root", "s3://bucket/a", "--root", "s3://bucket/b", "--creds", "secret:/mnt/creds")
    assert [job["job_id"] for job in done.document["found"]] == ["job-1"]
    assert asked == [(["s3://bucket/a", "s3://bucket/b"], "secret:/mnt/creds")]


def test_conformance_needs_a_yes(run: Any, service: Any) -> None:
    done = run("conformance", "--model", "tiny")
    assert done.code == 1
    assert "--yes" in done.err
    assert service.calls == []


def test_artifacts_need_a_snowflake_credential(run: Any, service: Any) -> None:
    service.answers["GET", "/experiment-run"] = {"experiment_name": "E", "experiment_run_name": "R"}
    for command in (["download-log", "j"], ["download-log", "j", "--log-type", "stdout"], ["download-metrics", "j"]):
        done = run(*command)
        assert done.code == 1
        assert "Snowflake stage" in done.err


def test_logs_are_written_below_the_output_folder(
    run: Any, service: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = [
        {"sub_job_id": "job:training:0", "filename": "a/b.log", "artifact_uri": "snow://x", "content": "text\r\n"},
        {
            "sub_job_id": "job:training:0",
            "filename": "c.log",
            "artifact_uri": "snow://y",
            "content": "",
            "error": "gone",
        },
    ]
    monkeypatch.setattr(CortexTrainingClient, "fetch_execution_logs", lambda self, job_id: logs)
    done = run("download-log", "job", "--output-dir", str(tmp_path / "out"))
    assert done.code == 1
    assert "c.log: gone" in done.err
    saved = Path(done.document["logs"][0]["saved_path"])
    assert saved == tmp_path / "out" / "job:training:0" / "a" / "b.log"
    assert saved.read_bytes() == b"text\r\n"
    assert "content" not in done.document["logs"][0]
    logs[0]["filename"] = "../../escape"
    assert run("download-log", "job", "--output-dir", str(tmp_path / "out")).code == 1
    assert not (tmp_path / "escape").exists()


@pytest.mark.parametrize(
    "assumptions",
    [
        {"job-ids": "honoured", "accumulation": "add", "global-steps": "restored", "load-gradients": "keep",
         "checkpoint-ids": "uuid", "save-result": "full", "ended-job-polls": "refused"},
        {"job-ids": "ignored", "accumulation": "refuse", "global-steps": "continues", "load-gradients": "clear",
         "checkpoint-ids": "global_step", "save-result": "stage_path", "ended-job-polls": "served"},
    ],
    ids=["defaults", "the other answers"],
)  # fmt: skip
def test_conformance_finds_out_how_a_service_behaves(start_local_service: Any, assumptions: dict[str, str]) -> None:
    service = start_local_service(assume=[f"{question}={answer}" for question, answer in assumptions.items()])
    with CortexTrainingClient(service.base_url, "DB", "PUBLIC") as client:
        answers = {answer.question: answer for answer in Interview(client, "tiny").ask()}
        states = {job["status"] for job in client.list_jobs()}
    found = {question: answers[question].answer for question in assumptions}
    assert found == assumptions, answers
    assert answers["chunk-group-replay"].answer == "same-result"
    assert answers["chunk-group-conflict"].answer == "refused"
    assert answers["unknown-request"].answer == "404"
    assert answers["request-order"].answer == "arrival", answers["request-order"]
    assert states <= {"cancelled", "cancelling"}


def test_conformance_notices_that_requests_are_run_out_of_turn(start_local_service: Any) -> None:
    # Slow enough that requests wait: only of those that do can another be next.
    service = start_local_service(simulate="default:0.05", assume=["request-order=shuffled"])
    with CortexTrainingClient(service.base_url, "DB", "PUBLIC") as client:
        answers = {answer.question: answer.answer for answer in Interview(client, "tiny").ask()}
    assert answers["request-order"] == "shuffled"
