"""Files that a job leaves in its experiment run: execution logs, console output, GPU metrics.

They lie on a Snowflake stage and are read with the Snowflake connector, or from the bucket behind the stage
(`cortex_training._bucket_stage`). Console output and metrics come in compressed
chunks that are put together here. Names on the stage come from outside: each is checked before it becomes a path.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cortex_training._bucket_stage import BucketStage, credentials_query
from cortex_training.answers import DownloadedArtifact, ExecutionLog
from cortex_training.auth import Auth, NoAuth, PatAuth, SnowflakeSessionAuth, connector_is_installed
from cortex_training.errors import ConfigurationError, ProtocolError
from cortex_training.paths import safe_relative
from cortex_training.settings import ClientSettings

_COPY_BYTES = 1024 * 1024
_MANIFEST_VERSION = 1
_PARENTS = ("", "checkpoints/")
"""A run keeps its artifacts at its top, or, for jobs that write through their checkpoint store, below checkpoints."""


@dataclass(frozen=True)
class ChunkedArtifact:
    """A kind of artifact that is written in chunks: where they are, how they are called, what they become."""

    root: str
    chunk_name: re.Pattern[str]
    filename: str


STDOUT = ChunkedArtifact("_stdout", re.compile(r"^console\.\d{8}-\d{6}\.[^./\\]+\.gz$"), "stdout.log")
METRICS = ChunkedArtifact("_metrics", re.compile(r"^gpu\.\d{8}-\d{6}\.[^./\\]+\.gz$"), "gpu.jsonl")


class Stage(Protocol):
    """The files of one experiment run, by their path relative to it."""

    def uri(self, path: str) -> str: ...

    def s3_uri(self, path: str) -> str | None:
        """Where the file lies in a bucket, where that is known."""

    def files(self, root: str) -> list[str]:
        """Paths of the files below `root`."""

    def download(self, path: str, folder: Path) -> Path:
        """Fetch one file into an empty folder."""


class ConnectorStage:
    """An experiment run's stage, through a connection of the Snowflake connector."""

    def __init__(self, connection: Any, run: Mapping[str, Any]) -> None:
        self._connection = connection
        self._base = run_uri(run)
        self._run_name = run["experiment_run_name"]

    def uri(self, path: str) -> str:
        return f"{self._base}{path}"

    def s3_uri(self, path: str) -> str | None:
        return None

    def close(self) -> None:
        self._connection.close()

    def files(self, root: str) -> list[str]:
        found = []
        for row in self._query(f"LIST {_quoted(f'{self._base}{root}/')}"):
            prefix = f"/versions/{self._run_name}/"
            if not isinstance(row[0], str) or not row[0].startswith(prefix):
                raise ProtocolError(f"the stage lists {row[0]!r}, which is not in the run {self._run_name!r}")
            path = checked_path(row[0].removeprefix(prefix))
            if not path.startswith(f"{root}/"):
                raise ProtocolError(f"the stage lists {path!r} below {root!r}")
            found.append(path)
        return found

    def download(self, path: str, folder: Path) -> Path:
        self._query(f"GET {_quoted(self.uri(path))} {_quoted(folder.resolve().as_uri() + '/')}")
        fetched = [entry for entry in folder.iterdir() if entry.is_file()]
        if len(fetched) != 1:
            raise ProtocolError(f"fetching {path!r} from the stage gave {len(fetched)} files")
        return fetched[0]

    def _query(self, statement: str) -> list[Any]:
        cursor = self._connection.cursor()
        try:
            cursor.execute(statement)
            rows: list[Any] = cursor.fetchall()
            return rows
        finally:
            cursor.close()


_IDENTITY_QUERY = "SELECT CURRENT_USER(), CURRENT_ROLE()"
"""Who a token belongs to: the connector wants to be told, the service's API does not."""


def run_uri(run: Mapping[str, Any]) -> str:
    """Where Snowflake keeps a run's files. Raises `ProtocolError` for a run without its names."""
    for field in ("experiment_name", "experiment_run_name"):
        value = run.get(field)
        if not isinstance(value, str) or not value:
            raise ProtocolError(f"the experiment run has no {field}, so its files cannot be found")
    return f"snow://experiment/{run['experiment_name']}/versions/{run['experiment_run_name']}/"


def stage_query(settings: ClientSettings, run: Mapping[str, Any]) -> str | None:
    """The SQL query whose first row `opened_stage` needs; None when it needs none.

    Raises `ConfigurationError` for a client without a Snowflake credential.
    """
    auth = settings.auth
    if isinstance(auth, NoAuth):
        raise ConfigurationError(
            f"artifacts lie on a Snowflake stage, which {auth!r} does not open; use a connection profile or a token"
        )
    if not _uses_connector(auth):
        return credentials_query(run_uri(run))
    return _IDENTITY_QUERY if isinstance(auth, PatAuth) else None


def _uses_connector(auth: Auth) -> bool:
    """The connector takes profiles and tokens, if it is there; a session of a profile shows that it is."""
    if isinstance(auth, SnowflakeSessionAuth):
        return True
    return isinstance(auth, PatAuth) and connector_is_installed()


@contextmanager
def opened_stage(settings: ClientSettings, run: Mapping[str, Any], row: list[Any] | None) -> Iterator[Stage]:
    """The stage of an experiment run, over a connection of its own that is closed at the end.

    `row` is the first row of what `stage_query` asks for.
    """
    auth = settings.auth
    stage: ConnectorStage | BucketStage
    if not _uses_connector(auth):
        stage = BucketStage(settings, run_uri(run), (row or [None])[0])
    elif isinstance(auth, SnowflakeSessionAuth):
        stage = ConnectorStage(auth.open_connection(), run)
    else:
        assert isinstance(auth, PatAuth)
        user, role = (*(row or []), None, None)[:2]
        stage = ConnectorStage(
            auth.open_connection(settings.base_url, user, role, settings.database, settings.schema), run
        )
    try:
        yield stage
    finally:
        stage.close()


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def checked_path(path: str) -> str:
    """`path` if it is a plain relative one. Raises `ConfigurationError` otherwise: it would leave the folder it goes
    to.
    """
    try:
        return safe_relative(path)
    except ValueError as error:
        raise ConfigurationError(f"unsafe experiment artifact path: {error}") from None


def fetch_execution_logs(stage: Stage, job_id: str) -> list[ExecutionLog]:
    """Every log file of the job's sub-jobs: `sub_job_id`, `filename`, `artifact_uri`, `content`.

    A file that cannot be fetched does not hide the others: it has an `error` and no content. Bytes that are not UTF-8
    are replaced.
    """
    logs: list[ExecutionLog] = []
    for path, sub_job, filename in sorted(_own_files(stage, "_logs", job_id)):
        entry = ExecutionLog(sub_job_id=sub_job, filename=filename, artifact_uri=stage.uri(path), content="")
        s3_uri = stage.s3_uri(path)
        if s3_uri is not None:
            entry["s3_uri"] = s3_uri
        try:
            with _fetched(stage, path) as file:
                entry["content"] = file.read_bytes().decode("utf-8", "replace")
        except Exception as error:
            entry["error"] = f"{type(error).__name__}: {error}"
        logs.append(entry)
    return logs


def _own_files(stage: Stage, root: str, job_id: str) -> Iterator[tuple[str, str, str]]:
    """Path, sub-job and the rest of the path, for files of this job; a run may hold those of other jobs."""
    for parent in _PARENTS:
        for path in stage.files(f"{parent}{root}"):
            sub_job, _, filename = path.removeprefix(f"{parent}{root}/").partition("/")
            if filename and (sub_job == job_id or sub_job.startswith(f"{job_id}:")):
                yield path, sub_job, filename


@contextmanager
def _fetched(stage: Stage, path: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="cortex-training-") as folder:
        yield stage.download(path, Path(folder))


def download_chunked(
    stage: Stage, artifact: ChunkedArtifact, job_id: str, output_dir: str | os.PathLike[str], *, resume: bool = False
) -> list[DownloadedArtifact]:
    """Put the chunks of each sub-job together as ``<output_dir>/<sub_job_id>/<filename>``.

    Nothing in `output_dir` changes until all of them were read; then each file is replaced in one step. With `resume`
    only chunks that the last download did not have are fetched. One dict per file: `sub_job_id`, `filename`,
    `saved_path`, `chunk_count`, `first_artifact_uri`, `last_artifact_uri`; an empty list without any chunk.
    """
    chunks = _chunks_by_sub_job(stage, artifact, job_id)
    with ExitStack() as unfinished:
        drafts = []
        for sub_job, paths in sorted(chunks.items()):
            folder = Path(output_dir) / folder_name(sub_job)
            folder.mkdir(parents=True, exist_ok=True)
            draft = unfinished.enter_context(_Draft(folder / artifact.filename, resume=resume))
            draft.append_chunks(stage, paths)
            drafts.append((sub_job, paths, draft))
        results = []
        for sub_job, paths, draft in drafts:
            draft.publish()
            results.append(
                DownloadedArtifact(
                    sub_job_id=sub_job,
                    filename=artifact.filename,
                    saved_path=str(draft.target),
                    chunk_count=len(paths),
                    first_artifact_uri=stage.uri(paths[0]),
                    last_artifact_uri=stage.uri(paths[-1]),
                )
            )
        return results


def folder_name(sub_job_id: str) -> str:
    """The folder of a sub-job's files. Its id holds colons, which Windows does not allow in names."""
    without_colons = checked_path(sub_job_id.replace(":", "_"))
    return without_colons if os.name == "nt" else sub_job_id


def _chunks_by_sub_job(stage: Stage, artifact: ChunkedArtifact, job_id: str) -> dict[str, list[str]]:
    chunks: dict[str, list[str]] = {}
    for path, sub_job, filename in _own_files(stage, artifact.root, job_id):
        if artifact.chunk_name.match(filename):
            chunks.setdefault(sub_job, []).append(path)
    for sub_job, paths in chunks.items():
        if len({path.partition(artifact.root)[0] for path in paths}) > 1:
            # Two places with their own numbering: no order of their chunks is the right one.
            raise ProtocolError(f"{sub_job} has {artifact.root} chunks in two places; they cannot be put in order")
        paths.sort()
    return chunks


class _Draft:
    """A file being put together beside the one it will replace."""

    def __init__(self, target: Path, *, resume: bool) -> None:
        self.target = target
        self._manifest = target.with_name(f".{target.name}.manifest.json")
        self._resume = resume
        self._names: list[str] = []

    def __enter__(self) -> _Draft:
        handle, name = tempfile.mkstemp(prefix=f".{self.target.name}-", suffix=".tmp", dir=self.target.parent)
        self._path: Path | None = Path(name)
        self._file = os.fdopen(handle, "wb")
        if self._resume:
            self._copy_what_is_there()
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _copy_what_is_there(self) -> None:
        names, size = _read_manifest(self._manifest)
        if not names or not self.target.is_file() or self.target.stat().st_size < size:
            return
        with self.target.open("rb") as old:
            remaining = size
            while block := old.read(min(_COPY_BYTES, remaining)):
                self._file.write(block)
                remaining -= len(block)
        self._names = names

    def append_chunks(self, stage: Stage, paths: list[str]) -> None:
        if self._names != paths[: len(self._names)]:
            # A chunk arrived late and belongs before those that are there already.
            self._file.seek(0)
            self._file.truncate()
            self._names = []
        for path in paths[len(self._names) :]:
            with _fetched(stage, path) as compressed:
                self._append(path, compressed)
            self._names.append(path)

    def _append(self, path: str, compressed: Path) -> None:
        try:
            with gzip.open(compressed, "rb") as chunk:
                shutil.copyfileobj(chunk, self._file, _COPY_BYTES)
        except (OSError, EOFError, zlib.error) as error:
            raise ProtocolError(f"{path} is not a readable gzip file: {error}") from error

    def publish(self) -> None:
        """Replace the target. A crash between file and manifest leaves a longer file, which `resume` cuts again."""
        self._file.flush()
        os.fsync(self._file.fileno())
        size = self._file.tell()
        self._file.close()
        assert self._path is not None
        os.replace(self._path, self.target)
        self._path = None
        content = json.dumps({"version": _MANIFEST_VERSION, "names": self._names, "bytes": size})
        temporary = self._manifest.with_suffix(".tmp")
        temporary.write_text(content, encoding="utf-8")
        os.replace(temporary, self._manifest)


def _read_manifest(path: Path) -> tuple[list[str], int]:
    """Names of the chunks in a file and its size; nothing when the manifest is missing, damaged or of another
    version.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        names, size = content["names"], content["bytes"]
    except (OSError, ValueError, KeyError, TypeError):
        return [], 0
    valid = content.get("version") == _MANIFEST_VERSION and isinstance(size, int) and size >= 0
    if not valid or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return [], 0
    return names, size
