from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cortex_training.datasets import Dataset, check_window, tokenizer_sha256
from cortex_training.errors import ConfigurationError

TOKENIZER = Path(__file__).parents[1] / "compat" / "tokenizer"
Build = Callable[..., Dataset]
Pairs = list[dict[str, str]]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_manifest_counts_what_the_shards_hold(build: Build, pairs: Pairs) -> None:
    dataset = build(pairs, seed=4, source="select * from pairs")
    manifest = dataset.manifest
    used = [dataset._sequences.sequence(index) for index in range(manifest.sequences)]
    assert manifest.rows == manifest.documents == 40
    assert manifest.documents == sum(len(sequence.lengths) for sequence in used)
    assert manifest.tokens == sum(len(sequence.tokens) for sequence in used)
    assert manifest.loss_tokens == sum(int(sequence.loss.sum()) for sequence in used)
    assert manifest.longest_sequence == max(len(sequence.tokens) for sequence in used) <= manifest.max_seq_len == 64
    assert (manifest.seed, manifest.source, manifest.pad_token_id) == (4, "select * from pairs", 1)
    assert manifest.tokenizer_sha256 == tokenizer_sha256(TOKENIZER)


def test_building_twice_gives_the_same_files(build: Build, pairs: Pairs, tmp_path: Path) -> None:
    build(pairs, out=tmp_path / "a")
    build(iter(pairs), out=tmp_path / "b")
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_the_content_hash_does_not_depend_on_how_files_are_cut(build: Build, pairs: Pairs, tmp_path: Path) -> None:
    whole = build(pairs, out=tmp_path / "whole")
    cut = build(pairs, out=tmp_path / "cut", shard_tokens=100)
    assert len(whole.manifest.shards) == 1
    assert len(cut.manifest.shards) > 3
    assert cut.manifest.content_sha256 == whole.manifest.content_sha256
    assert cut.batches(3, 2, 5).frame(2, 1) == whole.batches(3, 2, 5).frame(2, 1)


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"max_seq_len": 80}, {"rows": 39}, {"completion": "4 "}],
    ids=lambda change: next(iter(change)),
)
def test_the_content_hash_follows_whatever_changes_frames(
    build: Build, pairs: Pairs, tmp_path: Path, change: dict[str, Any]
) -> None:
    before = build(pairs, out=tmp_path / "before").manifest.content_sha256
    options = {key: value for key, value in change.items() if key in ("seed", "max_seq_len")}
    rows = pairs[: change.get("rows", 40)]
    rows[2] = {**rows[2], "completion": change.get("completion", "4")}
    assert build(rows, out=tmp_path / "after", **options).manifest.content_sha256 != before


def test_an_empty_source_is_named(build: Build) -> None:
    cursor = sqlite3.connect(":memory:").execute("select 'q' as prompt, 'a' as completion where 1 = 0")
    with pytest.raises(ConfigurationError, match="no rows") as caught:
        build(cursor, source="TRAINING_EXAMPLES where SPLIT = 'train'")
    assert "TRAINING_EXAMPLES where SPLIT = 'train'" in str(caught.value)


def test_a_row_longer_than_the_window_names_row_length_limit_and_fix(build: Build, pairs: Pairs) -> None:
    pairs[17]["completion"] = "9" * 90
    with pytest.raises(ConfigurationError) as caught:
        build(pairs)
    message = str(caught.value)
    assert "row 18 is 112 tokens long" in message
    assert "max_seq_len is 64" in message
    assert "overlong='truncate'" in message


def test_overlong_rows_are_cut_or_left_out_on_request(build: Build, pairs: Pairs, tmp_path: Path) -> None:
    pairs[17]["completion"] = "9" * 90
    pairs[18]["prompt"] = "why? " * 30  # nothing to learn is left of this one
    cut = build(pairs, out=tmp_path / "cut", overlong="truncate").manifest
    assert (cut.rows, cut.documents, cut.truncated_rows, cut.skipped_rows) == (40, 39, 1, 1)
    skipped = build(pairs, out=tmp_path / "skipped", overlong="skip").manifest
    assert (skipped.rows, skipped.documents, skipped.truncated_rows, skipped.skipped_rows) == (40, 38, 0, 2)
    assert skipped.longest_sequence <= 64


def test_a_dataset_of_which_every_row_was_skipped_is_refused(build: Build, pairs: Pairs) -> None:
    with pytest.raises(ConfigurationError, match="all 40 rows of here were skipped"):
        build(pairs, max_seq_len=8, overlong="skip", source="here")


@pytest.mark.parametrize(
    ("option", "value"),
    [("max_seq_len", 1), ("max_seq_len", True), ("max_seq_len", "64"), ("seed", 1.5), ("overlong", "cut")],
)
def test_impossible_arguments_are_named_before_a_row_is_read(build: Build, option: str, value: object) -> None:
    def rows() -> Iterator[dict[str, str]]:
        raise AssertionError("a row was read")
        yield {}

    with pytest.raises(ConfigurationError, match=option) as caught:
        build(rows(), **{option: value})
    assert repr(value) in str(caught.value)


def test_a_failed_build_leaves_the_dataset_that_was_there(build: Build, pairs: Pairs, tmp_path: Path) -> None:
    out = tmp_path / "dataset"
    build(pairs)
    before = files(out)
    with pytest.raises(ConfigurationError):
        build([*pairs, {"question": "q"}], shard_tokens=100)
    assert files(out) == before


def test_a_smaller_dataset_replaces_a_larger_one_completely(build: Build, pairs: Pairs, tmp_path: Path) -> None:
    build(pairs, shard_tokens=100)
    build(pairs[:5], shard_tokens=100)
    assert sorted(files(tmp_path / "dataset")) == ["manifest.json", "shard-00000.safetensors"]


def test_progress_is_told_rows_and_tokens(build: Build) -> None:
    seen: list[tuple[int, int]] = []
    rows = ({"text": f"line {number}"} for number in range(2500))
    manifest = build(rows, progress=lambda rows, tokens: seen.append((rows, tokens))).manifest
    assert [rows for rows, _ in seen] == [1000, 2000, 2500]
    assert seen[-1] == (manifest.rows, manifest.tokens)


def test_a_source_of_many_rows_is_not_held_in_memory(tmp_path: Path) -> None:
    """200,000 rows of 4 KB are 800 MB; the process that builds from them must stay far below that."""
    script = f"""
import resource, sys
from cortex_training.datasets import build_dataset
import tokenizers, safetensors.numpy

def rows():
    for number in range(200_000):
        yield {{"text": "ab", "notes": str(number) * 800}}

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
build_dataset(rows(), {str(tmp_path / "dataset")!r}, tokenizer={str(TOKENIZER)!r}, max_seq_len=64)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    grown_mib = int(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout)
    assert grown_mib < 250


@pytest.fixture
def built(build: Build, pairs: Pairs, tmp_path: Path) -> Path:
    build(pairs, shard_tokens=100)
    return tmp_path / "dataset"


def the_error(manifest: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        Dataset.open(manifest)
    return str(caught.value)


def test_a_changed_shard_is_named_with_both_hashes_and_the_fix(built: Path) -> None:
    shard = built / "shard-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    expected = json.loads((built / "manifest.json").read_text())["shards"][1]["sha256"]
    message = the_error(built / "manifest.json")
    assert str(shard) in message
    assert f"expected sha256 {expected}, found " in message
    assert "build the dataset again" in message
    Dataset.open(built / "manifest.json", verify=False)  # sizes still agree


def test_a_shard_of_another_size_is_found_without_reading_it(built: Path) -> None:
    shard = built / "shard-00001.safetensors"
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(ConfigurationError, match=f"is {size - 8} bytes and the manifest says {size}"):
        Dataset.open(built / "manifest.json", verify=False)


def test_a_missing_shard_is_named(built: Path) -> None:
    (built / "shard-00002.safetensors").unlink()
    assert "shard-00002.safetensors is missing" in the_error(built / "manifest.json")


ABSENT = object()


def edited(built: Path, **changes: Any) -> Path:
    path = built / "manifest.json"
    record = json.loads(path.read_text())
    record.update({key: value for key, value in changes.items() if value is not ABSENT})
    path.write_text(json.dumps({key: value for key, value in record.items() if changes.get(key) is not ABSENT}))
    return path


def test_a_content_hash_that_is_not_of_these_shards_is_found(built: Path) -> None:
    message = the_error(edited(built, content_sha256="0" * 64))
    assert "0" * 64 in message
    assert "belongs to another dataset" in message


def test_shards_in_another_order_are_found(built: Path) -> None:
    shards = json.loads((built / "manifest.json").read_text())["shards"]
    assert "content_sha256" in the_error(edited(built, shards=shards[::-1]))


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd", ""])
def test_shard_names_cannot_leave_the_folder(built: Path, name: str) -> None:
    shards = json.loads((built / "manifest.json").read_text())["shards"]
    assert "not a relative path" in the_error(edited(built, shards=[{**shards[0], "name": name}]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"v": 2}, "upgrade"),
        ({"v": ABSENT}, "has no version"),
        ({"tokens": ABSENT}, "unusable"),
        ({"shards": ABSENT}, "unusable"),
        ({"frame_version": 2}, "frame version 2"),
    ],
)
def test_a_manifest_that_cannot_be_used_says_why(built: Path, changes: dict[str, Any], words: str) -> None:
    message = the_error(edited(built, **changes))
    assert words in message
    assert str(built) in message


def test_a_missing_manifest_a_folder_and_a_file_that_is_not_one_are_told_apart(built: Path) -> None:
    assert "does not exist" in the_error(built / "absent.json")
    assert "is a folder; pass" in the_error(built)
    (built / "manifest.json").write_text("rows")
    assert "not JSON" in the_error(built / "manifest.json")


def test_fields_of_a_later_release_are_left_aside(built: Path) -> None:
    assert Dataset.open(edited(built, created_by="later")).manifest.documents == 40


def test_the_model_s_window_is_compared_with_the_longest_sequence(build: Build) -> None:
    manifest = build([{"text": "x" * 19}], max_seq_len=64).manifest
    check_window(manifest, 20)
    with pytest.raises(ConfigurationError, match="window is 19 tokens and the dataset's longest sequence is 20"):
        check_window(manifest, 19)


def test_building_and_reading_import_only_what_they_need(built: Path) -> None:
    script = f"""
import sys
from cortex_training.datasets import Dataset, build_dataset
Dataset.open({str(built / "manifest.json")!r}).batches(2, 2, 0).frame(1, 0)
print(sorted({{"torch", "transformers", "pyarrow", "tokenizers", "jinja2", "pandas"}} & set(sys.modules)))
"""
    assert subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout == "[]\n"
