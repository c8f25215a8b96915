"""A dataset on disk -> the frame of any micro-batch of any step, the same bytes on every machine."""

from __future__ import annotations

import hashlib
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cortex_training import wire
from cortex_training.datasets.manifest import Manifest
from cortex_training.datasets.shards import Sequence, ShardReader, open_shards
from cortex_training.errors import ConfigurationError

FRAME_VERSION = 1
"""Rises when the same dataset, seed and shape would give other frame bytes; a run then goes on in a new job, not in
the old one."""

_BYTES_PER_TOKEN = 4 * 8 + 4
"""Of a frame's tensors: input_ids (twice), attention_mask and position_ids are int64, loss_mask is float32."""
_HEADER_BYTES = 4096
"""More than the header of a frame needs."""
_RESPONSE_OPTIONS = {"response_options": {"format": "dssst1", "delivery": "chunked"}}


class Dataset:
    """A built dataset, opened for reading. Sequences stay on disk until a frame needs them."""

    def __init__(self, manifest: Manifest, sequences: ShardReader) -> None:
        self.manifest = manifest
        self._sequences = sequences

    @classmethod
    def open(cls, manifest_path: str | Path, *, verify: bool = True) -> Dataset:
        """Open the dataset of a manifest file.

        Every shard must be there with the size that the manifest says; with `verify` also with its SHA-256, which
        reads everything once. Raises ConfigurationError that names the shard, what was expected, what was found and
        the fix.
        """
        path = Path(manifest_path)
        manifest = Manifest.read(path)
        if manifest.frame_version != FRAME_VERSION:
            raise ConfigurationError(
                f"dataset {path} was built for frame version {manifest.frame_version} and this release makes version "
                f"{FRAME_VERSION}; build the dataset again"
            )
        return cls(manifest, open_shards(path.parent, manifest, verify=verify))

    def batches(self, micro_batch_size: int, micro_batches_per_step: int, seed: int) -> Batches:
        """The dataset cut into micro-batches of `micro_batch_size` sequences, `micro_batches_per_step` to an
        optimizer step."""
        for name, value in (
            ("micro_batch_size", micro_batch_size),
            ("micro_batches_per_step", micro_batches_per_step),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError.of(name, value, "pass a whole number from 1")
        return Batches(self._sequences, self.manifest, micro_batch_size, micro_batches_per_step, seed)


class Batches:
    """An endless series of micro-batches over passes of the dataset.

    Each pass visits every sequence once, in an order of its own. Passes follow each other without a gap: where the
    last micro-batch of a pass is not full, it is filled from the beginning of the next pass, so nothing is dropped
    and every micro-batch has the same number of sequences. `steps_per_pass` is the number of steps after which each
    sequence was seen at least once. `largest_frame` is the most bytes that a frame can have.
    """

    def __init__(
        self, sequences: ShardReader, manifest: Manifest, micro_batch_size: int, micro_batches_per_step: int, seed: int
    ) -> None:
        self._sequences = sequences
        self._pad_token_id = manifest.pad_token_id
        self._size = micro_batch_size
        self._per_step = micro_batches_per_step
        # Of its own: with one cache for all, many runs in one process would throw out each other's orders.
        self._order = lru_cache(maxsize=2)(partial(pass_order, len(sequences), seed))
        self.steps_per_pass = -(-len(sequences) // (micro_batch_size * micro_batches_per_step))
        self.largest_frame = micro_batch_size * manifest.longest_sequence * _BYTES_PER_TOKEN + _HEADER_BYTES

    def frame(self, step: int, micro_batch: int) -> bytes:
        """The frame of a micro-batch: `step` counts from 1, `micro_batch` from 0. A pure function of dataset, shape
        and seed.

        Tensors are ``[batch, sequence]``, as wide as the longest sequence of the micro-batch and padded on the right:
        input_ids with the tokenizer's padding (or eos) id, attention_mask and loss_mask with 0. position_ids restart
        with each packed document and with the padding, so that a service which tells documents apart by their
        positions sees padding as one of its own.
        """
        return wire.dumps(_arrays(self.sequences(step, micro_batch), self._pad_token_id), metadata=_RESPONSE_OPTIONS)

    def sequences(self, step: int, micro_batch: int) -> list[Sequence]:
        """The packed sequences of a micro-batch."""
        if step < 1 or not 0 <= micro_batch < self._per_step:
            raise ValueError(
                f"step {step}, micro-batch {micro_batch}: steps count from 1, micro-batches from 0 to "
                f"{self._per_step - 1}"
            )
        first = ((step - 1) * self._per_step + micro_batch) * self._size
        return [self._sequences.sequence(self._at(position)) for position in range(first, first + self._size)]

    def _at(self, position: int) -> int:
        number, index = divmod(position, len(self._sequences))
        return int(self._order(number)[index])


def pass_order(sequences: int, seed: int, number: int) -> npt.NDArray[np.int64]:
    """The order of sequences in pass `number` (from 0): ascending SHA-256 of the text ``seed:number:index``.

    Not a library's random generator: those change between releases, and a run that resumes must see the batches it
    would have seen.
    """
    keys = b"".join(hashlib.sha256(f"{seed}:{number}:{index}".encode()).digest() for index in range(sequences))
    words = np.frombuffer(keys, dtype=">u8").reshape(sequences, 4).astype(np.uint64)
    # numpy sorts without holding the interpreter, which for a million sequences would stop an event loop for a second.
    # The last key of a lexsort comes first.
    order = np.lexsort((words[:, 3], words[:, 2], words[:, 1], words[:, 0])).astype(np.int64)
    order.flags.writeable = False
    return order


def _arrays(sequences: list[Sequence], pad_token_id: int) -> dict[str, object]:
    shape = (len(sequences), max(len(sequence.tokens) for sequence in sequences))
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.int64)
    position_ids = np.zeros(shape, dtype=np.int64)
    loss_mask = np.zeros(shape, dtype=np.float32)
    for line, sequence in enumerate(sequences):
        used = len(sequence.tokens)
        input_ids[line, :used] = sequence.tokens
        attention_mask[line, :used] = 1
        position_ids[line] = _positions([*sequence.lengths, shape[1] - used])
        # A document's first token has no loss, so the last token of the one before it predicts nothing across the
        # border.
        loss_mask[line, : used - 1] = sequence.loss[1:]
    return {
        "args": (),
        "kwargs": {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "use_cache": False,
        },
        "context": {"input_ids": input_ids, "loss_mask": loss_mask},
        "processing": {"loss_fn": "causal_cross_entropy", "post": [], "config": {}},
    }


def _positions(lengths: list[int]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])
