"""Flow files are imported by servers, workers and runners: importing the tasks costs what Prefect costs, no more."""

from __future__ import annotations

import subprocess
import sys

HEAVY = (
    "torch",
    "transformers",
    "peft",
    "tokenizers",
    "pyarrow",
    "boto3",
    "sqlalchemy",
    "snowflake.connector",
    "duckdb",
)

PROGRAM = """
import sys
import prefect
from prefect import flow, task
import prefect.artifacts, prefect.blocks.abstract, prefect.cache_policies, prefect.client.orchestration, prefect.runtime
before = set(sys.modules)
import prefect_cortex_training
print("\\n".join(sorted(set(sys.modules) - before)))
"""


def test_importing_the_package_imports_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    added = done.stdout.split()
    assert "prefect_cortex_training.tasks.training" in added
    assert not [name for name in added if name in HEAVY]
    assert not [name for name in added if name.startswith("airflow")]
    assert not [name for name in added if name.startswith("prefect._internal")]


def test_the_public_client_beside_ours_is_refused_with_the_fix(tmp_path: object) -> None:
    from pathlib import Path

    other = Path(str(tmp_path)) / "cortex_training-0.0.3.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: cortex-training\nVersion: 0.0.3\n")
    program = f"import sys; sys.path.append({str(other.parent)!r}); import prefect_cortex_training"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "pip uninstall -y cortex-training cortex-training-client" in done.stderr
