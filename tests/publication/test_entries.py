import base64

import pytest

from cortex_training.errors import ConfigurationError
from cortex_training.publication import Entry, LogError
from cortex_training.publication.entries import MAX_NUMBER, longest_save, parse_number

SAVE = "exec/1f0c2a9b4d5e-e1/cp_9d0f"


def entry(save: str = SAVE, epoch: int = 3, step: int = 120, longest: int = 255) -> Entry:
    return Entry.of(epoch, step, save, "/root", longest)


def name_of(save: bytes, epoch: str = "0" * 20, step: str = "0" * 20) -> str:
    return f"{epoch}-{step}-{base64.b32encode(save).decode().rstrip('=')}"


def test_name_is_the_documented_format() -> None:
    assert Entry.of(1, 2, "exec/a/checkpoint-2", "", 255).name == (
        "00000000000000000001-00000000000000000002-MV4GKYZPMEXWG2DFMNVXA33JNZ2C2MQ"
    )


@pytest.mark.parametrize("save", [SAVE, "a", "exec/ünï/checkpoint-1", "exec/a b/c", "saves/pub"])
def test_a_name_reads_back_as_its_entry(save: str) -> None:
    made = entry(save)
    assert Entry.parse(made.name, "/root") == made
    assert made.location == f"/root/{save}"


def test_names_sort_by_epoch_then_step() -> None:
    pairs = [(0, MAX_NUMBER), (1, 0), (1, 9), (1, 10), (2, 1), (10, 0), (MAX_NUMBER, MAX_NUMBER)]
    names = [entry(epoch=epoch, step=step).name for epoch, step in pairs]
    assert names == sorted(names)


GOOD = name_of(b"exec/a/b")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "README",
        GOOD.lower(),
        GOOD + "=",
        GOOD + "/",
        GOOD + "\n",
        GOOD[1:],
        "0" + GOOD,
        GOOD.replace("-", "_"),
        f"{'0' * 20}-{'0' * 20}-",
        f"{'9' * 20}-{'0' * 20}-MFRGG",
        f"{'٣' * 20}-{'0' * 20}-MFRGG",
        f"{'0' * 20}-{'0' * 20}-MFRGH",  # the bytes of MFRGG, with stray bits at the end
        f"{'0' * 20}-{'0' * 20}-A",
        f"{'0' * 20}-{'0' * 20}-M1RGG",
        name_of(b"\xff\xfe"),
        name_of(b"/etc"),
        name_of(b"exec/../../etc"),
        name_of(b"exec/./a"),
        name_of(b"exec//a"),
        name_of(b"exec/a/"),
        name_of(b"pub"),
        name_of(b"pub/x"),
        name_of(b"journal/1"),
        name_of(b"epochs"),
        name_of(b"exec"),
        name_of(b"a\x00b"),
        name_of(b"a\nb"),
        name_of(b"a\\b"),
    ],
)
def test_a_name_that_is_not_exactly_an_entry_is_an_error_that_names_it(name: str) -> None:
    with pytest.raises(LogError) as raised:
        Entry.parse(name, "/root")
    assert repr(f"/root/pub/{name}") in str(raised.value)


@pytest.mark.parametrize("number", [-1, MAX_NUMBER + 1, True, 1.0, "1"])
def test_numbers_outside_64_bits_are_refused(number: object) -> None:
    with pytest.raises(ConfigurationError, match="step"):
        entry(step=number)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="epoch"):
        entry(epoch=number)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "save", ["", "/abs", "exec/..", "exec", "pub/x", "epochs/1", "journal", "a//b", "a\\b", "\ud800"]
)
def test_saves_that_are_no_folder_of_their_own_are_refused(save: str) -> None:
    with pytest.raises(ConfigurationError):
        entry(save)


def test_a_save_path_has_133_bytes_on_a_file_system() -> None:
    assert longest_save(255) == 133
    assert len(entry("a" * 133).name) == 255
    with pytest.raises(ConfigurationError, match=r"134 bytes long.*room for 133"):
        entry("a" * 134)
    with pytest.raises(ConfigurationError, match="134 bytes long"):
        entry("é" * 67)


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("007", 7), (str(MAX_NUMBER), MAX_NUMBER)])
def test_numbers_are_plain_digits(text: str, number: int) -> None:
    assert parse_number(text) == number


@pytest.mark.parametrize("text", ["", " 1", "1 ", "-1", "+1", "1e3", "0x1", "1_000", "٣", str(MAX_NUMBER + 1), "1\n"])
def test_other_spellings_of_numbers_are_none(text: str) -> None:
    assert parse_number(text) is None
