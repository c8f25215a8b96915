"""The control port: who gets in, what it tells, and that it is not there unless asked for."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import requests

from cortex_training.local.control_client import ControlError, ServiceControl
from tests.conftest import RunningService, ServiceFactory
from tests.local.api import Caller, training


def listening_ports(pid: int) -> list[str]:
    """Addresses that a process listens on, as ``address:port`` in hexadecimal."""
    inodes = {
        match[1]
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if link.is_symlink() and (match := re.match(r"socket:\[(\d+)\]", str(link.readlink())))
    }
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return sorted(row[1] for row in rows if row[3] == "0A" and row[9] in inodes)


def test_without_faults_there_is_no_control_port(start_local_service: ServiceFactory) -> None:
    service = start_local_service()
    assert (service.ready["control_url"], service.ready["control_token"]) == (None, None)
    assert len(listening_ports(service.pid)) == 1
    with pytest.raises(ControlError, match="start it with --faults"):
        _ = service.control
    assert requests.get(f"{service.base_url}/rules", timeout=10).status_code == 404


def test_it_listens_on_loopback_whatever_the_service_does(start_local_service: ServiceFactory) -> None:
    service = start_local_service(host="0.0.0.0", faults=[])
    loopback, everywhere = "0100007F", "00000000"
    port = int(service.ready["control_url"].rpartition(":")[2])
    addresses = listening_ports(service.pid)
    assert f"{loopback}:{port:04X}" in addresses
    assert [one.split(":")[0] for one in addresses].count(everywhere) == 1
    assert service.control.rules() == {}


def test_the_token_is_needed(weathered_service: RunningService) -> None:
    url, token = (weathered_service.ready[name] for name in ("control_url", "control_token"))
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {token}"}):
        assert requests.get(f"{url}/rules", headers=headers, timeout=10).status_code == 401
    assert requests.get(f"{url}/rules", headers={"authorization": f"Bearer {token}"}, timeout=10).status_code == 200
    assert token not in Path(f"/proc/{weathered_service.pid}/cmdline").read_text()
    assert token not in weathered_service.stderr_path.read_text()
    assert token not in repr(weathered_service.control)
    assert requests.get(f"{weathered_service.base_url}/rules", timeout=10).status_code == 404


def test_a_page_of_another_site_does_not_get_in(weathered_service: RunningService) -> None:
    url, token = (weathered_service.ready[name] for name in ("control_url", "control_token"))
    headers = {"authorization": f"Bearer {token}"}
    answer = requests.get(f"{url}/rules", headers={**headers, "host": "evil.example"}, timeout=10)
    assert answer.status_code == 421
    plain = {**headers, "content-type": "text/plain"}
    assert requests.post(f"{url}/rules", data='{"action": "drop"}', headers=plain, timeout=10).status_code == 415


def test_bad_requests_are_refused_by_field(control: ServiceControl, weathered_service: RunningService) -> None:
    with pytest.raises(ControlError, match=r"400.*rules\[0\]\.seconds: is missing"):
        control.add("delay")
    with pytest.raises(ControlError, match=r"rules\[1\]\.action"):
        control.add_all([{"action": "drop"}, {"action": "flood"}])
    with pytest.raises(ControlError, match="404"):
        control.remove("unknown")
    with pytest.raises(ControlError, match="404"):
        control.release("unknown")
    with pytest.raises(ControlError, match=r"400.*offset"):
        control.executions_since(-1)
    assert control.rules() == {}
    headers = {
        "authorization": f"Bearer {weathered_service.ready['control_token']}",
        "content-type": "application/json",
    }
    for body in ("{", "[]", "3"):
        answer = requests.post(f"{control.url}/rules", data=body, headers=headers, timeout=10)
        assert answer.status_code == 400, answer.text


def test_rules_are_listed_counted_and_removed(control: ServiceControl, weathered: Caller) -> None:
    names = control.add_all(
        [
            {"action": "delay", "seconds": 0, "on": "capacity", "times": 2},
            {"name": "x y", "action": "drop", "on": "step"},
        ]
    )
    for _ in range(3):
        weathered.call("GET", "/capacity")
    rules = control.rules()
    assert list(rules) == names == ["rule-1", "x y"]
    assert (rules["rule-1"]["seen"], rules["rule-1"]["fired"], rules["x y"]["seen"]) == (3, 2, 0)
    control.wait_until_fired("rule-1", 2)
    with pytest.raises(TimeoutError, match=r"rule .x y.: fired is 0 after 0\.1 s, not 1; it has met 0 requests"):
        control.wait_until_fired("x y", timeout_s=0.1)
    control.remove("x y")
    assert list(control.rules()) == ["rule-1"]
    control.clear()
    assert control.rules() == {}


def test_the_execution_log_is_read_from_an_offset(
    control: ServiceControl, weathered: Caller, weathered_service: RunningService
) -> None:
    before = control.executions()
    _, offset = control.executions_since(len((weathered_service.log_path).read_bytes()))
    job = weathered.running(training())
    job.step()
    entries, after = control.executions_since(offset)
    assert [(one["op"], one["job_id"], one["global_steps"]) for one in entries] == [("step", job.job_id, 1)]
    assert control.executions_since(after) == ([], after)
    assert control.executions() == [*before, *entries] == weathered_service.execution_log()


def test_without_a_file_the_execution_log_is_in_the_data_folder(tmp_path: Path) -> None:
    faults = tmp_path / "calm.toml"
    faults.write_text("")
    command = [sys.executable, "-m", "cortex_training.local", "serve", "--port", "0", "--json-ready", "--simulate", "0"]
    command += ["--faults", str(faults), "--data-dir", str(tmp_path / "data")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            url = f"{ready['base_url']}/api/v2/databases/D/schemas/S/cortex-training"
            Caller(url).running(training()).step()
            assert [one["op"] for one in ServiceControl.of(ready).executions()] == ["step"]
            assert Path(ready["execution_log"]).is_relative_to(tmp_path / "data")
        finally:
            process.terminate()
            process.wait(10)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--faults", "{tmp}/bad.json"], "bad.json: rules[0].action: must be one of"),
        (["--faults", "{tmp}/none.json"], "No such file"),
        (["--simulate", "step:mean=1"], "--simulate: durations.step.mean: is not known"),
        (["--faults", "{tmp}/calm.json", "--control-port", "{taken}"], "choose another --control-port"),
    ],
)
def test_what_cannot_be_started_says_why(tmp_path: Path, options: list[str], said: str) -> None:
    (tmp_path / "bad.json").write_text('{"rules": [{"action": "snow"}]}')
    (tmp_path / "calm.json").write_text("{}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        filled = [one.format(tmp=tmp_path, taken=taken.getsockname()[1]) for one in options]
        command = [sys.executable, "-m", "cortex_training.local", "serve", "--port", "0", *filled]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_stop_does_not_wait_for_held_replies(start_local_service: ServiceFactory) -> None:
    service = start_local_service(faults=[{"action": "hang", "on": "capacity"}], simulate="0")
    with pytest.raises(requests.ReadTimeout):
        requests.get(f"{service.url}/capacity", timeout=0.2)
    with socket.create_connection(("127.0.0.1", int(service.base_url.rpartition(":")[2]))) as held:
        path = service.url.removeprefix(service.base_url)
        service.control.add("hang", on="capacity")
        held.sendall(f"GET {path}/capacity HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        service.control.wait_until_holding("rule-2")
        assert service.stop() == 0
