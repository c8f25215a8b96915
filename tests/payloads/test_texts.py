"""Texts to token ids, with a tokenizer folder made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cortex_training import build_forward_backward_payload, wire
from cortex_training.errors import ConfigurationError

tokenizers = pytest.importorskip("tokenizers")

VOCABULARY = {"<pad>": 0, "<eos>": 1, "<unk>": 2, "<bos>": 3, "a": 4, "b": 5, "c": 6, "d": 7}


def save_tokenizer(folder: Path, **settings: Any) -> str:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 3), ("<eos>", 1)]
    )
    tokenizer.enable_truncation(2)  # what its last user left behind
    tokenizer.enable_padding(length=9)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "pad_token": "<pad>"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return str(folder)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return save_tokenizer(tmp_path / "tokenizer", eos_token="<eos>")


def kwargs(texts: Any, tokenizer: Any, **options: Any) -> dict[str, Any]:
    spec = {"texts": texts, "tokenizer": tokenizer, "attention_mask": True, **options}
    value = wire.loads(build_forward_backward_payload(spec), framework="numpy")["kwargs"]
    return {name: array.tolist() for name, array in value.items()}


def test_texts_are_padded_to_the_maximum_and_padding_has_no_labels(folder):
    assert kwargs(["a b c", "d"], folder, max_length=6) == {
        "input_ids": [[3, 4, 5, 6, 1, 0], [3, 7, 1, 0, 0, 0]],
        "attention_mask": [[1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]],
        "labels": [[4, 5, 6, 1, -100, -100], [7, 1, -100, -100, -100, -100]],
    }


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        ({"padding": "longest"}, [[3, 4, 5, 6, 1], [3, 7, 1, 0, 0]]),
        ({"padding": True, "add_special_tokens": False}, [[4, 5, 6], [7, 0, 0]]),
        ({"max_length": 4}, [[3, 4, 5, 1], [3, 7, 1, 0]]),
        ({"max_length": 2, "padding": "longest", "add_special_tokens": False}, [[4, 5], [7, 0]]),
        ({"max_length": 3, "batch_size": 3}, [[3, 4, 1], [3, 7, 1], [3, 4, 1]]),
        ({"max_length": 3, "batch_size": 1}, [[3, 4, 1]]),
        ({"max_length": 3, "padding": False}, [[3, 4, 1], [3, 7, 1]]),
    ],
)
def test_options(folder, options, ids):
    assert kwargs(["a b c", "d"], folder, **options)["input_ids"] == ids


def test_one_text_and_every_way_to_name_a_folder(folder):
    for tokenizer in (folder, {"path": folder}, {"name": folder}, {"model_name": folder, "trust_remote_code": False}):
        assert kwargs("a", tokenizer, max_length=3)["input_ids"] == [[3, 4, 1]]


def test_padding_falls_back_to_the_end_token_and_respects_the_side(tmp_path):
    end = save_tokenizer(tmp_path / "end", pad_token=None, eos_token={"content": "<eos>"})
    assert kwargs("a", end, max_length=5)["input_ids"] == [[3, 4, 1, 1, 1]]
    left = save_tokenizer(tmp_path / "left", padding_side="left", truncation_side="left")
    assert kwargs(["a"], left, max_length=5, labels="none") == {
        "input_ids": [[0, 0, 3, 4, 1]],
        "attention_mask": [[0, 0, 1, 1, 1]],
    }
    assert kwargs(["a b c"], left, max_length=3)["input_ids"] == [[3, 6, 1]]


def test_the_tokenizers_library_and_transformers_agree(tmp_path, folder, monkeypatch):
    pytest.importorskip("transformers")
    from cortex_training import _texts

    sides = save_tokenizer(tmp_path / "sides", padding_side="left", truncation_side="left")
    for tokenizer in (folder, sides):
        for options in ({"max_length": 4}, {"padding": "longest"}, {"max_length": 7, "add_special_tokens": False}):
            expected = kwargs(["a b c d", "d", "x"], tokenizer, **options)
            with monkeypatch.context() as patch:
                patch.setattr(_texts, "_from_folder", lambda path: _texts._from_transformers(str(path), {}))
                assert kwargs(["a b c d", "d", "x"], tokenizer, **options) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "max_length = None: must be a positive integer, or set padding to 'longest'"),
        ({"max_length": 0}, "max_length = 0: must be a positive integer"),
        ({"max_length": True}, "max_length = True"),
        ({"max_length": 3, "batch_size": "2"}, "batch_size = '2': must be a positive integer"),
        ({"max_length": 3, "texts": []}, "texts = .*must be a non-empty list of strings"),
        ({"max_length": 3, "texts": [1]}, "texts = .*must be a non-empty list of strings"),
        ({"max_length": 3, "padding": "short"}, "padding = 'short': must be"),
        ({"max_length": 3, "truncation": "no"}, "truncation = 'no': must be true or false"),
        ({"max_length": 2, "truncation": False}, r"texts\[0\] has 4 tokens, more than max_length 2: raise it or allow"),
        ({"padding": False}, r"texts\[1\] has 3 tokens and another 4: set padding"),
    ],
)
def test_bad_options(folder, options, message):
    with pytest.raises(ConfigurationError, match=message):
        build_forward_backward_payload({"texts": ["a b", "c"], "tokenizer": folder, **options})


def test_bad_tokenizers(tmp_path, folder):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    nothing_to_pad_with = save_tokenizer(tmp_path / "padless", pad_token=None)
    for tokenizer, message in (
        (5, "tokenizer = 5: must be a folder"),
        ({}, "tokenizer.model_name = None: is required"),
        ({"path": folder, "padding": True}, r"unknown field\(s\) \['padding'\]"),
        ({"path": folder, "trust_remote_code": True}, "code of a model is never run"),
        (str(tmp_path / "broken"), "cannot be read"),
        (nothing_to_pad_with, "neither a padding nor an end token"),
        (str(tmp_path), "tokenizer = .*cannot be loaded"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            build_forward_backward_payload({"texts": ["a", "b c"], "tokenizer": tokenizer, "padding": "longest"})
