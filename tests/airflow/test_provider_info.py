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


@pytest.mark.parametrize(("kind", "base"), [("operators", "Operator"), ("sensors", "Sensor"), ("triggers", "Trigger")])
def test_every_module_with_a_public_class_is_listed(kind: str, base: str) -> None:
    import airflow_cortex_training

    listed = {module for group in INFO[kind] for module in group["python-modules"]}
    for path in (Path(airflow_cortex_training.__file__).parent / kind).glob("*.py"):
        name = f"airflow_cortex_training.{kind}.{path.stem}"
        module = importlib.import_module(name)
        own = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == name]
        public = [c for c in own if c.__name__.startswith("CortexTraining") and c.__name__.endswith(base)]
        # Classes to derive from are not for DAGs.
        expected = bool(public) and path.stem not in ("base", "request_leg")
        assert (name in listed) == expected, name


def test_links_and_decorators_exist() -> None:
    for path in [*INFO["extra-links"], *(entry["class-name"] for entry in INFO["task-decorators"])]:
        module, _, name = path.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))


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


def test_the_form_asks_for_the_port_that_airflows_test_button_compares() -> None:
    # It sends 0 for a port that is not stored, and refuses to fill in the stored token for "another" connection.
    behaviour = INFO["connection-types"][0]["ui-field-behaviour"]
    assert "port" not in behaviour["hidden-fields"]


def test_placeholders_fit_into_their_fields() -> None:
    placeholders = INFO["connection-types"][0]["ui-field-behaviour"]["placeholders"]
    assert max(map(len, placeholders.values())) <= 65
