"""Listening: a socket of our own, a line that says where, and an end within two seconds of SIGTERM."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import uvicorn

from cortex_training.local.app import build_app
from cortex_training.local.control import ControlServer
from cortex_training.local.http_limits import allow_many_connections, bounded_protocol
from cortex_training.local.request_lines import Answered, RequestLines
from cortex_training.local.service import Service
from cortex_training.local.settings import ServiceSettings
from cortex_training.local.tls import TlsFiles, tls_files
from cortex_training.local.weather_http import hangable_protocol

_log = logging.getLogger("cortex_training.local")
_GRACE_S = 1
_TLS_FOLDER = "tls"

Announce = Callable[[str, "ControlServer | None"], None]
"""Gets the base URL, and the control port if there is one."""


def serve(
    settings: ServiceSettings, *, announce: Announce, keep_data: bool, tell: Callable[[Answered], None] | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, then leave the process with exit code 0.

    `announce` is called once connections are taken, `tell` after each request. Without `keep_data` the data folder is
    deleted at the end.
    Raises OSError when the port is taken.
    """
    # Before anything computes: torch's libraries read it when they are loaded.
    os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    os.environ["HF_HUB_OFFLINE"] = "1"
    allow_many_connections()
    listening = _listen(settings.host, settings.port)
    host, port = listening.getsockname()[:2]
    tls = tls_files(settings.data_dir / _TLS_FOLDER, settings.host) if settings.tls else None
    base_url = f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
    service = Service(settings)
    control = ControlServer(service, settings.control_port) if settings.faults is not None else None
    server = _AnnouncingServer(
        uvicorn.Config(
            build_app(service) if tell is None else RequestLines(build_app(service), tell),
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=_GRACE_S,
            # Idle keep-alive connections of pollers stay open between polls that are six seconds apart.
            timeout_keep_alive=75,
            ssl_keyfile=tls.key if tls else None,
            ssl_certfile=tls.certificate if tls else None,
            http=hangable_protocol() if control else bounded_protocol(),
        ),
        lambda: announce(base_url, control),
        control,
    )
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn raises the signal again when it has shut down; here that must not kill the clean-up below.
        signal.signal(signal_number, lambda *_: setattr(server, "should_exit", True))
    server.run(sockets=[listening])
    if not keep_data:
        shutil.rmtree(settings.data_dir, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread in the middle of a long computation cannot be stopped, and nobody waits for its result any more.
    os._exit(0)


class _AnnouncingServer(uvicorn.Server):
    """A uvicorn server that says when it takes connections, and has the control port beside it."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None], control: ControlServer | None) -> None:
        super().__init__(config)
        self._started = started
        self._control = control
        self._beside: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started and not self.should_exit:
            if self._control is not None:
                self._beside = asyncio.create_task(self._control.run_beside())
            self._started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._control is not None:
            self._control.should_exit = True
        await super().shutdown(sockets=sockets)


def ready_line(base_url: str, settings: ServiceSettings, control: ControlServer | None) -> str:
    """One JSON line for programs that start the service."""
    return json.dumps(
        {
            "event": "ready",
            "base_url": base_url,
            "pid": os.getpid(),
            "endpoint": settings.endpoint,
            "data_dir": str(settings.data_dir),
            "execution_log": str(settings.execution_log_file) if settings.execution_log_file else None,
            "ca_bundle": str(ca_bundle(settings)) if settings.tls else None,
            "control_url": control.url if control else None,
            "control_token": control.token if control else None,
        }
    )


def ca_bundle(settings: ServiceSettings) -> Path:
    """What callers of a service with TLS have to trust."""
    return TlsFiles.in_folder(settings.data_dir / _TLS_FOLDER).ca_bundle


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise OSError(f"cannot listen on {host}:{port}: {error}; choose another --port, or 0 for a free one") from None
    return listening
