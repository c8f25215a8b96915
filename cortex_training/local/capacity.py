"""Simulated GPUs: how many of each hardware type exist, and who holds them."""

from __future__ import annotations

from typing import Any

HARDWARE = ("H200", "B200", "B300")
DEFAULT_HARDWARE = "H200"


class Capacity:
    """GPUs of each hardware type, `total` of each at first."""

    def __init__(self, total: int) -> None:
        self._total = dict.fromkeys(HARDWARE, total)
        self._held: dict[str, dict[str, int]] = {hardware: {} for hardware in HARDWARE}

    def free(self, hardware: str) -> int:
        """Less than 0 when more are held than there still are."""
        return self._total[hardware] - sum(self._held[hardware].values())

    def total(self, hardware: str) -> int:
        return self._total[hardware]

    def resize(self, hardware: str, total: int) -> None:
        self._total[hardware] = total

    def hold(self, job_id: str, hardware: str, gpus: int) -> bool:
        """Give `gpus` of them to the job. False, and nothing given, when there are not enough."""
        if gpus > self.free(hardware):
            return False
        self._held[hardware][job_id] = gpus
        return True

    def release(self, job_id: str) -> None:
        """Take back what the job holds, if it holds anything."""
        for held in self._held.values():
            held.pop(job_id, None)

    def report(self, hardware: str | None, waiting: dict[str, int]) -> dict[str, Any]:
        """The body of ``GET /capacity``; `waiting` is the number of GPUs that pending jobs want, by hardware."""
        chosen = [hardware] if hardware else list(HARDWARE)
        total = sum(self._total[one] for one in chosen)
        in_use = sum(self._total[one] - self.free(one) for one in chosen)
        return {
            "has_reservation": total > 0,
            "max_total_gpus": total,
            "reserved_gpus": total,
            "in_use_gpus": in_use,
            "pending_gpus": sum(waiting.get(one, 0) for one in chosen),
            "available_gpus": max(0, total - in_use),
        }
