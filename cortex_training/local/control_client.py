"""The Python handle of the control port, for tests, demonstrations and benchmarks. Client code has no use for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

import requests

_REQUEST_S = 30.0


class ControlError(RuntimeError):
    """The control port refused; the message is its own."""


class ServiceControl:
    """Asks one service's control port; `url` and `token` are `control_url` and `control_token` of its ready line."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self._token = token

    def __repr__(self) -> str:
        return f"ServiceControl({self.url!r})"

    @classmethod
    def of(cls, ready: Mapping[str, Any]) -> ServiceControl:
        """Raises ControlError when the service was started without `--faults`."""
        if not ready.get("control_url"):
            raise ControlError("the service has no control port; start it with --faults FILE")
        return cls(ready["control_url"], ready["control_token"])

    def add(self, action: str, **fields: Any) -> str:
        """Add a rule, and return its name: ``add("drop", on="step", when="after", skip=2)``."""
        return str(self._call("POST", "/rules", {"action": action, **fields})["rules"][0]["name"])

    def add_all(self, rules: list[dict[str, Any]]) -> list[str]:
        """Add rules, all or none."""
        return [rule["name"] for rule in self._call("POST", "/rules", {"rules": rules})["rules"]]

    def rules(self) -> dict[str, dict[str, Any]]:
        """By name: `seen`, `fired`, `holding` and the `rule` itself."""
        return {rule["name"]: rule for rule in self._call("GET", "/rules")["rules"]}

    def fired(self, name: str) -> int:
        return int(self._call("GET", f"/rules/{quote(name)}")["fired"])

    def remove(self, name: str) -> None:
        self._call("DELETE", f"/rules/{quote(name)}")

    def clear(self) -> None:
        """Remove all rules, and let go of everything that is held back."""
        self._call("DELETE", "/rules")

    def release(self, name: str) -> int:
        """Let go of the replies that a rule holds back now. Returns how many."""
        return int(self._call("POST", f"/rules/{quote(name)}:release", {})["released"])

    def wait_until_fired(self, name: str, times: int = 1, timeout_s: float = 60.0) -> None:
        """Return when the rule has fired so often. Raises TimeoutError."""
        self._wait(name, "fired", times, timeout_s)

    def wait_until_holding(self, name: str, replies: int = 1, timeout_s: float = 60.0) -> None:
        """Return when the rule holds back so many replies. Raises TimeoutError."""
        self._wait(name, "holding", replies, timeout_s)

    def act(self, action: str, job_id: str | None = None, **options: Any) -> None:
        """Let something happen at once: ``act("restart-worker", job_id, loses="gradients")``."""
        named = {} if job_id is None else {"job_id": job_id}
        self._call("POST", "/actions", {"action": action, **named, **options})

    def executions(self, job_id: str | None = None) -> list[dict[str, Any]]:
        """What was really executed so far, in order; of one job, or of all."""
        return [entry for entry in self._entries() if job_id in (None, entry["job_id"])]

    def executions_since(self, offset: int) -> tuple[list[dict[str, Any]], int]:
        """The next entries, and the offset after them; 0 is the beginning."""
        page = self._call("GET", f"/executions?offset={offset}")
        return page["entries"], page["next_offset"]

    def busy(self, job_id: str) -> dict[str, Any]:
        """`busy_s`, in seconds, and by operation `count` and `busy_s`."""
        return dict(self._call("GET", f"/jobs/{quote(job_id)}"))

    def busy_jobs(self) -> list[dict[str, Any]]:
        return list(self._call("GET", "/jobs")["jobs"])

    def _entries(self) -> Iterator[dict[str, Any]]:
        offset = 0
        while True:
            entries, after = self.executions_since(offset)
            if after == offset:
                return
            yield from entries
            offset = after

    def _wait(self, name: str, count: str, least: int, timeout_s: float) -> None:
        described = self._call(
            "GET", f"/rules/{quote(name)}?{count}={least}&timeout_s={timeout_s}", timeout_s=timeout_s
        )
        if described[count] < least:
            raise TimeoutError(
                f"rule {name!r}: {count} is {described[count]} after {timeout_s:g} s, not {least}; it has met "
                f"{described['seen']} requests"
            )

    def _call(self, method: str, path: str, body: Any = None, timeout_s: float = 0.0) -> Any:
        answer = requests.request(
            method,
            self.url + path,
            json=body,
            headers={"authorization": f"Bearer {self._token}"},
            timeout=_REQUEST_S + timeout_s,
        )
        if answer.status_code >= 400:
            raise ControlError(f"{method} {path}: {answer.status_code}: {answer.text[:2000]}")
        return answer.json() if answer.content else None
