"""What `serve` says to a person: where it listens, what to paste where, and a line for each request."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cortex_training.local.control import ControlServer
    from cortex_training.local.request_lines import Answered
    from cortex_training.local.settings import ServiceSettings

_DATABASE, _SCHEMA = "LOCAL", "PUBLIC"
_OF_STATUS = {2: "green", 3: "yellow", 4: "yellow", 5: "red"}


def greeting(base_url: str, settings: ServiceSettings, control: ControlServer | None) -> str:
    """Several lines. A token that the service was started with is not shown."""
    parts = {
        "status page": f"{base_url}/",
        "client": f"CortexTrainingClient({base_url!r}, database={_DATABASE!r}, schema={_SCHEMA!r})",
        "cli": f"export CORTEX_TRAINING_BASE_URL={base_url} CORTEX_TRAINING_DATABASE={_DATABASE}"
        f" CORTEX_TRAINING_SCHEMA={_SCHEMA}",
        "airflow": f"export AIRFLOW_CONN_CORTEX_TRAINING_DEFAULT={_airflow_connection(base_url, settings)}",
        "prefect": _prefect_block(base_url, settings),
        **_for_https(settings),
        **_for_snowflake(base_url, settings),
        **({"control": f"{control.url} with the bearer token {control.token}"} if control else {}),
    }
    width = max(map(len, parts))
    lines = [f"  {name:<{width}}  {_indented(text, width + 4)}" for name, text in parts.items()]
    return "\n".join(
        [
            f"The local Cortex Training service listens on {base_url}",
            *lines,
            f"It accepts {'the token it was started with' if settings.token else 'any token'}. Ctrl-C ends it.",
        ]
    )


def request_printer() -> Callable[[Answered], None] | None:
    """What prints a line for each request; None where nobody watches. In colour when rich is installed."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
        from rich.text import Text
    except ModuleNotFoundError:
        return lambda answered: print("  ".join(_cells(answered)), flush=True)
    console = Console(highlight=False, soft_wrap=True)

    def show(answered: Answered) -> None:
        at, method, status, took, path = _cells(answered)
        # Polls are most of what there is, and least of what one looks for.
        quiet = "dim" if method.strip() == "GET" and answered.status < 400 else ""
        console.print(
            Text.assemble(
                (at, "dim"), "  ", (method, quiet or "bold"), "  ",
                (status, _OF_STATUS.get(answered.status // 100, "")), "  ", (took, "dim"), "  ", (path, quiet),
            )
        )  # fmt: skip

    return show


def _cells(answered: Answered) -> tuple[str, str, str, str, str]:
    took = f"{1000 * answered.seconds:7.1f} ms"
    return time.strftime("%H:%M:%S"), f"{answered.method:<6}", str(answered.status), took, answered.path


def _airflow_connection(base_url: str, settings: ServiceSettings) -> str:
    extra: dict[str, object] = {"database": _DATABASE}
    if settings.endpoint != "cortex-training":
        extra["endpoint"] = settings.endpoint
    if settings.tls:
        extra["ca_bundle"] = _ca_bundle(settings)
    fields = {"conn_type": "cortex_training", "host": base_url, "schema": _SCHEMA, "password": _pat(settings)}
    return shlex.quote(json.dumps({**fields, "extra": extra}))


def _prefect_block(base_url: str, settings: ServiceSettings) -> str:
    endpoint = "" if settings.endpoint == "cortex-training" else f", endpoint={settings.endpoint!r}"
    bundle = f", ca_bundle={_ca_bundle(settings)!r}" if settings.tls else ""
    return (
        f"CortexTrainingCredentials(host={base_url!r}, database={_DATABASE!r}, schema={_SCHEMA!r}{endpoint}{bundle},"
        f" pat={_pat(settings)!r}).save('local')"
    )


def _pat(settings: ServiceSettings) -> str:
    # Clients refuse what no token is, so what stands for any is written as one.
    return "the token it was started with" if settings.token else "any-token"


def _for_https(settings: ServiceSettings) -> dict[str, str]:
    return {"trust": f"export REQUESTS_CA_BUNDLE={_ca_bundle(settings)}"} if settings.tls else {}


def _ca_bundle(settings: ServiceSettings) -> str:
    from cortex_training.local.server import ca_bundle

    return str(ca_bundle(settings))


def _for_snowflake(base_url: str, settings: ServiceSettings) -> dict[str, str]:
    from cortex_training.local.connection_profile import connections_toml

    if not settings.snowflake:
        return {}
    told = "CortexTrainingClient.from_connection_name('local'), with this in ~/.snowflake/connections.toml (mode 0600):"
    return {"profile": f"{told}\n{connections_toml(base_url, settings)}"}


def _indented(text: str, by: int) -> str:
    return text.rstrip().replace("\n", "\n" + " " * by)
