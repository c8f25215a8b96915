"""What Airflow reads of the distribution before it runs any of it."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from pathlib import Path

import airflow
import jsonschema
import pytest

from airflow_cortex_training.get_provider_info import PACKAGE_NAME, get_provider_info

INFO = get_provider_info()


def test_is_valid_against_the_installed_schema() -> None:
    schema = json.loads((Path(airflow.__file__).parent / "provider_info.schema.json").read_text())
    jsonschema.validate(INFO, schema)


def test_names_the_distribution_that_carries_it() -> None:
    # Airflow raises for the whole installation, not for this provider, when the two differ.
    entry_points = importlib.metadata.entry_points(group="apache_airflow_provider")
    ours = [e for e in entry_points if e.value.startswith("airflow_cortex_training.")]
    assert {e.dist.metadata["Name"] for e in ours if e.dist} == {PACKAGE_NAME}
    assert ours[0].load()() == INFO


@pytest.mark.parametrize("kind", ["hooks", "operators", "sensors", "triggers"])
def test_lists_modules_that_exist(kind: str) -> None:
    for group in INFO[kind]:
        for module in group["python-modules"]:
            importlib.import_module(module)


def test_airflow_discovers_the_connection_type_with_its_form() -> None:
    from airflow.providers_manager import ProvidersManager

    manager = ProvidersManager()
    assert PACKAGE_NAME in manager.providers
    hook = manager.hooks["cortex_training"]
    assert hook is not None
    assert hook.connection_testable
    fields = INFO["connection-types"][0]["conn-fields"]
    assert set(fields) == {"database", "endpoint", "hardware", "verify", "ca_bundle", "snowflake_conn_id", "proxy"}
    assert fields["proxy"]["schema"]["format"] == "password"
