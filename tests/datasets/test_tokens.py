from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cortex_training.datasets import tokenizer_sha256
from cortex_training.datasets.rows import read_rows
from cortex_training.datasets.tokenizer import load_tokenizer
from cortex_training.datasets.tokens import Document, document_encoder
from cortex_training.errors import ConfigurationError

CHAT = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four"},
]


def encoded(folder: Path, row: dict[str, Any]) -> Document:
    (read,) = read_rows([row])
    return document_encoder(load_tokenizer(folder))(read)


def texts(folder: Path, document: Document) -> tuple[str, str]:
    """The whole document and its learned part, as text; Ġ and Ċ are the tokenizer's blank and line break."""
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    whole = [backend.id_to_token(int(token)) for token in document.tokens]
    learned = [token if loss else "·" for token, loss in zip(whole, document.loss, strict=True)]
    return "".join(whole), "".join(learned).strip("·")


def test_a_completion_is_learned_to_its_end_token_and_the_prompt_is_not(tokenizer_folder: Path) -> None:
    whole, learned = texts(tokenizer_folder, encoded(tokenizer_folder, {"prompt": "ask ", "completion": "answer"}))
    assert whole == "askĠanswer<|end|>"
    assert learned == "answer<|end|>"


def test_text_is_learned_but_for_its_first_token(tokenizer_folder: Path) -> None:
    document = encoded(tokenizer_folder, {"text": "the end"})
    assert texts(tokenizer_folder, document) == ("theĠend<|end|>", "Ġend<|end|>")
    assert not document.loss[0]


def test_text_that_spells_its_end_token_gets_no_second_one(tokenizer_folder: Path) -> None:
    assert texts(tokenizer_folder, encoded(tokenizer_folder, {"text": "end<|end|>"}))[0] == "end<|end|>"


def test_every_assistant_turn_is_learned_up_to_its_end_token_and_nothing_else(tokenizer_folder: Path) -> None:
    whole, learned = texts(tokenizer_folder, encoded(tokenizer_folder, {"messages": CHAT}))
    assert whole == (
        "<|turn|>systemĊBeĠbrief.<|end|>Ċ<|turn|>userĊone<|end|>Ċ<|turn|>assistantĊtwo<|end|>Ċ"
        "<|turn|>userĊthree<|end|>Ċ<|turn|>assistantĊfour<|end|>Ċ"
    )
    assert [part for part in learned.split("·") if part] == ["two<|end|>", "four<|end|>"]


def test_a_conversation_becomes_the_tokens_that_transformers_gives_it(tokenizer_folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer_folder).apply_chat_template(
        CHAT, tokenize=True, return_dict=False
    )
    assert encoded(tokenizer_folder, {"messages": CHAT}).tokens.tolist() == theirs


def test_a_question_after_the_last_answer_is_left_out(tokenizer_folder: Path) -> None:
    left = encoded(tokenizer_folder, {"messages": CHAT[:3]})
    assert left.tokens.tolist() == encoded(tokenizer_folder, {"messages": CHAT[:2]}).tokens.tolist()


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (CHAT[:1], "no message of the assistant"),
        (CHAT[1:2], "messages[0] is the assistant's"),
    ],
)
def test_a_conversation_with_nothing_to_learn_is_refused(
    tokenizer_folder: Path, messages: list[dict[str, str]], words: str
) -> None:
    with pytest.raises(ConfigurationError, match="row 1") as caught:
        encoded(tokenizer_folder, {"messages": messages})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% if %}", "does not compile"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages | length }}{{ messages[-1].content }}", "renders earlier turns differently"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_a_template_that_cannot_be_used_says_why(tokenizer_folder: Path, template: str, words: str) -> None:
    (tokenizer_folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigurationError, match="row 1") as caught:
        encoded(tokenizer_folder, {"messages": CHAT})
    assert words in str(caught.value)


def test_the_date_is_not_offered_to_templates(tokenizer_folder: Path) -> None:
    template = "{{ 'clock' if strftime_now is defined else 'no clock' }}{{ '' if add_generation_prompt else 'x' }}"
    (tokenizer_folder / "chat_template.jinja").write_text(template)
    whole, _ = texts(tokenizer_folder, encoded(tokenizer_folder, {"messages": CHAT[:2]}))
    assert whole == "noĠclockx"


def test_messages_without_a_chat_template_say_where_one_was_looked_for(tokenizer_folder: Path) -> None:
    (tokenizer_folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigurationError, match=r"chat_template\.jinja"):
        encoded(tokenizer_folder, {"messages": CHAT})


def test_a_named_list_of_templates_gives_its_default(tokenizer_folder: Path) -> None:
    template = (tokenizer_folder / "chat_template.jinja").read_text()
    before = encoded(tokenizer_folder, {"messages": CHAT}).tokens.tolist()
    (tokenizer_folder / "chat_template.jinja").unlink()
    config = tokenizer_folder / "tokenizer_config.json"
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}]
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": templates}))
    assert encoded(tokenizer_folder, {"messages": CHAT}).tokens.tolist() == before


def test_saved_padding_and_truncation_do_not_reach_the_rows(tokenizer_folder: Path) -> None:
    import tokenizers

    row = {"prompt": "ask ", "completion": "a longer answer"}
    before = encoded(tokenizer_folder, row).tokens.tolist()
    backend = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=32)
    backend.save(str(tokenizer_folder / "tokenizer.json"))
    assert encoded(tokenizer_folder, row).tokens.tolist() == before


def test_a_tokenizer_that_wraps_every_text_opens_a_sequence_and_does_not_close_the_prompt(
    tokenizer_folder: Path,
) -> None:
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|turn|> $A <|end|>", special_tokens=[("<|turn|>", 2), ("<|end|>", 0)]
    )
    backend.save(str(tokenizer_folder / "tokenizer.json"))
    document = encoded(tokenizer_folder, {"prompt": "ask ", "completion": "answer"})
    assert texts(tokenizer_folder, document)[0] == "<|turn|>askĠanswer<|end|>"


def test_a_folder_without_a_tokenizer_is_named_with_the_fix(tmp_path: Path) -> None:
    for folder, words in ((tmp_path, "has no tokenizer.json"), (tmp_path / "absent", "is not a folder")):
        with pytest.raises(ConfigurationError) as caught:
            load_tokenizer(folder)
        assert words in str(caught.value)
        assert str(folder) in str(caught.value)
        assert "save_pretrained" in str(caught.value)


def test_a_broken_tokenizer_file_is_named(tokenizer_folder: Path) -> None:
    (tokenizer_folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tokenizer_folder)


def test_a_tokenizer_without_an_end_token_is_refused(tokenizer_folder: Path) -> None:
    (tokenizer_folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="eos_token"):
        load_tokenizer(tokenizer_folder)


def test_special_tokens_are_also_found_in_the_older_file(tokenizer_folder: Path) -> None:
    (tokenizer_folder / "tokenizer_config.json").unlink()
    tokens = {"eos_token": "<|end|>", "pad_token": {"content": "<|pad|>", "lstrip": False}}
    (tokenizer_folder / "special_tokens_map.json").write_text(json.dumps(tokens))
    loaded = load_tokenizer(tokenizer_folder)
    assert (loaded.eos_token_id, loaded.pad_token_id) == (0, 1)


def test_padding_falls_back_to_the_end_token(tokenizer_folder: Path) -> None:
    (tokenizer_folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    assert load_tokenizer(tokenizer_folder).pad_token_id == 0


def test_the_tokenizer_s_hash_follows_what_decides_tokens_and_nothing_else(tokenizer_folder: Path) -> None:
    before = tokenizer_sha256(tokenizer_folder)
    (tokenizer_folder / "config.json").write_text("{}")
    assert tokenizer_sha256(tokenizer_folder) == before

    template = tokenizer_folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("Be brief.", "Be long."))
    with_template = tokenizer_sha256(tokenizer_folder)
    (tokenizer_folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|pad|>"}))
    assert len({before, with_template, tokenizer_sha256(tokenizer_folder)}) == 3
