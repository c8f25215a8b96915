"""torch's random numbers, one stream a sub-job.

torch has one generator a process, and every sub-job's thread would draw from it: with two jobs at work, what one of
them draws would depend on the other. Code that draws (initialisation, dropout) therefore runs with its own stream
swapped in, one at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_one_at_a_time = threading.Lock()


class RandomStream:
    """A stream of torch random numbers that no other sub-job disturbs; `state` is a uint8 tensor and can be saved."""

    def __init__(self, seed: int) -> None:
        self.state: torch.Tensor = torch.Generator().manual_seed(seed % 2**63).get_state()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from this stream inside the block, whatever draws."""
        with _one_at_a_time:
            others = torch.get_rng_state()
            torch.set_rng_state(self.state)
            if torch.cuda.is_available():
                # What a GPU draws follows from this stream too, and so from what a checkpoint remembers.
                torch.cuda.manual_seed(int(torch.randint(2**62, ())))
            try:
                yield
            finally:
                self.state = torch.get_rng_state()
                torch.set_rng_state(others)
