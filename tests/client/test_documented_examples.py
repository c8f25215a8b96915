"""What is written for the public client runs here unchanged: its documented examples, and its command line's walk.

Set CORTEX_TRAINING_PUBLIC_DOCS to a folder with the public repository's ``rest-api`` and ``python-sdk`` pages (as
Markdown or text) to have the code on them executed as it stands, with this account's names put in.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

_PROGRAMS = Path(__file__).parents[1] / "local"
"""Programs that the tests of the local service run with the public client."""
_DOCS = os.environ.get("CORTEX_TRAINING_PUBLIC_DOCS")


def ran(program: str, *arguments: str, folder: Path, **environment: str) -> Any:
    """What one of the programs printed, run with this client."""
    done = subprocess.run(
        [sys.executable, str(_PROGRAMS / program), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("example", ["loop", "lora"])
def test_the_documented_examples_run_to_their_end(local_service: Any, tmp_path: Path, example: str) -> None:
    place = {"HOST": local_service.base_url, "PAT": "any", "DATABASE": "DB", "SCHEMA": "PUBLIC"}
    answers = ran("documented_examples.py", example, folder=tmp_path, **place)
    assert answers["step_result"]["global_steps"] == 1
    assert answers["train_result"]["avg_loss"] > 0
    samples = answers["rollouts"] if example == "loop" else answers["result"]["results"]
    assert [type(sample["token_ids"]) for sample in samples] == [list]
    assert answers["synced"]["weight_format"] == ("vllm" if example == "loop" else "lora")
    if example == "loop":
        assert answers["loaded"]["global_steps"] == 1
        assert answers["sampler"]["sub_jobs"][0]["source_checkpoint_info"]["checkpoint_id"]


# The pages themselves


class Page:
    """The code on one page. A block begins with a line that is named and goes on while it is Python."""

    def __init__(self, name: str) -> None:
        [path] = [path for path in Path(_DOCS or "").iterdir() if path.stem == name]
        self._lines = path.read_text(encoding="utf-8").replace("```python", "```").split("\n")

    def code(self, heading: str, first: str) -> str:
        """The block below `heading` whose first line begins with `first`."""
        headings = [at for at, line in enumerate(self._lines) if line.lstrip("# ").startswith(heading)]
        begin = next(at for at in range(headings[-1], len(self._lines)) if self._lines[at].startswith(first))
        text = "\n".join(self._lines[begin:]).split("```")[0]
        paragraphs = text.split("\n\n")
        longest = 0
        for count in range(1, len(paragraphs) + 1):
            if not _is_python("\n\n".join(paragraphs[:count])):
                break
            longest = count
        assert longest, f"what begins with {first!r} below {heading!r} is not Python"
        return "\n\n".join(paragraphs[:longest])


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


@pytest.fixture
def pages() -> tuple[Page, Page]:
    if not _DOCS:
        pytest.skip("CORTEX_TRAINING_PUBLIC_DOCS is not set to a folder with rest-api.* and python-sdk.*")
    return Page("rest-api"), Page("python-sdk")


@pytest.fixture
def profile(local_service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection profile whose session leads to the local service; the connector itself needs an account."""

    class Connection:
        rest = types.SimpleNamespace(token="session-token", server_url=local_service.base_url)
        database, schema = "DB", "PUBLIC"

        def close(self) -> None:
            return None

    connector = types.ModuleType("snowflake.connector")
    connector.connect = lambda **arguments: Connection()  # type: ignore[attr-defined]
    package = types.ModuleType("snowflake")
    package.connector = connector  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "snowflake", package)
    monkeypatch.setitem(sys.modules, "snowflake.connector", connector)


@pytest.mark.public_client
def test_every_block_of_code_on_the_pages_runs_as_it_stands(
    pages: tuple[Page, Page], local_service: Any, profile: None
) -> None:
    torch = pytest.importorskip("torch")
    rest, sdk = pages
    ids = torch.arange(4, 4 + 8 * 32).view(8, 32)
    names: dict[str, Any] = {
        "HOST": local_service.base_url,
        "PAT": "any",
        "DATABASE": "DB",
        "SCHEMA": "PUBLIC",
        "input_ids": ids,
        "labels": ids.clone(),
    }

    def run(page: Page, heading: str, first: str, **ours: str) -> None:
        code = page.code(heading, first)
        for theirs, here in {"ACCOUNT.snowflakecomputing.com": local_service.base_url, **ours}.items():
            code = code.replace(theirs, here)
        exec(compile(code, f"{heading} {first}", "exec"), names)

    # The SDK's page: construction, events of one's own, payloads.
    run(sdk, "Python SDK Reference", "from cortex_training import")
    run(sdk, "Construct it with", "client = ")
    run(sdk, "Direct Programmatic Access Token", "client = ")
    names["job_id"] = "any"
    run(sdk, "Applications can emit", "client.emit_metric(")
    run(sdk, "Building payloads", "from cortex_training import")
    names["fwd_bwd_dssst1_frame"] = names["payload"]

    # The end-to-end examples, in their order.
    jobs = []
    try:
        run(rest, "13.1", "from cortex_training.client import")
        jobs.append(names["job_id"])
        run(rest, "13.2", "request_id = client.generate(")
        assert names["step_result"]["global_steps"] == 1
        run(rest, "13.3", "request_id = client.save(")
        names["training_job_id"] = names["job_id"]
        run(rest, "13.4", "request_id = client.save(")
        jobs.append(names["sampling_job_id"])
        names["client"].wait_for_job(names["sampling_job_id"])

        # Blocks of the sections before them, on the same job.
        run(rest, "6.1", "payload = serialize")
        assert names["result"]["avg_loss"] > 0
        names["batch"] = {"args": (), "kwargs": {"input_ids": ids, "labels": ids}}
        run(rest, "6.1", "from cortex_training import wire")
        names["client"].forward_backward(names["job_id"], names["payload"])
        names["source_job_id"] = names["job_id"]
        run(rest, "6.4", "request_id = client.load(", global_step12=names["checkpoint"]["checkpoint_id"])
        run(rest, "Discovering sub-job IDs", "job = client.get_job(")
        run(rest, "6.6", "request_id = client.generate(")
        assert len(names["client"].poll_request(names["job_id"], names["request_id"])["results"]) == 2
        names["request_id"] = names["client"].generate_stream(names["job_id"], ["Hello"])["request_id"]
        run(rest, "6.7", "status = client.get_request_status(")
        run(rest, "8.5", "training = ")
        names.update(value=names["batch"], metadata={"response_options": {"format": "dssst1"}})
        run(rest, "9.2", "from cortex_training import wire")
        assert names["metadata"] == {"response_options": {"format": "dssst1"}}
        run(rest, "9.3", "wire.encode_byte_chunks(")

        names["client"].cancel_job(jobs[0])
        run(rest, "13.5", "from cortex_training.client import")
        jobs.append(names["job_id"])
        assert names["result"]["results"][0]["token_ids"]
    finally:
        for job in jobs:
            names["client"].cancel_job(job)
