from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cortex_training.datasets.rows import read_rows
from cortex_training.datasets.tokenizer import load_tokenizer
from cortex_training.datasets.tokens import document_encoder
from demo.heldout import Comparison, Evaluation, RowLoss, compare, evaluate

TOKENIZER = Path(__file__).parents[1] / "compat" / "tokenizer"
ROOT = Path(__file__).parents[2]
ROWS = [
    {"qualified_name": f"m.f{n}", "prompt": f"What is {n}?\n", "completion": "number " + "in there " * n}
    for n in range(1, 12)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights, exported as the service exports one."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=280,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.5,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def evaluation(model: Path) -> Evaluation:
    return evaluate(model, ROWS)


def test_each_row_s_loss_is_what_the_model_gives_that_row_alone(model: Path, evaluation: Evaluation) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    encode = document_encoder(load_tokenizer(model))
    for row, measured in zip(read_rows(ROWS), evaluation.rows, strict=True):
        document = encode(row)  # the training data's own tokens and loss, so the two cannot drift apart
        ids = torch.tensor(document.tokens[None].astype("int64"))
        labels = torch.where(torch.tensor(document.loss[None]), ids, -100)
        with torch.inference_mode():
            expected = float(network(input_ids=ids, labels=labels).loss)
        assert measured.tokens == int(document.loss.sum())
        assert measured.loss == pytest.approx(expected, rel=1e-4)


def test_rows_keep_their_order_and_the_mean_is_over_rows(evaluation: Evaluation) -> None:
    assert [row.name for row in evaluation.rows] == [row["qualified_name"] for row in ROWS]
    assert evaluation.loss == pytest.approx(sum(row.loss for row in evaluation.rows) / len(ROWS))
    assert 0 < evaluation.standard_error < evaluation.loss


def test_the_command_writes_the_same_numbers_without_our_own_code(
    model: Path, evaluation: Evaluation, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    # Names as Snowflake gives them.
    rows.write_text("".join(json.dumps({key.upper(): value for key, value in row.items()}) + "\n" for row in ROWS))
    script = f"""
import sys
from demo.heldout import main
main(["--model", {str(model)!r}, "--rows", {str(rows)!r}, "--out", {str(tmp_path / "out.json")!r}])
print([name for name in sys.modules if name.split(".")[0] == "cortex_training"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert f"{len(ROWS)} rows, loss {evaluation.loss:.4f}" in done.stdout
    read = Evaluation.read(tmp_path / "out.json")
    assert [row.name for row in read.rows] == [row.name for row in evaluation.rows]
    assert [row.loss for row in read.rows] == pytest.approx([row.loss for row in evaluation.rows])


@pytest.mark.parametrize(
    ("line", "words"),
    [('{"prompt": "q"}', "line 1: no text in qualified_name, completion"), ("", "has 0 rows")],
)
def test_bad_rows_are_named(model: Path, tmp_path: Path, line: str, words: str) -> None:
    from demo.heldout import main

    rows = tmp_path / "rows.jsonl"
    rows.write_text(line)
    with pytest.raises(SystemExit, match=words):
        main(["--model", str(model), "--rows", str(rows), "--out", str(tmp_path / "out.json")])


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    from demo.heldout import main

    with pytest.raises(SystemExit, match=r"no config\.json"):
        main(["--model", str(tmp_path), "--rows", "rows.jsonl", "--out", "out.json"])


def with_losses(*losses: float) -> Evaluation:
    return Evaluation("m", [RowLoss(f"r{n}", loss, 5) for n, loss in enumerate(losses)], 0.0, 0.0, 0.0)


def test_models_are_compared_row_by_row() -> None:
    comparison = compare(with_losses(1.0, 5.0, 3.0), with_losses(0.5, 4.2, 2.0))
    assert comparison.before == pytest.approx(3.0)
    assert comparison.after == pytest.approx(6.7 / 3)
    assert comparison.difference == pytest.approx(-2.3 / 3)
    # Differences -0.5, -0.8, -1.0: standard deviation 0.25166, over the root of three.
    assert comparison.standard_error == pytest.approx(0.25166 / math.sqrt(3), rel=1e-4)
    assert comparison.relative_change == pytest.approx(-2.3 / 9)
    assert comparison.standard_errors == pytest.approx(5.2764, rel=1e-4)


def test_rows_are_matched_by_name_and_not_by_place() -> None:
    after = Evaluation("m", [RowLoss("r1", 1.5, 5), RowLoss("r0", 0.5, 5)], 0.0, 0.0, 0.0)
    assert compare(with_losses(1.0, 2.0), after).standard_error == 0.0


def test_different_rows_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="r2"):
        compare(with_losses(1.0, 2.0, 3.0), with_losses(1.0, 2.0))
    with pytest.raises(ValueError, match="at least two"):
        compare(with_losses(1.0), with_losses(1.0))


def test_a_difference_without_error_is_infinitely_many_errors_away() -> None:
    assert Comparison(2, 1.0, 0.5, -0.5, 0.0).standard_errors == math.inf
