"""The surface as an OpenAPI 3.1 document, from the same lists that validation uses.

Objects that the reference leaves open (configurations, metrics, results) are open here too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cortex_training.local.capacity import HARDWARE
from cortex_training.local.data_plane import CHECKPOINT_TYPES
from cortex_training.local.generation_request import KNOWN_PARAMS, MAX_PROMPTS
from cortex_training.local.generic_operation import KINDS_OF_HINT, OPERATION_TYPES
from cortex_training.local.job_spec import ID_SEGMENT, JOB_KEYS, MAX_SUB_JOBS, SUB_JOB_KEYS
from cortex_training.local.requests import DEFAULT_EVENTS, MAX_EVENTS

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_POSITIVE: Schema = {"type": "integer", "minimum": 1}
_TIME: Schema = {"type": "string", "format": "date-time"}
_OPEN: Schema = {"type": "object"}
_STATE: Schema = {"type": ["string", "integer"]}
_PREFIX = "/api/v2/databases/{database}/schemas/{schema}"


def document(endpoint: str, version: str) -> Schema:
    """The whole document. `endpoint` is the last part of the paths' prefix."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Cortex Training, the local service",
            "version": version,
            "description": "The REST surface of Cortex Training as the local service answers it.",
        },
        "security": [{}, {"token": []}],
        "paths": {f"{_PREFIX}/{endpoint}{path}": item for path, item in _paths().items()}
        | {"/exports/{token}/{name}": _exports()},
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _paths() -> dict[str, Schema]:
    return {
        "": {
            "post": _call("createJob", ok=_ref("Created"), body=_json(_ref("CreateJob")), refusals=(404, 409)),
            "get": _call("listJobs", ok=_object({"jobs": _list(_ref("Job"))}), query={"status": _TEXT}),
        },
        "/capacity": {"get": _call("getCapacity", ok=_ref("Capacity"), query={"hardware": _enum(HARDWARE)})},
        "/{job_id}": {"get": _of_job("getJob", ok=_ref("Job"))},
        "/{job_id}:cancel": {
            "post": _of_job("cancelJob", ok=_object({"job_id": _TEXT, "status": _STATE}), refusals=(409,))
        },
        "/{job_id}/experiment-run": {
            "get": _of_job("getExperimentRun", ok=_object({"experiment_name": _TEXT, "experiment_run_name": _TEXT}))
        },
        "/{job_id}/checkpoints": {
            "get": _of_job("listCheckpoints", ok=_object({"checkpoints": _list(_ref("Checkpoint"))}))
        },
        "/{job_id}/checkpoints/{checkpoint_id}": {
            "delete": _of_job("deleteCheckpoint", ok=None, more=["checkpoint_id"])
        },
        "/{job_id}/checkpoints/{checkpoint_id}:export": {
            "post": _of_job("exportCheckpoint", ok=_ref("Export"), more=["checkpoint_id"])
        },
        "/{job_id}/requests/{request_id}": {
            "get": _of_job(
                "pollRequest",
                ok=_ref("Poll"),
                more=["request_id"],
                query={
                    "max_events": {"type": "integer", "minimum": 1, "default": DEFAULT_EVENTS, "maximum": MAX_EVENTS},
                    "cursor": _TEXT,
                },
                refusals=(409,),
            )
        },
        **{f"/{{job_id}}/{name}": {"post": call} for name, call in _data_plane().items()},
    }


def _data_plane() -> dict[str, Schema]:
    accepted, frame = _ref("Accepted"), {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    framed_or_json = {**frame, **_json(_ref("Generate"))}
    busy = (409, 413, 415)
    return {
        "forward-backward": _of_job("forwardBackward", ok=_ref("AcceptedOrCached"), body=frame, refusals=busy),
        "forward": _of_job("forward", ok=_ref("AcceptedOrCached"), body=frame, refusals=busy),
        "generate": _of_job("generate", ok=_ref("AcceptedOrCached"), body=framed_or_json, refusals=busy),
        "generate-stream": _of_job("generateStream", ok=_ref("AcceptedOrCached"), body=framed_or_json, refusals=busy),
        "step": _of_job("step", ok=accepted, body=_json(_ref("Step")), refusals=busy),
        "save": _of_job("save", ok=accepted, body=_json(_ref("Save")), refusals=busy),
        "load": _of_job("load", ok=accepted, body=_json(_ref("Load")), refusals=(*busy, 501)),
        "operation": _of_job("operation", ok=_OPEN, body=_json(_ref("Operation")), refusals=busy),
    }


def _exports() -> Schema:
    file = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    return {
        "get": {
            "operationId": "getExportedFile",
            "security": [],
            "parameters": [_in_path("token"), _in_path("name")],
            "responses": {
                "200": {"description": "the file", "content": file},
                "206": {"description": "a range of it", "content": file},
                **_refusals((400, 403, 404, 416, 421)),
            },
        }
    }


def _of_job(name: str, *, more: Iterable[str] = (), refusals: Iterable[int] = (), **parts: Any) -> Schema:
    return _call(name, path=["job_id", *more], refusals={404, *refusals}, **parts)


def _call(
    name: str,
    *,
    ok: Schema | None,
    path: Iterable[str] = (),
    query: dict[str, Schema] | None = None,
    body: Schema | None = None,
    refusals: Iterable[int] = (),
) -> Schema:
    """One operation. `ok` None: it answers with 204 and nothing."""
    answer = {"description": "done", "content": _json(ok)} if ok is not None else {"description": "done"}
    common = {400, 401, 421} | ({413, 415} if body is not None else set())
    call: Schema = {
        "operationId": name,
        "parameters": [
            *[_in_path(one) for one in ("database", "schema", *path)],
            *[{"name": one, "in": "query", "schema": schema} for one, schema in (query or {}).items()],
        ],
        "responses": {"200" if ok is not None else "204": answer, **_refusals(common | set(refusals))},
    }
    if body is not None:
        call["requestBody"] = {"required": name not in ("step", "save"), "content": body}
    return call


def _refusals(statuses: Iterable[int]) -> Schema:
    return {
        str(status): {"description": "refused", "content": _json(_ref("Refusal"))} for status in sorted(set(statuses))
    }


def _in_path(name: str) -> Schema:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def _enum(values: Iterable[str]) -> Schema:
    return {"type": "string", "enum": sorted(values)}


def _object(fields: dict[str, Schema], *, optional: Iterable[str] = (), closed: bool = False) -> Schema:
    """An object. Fields whose name is in `optional` may be left out; `closed` refuses others."""
    schema: Schema = {
        "type": "object",
        "properties": fields,
        "required": [name for name in fields if name not in set(optional)],
    }
    return {**schema, "additionalProperties": False} if closed else schema


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _typed(keys: Iterable[str], types: dict[str, Schema], required: Iterable[str]) -> Schema:
    """A closed object with the keys that validation knows; a key without a type may hold anything."""
    return {
        "type": "object",
        "properties": {key: types.get(key, {}) for key in sorted(keys)},
        "required": sorted(required),
        "additionalProperties": False,
    }


_TIMEOUT: Schema = {"type": "integer", "minimum": 300, "maximum": 604_800}
_SIZES: dict[str, Schema] = {"max_seq_len": _POSITIVE, "n_gpus": _POSITIVE}
_PROMPT: Schema = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}},
    ]
}
_PARAMS: Schema = {
    "type": "object",
    "properties": {name: {} for name in sorted(KNOWN_PARAMS)},
    "additionalProperties": False,
}

_SCHEMAS: dict[str, Schema] = {
    "Refusal": _object(
        {
            "code": {"type": ["integer", "string"]},
            "message": {"type": "string", "minLength": 1},
            "detail": _list(_object({"loc": _list({"type": ["string", "integer"]}), "msg": _TEXT, "type": _TEXT})),
            "job_id": _TEXT,
            "job_status": _TEXT,
            "reason": _TEXT,
        },
        optional=("detail", "job_id", "job_status", "reason"),
    ),
    "CreateJob": _typed(
        JOB_KEYS,
        {
            "sub_job_configs": {
                "type": "array",
                "minItems": 1,
                "maxItems": MAX_SUB_JOBS,
                "items": _ref("SubJobConfig"),
            },
            "job_id": _or_null({"type": "string", "minLength": 1, "maxLength": 128}),
            "experiment_name": _or_null({"type": "string", "minLength": 1, "maxLength": 512}),
            "hardware": _or_null(_enum(HARDWARE)),
            "idle_timeout_seconds": {"anyOf": [_TIMEOUT, {"const": 0}, {"type": "null"}]},
            "pending_timeout_seconds": _or_null(_TIMEOUT),
        },
        required=["sub_job_configs"],
    ),
    "SubJobConfig": _typed(
        SUB_JOB_KEYS,
        {
            "job_type": _enum(ID_SEGMENT),
            "model_name": {"type": "string", "minLength": 1},
            "training_config": _object(
                {**_SIZES, "optimizer": {"type": "object", "minProperties": 1}, "train_batch_size": _POSITIVE}
            ),
            "inference_config": _object(_SIZES),
            "global_batch_size": _or_null(_POSITIVE),
            "dtype": _or_null(_TEXT),
            "seed": _or_null(_COUNT),
            "model_post_init": _or_null(_list(_TEXT)),
            "source_checkpoint_info": _or_null(_OPEN),
        },
        required=["job_type", "model_name"],
    ),
    "Created": _object({"job_id": _TEXT}),
    "Job": _object(
        {
            "job_id": _TEXT,
            "status": _STATE,
            "reason": _TEXT,
            "created_at": _TIME,
            "updated_at": _TIME,
            "submitted_by": _TEXT,
            "owner_role": _TEXT,
            "sub_jobs": _list(_ref("SubJob")),
        },
        optional=("reason", "submitted_by", "owner_role"),
    ),
    "SubJob": _object(
        {
            "sub_job_id": _TEXT,
            "job_type": _TEXT,
            "status": _STATE,
            "model_name": _TEXT,
            "training_config": _OPEN,
            "inference_config": _OPEN,
        },
        optional=("training_config", "inference_config"),
    ),
    "Capacity": _object(
        {
            "has_reservation": {"type": "boolean"},
            "max_total_gpus": {"type": "integer", "minimum": -1},
            **dict.fromkeys(("reserved_gpus", "in_use_gpus", "pending_gpus", "available_gpus"), _COUNT),
        },
        optional=(
            "has_reservation", "max_total_gpus", "reserved_gpus", "in_use_gpus", "pending_gpus", "available_gpus",
        ),
    ),
    "Checkpoint": _object(
        {
            "checkpoint_id": _TEXT,
            "global_steps": _COUNT,
            "avg_loss": {"type": ["number", "null"]},
            "created_at": _TIME,
            "checkpoint_type": _enum(CHECKPOINT_TYPES),
        }
    ),
    "Export": _object(
        {
            "checkpoint_id": _TEXT,
            "files": _list(_object({"filename": _TEXT, "url": _TEXT, "size_bytes": _COUNT})),
            "expires_at": _TIME,
        }
    ),
    "Accepted": _object({"request_id": _TEXT, "job_id": _TEXT}),
    "AcceptedOrCached": {
        "anyOf": [
            _ref("Accepted"),
            _object({"chunk_cached": {"const": True}, "job_id": _TEXT, "chunk_group_id": _TEXT, "chunk_idx": _COUNT}),
        ]
    },
    "Poll": _object(
        {
            "request_id": _TEXT,
            "status": _STATE,
            "created_at": _TIME,
            "updated_at": _TIME,
            "result": {},
            "error": _TEXT,
            "events": _list(_OPEN),
            "next_cursor": _TEXT,
        },
        optional=("result", "error", "events", "next_cursor"),
    ),
    "Step": _object(
        {"learning_rate": {"type": ["number", "null"], "minimum": 0}}, optional=["learning_rate"], closed=True
    ),
    "Save": _object(
        {"checkpoint_id": {}, "checkpoint_type": _or_null(_enum(CHECKPOINT_TYPES))},
        optional=["checkpoint_id", "checkpoint_type"],
        closed=True,
    ),
    "Load": _object(
        {
            "checkpoint_id": {"type": "string", "minLength": 1},
            "source_job_id": _or_null(_TEXT),
            "target_sub_job_id": _or_null(_TEXT),
        },
        optional=["source_job_id", "target_sub_job_id"],
        closed=True,
    ),
    "Generate": _object(
        {
            "prompts": {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _PROMPT},
            "sampling_params": {"anyOf": [_PARAMS, {"type": "null"}, _list(_or_null(_PARAMS))]},
            "routing_key": {"anyOf": [_TEXT, {"type": "null"}, _list(_or_null(_TEXT))]},
            "strict": {"type": ["boolean", "null"]},
        },
        optional=["sampling_params", "routing_key", "strict"],
    ),
    "Operation": _object(
        {
            "operation_type": _enum(OPERATION_TYPES),
            "sub_job_id": _or_null(_TEXT),
            "sub_job_type": _or_null(_enum(KINDS_OF_HINT)),
            "payload": _or_null(_OPEN),
        },
        optional=["sub_job_id", "sub_job_type", "payload"],
        closed=True,
    ),
}  # fmt: skip
