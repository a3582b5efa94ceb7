"""The GGUF reader agrees with the `gguf` package, for every quantisation, and refuses damage."""

import gguf
import numpy as np
import pytest

from kvlab.models.checkpoints.gguf import load_gguf
from kvlab.models.checkpoints.gguf_file import copy_metadata, open_gguf

Kind = gguf.GGMLQuantizationType
QUANTISABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0")
DEQUANTISABLE = (
    *QUANTISABLE,
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "NVFP4", "IQ4_NL", "IQ4_XS"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
)


@pytest.mark.parametrize("kind", QUANTISABLE)
def test_quantised_values_come_back_within_a_step(kind, tiny_gguf, tmp_path):
    values = np.random.default_rng(3).uniform(-1, 1, (7, 512)).astype(np.float32)
    stored = gguf.quantize(values, Kind[kind])
    path = tiny_gguf.write(tmp_path / "m.gguf", "llama", {}, {"x": stored}, kinds={"x": Kind[kind]})
    step = {"F32": 0, "F16": 2**-11, "BF16": 2**-9, "Q8_0": 1 / 127, "Q5_0": 1 / 8, "Q5_1": 1 / 31}
    got = open_gguf(path).dequantized("x")
    assert got.dtype == np.float32
    assert np.abs(got - values).max() <= step.get(kind, 1 if kind.startswith("TQ") else 1 / 4)


@pytest.mark.parametrize("kind", DEQUANTISABLE)
def test_every_quantisation_that_the_package_dequantises(kind, tiny_gguf, tmp_path):
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[Kind[kind]]
    # 1,031 blocks of 256 values are two pieces and a bit. The mask keeps float16 scales finite.
    row_bytes = 1031 * max(256 // block_size, 1) * block_bytes
    stored = np.random.default_rng(5).integers(0, 256, (3, row_bytes), np.uint8) & 0xBB
    path = tiny_gguf.write(tmp_path / "m.gguf", "llama", {}, {"x": stored}, kinds={"x": Kind[kind]})
    got = open_gguf(path).dequantized("x")
    wanted = gguf.dequantize(stored, Kind[kind]).reshape(got.shape)
    assert got.shape == (3, row_bytes // block_bytes * block_size)
    assert np.isfinite(wanted).all()
    assert np.array_equal(got, wanted)


def test_files_that_are_not_whole_gguf_models(tiny_gguf, llama, tmp_path, refused):
    path = tiny_gguf.write(tmp_path / "m.gguf", "llama", *llama)
    whole = path.read_bytes()
    for content, words in (
        (b"", ["not a GGUF file"]),
        (b"PK\3\4" + bytes(64), ["not a GGUF file"]),
        (whole[:4], ["truncated", "header"]),
        (whole[:300], ["truncated", "header"]),
        (whole[:-1000], ["truncated", "tensors end at byte"]),
        (b"GGUF" + (1).to_bytes(4, "little") + whole[8:], ["version 1", "2 and 3"]),
        (b"GGUF" + (3).to_bytes(4, "big") + whole[8:], ["little-endian"]),
    ):
        path.write_bytes(content)
        refused(lambda: load_gguf(path), "m.gguf", *words)
    refused(lambda: load_gguf(tmp_path / "absent.gguf"), "absent.gguf", "No such file")
    refused(lambda: load_gguf(tmp_path), "cannot be read")


def test_what_the_header_may_not_say(tiny_gguf, llama, tmp_path, refused):
    keys, arrays = llama
    path = tiny_gguf.write(tmp_path / "m.gguf", "phi3", {}, arrays)
    refused(lambda: load_gguf(path), "'phi3'", "supported: llama, qwen2, qwen3, gemma2, gpt2")
    path = tiny_gguf.write(
        tmp_path / "m.gguf", "llama", keys, arrays, other_keys={"split.count": 3}
    )
    refused(lambda: load_gguf(path), "one of 3 parts")
    stored = np.zeros((97, 66), np.int8)
    path = tiny_gguf.write(
        tmp_path / "m.gguf", "llama", keys, arrays | {"token_embd.weight": stored}
    )
    refused(lambda: load_gguf(path), "token_embd.weight", "I8", "does not dequantise")
    whole = path.read_bytes()
    at = whole.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight")
    for offset, code, words in (
        (0, 9, ["claims 9 dimensions"]),
        (20, 99, ["unknown quantisation 99"]),
        (20, 8, ["rows of 66 values", "Q8_0 blocks of 32"]),
    ):
        spoiled = bytearray(whole)
        spoiled[at + offset] = code
        path.write_bytes(spoiled)
        refused(lambda: load_gguf(path), "blk.0.attn_q.weight", *words)


def test_metadata_that_is_cut_short_or_of_an_unknown_type(tiny_gguf, tmp_path, refused):
    tokens = {"tokenizer.ggml.tokens": ["first", "second", "third"], "nested": [[1, 2], [3, 4]]}
    path = tiny_gguf.write(tmp_path / "m.gguf", "llama", {}, {}, other_keys=tokens)
    assert [row.tolist() for row in open_gguf(path).metadata["nested"]] == [[1, 2], [3, 4]]
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b"second") + 3])
    refused(lambda: open_gguf(path), "truncated", "header")
    at = whole.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens")
    path.write_bytes(whole[:at] + b"\x4d" + whole[at + 1 :])
    refused(lambda: open_gguf(path), "metadata of the unknown type 77")


def test_the_reader_agrees_with_the_package(tiny_gguf, llama, tmp_path, refused):
    keys, arrays = llama
    other = {
        "tokenizer.ggml.tokens": ["a", "ğ", "🙂", ""],
        "tokenizer.ggml.scores": [0.5, -1.5],
        "tokenizer.ggml.token_type": [1, 2, 3],
        "general.name": "Ünlü",
        "general.alignment": 64,
        "tokenizer.ggml.add_bos_token": True,
    }
    path = tiny_gguf.write(tmp_path / "m.gguf", "llama", keys, arrays, other_keys=other)
    file = open_gguf(path)
    reader = gguf.GGUFReader(path)
    for key, value in file.metadata.items():
        wanted = reader.fields[key].contents()
        came = value.tolist() if isinstance(value, np.ndarray) else value
        assert came == pytest.approx(wanted) if isinstance(wanted, float) else came == wanted, key
    assert set(other) <= set(file.metadata)
    assert file.metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-5
    assert [tensor.name for tensor in reader.tensors] == list(file.tensors)
    for tensor in reader.tensors:
        assert file.tensors[tensor.name].start == tensor.data_offset
        assert np.array_equal(file.dequantized(tensor.name), tensor.data)
    refused(lambda: file.dequantized("nothing"), "lacks the tensor nothing")


def test_metadata_can_be_copied_without_the_tensors(tiny_gguf, llama, tmp_path):
    path = tiny_gguf.write(
        tmp_path / "m.gguf", "llama", *llama, other_keys={"tokenizer.ggml.tokens": ["x", "y"]}
    )
    copy_metadata(path, tmp_path / "copy.gguf")
    copy = open_gguf(tmp_path / "copy.gguf")
    assert copy.tensors == {}
    assert copy.metadata["tokenizer.ggml.tokens"] == ["x", "y"]
    assert copy.metadata.keys() == open_gguf(path).metadata.keys()
