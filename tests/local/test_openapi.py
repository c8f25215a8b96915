"""The OpenAPI document tells the truth: every route is in it, and whatever is sent gets an answer that it describes."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

from cortex_training.local.app import build_app
from cortex_training.local.openapi import document
from cortex_training.local.service import Service
from cortex_training.local.settings import ServiceSettings
from tests.conftest import RunningService, ServiceFactory
from tests.local.api import Caller, RunningJob, chunks_of, masked_frame, sampling, token_batch, training

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
OPERATIONS = sorted(
    call["operationId"]
    for path in document("cortex-training", "0")["paths"].values()
    for method, call in path.items()
    if method in ("get", "post", "delete")
)
_PAGES = {"/", "/status.json", "/openapi.json"}


def frames() -> st.SearchStrategy[bytes]:
    """Bodies of binary calls: good frames, good chunks, both with bytes changed or cut off, and anything."""
    good = [masked_frame(token_batch(1, 8)), chunks_of(masked_frame(token_batch(1, 8)), group_id="fuzz")[0]]

    def spoiled(frame: bytes, at: int, value: int, cut: int) -> bytes:
        at %= len(frame)
        return (frame[:at] + bytes([value]) + frame[at + 1 :])[: len(frame) - cut]

    whole = st.sampled_from(good)
    changed = st.builds(spoiled, whole, st.integers(0, 10_000), st.integers(0, 255), st.sampled_from([0, 0, 1, 8, 100]))
    return st.one_of(st.binary(max_size=64), whole, changed)


schemathesis.openapi.media_type("application/octet-stream", frames())


def test_every_route_is_described_and_nothing_else(tmp_path: Any) -> None:
    service = Service(ServiceSettings(tmp_path))
    app = build_app(service)
    while not hasattr(app, "routes"):
        app = vars(app)["_app"]
    routes = {
        (re.sub(r":path}", "}", route.path.rstrip("/") or "/"), method.lower())
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    described = {
        (path, method)
        for path, item in document("cortex-training", "0")["paths"].items()
        for method in item
        if method in ("get", "post", "delete")
    }
    assert described == {(path, method) for path, method in routes if path not in _PAGES}
    service.stop()


def test_it_is_served_as_it_is(local_service: RunningService) -> None:
    served = requests.get(f"{local_service.base_url}/openapi.json", timeout=60).json()
    version = served["info"]["version"]
    assert served == document("cortex-training", version)
    schemathesis.openapi.from_dict(served).config.validate = True


@pytest.fixture(scope="module")
def job(local_service: RunningService) -> RunningJob:
    return Caller(local_service.url).running(training(), sampling())


def fuzz(service: RunningService, job: RunningJob, name: str, examples: int) -> None:
    """Send `examples` generated calls of one operation; most go to a job that runs."""
    schema = schemathesis.openapi.from_url(f"{service.base_url}/openapi.json")
    operation = schema.find_operation_by_id(name)
    generated = st.one_of(
        operation.as_strategy(generation_mode=GenerationMode.POSITIVE),
        operation.as_strategy(generation_mode=GenerationMode.NEGATIVE),
    )

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=examples < 100,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=generated, known=st.integers(0, 9))
    def run(case: Any, known: int) -> None:
        if known and case.path_parameters and "job_id" in case.path_parameters:
            case.path_parameters |= {"job_id": job.job_id, "database": "TESTS", "schema": "PUBLIC"}
            if "sub_job_configs" not in str(case.body):
                case.headers.pop("authorization", None)
        case.call_and_validate(base_url=service.base_url, checks=CHECKS, timeout=30)

    run()


@pytest.mark.parametrize("name", OPERATIONS)
def test_anything_that_is_sent_gets_a_described_answer(
    local_service: RunningService, job: RunningJob, name: str
) -> None:
    # The job itself would end with this one.
    target = Caller(local_service.url).running(training()) if name == "cancelJob" else job
    fuzz(local_service, target, name, 12)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", OPERATIONS)
def test_anything_at_length(start_local_service: ServiceFactory, name: str) -> None:
    service = start_local_service(gpus=4096)
    job = Caller(service.url).running(training(), sampling())
    fuzz(service, job, name, int(os.environ.get("FUZZ_EXAMPLES", "500")))
    assert service.process.poll() is None
