"""A document that is still being written, at every point where its writer may be."""

import json

import pytest

from cortex_training.publication.partial_json import CutOff, parse_document


def trainer_states() -> dict[str, bytes]:
    """What the Trainer itself writes, with values that diverged runs and other languages put in it."""
    from transformers.trainer_callback import TrainerState

    log = [
        {"epoch": 0.5, "grad_norm": 1.25e-07, "learning_rate": 5e-05, "loss": 2.75, "step": 5},
        {"epoch": 1.0, "grad_norm": float("nan"), "learning_rate": 0.0, "loss": float("inf"), "step": 10},
        {"eval_loss": float("-inf"), "eval_runtime": -0.125, "note": 'a "quoted" \\ tab\t, ü and 𝄞', "step": 10},
    ]
    full = TrainerState(epoch=1.0, global_step=10, max_steps=20, log_history=log, best_metric=-1.5e300)
    nested = TrainerState(global_step=7, stateful_callbacks={"Stop": {"args": {"patience": [1, [2, []]]}, "on": True}})
    lines = {
        name: json.dumps(vars(state), indent=2, sort_keys=True) + "\n"
        for name, state in (("full", full), ("nested", nested))
    }
    documents = {name: text.encode() for name, text in lines.items()}
    documents["one line"] = json.dumps(vars(full)).encode()
    documents["raw unicode"] = json.dumps(vars(full), ensure_ascii=False, separators=(",", ":")).encode()
    documents["empty"] = b'{"a":{},"b":[],"c":"","d":-0.0,"e":[true,false,null],"global_step":1}'
    return documents


@pytest.fixture(scope="module")
def documents() -> dict[str, bytes]:
    return trainer_states()


def test_every_cut_of_every_document_is_seen_as_cut(documents: dict[str, bytes]) -> None:
    points = 0
    for name, document in documents.items():
        for length in range(len(document.rstrip())):
            with pytest.raises(CutOff):
                pytest.fail(f"{name} cut at {length}: {parse_document(document[:length])!r}")
            points += 1
    assert points > 2000


def test_whole_documents_are_read_with_or_without_their_last_newline(documents: dict[str, bytes]) -> None:
    for document in documents.values():
        assert parse_document(document)["global_step"] in (1, 7, 10)
        parse_document(document.rstrip())
        parse_document(document + b" \r\n\t")


def test_a_fault_stays_one_wherever_the_document_is_cut_after_it(documents: dict[str, bytes]) -> None:
    for document in documents.values():
        for fault in (b"@", b"}", b"\xff", b"\x00", b",,", b"'"):
            for at in (0, document.index(b":") + 1, document.index(b'"global_step"')):
                broken = document[:at] + fault + document[at:]
                for length in range(at + len(fault) + 1, len(broken), 37):
                    with pytest.raises(ValueError):
                        pytest.fail(f"{broken[:length]!r}: {parse_document(broken[:length])!r}")


@pytest.mark.parametrize(
    "document",
    [
        b"{} {}",
        b"{}x",
        b"{}\xc3",
        b"[1,]",
        b"{,}",
        b'{"a" 1}',
        b'{"a":1 "b"}',
        b"nule",
        b"Nan ",
        b"01",
        b"1.x",
        b"1ex",
        b'"\\x"',
        b'"\\u12x"',
        b'"a\nb"',
        b"\xef\xbb\xbf{}",
        b"\x00\x00\x00",
        b'{"a": "\xed\xa0\x80"}',
        b"[" * 100_000,
        b'{"n": ' + b"9" * 5000 + b"}",
    ],
)
def test_faults(document: bytes) -> None:
    with pytest.raises(ValueError):
        parse_document(document)


@pytest.mark.parametrize(
    "beginning",
    [
        b"",
        b" \n",
        b"{",
        b'{"',
        b'{"a',
        b'{"a"',
        b'{"a":',
        b'{"a":-',
        b'{"a":-I',
        b'{"a":1.',
        b'{"a":1e',
        b'{"a":1.5E-',
        b'{"a":1,',
        b'{"a":N',
        b'{"a":tru',
        b'{"a":"\\',
        b'{"a":"\\u',
        b'{"a":"\\u12',
        b'{"a":"\\ud834\\',
        b'{"a":"\\ud834\\udd',
        b'{"a":"\xc3',
    ],
)
def test_beginnings(beginning: bytes) -> None:
    with pytest.raises(CutOff):
        parse_document(beginning)
