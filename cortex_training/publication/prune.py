"""Remove old publications, and the saves that only they named."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cortex_training.errors import ConfigurationError
from cortex_training.publication.entries import Entry
from cortex_training.publication.frameworks import MARKERS
from cortex_training.publication.log import PublicationLog


def prune(
    log: PublicationLog,
    keep: int = 3,
    *,
    removing: Callable[[str], None] = lambda save: None,
    removed: Callable[[str], None] = lambda location: None,
    left: Callable[[str, str], None] = lambda location, reason: None,
) -> list[str]:
    """Remove all but the latest `keep` entries (at least 1), then the saves they named; the paths that were removed.

    A save stays while a remaining entry names it, a folder inside it, or a folder around it. `removing` is called with
    the path below the root just before a save goes, `removed` with its location after, `left` with the location and
    the reason for one that is left in place (a symbolic link is on its way).

    Safe against a second prune, and against publishers. Raises ConfigurationError, StoreError, and LogError for a name
    in ``pub/`` that does not parse, before anything is removed.
    """
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ConfigurationError.of("keep", keep, "give a whole number of entries, at least 1: the latest always stays")
    doomed = log.entries()[:-keep]
    # Entries first: a crash here leaves folders nobody names. The other way round it would leave an entry that names
    # nothing, and a job that resumes from it.
    for entry in doomed:
        log.withdraw(entry)
    gone = []
    for save in _saves(doomed):
        # Read anew for each: what was published meanwhile protects its folder.
        if any(_overlap(save, entry.save) for entry in log.entries()):
            continue
        removing(save)
        reason = log.store.remove_folder(save, first=MARKERS)
        if reason is not None:
            left(log.store.locate(save), reason)
            continue
        gone.append(save)
        removed(log.store.locate(save))
    if gone:
        _withdraw_resurrected(log, gone)
    return gone


def _withdraw_resurrected(log: PublicationLog, gone: Sequence[str]) -> None:
    """A watch that was restarted after the entries went may have published a save again just before its folder went."""
    for entry in log.entries():
        if any(entry.save == save or entry.save.startswith(f"{save}/") for save in gone):
            log.withdraw(entry)


def _saves(entries: Sequence[Entry]) -> list[str]:
    """The saves that entries name, once each, oldest first."""
    return list(dict.fromkeys(entry.save for entry in entries))


def _overlap(one: str, other: str) -> bool:
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")
