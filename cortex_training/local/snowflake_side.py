"""What the Snowflake connector calls: login, session tokens, queries, uploads to stages, and the SQL API.

Queries are answered by fakesnow's own handler; sessions, limits and experiment runs are this module's. Imported only by
a service that was told to answer the connector, because fakesnow and DuckDB take a second and 100 MB.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import secrets
import uuid
import zlib
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

import fakesnow.server as fakesnow_server
from fakesnow.transforms import SERVER_VERSION
from snowflake.connector.constants import FIELD_ID_TO_NAME
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message

from cortex_training.local.bodies import read_body
from cortex_training.local.credentials import SESSION_EXPIRED, Credentials, session_token
from cortex_training.local.refusals import Refusal
from cortex_training.local.sessions import Session, Sessions, SessionState
from cortex_training.local.snowflake_files import SnowflakeFiles, read_statement, stage_headers
from cortex_training.local.snowflake_sql import ROLE, WAREHOUSE, SqlEngine, SqlError

_log = logging.getLogger("cortex_training.local")
_QUERY_BYTES = 64 * 1024 * 1024
"""A query with its bindings, after decompression."""
_UPLOAD_BYTES = 256 * 1024 * 1024
"""One file put on a stage; it is held in memory."""


class SnowflakeSide:
    """One method a route."""

    def __init__(self, engine: SqlEngine, sessions: Sessions, credentials: Credentials, files: SnowflakeFiles) -> None:
        self._engine = engine
        self._sessions = sessions
        self._credentials = credentials
        self._files = files
        self._upload_key = secrets.token_bytes(32)
        # At INFO it writes every login's database; at WARNING only what it cannot run.
        fakesnow_server.logger.setLevel(logging.WARNING)

    def routes(self) -> list[Route]:
        def post(path: str, handler: Callable[[Request], Awaitable[Response]]) -> Route:
            return Route(path, handler, methods=["POST"])

        return [
            post("/session/v1/login-request", self.login),
            post("/session/token-request", self.renew),
            post("/session", self.session),
            post("/session/heartbeat", self.session),
            post("/queries/v1/query-request", self.query),
            post("/queries/v1/abort-request", self.accepted),
            post("/telemetry/send", self.accepted),
            post("/api/v2/statements", self.statement),
            Route("/monitoring/queries/{sfqid}", self.monitoring, methods=["GET"]),
            Route("/fs_bucket/{path:path}", self.upload, methods=["PUT"]),
            Route("/stage-files/{expires}/{signature}/{job_id}/{name:path}", self.stage_file, methods=["GET", "HEAD"]),
        ]

    async def login(self, request: Request) -> Response:
        data = (await _json_object(request)).get("data")
        fields = data if isinstance(data, dict) else {}
        by_token = fields.get("AUTHENTICATOR") == "PROGRAMMATIC_ACCESS_TOKEN"
        secret = fields.get("TOKEN") if by_token else fields.get("PASSWORD")
        if not self._credentials.allows_login(secret if isinstance(secret, str) else ""):
            return _login_refused(by_token)
        parameters = fields.get("SESSION_PARAMETERS")
        parameters = parameters if isinstance(parameters, dict) else {}
        database, schema = (request.query_params.get(name) or None for name in ("databaseName", "schemaName"))
        user, autocommit = str(fields.get("LOGIN_NAME") or "LOCAL"), bool(parameters.get("AUTOCOMMIT", True))
        try:
            connection = await asyncio.to_thread(
                lambda: self._engine.connect(database, schema, user, autocommit=autocommit)
            )
        except Exception as error:  # DuckDB has many kinds for a name it does not take
            return _failure("390201", f"the database or schema of the connection cannot be used: {error}")
        session = self._sessions.open(user, connection)
        fakesnow_server.sessions[session.token] = connection
        return _success({**self._tokens(session), **_login_facts(session, parameters)})

    async def renew(self, request: Request) -> Response:
        """Another session token for a master token."""
        renewed = self._sessions.renew(session_token(request.headers.get("authorization", "")))
        if renewed is None:
            return _failure("390114", "Authentication token has expired.  The user must authenticate again.")
        old, session = renewed
        fakesnow_server.sessions.pop(old, None)
        fakesnow_server.sessions[session.token] = session.connection
        tokens = self._tokens(session)
        return _success(
            {
                **tokens,
                "sessionToken": session.token,
                "validityInSecondsST": tokens["validityInSeconds"],
                "validityInSecondsMT": tokens["masterValidityInSeconds"],
            }
        )

    async def session(self, request: Request) -> Response:
        """A heartbeat, or a logout."""
        token = session_token(request.headers.get("authorization", ""))
        if request.query_params.get("delete"):
            self._sessions.close(token)
            return _success(None)
        return self._refusal(token) or _success(None)

    async def query(self, request: Request) -> Response:
        refused = self._refusal(session_token(request.headers.get("authorization", "")))
        if refused is not None:
            return refused
        body = await _json_object(request)
        try:
            statement = read_statement(str(body.get("sqlText", "")))
            if statement is not None:
                base_url = f"{request.url.scheme}://{request.url.netloc}"
                return _success(await asyncio.to_thread(self._files.answer, statement, base_url))
        except Refusal as refusal:
            return _failure("002003", f"SQL compilation error:\n{refusal.message}", {"sqlState": "02000"})
        answer = await fakesnow_server.query_request(_again(request, body))
        if answer.status_code >= 500:
            # It fails in its own way for what it does not know, and a connector asks again after a 500 for minutes.
            return _failure("261000", "the local service's SQL engine, fakesnow, cannot run this statement")
        return self._signed(answer)

    async def statement(self, request: Request) -> Response:
        """The SQL API: one statement, answered with its rows as text."""
        body = await _json_object(request)
        text = body.get("statement")
        if not isinstance(text, str) or not text.strip():
            raise Refusal(422, f"statement: must be SQL, got {text!r:.100}")
        names = [body.get(name) for name in ("database", "schema")]
        database, schema = (name if isinstance(name, str) and name else None for name in names)
        session = self._sessions.find(session_token(request.headers.get("authorization", "")))
        user, handle = session.user if session is not None else "LOCAL", str(uuid.uuid4())
        try:
            result = await asyncio.to_thread(self._engine.run, text, database, schema, user)
        except SqlError as error:
            raise Refusal(
                422, str(error.msg), code=f"{error.errno:06d}", sqlState=error.sqlstate, statementHandle=handle
            ) from None
        except Exception as error:
            _log.warning("fakesnow cannot run a statement", exc_info=error)
            raise Refusal(422, f"the local service cannot run this statement: {error}", code="000002") from None
        columns = [{"name": name, "type": FIELD_ID_TO_NAME.get(code, "TEXT")} for name, code in result.columns]
        return JSONResponse(
            {
                "code": "090001",
                "sqlState": "00000",
                "message": "Statement executed successfully.",
                "statementHandle": handle,
                "resultSetMetaData": {"numRows": len(result.rows), "format": "jsonv2", "rowType": columns},
                "data": [[_shown(value) for value in row] for row in result.rows],
            }
        )

    async def monitoring(self, request: Request) -> Response:
        refused = self._refusal(session_token(request.headers.get("authorization", "")))
        if refused is not None:
            return refused
        return await asyncio.to_thread(fakesnow_server.monitoring_query, request)

    async def accepted(self, request: Request) -> Response:
        return _success(None)

    async def upload(self, request: Request) -> Response:
        """A file for a stage, by a link that a PUT statement gave out."""
        path, given = request.path_params["path"], request.query_params.get("signature", "")
        if not hmac.compare_digest(given.encode(), self._upload_signature(path).encode()):
            raise Refusal(403, "this address was not given out for an upload")
        content = await read_body(request, _UPLOAD_BYTES)
        return await fakesnow_server.bucket_upload(_with_body(request, content))

    async def stage_file(self, request: Request) -> Response:
        """A file of an experiment run, by a link that a GET statement gave out."""
        given = request.path_params
        path = self._files.open(given["expires"], given["signature"], given["job_id"], given["name"])
        headers = stage_headers(await asyncio.to_thread(path.read_bytes))
        return FileResponse(path, media_type="application/octet-stream", headers=headers)

    def _refusal(self, token: str) -> Response | None:
        state = self._sessions.state(token)
        if state == SessionState.OPEN:
            return None
        if state == SessionState.EXPIRED:
            # With this code in a 200, as the real service has it, a connector renews its session and asks again.
            return _failure(SESSION_EXPIRED, "Session token expired.")
        return _failure("390104", "User must login again to access the service.", status=401)

    def _tokens(self, session: Session) -> dict[str, Any]:
        return {
            "token": session.token,
            "masterToken": session.master_token,
            "validityInSeconds": max(1, round(self._sessions.lifetime_s)),
            "masterValidityInSeconds": max(1, round(self._sessions.master_lifetime_s)),
            "sessionId": session.session_id,
        }

    def _signed(self, answer: Response) -> Response:
        """Sign the address that a PUT statement gives out: it is the only credential the upload comes with."""
        if b'"presignedUrl"' not in bytes(answer.body):
            return answer
        content = json.loads(bytes(answer.body))
        place = (content.get("data") or {}).get("stageInfo")
        if not isinstance(place, dict) or not isinstance(place.get("presignedUrl"), str):
            return answer
        path = unquote(place["presignedUrl"].partition("/fs_bucket/")[2])
        place["presignedUrl"] += f"?signature={self._upload_signature(path)}"
        return JSONResponse(content, answer.status_code)

    def _upload_signature(self, path: str) -> str:
        return hmac.new(self._upload_key, path.encode(), hashlib.sha256).hexdigest()


def end_session(session: Session) -> None:
    """Let go of what executes a session's SQL."""
    fakesnow_server.sessions.pop(session.token, None)
    session.connection.close()


def _login_facts(session: Session, parameters: dict[str, Any]) -> dict[str, Any]:
    connection = session.connection
    return {
        # Clients take it for the product's version, and some refuse one that they think is too old.
        "serverVersion": SERVER_VERSION,
        "parameters": [
            {"name": "AUTOCOMMIT", "value": bool(parameters.get("AUTOCOMMIT", True))},
            {"name": "CLIENT_SESSION_KEEP_ALIVE_HEARTBEAT_FREQUENCY", "value": 3600},
            # 0: bindings of many rows come with their statement, not by way of a stage.
            {"name": "CLIENT_STAGE_ARRAY_BINDING_THRESHOLD", "value": 0},
        ],
        "sessionInfo": {
            "databaseName": connection.database,
            "schemaName": connection.schema,
            "warehouseName": WAREHOUSE,
            "roleName": ROLE,
        },
    }


def _login_refused(by_token: bool) -> Response:
    if by_token:
        return _failure("394400", "Programmatic access token is invalid.")
    return _failure("390100", "Incorrect username or password was specified.")


def _success(data: Any) -> Response:
    return JSONResponse({"data": data, "code": None, "message": None, "success": True})


def _failure(code: str, message: str, data: dict[str, Any] | None = None, *, status: int = 200) -> Response:
    described = {"errorCode": code, **(data or {})}
    return JSONResponse({"data": described, "code": code, "message": message, "success": False}, status)


async def _json_object(request: Request) -> dict[str, Any]:
    """The body, which connectors may have compressed. Raises Refusal: 413, 415, 400."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        # A web page can make a browser send anything but this type to another site unasked.
        raise Refusal(415, "the body must be application/json")
    raw = await read_body(request, _QUERY_BYTES)
    try:
        if request.headers.get("content-encoding", "").lower() == "gzip":
            raw = _inflated(raw)
        content = json.loads(raw or b"{}")
    except (ValueError, RecursionError, zlib.error) as error:
        raise Refusal(400, f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise Refusal(400, f"the body must be a JSON object, got {type(content).__name__}")
    return content


def _inflated(raw: bytes) -> bytes:
    with_gzip_header = 16 + zlib.MAX_WBITS
    inflater = zlib.decompressobj(with_gzip_header)
    whole = inflater.decompress(raw, _QUERY_BYTES)
    if inflater.unconsumed_tail:
        raise Refusal(413, f"the body is longer than {_QUERY_BYTES} bytes when decompressed")
    return whole


def _again(request: Request, body: dict[str, Any]) -> Request:
    """The same request, not yet read, with a body that is not compressed."""
    return _with_body(request, json.dumps(body).encode())


def _with_body(request: Request, body: bytes) -> Request:
    headers = [(name, value) for name, value in request.scope["headers"] if name != b"content-encoding"]

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return Request({**request.scope, "headers": headers}, receive)


def _shown(value: Any) -> str | None:
    """A value as the SQL API writes it."""
    if value is None:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)
