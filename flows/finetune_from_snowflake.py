"""Fine-tune a model on the rows of a Snowflake table, and publish it. Copy this file and change it.

    rows -> dataset -> job -> completions -> train -> save -> export -> publish -> weight sync -> completions

Blocks it uses, made once in the UI or from Python: a `SnowflakeConnector` of prefect-snowflake for the rows, and a
`CortexTrainingCredentials` for the training. No secret is a parameter.

Running it again after a crash, with the same flow run or on the same root, goes on where it stopped: no job is created
twice, no step is taken twice. A job that is lost in training is replaced. Whatever happens, no job is left in the end.

Served, with `prefect-cortex-training watch` and `drive` running beside it, the flow run is suspended while its job
queues and while the GPUs work: no process waits for them. Without those two it waits in its own process.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.cache_policies import INPUTS, RUN_ID
from snowflake.connector.errors import ProgrammingError

from cortex_training import ConfigurationError, SubJobConfig
from cortex_training.training import LearningRate, TrainingPlan
from prefect_cortex_training import (
    await_remote,
    build_dataset,
    cancel_remote_jobs,
    create_job,
    export,
    generate,
    jobs_cancelled_at_end,
    load_snowflake_connector,
    publish,
    save,
    train,
    weight_sync,
)

# What is trained on. Change it: join, filter, deduplicate, take last week only. It has to end up with `prompt` and
# `completion`, or `messages`, or `text`, and should leave out what the model is evaluated on.
TRANSFORM = """
CREATE OR REPLACE TABLE {prepared} AS
SELECT DISTINCT prompt, completion
FROM {table}
WHERE split = 'train' AND LENGTH(TRIM(prompt)) > 0 AND LENGTH(TRIM(completion)) > 0
"""

# In an order that does not change: rows in another order are another dataset, and a training run keeps to one.
ROWS = "SELECT prompt, completion FROM {prepared} ORDER BY prompt, completion"

PROMPTS = ["def sorted(iterable, /, *, key=None, reverse=False)\nWhat does it do?\n"]

_TABLE = re.compile(r"[A-Za-z_][\w$]*(\.[A-Za-z_][\w$]*){0,2}", re.ASCII)


@task(cache_policy=RUN_ID + INPUTS, persist_result=True, result_serializer="json")
def prepare_rows(snowflake: str, table: str, connect_options: dict[str, Any]) -> str:
    """Run the transformation in Snowflake; returns the table it made."""
    if not _TABLE.fullmatch(table):
        raise ConfigurationError.of("table", table, "give a table's name, with schema and database if need be")
    prepared = f"{table}_PREPARED"
    connector = load_snowflake_connector(snowflake)
    with connector.get_connection(**connect_options) as connection, connection.cursor() as cursor:
        try:
            cursor.execute(TRANSFORM.format(table=table, prepared=prepared))
        except ProgrammingError as error:
            where = f"{connector.database}.{connector.schema_}"
            fix = f"Snowflake refused it in {where} ({error.msg}); check the name and what the role may read"
            raise ConfigurationError.of("table", table, fix) from error
    return prepared


@flow(
    name="finetune-from-snowflake",
    persist_result=True,
    result_serializer="json",
    # Where the code below can't cancel the job any more: the process is gone, or was told to go.
    on_cancellation=[cancel_remote_jobs],
    on_crashed=[cancel_remote_jobs],
)
def finetune_from_snowflake(
    root: str,
    models: str,
    tokenizer: str,
    *,
    table: str = "TRAINING_EXAMPLES",
    model: str = "Qwen/Qwen3-0.6B",
    snowflake: str = "snowflake",
    cortex: str = "cortex-training",
    connect_options: dict[str, Any] | None = None,
    max_seq_len: int = 2048,
    overlong: str = "error",
    steps: int = 200,
    micro_batch_size: int = 8,
    micro_batches_per_step: int = 1,
    save_every_steps: int = 50,
    learning_rate: float = 1e-4,
    warmup_steps: int = 10,
    lora: dict[str, Any] | None = None,
    dtype: str = "bfloat16",
    n_gpus: int = 1,
    prompts: list[str] | None = None,
    max_tokens: int = 64,
    seed: int = 0,
    gpu_limit: str | None = None,
) -> dict[str, Any]:
    """Fine-tune `model` on `table`; returns ids, numbers and paths.

    Args:
        root: folder of this training run, on a file system that every machine of the pipeline sees. The folder above it
            must exist. A run on a folder where one was begun goes on with it.
        models: folder where fine-tuned models are published. It must exist.
        tokenizer: folder with the model's ``tokenizer.json``.
        table: rows to train on, with at least ``prompt``, ``completion`` and ``split``.
        model: the service's name of the model.
        snowflake: name of a `SnowflakeConnector` block.
        cortex: name of a `CortexTrainingCredentials` block.
        connect_options: further arguments for ``snowflake.connector.connect``, e.g. host and port.
        max_seq_len: longest packed sequence, in tokens; the model's window.
        overlong: what becomes of a longer row: ``error``, ``truncate`` or ``skip``.
        steps: optimizer steps.
        micro_batch_size: packed sequences in one forward-backward.
        micro_batches_per_step: forward-backwards before each step.
        save_every_steps: a resumable, published save after every so many steps.
        learning_rate: highest rate, reached after `warmup_steps`; it then falls linearly to 0.
        lora: LoRA configuration for both sub-jobs (``peft_type``, ``r``, ``lora_alpha``, ``target_modules``, ...);
            None trains all weights.
        dtype: the service's name of the number format.
        n_gpus: GPUs of each sub-job.
        prompts: completed before and after the training, for a look at what it did.
        max_tokens: longest completion, in tokens.
        seed: order of the rows, and the model's random numbers.
        gpu_limit: global concurrency limit of the Prefect server whose slots are GPUs; the job waits for free ones.
    """
    for field, value, needed in (("root", root, Path(root).parent), ("models", models, Path(models))):
        if not needed.is_dir():
            raise ConfigurationError.of(field, value, f"folder {needed} does not exist; create it or mount it first")
    adapter = {"peft_config": lora} if lora else {}
    sub_jobs = [
        SubJobConfig.training_job(
            model,
            optimizer={"name": "AdamW", "lr": learning_rate, "weight_decay": 0.0},
            max_seq_len=max_seq_len,
            train_batch_size=micro_batch_size,
            n_gpus=n_gpus,
            gradient_clipping=1.0,
            extra_training=adapter,
            dtype=dtype,
            seed=seed,
        ).to_wire(),
        SubJobConfig.sampling_job(
            model, max_seq_len=max_seq_len, n_gpus=n_gpus, extra_sampling=adapter, dtype=dtype, seed=seed
        ).to_wire(),
    ]
    # It begins in the job that is made below and used behind it, and may replace it.
    plan = TrainingPlan(
        root=root,
        dataset=f"{root}/dataset",
        job_id="made below",
        sub_jobs=tuple(sub_jobs),
        when_done="keep",
        steps=steps,
        micro_batch_size=micro_batch_size,
        micro_batches_per_step=micro_batches_per_step,
        save_every_steps=save_every_steps,
        learning_rate=LearningRate("linear", peak=learning_rate, warmup_steps=warmup_steps),
        seed=seed,
    )
    # `train` checks it too, but by then rows are read and a job with GPUs waits.
    plan.validate()
    Path(root).mkdir(exist_ok=True)

    prepared = prepare_rows(snowflake, table, connect_options or {})
    dataset = build_dataset(
        snowflake,
        ROWS.format(prepared=prepared),
        out=f"{root}/dataset",
        tokenizer=tokenizer,
        max_seq_len=max_seq_len,
        overlong=overlong,
        seed=seed,
        connect_options=connect_options,
        tables=[prepared],
    )
    samples: dict[str, Any] = {
        "prompts": prompts or PROMPTS,
        "sampling_params": {"max_tokens": max_tokens, "temperature": 0.0},
    }

    with jobs_cancelled_at_end():
        job_id = create_job(cortex, sub_jobs, gpu_limit=gpu_limit)
        await_remote(cortex, job_id)
        before = generate(cortex, job_id, out=f"{root}/samples-before.json", seq=1, **samples)
        plan = replace(plan, dataset=dataset["manifest"], job_id=job_id)
        trained = train(cortex, plan.to_dict())
        checkpoint = save(cortex, trained["job_id"])
        exported = export(cortex, trained["job_id"], checkpoint, root=models)
        entry = publish(models, exported["save"], epoch=exported["epoch"], step=exported["step"])
        weight_sync(cortex, trained["job_id"], weight_format="lora" if lora else None)
        after = generate(cortex, trained["job_id"], out=f"{root}/samples-after.json", seq=2, **samples)

    return {
        "job_id": trained["job_id"],
        "dataset": dataset,
        "training": trained,
        "checkpoint_id": checkpoint,
        "model": f"{models}/{exported['save']}",
        "entry": entry,
        "samples_before": before["path"],
        "samples_after": after["path"],
    }


if __name__ == "__main__":
    # `python flows/finetune_from_snowflake.py` serves it: start runs, with their parameters, from the UI or a schedule.
    finetune_from_snowflake.serve(name="nightly", tags=["cortex-training"])
