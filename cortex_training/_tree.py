"""The skeleton of a DSSST1 frame: nested dicts, lists and tuples with tensors at the leaves, as JSON arrays.

``["t", name]`` a tensor · ``["t", name, {"scalar": true}]`` a 0-d tensor, stored with shape ``[1]`` · ``["j",
value]`` a value without any tensor below, as JSON · ``["d", [[key, node], …]]`` a dict · ``["l", [node, …]]`` a list
· ``["u", [node, …]]`` a tuple.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any

from cortex_training._safetensors import WireError
from cortex_training._tensors import TensorBytes, is_numpy_scalar, is_tensor, numpy_scalar, tensor_bytes

MAX_NESTING = 384
"""Levels of JSON arrays and objects in one document; a dict or list that holds a tensor takes three or two of them."""

PLACEHOLDER = "__dss_empty__"
"""Name of the one-byte tensor of a frame without tensors. Readers drop it before they look at the tree."""

_ROOT = "__root__"
_RESERVED = {PLACEHOLDER, "__metadata__"}
_PLAIN = {str, int, float, bool, type(None)}
_STRING = re.compile(rb'"[^"\\]*+(?:\\(?:.|\Z)[^"\\]*+)*+"?', re.DOTALL)
"""A JSON string, or the rest of the text if it has no end. Possessive, so that no hostile text makes it backtrack."""

_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


class TreeEncoder:
    """Turns one value into its tree and the tensors the tree refers to.

    `tensors` fills up as `encode` walks; each is ``(unique name, content)`` in the order of the walk.
    """

    def __init__(self) -> None:
        self._holds_tensor: dict[int, bool | None] = {}
        self._references: list[tuple[list[Any], str, TensorBytes]] = []
        self.tensors: list[tuple[str, TensorBytes]] = []

    def encode(self, value: object) -> list[Any]:
        """The node of `value`. Raises `WireError` for what a frame cannot carry, naming where it is."""
        try:
            self._look_below(value, "", 1)
            node = self._node(value, "")
        except RecursionError:
            raise _too_deep() from None
        self._name_tensors()
        return node

    def _look_below(self, value: Any, path: str, depth: int) -> bool:
        """Whether a tensor is at or below `value`; remembered per container, so that the whole value is walked once.

        The recursion is bounded by `depth`, and a container that is being looked at already is its own ancestor.
        """
        if not isinstance(value, dict | list | tuple):
            return self._check_leaf(value, path)
        if id(value) in self._holds_tensor:
            known = self._holds_tensor[id(value)]
            if known is None:
                raise WireError(f"{_at(path)} contains itself")
            return known
        if depth > MAX_NESTING:
            raise _too_deep()
        self._holds_tensor[id(value)] = None
        found = False
        # A list of a million token ids is passed over at C speed.
        if not set(map(type, value.values() if isinstance(value, dict) else value)) <= _PLAIN:
            items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                found |= self._look_below(item, _join(path, key), depth + 1)
        if isinstance(value, dict):
            _check_keys(value, path, found)
        self._holds_tensor[id(value)] = found
        return found

    def _check_leaf(self, value: object, path: str) -> bool:
        if is_tensor(value):
            return True
        if is_numpy_scalar(value):
            numpy_scalar(value, _at(path))
        elif not isinstance(value, str | int | float | bool | None):
            raise WireError(
                f"{_at(path)}: a {type(value).__module__}.{type(value).__qualname__} cannot be sent; "
                "use JSON values, numpy arrays, torch tensors, and dicts, lists and tuples of them"
            )
        return False

    def _node(self, value: Any, path: str) -> list[Any]:
        if is_tensor(value):
            return self._tensor_node(value, path)
        if isinstance(value, tuple):
            return ["u", [self._node(item, _join(path, index)) for index, item in enumerate(value)]]
        if not self._holds_tensor.get(id(value)):
            return ["j", value]
        if isinstance(value, dict):
            return ["d", [[key, self._node(item, _join(path, key))] for key, item in value.items()]]
        return ["l", [self._node(item, _join(path, index)) for index, item in enumerate(value)]]

    def _tensor_node(self, value: object, path: str) -> list[Any]:
        content = tensor_bytes(value, _at(path))
        node: list[Any] = ["t", ""]
        if not content.shape:
            node.append({"scalar": True})
            content = TensorBytes(content.dtype, (1,), content.data)
        self._references.append((node, path or _ROOT, content))
        return node

    def _name_tensors(self) -> None:
        """Name each tensor by its path; where two read alike (``{"a": {"b": x}, "a.b": y}``), number the later ones."""
        taken = _RESERVED | {name for _, name, _ in self._references}
        used = set(_RESERVED)
        for node, name, content in self._references:
            unique = _encodable(name)
            count = 1
            while unique in used or (unique != name and unique in taken):
                count += 1
                unique = f"{_encodable(name)}#{count}"
            used.add(unique)
            node[1] = unique
            self.tensors.append((unique, content))


def _check_keys(value: dict[Any, Any], path: str, holds_tensor: bool) -> None:
    """Refuse keys that would not come back: JSON turns 1, True and None into text, perhaps that of another key."""
    if set(map(type, value)) <= {str}:
        return
    others = [key for key in value if not isinstance(key, str)]
    if others and holds_tensor:
        raise WireError(f"DSSST1 dict keys must be strings, got {type(others[0])} in {_at(path)}, which holds a tensor")
    texts: dict[str, object] = {}
    for key in value:
        if not isinstance(key, str | int | float | bool | None):
            raise WireError(f"{_at(path)}: a dict key must be a string, got {type(key)}")
        text = key if isinstance(key, str) else next(iter(json.loads(json.dumps({key: 0}))))
        if text in texts:
            raise WireError(f"{_at(path)}: the keys {texts[text]!r} and {key!r} are the same text in JSON")
        texts[text] = key


def to_json(value: object, what: str) -> str:
    """`value` as JSON text that readers will parse: Python's spelling, ASCII only, at most `MAX_NESTING` levels.

    Numpy scalars become the JSON number or boolean of exactly the same value. Raises `WireError`; `what` names the
    value.
    """
    try:
        text = json.dumps(value, default=partial(numpy_scalar, path=what))
    except RecursionError:
        raise _too_deep() from None
    except WireError:
        raise
    except (TypeError, ValueError) as error:
        raise WireError(f"{what} cannot be written as JSON: {error}") from None
    if nests_deeper(text, MAX_NESTING):
        raise _too_deep()
    return text


def from_json(text: str, what: str) -> Any:
    """Parse a JSON document from a frame, refusing hostile nesting. Raises `WireError`."""
    if nests_deeper(text, MAX_NESTING):
        raise WireError(f"{what} nests more than {MAX_NESTING} levels")
    try:
        return json.loads(text)
    except RecursionError:
        raise WireError(f"{what} nests too deeply for this process") from None
    except ValueError as error:
        raise WireError(f"{what} is not JSON: {error}") from None


def nests_deeper(text: str, limit: int) -> bool:
    """Whether the arrays and objects of a JSON text nest more than `limit` levels, decided without parsing it.

    A parser would answer with RecursionError at a depth that depends on how deep its caller already is.
    """
    if text.count("[") + text.count("{") <= limit:
        return False
    brackets = _STRING.sub(b"", text.encode(errors="surrogatepass")).translate(None, _NOT_BRACKETS)
    return max(accumulate(map(_STEP.__getitem__, brackets)), default=0) > limit


def decode_tree(node: object, tensor: Callable[[str], Any]) -> Any:
    """The value of `node`; `tensor(name)` gives the content of a tensor and raises `WireError` for an unknown name."""
    match node:
        case ["j", value]:
            return value
        case ["t", str(name)]:
            return tensor(name)
        case ["t", str(name), dict(flags)]:
            return _scalar(tensor(name), name) if flags.get("scalar") else tensor(name)
        case ["l", list(nodes)]:
            return [decode_tree(item, tensor) for item in nodes]
        case ["u", list(nodes)]:
            return tuple(decode_tree(item, tensor) for item in nodes)
        case ["d", list(pairs)]:
            return _decode_dict(pairs, tensor)
        case [str(tag), *_] if tag not in {"j", "t", "l", "u", "d"}:
            raise WireError(f"unknown DSSST1 node tag {tag!r:.80}")
    raise WireError(f"malformed DSSST1 node {node!r:.80}")


def _decode_dict(pairs: list[Any], tensor: Callable[[str], Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for pair in pairs:
        match pair:
            case [str(key), node] if key not in result:
                result[key] = decode_tree(node, tensor)
            case _:
                raise WireError(f"malformed or repeated entry in a DSSST1 dict: {pair!r:.80}")
    return result


def _scalar(value: Any, name: str) -> Any:
    if prod(value.shape) != 1:
        raise WireError(f"tensor {name!r} is marked as a scalar but has shape {tuple(value.shape)}")
    return value.reshape(())


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _at(path: str) -> str:
    return path or "the value"


def _encodable(name: str) -> str:
    """Tensor names are UTF-8; a key may hold lone surrogates, which are not."""
    return name.encode(errors="backslashreplace").decode()


def _too_deep() -> WireError:
    return WireError(f"the value nests too deeply: a frame holds at most {MAX_NESTING} levels of JSON")
