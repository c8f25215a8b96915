"""Kill a piece of work, with a signal that nothing can catch, at each of its calls of the operating system in turn."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# One interpreter that has no threads forks a process for each point: a fresh one for each would take most of the time.
_DRIVER = """
import json, os, signal, sys
{definition}
def counted(call, point):
    def wrapped(*arguments, **options):
        global count
        if count == point:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
        return call(*arguments, **options)
    return wrapped
for point, root in enumerate(sys.argv[2:]):
    child = os.fork()
    if child == 0:
        count = 0
        for name in json.loads(sys.argv[1]):
            setattr(os, name, counted(getattr(os, name), point))
        work(root)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
    if status == 0:
        break
"""


def killed_at_each_call(definition: str, calls: Sequence[str], roots: Sequence[Path]) -> list[int]:
    """Run ``work(root)``, which `definition` defines, killed at call 0 of `calls` (names in ``os``), then at call 1, …

    Each time with the next of `roots`, until it ends by itself. The exit codes: -9 for each that was killed, 0 last.
    """
    command = [sys.executable, "-c", _DRIVER.format(definition=definition), json.dumps(list(calls)), *map(str, roots)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    codes = [int(line) for line in result.stdout.splitlines() if line.lstrip("-").isdigit()]
    assert codes[-1] == 0, f"{len(roots)} roots are not enough: {codes}"
    return codes
