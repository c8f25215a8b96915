"""A GGUF file, once, into a folder that transformers opens quickly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert_gguf(source: Path, folder: Path) -> None:
    """Write the model of `source` into `folder` as bfloat16 safetensors with its tokenizer and chat template."""
    quantised: Any = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16, local_files_only=True, trust_remote_code=False
    )
    config = quantised.config
    # transformers refuses to save a model that came from GGUF, so its weights move into a fresh model without that
    # mark.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain: Any = type(quantised)(config)
    plain.to(torch.bfloat16)
    plain.load_state_dict(quantised.state_dict())
    plain.generation_config = quantised.generation_config
    tokenizer = AutoTokenizer.from_pretrained(
        source.parent, gguf_file=source.name, local_files_only=True, trust_remote_code=False
    )
    tokenizer.save_pretrained(folder)
    plain.save_pretrained(folder)
