"""The main job without an orchestrator: the same steps in one process, for a first look and for debugging."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from cortex_training import AsyncCortexTrainingClient, CortexTrainingClient
from cortex_training.datasets import build_dataset
from cortex_training.protocol.results import checkpoint_id
from cortex_training.publication.export import download_checkpoint
from cortex_training.publication.log import PublicationLog
from cortex_training.publication.save import WEIGHTS_ONLY, SaveManifest
from cortex_training.training import Progress, TrainingPlan, TrainingResult, run
from demo.recipes import DATABASE, SCHEMA, TABLE
from demo.stage import Outcome, Stage

TRAINING_TABLE = "FINETUNE_ROWS"


def run_pipeline(stage: Stage) -> Outcome:
    """From the SQL transform to the published checkpoint; the job is cancelled whatever happens."""
    manifest = _build_dataset(stage)
    with CortexTrainingClient.from_pat(stage.service.base_url, stage.service.token, DATABASE, SCHEMA) as client:
        job_id = client.create_job_from_body({"sub_job_configs": stage.recipe.sub_jobs()})["job_id"]
        stage.say(f"job {job_id} created")
        try:
            client.wait_for_job(job_id, progress=lambda job: stage.say(f"job is {job['status']}"))
            before = _generate(client, stage, job_id)
            result = _train(stage, job_id, manifest)
            entry, folder = _publish_model(client, stage, job_id, result)
            synced = client.weight_sync(
                job_id,
                f"{job_id}:training:0",
                [f"{job_id}:sampling:0"],
                weight_format="lora" if stage.recipe.lora else None,
            )
            client.poll_request(job_id, synced)
            after = _generate(client, stage, job_id)
        finally:
            client.cancel_job(job_id)
            stage.say("job cancelled")
    return Outcome(
        run_root=stage.runs_root / "cli",
        model=stage.models_root / folder,
        entry=entry,
        before=before,
        after=after,
        job_ids=[job_id],
        look_at=f"cortex-training runs {os.path.relpath(stage.runs_root / 'cli')}",
    )


def _build_dataset(stage: Stage) -> str:
    with stage.snowflake.connect(DATABASE, SCHEMA) as connection, connection.cursor() as cursor:
        cursor.execute(
            f"CREATE OR REPLACE TABLE {TRAINING_TABLE} AS SELECT PROMPT, COMPLETION FROM {TABLE} WHERE SPLIT = 'train'"
        )
        cursor.execute(f"SELECT PROMPT, COMPLETION FROM {TRAINING_TABLE}")
        built = build_dataset(
            cursor, stage.work / "dataset", tokenizer=stage.tokenizer, max_seq_len=stage.recipe.max_seq_len, seed=1
        )
    stage.say(f"dataset: {built.rows} rows, {built.tokens} tokens in {built.sequences} sequences")
    return str(stage.work / "dataset" / "manifest.json")


def _generate(client: CortexTrainingClient, stage: Stage, job_id: str) -> list[str]:
    request = client.generate(
        job_id, stage.sample_prompts, {"max_tokens": stage.recipe.max_new_tokens, "temperature": 0.0}
    )
    return [str(r["text"]) for r in client.poll_request(job_id, request)["results"]]


def _train(stage: Stage, job_id: str, manifest: str) -> TrainingResult:
    plan = TrainingPlan.from_dict(
        {
            "root": str(stage.runs_root / "cli"),
            "dataset": manifest,
            "job_id": job_id,
            "steps": stage.recipe.steps,
            "micro_batch_size": stage.recipe.micro_batch_size,
            "learning_rate": stage.recipe.schedule(),
            "save_every_steps": stage.recipe.save_every_steps,
        }
    )

    def tell(progress: Progress) -> None:
        stage.say(progress.line())

    async def main() -> TrainingResult:
        async with AsyncCortexTrainingClient.from_pat(
            stage.service.base_url, stage.service.token, DATABASE, SCHEMA
        ) as client:
            return await run(plan, client, tell)

    return asyncio.run(main())


def _publish_model(client: CortexTrainingClient, stage: Stage, job_id: str, result: TrainingResult) -> tuple[str, str]:
    """Export the weights, download them below the model root, and publish the folder."""
    saved: dict[str, Any] = client.poll_request(job_id, client.save(job_id, checkpoint_type=WEIGHTS_ONLY))
    identifier = checkpoint_id(saved)
    if identifier is None:
        raise RuntimeError(f"the save of job {job_id} names no checkpoint: {saved}")
    log = PublicationLog(stage.models_root)
    epoch = log.claim_epoch({"run": result.root})
    folder = f"exec/cli-e{epoch.number}/{identifier}"
    files = download_checkpoint(client, job_id, identifier, stage.models_root / folder)
    SaveManifest(
        job_id=job_id,
        checkpoint_id=identifier,
        checkpoint_type=WEIGHTS_ONLY,
        global_steps=result.global_steps,
        files=files,
    ).write(log.store, folder)
    entry, _ = log.publish(folder, epoch.number, result.steps)
    stage.say(f"published {entry.name}")
    return entry.name, folder
