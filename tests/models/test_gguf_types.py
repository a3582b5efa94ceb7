"""A GGUF file written in another type: the same model, to the precision of the type."""

import gguf
import numpy as np
import pytest

from kvlab.models.checkpoints.gguf_types import write_gguf_as

# A step of the type, against the largest value of a block of 32.
STEPS = {"float32": 0.0, "bfloat16": 2**-8, "int8": 1 / 127}


@pytest.fixture
def source(tiny_gguf, tmp_path):
    draw = np.random.default_rng(0).standard_normal
    values = {
        "token_embd.weight": draw((7, 64)).astype(np.float32),
        "output_norm.weight": draw(64).astype(np.float32),
    }
    keys = {"tokenizer.ggml.tokens": ["a", "b"], "general.name": "tiny", "general.file_type": 3}
    return tiny_gguf.write(
        tmp_path / "source.gguf", "llama", {"block_count": 1}, values, other_keys=keys
    ), values


@pytest.mark.parametrize("precision", STEPS)
def test_matrices_are_within_a_step_and_vectors_exact(precision, source, tmp_path):
    path, values = source
    target = tmp_path / "target.gguf"
    write_gguf_as(path, target, precision)
    reader = gguf.GGUFReader(target)
    for tensor in reader.tensors:
        found = gguf.dequantize(tensor.data, tensor.tensor_type)
        wanted = values[tensor.name]
        step = STEPS[precision] * np.abs(wanted).max() if wanted.ndim > 1 else 0.0
        assert found.shape == wanted.shape
        assert np.abs(found - wanted).max() <= step
    assert [tensor.name for tensor in reader.tensors] == list(values)


def test_metadata_come_along_and_the_type_is_named(source, tmp_path):
    target = tmp_path / "target.gguf"
    write_gguf_as(source[0], target, "int8")
    keys = {name: field.contents() for name, field in gguf.GGUFReader(target).fields.items()}
    assert keys["tokenizer.ggml.tokens"] == ["a", "b"]
    assert keys["llama.block_count"] == 1
    assert keys["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q8_0


def test_an_unknown_precision_names_the_known(source, tmp_path):
    with pytest.raises(ValueError, match="precision='int3' given; use float32, bfloat16, int8"):
        write_gguf_as(source[0], tmp_path / "target.gguf", "int3")
    assert not (tmp_path / "target.gguf").exists()


def test_a_copy_that_cannot_be_written_leaves_nothing(source, tmp_path):
    with pytest.raises(OSError, match="absent"):
        write_gguf_as(source[0], tmp_path / "absent" / "target.gguf", "float32")
