"""torch tensors in and out of frames."""

from __future__ import annotations

import numpy as np
import pytest

from cortex_training import wire

torch = pytest.importorskip("torch")


def test_torch_is_what_its_users_get_by_default():
    frame = wire.dumps({"x": torch.arange(3)})
    assert isinstance(wire.loads(frame)["x"], torch.Tensor)
    assert isinstance(wire.loads(frame, framework="numpy")["x"], np.ndarray)


def test_flags_of_a_tensor_are_resolved_into_its_values():
    values = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    decoded = wire.loads(wire.dumps({"conj": values.conj(), "neg": values.conj().imag}), framework="torch")
    assert decoded["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert decoded["neg"].tolist() == [-2.0, 4.0]


def test_layouts_and_gradients():
    base = torch.arange(24.0).reshape(4, 6)
    parameter = torch.nn.Parameter(base.clone())
    value = {
        "transposed": base.T,
        "strided": base[:, ::2],
        "expanded": base[:1].expand(3, 6),
        "channels_last": base.reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        "parameter": parameter,
        "needs_grad": parameter * 2,
        "overlap_1": base[:3],
        "overlap_2": base[1:],
    }
    decoded = wire.loads(wire.dumps(value), framework="torch")
    for name, tensor in value.items():
        assert torch.equal(decoded[name], tensor), name
        assert not decoded[name].requires_grad


def test_contiguous_tensors_are_not_copied_into_buffers():
    tensor = torch.zeros(1000, dtype=torch.bfloat16)
    (_, data) = wire.frame_buffers({"x": tensor})
    tensor[0] = 1.0
    assert bytes(data[:2]) == b"\x80\x3f"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.eye(3).to_sparse(), r"a: a tensor of layout torch.sparse_coo cannot be sent; make it dense"),
        (lambda: torch.zeros(3, device="meta"), "a: a meta tensor has no data"),
        (lambda: torch.zeros(3, dtype=torch.complex128), "a: dtype torch.complex128 cannot be sent"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "a: a nested tensor cannot be sent"),
        (lambda: torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.quint8), "a: dtype torch.quint8"),
        (lambda: torch.zeros([1] * 65), "'a' has 65 dimensions"),
    ],
    ids=["sparse", "meta", "complex128", "nested", "quantized", "dimensions"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_cannot_be_sent(make, message):
    with pytest.raises(wire.WireError, match=message):
        wire.dumps({"a": make()})


def test_writable_frames_are_shared_and_read_only_ones_copied():
    frame = wire.dumps({"x": torch.arange(4), "e": torch.zeros(0, 3), "s": torch.tensor(2.5)})
    copied = wire.loads(frame, framework="torch")
    copied["x"][0] = 100
    assert wire.loads(frame, framework="torch")["x"].tolist() == [0, 1, 2, 3]
    assert copied["e"].shape == (0, 3)
    assert copied["s"].shape == ()
    held = bytearray(frame)
    wire.loads(held, framework="torch")["x"][0] = 100
    assert wire.loads(held, framework="torch")["x"].tolist() == [100, 1, 2, 3]
    shifted = memoryview(bytearray(b"\0" * 3 + frame))[3:]
    assert wire.loads(shifted, framework="torch")["x"].tolist() == [0, 1, 2, 3]
