"""An S3-compatible store with its faults: lost replies, conflicts, throttling, credentials that end."""

from __future__ import annotations

import logging
import math
import os
import socketserver
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cortex_training.errors import ConfigurationError
from cortex_training.publication import CredentialsError, PublicationLog, RootError, Store, StoreError, open_store, s3
from cortex_training.publication.s3 import S3Store
from tests.publication.servers import FaultProxy, S3Server, free_port, put_save, serving, write_secret

SAVE = "exec/a-e1/cp_1"


# --- puts -----------------------------------------------------------------------------------------------------------


def test_a_put_that_never_arrived_is_sent_again(faults: FaultProxy, faulty_store: Store) -> None:
    faults.spoil("PUT", "/pub/", "drop before")
    log = PublicationLog(faulty_store)
    assert log.publish(put_save(faulty_store, SAVE), 1, 1)[1]


def test_a_put_that_landed_with_its_reply_lost_is_already_published(faults: FaultProxy, faulty_store: Store) -> None:
    faults.spoil("PUT", "/pub/", "drop after")
    log = PublicationLog(faulty_store)
    entry, created = log.publish(put_save(faulty_store, SAVE), 1, 1)
    assert not created
    assert log.entries() == [entry]


def test_a_claim_that_landed_with_its_reply_lost_is_ours(faults: FaultProxy, faulty_store: Store) -> None:
    log = PublicationLog(faulty_store)
    faults.spoil("PUT", "/epochs/", "drop after")
    assert [log.claim_epoch().number for _ in range(2)] == [1, 2]


@pytest.mark.parametrize("conflicts", [1, 3])
def test_a_conflict_settles(faults: FaultProxy, faulty_store: Store, conflicts: int) -> None:
    faults.spoil("PUT", "/pub/", "status 409 ConditionalRequestConflict", conflicts)
    assert PublicationLog(faulty_store).publish(put_save(faulty_store, SAVE), 1, 1)[1]


def test_a_conflict_with_a_put_that_wins_means_already_published(
    faults: FaultProxy, faulty_store: Store, s3_store: Store
) -> None:
    log = PublicationLog(s3_store)
    log.publish(put_save(s3_store, SAVE), 1, 1)
    faults.spoil("PUT", "/pub/", "status 409 ConditionalRequestConflict")
    assert not PublicationLog(faulty_store).publish(SAVE, 1, 1)[1]


def test_four_conflicts_fail_and_are_not_read_as_exists(faults: FaultProxy, faulty_store: Store) -> None:
    put_save(faulty_store, SAVE)
    fault = faults.spoil("PUT", "/pub/", "status 409 ConditionalRequestConflict", 99)
    with pytest.raises(StoreError, match="ConditionalRequestConflict"):
        PublicationLog(faulty_store).publish(SAVE, 1, 1)
    assert fault.met == 4
    assert faulty_store.names("pub") == []


class TestAStoreWithPatience:
    """A training run's store waits a conflict out like any other fault of the bucket."""

    @pytest.fixture
    def patient(self, s3_root: str, faulty_creds: str, monkeypatch: pytest.MonkeyPatch) -> Store:
        monkeypatch.setattr(s3, "_CONFLICT_WAIT_S", 0.005)
        return open_store(s3_root, faulty_creds, timeout_s=10, conflict_sends=math.inf)

    @pytest.mark.parametrize("code", ["ConditionalRequestConflict", "OperationAborted"])
    def test_many_conflicts_settle(self, faults: FaultProxy, patient: Store, code: str) -> None:
        fault = faults.spoil("PUT", "/run-7/", f"status 409 {code}", 7)
        assert patient.create("pub/a", b"")
        assert fault.met == 7
        fault.times = 14
        patient.write("exec/manifest", b"{}")
        assert fault.met == 14

    def test_the_put_that_won_meanwhile_is_seen(self, faults: FaultProxy, patient: Store, s3_store: Store) -> None:
        s3_store.create("journal/1", b"a rival's")
        faults.spoil("PUT", "/journal/", "status 409 ConditionalRequestConflict", 7)
        assert not patient.create("journal/1", b"ours")
        assert patient.read("journal/1") == b"a rival's"

    def test_the_time_limit_ends_it_and_names_the_conflict(
        self, faults: FaultProxy, s3_root: str, faulty_creds: str
    ) -> None:
        faults.spoil("PUT", "/pub/", "status 409 ConditionalRequestConflict", 999)
        store = open_store(s3_root, faulty_creds, timeout_s=1.0, conflict_sends=math.inf)
        with pytest.raises(StoreError, match=r"ConditionalRequestConflict.*gave up after \d+ tries"):
            store.create("pub/a")
        assert store.names("pub") == []


@pytest.mark.parametrize(
    ("method", "part", "action"),
    [
        ("PUT", "/pub/", "status 503 SlowDown"),
        ("PUT", "/pub/", "status 429 TooManyRequests"),
        ("PUT", "/pub/", "status 500 InternalError"),
        ("PUT", "/pub/", "status 502 BadGateway"),
        ("GET", "list-type=2", "status 503 SlowDown"),
        ("GET", "list-type=2", "drop before"),
        ("GET", "list-type=2", "drop after"),
        ("GET", "list-type=2", "status 400 RequestTimeout"),
    ],
)
def test_what_passes_is_waited_out(
    faults: FaultProxy, faulty_store: Store, method: str, part: str, action: str
) -> None:
    fault = faults.spoil(method, part, action, 2)
    log = PublicationLog(faulty_store)
    entry, _ = log.publish(put_save(faulty_store, SAVE), 1, 1)
    assert log.latest() == entry
    assert fault.met == 2


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("403 AccessDenied", "these credentials may not"),
        ("501 NotImplemented", "conditional writes are needed"),
        ("404 NoSuchBucket", "create the bucket"),
        ("403 SignatureDoesNotMatch", "SignatureDoesNotMatch"),
        ("403 ExpiredToken", "ExpiredToken"),
    ],
)
def test_what_does_not_pass_is_an_error_at_once(
    faults: FaultProxy, s3_root: str, faulty_creds: str, status: str, said: str
) -> None:
    store = open_store(s3_root, faulty_creds, renews=False)
    put_save(store, SAVE)
    fault = faults.spoil("PUT", "/pub/", f"status {status}", 99)
    with pytest.raises(StoreError, match=said):
        PublicationLog(store).publish(SAVE, 1, 1)
    assert fault.met == 1


def test_a_connection_that_is_cut_off_while_tls_begins_is_made_again(s3_root: str, tmp_path: Path) -> None:
    """A balancer that restarts accepts, reads and goes away. One that answers, but not in TLS, is not asked again."""
    heard = []

    class Cutting(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            heard.append(self.request.recv(65536))
            if len(heard) == 3:
                self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with serving(Cutting) as port:  # type: ignore[arg-type]
        source = write_secret(
            tmp_path / "c", access_key_id="x", secret_access_key="x", endpoint=f"https://127.0.0.1:{port}"
        )
        with pytest.raises(StoreError, match="TLS failed"):
            open_store(s3_root, source).names("pub")
    assert len(heard) == 3


@pytest.mark.parametrize("code", ["InternalError", "SlowDown"])
def test_what_a_batch_of_deletes_could_not_remove_is_removed_one_by_one(
    s3_store: S3Store, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    for name in ("a", "b"):
        s3_store.write(f"{SAVE}/{name}", b"x")
    perform = S3Store._perform

    def half_done(self: S3Store, client: Any, operation: str, arguments: Mapping[str, Any], doing: str) -> Any:
        if operation != "delete_objects":
            return perform(self, client, operation, arguments, doing)
        first, *others = arguments["Delete"]["Objects"]
        perform(self, client, operation, {"Delete": {"Objects": others}}, doing)
        return {"Errors": [{"Key": first["Key"], "Code": code, "Message": "as told"}]}

    monkeypatch.setattr(S3Store, "_perform", half_done)
    assert s3_store.remove_folder(SAVE) is None
    assert s3_store.names(SAVE) == []


def test_the_time_limit_ends_the_tries(s3_root: str, tmp_path: Path) -> None:
    nobody = write_secret(
        tmp_path / "c", access_key_id="x", secret_access_key="x", endpoint=f"http://127.0.0.1:{free_port()}"
    )
    notes: list[str] = []
    store = open_store(s3_root, nobody, timeout_s=2.5, notes=notes.append)
    with pytest.raises(StoreError, match=r"no reply \(EndpointConnectionError\); gave up after \d+ tries"):
        store.names("pub")
    assert len(notes) == 1
    assert "trying on until the time limit" in notes[0]


def test_wrong_keys_are_refused_by_a_real_server(s3_server: S3Server, s3_root: str, tmp_path: Path) -> None:
    source = write_secret(
        tmp_path / "c", access_key_id=s3_server.access_key_id, secret_access_key="wrong", endpoint=s3_server.endpoint
    )
    with pytest.raises(StoreError, match="SignatureDoesNotMatch"):
        open_store(s3_root, source).names("pub")


# --- credentials that end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId"])
@pytest.mark.parametrize(("method", "part"), [("PUT", "/pub/"), ("GET", "list-type=2"), ("GET", "/exec/")])
def test_refused_credentials_are_resolved_again_once_per_request(
    faults: FaultProxy, s3_root: str, faulty_creds: str, code: str, method: str, part: str
) -> None:
    notes: list[str] = []
    store = open_store(s3_root, faulty_creds, notes=notes.append)
    put_save(store, SAVE)
    fault = faults.spoil(method, part, f"status 403 {code}")
    PublicationLog(store).publish(SAVE, 1, 1)
    assert store.read(f"{SAVE}/weights.safetensors") == b"weights"
    fault.times = 2
    PublicationLog(store).publish(SAVE, 1, 2)
    assert store.read(f"{SAVE}/weights.safetensors") == b"weights"
    assert (
        notes
        == [
            f"the store rejected the credentials ({code}); resolving the sources again",
            f"credentials: using {faulty_creds}",
        ]
        * 2
    )


@pytest.mark.parametrize("status", ["400 ExpiredToken", "403 InvalidAccessKeyId"])
def test_a_refused_head_has_no_code_and_is_renewed_all_the_same(
    faults: FaultProxy, s3_root: str, faulty_creds: str, status: str
) -> None:
    notes: list[str] = []
    store = open_store(s3_root, faulty_creds, notes=notes.append)
    store.write("exec/a/step-1/.metadata", b"")
    faults.spoil("HEAD", ".metadata", f"status {status}")
    faults.spoil("GET", ".metadata", f"status {status}")
    assert store.exists("exec/a/step-1/.metadata")
    assert len(notes) == 2
    faults.spoil("HEAD", ".metadata", f"status {status}")
    assert not store.exists("exec/a/step-2/.metadata")


def test_really_rotated_keys(s3_server: S3Server, s3_root: str, tmp_path: Path) -> None:
    """The server itself refuses the old key; the source holds the new one."""
    import boto3

    iam = boto3.client(
        "iam",
        endpoint_url=s3_server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=s3_server.access_key_id,
        aws_secret_access_key=s3_server.secret_access_key,
    )
    old = iam.create_access_key(UserName="tester")["AccessKey"]
    source = write_secret(
        tmp_path / "c",
        access_key_id=old["AccessKeyId"],
        secret_access_key=old["SecretAccessKey"],
        endpoint=s3_server.endpoint,
    )
    notes: list[str] = []
    store = open_store(s3_root, source, notes=notes.append)
    assert store.names("pub") == []
    iam.delete_access_key(UserName="tester", AccessKeyId=old["AccessKeyId"])
    write_secret(tmp_path / "c", access_key_id=s3_server.access_key_id, secret_access_key=s3_server.secret_access_key)
    assert store.names("pub") == []
    assert notes[0] == "the store rejected the credentials (InvalidAccessKeyId); resolving the sources again"


def test_refused_again_is_an_error(faults: FaultProxy, faulty_store: Store) -> None:
    fault = faults.spoil("GET", "list-type=2", "status 400 ExpiredToken", 99)
    with pytest.raises(StoreError, match="ExpiredToken"):
        faulty_store.names("pub")
    assert fault.met == 2


def test_no_source_or_another_store_is_an_error(
    faults: FaultProxy, s3_root: str, faulty_creds: str, tmp_path: Path
) -> None:
    for field, value in (("endpoint", "http://127.0.0.1:1"), ("region", "eu-west-1")):
        store = open_store(s3_root, faulty_creds)
        write_secret(tmp_path / "faulty", **{field: value})
        faults.spoil("GET", "list-type=2", "status 400 ExpiredToken")
        with pytest.raises(CredentialsError, match=f"now names .*{value}"):
            store.names("pub")
        write_secret(tmp_path / "faulty", endpoint=faults.endpoint, region="us-east-1")
    store = open_store(s3_root, faulty_creds)
    (tmp_path / "faulty").rename(tmp_path / "gone")
    faults.spoil("GET", "list-type=2", "status 400 ExpiredToken")
    with pytest.raises(CredentialsError, match="no source answered"):
        store.names("pub")


# --- nothing but the source decides ---------------------------------------------------------------------------------


def hostile_environment(home: Path) -> dict[str, str]:
    """Each variable and file that boto3's core listens to, set to something wrong."""
    nowhere = f"http://127.0.0.1:{free_port()}"
    aws = home / ".aws"
    (aws / "models" / "s3" / "2006-03-01").mkdir(parents=True)
    (aws / "models" / "s3" / "2006-03-01" / "service-2.json").write_text("{}")
    for name in ("config", "credentials"):
        (aws / name).write_text(
            f"[default]\naws_access_key_id = WRONG\naws_secret_access_key = WRONG\nregion = xx-wrong-9\n"
            f"endpoint_url = {nowhere}\nca_bundle = /no/such/file\nretry_mode = nonsense\n"
            "s3 =\n  addressing_style = virtual\n  use_accelerate_endpoint = true\n"
        )
    (home / ".netrc").write_text("machine 127.0.0.1 login wrong password wrong\n")
    variables = {
        "AWS_ACCESS_KEY_ID": "WRONG",
        "AWS_SECRET_ACCESS_KEY": "WRONG",
        "AWS_SESSION_TOKEN": "WRONG",
        "AWS_SECURITY_TOKEN": "WRONG",
        "AWS_PROFILE": "no-such-profile",
        "AWS_DEFAULT_PROFILE": "no-such-profile",
        "AWS_CONFIG_FILE": str(aws / "config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(aws / "credentials"),
        "AWS_DATA_PATH": str(aws / "models"),
        "AWS_REGION": "xx-wrong-9",
        "AWS_DEFAULT_REGION": "xx-wrong-9",
        "AWS_ENDPOINT_URL": nowhere,
        "AWS_ENDPOINT_URL_S3": nowhere,
        "AWS_CA_BUNDLE": "/no/such/file",
        "REQUESTS_CA_BUNDLE": "/no/such/file",
        "AWS_RETRY_MODE": "nonsense",
        "AWS_MAX_ATTEMPTS": "nonsense",
        "AWS_DEFAULTS_MODE": "nonsense",
        "AWS_USE_FIPS_ENDPOINT": "true",
        "AWS_USE_DUALSTACK_ENDPOINT": "true",
        "AWS_S3_US_EAST_1_REGIONAL_ENDPOINT": "nonsense",
        "AWS_S3_USE_ARN_REGION": "nonsense",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "nonsense",
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "nonsense",
        "AWS_STS_REGIONAL_ENDPOINTS": "nonsense",
        "AWS_ACCOUNT_ID_ENDPOINT_MODE": "nonsense",
        "AWS_AUTH_SCHEME_PREFERENCE": "nonsense",
        "AWS_WEB_IDENTITY_TOKEN_FILE": "/no/such/file",
        "AWS_ROLE_ARN": "nonsense",
        "HTTP_PROXY": nowhere,
        "http_proxy": nowhere,
        "HTTPS_PROXY": nowhere,
        "ALL_PROXY": nowhere,
        "NETRC": str(home / ".netrc"),
    }
    return {"PATH": os.environ["PATH"], "HOME": str(home), **variables}


def test_the_environment_decides_nothing(s3_root: str, creds: str, s3_store: Store, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    code = (
        "import sys\n"
        "from cortex_training.publication import PublicationLog, open_store\n"
        "log = PublicationLog(open_store(sys.argv[1], sys.argv[2], timeout_s=5))\n"
        "print(log.claim_epoch().number, log.latest())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, s3_root, creds],
        env=hostile_environment(home),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, "1 None\n"), result.stderr
    assert s3_store.names("epochs") == [f"{1:020d}"]


def test_without_an_endpoint_the_region_of_aws_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in hostile_environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    for region in ("us-east-1", "eu-central-1"):
        source = write_secret(tmp_path / region, access_key_id="x", secret_access_key="x", region=region)
        store = open_store("s3://bucket/x", source)
        assert store.connection.client.meta.endpoint_url == f"https://s3.{region}.amazonaws.com"  # type: ignore[attr-defined]


def test_a_proxy_is_used_when_it_is_named(s3_root: str, creds: str, faults: FaultProxy, s3_server: S3Server) -> None:
    store = open_store(s3_root, creds, proxy=faults.endpoint)
    assert store.create("pub/x")
    assert faults.seen[0][1].startswith(f"{s3_server.endpoint}/ckpts-")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("endpoint", "http://my_store:9000"),
        ("endpoint", "http://-store-:9000"),
        ("endpoint", "http://" + "x" * 64),
        ("region", "-x"),
    ],
)
def test_an_endpoint_the_library_cannot_use_is_the_sources_fault(
    s3_root: str, creds: str, tmp_path: Path, field: str, value: str
) -> None:
    write_secret(tmp_path / "creds", **{field: value})
    with pytest.raises(CredentialsError, match=f"^credentials: {creds}: endpoint or region: ") as raised:
        open_store(s3_root, creds)
    assert value in str(raised.value)


@pytest.mark.parametrize("proxy", ["socks5://x", "http://u:p@x", "http://x/path", "http://x?q", "x:80", "http://", ""])
def test_a_malformed_proxy_is_refused(s3_root: str, creds: str, proxy: str) -> None:
    with pytest.raises(ConfigurationError, match="proxy"):
        open_store(s3_root, creds, proxy=proxy)


def test_secrets_reach_no_log(
    s3_server: S3Server, s3_root: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    source = write_secret(
        tmp_path / "c",
        access_key_id="AKIAVISIBLE",
        secret_access_key="hush-hush",
        session_token="token-hush",
        endpoint=s3_server.endpoint,
    )
    store = open_store(s3_root, source)
    with pytest.raises(StoreError) as raised:
        store.create("journal/1", b"content-hush")
    seen = caplog.text + str(raised.value) + repr(store)
    for hidden in ("hush-hush", "token-hush", "content-hush", "Signature="):
        assert hidden not in seen
    logging.getLogger("urllib3.connectionpool").debug("others keep logging")
    assert "others keep logging" in caplog.text


# --- shapes ---------------------------------------------------------------------------------------------------------


def test_a_file_of_several_parts_arrives_whole(s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    part = 5 * 1024 * 1024
    monkeypatch.setattr("cortex_training.publication.s3._PART_BYTES", part)
    data = os.urandom(2 * part + 12345)
    with s3_store.staged(SAVE) as folder:
        Path(folder, "model.safetensors").write_bytes(data)
    assert s3_store.read(f"{SAVE}/model.safetensors") == data


def test_a_lost_part_is_sent_again_and_a_refused_upload_leaves_nothing(
    s3_server: S3Server, bucket: str, faults: FaultProxy, faulty_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = 5 * 1024 * 1024
    monkeypatch.setattr("cortex_training.publication.s3._PART_BYTES", part)
    data = os.urandom(part + 1)
    faults.spoil("PUT", "partNumber=2", "drop after")
    with faulty_store.staged(SAVE) as folder:
        Path(folder, "w").write_bytes(data)
    assert faulty_store.read(f"{SAVE}/w") == data
    faults.spoil("PUT", "partNumber=2", "status 403 AccessDenied")
    with pytest.raises(StoreError, match="AccessDenied"), faulty_store.staged("exec/other") as folder:
        Path(folder, "w").write_bytes(data)
    assert not faulty_store.holds_save("exec/other")
    assert s3_server.client().list_multipart_uploads(Bucket=bucket).get("Uploads", []) == []


@pytest.mark.parametrize("status", ["501 NotImplemented", "405 MethodNotAllowed"])
def test_a_store_without_batches_of_deletes(faults: FaultProxy, faulty_store: Store, status: str) -> None:
    put_save(faulty_store, SAVE)
    put_save(faulty_store, SAVE, "second")
    faults.spoil("POST", "delete", f"status {status}", 99)
    assert faulty_store.remove_folder(SAVE) is None
    assert not faulty_store.holds_save(SAVE)


def test_a_batch_of_deletes_carries_the_checksum_every_store_knows(faults: FaultProxy, faulty_store: Store) -> None:
    put_save(faulty_store, SAVE)
    faulty_store.remove_folder(SAVE)
    assert [headers["Content-MD5"] for headers in faults.headers if "Content-MD5" in headers]


def test_a_listing_that_does_not_say_how_to_go_on_is_an_error(s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest could be on the page nobody can ask for."""
    monkeypatch.setattr(type(s3_store), "_perform", lambda *arguments: {"IsTruncated": True})
    with pytest.raises(StoreError, match="does not say where to go on"):
        s3_store.names("pub")


def test_an_object_of_unannounced_length_is_read_up_to_the_limit(
    s3_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_store.write("exec/a/state", b"x" * 11)
    client = s3_store.connection.client  # type: ignore[attr-defined]
    get = client.get_object

    def unannounced(**arguments: object) -> object:
        return {name: value for name, value in get(**arguments).items() if name != "ContentLength"}

    monkeypatch.setattr(client, "get_object", unannounced)
    assert s3_store.read("exec/a/state") == b"x" * 11
    monkeypatch.setattr("cortex_training.publication.s3.MAX_RECORD_BYTES", 10)
    with pytest.raises(StoreError, match="larger than 10 bytes"):
        s3_store.read("exec/a/state")


def test_a_key_that_was_not_deleted_is_an_error(s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put_save(s3_store, SAVE)
    perform = type(s3_store)._perform  # type: ignore[attr-defined]

    def partly(self: object, client: object, operation: str, arguments: object, doing: str) -> object:
        if operation == "delete_objects":
            return {"Errors": [{"Key": "k", "Code": "AccessDenied", "Message": "no"}]}
        return perform(self, client, operation, arguments, doing)

    monkeypatch.setattr(type(s3_store), "_perform", partly)
    with pytest.raises(StoreError, match=r"delete s3://.*/k: AccessDenied"):
        s3_store.remove_folder(SAVE)


def test_a_consoles_folder_object_is_no_entry(s3_server: S3Server, bucket: str, s3_store: Store) -> None:
    s3_server.client().put_object(Bucket=bucket, Key="team/run-7/pub/", Body=b"")
    assert PublicationLog(s3_store).entries() == []


def test_the_root_of_a_bucket_is_a_root(bucket: str, creds: str) -> None:
    log = PublicationLog(open_store(f"s3://{bucket}/", creds))
    entry, _ = log.publish(put_save(log.store, SAVE), 1, 1)
    assert entry.location == f"s3://{bucket}/{SAVE}"
    assert log.latest() == entry


def test_a_key_has_1024_bytes(s3_store: Store) -> None:
    room = (1024 - len("team/run-7/pub/") - 42) * 5 // 8
    log = PublicationLog(s3_store)
    save = put_save(s3_store, "exec/" + "d" * (room - 5), "w")
    assert log.publish(save, 1, 1)[1]
    with pytest.raises(ConfigurationError, match=f"has room for {room}"):
        log.publish("exec/" + "d" * (room - 4), 1, 1)


REFUSED_ROOTS = [
    *("s3://", "s3:///x", "s3://b//x", "s3://b/x//y", "s3://b/x//", "s3://b/./x", "s3://b/../x", "s3://b/x/.."),
    *("s3://b/x\n", "s3://b c/x", "s3://b?x", "s3://b:80/x", "S3://b/x", "s3:/b/x", "gs://b/x", "file:/x", "C:\\x"),
]


@pytest.mark.parametrize("root", REFUSED_ROOTS)
def test_roots_that_are_refused(root: str) -> None:
    with pytest.raises(RootError):
        open_store(root, "file:/none")
