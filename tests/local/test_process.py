"""The service as a process: how it starts, what it prints, how it ends, what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cortex_training import CortexTrainingClient
from cortex_training.errors import AuthError
from tests.conftest import ServiceFactory
from tests.local.api import Caller, RunningJob, masked_frame, sampling, token_batch, training


def test_it_starts_without_torch(start_local_service: ServiceFactory) -> None:
    service = start_local_service()
    assert service.ready["event"] == "ready"
    assert service.ready["pid"] == service.pid
    assert service.base_url.startswith("http://127.0.0.1:")
    Caller(service.url).call("GET", "/capacity")
    assert "libtorch" not in Path(f"/proc/{service.pid}/maps").read_text()


def test_sigterm_ends_it_even_while_it_computes(start_local_service: ServiceFactory) -> None:
    service = start_local_service()
    job = Caller(service.url).running(sampling(config={"max_seq_len": 4096}, model_name="Qwen/Qwen3-8B"), training())
    asked = {"prompts": [[5]] * 64, "sampling_params": {"max_tokens": 4000, "ignore_eos": True}}
    job.call("POST", "/generate", json=asked)
    for _ in range(20):
        job.post_frame(masked_frame(token_batch(16, 128)))
    assert children_of(service.pid) == []
    assert service.stop() == 0


def test_an_interrupt_ends_it_too(start_local_service: ServiceFactory) -> None:
    service = start_local_service()
    service.process.send_signal(signal.SIGINT)
    assert service.process.wait(10) == 0


def children_of(pid: int) -> list[int]:
    return [int(one) for task in Path(f"/proc/{pid}/task").iterdir() for one in (task / "children").read_text().split()]


def test_what_is_left_after_a_kill(start_local_service: ServiceFactory) -> None:
    service = start_local_service(gpus=1)
    caller = Caller(service.url)
    cancelled = created(caller)
    cancelled.call("POST", ":cancel")
    ended = cancelled.describe()
    job = caller.running(training(), experiment_name="nightly")
    for seed in range(2):
        job.forward_backward(masked_frame(token_batch(seed=seed)), group_id=f"g-{seed}")
        job.step()
    checkpoint = job.save()
    expected = job.forward_backward(masked_frame(token_batch(seed=2)))["avg_loss"]
    waiting = created(caller)
    before = job.describe()
    service.kill()
    operations = [entry["op"] for entry in service.execution_log()]
    assert operations == [*["forward-backward", "step"] * 2, "save", "forward-backward"]
    # What a killed service was still writing.
    torn = service.data_dir / "checkpoints" / job.job_id / ".cp_torn.0123"
    (torn / "files").mkdir(parents=True)
    (torn / "checkpoint.json").write_text("{")

    caller = Caller(start_local_service(gpus=1).url)
    after = RunningJob(caller, job.job_id).describe()
    assert (after["status"], after["reason"]) == ("failed", "the service was restarted while the job was running")
    unchanged = ("job_id", "created_at", "experiment_name", "hardware", "idle_timeout_seconds")
    assert {name: after[name] for name in unchanged} == {name: before[name] for name in unchanged}
    assert after["sub_jobs"] == [{**before["sub_jobs"][0], "status": "failed"}]
    assert RunningJob(caller, waiting.job_id).describe()["status"] == "failed"
    assert RunningJob(caller, cancelled.job_id).describe() == ended
    listed = [one["job_id"] for one in caller.call("GET", "").json()["jobs"]]
    assert listed == [cancelled.job_id, job.job_id, waiting.job_id]
    refused = caller.call("POST", f"/{job.job_id}/step", json={})
    assert (refused.status_code, refused.json()["job_status"]) == (409, "failed")
    assert caller.create(job_id=job.job_id).status_code == 409
    [kept] = caller.call("GET", f"/{job.job_id}/checkpoints").json()["checkpoints"]
    assert kept["checkpoint_id"] == checkpoint
    assert caller.call("POST", f"/{job.job_id}/checkpoints/{checkpoint}:export").json()["files"]
    source = {"checkpoint_id": checkpoint, "source_job_id": job.job_id}
    successor = caller.running(training(source_checkpoint_info=source))
    assert successor.forward_backward(masked_frame(token_batch(seed=2)))["avg_loss"] == expected


def created(caller: Caller) -> RunningJob:
    return RunningJob(caller, caller.create().json()["job_id"])


def test_two_services_do_not_share_a_data_folder(start_local_service: ServiceFactory) -> None:
    service = start_local_service()
    second = run("serve", "--port", "0", "--data-dir", str(service.data_dir))
    assert (second.returncode, "in use by another service" in second.stderr) == (1, True)


def test_its_own_data_folder_goes_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cortex_training.local", "serve", "--port", "0", "--json-ready"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            data_dir = Path(json.loads(process.stdout.readline())["data_dir"])
            assert data_dir.is_dir()
            assert data_dir.is_relative_to(tmp_path)
        finally:
            process.terminate()
            process.wait(10)
    assert not data_dir.exists()


@pytest.mark.parametrize(("flag", "accepted"), [(None, "from-environment"), ("from-flag", "from-flag")])
def test_its_token_may_come_from_the_environment_and_the_flag_wins(
    start_local_service: ServiceFactory, monkeypatch: pytest.MonkeyPatch, flag: str | None, accepted: str
) -> None:
    monkeypatch.setenv("CORTEX_TRAINING_SERVE_TOKEN", "from-environment")
    service = start_local_service(**{"token": flag} if flag else {})
    statuses = {}
    for token in ("from-environment", "from-flag", "another"):
        with CortexTrainingClient.from_pat(service.base_url, token, "LOCAL", "PUBLIC") as client:
            try:
                statuses[token] = client.list_jobs()
            except AuthError:
                continue
    assert statuses == {accepted: []}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cortex_training.local", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_it_says_why_it_cannot_start(start_local_service: ServiceFactory, tmp_path: Path) -> None:
    port = start_local_service().base_url.rpartition(":")[2]
    taken = run("serve", "--port", port)
    assert (taken.returncode, port in taken.stderr) == (1, True)
    no_model = run("serve", "--port", "0", "--model", f"acme/x={tmp_path}")
    assert (no_model.returncode, "config.json" in no_model.stderr) == (1, True)
    no_question = run("serve", "--port", "0", "--assume", "weather=fine")
    assert (no_question.returncode, "accumulation" in no_question.stderr) == (1, True)
    no_answer = run("serve", "--port", "0", "--assume", "accumulation=maybe")
    assert (no_answer.returncode, "add, refuse" in no_answer.stderr) == (1, True)


def test_models_are_prepared_once(tmp_path: Path) -> None:
    """Two processes at once build one folder, and a third finds it."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "cortex_training.local", "models", "prepare", "tiny"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    folders = {process.communicate(timeout=60)[0].strip() for process in both}
    [folder] = folders
    built = (Path(folder) / "model.safetensors").stat()
    again = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=True)
    assert again.stdout.strip() == folder
    assert (Path(folder) / "model.safetensors").stat() == built
    assert sorted(path.name for path in Path(folder).parent.iterdir() if not path.name.endswith(".lock")) == [
        Path(folder).name
    ]
    unknown = run("models", "prepare", "gpt-17")
    assert (unknown.returncode, "smollm2-135m-instruct" in unknown.stderr) == (1, True)


def test_a_build_that_died_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cortex_training.local import models, tiny_model

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_tokenizer = tiny_model._write_tokenizer

    def dies(folder: Path) -> None:
        write_tokenizer(folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny_model, "_write_tokenizer", dies)
    with pytest.raises(KeyboardInterrupt):
        models.model_folder("tiny")
    monkeypatch.setattr(tiny_model, "_write_tokenizer", write_tokenizer)
    folder = models.model_folder("tiny")
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_polls_are_answered_while_it_trains(caller: Caller) -> None:
    """Training happens beside the event loop, not in it."""
    job = caller.running(training(config={"max_seq_len": 512}))
    reply = job.post_frame(masked_frame(token_batch(64, 512)))
    seen = []
    while not seen or seen[-1] in ("pending", "running"):
        seen.append(job.call("GET", f"/requests/{reply.json()['request_id']}").json()["status"])
        time.sleep(0.001)
    assert seen[-1] == "done"
    assert seen.count("running") > 3
