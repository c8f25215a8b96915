"""Commands about the installation and the deployment: doctor, sweep, conformance."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from typing import Any

from cortex_training.cli.connection import connect
from cortex_training.cli.documents import print_document
from cortex_training.errors import ApiError, ConfigurationError, CortexTrainingError, NotFoundError

_TOLERATED_SKEW_S = 60.0
_SWEEP_AGE_S = 24 * 3600.0


def add_parsers(subparsers: Any) -> None:
    doctor = subparsers.add_parser("doctor", help="check the installation, connection, credential and clock")
    doctor.set_defaults(handler=run_doctor)

    sweep = subparsers.add_parser("sweep", help="find old jobs that no run owns, and cancel them with --cancel")
    sweep.add_argument("--root", action="append", default=[], help="jobs of an unfinished run in this root are owned")
    sweep.add_argument("--creds", metavar="LIST", help="where s3:// roots' credentials are: kind:location,…")
    sweep.add_argument("--older-than", type=float, default=_SWEEP_AGE_S, metavar="SECONDS", help="default: a day")
    sweep.add_argument("--experiment", metavar="PREFIX", help="only jobs whose experiment's name begins like this")
    sweep.add_argument("--user", help="only jobs submitted by this user")
    sweep.add_argument("--cancel", action="store_true", help="cancel them, those of --experiment or --user; else print")
    sweep.set_defaults(handler=run_sweep)

    conformance = subparsers.add_parser("conformance", help="ask a service, with a small paid job, what nobody knows")
    conformance.add_argument("--model", required=True, metavar="ID", help="the model to train a few steps")
    conformance.add_argument("--n-gpus", type=int, default=1)
    conformance.add_argument("--yes", action="store_true", help="yes, create a job that costs GPU time")
    conformance.set_defaults(handler=run_conformance)


def run_doctor(options: argparse.Namespace) -> int:
    checks = [_checked(name, check) for name, check in _doctor_checks(options)]
    print_document(options, {"checks": checks, "ok": all(check["ok"] for check in checks)})
    return 0 if all(check["ok"] for check in checks) else 1


def _doctor_checks(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], str]]]:
    yield "distributions", installed_distribution
    yield "connection", lambda: repr(connect(options))
    yield "credential", lambda: _ask_for_jobs(options)
    yield "clock", lambda: _compare_clocks(options)


def _checked(name: str, check: Callable[[], str]) -> dict[str, Any]:
    try:
        return {"check": name, "ok": True, "detail": check()}
    except (CortexTrainingError, OSError, ValueError) as error:
        return {"check": name, "ok": False, "detail": str(error)}


def installed_distribution() -> str:
    """The distribution that gives the package. Raises `ConfigurationError` when two of them claim its name.

    The public client and this one install into the same folder: whichever came last overwrote files of the other, and
    an uninstall of either removes files of both.
    """
    owners = sorted(set(importlib.metadata.packages_distributions().get("cortex_training", [])))
    if len(owners) > 1:
        raise ConfigurationError(
            f"the package cortex_training is installed by {' and '.join(owners)}, which overwrite each other: run "
            f"`{sys.executable} -m pip uninstall -y {' '.join(owners)}`, then install the one you want again"
        )
    return owners[0] if owners else "running from source"


def _ask_for_jobs(options: argparse.Namespace) -> str:
    with connect(options) as client:
        return f"{len(client.list_jobs())} jobs"


def _compare_clocks(options: argparse.Namespace) -> str:
    with connect(options) as client:
        skew_s = client.clock_skew_s()
    if skew_s is None:
        return "the service does not tell its time"
    if abs(skew_s) > _TOLERATED_SKEW_S:
        direction = "ahead of" if skew_s > 0 else "behind"
        raise ConfigurationError(
            f"this machine's clock is {abs(skew_s):.0f} s {direction} the service's: deadlines and key-pair tokens "
            "will be wrong; set the clock (NTP)"
        )
    return f"{round(skew_s):+d} s"


def run_sweep(options: argparse.Namespace) -> int:
    from cortex_training.training.sweep import SweepRule, owned_jobs

    if options.cancel and not options.experiment and not options.user:
        raise ConfigurationError(
            "sweep --cancel would end jobs of all who share the schema: say whose, by --experiment or --user; without "
            "--cancel they are only printed",
            field="experiment",
        )
    rule = SweepRule(
        older_than_s=options.older_than,
        user=options.user,
        experiments=(options.experiment,) if options.experiment else (),
        owned=owned_jobs(options.root, options.creds),
    )
    with connect(options) as client:
        found = rule.jobs(client)
        cancelled = []
        for job in found if options.cancel else []:
            try:
                client.cancel_job(job["job_id"])
            except (ApiError, NotFoundError) as error:
                print(f"{job['job_id']}: {error}", file=sys.stderr)
                continue
            cancelled.append(job["job_id"])
    kept = ("job_id", "status", "created_at", "submitted_by")
    document = {"found": [{key: job.get(key) for key in kept} for job in found], "cancelled": cancelled}
    print_document(options, document)
    return 0 if not options.cancel or len(cancelled) == len(found) else 1


def run_conformance(options: argparse.Namespace) -> int:
    from cortex_training.conformance import Interview

    if not options.yes:
        raise ConfigurationError(
            f"conformance creates a job with {options.n_gpus} GPU(s), trains a few steps and cancels it: add --yes"
        )
    with connect(options) as client:
        answers = []
        for answer in Interview(client, options.model, options.n_gpus).ask():
            print(f"{answer.question}: {answer.answer}", file=sys.stderr)
            answers.append({"question": answer.question, "answer": answer.answer, "evidence": answer.evidence})
    print_document(options, {"answers": answers})
    return 0
