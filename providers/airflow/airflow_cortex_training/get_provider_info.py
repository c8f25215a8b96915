"""What this distribution brings to Airflow. Read at every start of every component, so it imports nothing."""

from __future__ import annotations

from typing import Any

PACKAGE_NAME = "airflow-provider-cortex-training"
"""The distribution's name. Airflow refuses to load *any* provider when this differs from the installed metadata."""

_INTEGRATION = "Snowflake Cortex Training"
_PACKAGE = "airflow_cortex_training"


def get_provider_info() -> dict[str, Any]:
    return {
        "package-name": PACKAGE_NAME,
        "name": "Cortex Training",
        "description": "Fine-tuning on Snowflake Cortex Training: durable jobs, training runs and checkpoints.",
        "integrations": [{"integration-name": _INTEGRATION, "tags": ["service"]}],
        "hooks": [_modules("hooks.cortex_training")],
        "operators": [
            _modules(
                "operators.jobs",
                "operators.training",
                "operators.train",
                "operators.datasets",
                "operators.checkpoints",
                "operators.sampling",
                "operators.router_replay",
                "operators.publication",
                "operators.upkeep",
            )
        ],
        "sensors": [_modules("sensors.jobs", "sensors.requests", "sensors.capacity", "sensors.publication")],
        "triggers": [
            _modules(
                "triggers.jobs",
                "triggers.job_ends",
                "triggers.drains",
                "triggers.requests",
                "triggers.train",
                "triggers.capacity",
                "triggers.publication",
                "triggers.publication_events",
            )
        ],
        "extra-links": [
            f"{_PACKAGE}.links.{name}"
            for name in ("CortexTrainingJobLink", "CortexTrainingRunLink", "CortexTrainingCheckpointLink")
        ],
        "task-decorators": [
            {
                "name": "cortex_training_dataset",
                "class-name": f"{_PACKAGE}.decorators.cortex_training_dataset_task",
            }
        ],
        "asset-uris": [
            {
                "schemes": ["cortex-training"],
                "handler": f"{_PACKAGE}.assets.sanitize_uri",
                "factory": f"{_PACKAGE}.assets.create_asset",
                "to_openlineage_converter": f"{_PACKAGE}.assets.convert_asset_to_openlineage",
            }
        ],
        "connection-types": [_connection_type()],
    }


def _modules(*names: str) -> dict[str, Any]:
    return {"integration-name": _INTEGRATION, "python-modules": [f"{_PACKAGE}.{name}" for name in names]}


def _connection_type() -> dict[str, Any]:
    return {
        "connection-type": "cortex_training",
        "hook-class-name": f"{_PACKAGE}.hooks.cortex_training.CortexTrainingHook",
        "hook-name": "Cortex Training",
        "ui-field-behaviour": {
            # Not the port: Airflow's Test button takes a stored connection without one for another connection.
            "hidden-fields": ["login", "extra"],
            "relabeling": {
                "host": "Account host or URL",
                "schema": "Schema",
                "password": "Programmatic access token",
            },
            "placeholders": {
                "host": "myorg-myaccount.snowflakecomputing.com or http://127.0.0.1:8080",
                "schema": "PUBLIC",
                "port": "443",
                "password": "empty with a Snowflake connection below",
            },
        },
        "conn-fields": {
            "database": _field("Database", "Database whose Cortex Training endpoint is used."),
            "endpoint": _field("Endpoint", "Name of the endpoint below the schema.", default="cortex-training"),
            "hardware": _field(
                "Hardware",
                "Used for jobs that name none. Empty leaves the choice to the service.",
                enum=["", "H200", "B200", "B300"],
            ),
            "verify": {
                "label": "Verify TLS",
                "description": "Switch off only for a local service with a certificate of its own.",
                "schema": {"type": ["boolean", "null"], "default": True},
            },
            "ca_bundle": _field(
                "CA bundle", "PEM file, present on workers and triggerers, to trust instead of the system's."
            ),
            "snowflake_conn_id": _field(
                "Snowflake connection",
                "Id of a Snowflake connection whose login (programmatic access token, OAuth or key pair) is reused. "
                "Leave the token empty then; account, database and schema are taken from it unless given here.",
            ),
            "proxy": {
                "label": "Proxy",
                "description": "http://host:port. Empty uses the proxy of the environment.",
                "schema": {"type": ["string", "null"], "format": "password"},
            },
        },
    }


def _field(label: str, description: str, **schema: Any) -> dict[str, Any]:
    return {"label": label, "description": description, "schema": {"type": ["string", "null"], **schema}}
