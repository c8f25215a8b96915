"""LoRA configurations: complete, or refused by name."""

from __future__ import annotations

import pytest

from cortex_training.errors import ConfigurationError
from cortex_training.peft import SUPPORTED_LORA_PEFT_CONFIG_KEYS, normalize_lora_peft_config

LORA = {"peft_type": "Lora", "target_modules": ["q_proj"]}


def test_defaults_are_filled_in_and_the_input_is_left_alone():
    given = dict(LORA)
    assert normalize_lora_peft_config(given) == {
        "peft_type": "Lora",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj"],
        "target_parameters": [],
    }
    assert given == LORA
    assert set(normalize_lora_peft_config(given)) == SUPPORTED_LORA_PEFT_CONFIG_KEYS


@pytest.mark.parametrize(
    "given",
    [
        {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05},
        {"lora_alpha": 0, "lora_dropout": 1},
        {"target_modules": "all-linear"},
        {"target_modules": [], "target_parameters": ["experts.weight"]},
        {"task_type": "CAUSAL_LM", "bias": "none", "target_parameters": []},
    ],
)
def test_what_is_given_is_kept_and_normal_forms_are_stable(given):
    normal = normalize_lora_peft_config(LORA | given)
    assert {name: normal[name] for name in given} == given
    assert normalize_lora_peft_config(normal) == normal


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("peft_type", ["LORA", "lora", None]),
        ("task_type", ["SEQ_CLS", None]),
        ("r", [0, -1, True, 8.0, "8", None]),
        ("lora_alpha", [-1, True, 1.5, "8", None]),
        ("lora_dropout", [-0.1, 1.5, True, "0", None, float("nan")]),
        ("bias", ["all", "lora_only", "x", None]),
        ("target_modules", ["", " ", ("a",), {"a"}, None, [1], ["a", ""]]),
        ("target_parameters", ["a", None, [""], [1]]),
    ],
)
def test_bad_values_are_refused_by_name(name, values):
    for value in values:
        with pytest.raises(ConfigurationError, match=rf"^job\.peft_config\.{name} = ") as caught:
            normalize_lora_peft_config(LORA | {name: value}, location="job.peft_config")
        assert caught.value.field == f"job.peft_config.{name}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "peft_config = None: must be an object"),
        (LORA | {"use_rslora": False, "zz": 1}, r"unsupported field\(s\): \['use_rslora', 'zz'\]"),
        (LORA | {1: 2}, r"unsupported field\(s\): \['1'\]"),
        ({"peft_type": "Lora"}, "must name target_modules, target_parameters, or both"),
        ({"peft_type": "Lora", "target_modules": []}, "must name target_modules"),
        ({"target_modules": ["a"]}, "peft_config.peft_type = None: must be 'Lora'"),
    ],
)
def test_bad_blocks_are_refused(given, message):
    with pytest.raises(ConfigurationError, match=message):
        normalize_lora_peft_config(given)
