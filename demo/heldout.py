"""How well a model answers rows it was never trained on, measured by nothing but transformers in a process of its own.

``python -m demo.heldout --model FOLDER --rows FILE.jsonl --out FILE.json [--threads N]``

It shares no code with the service that trained the model: what that service exported is read as any user of
transformers would read it. A row is put together as datasets do: the prompt, the completion, the end token; the loss
is the mean over completion and end token, in nats a token.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_BATCH_ROWS = 8


@dataclass(frozen=True)
class RowLoss:
    """Loss of one row: mean over its `tokens` learned tokens, in nats a token."""

    name: str
    loss: float
    tokens: int


@dataclass(frozen=True)
class Evaluation:
    """The losses of one model on all rows; `loss` is the mean over rows, `standard_error` that of this mean."""

    model: str
    rows: list[RowLoss]
    loss: float
    standard_error: float
    seconds: float
    v: int = 1

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Evaluation:
        record = json.loads(path.read_text())
        return cls(**{**record, "rows": [RowLoss(**row) for row in record["rows"]]})


@dataclass(frozen=True)
class Comparison:
    """Two models on the same rows, compared row by row.

    `difference` is the mean of (after - before) and `standard_error` that of this mean; rows differ far more from
    each other than a row does before and after, so the error of the paired difference is the honest and the sharper
    one.
    """

    rows: int
    before: float
    after: float
    difference: float
    standard_error: float

    @property
    def relative_change(self) -> float:
        return self.difference / self.before

    @property
    def standard_errors(self) -> float:
        """How many standard errors the difference is away from none."""
        return abs(self.difference) / self.standard_error if self.standard_error else math.inf


def compare(before: Evaluation, after: Evaluation) -> Comparison:
    """Compare two evaluations. Raises ValueError when they are not of the same rows, or of fewer than two."""
    first, second = ({row.name: row for row in evaluation.rows} for evaluation in (before, after))
    if first.keys() != second.keys() or len(first) < 2:
        only = sorted(first.keys() ^ second.keys())[:3]
        raise ValueError(
            f"{before.model} was evaluated on {len(first)} rows and {after.model} on {len(second)}, not the same ones "
            f"(for example {', '.join(only) or 'none'}); evaluate both with one rows file of at least two rows"
        )
    differences = [second[name].loss - row.loss for name, row in first.items()]
    return Comparison(
        rows=len(differences),
        before=statistics.fmean(row.loss for row in first.values()),
        after=statistics.fmean(row.loss for row in second.values()),
        difference=statistics.fmean(differences),
        standard_error=statistics.stdev(differences) / math.sqrt(len(differences)),
    )


def evaluate(folder: Path, rows: Sequence[Mapping[str, str]], threads: int = 1) -> Evaluation:
    """Evaluate the model in `folder` (Hugging Face layout, safetensors) on rows with qualified_name, prompt and
    completion."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    started = time.monotonic()
    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, dtype=torch.float32
    )
    model.eval()
    examples = [(row["qualified_name"], *_tokens(tokenizer, row)) for row in rows]
    # Alike lengths together: less padding to compute. The result is put back into the order of the rows.
    order = sorted(range(len(examples)), key=lambda index: len(examples[index][1]))
    losses: dict[int, RowLoss] = {}
    with torch.inference_mode():
        for start in range(0, len(order), _BATCH_ROWS):
            chosen = order[start : start + _BATCH_ROWS]
            batch = [examples[index] for index in chosen]
            losses.update(zip(chosen, _batch_losses(model, batch, tokenizer.eos_token_id), strict=True))
    values = [losses[index] for index in range(len(examples))]
    return Evaluation(
        model=str(folder),
        rows=values,
        loss=statistics.fmean(row.loss for row in values),
        standard_error=statistics.stdev(row.loss for row in values) / math.sqrt(len(values)),
        seconds=round(time.monotonic() - started, 3),
    )


def _tokens(tokenizer: Any, row: Mapping[str, str]) -> tuple[list[int], int]:
    """Token ids of prompt, completion and end token, and how many of them are the prompt's."""
    end = tokenizer.eos_token_id
    prompt = list(tokenizer(row["prompt"])["input_ids"])
    if len(prompt) > 1 and prompt[-1] == end and not row["prompt"].endswith(tokenizer.eos_token):
        prompt.pop()  # added by the tokenizer; the answer has to come before the end
    completion = list(tokenizer(row["completion"], add_special_tokens=False)["input_ids"])
    return prompt + completion + ([] if completion[-1:] == [end] else [end]), len(prompt)


def _batch_losses(model: Any, batch: Sequence[tuple[str, list[int], int]], pad: int) -> Iterator[RowLoss]:
    import torch

    width = max(len(ids) for _, ids, _ in batch)
    ids = torch.tensor([ids + [pad] * (width - len(ids)) for _, ids, _ in batch])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for _, ids, _ in batch])
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none"
    )  # [row, position]: of predicting the token after position
    for line, (name, tokens, prompt) in enumerate(batch):
        learned = losses[line, max(prompt, 1) - 1 : len(tokens) - 1]
        yield RowLoss(name, float(learned.mean()), len(learned))


def _read_rows(path: Path) -> list[dict[str, str]]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        row = {name.lower(): value for name, value in json.loads(line).items()}
        missing = [name for name in ("qualified_name", "prompt", "completion") if not isinstance(row.get(name), str)]
        if missing:
            raise SystemExit(f"{path}, line {number}: no text in {', '.join(missing)}; it has {', '.join(row)}")
        rows.append(row)
    if len(rows) < 2:
        raise SystemExit(f"{path} has {len(rows)} rows; a mean with an error needs two or more")
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m demo.heldout", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json, safetensors and tokenizer")
    parser.add_argument("--rows", type=Path, required=True, help="one JSON object with prompt and completion a line")
    parser.add_argument("--out", type=Path, required=True, help="where the losses go, as JSON")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    options = parser.parse_args(arguments)
    if not (options.model / "config.json").is_file():
        raise SystemExit(f"--model {options.model}: no config.json there; pass the folder of an exported checkpoint")
    evaluation = evaluate(options.model, _read_rows(options.rows), options.threads)
    evaluation.write(options.out)
    loss = f"{evaluation.loss:.4f} ± {evaluation.standard_error:.4f}"
    print(f"{len(evaluation.rows)} rows, loss {loss}, {evaluation.seconds:.1f} s")


if __name__ == "__main__":
    main()
