"""DSSST1, the binary format of the Cortex Training service: frames, and the chunks that carry large frames.

A frame is a safetensors file that holds nested dicts, lists and tuples of tensors and JSON values; nothing in it is
ever executed. Frames written here are the same bytes for the same value, on every machine, because a forward-backward
that is sent again must be the same message.

What a frame does not keep: a tuple below a dict or list *without any tensor* comes back as a list; in such a dict the
keys 1, 1.5, True and None come back as text (keys that would become equal are refused); a named tuple comes back as a
tuple; a numpy scalar comes back as the Python number of the same value. Views of one storage are written in full each.

Tensors are numpy arrays, torch tensors if the caller has loaded torch, or `RawTensor` for dtypes that numpy lacks.
Dtypes: bool, int8 to int64, uint8 to uint64, float16, bfloat16, float32, float64, complex64 and four kinds of float8.
Everything that can be wrong with a frame or a value is a `WireError`.
"""

from cortex_training._chunks import (
    CHUNK_OVERHEAD_BYTES,
    decode_byte_chunks,
    decode_result_chunks,
    encode_byte_chunks,
    encode_result_chunks,
    frame_sha256,
    iter_byte_chunks,
    read_byte_chunk_metadata,
)
from cortex_training._frames import WIRE_FORMAT_VERSION, FrameBytes, dumps, frame_buffers, loads, read_metadata
from cortex_training._safetensors import MAX_HEADER_BYTES, WireError
from cortex_training._tensors import Buffer, Framework, RawTensor
from cortex_training._tree import MAX_NESTING

__all__ = [
    "CHUNK_OVERHEAD_BYTES",
    "MAX_HEADER_BYTES",
    "MAX_NESTING",
    "WIRE_FORMAT_VERSION",
    "Buffer",
    "FrameBytes",
    "Framework",
    "RawTensor",
    "WireError",
    "decode_byte_chunks",
    "decode_result_chunks",
    "dumps",
    "encode_byte_chunks",
    "encode_result_chunks",
    "frame_buffers",
    "frame_sha256",
    "iter_byte_chunks",
    "loads",
    "read_byte_chunk_metadata",
    "read_metadata",
]

# Tracebacks and help() show the module that people import from.
WireError.__module__ = RawTensor.__module__ = __name__
