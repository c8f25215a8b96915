"""How each framework names its save folders, and how one sees that a save is complete."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from cortex_training.publication.entries import parse_number
from cortex_training.publication.errors import SaveError
from cortex_training.publication.partial_json import CutOff, parse_document
from cortex_training.publication.save import MANIFEST_NAME, SaveManifest
from cortex_training.publication.store import Store

TRAINER_STATE = "trainer_state.json"
DCP_METADATA = ".metadata"

#: The files that call a folder a complete save. A removal takes them first.
MARKERS = (MANIFEST_NAME, TRAINER_STATE, DCP_METADATA)

_HF_FOLDER = re.compile(r"checkpoint-([0-9]+)", re.ASCII)
_DCP_FOLDER = re.compile(r"(?:step-|step_|checkpoint-|global_step)?([0-9]+)", re.ASCII)


@dataclass(frozen=True)
class Framework:
    """`named_step` is the step a folder's name gives, None when the name is no save's.

    `completed_step` looks into a save: its step when it is complete, None while it is being written; it raises
    SaveError for one that will never be complete. A framework without `named_step` takes any folder, and may have
    several of one step: a service keeps a resumable and a weights-only checkpoint side by side.
    """

    name: str
    named_step: Callable[[str], int | None] | None
    completed_step: Callable[[Store, str], int | None]


def _hf_step(store: Store, save: str) -> int | None:
    marker = f"{save}/{TRAINER_STATE}"
    where = store.locate(marker)
    try:
        state = parse_document(store.read(marker))
    except (FileNotFoundError, CutOff):
        return None
    except ValueError as fault:
        raise SaveError(f"{where}: not a trainer state: {fault}") from None
    step = state.get("global_step") if isinstance(state, dict) else None
    if isinstance(step, bool) or not isinstance(step, int):
        raise SaveError(f"{where}: no whole number global_step in it (found {step!r})")
    named = _number(_HF_FOLDER, save)
    if step != named:
        raise SaveError(f"{where}: its global_step is {step}, and its folder says {named}")
    return step


def _dcp_step(store: Store, save: str) -> int | None:
    return _number(_DCP_FOLDER, save) if store.exists(f"{save}/{DCP_METADATA}") else None


def _cortex_step(store: Store, save: str) -> int | None:
    marker = f"{save}/{MANIFEST_NAME}"
    try:
        data = store.read(marker)
    except FileNotFoundError:
        return None
    return SaveManifest.from_bytes(data, store.locate(marker)).global_steps


def _number(grammar: re.Pattern[str], save: str) -> int | None:
    match = grammar.fullmatch(save.rsplit("/", 1)[-1])
    # Leading zeros are fine, a number that no entry can hold is not.
    return parse_number(match[1].lstrip("0") or "0") if match else None


FRAMEWORKS = {
    framework.name: framework
    for framework in (
        Framework("hf", lambda folder: _number(_HF_FOLDER, folder), _hf_step),
        Framework("dcp", lambda folder: _number(_DCP_FOLDER, folder), _dcp_step),
        Framework("cortex", None, _cortex_step),
    )
}
