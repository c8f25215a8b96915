import pytest

from cortex_training.publication import Store, StoreError, open_store, probe
from tests.publication.servers import FaultProxy, S3Server


def keys(server: S3Server, root: str) -> list[str]:
    bucket = root.removeprefix("s3://").split("/")[0]
    return [item["Key"] for item in server.client().list_objects_v2(Bucket=bucket).get("Contents", [])]


def test_a_good_store_passes_and_nothing_stays(store: Store) -> None:
    probe(store)
    assert store.names("pub") == []


def test_probe_leaves_no_object(s3_server: S3Server, s3_root: str, s3_store: Store) -> None:
    probe(s3_store)
    assert keys(s3_server, s3_root) == []


@pytest.mark.parametrize(
    ("method", "step", "times"),
    [("PUT", "write", 1), ("GET", "read", 1), ("DELETE", "delete", 1)],
)
def test_the_step_that_failed_is_named(
    s3_server: S3Server, s3_root: str, faults: FaultProxy, faulty_store: Store, method: str, step: str, times: int
) -> None:
    faults.spoil(method, ".cortex-probe-", "status 403 AccessDenied", times)
    with pytest.raises(StoreError, match=rf"^store: probe: {step}: .*AccessDenied"):
        probe(faulty_store)
    assert len(keys(s3_server, s3_root)) == (1 if step == "delete" else 0)


def test_a_refused_list_is_named_and_the_object_removed(
    s3_server: S3Server, s3_root: str, faults: FaultProxy, faulty_store: Store
) -> None:
    faults.spoil("GET", "list-type=2", "status 403 AccessDenied")
    with pytest.raises(StoreError, match=r"^store: probe: list: "):
        probe(faulty_store)
    assert keys(s3_server, s3_root) == []


@pytest.mark.parametrize("answer", ["pretend", "status 501 NotImplemented", "status 400 InvalidArgument"])
def test_a_store_without_conditional_writes_is_caught(
    s3_server: S3Server, s3_root: str, faults: FaultProxy, faulty_store: Store, answer: str
) -> None:
    puts = 0

    def second_put(method: str, path: str) -> bool:
        nonlocal puts
        puts += method == "PUT"
        return method == "PUT" and puts == 2

    faults.spoil("PUT", ".cortex-probe-", answer).matches = second_put
    with pytest.raises(StoreError, match=r"^store: probe: conditional write: "):
        probe(faulty_store)
    assert keys(s3_server, s3_root) == []


def test_bytes_that_come_back_changed_are_caught(s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(s3_store), "read", lambda self, name: b"other")
    with pytest.raises(StoreError, match=r"^store: probe: read: "):
        probe(s3_store)


def test_a_missing_bucket_is_a_failed_write(creds: str) -> None:
    with pytest.raises(StoreError, match=r"^store: probe: write: .*NoSuchBucket"):
        probe(open_store("s3://no-such-bucket-here/run", creds, timeout_s=10))
