"""The promise in one test: a real dataset, ten drivers killed with SIGKILL, and the published weights of a calm run."""

import collections
import contextlib
import os
import random
import time
from pydoc_data.topics import topics

import pytest

from cortex_training.client import CortexTrainingClient
from cortex_training.datasets import build_dataset
from cortex_training.local.models import model_folder
from cortex_training.publication import PublicationLog, SaveManifest, download_checkpoint, open_store
from cortex_training.training.journal import last_number
from tests.training.conftest import Runs
from tests.training.test_kill import Driver

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

KILLS, STEPS = 10, 60
SEED = int(os.environ.get("FAULT_SEED", "20261129"))


@pytest.fixture(scope="module")
def python_manual(tmp_path_factory):
    """Paragraphs of Python's own manual, as rows of prompt and completion."""
    rows = [
        {"prompt": f"Python, {name}: ", "completion": part}
        for name, text in sorted(topics.items())
        for part in text.split("\n\n")
        if len(part) > 80
    ]
    out = tmp_path_factory.mktemp("manual") / "data"
    build_dataset(rows, out, tokenizer=model_folder("tiny"), max_seq_len=192, overlong="truncate")
    return str(out / "manifest.json")


@pytest.fixture
def make_driver(local_service, python_manual, tmp_path, creds):
    def make(root):
        folder = tmp_path / f"plan of {root.rpartition('/')[2]}"
        folder.mkdir()
        runs = Runs(local_service, python_manual, root, local_service.base_url)
        sub_jobs = runs.plan().sub_jobs[:1]
        sub_jobs[0]["training_config"]["max_seq_len"] = 192
        driver = Driver(
            runs,
            folder,
            sub_jobs=list(sub_jobs),
            steps=STEPS,
            save_every_steps=10,
            learning_rate={"schedule": "cosine", "peak": 2e-3, "warmup_steps": 10},
            **({"credentials": creds} if root.startswith("s3://") else {}),
        )
        driver.store = lambda: open_store(root, creds if root.startswith("s3://") else None)
        return driver

    return make


def published_weights(driver, folder):
    """SHA-256 of every file of the checkpoint that the run published last."""
    log = PublicationLog(driver.store())
    save = SaveManifest.read(log.store, log.latest().save)
    service = driver.runs.service
    with CortexTrainingClient(service.base_url, service.database, service.schema) as client:
        files = download_checkpoint(client, save.job_id, save.checkpoint_id, folder)
    return {file.path: file.sha256 for file in files if file.path.endswith(".safetensors")}


def records(driver):
    with contextlib.suppress(Exception):
        return last_number(driver.store())
    return 0


@pytest.mark.parametrize("kind", ["directory", "bucket"])
def test_ten_drivers_killed_at_random_train_what_an_undisturbed_one_does(make_driver, tmp_path, s3_root, kind):
    moments = random.Random(SEED)
    place = {"directory": str(tmp_path / "run"), "bucket": s3_root}[kind]
    disturbed = make_driver(place)
    for life in range(KILLS):
        known, more = records(disturbed), moments.randint(1, 45)
        process = disturbed.start()
        while records(disturbed) < known + more:
            assert process.poll() is None, (life, process.communicate())
            time.sleep(moments.uniform(0.0, 0.05))
        process.kill()
        process.communicate()
    result = disturbed.finish(timeout_s=400)
    calm = make_driver(str(tmp_path / "calm"))
    undisturbed = calm.finish(timeout_s=400)
    assert result["steps"] == undisturbed["steps"] == STEPS
    assert published_weights(disturbed, tmp_path / "a") == published_weights(calm, tmp_path / "b") != {}, f"seed {SEED}"
    batches = disturbed.runs.executed("forward-backward", result["job_id"])
    assert max(collections.Counter(batch["chunk_group"] for batch in batches).values()) == 1
