"""``cortex-publish``: find the save to resume from, publish saves as they complete, prune old ones, probe a store.

Results go to standard output; everything else to standard error, each line starting ``publish: ``. Exit status: 0 done,
1 something about root, store, credentials or saves, 2 the command line.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence

from cortex_training.errors import ConfigurationError
from cortex_training.publication.arguments import USAGE, Arguments, HelpWanted, UsageError, read_arguments, read_step
from cortex_training.publication.entries import Entry
from cortex_training.publication.errors import CredentialsError, PublicationError, RootError, SaveError, StoreError
from cortex_training.publication.frameworks import FRAMEWORKS
from cortex_training.publication.log import PublicationLog
from cortex_training.publication.probe import probe
from cortex_training.publication.prune import prune
from cortex_training.publication.roots import open_store
from cortex_training.publication.store import Store
from cortex_training.publication.time_limit import OutOfTime, time_limit
from cortex_training.publication.urls import S3Location, absolute, parse_root, parse_s3
from cortex_training.publication.watch import Watch


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Paths leave as the bytes they are, whatever the locale: a script hands them on to the trainer.
        sys.stdout.reconfigure(encoding=sys.getfilesystemencoding(), errors=sys.getfilesystemencodeerrors())
    try:
        _run(sys.argv[1:] if argv is None else argv)
    except UsageError as problem:
        _note(f"{problem}\n{USAGE.rstrip()}")
        return 2
    except (PublicationError, ConfigurationError) as problem:
        _note(str(problem))
        return 1
    except _OutputLost as problem:
        _note(str(problem))
        # Or the interpreter's own last flush would fail, with words and a status of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        _note("interrupted")
        return 1
    return 0


def _run(argv: Sequence[str]) -> None:
    try:
        arguments = read_arguments(argv, os.environ)
    except HelpWanted:
        _say(USAGE.rstrip())
        return
    # A watch has a limit per scan, and a directory none but for a watch's last scan.
    whole = arguments.creds is not None and arguments.verb != "watch"
    try:
        with time_limit(arguments.timeout_s if whole else math.inf):
            _VERBS[arguments.verb](arguments)
    except OutOfTime:
        raise StoreError(
            f"store: {arguments.verb} {arguments.checkpoint}: not done within {arguments.timeout_s:g} s; "
            "see whether the store answers, or raise -timeout"
        ) from None


def _resolve(arguments: Arguments) -> None:
    place = _root(arguments)
    if arguments.probe and isinstance(place, str):
        raise UsageError("resolve: -probe is for an s3:// root")
    store = _open(arguments)
    if arguments.probe:
        probe(store)
    latest = PublicationLog(store).latest()
    if latest is None:
        return
    if arguments.verify and not store.holds_save(latest.save):
        # An older save in its place would undo training without a word.
        raise SaveError(f"resolve: {latest.location} is the latest publication, and is not there")
    _say(latest.location)


def _watch(arguments: Arguments) -> None:
    place = _root(arguments)
    saves = _saves(arguments, place)
    epoch = _epoch(arguments)
    with _Signals.caught() as signals:
        watch = Watch(PublicationLog(_open(arguments)), FRAMEWORKS[arguments.framework], saves, epoch)
        watch.run(
            signals.wait,
            _say_published,
            interval_s=arguments.interval_s,
            scan_timeout_s=math.inf if isinstance(place, str) else arguments.timeout_s,
            last_timeout_s=arguments.timeout_s,
            bounded=time_limit,
        )


def _publish(arguments: Arguments) -> None:
    save, step = arguments.positionals
    number = read_step(step)
    name = _below(_root(arguments), save)
    entry, created = PublicationLog(_open(arguments)).publish(name, _epoch(arguments), number)
    if created:
        _say_published(entry)
    else:
        _note(f"already published: {entry.name} ({_described(entry)})")


def _prune(arguments: Arguments) -> None:
    _root(arguments)
    prune(
        PublicationLog(_open(arguments)),
        arguments.keep,
        removed=lambda location: _say(f"removed {location}"),
        left=lambda location, reason: _note(f"prune: left {location} in place: {reason}"),
    )


def _probe(arguments: Arguments) -> None:
    if isinstance(_root(arguments), str):
        raise UsageError("probe: -checkpoint must be an s3:// root")
    store = _open(arguments)
    probe(store)
    _say(f"{store.root} {store.opened_with}")


_VERBS = {"resolve": _resolve, "watch": _watch, "publish": _publish, "prune": _prune, "probe": _probe}


def _root(arguments: Arguments) -> str | S3Location:
    """The root, and whether the flags go with its kind. Raises RootError, UsageError."""
    place = parse_root(arguments.checkpoint)
    if isinstance(place, str) and arguments.creds is not None:
        raise UsageError(f"{arguments.verb}: -creds and -proxy are for s3:// roots, and {place} is a directory")
    if not isinstance(place, str) and arguments.creds is None:
        raise UsageError(f"{arguments.verb}: an s3:// root needs -creds")
    return place


def _open(arguments: Arguments) -> Store:
    deadline = time.monotonic() + arguments.timeout_s
    # A watch outlives credentials and has a limit per scan; the other verbs are one piece of work.
    watching = arguments.verb == "watch"
    try:
        with time_limit(arguments.timeout_s if arguments.creds is not None else math.inf):
            store = open_store(
                arguments.checkpoint,
                arguments.creds,
                proxy=arguments.proxy,
                timeout_s=arguments.timeout_s,
                renews=watching,
                notes=_note,
            )
    except OutOfTime:
        raise CredentialsError(
            f"credentials: {arguments.creds}: no answer from the sources within {arguments.timeout_s:g} s"
        ) from None
    return store if watching else store.until(deadline)


def _saves(arguments: Arguments, place: str | S3Location) -> str:
    """The folder watch looks in, as a path below the root."""
    if arguments.positionals:
        return _below(place, arguments.positionals[0])
    if arguments.attempt is None:
        raise UsageError("watch: give SAVES, -attempt or DISPATCH_ATTEMPT")
    return f"exec/{arguments.attempt}"


def _below(place: str | S3Location, spelled: str) -> str:
    """A path or an s3:// URL below the root, as a path relative to it. Raises SaveError."""
    if isinstance(place, str):
        root, path = place, absolute(spelled)
    else:
        root = place.url
        try:
            path = parse_s3(spelled).url
        except RootError as problem:
            raise SaveError(f"save {problem}") from None
    below = path.removeprefix(f"{root.rstrip('/')}/")
    if below == path:
        raise SaveError(f"save {spelled!r} is not below the root {root}")
    return below


def _epoch(arguments: Arguments) -> int:
    if arguments.epoch is None:
        _note("neither -epoch nor DISPATCH_EPOCH is set; publishing under epoch 0")
        return 0
    return arguments.epoch


class _Signals:
    """SIGTERM and SIGINT end a wait; a second one ends the process, whatever it is at."""

    def __init__(self) -> None:
        # A pipe, since what Python's own events lock, a handler must not.
        self._read, self._write = os.pipe()
        self._came = False

    @classmethod
    @contextlib.contextmanager
    def caught(cls) -> Iterator[_Signals]:
        signals = cls()
        before = {number: signal.signal(number, signals._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield signals
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(signals._read)
            os.close(signals._write)

    def wait(self, seconds: float) -> bool:
        """Wait up to so many seconds; whether a signal came, now or before."""
        select.select([self._read], [], [], seconds)
        return self._came

    def _handle(self, number: int, frame: object) -> None:
        if self._came:
            os.write(2, b"publish: second signal, stopping at once\n")
            os._exit(1)
        self._came = True
        os.write(self._write, b".")


def _described(entry: Entry) -> str:
    return f"epoch {entry.epoch}, step {entry.step}, {entry.location}"


def _say_published(entry: Entry) -> None:
    _say(f"published {entry.name} ({_described(entry)})")


class _OutputLost(Exception):
    """Standard output takes no more: nobody reads it, or the disk it goes to is full."""


def _say(line: str) -> None:
    try:
        print(line, flush=True)
    except BrokenPipeError:
        raise _OutputLost("nobody reads standard output any more") from None
    except OSError as problem:
        raise _OutputLost(f"write to standard output: {problem.strerror}") from None


def _note(text: str) -> None:
    for line in text.splitlines():
        print(f"publish: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
