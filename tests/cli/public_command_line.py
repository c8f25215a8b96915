"""Prints, as JSON, the command line of the public client: for each command, its arguments.

Runs in the public client's own Python. The global flags are those of the command "".
"""

import argparse
import json
from typing import Any

from cortex_training._cli import build_parser


def arguments(parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    return [
        {
            "flags": action.option_strings,
            "positional": not action.option_strings,
            "choices": list(action.choices) if isinstance(action.choices, list | tuple) else None,
            "takes": action.nargs != 0,
            "number": action.type in (int, float),
        }
        for action in parser._actions
        if not isinstance(action, argparse._SubParsersAction | argparse._HelpAction)
    ]


def main() -> None:
    parser = build_parser()
    described = {"": arguments(parser)}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            described |= {name: arguments(command) for name, command in action.choices.items()}
    print(json.dumps(described))


main()
