"""A creation that the service refuses as a duplicate: whose job is it?"""

import asyncio
from types import SimpleNamespace

import pytest

from cortex_training.training.driver import SegmentLost
from cortex_training.training.segments import _adopt_equal
from tests.training.conftest import SUB_JOBS

BODY = {"job_id": "j", "sub_job_configs": SUB_JOBS}
TRAINING, SAMPLING = SUB_JOBS


def adopt(*sub_jobs, status="running"):
    class Seen:
        segment = SimpleNamespace(job_id="j")

        async def job(self):
            return {"job_id": "j", "status": status, "sub_jobs": list(sub_jobs)}

    asyncio.run(_adopt_equal(Seen(), BODY))


def with_config(sub_job, **fields):
    return {**sub_job, "training_config": {**sub_job["training_config"], **fields}}


def test_a_job_to_which_the_service_added_its_defaults_is_ours():
    added = with_config(TRAINING, ds_config={"zero": 2}, max_seq_len=128.0)
    adopt({**added, "sub_job_id": "j:training:0", "status": "running"}, {**SAMPLING, "vllm_config": {}})


@pytest.mark.parametrize(
    ("sub_jobs", "said"),
    [
        ((with_config(TRAINING, n_gpus=2), SAMPLING), r"sub_jobs\[0\]\.training_config\.n_gpus differs"),
        (({**TRAINING, "seed": 8}, SAMPLING), r"sub_jobs\[0\]\.seed differs"),
        ((TRAINING,), "another number of sub-jobs"),
        ((), "another number of sub-jobs"),
    ],
)
def test_another_job_is_not(sub_jobs, said):
    with pytest.raises(SegmentLost, match=f"job j exists and is another one \\({said}"):
        adopt(*sub_jobs)


def test_neither_is_one_that_has_ended():
    with pytest.raises(SegmentLost, match="exists and has ended"):
        adopt(*SUB_JOBS, status="cancelled")
