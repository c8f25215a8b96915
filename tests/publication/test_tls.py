"""Stores and Vaults over TLS: what is trusted is decided by the library's own authorities and by ``ca=``.

No variable adds an authority, and none takes one away.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import requests

from cortex_training.publication import CredentialsError, PublicationLog, StoreError, open_store
from cortex_training.publication.command import main
from cortex_training.publication.credentials import parse_sources, resolve
from tests.publication.certificates import Authority
from tests.publication.servers import (
    FaultHandler,
    FaultProxy,
    S3Server,
    TunnelHandler,
    free_port,
    put_save,
    serving,
    write_secret,
)
from tests.publication.vault_server import VaultHandler, VaultServer

VARIABLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "VAULT_CACERT", "VAULT_CAPATH")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.made(tmp_path_factory.mktemp("authority"), "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.made(tmp_path_factory.mktemp("stranger"), "theirs")


@pytest.fixture
def built_in(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """The authority is among those that came with the library; private ones are added there."""
    monkeypatch.setattr("botocore.httpsession.where", lambda: str(authority.pem))


def set_all(monkeypatch: pytest.MonkeyPatch, value: object) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, str(value))


@pytest.fixture
def named_by_the_environment(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, authority.pem)


@pytest.fixture
def front(s3_server: S3Server, authority: Authority) -> Iterator[FaultProxy]:
    """The S3 server behind TLS."""
    proxy = FaultProxy(s3_server.port)
    with serving(type("Handler", (FaultHandler,), {"proxy": proxy}), tls=authority.server()) as port:
        proxy.port = port
        yield proxy


@pytest.fixture
def tls_creds(s3_server: S3Server, front: FaultProxy, tmp_path: Path) -> str:
    return write_secret(
        tmp_path / "tls",
        access_key_id=s3_server.access_key_id,
        secret_access_key=s3_server.secret_access_key,
        endpoint=f"https://127.0.0.1:{front.port}",
    )


@pytest.mark.usefixtures("built_in")
@pytest.mark.parametrize("wrong", ["/no/such/file", "", "stranger"])
def test_no_variable_takes_trust_in_a_store_away(
    s3_root: str, tls_creds: str, stranger: Authority, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    set_all(monkeypatch, stranger.pem if wrong == "stranger" else wrong)
    monkeypatch.setenv("SSL_CERT_DIR", "/no/such/folder")
    log = PublicationLog(open_store(s3_root, tls_creds, timeout_s=20))
    entry, created = log.publish(put_save(log.store, "exec/a/1"), 1, 1)
    assert created
    assert log.latest() == entry


@pytest.mark.usefixtures("named_by_the_environment")
def test_no_variable_makes_a_store_trusted(s3_root: str, tls_creds: str, front: FaultProxy) -> None:
    # Whoever listens to these variables does trust it:
    requests.head(f"https://127.0.0.1:{front.port}/", timeout=20)
    with (
        socket.create_connection(("127.0.0.1", front.port), 20) as plain,
        ssl.create_default_context().wrap_socket(plain, server_hostname="127.0.0.1"),
    ):
        front.seen.clear()
    with pytest.raises(StoreError, match=r"TLS failed: .*certificate verify failed"):
        open_store(s3_root, tls_creds, timeout_s=20).names("pub")
    assert front.seen == []


@pytest.mark.usefixtures("built_in")
def test_a_certificate_for_another_host_is_refused(
    s3_root: str, s3_server: S3Server, authority: Authority, tmp_path: Path
) -> None:
    proxy = FaultProxy(s3_server.port)
    handler = type("Handler", (FaultHandler,), {"proxy": proxy})
    with serving(handler, tls=authority.server("127.0.0.2")) as port:
        source = write_secret(
            tmp_path / "c", access_key_id="x", secret_access_key="x", endpoint=f"https://127.0.0.1:{port}"
        )
        with pytest.raises(StoreError, match="TLS failed"):
            open_store(s3_root, source, timeout_s=20).names("pub")
    assert proxy.seen == []


@pytest.mark.usefixtures("built_in")
def test_a_proxy_tunnels_to_a_store(
    s3_root: str, tls_creds: str, front: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that is named, and not the environment's."""
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("NO_PROXY", "*")
    tunnels: list[str] = []
    with serving(type("Handler", (TunnelHandler,), {"tunnels": tunnels})) as port:
        proxy = f"http://127.0.0.1:{port}"
        assert main(["probe", "-checkpoint", s3_root, "-creds", tls_creds, "-proxy", proxy, "-timeout", "20s"]) == 0
    assert set(tunnels) == {f"127.0.0.1:{front.port}"}
    assert any("/pub/" in path or "pub%2F" in path for _, path, _ in front.seen)


# --- Vault ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def vault(authority: Authority) -> Iterator[VaultServer]:
    state = VaultServer(secrets={"/v1/secret/data/s3": {"access_key_id": "x", "secret_access_key": "y"}})
    with serving(type("Handler", (VaultHandler,), {"server_state": state}), tls=authority.server()) as port:
        state.port = port
        yield state


@pytest.fixture
def location(vault: VaultServer, tmp_path: Path) -> str:
    write_secret(tmp_path / "approle", role_id=vault.role_id, secret_id=vault.secret_id)
    return f"vault:https://127.0.0.1:{vault.port}/s3?auth=approle&approle={tmp_path}/approle"


def test_ca_makes_a_vault_trusted_whatever_the_variables_say(
    location: str, authority: Authority, stranger: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"{location}&ca={authority.pem}"
    for wrong in ("/no/such/file", stranger.pem):
        set_all(monkeypatch, wrong)
        assert resolve(parse_sources(source))[1] == source


@pytest.mark.usefixtures("named_by_the_environment")
def test_no_variable_makes_a_vault_trusted(vault: VaultServer, location: str, tmp_path: Path) -> None:
    good = write_secret(tmp_path / "good", access_key_id="x", secret_access_key="y")
    with pytest.raises(CredentialsError, match="log in: the server's certificate is not trusted"):
        resolve(parse_sources(f"{location},{good}"))
    assert vault.requests == []


def test_another_authority_or_none_at_all_in_the_file_stops_the_search(
    vault: VaultServer, location: str, stranger: Authority, tmp_path: Path
) -> None:
    (tmp_path / "garbage.pem").write_text("garbage")
    for ca in (stranger.pem, tmp_path / "garbage.pem"):
        with pytest.raises(CredentialsError, match="the server's certificate is not trusted"):
            resolve(parse_sources(f"{location}&ca={ca}"))
    assert vault.requests == []


def test_a_proxy_tunnels_to_a_vault(
    vault: VaultServer, location: str, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("NO_PROXY", "*")
    tunnels: list[str] = []
    with serving(type("Handler", (TunnelHandler,), {"tunnels": tunnels})) as port:
        proxy = quote(f"http://127.0.0.1:{port}", safe="")
        resolve(parse_sources(f"{location}&ca={authority.pem}&proxy={proxy}"))
    assert set(tunnels) == {f"127.0.0.1:{vault.port}"}
