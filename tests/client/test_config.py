"""Sub-job configuration, states and errors."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import requests

from cortex_training import errors, states
from cortex_training.config import InferenceConfig, JobType, SubJobConfig, TrainingConfig, canonical_job_type
from cortex_training.errors import ConfigurationError

OPTIMIZER = {"name": "AdamW", "lr": 1e-4}


def training_config(**options: Any) -> TrainingConfig:
    return TrainingConfig(**{"optimizer": OPTIMIZER, "max_seq_len": 128, "train_batch_size": 8, "n_gpus": 1, **options})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("optimizer", {}),
        ("optimizer", None),
        ("optimizer", {1: 2}),
        ("optimizer", {"name": "AdamW", "warmup_steps": 5}),
        ("extra", {"peft_config": {"peft_type": "LORA", "target_modules": ["q_proj"]}}),
        ("max_seq_len", 0),
        ("max_seq_len", "8"),
        ("train_batch_size", -1),
        ("n_gpus", True),
        ("n_gpus", 1.5),
        ("gradient_clipping", "x"),
        ("gradient_clipping", float("nan")),
        ("multiplex_job_id", ""),
        ("load_optimizer_states", "no"),
        ("extra", [1]),
    ],
)
def test_a_bad_training_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"training_config\." + ("peft_config" if isinstance(value, dict) and "peft_config" in value else field),
    ) as caught:
        training_config(**{field: value}).validate()
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("field", "value"), [("max_seq_len", 0), ("n_gpus", "1"), ("multiplex_job_id", 5)])
def test_a_bad_inference_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"inference_config.{field}"):
        InferenceConfig(**{"max_seq_len": 128, "n_gpus": 1, field: value}).validate()


def test_the_wire_form_leaves_out_what_is_unset() -> None:
    assert training_config().to_wire() == {
        "optimizer": OPTIMIZER,
        "max_seq_len": 128,
        "train_batch_size": 8,
        "n_gpus": 1,
    }
    full = training_config(gradient_clipping=1.0, multiplex_job_id="j:training:0", load_optimizer_states=False)
    assert full.to_wire()["load_optimizer_states"] is False
    assert full.to_wire()["gradient_clipping"] == 1.0
    assert full.to_wire()["multiplex_job_id"] == "j:training:0"


def test_an_optimizer_in_another_trainers_spelling_is_rewritten() -> None:
    deepspeed = {"type": "AdamW", "params": {"lr": 1e-4, "beta1": 0.8, "gradient_clipping": 0.5}}
    wire = training_config(optimizer=deepspeed).to_wire()
    assert wire["optimizer"] == {"name": "AdamW", "lr": 1e-4, "betas": [0.8, 0.999]}
    assert wire["gradient_clipping"] == 0.5
    with pytest.raises(ConfigurationError, match="gradient_clipping"):
        training_config(optimizer=deepspeed, gradient_clipping=1.0).validate()


def test_an_adapter_is_completed() -> None:
    peft = {"peft_type": "Lora", "target_modules": ["q_proj"]}
    for block in (training_config(extra={"peft_config": peft}), InferenceConfig(8, 1, extra={"peft_config": peft})):
        wire = block.to_wire()["peft_config"]
        assert (wire["r"], wire["lora_alpha"], wire["lora_dropout"], wire["bias"]) == (8, 8, 0.0, "none")
    assert peft == {"peft_type": "Lora", "target_modules": ["q_proj"]}


def test_extra_is_merged_and_never_overrides_a_typed_field() -> None:
    wire = training_config(extra={"max_seq_len": 5, "ep_size": 4}).to_wire()
    assert (wire["max_seq_len"], wire["ep_size"]) == (128, 4)


def test_factories_copy_what_they_are_given() -> None:
    extra = {"ep_size": 4}
    job = SubJobConfig.training_job("m", OPTIMIZER, 128, 8, 1, extra_training=extra, dtype="bfloat16", seed=42)
    extra["ep_size"] = 8
    assert job.to_wire() == {
        "job_type": "training",
        "model_name": "m",
        "dtype": "bfloat16",
        "seed": 42,
        "training_config": {**training_config().to_wire(), "ep_size": 4},
    }
    job.validate()


def test_a_sampling_job_in_full() -> None:
    job = SubJobConfig.sampling_job(
        "m",
        2048,
        1,
        extra_sampling={"gpu_memory_utilization": 0.8},
        global_batch_size=4,
        model_post_init=["hook"],
        source_checkpoint_info={"checkpoint_id": "cp", "source_job_id": "j"},
    )
    job.validate()
    assert job.to_wire() == {
        "job_type": "sampling",
        "model_name": "m",
        "global_batch_size": 4,
        "model_post_init": ["hook"],
        "inference_config": {"max_seq_len": 2048, "n_gpus": 1, "gpu_memory_utilization": 0.8},
        "source_checkpoint_info": {"checkpoint_id": "cp", "source_job_id": "j"},
    }


def test_a_log_probability_sub_job_is_sent_as_documented() -> None:
    job = SubJobConfig.sampling_job("m", 128, 1, job_type=JobType.LOG_PROBABILITY)
    job.validate()
    assert job.to_wire()["job_type"] == "log_probability"


@pytest.mark.parametrize("kind", ["training", JobType.TRAINING, " TRAINING ", "JOB_TYPE_TRAINING"])
def test_sampling_job_makes_no_training_jobs(kind: Any) -> None:
    with pytest.raises(ConfigurationError, match="job_type"):
        SubJobConfig.sampling_job("m", 128, 1, job_type=kind)


@pytest.mark.parametrize(
    ("job", "field"),
    [
        (SubJobConfig("training", "", training_config()), "model_name"),
        (SubJobConfig("training", "m"), "training_config"),
        (SubJobConfig("sampling", "m"), "inference_config"),
        (SubJobConfig("training", "m", training_config(), InferenceConfig(1, 1)), "inference_config"),
        (SubJobConfig("sampling", "m", training_config(), InferenceConfig(1, 1)), "training_config"),
        (SubJobConfig("evaluation", "m", training_config()), "job_type"),
        (SubJobConfig("training", "m", training_config(n_gpus=0)), "training_config.n_gpus"),
        (SubJobConfig("training", "m", training_config(), seed=1.5), "seed"),  # type: ignore[arg-type]
        (SubJobConfig("training", "m", training_config(), global_batch_size=0), "global_batch_size"),
        (SubJobConfig("training", "m", training_config(), model_post_init="hook"), "model_post_init"),
        (SubJobConfig("training", "m", training_config(), source_checkpoint_info="cp"), "source_checkpoint_info"),  # type: ignore[arg-type]
    ],
)
def test_a_bad_sub_job_is_refused_naming_its_field(job: SubJobConfig, field: str) -> None:
    with pytest.raises(ConfigurationError, match=field):
        job.validate()


@pytest.mark.parametrize(
    ("extra", "refused"),
    [
        ({"model_provider": "prime_rl", "fp32_lm_head": True}, True),
        ({"model_provider": "prime_rl", "fused_lm_head_token_chunk_size": 8192}, True),
        ({"model_provider": "prime_rl", "fp32_lm_head": True, "fused_cross_entropy": False}, False),
        ({"prime_rl": {"fused_lm_head_token_chunk_size": 8192}}, True),
        ({"prime_rl": {"fused_cross_entropy": False, "fused_lm_head_token_chunk_size": 8192}}, False),
        ({"fused_cross_entropy": False, "prime_rl": {"fused_cross_entropy": "liger", "fp32_lm_head": True}}, True),
        # A dense model's profile has the chunk size without the switch, and is right.
        ({"fused_lm_head_token_chunk_size": 8192}, False),
        ({"model_provider": "huggingface", "fp32_lm_head": True}, False),
    ],
)
def test_the_fused_cross_entropy_rule_is_for_prime_rl_alone(extra: dict[str, Any], refused: bool) -> None:
    config = training_config(extra=extra)
    if refused:
        with pytest.raises(ConfigurationError, match="fused_cross_entropy"):
            config.validate()
    else:
        config.validate()


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        ("training", "training"),
        (JobType.SAMPLING, "sampling"),
        ("JOB_TYPE_LOG_PROB", "log_probability"),
        (None, "none"),
    ],
)
def test_job_types_have_one_spelling(raw: Any, kind: str) -> None:
    assert canonical_job_type(raw) == kind


@pytest.mark.parametrize(
    ("raw", "state", "terminal"),
    [
        ("running", "running", False),
        ("JOB_STATE_RUNNING", "running", False),
        (" Canceled ", "cancelled", True),
        ("JOB_STATE_TERMINATED", "terminated", True),
        ("failed", "failed", True),
        ("completed", "done", True),
        ("cancelling", "cancelling", False),
        ("reticulating", "reticulating", False),
        (7, "unknown", False),
        (None, "unknown", False),
        ("", "unknown", False),
    ],
)
def test_job_states_are_read_in_every_spelling(raw: Any, state: str, terminal: bool) -> None:
    assert states.job_state(raw) == state
    assert states.is_terminal_job(raw) is terminal


def test_every_error_survives_a_pickle_with_its_fields() -> None:
    made: list[errors.CortexTrainingError] = [
        ConfigurationError.of("n_gpus", 0, "must be greater than 0"),
        errors.TransportError("no reply", sent=None, method="GET", path="/j"),
        errors.NotFoundError(status=404, message="gone", request_id="r", detail={"a": 1}, response=requests.Response()),
        errors.ChunkGroupRestartError(status=409, code="chunk_group_restart_required"),
        errors.OutcomeUnknown(operation="step", job_id="j", reason="lost", hint="look"),
        errors.SendRefused("no"),
        errors.DeadlineExceeded("late", timeout_s=3.0),
        errors.RequestFailed(job_id="j", request_id="r", state="failed", error="boom"),
        errors.JobFailed(job_id="j", state="failed", reason="node lost"),
        errors.ProtocolError("odd"),
    ]
    for error in made:
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert str(copy) == str(error)
        assert copy.__dict__.keys() == error.__dict__.keys()


def test_errors_are_what_the_public_client_raises() -> None:
    assert issubclass(errors.ApiError, requests.HTTPError)
    assert issubclass(errors.ChunkGroupConflictError, errors.ChunkGroupError)
    assert issubclass(errors.ChunkGroupError, requests.HTTPError)
    assert issubclass(errors.TransportError, requests.ConnectionError)
    assert issubclass(errors.RequestFailed, RuntimeError)
    assert issubclass(errors.JobFailed, RuntimeError)
    assert issubclass(errors.DeadlineExceeded, TimeoutError)
    assert issubclass(errors.ConfigurationError, ValueError)
