"""``cortex-publish`` as a job script runs it: outputs, statuses, signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cortex_training.publication import PosixStore, PublicationLog, Store
from cortex_training.publication.command import main
from tests.publication.crashes import killed_at_each_call
from tests.publication.servers import FaultProxy, S3Server, put_save, serving, write_secret
from tests.publication.vault_server import VaultHandler, VaultServer

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command in this process: status, stdout, stderr. Keywords are environment variables."""
    for name in ("DISPATCH_EPOCH", "DISPATCH_ATTEMPT", "CORTEX_PUBLISH_EPOCH", "CORTEX_PUBLISH_ATTEMPT"):
        monkeypatch.delenv(name, raising=False)

    def go(*argv: str, **environment: str) -> tuple[int, str, str]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            status = main(argv)
        out, err = capsys.readouterr()
        assert all(line.startswith("publish: ") for line in err.splitlines())
        return status, out, err

    return go


@pytest.fixture(params=["posix", "s3"])
def root(request: pytest.FixtureRequest) -> tuple[Store, list[str]]:
    """A root of each kind, and the flags that name it."""
    store: Store = request.getfixturevalue(f"{request.param}_store")
    flags = ["-checkpoint", store.root]
    if request.param == "s3":
        flags += ["-creds", request.getfixturevalue("creds"), "-timeout", "20s"]
    return store, flags


# --- verbs ----------------------------------------------------------------------------------------------------------


def test_resolve_and_publish(run: Run, root: tuple[Store, list[str]]) -> None:
    store, flags = root
    assert run("resolve", *flags) == (0, "", "")
    location = store.locate(put_save(store, "exec/a/step-5"))
    status, out, err = run("publish", *flags, "-epoch", "3", location, "5")
    entry = PublicationLog(store).entries()[0]
    assert (status, out, err) == (0, f"published {entry.name} (epoch 3, step 5, {location})\n", "")
    status, out, err = run("publish", *flags, "-epoch", "3", location + "/", "5")
    assert (status, out) == (0, "")
    assert err == f"publish: already published: {entry.name} (epoch 3, step 5, {location})\n"
    assert run("resolve", *flags) == (0, f"{location}\n", "")
    assert run("resolve", *flags, "-verify") == (0, f"{location}\n", "")
    store.remove_folder("exec/a/step-5")
    assert run("resolve", *flags) == (0, f"{location}\n", "")
    status, out, err = run("resolve", *flags, "--verify=true")
    assert (status, out) == (1, "")
    assert f"{location} is the latest publication, and is not there" in err


def test_epoch_comes_from_the_flag_then_the_variables(run: Run, root: tuple[Store, list[str]]) -> None:
    store, flags = root
    location = store.locate(put_save(store, "exec/a/1"))
    cases: list[tuple[list[str], dict[str, str], int]] = [
        ([], {}, 0),
        ([], {"CORTEX_PUBLISH_EPOCH": "4"}, 4),
        ([], {"CORTEX_PUBLISH_EPOCH": "4", "DISPATCH_EPOCH": "5"}, 5),
        (["-epoch", "6"], {"DISPATCH_EPOCH": "nonsense"}, 6),
        ([], {"DISPATCH_EPOCH": ""}, 0),
        (["--epoch=18446744073709551615"], {}, 2**64 - 1),
    ]
    for number, (more, environment, epoch) in enumerate(cases):
        status, out, err = run("publish", *flags, *more, location, str(number), **environment)
        assert (status, f"(epoch {epoch}, step {number}, " in out) == (0, True)
        assert ("publishing under epoch 0" in err) == (epoch == 0)
    assert run("publish", *flags, location, "1", DISPATCH_EPOCH="1e3")[0] == 2
    assert run("resolve", *flags, DISPATCH_EPOCH="nonsense", DISPATCH_ATTEMPT="a/b")[0] == 0


def test_prune(run: Run, root: tuple[Store, list[str]]) -> None:
    store, flags = root
    log = PublicationLog(store)
    for step in range(6):
        log.publish(put_save(store, f"exec/a/{step}"), 1, step)
    first = [store.locate(f"exec/a/{step}") for step in range(3)]
    assert run("prune", *flags) == (0, "".join(f"removed {location}\n" for location in first), "")
    assert run("prune", *flags, "-keep", "2")[1] == f"removed {store.locate('exec/a/3')}\n"
    assert [entry.step for entry in log.entries()] == [4, 5]
    store.write("pub/README", b"")
    status, out, err = run("prune", *flags, "-keep", "1")
    assert (status, out) == (1, "")
    assert "pub/README" in err
    assert run("resolve", *flags)[0] == 1


def test_prune_says_what_it_left(run: Run, posix_store: PosixStore, tmp_path: Path) -> None:
    log = PublicationLog(posix_store)
    for step in range(2):
        log.publish(put_save(posix_store, f"exec/a/{step}"), 1, step)
    link = Path(posix_store.locate("exec/a"))
    link.rename(tmp_path / "elsewhere")
    link.symlink_to(tmp_path / "elsewhere")
    status, out, err = run("prune", "-checkpoint", posix_store.root, "-keep", "1")
    assert (status, out) == (0, "")
    assert err == f"publish: prune: left {link}/0 in place: {link} is a symbolic link\n"
    assert (tmp_path / "elsewhere" / "0").is_dir()


def test_probe(run: Run, s3_store: Store, creds: str, faults: FaultProxy, faulty_creds: str) -> None:
    flags = ["-checkpoint", s3_store.root, "-timeout", "20s"]
    assert run("probe", *flags, "-creds", creds) == (0, f"{s3_store.root} {creds}\n", "")
    assert run("resolve", *flags, "-creds", creds, "-probe") == (0, "", "")
    assert run("probe", *flags, "-creds", creds, "-proxy", faults.endpoint)[0] == 0
    assert faults.seen
    faults.spoil("GET", ".cortex-probe-", "status 403 AccessDenied", 2)
    for verb in (["probe"], ["resolve", "-probe"]):
        status, out, err = run(*verb, *flags, "-creds", faulty_creds)
        assert (status, out) == (1, "")
        assert err.startswith("publish: store: probe: read: ")


def test_probe_catches_a_real_store_that_ignores_conditions(
    run: Run, careless_server: S3Server, tmp_path: Path
) -> None:
    careless_server.client().create_bucket(Bucket="ckpts")
    source = write_secret(
        tmp_path / "c",
        access_key_id=careless_server.access_key_id,
        secret_access_key=careless_server.secret_access_key,
        endpoint=careless_server.endpoint,
    )
    flags = ["-checkpoint", "s3://ckpts/run", "-creds", source, "-timeout", "20s"]
    for verb in (["probe"], ["resolve", "-probe"]):
        status, out, err = run(*verb, *flags)
        assert (status, out) == (1, "")
        assert err.startswith("publish: store: probe: conditional write: s3://ckpts/run/.cortex-probe-")
        assert "accepted all the same" in err
    assert "Contents" not in careless_server.client().list_objects_v2(Bucket="ckpts")


def test_credentials_from_vault_end_to_end(run: Run, s3_server: Any, s3_store: Store, tmp_path: Path) -> None:
    pytest.importorskip("hvac")
    fields = {
        "access_key_id": s3_server.access_key_id,
        "secret_access_key": s3_server.secret_access_key,
        "endpoint": s3_server.endpoint,
    }
    vault = VaultServer(secrets={"/v1/secret/data/team/s3": fields})
    write_secret(tmp_path / "approle", role_id=vault.role_id, secret_id=vault.secret_id)
    with serving(type("Handler", (VaultHandler,), {"server_state": vault})) as port:
        source = f"vault:http://127.0.0.1:{port}/team/s3?auth=approle&approle={tmp_path}/approle"
        creds = f"secret:{tmp_path}/absent,{source}"
        status, out, err = run("probe", "-checkpoint", s3_store.root, "-creds", creds)
        assert (status, out, err) == (0, f"{s3_store.root} {source}\n", "")
        vault.secret_id = "another"
        status, out, err = run("resolve", "-checkpoint", s3_store.root, "-creds", creds)
        assert (status, out) == (1, "")
        assert err == f"publish: credentials: {source}: log in: Vault answered InvalidRequest\n"


# --- statuses -------------------------------------------------------------------------------------------------------

ROOT = "{root}"
GOOD = ["-checkpoint", ROOT]
S3 = ["-checkpoint", "s3://bucket/x"]
CREDS = ["-creds", "file:/no/such/directory"]

USAGE = [
    [],
    ["publis"],
    ["resolve"],
    ["resolve", "-checkpoint"],
    ["resolve", "-checkpoint", ""],
    ["resolve", *GOOD, "-nonsense"],
    ["resolve", *GOOD, "-keep", "3"],
    ["resolve", *GOOD, "extra"],
    ["resolve", "extra", *GOOD],
    ["resolve", *GOOD, "-probe"],
    ["resolve", *GOOD, "-probe=maybe"],
    ["resolve", *GOOD, *CREDS],
    ["resolve", *GOOD, "-proxy", "http://proxy:3128"],
    ["resolve", *S3],
    ["resolve", *S3, "-proxy", "http://proxy:3128"],
    ["resolve", *S3, *CREDS, "-proxy", "proxy:3128"],
    ["resolve", *S3, *CREDS, "-proxy", "http://user:secret-word@proxy:3128"],
    ["resolve", *S3, *CREDS, "-timeout", "0s"],
    *(["resolve", *GOOD, "-timeout", text] for text in ("", "5", "-5s", "5 s", "1d", "s", "1h-5m", "0", "x1s")),
    ["watch", *GOOD],
    ["watch", *GOOD, "-framework", "tf", "exec/a"],
    ["watch", *GOOD, "-framework", "hf"],
    ["watch", *GOOD, "-framework", "hf", "-interval", "0s", "x"],
    ["watch", *GOOD, "-framework", "hf", "-attempt", "a/b"],
    ["watch", *GOOD, "-framework", "hf", "-attempt", ".."],
    ["watch", *GOOD, "-framework", "hf", "-epoch", "-1", "x"],
    ["watch", *GOOD, "-framework", "hf", "x", "y"],
    ["publish", *GOOD],
    ["publish", *GOOD, ROOT + "/save"],
    ["publish", *GOOD, ROOT + "/save", "5", "6"],
    *(["publish", *GOOD, ROOT + "/save", step] for step in ("", "-1", "1e3", " 5", "5.0", "18446744073709551616")),
    ["publish", *GOOD, ROOT + "/save", "5", "-epoch", "1"],
    ["publish", *GOOD, "-epoch", "x", ROOT + "/save", "5"],
    ["prune", *GOOD, "-keep", "0"],
    ["prune", *GOOD, "-keep", "-1"],
    ["prune", *GOOD, "-keep", "three"],
    ["probe", *GOOD, *CREDS],
    ["probe", *GOOD],
    ["probe", *S3],
    ["probe", "-checkpoint", "gs://b/x"],
]

FAULTS = [
    ["resolve", "-checkpoint", ROOT + "/missing"],
    ["resolve", "-checkpoint", ROOT + "/file"],
    ["watch", "-checkpoint", ROOT + "/missing", "-framework", "hf", ROOT + "/missing/exec/a"],
    ["prune", "-checkpoint", ROOT + "/missing"],
    ["publish", "-checkpoint", ROOT + "/missing", ROOT + "/missing/save", "1"],
    *(["resolve", "-checkpoint", text] for text in ("gs://b/x", "s3:/b/x", "file:/data", "C:\\x", "a:b", "S3://b/x")),
    *(["resolve", "-checkpoint", text, *CREDS] for text in ("s3://", "s3://b//x", "s3://b/..", "s3://b/x//")),
    ["probe", "-checkpoint", "gs://b/x", *CREDS],
    ["probe", "-checkpoint", "s3://b//x", *CREDS],
    ["resolve", *S3, *CREDS],
    ["resolve", *S3, "-creds", "nonsense"],
    ["resolve", *S3, "-creds", ""],
    ["resolve", *S3, "-creds", "vault:http://vault/x?auth=kubernetes"],
    ["probe", *S3, "-creds", "vault:https://vault/x?auth=kubernetes&role=r&proxy=nonsense"],
    ["publish", *GOOD, ROOT, "5"],
    ["publish", *GOOD, ROOT + "/..", "5"],
    ["publish", *GOOD, ROOT + "-other/save", "5"],
    ["publish", *GOOD, ROOT + "/absent", "5"],
    ["publish", *GOOD, ROOT + "/file", "5"],
    ["publish", *GOOD, ROOT + "/exec", "5"],
    ["publish", *GOOD, ROOT + "/pub", "5"],
    ["publish", *GOOD, "s3://bucket/x/save", "5"],
    ["publish", *S3, *CREDS, "s3://bucket/y/save", "5"],
    ["publish", *S3, *CREDS, "s3://other/x/save", "5"],
    ["publish", *S3, *CREDS, "/x/save", "5"],
    ["watch", *GOOD, "-framework", "hf", ROOT],
    ["watch", *GOOD, "-framework", "hf", "/elsewhere"],
    ["watch", *S3, *CREDS, "-framework", "hf", "exec/a"],
]


@pytest.fixture
def small_root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for folder in ("save", "exec", "pub"):
        (root / folder).mkdir(parents=True)
    (root / "file").write_text("x")
    return root


def tree(root: Path) -> list[str]:
    return sorted(str(path) for path in root.parent.rglob("*"))


@pytest.mark.parametrize("argv", USAGE, ids=" ".join)
def test_a_wrong_command_line_is_status_2_with_the_usage(run: Run, small_root: Path, argv: list[str]) -> None:
    before = tree(small_root)
    status, out, err = run(*(text.replace(ROOT, str(small_root)) for text in argv))
    assert (status, out) == (2, "")
    assert "publish: usage: cortex-publish VERB" in err
    assert "secret-word" not in err
    assert tree(small_root) == before


@pytest.mark.parametrize("argv", FAULTS, ids=" ".join)
def test_a_fault_is_status_1_with_one_line_that_names_it(run: Run, small_root: Path, argv: list[str]) -> None:
    before = tree(small_root)
    argv = [text.replace(ROOT, str(small_root)) for text in argv]
    status, out, err = run(*argv)
    assert (status, out) == (1, "")
    assert "usage" not in err
    assert tree(small_root) == before
    if argv[0] == "probe" or CREDS[1] in argv:
        assert err.startswith(("publish: credentials: ", "publish: root ", "publish: 's3://", "publish: save "))


def test_a_malformed_environment_matters_only_when_it_is_used(run: Run, small_root: Path) -> None:
    flags = ["-checkpoint", str(small_root)]
    assert run("watch", *flags, "-framework", "hf", DISPATCH_ATTEMPT="a/b")[0] == 2
    assert run("publish", *flags, str(small_root / "save"), "5", DISPATCH_EPOCH="-1")[0] == 2
    assert run("publish", *flags, "-epoch", "1", str(small_root / "save"), "5", DISPATCH_EPOCH="-1")[0] == 0
    assert run("resolve", *flags, DISPATCH_EPOCH="-1", DISPATCH_ATTEMPT="a/b")[0] == 0


def test_help_is_a_result(run: Run) -> None:
    for argv in (["-h"], ["--help"], ["resolve", "-h"]):
        status, out, err = run(*argv)
        assert (status, err) == (0, "")
        assert out.startswith("usage: cortex-publish VERB")


def test_a_relative_root_with_a_colon(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save = tmp_path / "a:b" / "save"
    save.mkdir(parents=True)
    assert run("publish", "-checkpoint", "./a:b", "-epoch", "1", "a:b/save", "5")[0] == 0
    assert run("resolve", "-checkpoint", "./a:b") == (0, f"{save}\n", "")


# --- processes ------------------------------------------------------------------------------------------------------


def start(*argv: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "cortex_training.publication.command", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def put_hf(store: Store, step: int) -> None:
    save = put_save(store, f"exec/a-e1/checkpoint-{step}")
    store.write(f"{save}/trainer_state.json", json.dumps({"global_step": step}).encode())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_watch_publishes_until_a_signal_and_scans_once_more(root: tuple[Store, list[str]], number: int) -> None:
    store, flags = root
    put_hf(store, 1)
    environment = {**os.environ, "DISPATCH_ATTEMPT": "a-e1", "DISPATCH_EPOCH": "7"}
    watch = start("watch", *flags, "-framework", "hf", "-interval", "0.05s", env=environment)
    assert watch.stdout is not None
    assert "(epoch 7, step 1, " in watch.stdout.readline()
    put_hf(store, 2)
    assert "(epoch 7, step 2, " in watch.stdout.readline()
    watch.send_signal(signal.SIGSTOP)
    put_hf(store, 3)
    watch.send_signal(number)
    watch.send_signal(signal.SIGCONT)
    out, err = watch.communicate(timeout=60)
    assert (watch.returncode, err) == (0, "")
    assert "(epoch 7, step 3, " in out
    assert [entry.step for entry in PublicationLog(store).entries()] == [1, 2, 3]


def test_a_waiting_watch_ends_at_a_signal_and_not_at_its_interval(posix_store: PosixStore) -> None:
    put_hf(posix_store, 1)
    watch = start(
        *("watch", "-checkpoint", posix_store.root, "-framework", "hf", "-interval", "1h", "-attempt", "a-e1")
    )
    assert watch.stdout is not None
    watch.stdout.readline()
    put_hf(posix_store, 2)
    watch.send_signal(signal.SIGTERM)
    out, _ = watch.communicate(timeout=60)
    assert watch.returncode == 0
    assert "step 2" in out


def test_a_second_signal_ends_watch_at_once(s3_store: Store, faults: FaultProxy, faulty_creds: str) -> None:
    put_hf(s3_store, 1)
    watch = start(
        *("watch", "-checkpoint", s3_store.root, "-creds", faulty_creds, "-framework", "hf", "-interval", "0.05s"),
        *("-attempt", "a-e1", "-timeout", "10m"),
    )
    assert watch.stdout is not None
    watch.stdout.readline()
    faults.spoil("GET", "", "status 503 SlowDown", 10_000)  # the scan under way, and the last one, would take minutes
    deadline = time.monotonic() + 30
    while faults.faults[0].met == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    watch.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert watch.poll() is None
    watch.send_signal(signal.SIGTERM)
    _, err = watch.communicate(timeout=60)
    assert watch.returncode == 1
    assert "second signal" in err


def test_watch_stops_at_a_broken_save(posix_store: PosixStore) -> None:
    put_hf(posix_store, 1)
    posix_store.write("exec/a-e1/checkpoint-2/trainer_state.json", b"nonsense")
    watch = start("watch", "-checkpoint", posix_store.root, "-framework", "hf", "-epoch", "1", "-attempt", "a-e1")
    out, err = watch.communicate(timeout=60)
    assert watch.returncode == 1
    assert "step 1" in out
    assert err.startswith(f"publish: {posix_store.root}/exec/a-e1/checkpoint-2/trainer_state.json: ")


def test_watch_renews_credentials_and_says_so(s3_store: Store, faults: FaultProxy, faulty_creds: str) -> None:
    put_hf(s3_store, 1)
    faults.spoil("PUT", "/pub/", "status 400 ExpiredToken")
    watch = start(
        *("watch", "-checkpoint", s3_store.root, "-creds", faulty_creds, "-framework", "hf", "-epoch", "1"),
        *("-attempt", "a-e1", "-interval", "0.05s"),
    )
    assert watch.stdout is not None
    assert "step 1" in watch.stdout.readline()
    # And once more, between two scans that had nothing to do.
    faults.spoil("GET", "list-type=2", "status 403 InvalidAccessKeyId")
    put_hf(s3_store, 2)
    assert "step 2" in watch.stdout.readline()
    watch.send_signal(signal.SIGTERM)
    _, err = watch.communicate(timeout=60)
    assert watch.returncode == 0
    assert err.splitlines() == [
        "publish: the store rejected the credentials (ExpiredToken); resolving the sources again",
        f"publish: credentials: using {faulty_creds}",
        "publish: the store rejected the credentials (InvalidAccessKeyId); resolving the sources again",
        f"publish: credentials: using {faulty_creds}",
    ]


def test_watch_ends_when_it_is_refused_again(s3_store: Store, faults: FaultProxy, faulty_creds: str) -> None:
    put_hf(s3_store, 1)
    faults.spoil("GET", "list-type=2", "status 400 ExpiredToken", 99)
    flags = ["-checkpoint", s3_store.root, "-creds", faulty_creds, "-framework", "hf", "-epoch", "1"]
    watch = start("watch", *flags, "-attempt", "a-e1")
    out, err = watch.communicate(timeout=60)
    assert (watch.returncode, out) == (1, "")
    assert err.splitlines()[-1].startswith("publish: store: list objects v2 s3://")
    assert "ExpiredToken" in err.splitlines()[-1]
    assert faults.faults[0].met == 2


def test_other_verbs_fail_at_the_first_refusal(
    run: Run, s3_store: Store, faults: FaultProxy, faulty_creds: str
) -> None:
    for verb in ("resolve", "prune"):
        faults.spoil("GET", "list-type=2", "status 400 ExpiredToken")
        status, out, err = run(verb, "-checkpoint", s3_store.root, "-creds", faulty_creds)
        assert (status, out) == (1, "")
        assert "ExpiredToken" in err


def test_watch_killed_at_any_time_loses_and_invents_nothing(posix_store: PosixStore) -> None:
    """Its successor publishes what is missing, and what was published stays the same."""
    for step in range(1, 9):
        put_hf(posix_store, step)
        watch = start(
            *("watch", "-checkpoint", posix_store.root, "-framework", "hf", "-interval", "0.01s", "-epoch", "1"),
            *("-attempt", "a-e1"),
        )
        time.sleep(0.03 * step)
        watch.kill()
        watch.communicate(timeout=60)
    entries = PublicationLog(posix_store).entries()
    assert [entry.step for entry in entries] == list(range(1, len(entries) + 1))
    watch = start("watch", "-checkpoint", posix_store.root, "-framework", "hf", "-epoch", "1", "-attempt", "a-e1")
    assert watch.stdout is not None
    if len(entries) < 8:
        watch.stdout.readline()
    watch.send_signal(signal.SIGTERM)
    watch.communicate(timeout=60)
    assert [entry.step for entry in PublicationLog(posix_store).entries()] == list(range(1, 9))


def test_a_broken_pipe_is_status_1(posix_store: PosixStore) -> None:
    log = PublicationLog(posix_store)
    log.publish(put_save(posix_store, "exec/a/1"), 1, 1)
    reader, writer = os.pipe()
    os.close(reader)
    resolve = subprocess.run(
        [sys.executable, "-m", "cortex_training.publication.command", "resolve", "-checkpoint", posix_store.root],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert resolve.returncode == 1
    assert resolve.stderr == "publish: nobody reads standard output any more\n"


def test_a_full_disk_behind_standard_output_is_status_1(posix_store: PosixStore) -> None:
    PublicationLog(posix_store).publish(put_save(posix_store, "exec/a/1"), 1, 1)
    with open("/dev/full", "w") as full:
        resolve = subprocess.run(
            [sys.executable, "-m", "cortex_training.publication.command", "resolve", "-checkpoint", posix_store.root],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (resolve.returncode, resolve.stderr) == (1, "publish: write to standard output: No space left on device\n")


@pytest.mark.parametrize("locale", [{"LC_ALL": "C.UTF-8"}, {"LC_ALL": "C"}, {"PYTHONIOENCODING": "ascii"}], ids=str)
def test_a_location_is_printed_as_the_bytes_it_is(tmp_path: Path, locale: dict[str, str]) -> None:
    """Whatever the locale says, and also when they are no text: the trainer opens what was printed."""
    root = os.fsencode(tmp_path) + b"/run-\xff\xc3\xbc"
    save = root + "/exec/a/ünï".encode()
    os.makedirs(save)
    for argv in (["publish", "-epoch", "1", save, "5"], ["resolve"]):
        verb, *rest = argv
        result = subprocess.run(
            [sys.executable, "-m", "cortex_training.publication.command", verb, "-checkpoint", root, *rest],
            env={"PATH": os.environ["PATH"], **locale},
            capture_output=True,
            check=False,
        )
        assert (result.returncode, result.stderr) == (0, b""), result.stderr
    assert result.stdout == save + b"\n"


PUBLISH = """
from cortex_training.publication.command import main
def work(root):
    assert main(["publish", "-checkpoint", root, "-epoch", "1", root + "/exec/a/2", "2"]) == 0
"""


def test_publish_killed_at_any_moment_is_done_or_not_done(run: Run, tmp_path: Path) -> None:
    """What resolve says is nothing or the new save; the same command again makes it the new one."""
    roots = [tmp_path / f"root-{point}" for point in range(60)]
    for root in roots:
        (root / "exec" / "a" / "2").mkdir(parents=True)
    codes = killed_at_each_call(PUBLISH, ["open", "mkdir", "fsync", "close", "stat"], roots)
    assert set(codes[:-1]) == {-signal.SIGKILL}
    outcomes = []
    for root in roots[: len(codes)]:
        save = str(root / "exec" / "a" / "2")
        status, out, err = run("resolve", "-checkpoint", str(root))
        assert (status, err) == (0, "")
        assert out in ("", f"{save}\n")
        outcomes.append(out != "")
        assert run("publish", "-checkpoint", str(root), "-epoch", "1", save, "2")[0] == 0
        assert run("resolve", "-checkpoint", str(root)) == (0, f"{save}\n", "")
    # It was killed before there was an entry and after, and an entry that is there stays.
    assert outcomes == sorted(outcomes)
    assert outcomes.count(False) > 3
    assert outcomes.count(True) > 2


def test_a_working_directory_that_is_gone_is_a_fault(posix_store: PosixStore, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    code = f"import os, sys; os.makedirs({str(gone)!r}); os.chdir({str(gone)!r}); os.rmdir({str(gone)!r})\n"
    code += "from cortex_training.publication.command import main; sys.exit(main(sys.argv[1:]))"
    for argv in (["resolve", "-checkpoint", "x"], ["publish", "-checkpoint", posix_store.root, "save", "5"]):
        result = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False)
        assert (result.returncode, result.stdout) == (1, "")
        assert "working directory" in result.stderr
        assert result.stderr.splitlines()[-1].startswith("publish: ")


def test_the_command_imports_nothing_heavy() -> None:
    code = (
        "import sys, cortex_training.publication.command\n"
        "heavy = 'numpy aiohttp safetensors torch boto3 botocore hvac pyarrow sqlalchemy snowflake.connector'.split()\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
