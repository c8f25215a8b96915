"""Optimizer blocks: rewritten where they mean the same, else refused by name."""

from __future__ import annotations

import copy

import pytest

from cortex_training.errors import ConfigurationError
from cortex_training.optimizer import normalize_optimizer


@pytest.mark.parametrize(
    ("given", "optimizer", "clipping"),
    [
        ({"name": "AdamW", "lr": 1e-4}, {"name": "AdamW", "lr": 1e-4}, None),
        ({"lr": 1}, {"lr": 1.0}, None),
        ({"type": "AdamW"}, {"name": "AdamW"}, None),
        ({"type": "AdamW", "name": "AdamW"}, {"name": "AdamW"}, None),
        (
            {"type": "AdamW", "params": {"lr": 2e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0}},
            {"name": "AdamW", "lr": 2e-5, "weight_decay": 0.0, "betas": [0.9, 0.95], "eps": 1e-8},
            None,
        ),
        ({"lr": 1e-4, "params": {"lr": 1e-4}}, {"lr": 1e-4}, None),
        ({"beta1": 0.8}, {"betas": [0.8, 0.999]}, None),
        ({"beta2": 0.95}, {"betas": [0.9, 0.95]}, None),
        ({"beta1": 0.8, "params": {"beta2": 0.9}}, {"betas": [0.8, 0.9]}, None),
        ({"betas": [0.9, 0.95], "beta2": 0.95}, {"betas": [0.9, 0.95]}, None),
        ({"name": "AdamW", "gradient_clipping": 1}, {"name": "AdamW"}, 1.0),
        ({"params": {"gradient_clipping": 0.5, "fused": True}}, {"fused": True}, 0.5),
    ],
)
def test_one_form(given, optimizer, clipping):
    before = copy.deepcopy(given)
    normal = normalize_optimizer(given)
    assert (normal.optimizer, normal.gradient_clipping) == (optimizer, clipping)
    assert given == before
    if optimizer:
        assert normalize_optimizer(normal.optimizer).optimizer == optimizer


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "must be a non-empty object"),
        ([], "must be a non-empty object"),
        ({"params": 3}, r"optimizer\.params = 3: must be an object"),
        ({"type": "SGD", "name": "AdamW"}, "gives name twice, as 'AdamW' and 'SGD'"),
        ({"lr": 1e-4, "params": {"lr": 1e-5}}, "gives lr twice"),
        ({"betas": [0.9, 0.95], "beta1": 0.8}, "gives betas twice"),
        (
            {"lr": 1, "warmup_steps": 5, "lr_scheduler": "cosine"},
            r"\['lr_scheduler', 'warmup_steps'\].*has no scheduler",
        ),
        ({"params": {"warmup_ratio": 0.1}}, "has no scheduler"),
        ({"lr": 1, "momentum": 0.9, "amsgrad": True}, r"unsupported field\(s\): \['amsgrad', 'momentum'\]"),
        ({"name": ""}, r"optimizer\.name = ''"),
        ({"name": 3}, r"optimizer\.name = 3"),
        ({"lr": -1}, r"optimizer\.lr = -1: must be a finite number, at least 0"),
        ({"lr": True}, r"optimizer\.lr = True"),
        ({"lr": "1e-4"}, r"optimizer\.lr = '1e-4'"),
        ({"lr": float("nan")}, r"optimizer\.lr = nan"),
        ({"weight_decay": float("inf")}, r"optimizer\.weight_decay = inf"),
        ({"eps": 0}, r"optimizer\.eps = 0: must be a finite number, above 0"),
        ({"betas": [0.9]}, r"optimizer\.betas = \[0\.9\]: must be two numbers"),
        ({"betas": 0.9}, r"optimizer\.betas = 0\.9: must be two numbers"),
        ({"betas": [0.9, 1]}, r"optimizer\.betas\[1\] = 1: must be a finite number, at least 0 and below 1"),
        ({"beta1": True}, r"optimizer\.betas\[0\] = True"),
        ({"fused": 1}, r"optimizer\.fused = 1: must be true or false"),
        ({"gradient_clipping": -1}, r"optimizer\.gradient_clipping = -1"),
    ],
)
def test_bad_blocks_are_refused_by_name(given, message):
    with pytest.raises(ConfigurationError, match=message):
        normalize_optimizer(given)
