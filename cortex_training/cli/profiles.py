"""Connection profiles in the Snowflake connector's ``connections.toml``: read, and added to without touching the rest.

The connector reads the same file, so a profile that `login` writes serves every other Snowflake tool as well.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cortex_training.auth import connector_is_installed
from cortex_training.errors import ConfigurationError

_FILE = "connections.toml"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-]+")
_TOKEN_AUTHENTICATOR = "programmatic_access_token"


def folders(environment: Mapping[str, str]) -> list[Path]:
    """Where the connector looks for its files, first things first."""
    named = [environment.get("SNOWFLAKE_HOME"), "~/.snowflake", "~/.config/snowflake"]
    return [Path(folder).expanduser() for folder in named if folder]


def profiles_path(environment: Mapping[str, str]) -> Path:
    """The file that the connector reads, or would read once it is there."""
    candidates = folders(environment)[:1] if environment.get("SNOWFLAKE_HOME") else folders(environment)
    return (next((folder for folder in candidates if folder.is_dir()), candidates[0])) / _FILE


def read_profiles(path: Path) -> dict[str, dict[str, Any]]:
    """Profiles by name; none without a file. Raises `ConfigurationError` for a file that is not TOML."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        # A decoding error tells the place, not the content: the file holds tokens.
        raise ConfigurationError(f"{path}: cannot be read: {error}") from None
    return {name: fields for name, fields in content.items() if isinstance(fields, dict)}


def write_profile(path: Path, name: str, fields: Mapping[str, str | int]) -> None:
    """Add or replace one profile; other profiles and their comments stay as they are. Readable by its owner alone."""
    if not _PLAIN_NAME.fullmatch(name):
        raise ConfigurationError.of("connection", name, "must hold letters, digits, '-' and '_' only")
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    changed = _with_section(text, name, fields)
    try:
        unharmed = tomllib.loads(changed) == {**tomllib.loads(text), name: dict(fields)}
    except tomllib.TOMLDecodeError:
        unharmed = False
    if not unharmed:
        raise ConfigurationError(f"{path}: is written in a way that this program cannot add to; add [{name}] by hand")
    write_privately(path, changed)


def _with_section(text: str, name: str, fields: Mapping[str, str | int]) -> str:
    lines = text.splitlines()
    section = [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in fields.items())]
    header = re.compile(rf"""\[\s*["']?{re.escape(name)}["']?\s*\]\s*(#.*)?""")
    begin = next((at for at, line in enumerate(lines) if header.fullmatch(line.strip())), None)
    if begin is None:
        return "\n".join([*lines, *([""] if lines and lines[-1].strip() else []), *section]) + "\n"
    end = next((at for at in range(begin + 1, len(lines)) if lines[at].lstrip().startswith("[")), len(lines))
    while lines[end - 1].strip() == "" or lines[end - 1].lstrip().startswith("#"):
        end -= 1  # what stands right above the next profile belongs to that one
    comments = [line for line in lines[begin + 1 : end] if line.lstrip().startswith("#")]
    return "\n".join([*lines[:begin], section[0], *comments, *section[1:], *lines[end:]]) + "\n"


def _toml(value: str | int) -> str:
    # A JSON string is a TOML string, except that TOML knows no surrogate pairs.
    return json.dumps(value, ensure_ascii=False)


def write_privately(path: Path, text: str) -> None:
    """Write a file that its owner alone can read, in one step: every later command reads it."""
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def token_profile(name: str | None, environment: Mapping[str, str]) -> dict[str, str] | None:
    """Address, token, database and schema of a profile that holds a token, where the connector is not installed.

    A token needs no session, so such a profile works without the connector. None for any other profile.
    """
    if connector_is_installed():
        return None
    wanted = name or environment.get("SNOWFLAKE_DEFAULT_CONNECTION_NAME") or "default"
    fields = read_profiles(profiles_path(environment)).get(wanted, {})
    token, host = fields.get("token"), fields.get("host")
    if str(fields.get("authenticator", "")).lower() != _TOKEN_AUTHENTICATOR or not token or not host:
        return None
    found = {"host": address_of(fields), "pat": str(token)}
    return {**found, **{key: str(fields[key]) for key in ("database", "schema") if fields.get(key)}}


def address_of(fields: Mapping[str, Any]) -> str:
    """The host of a profile, or its URL where scheme or port are not the usual ones."""
    scheme, host, port = fields.get("protocol", "https"), str(fields["host"]), fields.get("port")
    usual = scheme == "https" and port in (None, 443)
    return host if usual else f"{scheme}://{host}:{port or (80 if scheme == 'http' else 443)}"


def profile_fields(address: str, user: str, token: str, database: str, schema: str) -> dict[str, str | int]:
    """A profile with a token. `address` is a host name or a URL."""
    parts = urlsplit(address if "://" in address else f"https://{address}")
    host = parts.hostname or ""
    fields: dict[str, str | int] = {"account": host.removesuffix(".snowflakecomputing.com"), "host": host}
    if parts.port is not None:
        fields["port"] = parts.port
    if parts.scheme != "https":
        fields["protocol"] = parts.scheme
    return {
        **fields,
        "user": user,
        "authenticator": _TOKEN_AUTHENTICATOR,
        "token": token,
        "database": database,
        "schema": schema,
    }
