"""Build ``cortex-publish`` as one file for compute nodes: ``python -m cortex_training.publication.onefile OUT.pyz``.

The file holds the command and the pure-Python packages it needs, as they are installed here, and runs with any
Python 3.11 or newer without an environment of its own.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import zipapp
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import cortex_training

# Directories and Vaults need requests; buckets botocore; vault: sources hvac. Each of the latter two may be missing.
_NEEDED = ("requests", "urllib3", "certifi", "idna", "charset-normalizer")
_OPTIONAL = ("botocore", "jmespath", "python-dateutil", "six", "hvac")

# Of the hundreds of services botocore describes, one is used.
_OTHER_SERVICES = re.compile(r"botocore/data/(?!s3/)[^/]+/.*")
_COMMAND_NEEDS = ("__init__.py", "errors.py", "paths.py", "proxies.py", "publication/*.py")

# botocore reads its data from files, which a zip has none of: for a bucket everything is unpacked first.
_MAIN = """\
import sys


def run():
    from cortex_training.publication.command import main

    return main()


if any("s3://" in argument for argument in sys.argv[1:]):
    import tempfile
    import zipfile

    with tempfile.TemporaryDirectory(prefix="cortex-publish-") as folder:
        with zipfile.ZipFile(sys.path[0]) as archive:
            archive.extractall(folder)
        sys.path[0] = folder
        status = run()
else:
    status = run()
sys.exit(status)
"""


def build(target: Path) -> None:
    """Write the archive to `target`. Raises PackageNotFoundError for a package that is needed and not installed."""
    with tempfile.TemporaryDirectory() as staging:
        for name, source in _files():
            place = Path(staging, name)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(source.read_bytes())
        Path(staging, "__main__.py").write_text(_MAIN)
        # Zips remember times; with these gone the same sources make the same file.
        for path in sorted(Path(staging).rglob("*")):
            os.utime(path, (946684800, 946684800))
        zipapp.create_archive(staging, target, interpreter="/usr/bin/env python3", compressed=True)


def _files() -> Iterator[tuple[str, Path]]:
    """What goes in: names in the archive, and where they are now."""
    package = Path(cortex_training.__file__).parent
    for pattern in _COMMAND_NEEDS:
        for source in package.glob(pattern):
            yield f"cortex_training/{source.relative_to(package)}", source
    for name in (*_NEEDED, *_OPTIONAL):
        try:
            yield from _files_of(name)
        except PackageNotFoundError:
            if name in _NEEDED:
                raise
            print(f"{name} is not installed; the file goes without", file=sys.stderr)


def _files_of(package: str) -> Iterator[tuple[str, Path]]:
    for file in distribution(package).files or ():
        name = file.as_posix()
        # Compiled parts are for one platform, and each has a pure twin.
        wanted = file.suffix in (".py", ".json", ".gz", ".pem", ".txt") and not name.startswith("..")
        if wanted and "__pycache__" not in name and _OTHER_SERVICES.fullmatch(name) is None:
            yield name, Path(str(file.locate()))


def main(argv: Sequence[str] | None = None) -> int:
    """Build the file that the one argument names."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m cortex_training.publication.onefile OUT.pyz", file=sys.stderr)
        return 2
    build(Path(arguments[0]))
    print(arguments[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
