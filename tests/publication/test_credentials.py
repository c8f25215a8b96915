"""Where credentials come from, which failure passes to the next source and which one stops."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cortex_training.publication import CredentialsError
from cortex_training.publication.credentials import Credentials, parse_sources, resolve
from tests.publication.servers import write_secret

KEYS = {"access_key_id": "AKIATESTONLY", "secret_access_key": "hush-hush/+="}


def found(text: str) -> tuple[Credentials, str]:
    return resolve(parse_sources(text))


def secret(directory: Path, **fields: str) -> str:
    return write_secret(directory, **fields).replace("file:", "secret:")


@pytest.mark.parametrize("kind", ["secret", "file"])
def test_the_fields_of_a_directory(tmp_path: Path, kind: str) -> None:
    source = write_secret(tmp_path / "c", **KEYS).replace("file", kind)
    assert found(source) == (Credentials("AKIATESTONLY", "hush-hush/+=", None, None, "us-east-1"), source)
    write_secret(tmp_path / "c", session_token="token\n", endpoint="https://s3.example:9000\n", region="eu-west-1")
    credentials, _ = found(source)
    assert credentials.session_token == "token"
    assert credentials.endpoint == "https://s3.example:9000"
    assert credentials.region == "eu-west-1"


def test_secrets_are_in_no_representation(tmp_path: Path) -> None:
    credentials, _ = found(write_secret(tmp_path / "c", **KEYS, session_token="also-secret"))
    for value in ("hush-hush", "also-secret", "AKIATESTONLY"):
        assert value not in repr(credentials)


def test_the_first_source_that_answers_is_used(tmp_path: Path) -> None:
    absent = f"file:{tmp_path}/absent,secret:{tmp_path}/nowhere"
    first, second = write_secret(tmp_path / "a", **KEYS), write_secret(tmp_path / "b", **KEYS)
    assert found(f"{absent},{first},{second}")[1] == first
    assert found(f"{second},{first}")[1] == second


def test_when_none_answers_each_is_named_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(CredentialsError) as raised:
        found(f"file:{tmp_path}/absent,secret:{tmp_path}/nowhere")
    assert str(raised.value) == (
        f"credentials: no source answered: file:{tmp_path}/absent: there is no directory {tmp_path}/absent; "
        f"secret:{tmp_path}/nowhere: there is no directory {tmp_path}/nowhere"
    )


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("password", "x", "unknown field 'password'"),
        ("secret_access_key", "", "secret_access_key is empty"),
        ("secret_access_key", "two words", "secret_access_key holds white space"),
        ("secret_access_key", "line\n\n", "secret_access_key holds white space"),
        ("secret_access_key", "line\r\n", "secret_access_key holds white space"),
        ("secret_access_key", "nul\x00", "secret_access_key holds white space"),
        ("access_key_id", "AKIA𝄞", "access_key_id holds a character that no header can"),
        ("session_token", "hush-hush-ü", "session_token holds a character that no header can"),
        ("endpoint", "s3.example:9000", "endpoint: it does not start with http"),
        ("endpoint", "https://s3.example/bucket", "endpoint: it has a path"),
        ("endpoint", "https://s3.example/", "endpoint: it has a path"),
        ("endpoint", "https://key:hush-hush@s3.example", "endpoint: it holds a user name"),
        ("endpoint", "https://s3.example?x=hush-hush", "endpoint: it has a path, a query"),
        ("endpoint", "https://s3.example:port", "endpoint: not a URL"),
        ("region", "eu/west", "region"),
        ("region", "x" * 70_000, "larger than"),
    ],
)
@pytest.mark.parametrize("kind", ["secret", "file"])
def test_a_source_that_is_there_but_wrong_stops_the_search(
    tmp_path: Path, kind: str, name: str, value: str, said: str
) -> None:
    wrong = write_secret(tmp_path / "wrong", **(KEYS | {name: value})).replace("file:", f"{kind}:")
    good = write_secret(tmp_path / "good", **KEYS)
    with pytest.raises(CredentialsError) as raised:
        found(f"{wrong},{good}")
    assert f"credentials: {wrong}: " in str(raised.value)
    assert said in str(raised.value)
    assert "hush-hush" not in str(raised.value)


@pytest.mark.parametrize("kind", ["secret", "file"])
@pytest.mark.parametrize("missing", list(KEYS))
def test_both_keys_are_needed(tmp_path: Path, kind: str, missing: str) -> None:
    source = write_secret(tmp_path / "c", **{name: value for name, value in KEYS.items() if name != missing})
    with pytest.raises(CredentialsError, match=f"no field {missing}"):
        found(source.replace("file", kind))


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    source = write_secret(tmp_path / "c", **KEYS)
    (tmp_path / "c" / "region").write_bytes(b"\xff")
    (tmp_path / "c" / "region").chmod(0o600)
    with pytest.raises(CredentialsError, match="region is not UTF-8"):
        found(source)


def test_a_mounted_secret_is_read_through_the_kubelets_links_whatever_its_modes(tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    data = mount / "..2026_01_01"
    data.mkdir(parents=True)
    for name, value in KEYS.items():
        (data / name).write_text(value)
        (data / name).chmod(0o644)
        (mount / name).symlink_to(f"..data/{name}")
    (mount / "..data").symlink_to("..2026_01_01")
    mount.chmod(0o755)
    assert found(f"secret:{mount}")[0].access_key_id == "AKIATESTONLY"


@pytest.mark.parametrize("mode", [0o710, 0o701, 0o750, 0o777])
def test_a_directory_of_the_user_is_closed_to_others(tmp_path: Path, mode: int) -> None:
    source = write_secret(tmp_path / "c", **KEYS)
    (tmp_path / "c").chmod(mode)
    with pytest.raises(CredentialsError, match=f"{tmp_path}/c is open to group or others"):
        found(source)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_so_are_its_files(tmp_path: Path, mode: int) -> None:
    source = write_secret(tmp_path / "c", **KEYS)
    (tmp_path / "c" / "access_key_id").chmod(mode)
    with pytest.raises(CredentialsError, match="c/access_key_id is open to group or others"):
        found(source)


def test_a_directory_of_the_user_holds_no_links_and_no_folders(tmp_path: Path) -> None:
    source = write_secret(tmp_path / "c", **KEYS)
    (tmp_path / "c" / "region").symlink_to(tmp_path / "c" / "access_key_id")
    with pytest.raises(CredentialsError, match="read region: it is a symbolic link"):
        found(source)
    (tmp_path / "c" / "region").unlink()
    (tmp_path / "c" / "region").mkdir()
    with pytest.raises(CredentialsError, match="region is not a file"):
        found(source)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a directory away")
def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    source = write_secret(tmp_path / "c", **KEYS)
    os.chown(tmp_path / "c", 12345, -1)
    with pytest.raises(CredentialsError, match="belongs to user 12345"):
        found(source)


def test_a_file_in_place_of_the_directory_is_wrong_and_not_absent(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("")
    with pytest.raises(CredentialsError, match="Not a directory"):
        found(f"file:{tmp_path}/c")


@pytest.mark.parametrize(
    "text", ["", ",", "file", "file:", ":x", "file:/a,", "file:/a,,file:/b", " file:/a", "env:AWS", "conn:x", "/path"]
)
def test_lists_that_do_not_parse(text: str) -> None:
    with pytest.raises(CredentialsError, match=r"^credentials: "):
        parse_sources(text)


@pytest.mark.parametrize("text", ["AKIAKEY,s3cr3t", "AKIAKEY:s3cr3t", "file:/a,AKIAKEY:s3cr3t", "s3cr3t"])
def test_credentials_in_place_of_a_list_are_not_repeated(text: str) -> None:
    with pytest.raises(CredentialsError, match=r"part [12] of the list") as caught:
        parse_sources(text)
    assert "AKIAKEY" not in str(caught.value)
    assert "s3cr3t" not in str(caught.value)
