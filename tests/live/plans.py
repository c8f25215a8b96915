"""What the live tests train, under either engine: a plan for the tiny model, and its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cortex_training.datasets import build_dataset
from cortex_training.local.models import model_folder


def training_plan(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    """A plan for the tiny model that owns its job, in ``<folder>/<name>``; makes its dataset if there is none yet."""
    manifest = folder / "dataset" / "manifest.json"
    if not manifest.exists():
        rows = [{"prompt": f"What comes after {n}?", "completion": f"After {n} comes {n + 1}."} for n in range(100)]
        build_dataset(rows, manifest.parent, tokenizer=model_folder("tiny"), max_seq_len=128, seed=1)
    return {
        "root": str(folder / name),
        "dataset": str(manifest),
        "sub_jobs": [training_sub_job()],
        "micro_batch_size": 2,
        "micro_batches_per_step": 2,
        "save_every_steps": 4,
        "learning_rate": {"schedule": "constant", "peak": 3e-3},
        **changes,
    }


def training_sub_job() -> dict[str, Any]:
    training = {"optimizer": {"name": "AdamW", "lr": 3e-3}, "max_seq_len": 128, "train_batch_size": 2, "n_gpus": 1}
    return {"job_type": "training", "model_name": "tiny", "dtype": "float32", "seed": 7, "training_config": training}
