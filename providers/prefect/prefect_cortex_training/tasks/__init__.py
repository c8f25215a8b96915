"""The service's verbs as Prefect tasks; each has a form for flows that block and, with an `a` before its name, one for
flows that await.
"""

from prefect_cortex_training.tasks.capacity import (
    await_for_capacity,
    await_for_capacity_here,
    wait_for_capacity,
    wait_for_capacity_here,
)
from prefect_cortex_training.tasks.checkpoints import (
    aexport,
    aload,
    asave,
    asubmit_save,
    export,
    load,
    save,
    submit_save,
)
from prefect_cortex_training.tasks.datasets import abuild_dataset, build_dataset
from prefect_cortex_training.tasks.jobs import (
    acancel_job,
    acreate_job,
    await_until_running,
    cancel_job,
    create_job,
    wait_until_running,
)
from prefect_cortex_training.tasks.operations import (
    aforward_backward,
    agenerate,
    astep,
    asubmit_generate,
    asubmit_weight_sync,
    aweight_sync,
    forward_backward,
    generate,
    step,
    submit_generate,
    submit_weight_sync,
    weight_sync,
)
from prefect_cortex_training.tasks.publication import aprune, apublish, aresolve, prune, publish, resolve
from prefect_cortex_training.tasks.training import atrain, atrain_here, train, train_here

__all__ = [
    "abuild_dataset",
    "acancel_job",
    "acreate_job",
    "aexport",
    "aforward_backward",
    "agenerate",
    "aload",
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
    "await_until_running",
    "aweight_sync",
    "build_dataset",
    "cancel_job",
    "create_job",
    "export",
    "forward_backward",
    "generate",
    "load",
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
