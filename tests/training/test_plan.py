"""A plan is refused as a whole, by field name, before anything remote happens."""

import copy
import dataclasses
import json

import pytest

from cortex_training import wire
from cortex_training.datasets import Dataset
from cortex_training.errors import ConfigurationError
from cortex_training.training import LearningRate, TrainingPlan
from cortex_training.training.divergence import Divergence
from cortex_training.training.plan import LOSS_FN, canonical_sha256
from cortex_training.training.root import claim_identity, open_root

TRAINING = {
    "job_type": "training",
    "model_name": "tiny",
    "training_config": {"optimizer": {"name": "AdamW"}, "max_seq_len": 128, "train_batch_size": 2, "n_gpus": 1},
}
SAMPLING = {"job_type": "sampling", "model_name": "tiny", "inference_config": {"max_seq_len": 128, "n_gpus": 1}}
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
        ({"sub_jobs": []}, "plan.sub_jobs"),
        ({"load_in_place": "yes"}, "plan.load_in_place"),
        ({"load_in_place": True, "resume": "none"}, "plan.load_in_place"),
        ({"sub_jobs": [TRAINING, TRAINING]}, "plan.sub_jobs"),
        ({"weight_sync_every_steps": 2}, "plan.weight_sync_every_steps"),
        ({"passes": 2}, "plan.steps"),
        ({"save_every_minutes": 0}, "plan.save_every_minutes"),
        ({"checkpoint_type": "weights-only"}, "plan.checkpoint_type"),
        ({"resume": "always"}, "plan.resume"),
        ({"max_gpu_seconds": -1}, "plan.max_gpu_seconds"),
        ({"sub_jobs": [], "job_id": "x", "max_gpu_seconds": 5}, "plan.max_gpu_seconds"),
        ({"divergence": {"action": "rollback"}}, "plan.divergence.action"),
        ({"divergence": {"action": "rollback", "lr_factor": 0.5}}, "plan.divergence.lr_factor"),
        ({"divergence": {"loss_factor": 1}}, "plan.divergence.loss_factor"),
        (
            {"sub_jobs": [], "job_id": "x", "divergence": {"action": "rollback", "skip_batches": 1}},
            "plan.divergence.action",
        ),
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


def adapter(rank, **changes):
    return {"peft_type": "Lora", "r": rank, "target_modules": ["q_proj"], **changes}


def changed(sub_job, **changes):
    """The sub-job with other fields; those of its configuration block are given as block__name, None leaves out."""
    out = copy.deepcopy(sub_job)
    for name, value in changes.items():
        place, _, inner = name.partition("__")
        target = out[place] if inner else out
        target[inner or place] = value
        if value is None:
            del target[inner or place]
    return out


class TestTheJobThatAPlanDescribes:
    """What the client checks of a job, it checks of a plan's, by the path of the field in the plan."""

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"idle_timeout_seconds": "abc"}, "plan.idle_timeout_seconds"),
            ({"idle_timeout_seconds": -5}, "plan.idle_timeout_seconds"),
            ({"pending_timeout_seconds": 1}, "plan.pending_timeout_seconds"),
            ({"pending_timeout_seconds": 0}, "plan.pending_timeout_seconds"),
            ({"hardware": "H1000"}, "plan.hardware"),
            ({"hardware": "h200"}, "plan.hardware"),
            ({"sub_jobs": [], "job_id": "a:b"}, "plan.job_id"),
            ({"sub_jobs": [], "job_id": "a/b"}, "plan.job_id"),
            ({"sub_jobs": [], "job_id": ".."}, "plan.job_id"),
        ],
    )
    def test_a_bad_option_is_named(self, changes, field):
        assert field_refused(**changes) == field

    @pytest.mark.parametrize(
        ("place", "changes", "field"),
        [
            (0, {"training_config__n_gpus": 0}, "training_config.n_gpus"),
            (0, {"training_config__n_gpus": 1.5}, "training_config.n_gpus"),
            (0, {"training_config__max_seq_len": None}, "training_config.max_seq_len"),
            (0, {"training_config__optimizer": None}, "training_config.optimizer"),
            (0, {"training_config__optimzer": {"name": "AdamW"}}, "training_config.optimzer"),
            (0, {"training_config__optimizer": {"name": "AdamW", "weigth_decay": 0}}, "weigth_decay"),
            (0, {"training_config__peft_config": {"peft_type": "Lora"}}, "training_config.peft_config.target_modules"),
            (0, {"training_config": None, "trainng_config": {}}, "trainng_config"),
            (0, {"trainng": {}}, "trainng"),
            (0, {"model_name": None}, "model_name"),
            (0, {"model_name": " "}, "model_name"),
            (0, {"dtype": "float31"}, "dtype"),
            (0, {"dtype": 16}, "dtype"),
            (0, {"seed": "x"}, "seed"),
            (0, {"source_checkpoint_info": {"checkpoint_id": "cp"}}, "source_checkpoint_info"),
            (0, {"job_type": "TRAINING"}, "job_type"),
            (1, {"job_type": "smapling"}, "job_type"),
            (1, {"job_type": None}, "job_type"),
            (1, {"model_name": None}, "model_name"),
            (1, {"dtype": "float31"}, "dtype"),
            (1, {"inference_config": None}, "inference_config"),
            (1, {"inference_config__n_gpus": 0}, "inference_config.n_gpus"),
            (1, {"inference_config__peft_config": {"r": 0, "target_modules": ["q"]}}, "inference_config.peft_config.r"),
            (1, {"training_config": {}}, "training_config"),
        ],
    )
    def test_a_bad_field_of_a_sub_job_is_named_by_its_path(self, place, changes, field):
        sub_jobs = [TRAINING, SAMPLING]
        sub_jobs[place] = changed(sub_jobs[place], **changes)
        with pytest.raises(ConfigurationError) as caught:
            plan(sub_jobs=sub_jobs).validate()
        named = str(caught.value.field)
        assert named.startswith(f"plan.sub_jobs[{place}].")
        assert named.endswith(field)
        assert f"plan.sub_jobs[{place}]." in str(caught.value)

    def test_a_key_that_nobody_knows_comes_with_what_may_have_been_meant_and_with_a_way_out(self):
        with pytest.raises(ConfigurationError, match=r"did you mean training_config\?.*new field of the service"):
            plan(sub_jobs=[changed(TRAINING, trainng_config={})]).validate()

    def test_adapters_have_to_match_when_weights_are_synced(self):
        sub_jobs = [
            changed(TRAINING, training_config__peft_config=adapter(8)),
            changed(SAMPLING, inference_config__peft_config=adapter(4)),
        ]
        assert (
            field_refused(sub_jobs=sub_jobs, weight_sync_every_steps=2)
            == "plan.sub_jobs[1].inference_config.peft_config.r"
        )
        assert field_refused(sub_jobs=sub_jobs) is None
        sub_jobs[1] = changed(SAMPLING, inference_config__peft_config=adapter(8))
        assert field_refused(sub_jobs=sub_jobs, weight_sync_every_steps=2) is None

    @pytest.mark.parametrize(
        "changes",
        [
            {"training_config__field_of_next_year": {"x": 1}, "training_config__ds_config": {}},
            {"training_config__n_gpus": 2.0, "training_config__max_seq_len": 128.0, "seed": 7.0},
            {"training_config__optimizer": {"type": "FusedAdam", "params": {"lr": 1e-4, "torch_adam": True}}},
            {"training_config__optimizer": {"name": "AdamW", "foreach": True, "adam_w_mode": True}},
            {"training_config__peft_config": {}},
            {"training_config__peft_config": adapter(8, peft_type="LORA")},
            {"training_config__peft_config": {"r": 8, "target_modules": ["q_proj"], "lora_alpha": 16.0}},
            {"dtype": "torch.bfloat16"},
            {"dtype": "float"},
            {"model_post_init": ["x"], "global_batch_size": 8},
        ],
    )
    def test_what_the_service_reads_is_accepted_and_goes_out_as_it_is(self, changes):
        sub_job = changed(TRAINING, **changes)
        given = plan(sub_jobs=[sub_job])
        given.validate()
        assert given.to_dict()["sub_jobs"] == [sub_job]

    @pytest.mark.parametrize(
        "changes",
        [
            {"idle_timeout_seconds": 0, "pending_timeout_seconds": 300, "hardware": "B300"},
            {"sub_jobs": [], "job_id": "global training job 7"},
            {"sub_jobs": [TRAINING, SAMPLING, {**SAMPLING, "job_type": "log_prob"}], "weight_sync_every_steps": 1},
            {"sub_jobs": [{**SAMPLING, "source_checkpoint_info": {"checkpoint_id": "cp"}}, TRAINING]},
        ],
    )
    def test_good_ones_are_taken(self, changes):
        plan(**changes).validate()


def test_a_bare_learning_rate_is_a_constant_one():
    assert plan(learning_rate=3e-4).learning_rate == LearningRate("constant", peak=3e-4)
    assert field_refused(learning_rate=0) == "learning_rate.peak"
    assert field_refused(learning_rate=-1e-4) == "learning_rate.peak"
    with pytest.raises(ConfigurationError, match=r"plan\.learning_rate = '3e-4'.*a number.*schedule"):
        plan(learning_rate="3e-4").validate()


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


def test_a_field_of_the_training_configuration_is_named_too(tmp_path):
    store = open_root(str(tmp_path / "run"))
    claim_identity(store, plan().identity(dataset_sha256="a", frame_version=1))
    more_gpus = {**TRAINING, "training_config": {**TRAINING["training_config"], "n_gpus": 2}}
    with pytest.raises(ConfigurationError, match=r"plan \(training_config\.n_gpus\) = 2: .* begun with 1"):
        claim_identity(store, plan(sub_jobs=[more_gpus]).identity(dataset_sha256="a", frame_version=1))


@pytest.mark.parametrize(("field", "value"), [("loss_fn", "other"), ("dtype", "float16"), ("model_seed", 8)])
def test_another_loss_precision_or_initial_model_is_refused(tmp_path, field, value):
    store = open_root(str(tmp_path / "run"))
    identity = plan(sub_jobs=[{**TRAINING, "dtype": "float32", "seed": 7}]).identity(
        dataset_sha256="a", frame_version=1
    )
    claim_identity(store, identity)
    with pytest.raises(ConfigurationError, match=f"plan \\({field}\\)"):
        claim_identity(store, {**identity, field: value})
    # Somebody else's job does not say its precision, and an older root does not know the loss.
    claim_identity(store, {**identity, "dtype": None})
    claim_identity(store, {name: told for name, told in identity.items() if name != "loss_fn"})


def test_the_loss_in_the_identity_is_the_one_in_the_frames(manifest):
    frame = wire.loads(Dataset.open(manifest).batches(2, 1, 0).frame(1, 0))
    assert frame["processing"]["loss_fn"] == LOSS_FN


def field_refused(**changes):
    try:
        plan(**changes).validate()
    except ConfigurationError as problem:
        return str(problem.field)
    return None


WRONG = ("", "x", -1, 0, 1.5, True, None, [], ["x"], {}, {"x": 1}, float("nan"))


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(TrainingPlan)])
def test_whatever_a_field_holds_it_is_taken_or_named(name):
    for value in WRONG:
        named = field_refused(**{name: value})
        about = {name, *{"passes": ["steps"]}.get(name, [])}
        assert named is None or any(part in named for part in about), f"{name} = {value!r} is told as {named}"


@pytest.mark.parametrize("part", ["learning_rate", "divergence"])
def test_whatever_a_field_of_a_part_holds_it_is_taken_or_named(part):
    good = {"learning_rate": {"schedule": "cosine", "peak": 1e-3}, "divergence": {"action": "stop"}}
    kind = {"learning_rate": LearningRate, "divergence": Divergence}[part]
    for name in (f.name for f in dataclasses.fields(kind)):
        for value in WRONG:
            named = field_refused(**{**good, part: {**good[part], name: value}})
            assert named is None or part in named, f"{name} = {value!r} is told as {named}"


@pytest.mark.parametrize("config", ["training_config", "inference_config"])
def test_whatever_a_sub_job_holds_it_is_taken_or_named(config):
    for value in WRONG:
        named = field_refused(sub_jobs=[{**TRAINING, config: value}])
        assert named is None or "sub_jobs" in named, f"{config} = {value!r} is told as {named}"


def test_passes_are_rounded_up_to_whole_steps():
    given = plan(steps=0, passes=1.5)
    given.validate()
    assert given.with_steps(7).steps == 11
    assert plan().with_steps(7).steps == 4
    without = {name: value for name, value in GOOD.items() if name != "steps"}
    assert TrainingPlan.from_dict({**without, "passes": 2}).with_steps(3).steps == 6


def test_a_warm_up_longer_than_the_passes_is_named_once_the_data_is_known():
    given = plan(steps=0, passes=1, learning_rate={"schedule": "linear", "peak": 1e-4, "warmup_steps": 9})
    given.validate()
    with pytest.raises(ConfigurationError, match=r"learning_rate\.warmup_steps"):
        given.with_steps(4).validate()


def test_saves_are_due_by_steps_by_minutes_or_by_whichever_comes_first():
    assert [k for k in range(1, 200) if plan().save_is_due(k, 1e9)] == [50, 100, 150]
    by_minutes = plan(save_every_minutes=2)
    assert [by_minutes.save_is_due(50, seconds) for seconds in (0, 119, 120)] == [False, False, True]
    both = plan(save_every_minutes=2, save_every_steps=3)
    assert (both.save_is_due(3, 0), both.save_is_due(4, 0), both.save_is_due(4, 121)) == (True, False, True)


def test_whole_floats_are_the_integers_they_stand_for():
    assert canonical_sha256({"max_seq_len": 2048.0}) == canonical_sha256({"max_seq_len": 2048})
    assert canonical_sha256({"lr": 0.5}) != canonical_sha256({"lr": 1})


def test_a_root_whose_parent_is_missing_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"plan\.root.*does not exist"):
        open_root(str(tmp_path / "unmounted" / "run"))
