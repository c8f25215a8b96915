import asyncio
import copy

import pytest

from cortex_training.aio import AsyncCortexTrainingClient
from cortex_training.datasets import build_dataset
from cortex_training.local.models import model_folder
from cortex_training.training import TrainingPlan, run
from tests.faults.proxy import FaultProxy
from tests.publication.conftest import (  # noqa: F401
    bucket,
    creds,
    faults,
    faulty_creds,
    faulty_store,
    posix_store,
    s3_root,
    s3_server,
    s3_store,
    store,
)

SUB_JOBS = [
    {
        "job_type": "training",
        "model_name": "tiny",
        "dtype": "float32",
        "seed": 7,
        "training_config": {
            "optimizer": {"name": "AdamW", "lr": 3e-3},
            "max_seq_len": 128,
            "train_batch_size": 2,
            "n_gpus": 1,
        },
    },
    {"job_type": "sampling", "model_name": "tiny", "inference_config": {"max_seq_len": 128, "n_gpus": 1}},
]


@pytest.fixture(scope="session")
def manifest(tmp_path_factory):
    """A small real dataset: sentences about numbers, for the tiny model."""
    rows = [
        {"prompt": f"What comes after {n}?", "completion": f"After {n} comes {n + 1}, and then comes {n + 2}."}
        for n in range(120)
    ]
    folder = tmp_path_factory.mktemp("dataset")
    build_dataset(rows, folder / "d", tokenizer=model_folder("tiny"), max_seq_len=128, seed=1)
    return str(folder / "d" / "manifest.json")


@pytest.fixture
def proxy(local_service):
    with FaultProxy(local_service.base_url) as between:
        yield between


class Runs:
    """Runs plans on one service, directly or through the fault proxy, and reads what the service executed."""

    def __init__(self, service, manifest, root, base_url):
        self.service = service
        self.manifest = manifest
        self.root = str(root)
        self.base_url = base_url
        self.progress = []

    def plan(self, **changes):
        value = {
            "root": self.root,
            "dataset": self.manifest,
            "steps": 6,
            "micro_batch_size": 2,
            "micro_batches_per_step": 2,
            "save_every_steps": 2,
            "learning_rate": {"schedule": "constant", "peak": 3e-3},
            "patience_s": 60,
            **changes,
        }
        if "job_id" not in value:
            value.setdefault("sub_jobs", copy.deepcopy(SUB_JOBS))
        return TrainingPlan.from_dict(value)

    def client(self, base_url=None):
        return AsyncCortexTrainingClient(base_url or self.base_url, self.service.database, self.service.schema)

    def run(self, plan=None, **options):
        async def main():
            async with self.client() as client:
                return await run(plan or self.plan(), client, self.progress.append, **options)

        return asyncio.run(main())

    def executed(self, op, *job_ids):
        return [r for r in self.service.execution_log() if r["op"] == op and r["job_id"] in job_ids]


@pytest.fixture
def runs(local_service, manifest, tmp_path, proxy):
    return Runs(local_service, manifest, tmp_path / "run", proxy.base_url)
