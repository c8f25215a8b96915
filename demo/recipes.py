"""What the demo trains, in numbers: one recipe per model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DATABASE = "CORTEX_DEMO"
SCHEMA = "PUBLIC"
TABLE = "TRAINING_EXAMPLES"

_LORA = {
    "peft_type": "Lora",
    "r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.0,
    "bias": "none",
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


@dataclass(frozen=True)
class Recipe:
    """A model and how it is fine-tuned. Sequence lengths are in tokens, batch sizes in packed sequences."""

    model_name: str
    model_folder: str
    lora: dict[str, Any] | None
    max_seq_len: int
    micro_batch_size: int
    steps: int
    save_every_steps: int
    learning_rate: float
    warmup_steps: int
    max_new_tokens: int

    def sub_jobs(self) -> list[dict[str, Any]]:
        """Wire bodies of the training and the sampling sub-job; with LoRA both carry the same adapter configuration."""
        training: dict[str, Any] = {
            "optimizer": {"name": "AdamW", "lr": self.learning_rate, "weight_decay": 0.0, "betas": [0.9, 0.999]},
            "max_seq_len": self.max_seq_len,
            "train_batch_size": self.micro_batch_size,
            "n_gpus": 1,
            "gradient_clipping": 1.0,
        }
        inference: dict[str, Any] = {"max_seq_len": self.max_seq_len, "n_gpus": 1}
        if self.lora is not None:
            training["peft_config"] = dict(self.lora)
            inference["peft_config"] = dict(self.lora)
        common = {"model_name": self.model_name, "dtype": "float32", "seed": 42}
        return [
            {"job_type": "training", **common, "training_config": training},
            {"job_type": "sampling", **common, "inference_config": inference},
        ]

    def schedule(self) -> dict[str, Any]:
        return {"schedule": "linear", "peak": self.learning_rate, "warmup_steps": self.warmup_steps}


RECIPES = {
    "smollm2": Recipe(
        model_name="HuggingFaceTB/SmolLM2-135M-Instruct",
        model_folder="smollm2-135m-instruct",
        lora=_LORA,
        max_seq_len=128,
        micro_batch_size=4,
        steps=32,
        save_every_steps=16,
        learning_rate=1e-3,
        warmup_steps=4,
        max_new_tokens=40,
    ),
    "tiny": Recipe(
        model_name="tiny",
        model_folder="tiny",
        lora=None,
        max_seq_len=256,
        micro_batch_size=8,
        steps=60,
        save_every_steps=20,
        learning_rate=5e-3,
        warmup_steps=4,
        max_new_tokens=48,
    ),
}
