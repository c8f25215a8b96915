"""`cortex-training serve` and `cortex-training models`: the local service."""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cortex_training.cli.greeting import greeting, request_printer

if TYPE_CHECKING:
    from cortex_training.local.control import ControlServer

TOKEN_VARIABLE = "CORTEX_TRAINING_SERVE_TOKEN"
"""Environment variable with the token to accept: the arguments of a process are there for every user to read."""


def add_parsers(subparsers: Any) -> None:
    """Add the commands to an argparse object that ``add_subparsers`` returned."""
    _add_serve(subparsers)
    _add_models(subparsers)


def _add_serve(subparsers: Any) -> None:
    serve = subparsers.add_parser("serve", help="run the local service, which really trains on this machine's CPU")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: loopback)")
    serve.add_argument("--port", type=int, default=8484, help="port to listen on; 0 for a free one (default: 8484)")
    serve.add_argument("--endpoint", default="cortex-training", help="last part of the API's path")
    serve.add_argument(
        "--token",
        help=f"accept this token alone (default: that in {TOKEN_VARIABLE}, else any token, or none)",
    )
    serve.add_argument("--data-dir", type=Path, help="where checkpoints live (default: a folder deleted at the end)")
    serve.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="ID[=PATH]",
        help="run this model id from a local folder; without =PATH from the Hugging Face cache, downloading nothing",
    )
    serve.add_argument(
        "--resume-jobs",
        action="store_true",
        help="let jobs that a killed service left go on from their last checkpoint, instead of failing them",
    )
    serve.add_argument("--strict-models", action="store_true", help="refuse models that are not here; no tiny stand-in")
    serve.add_argument("--gpus", type=int, default=16, help="simulated GPUs of each hardware type (default: 16)")
    serve.add_argument("--threads", type=int, default=1, help="torch's threads (default: 1)")
    serve.add_argument("--execution-log", type=Path, help="append one JSON line per executed operation to this file")
    serve.add_argument("--placing-seconds", type=float, default=0.05, help="how long a job stays placing")
    serve.add_argument(
        "--timeout-scale", type=float, default=1.0, help="multiply jobs' idle and pending timeouts by this"
    )
    serve.add_argument(
        "--export-seconds", type=float, default=3600.0, help="how long export links live (default: 3600)"
    )
    serve.add_argument(
        "--result-chunk-bytes", type=int, default=1024 * 1024, help="deliver larger results in chunks of this size"
    )
    serve.add_argument("--max-partial-bytes", type=int, default=2 * 1024**3, help="memory for incomplete chunk groups")
    serve.add_argument(
        "--snowflake", action="store_true", help="also answer the Snowflake connector: logins, SQL, artifacts of jobs"
    )
    serve.add_argument(
        "--session-seconds", type=float, default=3600.0, help="how long a Snowflake session's token lives"
    )
    serve.add_argument("--tls", action="store_true", help="speak https, with a certificate made on the spot")
    serve.add_argument("--sample-seconds", type=float, default=5.0, help="between two samples of a GPU's metrics")
    serve.add_argument(
        "--seal-seconds", type=float, default=30.0, help="after which console output and metrics become artifacts"
    )
    serve.add_argument(
        "--execution-log-weights", action="store_true", help="hash the weights after each step, save and load"
    )
    serve.add_argument(
        "--faults",
        type=Path,
        metavar="FILE",
        help="bad weather by the rules in FILE (JSON or TOML); opens a control port",
    )
    serve.add_argument("--control-port", type=int, default=0, help="the control port of --faults (default: a free one)")
    serve.add_argument(
        "--simulate",
        metavar="SECONDS",
        help="no model: operations take this time; a number, an expression, or a JSON or TOML file",
    )
    serve.add_argument(
        "--assume",
        action="append",
        default=[],
        metavar="QUESTION=ANSWER",
        help="how to behave where the real service is not known",
    )
    serve.add_argument(
        "--json-ready", action="store_true", help="print one JSON line when ready, and nothing else on stdout"
    )
    serve.set_defaults(handler=run_serve)


def _add_models(subparsers: Any) -> None:
    models = subparsers.add_parser("models", help="models of the local service")
    actions = models.add_subparsers(dest="action", required=True)
    prepare = actions.add_parser("prepare", help="build a model's folder, or find it, and print its path")
    prepare.add_argument("name", help="tiny or smollm2-135m-instruct")
    prepare.set_defaults(handler=run_models_prepare)


def run_serve(options: argparse.Namespace) -> int:
    """Serve until a signal ends it. Returns 1 after saying why on stderr when it cannot start."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    # It has nothing to say at the start that the greeting does not say better.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    try:
        from cortex_training.local.assumptions import Assumptions
        from cortex_training.local.server import ready_line, serve
        from cortex_training.local.settings import ServiceSettings
        from cortex_training.local.simulation import read_simulation
        from cortex_training.local.weather_rules import read_faults
    except ModuleNotFoundError as error:
        print(
            f"error: the local service needs {error.name}; pip install 'cortex-training-client[local]'", file=sys.stderr
        )
        return 1
    try:
        settings = ServiceSettings(
            host=options.host,
            port=options.port,
            endpoint=options.endpoint,
            token=options.token or os.environ.get(TOKEN_VARIABLE) or None,
            gpus_per_hardware=options.gpus,
            threads=options.threads,
            models=dict(_model_folder_option(option) for option in options.model),
            strict_models=options.strict_models,
            resume_jobs=options.resume_jobs,
            execution_log=options.execution_log,
            execution_log_weights=options.execution_log_weights,
            faults=read_faults(options.faults) if options.faults else None,
            control_port=options.control_port,
            simulation=read_simulation(options.simulate) if options.simulate else None,
            placing_s=options.placing_seconds,
            timeout_scale=options.timeout_scale,
            export_link_s=options.export_seconds,
            result_chunk_bytes=options.result_chunk_bytes,
            max_partial_bytes=options.max_partial_bytes,
            assumptions=Assumptions().with_choices(options.assume),
            tls=options.tls,
            snowflake=options.snowflake,
            session_s=_positive("--session-seconds", options.session_seconds),
            sample_s=_positive("--sample-seconds", options.sample_seconds),
            seal_s=_positive("--seal-seconds", options.seal_seconds),
            # Last, so that a folder is made only when everything else is right.
            data_dir=options.data_dir.resolve()
            if options.data_dir
            else Path(tempfile.mkdtemp(prefix="cortex-training-")),
        )

        def announce(base_url: str, control: ControlServer | None) -> None:
            if options.json_ready:
                print(ready_line(base_url, settings, control), flush=True)
            else:
                print(greeting(base_url, settings, control), flush=True)

        tell = None if options.json_ready else request_printer()
        serve(settings, announce=announce, keep_data=options.data_dir is not None, tell=tell)
    except ModuleNotFoundError as error:
        print(
            f"error: --snowflake and --tls need {error.name}; pip install 'cortex-training-client[local-snowflake]'",
            file=sys.stderr,
        )
        return 1
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def run_models_prepare(options: argparse.Namespace) -> int:
    """Print the folder of a model. Returns 1 after saying why on stderr when there is none."""
    from cortex_training.local.models import model_folder

    try:
        print(model_folder(options.name))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _model_folder_option(option: str) -> tuple[str, Path]:
    name, separator, path = option.partition("=")
    if not separator:
        return name, _downloaded(name)
    folder = Path(path).expanduser().resolve()
    if not name or not path:
        raise ValueError(f"--model {option!r}: must be ID=PATH, such as Qwen/Qwen3-0.6B=/models/qwen3-0.6b")
    if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
        raise ValueError(f"--model {option!r}: {folder} holds no config.json with *.safetensors")
    return name, folder


def _downloaded(name: str) -> Path:
    from cortex_training.local.hub_cache import cached_model

    found = cached_model(name)
    if found is None:
        raise ValueError(
            f"--model {name!r}: no model with safetensors of this id in the Hugging Face cache; download it there, or "
            f"give a folder: --model {name}=PATH"
        )
    return found


def _positive(option: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise ValueError(f"{option} {value}: must be a number of seconds greater than 0")
    return value
