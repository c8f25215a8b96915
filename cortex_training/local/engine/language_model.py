"""A causal language model from a folder, with or without a LoRA adapter, and its weights under their plain names."""

from __future__ import annotations

import copy
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Nothing in this process ever asks a model hub for anything.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer

from cortex_training.local.engine.attention import attention_for
from cortex_training.local.engine.batch import Batch
from cortex_training.local.engine.process import machine_device
from cortex_training.local.engine.randomness import RandomStream
from cortex_training.local.tuning import LoraSettings

_messages: Any = transformers.logging
_messages.set_verbosity_error()
_messages.disable_progress_bar()

Weights = dict[str, torch.Tensor]

# While transformers loads a model, torch's initialisers are switched off and its default dtype is the model's, for the
# whole process. A second load at the same time would come out broken; code that computes meanwhile in another thread
# must name its dtypes.
_one_load_at_a_time = threading.Lock()

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip


@dataclass
class LanguageModel:
    """A model in memory and the folder that its tokenizer comes from."""

    module: Any
    """The transformers model, or the PeftModel around it."""
    folder: Path
    lora: LoraSettings | None
    base_is_original: bool = True
    """False when the weights were loaded from a checkpoint, so that an adapter on them does not tell all."""

    @property
    def device(self) -> torch.device:
        device: torch.device = self.module.device
        return device

    @property
    def vocabulary(self) -> int:
        return int(self.module.get_input_embeddings().num_embeddings)

    @property
    def has_dropout(self) -> bool:
        return any(isinstance(part, torch.nn.Dropout) and part.p > 0 for part in self.module.modules()) or any(
            float(getattr(self.module.config, name, 0.0) or 0.0) > 0 for name in ("attention_dropout", "hidden_dropout")
        )

    def logits(self, batch: Batch) -> torch.Tensor:
        """[batch, sequence, vocabulary], in the model's dtype."""
        mask = attention_for(batch.attention_mask, batch.position_ids, self.module.dtype)
        output = self.module(
            input_ids=batch.input_ids, attention_mask=mask, position_ids=batch.position_ids, use_cache=False
        )
        logits: torch.Tensor = output.logits
        return logits

    def trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        return {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}

    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)

    def tokenizer_files(self) -> list[Path]:
        return [path for name in _TOKENIZER_FILES if (path := self.folder / name).is_file()]

    def merged(self) -> Any:
        """The transformers model with any adapter merged into its weights; the model itself without one."""
        if self.lora is None:
            return self.module
        # A copy: merging and unmerging in place would not give back the same bits.
        return copy.deepcopy(self.module).merge_and_unload()

    def full_weights(self) -> Weights:
        """A copy of every weight, any adapter merged, under the names of the plain model."""
        return {name: tensor.detach().clone() for name, tensor in self.merged().state_dict().items()}

    def adapter_weights(self) -> Weights:
        """A copy of the adapter's weights, under PEFT's names."""
        adapter = get_peft_model_state_dict(self.module, save_embedding_layers=False)
        return {name: tensor.detach().clone() for name, tensor in adapter.items()}

    def set_full_weights(self, weights: Weights) -> None:
        """Take all weights of a plain model. An adapter starts anew: the weights hold what it had learned.

        Raises ValueError, having changed nothing, when they are of a model of another shape.
        """
        self._copy_base(weights)
        self.base_is_original = False
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                if ".lora_B." in name or ".lora_embedding_B." in name:
                    parameter.zero_()

    def base_weights(self) -> Weights:
        """A copy of the weights under the adapter, under the names of the plain model, tied ones once."""
        seen: set[int] = set()
        copies: Weights = {}
        for name, tensor in self._plain_weights().items():
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                copies[name] = tensor.detach().clone().contiguous()
        return copies

    def set_base_weights(self, weights: Weights | None) -> None:
        """Put weights under the adapter; None: the model's own as it came. Raises ValueError for another shape."""
        if weights is not None:
            self._copy_base(weights)
        elif not self.base_is_original:
            with _one_load_at_a_time:
                original = _load_plain(self.folder, self.module.dtype)
            self._copy_base(dict(original.state_dict()))
        self.base_is_original = weights is None

    def _copy_base(self, weights: Weights) -> None:
        own = self._plain_weights()
        _check_same_shape(own, weights)
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)

    def _plain_weights(self) -> Weights:
        """The plain model's weights themselves, without the adapter's, under their plain names."""
        plain = self.module if self.lora is None else self.module.get_base_model()
        state = plain.state_dict().items()
        return {name.replace(".base_layer.", "."): tensor for name, tensor in state if ".lora_" not in name}

    def set_adapter_weights(self, weights: Weights) -> None:
        """Take an adapter's weights. Raises ValueError, having changed nothing, when they are of another adapter."""
        _check_same_shape(get_peft_model_state_dict(self.module, save_embedding_layers=False), weights)
        set_peft_model_state_dict(self.module, weights)


def _check_same_shape(own: Weights, given: Weights) -> None:
    shared = {tensor.data_ptr() for name, tensor in own.items() if name in given}
    # Of tied weights, one file names one.
    missing = [name for name, tensor in own.items() if name not in given and tensor.data_ptr() not in shared]
    unknown = [name for name in given if name not in own]
    if missing or unknown:
        raise ValueError(f"the weights are of another model: {(missing + unknown)[0]} is only in one of the two")
    for name, tensor in given.items():
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} in the weights and {tuple(own[name].shape)} in this model"
            )


def load_language_model(
    folder: Path, *, dtype: str, lora: LoraSettings | None, random: RandomStream, window: int
) -> LanguageModel:
    """Load a model, with a fresh adapter if `lora` asks for one, and with room for sequences of `window` tokens."""
    with _one_load_at_a_time:
        return _load_language_model(folder, getattr(torch, dtype), lora, random, window)


def _load_language_model(
    folder: Path, dtype: torch.dtype, lora: LoraSettings | None, random: RandomStream, window: int
) -> LanguageModel:
    module = _load_plain(folder, dtype)
    # Rotary positions need no table, so a stand-in can take the longer sequences of the model that it stands for.
    module.config.max_position_embeddings = max(int(getattr(module.config, "max_position_embeddings", 0) or 0), window)
    if lora is not None:
        module = _with_adapter(module, lora, random)
    return LanguageModel(module, folder, lora)


def _load_plain(folder: Path, dtype: torch.dtype) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True
    )
    return model.to(machine_device())


def _with_adapter(module: Any, lora: LoraSettings, random: RandomStream) -> PeftModel:
    modules = lora.target_modules
    # PEFT takes any number for alpha, though its annotation says int.
    alpha: Any = lora.lora_alpha
    config = LoraConfig(
        r=lora.r,
        lora_alpha=alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=list(modules) if isinstance(modules, tuple) else modules,
        target_parameters=list(lora.target_parameters) or None,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with random.drawing():
        return get_peft_model(module, config)
