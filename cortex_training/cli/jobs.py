"""Commands about jobs: submit, get, list, wait, cancel, capacity."""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from typing import TYPE_CHECKING, Any

from cortex_training import identity
from cortex_training.answers import CreatedJob, Job, created_at
from cortex_training.cli.connection import connect
from cortex_training.cli.documents import print_document, read_object
from cortex_training.cli.waiting import shown
from cortex_training.config import Hardware
from cortex_training.errors import ConfigurationError
from cortex_training.protocol.jobs import check_body
from cortex_training.states import TERMINAL_JOB_STATES, JobState, job_state

if TYPE_CHECKING:
    from cortex_training.client import CortexTrainingClient


def add_parsers(subparsers: Any) -> None:
    submit = subparsers.add_parser("submit", help="create a job from a JSON file")
    submit.add_argument("file", metavar="FILE", help="the REST body, or - for standard input")
    submit.add_argument("--job-id", dest="new_job_id", metavar="ID", help="the new job's id (default: a random UUID)")
    submit.add_argument("--dry-run", action="store_true", help="check and print the body, send nothing")
    submit.add_argument("--wait", action="store_true", help="wait until the job runs, and print it")
    submit.set_defaults(handler=run_submit)

    get = subparsers.add_parser("get", help="print a job")
    add_job_argument(get)
    get.set_defaults(handler=run_get)

    listing = subparsers.add_parser("list", help="print jobs, the newest last")
    which = listing.add_mutually_exclusive_group()
    which.add_argument("--status", help="one state, several separated by commas, or 'active'")
    which.add_argument("--all", action="store_true", help="jobs in every state, which is the default")
    listing.add_argument("--user", help="only jobs submitted by this user")
    listing.add_argument("--since", type=_moment, metavar="TIME", help="created since: RFC 3339, or 90m, 12h, 7d ago")
    listing.add_argument("--limit", type=int, help="only the newest jobs, at most this many")
    listing.set_defaults(handler=run_list)

    wait = subparsers.add_parser("wait", help="wait until a job runs, and print it")
    add_job_argument(wait)
    wait.set_defaults(handler=run_wait)

    cancel = subparsers.add_parser("cancel", help="cancel a job")
    add_job_argument(cancel)
    cancel.set_defaults(handler=run_cancel)

    capacity = subparsers.add_parser("capacity", help="print the account's GPUs")
    capacity.add_argument("--hardware", choices=[str(kind) for kind in Hardware])
    capacity.set_defaults(handler=run_capacity)


def add_job_argument(parser: argparse.ArgumentParser) -> None:
    """The job as an argument, for commands that are about nothing else; ``--job`` before the command does as well."""
    parser.add_argument("job_argument", metavar="JOB_ID", nargs="?", help="default: --job")


def job_of(options: argparse.Namespace) -> str:
    """The job a command is about. Raises `ConfigurationError` when none was named."""
    job = getattr(options, "job_argument", None) or options.job
    if not job:
        raise ConfigurationError(f"{options.command}: no job; give --job JOB_ID before the command")
    return str(job)


def run_submit(options: argparse.Namespace) -> int:
    body = read_object(options.file)
    if options.new_job_id:
        body["job_id"] = options.new_job_id
    check_body(body)
    if options.dry_run:
        print_document(options, body)
        return 0
    if body.get("job_id") is None:
        # With an id of ours the create can be repeated after a lost reply, and the job can be found and cancelled.
        body["job_id"] = identity.new_job_id()
        print(f"creating job {body['job_id']}", file=sys.stderr)
    with connect(options) as client:
        reply: CreatedJob | Job = client.create_job_from_body(body)
        if options.wait:
            reply = _waited(client, reply["job_id"])
    print_document(options, reply)
    return 0


def run_get(options: argparse.Namespace) -> int:
    with connect(options) as client:
        print_document(options, client.get_job(job_of(options)))
    return 0


def run_list(options: argparse.Namespace) -> int:
    wanted = [part.strip() for part in (options.status or "").split(",") if part.strip()]
    _say_which_states_nobody_knows(wanted)
    with connect(options) as client:
        jobs = client.list_jobs(wanted[0] if len(wanted) == 1 and wanted[0] != "active" else None)
    jobs = [job for job in _oldest_first(jobs) if _matches(job, wanted, options.user)]
    if options.since is not None:
        jobs = [job for job in jobs if (created := created_at(job)) is not None and created >= options.since]
    if options.limit is not None:
        jobs = jobs[-options.limit :] if options.limit > 0 else []
    print_document(options, {"jobs": jobs})
    return 0


def _say_which_states_nobody_knows(wanted: list[str]) -> None:
    """A new state of the service's can be asked for, and a typing error must not look like an empty list."""
    known = sorted({*JobState, "active"} - {JobState.UNKNOWN})
    for state in wanted:
        if job_state(state) not in known:
            print(f"--status {state!r}: no state that is known here, which are {', '.join(known)}", file=sys.stderr)


def _matches(job: Job, states: list[str], user: str | None) -> bool:
    state = job_state(job.get("status"))
    asked = {job_state(wanted) for wanted in states if wanted != "active"}
    right_state = not states or state in asked or ("active" in states and state not in TERMINAL_JOB_STATES)
    return right_state and (user is None or str(job.get("submitted_by", "")).lower() == user.lower())


def _oldest_first(jobs: list[Job]) -> list[Job]:
    """By creation; jobs without a date last. The service lists the newest first, so without any date: reversed."""
    if not any(isinstance(job.get("created_at"), str) for job in jobs):
        return jobs[::-1]
    return sorted(jobs, key=lambda job: (not isinstance(job.get("created_at"), str), str(job.get("created_at"))))


def run_wait(options: argparse.Namespace) -> int:
    with connect(options) as client:
        print_document(options, _waited(client, job_of(options)))
    return 0


def run_cancel(options: argparse.Namespace) -> int:
    job = job_of(options)
    with connect(options) as client:
        client.cancel_job(job)
    print_document(options, {"cancelled": True, "job_id": job})
    return 0


def run_capacity(options: argparse.Namespace) -> int:
    with connect(options) as client:
        if options.hardware:
            print_document(options, client.get_capacity(options.hardware))
        else:
            by_hardware = {str(kind): client.get_capacity(kind) for kind in Hardware}
            print_document(options, {"capacity_by_hardware": by_hardware})
    return 0


def _waited(client: CortexTrainingClient, job_id: str) -> Job:
    """The job once it runs; a terminal shows its state until then."""
    with shown(f"job {job_id}") as show:
        return client.wait_for_job(
            job_id, progress=lambda job: show(f"job {job_id}: {job_state(job.get('status'))} {job.get('reason') or ''}")
        )


def _moment(text: str) -> datetime.datetime:
    """A time as a person gives it: RFC 3339, or how long ago."""
    ago = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    try:
        if ago is not None:
            seconds = float(ago[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[ago[2]]
            return datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=seconds)
        moment = datetime.datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no time: give 2026-09-01T00:00:00Z, or 90m, 12h, 7d") from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.UTC)
