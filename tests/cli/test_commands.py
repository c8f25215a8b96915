"""Commands: what they send, and the one JSON document they print."""

from __future__ import annotations

import base64
import datetime
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cortex_training import wire

BODY = {
    "sub_job_configs": [
        {"job_type": "sampling", "model_name": "m", "inference_config": {"max_seq_len": 8, "n_gpus": 1}}
    ]
}


def write(folder: Path, value: Any) -> str:
    path = folder / "request.json"
    path.write_text(json.dumps(value))
    return str(path)


def test_submit_posts_the_file_with_an_id_of_its_own(run: Any, service: Any, tmp_path: Path) -> None:
    service.answers["POST", ""] = {"job_id": "theirs"}
    done = run("submit", write(tmp_path, BODY))
    assert done.code == 0
    assert done.document == {"job_id": "theirs"}
    sent = service.calls[0].json
    assert sent["sub_job_configs"] == BODY["sub_job_configs"]
    assert sent["job_id"] in done.err


def test_submit_takes_an_id_and_standard_input_and_waits(
    run: Any, service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(BODY)))
    service.answers["POST", ""] = {"job_id": "mine"}
    service.answers["GET", "/mine"] = {"job_id": "mine", "status": "JOB_STATE_RUNNING"}
    done = run("submit", "-", "--job-id", "mine", "--wait")
    assert done.document["status"] == "JOB_STATE_RUNNING"
    assert service.calls[0].json["job_id"] == "mine"


def test_a_dry_run_needs_no_connection(run: Any, tmp_path: Path) -> None:
    done = run("submit", write(tmp_path, BODY), "--dry-run")
    assert (done.code, done.document) == (0, BODY)


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_two_training_sub_jobs_are_refused_in_both_ways(run: Any, service: Any, tmp_path: Path, dry: list[str]) -> None:
    body = {"sub_job_configs": [{"job_type": "training"}, {"job_type": "training"}]}
    done = run("submit", write(tmp_path, body), *dry)
    assert done.code == 1
    assert "at most one training" in done.err
    assert (done.out, service.calls) == ("", [])


@pytest.mark.parametrize("content", ["{not json", "[1]", "\xff"])
def test_a_file_that_is_no_json_object_is_named(run: Any, service: Any, tmp_path: Path, content: str) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content.encode("latin-1"))
    done = run("submit", str(path))
    assert done.code == 1
    assert "broken.json" in done.err
    assert run("submit", str(tmp_path / "missing.json")).code == 1


def test_get_wait_cancel_and_checkpoints_take_the_job_either_way(run: Any, service: Any) -> None:
    service.answers["GET", "/job-1"] = {"job_id": "job-1", "status": "running"}
    service.answers["GET", "/checkpoints"] = {"checkpoints": [{"checkpoint_id": "cp_1"}]}
    for arguments in (["get", "job-1"], ["--job", "job-1", "get"], ["--job-id", "job-1", "wait"], ["wait", "job-1"]):
        assert run(*arguments).document == {"job_id": "job-1", "status": "running"}
    assert run("cancel", "job-1").document == {"cancelled": True, "job_id": "job-1"}
    assert run("checkpoints", "job-1").document == {"checkpoints": [{"checkpoint_id": "cp_1"}]}
    done = run("get")
    assert done.code == 1
    assert "--job" in done.err


def test_jobs_are_listed_oldest_first_and_undated_last(run: Any, service: Any) -> None:
    jobs = [{"job_id": "b", "created_at": "2026-02"}, {"job_id": "x"}, {"job_id": "a", "created_at": "2026-01"}]
    service.answers["GET", ""] = {"jobs": jobs}
    assert [job["job_id"] for job in run("list").document["jobs"]] == ["a", "b", "x"]
    service.answers["GET", ""] = {"jobs": [{"job_id": "new"}, {"job_id": "old"}]}
    assert [job["job_id"] for job in run("list").document["jobs"]] == ["old", "new"]


def test_jobs_can_be_filtered(run: Any, service: Any) -> None:
    service.answers["GET", ""] = {
        "jobs": [
            {"job_id": "a", "status": "running", "submitted_by": "ANN", "created_at": "1"},
            {"job_id": "b", "status": "JOB_STATE_CANCELLED", "submitted_by": "BOB", "created_at": "2"},
            {"job_id": "c", "status": "pending", "submitted_by": "BOB", "created_at": "3"},
        ]
    }

    def listed(*flags: str) -> list[str]:
        return [job["job_id"] for job in run("list", *flags).document["jobs"]]

    assert listed("--status", "running") == ["a"]
    assert service.calls[-1].query == {"status": ["running"]}
    assert listed("--status", "active") == ["a", "c"]
    assert listed("--status", "cancelled,pending") == ["b", "c"]
    assert listed("--user", "bob") == ["b", "c"]
    assert listed("--limit", "1") == ["c"]
    assert run("list", "--status", "running,active,JOB_STATE_CANCELED").err == ""
    mistyped = run("list", "--status", "runing,pending")
    assert [job["job_id"] for job in mistyped.document["jobs"]] == ["c"]
    assert "'runing': no state that is known here" in mistyped.err
    assert "'pending'" not in mistyped.err


def test_capacity_of_one_hardware_and_of_all(run: Any, service: Any) -> None:
    service.answers["GET", "/capacity"] = {"max_total_gpus": 64}
    assert run("capacity", "--hardware", "B200").document["max_total_gpus"] == 64
    assert set(run("capacity").document["capacity_by_hardware"]) == {"H200", "B200", "B300"}
    assert run("capacity", "--hardware", "A10").code == 2


def test_step_sends_a_rate_only_when_asked(run: Any, service: Any) -> None:
    done = run("--job", "job-1", "step")
    assert service.calls[0].json == {}
    assert done.document == {"job_id": "job-1", "request_id": "r-1", "result": {"ok": True}}
    done = run("--job", "job-1", "step", "--lr", "2e-5", "--no-poll")
    assert service.calls[-1].json == {"learning_rate": 2e-05}
    assert done.document == {"job_id": "job-1", "learning_rate": 2e-05, "request_id": "r-1"}


def test_save_prints_the_checkpoint_it_made(run: Any, service: Any) -> None:
    service.answers["GET", "/requests/r-1"] = {
        "status": "done",
        "result": {"stage_path": "s3://b/checkpoints/cp_1f/global_step2/"},
    }
    done = run("--job", "job-1", "save", "--type", "weights-only")
    assert service.calls[0].json == {"checkpoint_type": "weights-only"}
    assert done.document["checkpoint_id"] == "cp_1f"


def test_load(run: Any, service: Any) -> None:
    done = run("--job", "job-1", "load", "cp_1", "--source-job-id", "other", "--target-sub-job-id", "t", "--no-poll")
    assert service.calls[0].json == {"checkpoint_id": "cp_1", "source_job_id": "other", "target_sub_job_id": "t"}
    assert done.document == {
        "checkpoint_id": "cp_1",
        "job_id": "job-1",
        "request_id": "r-1",
        "source_job_id": "other",
        "target_sub_job_id": "t",
    }


def test_weight_sync_has_sensible_defaults(run: Any, service: Any) -> None:
    done = run("--job", "job-1", "weight-sync", "--weight-format", "lora", "--no-poll")
    assert service.calls[0].json["payload"] == {
        "source_sub_job_id": "job-1:training:0",
        "target_sub_job_ids": ["job-1:sampling:0"],
        "weight_format": "lora",
    }
    assert done.document["target_sub_job_ids"] == ["job-1:sampling:0"]
    run(
        *("--job", "job-1", "weight-sync", "--source-sub-job-id", "s", "--target-sub-job-id", "t1"),
        *("--target-sub-job-id", "t2", "--operation-sub-job-id", "o", "--operation-sub-job-type", "training"),
    )
    sent = service.calls[1].json
    assert sent["payload"] == {"source_sub_job_id": "s", "target_sub_job_ids": ["t1", "t2"]}
    assert (sent["sub_job_id"], sent["sub_job_type"]) == ("o", "training")


def test_export_prints_the_links(run: Any, service: Any) -> None:
    service.answers["POST", ":export"] = {"checkpoint_id": "cp_1", "files": []}
    assert run("--job", "job-1", "export", "cp_1").document == {"checkpoint_id": "cp_1", "files": []}


@pytest.mark.parametrize("wrap", [lambda spec: spec, lambda spec: {"payload": spec}])
def test_generate(run: Any, service: Any, tmp_path: Path, wrap: Any) -> None:
    spec = {"prompts": ["a", "b"], "sampling_params": [{"max_tokens": 1}, None], "strict": True}
    done = run("--job", "job-1", "generate", write(tmp_path, {**wrap(spec), "poll": False}))
    assert done.document == {"job_id": "job-1", "prompt_count": 2, "request_id": "r-1"}
    assert wire.loads(service.calls[0].body, framework="numpy") == spec


@pytest.mark.parametrize("spec", [{}, {"prompts": ["a"], "temperature": 1}, {"prompts": ["a"], "poll": "no"}])
def test_generate_refuses_what_it_does_not_know(run: Any, service: Any, tmp_path: Path, spec: Any) -> None:
    assert run("--job", "job-1", "generate", write(tmp_path, spec)).code == 1
    assert service.calls == []


def test_forward_backward_sends_a_frame_and_prints_tensors_as_lists(run: Any, service: Any, tmp_path: Path) -> None:
    result = wire.dumps({"avg_loss": float("nan"), "logprobs": np.arange(3, dtype=np.float32)})
    service.answers["GET", "/requests/r-1"] = {
        "status": "done",
        "result": {"wire_format": "DSSST1", "encoding": "base64", "payload_b64": base64.b64encode(result).decode()},
    }
    spec = {"payload": {"kwargs": {"input_ids": {"data": [[1, 2, 3]], "dtype": "long"}}}}
    done = run("--job", "job-1", "fwd-bwd", write(tmp_path, spec))
    assert done.code == 0, done.err
    assert done.document["result"] == {"avg_loss": "nan", "logprobs": [0.0, 1.0, 2.0]}
    frame = wire.decode_byte_chunks([service.calls[0].body])
    assert done.document["payload_size_bytes"] == len(frame)
    assert np.asarray(wire.loads(frame)["kwargs"]["input_ids"]).tolist() == [[1, 2, 3]]


def test_compact_output_is_one_sorted_line(run: Any, service: Any) -> None:
    service.answers["GET", "/job-1"] = {"status": "running", "job_id": "job-1"}
    assert run("--compact", "get", "job-1").out == '{"job_id":"job-1","status":"running"}\n'
    assert run("get", "job-1").out == '{\n  "job_id": "job-1",\n  "status": "running"\n}\n'


def test_an_error_of_the_service_is_on_standard_error_with_its_request_id_and_body(run: Any, service: Any) -> None:
    service.answers["GET", "/job-1"] = (404, {"message": "no such job"})
    done = run("get", "job-1")
    assert done.code == 1
    assert done.out == ""
    assert "error: GET" in done.err
    assert "snowflake request id: req-42" in done.err
    assert 'response body: {"message": "no such job"}' in done.err


def test_a_failed_request_prints_no_half_document(run: Any, service: Any) -> None:
    service.answers["GET", "/requests/r-1"] = {"status": "failed", "error": "out of memory"}
    done = run("--job", "job-1", "step")
    assert (done.code, done.out) == (1, "")
    assert "out of memory" in done.err


def test_a_defect_is_shown_as_one(run: Any, service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from cortex_training.client import CortexTrainingClient

    def broken(*arguments: Any) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr(CortexTrainingClient, "get_job", broken)
    done = run("get", "job-1")
    assert (done.code, done.out) == (1, "")
    assert "Traceback" in done.err
    assert "KeyError" in done.err


def test_the_help_shows_where_the_flags_belong(run: Any) -> None:
    done = run("--help")
    assert done.code == 0
    assert "cortex-training --job JOB_ID step --lr 1e-4" in done.out
    assert run().code == 2
    assert run("no-such-command").code == 2


def test_both_installed_commands_work(environment: Any) -> None:
    for name in ("cortex-training", "ct"):
        done = subprocess.run([str(Path(sys.executable).parent / name), "get", "j"], capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stdout == ""
        assert "no connection" in done.stderr


def test_a_stream_prints_one_event_a_line_and_fails_when_a_prompt_did(run: Any, service: Any, tmp_path: Path) -> None:
    events = [{"type": "result", "index": 0, "result": {"text": "a"}}, {"type": "done", "completed": 1, "failed": 0}]
    pages = [{"status": "streaming", "events": events}, {"status": "done", "events": []}]
    service.answer_in_turn("GET", "/requests/r-1", pages)
    done = run("--job", "job-1", "generate-stream", write(tmp_path, {"prompts": ["a"]}))
    assert [json.loads(line) for line in done.out.splitlines()] == events
    assert done.code == 0
    pages = [{"status": "done", "events": [{"type": "error", "index": 0, "error": "x"}]}, {"status": "done"}]
    service.answer_in_turn("GET", "/requests/r-1", pages)
    assert run("--job", "job-1", "generate-stream", write(tmp_path, {"prompts": ["a"]})).code == 1


def test_operations_of_a_job(run: Any, service: Any) -> None:
    service.answers["POST", "/operation"] = {"ok": True}
    for arguments, operation, payload in (
        (["cancel-request", "r-9"], "cancel-request", {"request_id": "r-9"}),
        (["router-replay-discard", "a", "b"], "router-replay-discard", {"sample_ids": ["a", "b"]}),
        (
            ["bootstrap-router-replay", "--max-cache-bytes", "9"],
            "bootstrap-router-replay",
            {
                "source_sub_job_id": "job-1:sampling:0",
                "target_sub_job_id": "job-1:training:0",
                "max_cache_bytes": 9,
            },
        ),
        (
            ["reset-prefix-cache", "--no-drain", "--timeout", "5"],
            "reset-prefix-cache",
            {"drain": False, "timeout_s": 5.0, "retry_interval_s": 0.1},
        ),
        (["tail-logs", "--cursor", "c", "--max-lines", "5"], "tail-logs", {"cursor": "c", "max_lines": 5}),
    ):
        done = run("--job", "job-1", *arguments)
        assert done.document == {"ok": True}, done.err
        assert service.calls[-1].json["operation_type"] == operation
        assert service.calls[-1].json["payload"] == payload


def test_logs_can_be_followed_line_by_line(run: Any, service: Any) -> None:
    service.answer_in_turn(
        "POST",
        "/operation",
        [{"entries": [{"msg": "a"}, "b"], "next_cursor": "1"}, {"entries": [], "next_cursor": "1"}],
    )
    service.answers["GET", "/job-1"] = {"status": "cancelled"}
    done = run("tail-logs", "job-1", "--follow")
    assert [json.loads(line) for line in done.out.splitlines()] == [{"msg": "a"}, "b"]


def test_the_experiment_run_and_a_deleted_checkpoint(run: Any, service: Any) -> None:
    service.answers["GET", "/experiment-run"] = {"experiment_name": "E"}
    assert run("experiment-run", "job-1").document == {"experiment_name": "E"}
    service.answers["DELETE", "/checkpoints/cp_1"] = (204, None)
    done = run("--job", "job-1", "delete-checkpoint", "cp_1")
    assert done.document == {"checkpoint_id": "cp_1", "deleted": True, "job_id": "job-1"}


def test_jobs_can_be_listed_since_a_time(run: Any, service: Any) -> None:
    now = datetime.datetime.now(datetime.UTC)
    jobs = [
        {"job_id": "young", "created_at": (now - datetime.timedelta(hours=1)).isoformat()},
        {"job_id": "old", "created_at": "2026-01-01T00:00:00Z"},
        {"job_id": "undated"},
    ]
    service.answers["GET", ""] = {"jobs": jobs}

    def listed(*flags: str) -> list[str]:
        return [job["job_id"] for job in run("list", *flags).document["jobs"]]

    assert listed("--since", "2h") == ["young"]
    assert listed("--since", "2026-01-01T00:00:00") == ["old", "young"]
    assert listed("--all") == listed() == ["old", "young", "undated"]
    for wrong in (("--since", "yesterday"), ("--since", "99999999999d"), ("--all", "--status", "running")):
        done = run("list", *wrong)
        assert (done.code, done.out) == (2, "")


def test_a_missing_database_is_created_only_when_asked(run: Any, service: Any, tmp_path: Path) -> None:
    missing = (404, {"code": "517602", "message": "Database 'DB' does not exist or not authorized."})
    service.answers["POST", "/statements"] = {"data": []}
    service.answers["GET", "/job-1"] = missing
    assert run("get", "job-1").code == 1
    assert [call.method for call in service.calls] == ["GET"]
    service.answer_in_turn("GET", "/job-1", [missing, {"status": "running"}])
    assert run("--create-database", "get", "job-1").document == {"status": "running"}
    config = tmp_path / "connection.json"
    config.write_text(json.dumps({"base_url": service.url, "database": "DB", "create_database": True}))
    service.answer_in_turn("GET", "/job-1", [missing, {"status": "running"}])
    assert run("--config", str(config), "get", "job-1").code == 0


def test_a_terminal_shows_what_is_waited_for(service: Any, at_terminal: Any) -> None:
    """And standard output, where the JSON goes, shows nothing of it."""
    states = [{"status": "placing", "reason": "needs 8 GPUs"}] * 3 + [{"status": "running", "job_id": "job-1"}]
    service.answer_in_turn("GET", "/job-1", states)
    terminal = at_terminal("wait", "job-1")
    code, out = terminal.end()
    assert (code, json.loads(out)["status"]) == (0, "running")
    assert "job job-1: placing needs 8 GPUs" in terminal.said

    service.answer_in_turn("GET", "/requests/r-1", [{"status": "running"}, {"status": "done", "result": {"n": 1}}])
    terminal = at_terminal("--job", "job-1", "step")
    code, out = terminal.end()
    assert json.loads(out)["result"] == {"n": 1}
    assert "request r-1" in terminal.said


def test_a_file_behind_a_pipe_shows_nothing(run: Any, service: Any) -> None:
    service.answer_in_turn("GET", "/job-1", [{"status": "placing"}, {"status": "running"}])
    assert run("wait", "job-1").err == ""
