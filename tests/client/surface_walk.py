"""Runs in an environment that holds this distribution and what it declares: the whole public surface, once.

Arguments: the address of a service, an empty folder. Prints one JSON object with what was seen.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import cortex_training
from cortex_training import (
    AsyncCortexTrainingClient,
    CortexTrainingClient,
    SubJobConfig,
    build_forward_backward_payload,
    identity,
    serialize_forward_backward_args,
    wire,
)
from cortex_training.protocol.results import checkpoint_id

IDS = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]]
GREEDY = {"max_tokens": 4, "temperature": 0}
EXTRAS = ("boto3", "hvac", "jinja2", "matplotlib", "pyarrow", "rich", "snowflake", "sqlalchemy", "tokenizers", "torch")


def modules() -> dict[str, str]:
    """Modules of the package that cannot be imported here, with the reason; those of the local service aside."""
    refused = {}
    for module in pkgutil.walk_packages(cortex_training.__path__, "cortex_training."):
        if module.name.endswith("__main__") or module.name.startswith("cortex_training.local"):
            continue
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            refused[module.name] = str(error)
    return refused


def frames() -> dict[str, Any]:
    """Values in and out of frames, with numpy alone."""
    import numpy as np

    value = {
        "f32": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "scalar": np.float64(2.5),
        "bf16": wire.RawTensor("BF16", (2,), b"\x80\x3f\x00\xc0"),
        "f8": [wire.RawTensor(dtype, (3,), b"\x00\x38\xb8") for dtype in ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ")],
        "pair": (np.arange(3), "text"),
    }
    frame = wire.dumps(value, {"response_options": {"format": "dssst1"}})
    chunks = wire.encode_byte_chunks(frame, kind="request", operation="fwd-bwd", max_bytes=8192 + 256, force_chunk=True)
    back = wire.loads(wire.decode_byte_chunks(chunks[::-1], kind="request"))
    try:
        wire.loads(b"\x80\x04pickle")
    except wire.WireError as error:
        refusal = str(error)
    built = wire.loads(build_forward_backward_payload({"kwargs": {"x": {"data": [1.5], "dtype": "bfloat16"}}}))
    return {
        "chunks": len(chunks),
        "same": np.array_equal(back["f32"], value["f32"]) and back["pair"][1] == "text",
        "bf16": np.asarray(back["bf16"]).tolist(),
        "f8": [np.asarray(tensor).tolist() for tensor in back["f8"]],
        "built": np.asarray(built["kwargs"]["x"]).tolist(),
        "again": wire.dumps(back, wire.read_metadata(frame)) == frame,
        "refusal": refusal,
    }


def batch() -> bytes:
    import numpy as np

    ids = np.array(IDS, dtype=np.int64)
    return serialize_forward_backward_args(args=(), kwargs={"input_ids": ids, "labels": ids})


def sub_jobs() -> list[SubJobConfig]:
    training = SubJobConfig.training_job(
        "tiny", {"name": "AdamW", "lr": 1e-2}, max_seq_len=64, train_batch_size=2, n_gpus=1
    )
    return [training, SubJobConfig.sampling_job("tiny", max_seq_len=64, n_gpus=1)]


def blocking(base_url: str) -> dict[str, Any]:
    with CortexTrainingClient(base_url, "DB", "PUBLIC", token_prompts="tensor") as client:
        job = client.create_job(sub_jobs(), job_id=identity.new_job_id())
        try:
            client.wait_for_job(job)
            loss = client.poll_request(job, client.forward_backward(job, batch()))["avg_loss"]
            steps = client.poll_request(job, client.step(job))["global_steps"]
            client.poll_request(job, client.weight_sync(job, f"{job}:training:0", [f"{job}:sampling:0"]))
            sampled = client.poll_request(job, client.generate(job, ["Hello", [5, 6]], GREEDY))["results"]
            request = client.generate_stream(job, ["Hello"], GREEDY)["request_id"]
            events = [event["type"] for event in client.stream_request(job, request)]
            saved = checkpoint_id(client.poll_request(job, client.save(job, checkpoint_type="resumable")))
            client.poll_request(job, client.load(job, str(saved)))
            lines = len(list(client.stream_logs(job, follow=False)))
            listed = [one["checkpoint_id"] for one in client.list_checkpoints(job)]
        finally:
            client.cancel_job(job)
    return {
        "loss": loss,
        "steps": steps,
        "token_ids": [sample["token_ids"] for sample in sampled],
        "events": events,
        "listed": listed == [saved],
        "log": lines > 0,
    }


async def asynchronous(base_url: str) -> dict[str, Any]:
    async with AsyncCortexTrainingClient(base_url, "DB", "PUBLIC") as client:
        job = await client.create_job(sub_jobs(), job_id=identity.new_job_id())
        try:
            await client.wait_for_job(job)

            async def loss() -> float:
                return float((await client.poll_request(job, await client.forward_backward(job, batch())))["avg_loss"])

            losses = await asyncio.gather(*(loss() for _ in range(4)))
            steps = (await client.poll_request(job, await client.step(job)))["global_steps"]
            sampled = (await client.poll_request(job, await client.generate(job, ["Hello"], GREEDY)))["results"]
        finally:
            await client.cancel_job(job)
    return {"losses": losses, "steps": steps, "token_ids": [sample["token_ids"] for sample in sampled]}


def commands(base_url: str, folder: Path) -> dict[str, Any]:
    """Installed commands, in processes of their own."""
    programs = Path(sys.executable).parent
    environment = {**os.environ, "XDG_CONFIG_HOME": str(folder), "HOME": str(folder)}
    (folder / "job.json").write_text(
        json.dumps({"sub_job_configs": [config.to_wire() for config in sub_jobs()]}), encoding="utf-8"
    )
    (folder / "batch.json").write_text(json.dumps({"kwargs": {"input_ids": {"data": IDS}, "labels": {"data": IDS}}}))

    def run(program: str, *arguments: str, said: str = "") -> str:
        done = subprocess.run(
            [str(programs / program), *arguments],
            env=environment,
            input=said,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise SystemExit(f"{program} {' '.join(arguments)}: {done.stderr}")
        return done.stdout

    def ct(*arguments: str) -> Any:
        return json.loads(run("ct", "--base-url", base_url, "--database", "DB", *arguments))

    job = ct("submit", str(folder / "job.json"), "--wait")["job_id"]
    try:
        loss = ct("--job", job, "fwd-bwd", str(folder / "batch.json"))["result"]["avg_loss"]
        steps = ct("--job", job, "step")["result"]["global_steps"]
        saved = ct("--job", job, "save", "--type", "weights-only")["checkpoint_id"]
    finally:
        # A profile with a token works without the Snowflake connector.
        account = ("--host", base_url, "--user", "me", "--database", "DB")
        run("ct", "login", *account, "--pat-stdin", said="a-token\n")
        cancelled = json.loads(run("ct", "cancel", job))
    root = folder / "root"
    save = root / "exec" / "a-e1" / saved
    save.mkdir(parents=True)
    run("cortex-publish", "publish", "-checkpoint", str(root), "-epoch", "1", str(save), "1")
    resolved = run("cortex-publish", "resolve", "-checkpoint", str(root)).strip()
    return {"loss": loss, "steps": steps, "cancelled": cancelled["cancelled"], "resolved": resolved == str(save)}


def main(base_url: str, folder: Path) -> None:
    print(
        json.dumps(
            {
                "extras": [name for name in EXTRAS if importlib.util.find_spec(name)],
                "refused": modules(),
                "frames": frames(),
                "blocking": blocking(base_url),
                "asynchronous": asyncio.run(asynchronous(base_url)),
                "commands": commands(base_url, folder),
                "version": cortex_training.__version__,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
