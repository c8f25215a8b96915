"""The page a person opens: what it tells, that it runs in a browser, and that nothing a caller named is markup."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import requests

from cortex_training.local.status import thinned
from tests.conftest import RunningService
from tests.local.api import Caller, RunningJob, masked_frame, sampling, token_batch, training

NAME = "nightly <img src=x onerror=document.title=1>"


@pytest.fixture(scope="module")
def job(local_service: RunningService) -> RunningJob:
    """A job that trained, saved, failed once, and has a name that wants to be markup."""
    job = Caller(local_service.url).running(training(), sampling(), experiment_name=NAME)
    for seed in range(3):
        job.forward_backward(masked_frame(token_batch(seed=seed)))
        job.step()
    job.save()
    job.poll(job.post_frame(masked_frame(token_batch(1, 300))))
    return job


def facts(service: RunningService, job_id: str = "") -> dict:
    reply = requests.get(f"{service.base_url}/status.json", params={"job": job_id}, timeout=60)
    assert reply.status_code == 200
    return dict(reply.json())


def test_it_tells_of_jobs_requests_losses_and_gpus(local_service: RunningService, job: RunningJob) -> None:
    told = facts(local_service, job.job_id)
    shown = told["job"]
    assert [number for number, _ in shown["losses"]] == [1, 2, 3]
    assert all(5 < loss < 8 for _, loss in shown["losses"])
    assert [one["operation"] for one in shown["requests"]] == [
        "forward-backward", "save", *["step", "forward-backward"] * 3
    ]  # fmt: skip
    assert (shown["requests"][0]["status"], "max_seq_len" in shown["requests"][0]["error"]) == ("failed", True)
    assert shown["requests"][2]["record"]["global_steps"] == 3
    assert [one["global_steps"] for one in shown["checkpoints"]] == [3]
    assert job.job_id in [one["job_id"] for one in told["jobs"]]
    assert told["gpus"]["H200"]["in_use_gpus"] >= 2
    assert told["gpu_history"]
    assert facts(local_service, "no such job")["job"] is None


def test_only_its_own_script_may_run(local_service: RunningService) -> None:
    reply = requests.get(f"{local_service.base_url}/", timeout=60)
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    # Nothing is fetched from anywhere else, and no text becomes markup.
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", reply.text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", reply.text)


def test_the_page_is_open_and_its_facts_are_not(contrary_service: RunningService) -> None:
    assert requests.get(f"{contrary_service.base_url}/", timeout=60).status_code == 200
    for path in ("/status.json", "/openapi.json"):
        assert requests.get(contrary_service.base_url + path, timeout=60).status_code == 401
        allowed = requests.get(contrary_service.base_url + path, headers={"authorization": "Bearer s3cret"}, timeout=60)
        assert allowed.status_code == 200


def test_a_browser_draws_it(local_service: RunningService, job: RunningJob, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine")
    drawn = subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--user-data-dir={tmp_path}", "--virtual-time-budget=5000", "--enable-logging=stderr", "--dump-dom",
            f"{local_service.base_url}/#{job.job_id}",
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    page = drawn.stdout
    assert "CONSOLE" not in drawn.stderr, drawn.stderr
    assert 'class="state ok" role="status">up ' in page
    assert job.job_id in page
    assert "nightly &lt;img src=x onerror=" in page
    assert "<img" not in page
    assert "<title>Cortex Training, local</title>" in page
    curve = re.search(r'aria-label="loss by forward-backward".*?class="curve" d="(M[^"]+)"', page)
    assert curve is not None
    assert curve[1].count("L") == 2
    assert "the sub-job's max_seq_len is 128" in page


def test_many_losses_are_thinned_to_means_of_neighbours() -> None:
    assert thinned([1.0, None, 3.0], 10) == [(1, 1.0), (3, 3.0)]
    assert thinned([float(at) for at in range(8)], 4) == [(1, 0.5), (3, 2.5), (5, 4.5), (7, 6.5)]
    assert thinned([None] * 8, 4) == []
    assert len(thinned([1.0] * 10_001, 400)) <= 400
