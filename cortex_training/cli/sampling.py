"""Commands that sample: generate, generate-stream. They need ``--job``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from cortex_training.cli.connection import connect
from cortex_training.cli.documents import plain, print_document, read_object
from cortex_training.cli.jobs import job_of
from cortex_training.cli.training import finish, poll_wish
from cortex_training.errors import ConfigurationError

_FIELDS = ("prompts", "sampling_params", "routing_key", "strict")


def add_parsers(subparsers: Any) -> None:
    generate = subparsers.add_parser("generate", help="generate text for the prompts in a JSON file")
    generate.add_argument("file", metavar="FILE", help="{prompts, sampling_params, routing_key, strict, poll}, or -")
    generate.set_defaults(handler=run_generate)

    stream = subparsers.add_parser("generate-stream", help="as generate; prints each sample on a line when it is done")
    stream.add_argument("file", metavar="FILE", help="as for generate")
    stream.set_defaults(handler=run_generate_stream)


def run_generate(options: argparse.Namespace) -> int:
    job = job_of(options)
    spec = read_object(options.file)
    poll = poll_wish(spec)
    arguments = generation_arguments(spec)
    with connect(options) as client:
        request_id = client.generate(job, **arguments)
        document = {"job_id": job, "prompt_count": len(arguments["prompts"]), "request_id": request_id}
        finish(options, client, document, poll=poll)
    return 0


def run_generate_stream(options: argparse.Namespace) -> int:
    """Print events, one JSON object a line. Returns 1 when a prompt failed."""
    job = job_of(options)
    spec = read_object(options.file)
    poll = poll_wish(spec)
    with connect(options) as client:
        reply = client.generate_stream(job, **generation_arguments(spec))
        if not poll:
            print_document(options, reply)
            return 0
        failed = False
        for event in client.stream_request(job, reply["request_id"]):
            failed = failed or event.get("type") == "error"
            print(json.dumps(plain(event), sort_keys=True), flush=True)
    return 1 if failed else 0


def generation_arguments(spec: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` from a request file, perhaps under ``payload``. Raises `ConfigurationError`."""
    if "payload" in spec:
        inner = spec.pop("payload")
        if spec or not isinstance(inner, dict):
            raise ConfigurationError("payload: must be a JSON object, with nothing but 'poll' beside it")
        spec = inner
    unknown = sorted(set(spec) - set(_FIELDS))
    if unknown:
        raise ConfigurationError(f"generate: unknown keys {', '.join(unknown)}; known are {', '.join(_FIELDS)}, poll")
    if "prompts" not in spec:
        raise ConfigurationError("prompts: missing; give a list of strings and lists of token ids")
    return spec
