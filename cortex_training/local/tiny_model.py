"""The `tiny` model: a Qwen3 of about 130,000 parameters with random weights and a 512-token tokenizer, made without
torch.

Weights come from numpy's legacy generator, whose streams are frozen, and the tokenizer from text that ships with
Python: the same Python version builds the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

VOCABULARY = 512
_END_OF_TEXT, _TURN_START, _TURN_END, _PADDING = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_theta": 10000.0,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "dtype": "float32",
}


def build_tiny(folder: Path) -> None:
    """Write the model into an empty folder."""
    _write_tokenizer(folder)
    save_file(dict(_weights()), folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "generation_config.json", {"eos_token_id": [0, 2], "pad_token_id": 3})
    _write_json(folder / "config.json", _CONFIG)


@lru_cache(maxsize=1)
def tiny_fingerprint() -> str:
    """Tells the texts of different Python versions apart, in a folder's name."""
    return hashlib.sha256("\0".join(_texts()).encode()).hexdigest()[:12]


@lru_cache(maxsize=1)
def _texts() -> tuple[str, ...]:
    """Python's own manual pages, as `help()` shows them."""
    from pydoc_data.topics import topics

    return tuple(topics[name] for name in sorted(topics))


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    specials = [_END_OF_TEXT, _TURN_START, _TURN_END, _PADDING]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": _CONFIG["max_position_embeddings"],
            "eos_token": _TURN_END,
            "pad_token": _PADDING,
            "clean_up_tokenization_spaces": False,
            "chat_template": _CHAT_TEMPLATE,
        },
    )


def _weights() -> Iterator[tuple[str, np.ndarray[Any, np.dtype[np.float32]]]]:
    """Names and shapes of a Qwen3 with tied embeddings; linear layers are [out, in]."""
    draw = np.random.RandomState(20260701)

    def normal(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        scaled: np.ndarray[Any, np.dtype[np.float64]] = draw.standard_normal(shape) * _CONFIG["initializer_range"]
        return scaled.astype(np.float32)

    def ones(size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return np.ones(size, dtype=np.float32)

    hidden, inner, head = _CONFIG["hidden_size"], _CONFIG["intermediate_size"], _CONFIG["head_dim"]
    queries, keys = _CONFIG["num_attention_heads"] * head, _CONFIG["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", normal(VOCABULARY, hidden)
    for layer in range(_CONFIG["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        yield f"{name}.self_attn.q_proj.weight", normal(queries, hidden)
        yield f"{name}.self_attn.k_proj.weight", normal(keys, hidden)
        yield f"{name}.self_attn.v_proj.weight", normal(keys, hidden)
        yield f"{name}.self_attn.o_proj.weight", normal(hidden, queries)
        yield f"{name}.self_attn.q_norm.weight", ones(head)
        yield f"{name}.self_attn.k_norm.weight", ones(head)
        yield f"{name}.mlp.gate_proj.weight", normal(inner, hidden)
        yield f"{name}.mlp.up_proj.weight", normal(inner, hidden)
        yield f"{name}.mlp.down_proj.weight", normal(hidden, inner)
        yield f"{name}.input_layernorm.weight", ones(hidden)
        yield f"{name}.post_attention_layernorm.weight", ones(hidden)
    yield "model.norm.weight", ones(hidden)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
