"""`python -m cortex_training.local serve …`: the service's commands on their own."""

from __future__ import annotations

import argparse
import sys

from cortex_training.cli.serve import add_parsers


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cortex_training.local")
    add_parsers(parser.add_subparsers(dest="command", required=True))
    options = parser.parse_args(arguments)
    exit_code: int = options.handler(options)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
