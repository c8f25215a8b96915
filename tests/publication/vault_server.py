"""A stand-in for a Vault server: the two logins, and reading a secret of the key-value store, version 2."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any


@dataclass
class VaultServer:
    """What it knows and what it was sent. `redirect_to`: every request is answered with a redirect there."""

    secrets: dict[str, dict[str, Any]] = field(default_factory=dict)
    role: str = "training"
    jwt: str = "the-service-account-token"
    role_id: str = "the-role-id"
    secret_id: str = "the-secret-id"
    token: str = "hvs.the-vault-token"
    redirect_to: str | None = None
    garbage: bool = False
    sealed: bool = False
    requests: list[tuple[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    port: int = 0


class VaultHandler(BaseHTTPRequestHandler):
    server_state: VaultServer

    def _serve(self) -> None:
        state = self.server_state
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        state.requests.append((self.command, self.path))
        state.headers.append(dict(self.headers))
        if state.redirect_to is not None:
            self._answer(307, {}, location=state.redirect_to + self.path)
        elif state.sealed:
            self._answer(503, {"errors": ["Vault is sealed"]})
        elif state.garbage:
            self._answer(200, ["not", "Vault's"])
        elif self.path.endswith("/login"):
            self._login(json.loads(body))
        elif self.headers.get("X-Vault-Token") != state.token:
            self._answer(403, {"errors": ["permission denied"]})
        elif self.path in state.secrets:
            self._answer(200, {"data": {"data": state.secrets[self.path], "metadata": {"version": 1}}})
        else:
            self._answer(404, {"errors": []})

    def _login(self, given: dict[str, str]) -> None:
        state = self.server_state
        if self.path == "/v1/auth/kubernetes/login":
            allowed, status = given == {"role": state.role, "jwt": state.jwt}, 403
        else:
            allowed, status = given == {"role_id": state.role_id, "secret_id": state.secret_id}, 400
        if allowed:
            self._answer(200, {"auth": {"client_token": state.token}})
        else:
            self._answer(status, {"errors": [f"denied: {given}"]})

    def _answer(self, status: int, document: object, location: str | None = None) -> None:
        content = json.dumps(document).encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if location is not None:
            self.send_header("Location", location)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = _serve

    def log_message(self, format: str, *args: Any) -> None:
        pass
