"""Credentials, proxies, netrc and TLS: what is configured is what happens, in both transports."""

from __future__ import annotations

import datetime
import ipaddress
import select
import socket
import ssl
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from cortex_training import CortexTrainingClient
from cortex_training._network import proxy_for
from cortex_training.errors import ConfigurationError, TransportError
from cortex_training.publication import download_checkpoint

PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
UNUSABLE = (
    "http://user:hidden-word@proxy.example:99999",
    "user:hidden-word@proxy.example",
    "http://user:hidden-word@",
    "http://",
    "http://:3128",
    ":3128",
    "socks5://user:hidden-word@proxy.example",
    "http://proxy.example/hidden-word",
)
BUNDLE_VARIABLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*PROXY_VARIABLES, *(name.lower() for name in PROXY_VARIABLES), *BUNDLE_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))


def test_the_token_is_sent_with_its_type(clients: Any, weather: Any, scripted: Any) -> None:
    weather.sequence(scripted.Reply(body={"jobs": []}))
    clients.from_pat(weather.url).list_jobs()
    assert weather.seen[0].headers["authorization"] == "Bearer secret-token-value"
    assert weather.seen[0].headers["x-snowflake-authorization-token-type"] == "PROGRAMMATIC_ACCESS_TOKEN"


@pytest.mark.parametrize("suffix", ["", "/", "//"])
def test_a_host_may_be_a_url_with_scheme_and_port(clients: Any, weather: Any, scripted: Any, suffix: str) -> None:
    weather.sequence(scripted.Reply(body={"jobs": []}))
    clients.from_pat(weather.url + suffix).list_jobs()
    assert weather.seen[0].target == "/api/v2/databases/DB/schemas/PUBLIC/cortex-training"


def test_a_host_name_means_https(clients: Any) -> None:
    assert clients.from_pat("account.snowflakecomputing.com").base_url == "https://account.snowflakecomputing.com"
    with pytest.raises(ConfigurationError, match="host"):
        clients.from_pat("")


def test_netrc_never_replaces_the_token(
    clients: Any, weather: Any, scripted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login mallory password other\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    weather.sequence(scripted.Reply(body={"jobs": []}))
    clients.from_pat(weather.url).list_jobs()
    clients(weather.url).list_jobs()
    assert weather.seen[0].headers["authorization"] == "Bearer secret-token-value"
    assert "authorization" not in weather.seen[1].headers


def test_a_proxy_from_the_environment_is_used(
    clients: Any, weather: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", weather.url)
    weather.sequence(scripted.Reply(body={"jobs": []}))
    clients("http://service.invalid").list_jobs()
    assert weather.seen[0].target.startswith("http://service.invalid/api/v2/")


def test_no_proxy_is_obeyed(clients: Any, weather: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    weather.sequence(scripted.Reply(body={"jobs": []}))
    assert clients(weather.url).list_jobs() == []


def test_a_configured_proxy_wins(clients: Any, weather: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "service.invalid")
    weather.sequence(scripted.Reply(body={"request_id": "r"}))
    assert clients("http://service.invalid", proxy=weather.url).step("j") == "r"


def test_a_proxy_that_is_not_there_means_that_nothing_was_sent(clients: Any, weather: Any) -> None:
    client = clients(weather.url, proxy="http://127.0.0.1:9", retry_budget_s=0.0)
    with pytest.raises(TransportError) as caught:
        client.step("j")
    assert caught.value.sent is False


@pytest.mark.parametrize(
    "proxy",
    [
        "http://user:hidden-word@proxy.example:99999",
        "http://user:hidden-word@proxy.example:port",
        "http://user:hidden-word@[proxy",
        "http://user:hidden-word@",
        "http://user:hidden-word/@proxy.example:3128",
        "http://user:80/hidden-word@proxy.example:3128",
        "http://user:80#hidden-word@proxy.example:3128",
        "http://user:hidden-word@proxy example:3128",
        "socks5://user:hidden-word@proxy.example:1080",
        "user:hidden-word@proxy.example:3128",
    ],
)
def test_a_proxy_that_is_no_url_is_refused_and_not_shown(clients: Any, proxy: str) -> None:
    with pytest.raises(ConfigurationError, match="proxy: must be a URL like") as caught:
        clients("https://service.invalid", proxy=proxy)
    assert "hidden-word" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "address", ["https://user:hidden-word@[host", "https://host?token=hidden-word", "https://host:hidden-word"]
)
def test_an_address_with_a_secret_in_it_is_refused_and_not_shown(clients: Any, address: str) -> None:
    with pytest.raises(ConfigurationError, match="base_url") as caught:
        clients(address)
    assert "hidden-word" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("proxy", UNUSABLE)
def test_a_proxy_of_the_environment_that_cannot_be_used_is_not_shown(
    clients: Any, monkeypatch: pytest.MonkeyPatch, scheme: str, proxy: str
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(ConfigurationError, match="ALL_PROXY") as caught:
        clients(f"{scheme}://service.invalid").list_jobs()
    assert "hidden-word" not in "".join(traceback.format_exception(caught.value))


def test_a_proxy_that_refuses_does_not_make_its_password_known(clients: Any, weather: Any, scripted: Any) -> None:
    weather.sequence(scripted.Reply(status=407))
    proxy = weather.url.replace("http://", "http://user:hidden-word@")
    with pytest.raises(TransportError, match="407") as caught:
        clients("https://service.invalid", proxy=proxy, retry_budget_s=0.0).list_jobs()
    assert caught.value.sent is False
    assert "hidden-word" not in "".join(traceback.format_exception(caught.value))


class Certificates:
    """A certificate for 127.0.0.1 that is its own authority, and another one."""

    def __init__(self, folder: Path) -> None:
        self.own = folder / "own.pem"
        self.other = folder / "other.pem"
        for path in (self.own, self.other):
            path.write_bytes(_self_signed())


def _self_signed() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private + certificate.public_bytes(serialization.Encoding.PEM)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def secure(certificates: Certificates, scripted: Any) -> Iterator[Any]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.own)
    server = scripted.Weather(tls=context)
    server.sequence(scripted.Reply(body={"request_id": "r"}))
    yield server
    server.stop()


def test_an_unknown_certificate_is_refused_before_anything_is_sent(clients: Any, secure: Any) -> None:
    client = clients(secure.url, retry_budget_s=0.0)
    with pytest.raises(TransportError, match=r"(?i)certificate") as caught:
        client.step("j")
    assert caught.value.sent is False
    assert secure.seen == []


def test_a_ca_bundle_is_what_is_verified_with(clients: Any, secure: Any, certificates: Certificates) -> None:
    assert clients(secure.url, ca_bundle=str(certificates.own)).step("j") == "r"
    with pytest.raises(TransportError):
        clients(secure.url, ca_bundle=str(certificates.other), retry_budget_s=0.0).step("j")


@pytest.mark.parametrize("variable", BUNDLE_VARIABLES)
def test_a_ca_bundle_from_the_environment_is_used_unless_one_is_configured(
    clients: Any, secure: Any, certificates: Certificates, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, str(certificates.own))
    assert clients(secure.url).step("j") == "r"
    with pytest.raises(TransportError):
        clients(secure.url, ca_bundle=str(certificates.other), retry_budget_s=0.0).step("j")


@pytest.mark.filterwarnings("ignore::urllib3.exceptions.InsecureRequestWarning")
def test_no_verification_means_none_whatever_the_environment_says(
    clients: Any, secure: Any, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificates.other))
    assert clients(secure.url, verify_ssl=False).step("j") == "r"


class Tunnel:
    """A proxy for CONNECT."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.targets: list[str] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += near.recv(1024)
        target = head.split()[1].decode()
        self.targets.append(target)
        host, _, port = target.rpartition(":")
        with near, socket.create_connection((host, int(port))) as far:
            near.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                for ready in select.select([near, far], [], [])[0]:
                    data = ready.recv(65536)
                    if not data:
                        return
                    (far if ready is near else near).sendall(data)

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def test_tls_goes_through_a_proxy_and_its_connections_are_renewed(
    clients: Any, secure: Any, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    tunnel = Tunnel()
    monkeypatch.setenv("HTTPS_PROXY", tunnel.url)
    client = clients(secure.url, ca_bundle=str(certificates.own))
    assert client.step("j") == client.step("j") == "r"
    assert len(tunnel.targets) == 1
    clients.expire_idle_connections(monkeypatch)
    assert client.step("j") == "r"
    assert tunnel.targets == [secure.url.removeprefix("https://")] * 2
    tunnel.stop()


def test_connections_that_lay_idle_are_not_used_again(
    clients: Any, weather: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    weather.sequence(scripted.Reply(body={"request_id": "r"}))
    client = clients(weather.url)
    client.step("j")
    client.step("j")
    clients.expire_idle_connections(monkeypatch)
    client.step("j")
    assert [seen.connection for seen in weather.seen] == [1, 1, 2]


def test_a_change_of_the_environment_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    settings = CortexTrainingClient("http://service.example", "DB", "S")._settings
    url = "http://service.example/api/v2/jobs"
    assert proxy_for(settings, url) is None
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    assert proxy_for(settings, url) == "http://proxy.example:3128"
    assert proxy_for(settings, "http://service.example:8080/x") == "http://proxy.example:3128"
    monkeypatch.setenv("NO_PROXY", "service.example")
    assert proxy_for(settings, url) is None
    assert proxy_for(settings, "http://other.example/x") == "http://proxy.example:3128"


def test_a_proxy_of_the_environment_needs_no_scheme(
    clients: Any, weather: Any, scripted: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("HTTP_PROXY", weather.url.removeprefix("http://"))
    weather.sequence(scripted.Reply(body={"jobs": []}))
    assert clients("http://service.invalid").list_jobs() == []
    assert weather.seen[0].target.startswith("http://service.invalid/")


@pytest.mark.parametrize("proxy", UNUSABLE)
def test_a_download_through_a_proxy_that_is_none_is_refused(
    weather: Any, proxy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Exporting:
        def export_checkpoint(self, job_id: str, checkpoint_id: str) -> Any:
            return {"files": [{"filename": "model", "url": f"{weather.url}/model", "size_bytes": 1}]}

    with pytest.raises(ConfigurationError, match="proxy") as caught:
        download_checkpoint(Exporting(), "j", "cp_1", tmp_path, proxy=proxy)
    assert "hidden-word" not in "".join(traceback.format_exception(caught.value))
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(ConfigurationError, match="ALL_PROXY") as caught:
        download_checkpoint(Exporting(), "j", "cp_1", tmp_path)
    assert "hidden-word" not in "".join(traceback.format_exception(caught.value))
    assert weather.seen == []
