"""What a local service is told when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cortex_training.local.assumptions import Assumptions
from cortex_training.local.simulation import Simulation
from cortex_training.local.weather_rules import Faults
from cortex_training.wire import Framework

MIB = 1024 * 1024


@dataclass(frozen=True)
class ServiceSettings:
    """Options of `cortex-training serve`; sizes are bytes, times seconds."""

    data_dir: Path
    host: str = "127.0.0.1"
    port: int = 0
    """0 lets the system choose a free one."""
    endpoint: str = "cortex-training"
    token: str | None = field(default=None, repr=False)
    """When given, the only bearer or Snowflake token that is let in."""
    gpus_per_hardware: int = 16
    """Simulated GPUs of each hardware type."""
    threads: int = 1
    """torch's threads. Two threads on two busy cores are slower than one."""
    models: Mapping[str, Path] = field(default_factory=dict)
    """Folders of models by the id that jobs name them with."""
    strict_models: bool = False
    """Refuse ids of the service's model table instead of running them on the tiny stand-in."""
    execution_log: Path | None = None
    execution_log_weights: bool = False
    """Whether entries of step, save and load hold a hash of the weights that train, which takes a pass over them."""
    placing_s: float = 0.05
    """How long a job with its GPUs assigned stays `placing`."""
    timeout_scale: float = 1.0
    """Multiplies idle and pending timeouts, so that a test need not wait for the service's minimum of 300 s."""
    export_link_s: float = 3600.0
    sample_s: float = 5.0
    """Between two samples of a GPU's metrics."""
    seal_s: float = 30.0
    """At most so long, console output and metrics wait until they are sealed into a chunk of their artifact."""
    tls: bool = False
    """Speak https, with a certificate made on the spot."""
    snowflake: bool = False
    """Also answer the Snowflake connector: logins, SQL, experiment artifacts."""
    session_s: float = 3600.0
    """How long a Snowflake session's token lives."""
    resume_jobs: bool = False
    """Let jobs that a killed service left behind go on from what is on disk, instead of showing them as failed."""
    max_body_bytes: int = 65 * MIB
    """One request's body: 60 MiB of chunk, and slack."""
    max_frame_bytes: int = 1024 * MIB
    """One logical frame, put together from its chunks."""
    max_partial_bytes: int = 2048 * MIB
    """Chunks that wait for the rest of their groups, over all jobs; the oldest groups are forgotten first."""
    result_chunk_bytes: int = MIB
    """Larger results are delivered in chunks of this size to callers that take chunks."""
    assumptions: Assumptions = field(default_factory=Assumptions)
    faults: Faults | None = None
    """Bad weather, and with it the control port; None: neither."""
    control_port: int = 0
    simulation: Simulation | None = None
    """Operations take the time that this says, and there is no model."""

    @property
    def execution_log_file(self) -> Path | None:
        """Where the execution log is. The control port tells from it, so that with one there always is a file."""
        if self.execution_log is None and self.faults is not None:
            return self.data_dir / "executions.jsonl"
        return self.execution_log

    @property
    def framework(self) -> Framework:
        """What frames are decoded to. Where there are jobs that train, torch is loaded."""
        return "torch" if self.simulation is None else "numpy"
