"""Whole frames: a value to bytes and back.

A frame's safetensors metadata has two entries, each the text of a JSON document: ``dss`` is ``{"v": "DSSST1", "tree":
…}``, and ``op``, when there is any, is the operation metadata. They are always written in this order.
"""

from __future__ import annotations

import mmap
from typing import Any, TypeAlias

from cortex_training._safetensors import WireError, encode_header, file_order, parse, read_header_text
from cortex_training._tensors import Buffer, Framework, TensorBytes, build_tensor, choose_framework
from cortex_training._tree import PLACEHOLDER, TreeEncoder, decode_tree, from_json, to_json

WIRE_FORMAT_VERSION = "DSSST1"

FrameBytes: TypeAlias = bytes | bytearray | memoryview | mmap.mmap

_SIGNATURES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")
"""Pickle protocols 2 to 5, and the zip that torch.save writes."""


def dumps(value: object, metadata: Any = None) -> bytes:
    """One frame that holds `value`, and `metadata` as its operation metadata unless that is empty.

    Raises `WireError` for what a frame cannot carry, with the path to it: other types, unsupported dtypes, keys that
    would not come back, a value that contains itself, nesting beyond `MAX_NESTING`, JSON beyond `MAX_HEADER_BYTES`.
    """
    return b"".join(frame_buffers(value, metadata))


def frame_buffers(value: object, metadata: Any = None) -> list[Buffer]:
    """The bytes of `dumps` as a list: the header, then each tensor in file order.

    Row-major tensors in CPU memory are not copied, so their content must not change until the buffers are used. Raises
    `WireError` as `dumps` does.
    """
    encoder = TreeEncoder()
    tree = encoder.encode(value)
    texts = {"dss": to_json({"v": WIRE_FORMAT_VERSION, "tree": tree}, "the value")}
    if metadata:
        texts["op"] = to_json(metadata, "metadata")
    tensors = encoder.tensors or [(PLACEHOLDER, TensorBytes("U8", (1,), b"\0"))]
    tensors.sort(key=lambda item: file_order(item[1].dtype, item[0]))
    header = encode_header(texts, [(name, t.dtype, t.shape, len(t.data)) for name, t in tensors])
    return [header, *(t.data for _, t in tensors if len(t.data))]


def loads(frame: FrameBytes, *, framework: Framework | None = None) -> Any:
    """The value of a frame.

    `framework` says what tensors become: ``"numpy"``, ``"torch"``, or for None torch if it is loaded and numpy
    otherwise. Arrays of numpy are read-only views of `frame`, whatever its type; dtypes that numpy lacks become
    `RawTensor`. torch tensors share the memory of a writable frame (bytearray) and copy from a read-only one, since
    torch cannot protect it.

    Raises `WireError`, and nothing else, for any malformed frame.
    """
    library = choose_framework(framework)
    view = bytes_view(frame, "loads")
    try:
        header = parse(view)
    except WireError as error:
        if bytes(view[:4]).startswith(_SIGNATURES):
            raise WireError(
                "refusing to deserialize a legacy pickle/torch.save payload; "
                "the peer must use the DSSST1 safetensors wire protocol"
            ) from None
        raise WireError(f"not a valid DSSST1 safetensors payload: {error}") from None
    tree = _tree_of(header.metadata)
    infos = header.tensors
    infos.pop(PLACEHOLDER, None)
    body = view[header.length :]
    built: dict[str, Any] = {}

    def tensor(name: str) -> Any:
        if name not in built:
            if name not in infos:
                raise WireError(f"the tree refers to tensor {name!r:.80}, which the frame does not hold")
            info = infos[name]
            built[name] = build_tensor(library, info.dtype, info.shape, body[info.begin : info.end])
        return built[name]

    try:
        return decode_tree(tree, tensor)
    except RecursionError:
        raise WireError("the DSSST1 tree nests too deeply for this process") from None


def _tree_of(metadata: dict[str, str]) -> Any:
    if "dss" not in metadata:
        raise WireError("DSSST1 structure missing from safetensors header")
    document = from_json(metadata["dss"], "the DSSST1 structure")
    if not isinstance(document, dict):
        raise WireError(f"the DSSST1 structure must be an object, got {document!r:.80}")
    if document.get("v") != WIRE_FORMAT_VERSION:
        raise WireError(f"unsupported DSSST1 wire version {document.get('v')!r:.80}")
    if "tree" not in document:
        raise WireError("the DSSST1 structure has no tree")
    return document["tree"]


def read_metadata(frame: FrameBytes) -> Any:
    """The operation metadata of a frame, ``{}`` without metadata or header; tensors may be missing or cut off.

    An object in every frame of the service, though the format allows any JSON value. Raises `WireError` when the
    metadata is not JSON, or `frame` not bytes.
    """
    view = bytes_view(frame, "read_metadata")
    try:
        texts = read_header_text(view)[0].get("__metadata__")
    except WireError:
        return {}
    text = texts.get("op") if isinstance(texts, dict) else None
    return from_json(text, "operation metadata") if isinstance(text, str) else {}


def bytes_view(frame: object, function: str) -> memoryview:
    """`frame` as flat bytes, not copied unless it is a memoryview with gaps. Raises `WireError` for other types."""
    if not isinstance(frame, bytes | bytearray | memoryview | mmap.mmap):
        raise WireError(f"wire.{function} expects bytes, got {type(frame).__qualname__}")
    view = memoryview(frame)
    return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())
