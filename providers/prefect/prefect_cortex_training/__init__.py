"""Prefect integration for Snowflake Cortex Training: blocks, durable tasks, and what ends remote jobs when a flow run
ends.
"""

from importlib import metadata

_OTHER_CLIENT = "cortex-training"


def _refuse_other_client() -> None:
    """The public client of that name owns the same import name; whichever was installed last would be imported,
    without a word.
    """
    try:
        metadata.distribution(_OTHER_CLIENT)
    except metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"prefect-cortex-training needs cortex-training-client, and {_OTHER_CLIENT} is installed beside it under the "
        f"same import name. Run `pip uninstall -y {_OTHER_CLIENT} cortex-training-client`, then `pip install "
        "cortex-training-client`, which serves the same imports"
    )


_refuse_other_client()

from prefect_cortex_training.cleanup import (  # noqa: E402
    acancel_jobs_of_flow_run,
    cancel_jobs_of_flow_run,
    cancel_remote_jobs,
    jobs_cancelled_at_end,
)
from prefect_cortex_training.credentials import CortexTrainingCredentials  # noqa: E402
from prefect_cortex_training.job_block import CortexTrainingJob, CortexTrainingJobRun  # noqa: E402
from prefect_cortex_training.snowflake import aload_snowflake_connector, load_snowflake_connector  # noqa: E402
from prefect_cortex_training.tasks import (  # noqa: E402
    abuild_dataset,
    acancel_job,
    acreate_job,
    aexport,
    aforward_backward,
    agenerate,
    aload,
    aprune,
    apublish,
    aresolve,
    asave,
    astep,
    asubmit_generate,
    asubmit_save,
    asubmit_weight_sync,
    atrain,
    atrain_here,
    await_for_capacity,
    await_for_capacity_here,
    await_until_running,
    aweight_sync,
    build_dataset,
    cancel_job,
    create_job,
    export,
    forward_backward,
    generate,
    load,
    prune,
    publish,
    resolve,
    save,
    step,
    submit_generate,
    submit_save,
    submit_weight_sync,
    train,
    train_here,
    wait_for_capacity,
    wait_for_capacity_here,
    wait_until_running,
    weight_sync,
)
from prefect_cortex_training.waiting import aawait_remote, await_remote, can_suspend  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "CortexTrainingCredentials",
    "CortexTrainingJob",
    "CortexTrainingJobRun",
    "aawait_remote",
    "abuild_dataset",
    "acancel_job",
    "acancel_jobs_of_flow_run",
    "acreate_job",
    "aexport",
    "aforward_backward",
    "agenerate",
    "aload",
    "aload_snowflake_connector",
    "aprune",
    "apublish",
    "aresolve",
    "asave",
    "astep",
    "asubmit_generate",
    "asubmit_save",
    "asubmit_weight_sync",
    "atrain",
    "atrain_here",
    "await_for_capacity",
    "await_for_capacity_here",
    "await_remote",
    "await_until_running",
    "aweight_sync",
    "build_dataset",
    "can_suspend",
    "cancel_job",
    "cancel_jobs_of_flow_run",
    "cancel_remote_jobs",
    "create_job",
    "export",
    "forward_backward",
    "generate",
    "jobs_cancelled_at_end",
    "load",
    "load_snowflake_connector",
    "prune",
    "publish",
    "resolve",
    "save",
    "step",
    "submit_generate",
    "submit_save",
    "submit_weight_sync",
    "train",
    "train_here",
    "wait_for_capacity",
    "wait_for_capacity_here",
    "wait_until_running",
    "weight_sync",
]
