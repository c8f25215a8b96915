"""moto as a process: ``python s3_process.py PORT``. Conditional puts are made one at a time.

By itself moto looks whether there is a key, and puts it a moment later: of eight writers two may win, about once in
sixty rounds of a busy server. A store that honours conditional writes lets one win, so here the two are one.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple

Application = Callable[[dict[str, Any], Any], Iterable[bytes]]


def deciding_once(application: Application) -> Application:
    """An application in which a conditional request sees no other one half-done."""
    one_at_a_time = threading.Lock()

    def serve(environment: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if "HTTP_IF_NONE_MATCH" not in environment:
            return application(environment, start_response)
        with one_at_a_time:
            return list(application(environment, start_response))

    return serve


if __name__ == "__main__":
    port = int(sys.argv[1])
    os.environ["MOTO_PORT"] = str(port)
    server = deciding_once(DomainDispatcherApplication(create_backend_app))
    run_simple("127.0.0.1", port, server, threaded=True, request_handler=MotoRequestHandler)
