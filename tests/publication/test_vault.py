"""Credentials from Vault: the location decides, and nothing of the environment does."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from cortex_training.publication import CredentialsError
from cortex_training.publication.credentials import parse_sources, resolve
from cortex_training.publication.vault import parse_vault_location
from tests.publication.servers import free_port, serving, write_secret
from tests.publication.vault_server import VaultHandler, VaultServer

pytest.importorskip("hvac")

KEYS = {"access_key_id": "AKIATESTONLY", "secret_access_key": "hush-hush"}


@pytest.fixture
def vault() -> Iterator[VaultServer]:
    state = VaultServer(secrets={"/v1/secret/data/team/s3": dict(KEYS), "/v1/kv/two/data/s3": dict(KEYS)})
    with serving(type("Handler", (VaultHandler,), {"server_state": state})) as port:
        state.port = port
        yield state


@pytest.fixture
def approle(vault: VaultServer, tmp_path: Path) -> str:
    """The query of a location that logs in with an AppRole."""
    write_secret(tmp_path / "approle", role_id=vault.role_id, secret_id=f"{vault.secret_id}\n")
    return f"auth=approle&approle={tmp_path}/approle"


@pytest.fixture
def service_account(vault: VaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    token = tmp_path / "token"
    token.write_text(vault.jwt)
    monkeypatch.setattr("cortex_training.publication.vault.SERVICE_ACCOUNT_TOKEN", str(token))
    return token


def location(vault: VaultServer, query: str, path: str = "team/s3") -> str:
    return f"vault:http://127.0.0.1:{vault.port}/{path}?{query}"


def test_kubernetes_login(vault: VaultServer, service_account: Path) -> None:
    credentials, source = resolve(parse_sources(location(vault, "auth=kubernetes&role=training")))
    assert credentials.secret_access_key == "hush-hush"
    assert source == location(vault, "auth=kubernetes&role=training")
    assert vault.requests == [("POST", "/v1/auth/kubernetes/login"), ("GET", "/v1/secret/data/team/s3")]


def test_approle_login_and_another_mount(vault: VaultServer, approle: str) -> None:
    text = location(vault, f"{approle}&mount=kv%2Ftwo", "s3")
    assert resolve(parse_sources(text))[0].access_key_id == "AKIATESTONLY"
    assert vault.requests[-1] == ("GET", "/v1/kv/two/data/s3")


def test_an_absent_login_or_server_passes_to_the_next_source(
    vault: VaultServer, approle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cortex_training.publication.vault.SERVICE_ACCOUNT_TOKEN", str(tmp_path / "none"))
    nobody = f"vault:http://127.0.0.1:{free_port()}/s3?{approle}"
    proxied = location(vault, f"{approle}&proxy=http%3A%2F%2F127.0.0.1%3A{free_port()}")
    absent = [
        location(vault, "auth=kubernetes&role=training"),
        location(vault, f"auth=approle&approle={tmp_path}/absent"),
        nobody,
        proxied,
    ]
    good = write_secret(tmp_path / "good", **KEYS)
    assert resolve(parse_sources(",".join([*absent, good])))[1] == good
    with pytest.raises(CredentialsError) as raised:
        resolve(parse_sources(",".join(absent)))
    for source, reason in zip(
        absent, ("no service-account token", "no directory", "cannot be reached", "cannot be reached"), strict=True
    ):
        assert source in str(raised.value)
        assert reason in str(raised.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"secret_id": "another"}, "log in: Vault answered InvalidRequest"),
        ({"secrets": {}}, r"read secret secret/team/s3: Vault answered InvalidPath"),
        ({"secrets": {"/v1/secret/data/team/s3": {**KEYS, "extra": "x"}}}, "unknown field 'extra'"),
        ({"secrets": {"/v1/secret/data/team/s3": {**KEYS, "region": 5}}}, "field 'region' is not text"),
        ({"secrets": {"/v1/secret/data/team/s3": {"access_key_id": "x"}}}, "no field secret_access_key"),
        ({"sealed": True}, "log in: Vault answered VaultDown"),
        ({"garbage": True}, "log in: the answer is not Vault's"),
        ({"redirect_to": "http://127.0.0.1:1"}, "log in: the server redirects to another one"),
        ({"redirect_to": "//elsewhere.invalid"}, "log in: the server redirects to another one"),
    ],
)
def test_a_vault_that_is_there_but_wrong_stops_the_search(
    vault: VaultServer, approle: str, tmp_path: Path, change: dict[str, object], said: str
) -> None:
    for name, value in change.items():
        setattr(vault, name, value)
    text = location(vault, approle)
    with pytest.raises(CredentialsError) as raised:
        resolve(parse_sources(f"{text},{write_secret(tmp_path / 'good', **KEYS)}"))
    assert str(raised.value).startswith(f"credentials: {text}: ")
    assert said in str(raised.value)
    for hidden in (vault.secret_id, "the-secret-id", vault.token, "hush-hush"):
        assert hidden not in str(raised.value)


def test_a_denied_kubernetes_login_stops_the_search(vault: VaultServer, service_account: Path) -> None:
    with pytest.raises(CredentialsError, match="log in: Vault answered Forbidden"):
        resolve(parse_sources(location(vault, "auth=kubernetes&role=other")))
    service_account.write_text("")
    with pytest.raises(CredentialsError, match="token is empty"):
        resolve(parse_sources(location(vault, "auth=kubernetes&role=training")))


def test_an_open_or_incomplete_approle_directory_stops_the_search(
    vault: VaultServer, approle: str, tmp_path: Path
) -> None:
    (tmp_path / "approle").chmod(0o755)
    with pytest.raises(CredentialsError, match="open to group or others"):
        resolve(parse_sources(location(vault, approle)))
    (tmp_path / "approle").chmod(0o700)
    (tmp_path / "approle" / "secret_id").unlink()
    with pytest.raises(CredentialsError, match="no file secret_id"):
        resolve(parse_sources(location(vault, approle)))
    assert vault.requests == []


def test_the_environment_decides_nothing(vault: VaultServer, approle: str, tmp_path: Path) -> None:
    """In a process of its own: hvac reads some of its variables when it is imported."""
    nowhere = f"http://127.0.0.1:{free_port()}"
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login someone password netrc-password\n")
    netrc.chmod(0o600)
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "NETRC": str(netrc),
        "VAULT_ADDR": nowhere,
        "VAULT_AGENT_ADDR": nowhere,
        "VAULT_TOKEN": "environment-token",
        "VAULT_NAMESPACE": "environment-namespace",
        "VAULT_SKIP_VERIFY": "not a boolean",
        "VAULT_CACERT": "/no/such/file",
        "VAULT_CAPATH": "/no/such/folder",
        "VAULT_CLIENT_CERT": "/no/such/cert",
        "VAULT_CLIENT_KEY": "/no/such/key",
        "VAULT_HEADERS": "{{",
        "VAULT_WRAP_TTL": "5m",
        "HTTP_PROXY": nowhere,
        "http_proxy": nowhere,
        "HTTPS_PROXY": nowhere,
        "ALL_PROXY": nowhere,
        "REQUESTS_CA_BUNDLE": "/no/such/file",
        "CURL_CA_BUNDLE": "/no/such/file",
    }
    (tmp_path / ".vault-token").write_text("file-token")
    code = (
        "import sys; from cortex_training.publication.credentials import parse_sources, resolve\n"
        "print(resolve(parse_sources(sys.argv[1]))[1])"
    )
    text = location(vault, approle)
    result = subprocess.run(
        [sys.executable, "-c", code, text], env=environment, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (0, f"{text}\n"), result.stderr
    sent = repr(vault.headers)
    for hidden in ("environment-token", "file-token", "environment-namespace", "netrc-password", "Basic", "Wrap"):
        assert hidden not in sent
    assert "X-Vault-Token" not in vault.headers[0]


def test_a_proxy_is_used_for_every_request(vault: VaultServer, approle: str) -> None:
    """The stand-in is its own proxy: a proxied request names the whole URL."""
    proxy = quote(f"http://127.0.0.1:{vault.port}", safe="")
    with pytest.raises(CredentialsError):
        resolve(parse_sources(f"vault:http://localhost:1/team/s3?{approle}&proxy={proxy}"))
    assert vault.requests[0] == ("POST", "http://localhost:1/v1/auth/approle/login")


def test_secrets_reach_no_log(vault: VaultServer, approle: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    resolve(parse_sources(location(vault, approle)))
    for hidden in (vault.secret_id, vault.token, "hush-hush"):
        assert hidden not in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        "https://vault/s3",
        "https://vault/s3?auth=token",
        "https://vault/s3?auth=kubernetes",
        "https://vault/s3?auth=kubernetes&role=r&approle=/x",
        "https://vault/s3?auth=approle&role=r",
        "https://vault/s3?auth=approle&approle=/x&role=r",
        "https://vault/s3?auth=kubernetes&role=",
        "https://vault/s3?auth=kubernetes&role",
        "https://vault/s3?auth=kubernetes&role=a&role=b",
        "https://vault/s3?auth=kubernetes&role=a&",
        "https://vault/s3?auth=kubernetes&role=a&namespace=x",
        "https://vault/s3?auth=kubernetes&role=%zz",
        "https://vault/s3?auth=kubernetes&role=%",
        "https://vault/s3?auth=kubernetes;role=a",
        "https://vault/s3?auth=kubernetes&role=a#x",
        "https://vault/s%3?auth=kubernetes&role=a",
        "https://vault/?auth=kubernetes&role=a",
        "https://vault?auth=kubernetes&role=a",
        "https://vault/../sys?auth=kubernetes&role=a",
        "https://vault/a%2F..%2Fb?auth=kubernetes&role=a",
        "https://vault/s3?auth=kubernetes&role=a&mount=../sys",
        "https://user:hush-hush@vault/s3?auth=kubernetes&role=a",
        "https://vault:port/s3?auth=kubernetes&role=a",
        "https://vault/s3?auth=kubernetes&role=a&proxy=http%3A%2F%2Fu%3Ahush-hush%40proxy",
        "https://vault/s3?auth=kubernetes&role=a&proxy=socks5%3A%2F%2Fproxy",
        "http://vault.example/s3?auth=kubernetes&role=a",
        "vault.example/s3?auth=kubernetes&role=a",
        "ftp://vault/s3?auth=kubernetes&role=a",
    ],
)
def test_locations_that_are_refused(text: str) -> None:
    with pytest.raises(CredentialsError, match=r"^credentials: vault:") as raised:
        parse_vault_location(text)
    assert "hush-hush" not in str(raised.value)


def test_a_missing_ca_file_is_named(vault: VaultServer, approle: str) -> None:
    with pytest.raises(CredentialsError, match=r"ca=/no/such/ca\.pem"):
        resolve(parse_sources(location(vault, f"{approle}&ca=/no/such/ca.pem")))
