"""A plan is refused as a whole, by field name, before anything remote happens."""

import json

import pytest

from cortex_training.errors import ConfigurationError
from cortex_training.training import LearningRate, TrainingPlan
from cortex_training.training.plan import canonical_sha256
from cortex_training.training.root import claim_identity, open_root

TRAINING = {
    "job_type": "training",
    "model_name": "tiny",
    "training_config": {"optimizer": {"name": "AdamW"}, "max_seq_len": 128, "train_batch_size": 2, "n_gpus": 1},
}
GOOD = {"root": "r", "dataset": "d/manifest.json", "steps": 4, "micro_batch_size": 2, "sub_jobs": [TRAINING]}


def plan(**changes):
    return TrainingPlan.from_dict({**GOOD, **changes})


def test_a_plan_survives_json():
    before = plan(learning_rate={"schedule": "cosine", "peak": 1e-4, "warmup_steps": 1})
    after = TrainingPlan.from_dict(json.loads(json.dumps(before.to_dict())))
    assert after.to_dict() == before.to_dict()
    after.validate()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"root": " "}, "plan.root"),
        ({"root": "s3://bucket/run"}, "plan.credentials"),
        ({"root": "s3://bucket/run", "credentials": "AKIA…"}, "plan.credentials"),
        ({"credentials": "secret:/mnt/creds"}, "plan.credentials"),
        ({"root": "s3:/bucket/run"}, "plan.root"),
        ({"dataset": ""}, "plan.dataset"),
        ({"steps": 0}, "plan.steps"),
        ({"steps": True}, "plan.steps"),
        ({"steps": 1.5}, "plan.steps"),
        ({"micro_batch_size": 0}, "plan.micro_batch_size"),
        ({"micro_batches_per_step": 0}, "plan.micro_batches_per_step"),
        ({"save_every_steps": 0}, "plan.save_every_steps"),
        ({"keep_publications": 0}, "plan.keep_publications"),
        ({"max_replacements": -1}, "plan.max_replacements"),
        ({"patience_s": float("inf")}, "plan.patience_s"),
        ({"when_done": "leave"}, "plan.when_done"),
        ({"job_id": "x"}, "plan.job_id"),
        ({"sub_jobs": []}, "plan.job_id"),
        ({"sub_jobs": [TRAINING, TRAINING]}, "plan.sub_jobs"),
        ({"weight_sync_every_steps": 2}, "plan.weight_sync_every_steps"),
        ({"learning_rate": {"schedule": "step"}}, "learning_rate.schedule"),
        ({"learning_rate": {"schedule": "linear", "peak": -1.0}}, "learning_rate.peak"),
        ({"learning_rate": {"schedule": "linear", "peak": 1e-4, "warmup_steps": 9}}, "learning_rate.warmup_steps"),
    ],
)
def test_a_bad_field_is_named(changes, field):
    with pytest.raises(ConfigurationError) as caught:
        plan(**changes).validate()
    assert caught.value.field == field
    assert field in str(caught.value)


@pytest.mark.parametrize(("changes", "field"), [({"setps": 3}, "plan.setps"), ({"v": 2}, "plan.v")])
def test_unknown_keys_and_versions_are_refused(changes, field):
    with pytest.raises(ConfigurationError) as caught:
        plan(**changes)
    assert caught.value.field == field


def test_learning_rates_follow_their_schedule():
    linear = LearningRate("linear", peak=1.0, warmup_steps=2)
    assert [linear.at(step, 6) for step in range(1, 7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    cosine = LearningRate("cosine", peak=1.0, floor=0.1)
    assert cosine.at(1, 4) == 1.0
    assert cosine.at(3, 4) == pytest.approx(0.55)
    assert LearningRate().at(3, 4) is None
    assert LearningRate("constant", peak=0.5).at(4, 4) == 0.5


def test_identity_ignores_what_may_change_and_names_what_may_not(tmp_path):
    store = open_root(str(tmp_path / "run"))
    claim_identity(store, plan().identity(dataset_sha256="a", frame_version=1))
    claim_identity(store, plan(steps=99, save_every_steps=7).identity(dataset_sha256="a", frame_version=1))
    for changed, name in (
        (plan(seed=5).identity(dataset_sha256="a", frame_version=1), "seed"),
        (plan().identity(dataset_sha256="b", frame_version=1), "dataset_sha256"),
        (plan(micro_batch_size=3).identity(dataset_sha256="a", frame_version=1), "micro_batch_size"),
    ):
        with pytest.raises(ConfigurationError, match=f"plan \\({name}\\)"):
            claim_identity(store, changed)


def test_whole_floats_are_the_integers_they_stand_for():
    assert canonical_sha256({"max_seq_len": 2048.0}) == canonical_sha256({"max_seq_len": 2048})
    assert canonical_sha256({"lr": 0.5}) != canonical_sha256({"lr": 1})


def test_a_root_whose_parent_is_missing_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"plan\.root.*does not exist"):
        open_root(str(tmp_path / "unmounted" / "run"))
