"""Every place at which a driver can die, numbered: the table that the crash tests go through.

A row is what the driver does, in which stages of it it can be struck, and at which steps an undisturbed run of the
harness's plan does it (0 is before the first step, 6 the measurement behind the last of 5). Rows stand in the order in
which one step passes them. ``test_crash_points`` compares the table with what runs really pass, so a new write or a new
call of the engine fails there until it is listed.
"""

from __future__ import annotations

from tests.faults.harness import STEPS

STORED = ("before", "after")
ASKED = ("before", "answered")
SENT = ("before", "permitted", "written", "answered")

START, END = (0,), (STEPS + 1,)
EVERY = tuple(range(1, STEPS + 1))
MEASURED = (*EVERY, STEPS + 1)
SAVED = (2, 4, 5)
PUBLISHED = tuple(step + 1 for step in SAVED)

UNDISTURBED = (
    ("write identity", STORED, START),
    ("claim epoch", STORED, START),
    ("record takeover", STORED, START),
    ("record segment", STORED, START),
    ("send create", SENT, START),
    ("record created", STORED, START),
    ("record running", STORED, START),
    ("record intent forward_backward", STORED, MEASURED),
    ("send fwd-bwd", SENT, MEASURED),
    ("record sent forward_backward", STORED, MEASURED),
    ("send get-request-status", ASKED, MEASURED),
    ("record outcome forward_backward done", STORED, MEASURED),
    ("write manifest", STORED, PUBLISHED),
    ("publish entry", STORED, PUBLISHED),
    ("record intent step", STORED, EVERY),
    ("send step", SENT, EVERY),
    ("record sent step", STORED, EVERY),
    ("record outcome step done", STORED, EVERY),
    ("send list-checkpoints", ASKED, SAVED),
    ("record intent save", STORED, SAVED),
    ("send save", SENT, SAVED),
    ("record sent save", STORED, SAVED),
    ("record outcome save done", STORED, SAVED),
    ("send get-job", ASKED, (0, *SAVED)),
    ("record intent weight_sync", STORED, SAVED),
    ("send weight-sync", SENT, SAVED),
    ("record sent weight_sync", STORED, SAVED),
    ("record outcome weight_sync done", STORED, SAVED),
    ("record finished", STORED, END),
    ("send cancel", ASKED, END),
    ("record cancelled", STORED, END),
    ("record released", STORED, END),
)

RECOVERING = (
    "record outcome step refused",
    "record rescued",
    "record ended",
)
"""What only a run does that finds out by a save that a step was not executed, and goes on in a new job."""


def stages(what: str) -> tuple[str, ...]:
    return next((stages for row, stages, _ in UNDISTURBED if row == what), STORED)


POINTS = tuple(f"{stage} {what}" for what, stages_, _ in UNDISTURBED for stage in stages_)
STEPS_OF = {f"{stage} {what}": steps for what, stages_, steps in UNDISTURBED for stage in stages_}
RECOVERY_POINTS = tuple(f"{stage} {what}" for what in RECOVERING for stage in STORED)

WRITES = tuple(what for what, stages_, _ in UNDISTURBED if stages_ == STORED)
PLACED_POINTS = {f"placed {what}": STEPS_OF[f"after {what}"] for what in WRITES}
"""On a disk that is watched: a record can be seen, and its name is lost with the power."""

MKDIR_POINTS = {
    "mkdir claim epoch": START,
    "mkdir record takeover": START,
    "mkdir write manifest": PUBLISHED,
    "mkdir publish entry": PUBLISHED[:1],
}
"""On a disk that is watched: a folder is there, and is lost with the power together with everything in it."""

# A step that was promised and never written into the socket may still come, so its job is given up.
MAY_STILL_COME = {
    "placed record intent step",
    "after record intent step",
    "before send step",
    "permitted send step",
    "written send step",
}


def first_middle_last(point: str) -> list[int]:
    steps = {**STEPS_OF, **PLACED_POINTS, **MKDIR_POINTS}[point]
    return sorted({steps[0], steps[len(steps) // 2], steps[-1]})


def chains(length: int) -> list[list[tuple[str, int]]]:
    """Every point once, in chains of places that one run passes one behind the other, each in another step."""
    buckets: dict[int, list[str]] = {}
    for number, point in enumerate(POINTS):
        steps = STEPS_OF[point]
        buckets.setdefault(steps[number % len(steps)], []).append(point)
    out = []
    while any(buckets.values()):
        steps = [step for step in sorted(buckets) if buckets[step]][:length]
        chain = [(buckets[step].pop(0), step) for step in steps]
        out.append(chain)
    return out
