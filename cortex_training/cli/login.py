"""`login`: remember how to connect, for the commands that follow.

A configuration file or an existing profile is remembered as it is. Without either, a profile with a token is made from
what a person types, or from flags and standard input, and is remembered only after the service has accepted it.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cortex_training.cli import profiles
from cortex_training.cli.connection import direct, login_path, read_config, resolve
from cortex_training.cli.documents import print_document
from cortex_training.errors import ConfigurationError

_PROFILE = "cortex-training"
_ACCOUNTS = ".snowflakecomputing.com"
_LOCATOR = re.compile(r"\.([a-z]+-[a-z]+-\d|aws|azure|gcp)$")
"""How an account locator ends: in its region, or the region's cloud. No host name does."""


def add_parsers(subparsers: Any) -> None:
    login = subparsers.add_parser(
        "login",
        help="remember a connection for the commands that follow",
        description="With FILE or an existing profile: remember it. Otherwise: ask for an account and a token, check "
        "them, write a connection profile, and remember that.",
    )
    login.add_argument("file", nargs="?", metavar="FILE", help="configuration file")
    login.add_argument("--check", action="store_true", help="ask the service before remembering a file or profile")
    # Also before the command; a default here would overwrite what was given there.
    for flag, metavar, text in (
        ("--config", "FILE", "as FILE"),
        ("--connection", "NAME", f"the profile to remember, or to write (default: {_PROFILE})"),
        ("--host", "HOST", "account host, account identifier, or URL"),
        ("--database", "NAME", "database of the jobs"),
        ("--schema", "NAME", "schema of the jobs (default: PUBLIC)"),
    ):
        login.add_argument(flag, metavar=metavar, help=text, default=argparse.SUPPRESS)
    login.add_argument("--user", metavar="NAME", help="whose token it is")
    login.add_argument("--pat-stdin", action="store_true", help="read the token from standard input, ask for nothing")
    login.add_argument("--force", action="store_true", help="replace a profile of this name without asking")
    login.add_argument("--reset", action="store_true", help="forget what was remembered; profiles and files stay")
    login.set_defaults(handler=run_login)


def run_login(options: argparse.Namespace) -> int:
    if options.reset:
        login_path(os.environ).unlink(missing_ok=True)
        print_document(options, {"logged_in": False})
        return 0
    files = [name for name in (options.file, options.config) if name]
    makes_profile = bool(options.host or options.user or options.pat_stdin or options.force)
    if len(files) + bool(options.connection) > 1 or (files and makes_profile):
        raise ConfigurationError("login: give exactly one of FILE, --config FILE, or the parts of a profile")
    if files:
        options.config = files[0]
        return _remember_existing(options, {"config_path": str(Path(files[0]).resolve())})
    if options.connection and not makes_profile:
        return _remember_existing(options, {"connection": options.connection})
    return _make_profile(options)


def _remember_existing(options: argparse.Namespace, remembered: dict[str, Any]) -> int:
    connection = resolve(options, {})  # what the file or profile says must be enough without the environment
    if options.config:
        read_config(options.config)
    if options.check:
        with connection.client() as client:
            client.list_jobs()
    _remember(remembered)
    print_document(options, {**remembered, "logged_in": True})
    return 0


def _remember(content: dict[str, Any]) -> None:
    profiles.write_privately(login_path(os.environ), json.dumps(content))


def _make_profile(options: argparse.Namespace) -> int:
    name = options.connection or _PROFILE
    path = profiles.profiles_path(os.environ)
    existing = profiles.read_profiles(path).get(name)
    if options.pat_stdin:
        fields = _from_flags(options, existing, name)
    else:
        if not sys.stdin.isatty():
            raise ConfigurationError(
                "login: standard input is not a terminal; give FILE, --config FILE or --connection NAME, or --host, "
                "--user, --database and --pat-stdin with the token on standard input"
            )
        if existing is not None and not options.force and not _may_replace(name, existing):
            _remember({"connection": name})
            print_document(options, {"logged_in": True, "connection": name, "profile_created": False})
            return 0
        fields = _from_prompts(options, existing or {})
    _check(options, fields)
    profiles.write_profile(path, name, fields)
    _remember({"connection": name})
    document = {
        "logged_in": True,
        "connection": name,
        "connections_file": str(path),
        "host": fields["host"],
        "profile_created": existing is None,
        "source": "stdin" if options.pat_stdin else "prompts",
        "verified": True,
    }
    print_document(options, document)
    return 0


def _from_flags(options: argparse.Namespace, existing: dict[str, Any] | None, name: str) -> dict[str, str | int]:
    if existing is not None and not options.force:
        raise ConfigurationError(f"login: the profile {name!r} exists; give --force to replace it, or another name")
    missing = [f"--{flag}" for flag in ("host", "user", "database") if not getattr(options, flag)]
    if missing:
        raise ConfigurationError(f"login: --pat-stdin asks for nothing, so give {', '.join(missing)} too")
    token = _checked_token(sys.stdin.readline())
    return profiles.profile_fields(
        account_address(options.host), options.user, token, options.database, options.schema or "PUBLIC"
    )


def _may_replace(name: str, existing: dict[str, Any]) -> bool:
    shown = ", ".join(f"{key} {existing[key]}" for key in ("host", "user", "database", "schema") if existing.get(key))
    return _asked(f"The profile {name!r} exists ({shown}). Replace it? [y/N] ", "n").lower() in ("y", "yes")


def _from_prompts(options: argparse.Namespace, known: dict[str, Any]) -> dict[str, str | int]:
    """What a person types; Enter takes the value in brackets. The token is neither shown nor taken from a profile."""
    address = account_address(options.host or _asked_for("Account host or identifier", str(known.get("host", ""))))
    user = options.user or _asked_for("User", str(known.get("user", "")))
    token = _checked_token(getpass.getpass("Programmatic access token (not shown): ", stream=sys.stderr))
    database = options.database or _asked_for("Database", str(known.get("database", "")))
    schema = options.schema or _asked_for("Schema", str(known.get("schema", "PUBLIC")))
    return profiles.profile_fields(address, user, token, database, schema)


def _asked_for(question: str, known: str) -> str:
    answer = _asked(f"{question} [{known}]: " if known else f"{question}: ", known)
    if not answer:
        raise ConfigurationError(f"login: {question.lower()} is needed")
    return answer


def _asked(prompt: str, default: str) -> str:
    # Not input(): it writes its prompt to standard output, which holds the JSON document alone.
    print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise ConfigurationError("login: standard input ended before everything was said; nothing was remembered")
    return line.strip() or default


def _checked_token(text: str) -> str:
    token = text.strip()
    if not token or not token.isascii() or any(character.isspace() for character in token):
        raise ConfigurationError("pat: must be one token without spaces; was it copied whole?", field="pat")
    return token


def account_address(text: str) -> str:
    """The host of an account from what people have at hand, or a URL with scheme and port as it is.

    Accepts a host, an account identifier (``myorg-myaccount``, or a locator with its region), or the address of the
    account's web page. Underscores become hyphens: a host name has none, and the service answers under both.
    """
    stripped = text.strip().rstrip("/")
    parts = urlsplit(stripped if "://" in stripped else f"https://{stripped}")
    host = (parts.hostname or "").lower()
    if host == "app.snowflake.com":
        # https://app.snowflake.com/<organization>/<account>/…
        names = [part for part in parts.path.split("/") if part]
        if len(names) < 2:
            raise ConfigurationError.of(
                "host", text, "names no account; copy it from https://app.snowflake.com/ORG/ACCOUNT"
            )
        host = "-".join(names[:2]).lower() + _ACCOUNTS
    elif parts.path or parts.query or parts.fragment or "@" in parts.netloc:
        raise ConfigurationError.of("host", text, "must be a host, an account identifier, or a URL without a path")
    elif "://" in stripped and not host.endswith(_ACCOUNTS):
        return stripped
    elif "." not in host or _LOCATOR.search(host):
        host += _ACCOUNTS
    host = host.replace("_", "-")
    if not re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", host):
        raise ConfigurationError.of("host", text, "is not a host name")
    return host


def _check(options: argparse.Namespace, fields: dict[str, str | int]) -> None:
    """Ask the service with the new token. Raises what the client raises; nothing was written or remembered yet."""
    transport = {name: getattr(options, name) for name in ("endpoint", "ca_bundle", "proxy", "no_verify_ssl")}
    given = {name: value for name, value in transport.items() if value is not None}
    where = {"host": profiles.address_of(fields), "pat": fields["token"]}
    with direct({**given, **where, "database": fields["database"], "schema": fields["schema"]}).client() as client:
        client.get_capacity()
