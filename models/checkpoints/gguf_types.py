"""GGUF files written again with their values in another type, for systems to be compared on."""

import os
import pathlib

import gguf

TYPES = {
    "float32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "int8": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "float16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
}
"""How matrices are stored, and what the whole file is then called, by precision."""
_WRITTEN_BY_THE_LIBRARY = ("GGUF.", "general.architecture")
_FILE_TYPE = "general.file_type"


def write_gguf_as(
    source: str | os.PathLike[str], target: str | os.PathLike[str], precision: str
) -> None:
    """Copies a GGUF file, its matrices in another type; vectors (norms, biases) become float32.

    Args:
      source: a GGUF file.
      target: the file to write; it is there whole or not at all.
      precision: `float32`, `bfloat16`, `float16`, or `int8` (llama.cpp's Q8_0: blocks of 32 with
        a scale).

    Raises:
      ValueError: another precision, or a row that is no whole number of blocks.
      OSError: the file cannot be written.
    """
    if precision not in TYPES:
        raise ValueError(f"precision={precision!r} given; use {', '.join(TYPES)}")
    kind, file_type = TYPES[precision]
    reader, target = gguf.GGUFReader(os.fspath(source)), pathlib.Path(target)
    partial = target.with_name(target.name + ".partial")
    writer = gguf.GGUFWriter(partial, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith(_WRITTEN_BY_THE_LIBRARY) or name == _FILE_TYPE:
            continue
        of_array = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], of_array)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        matrix = values.ndim > 1
        stored = gguf.quantize(values, kind) if matrix else values.astype("float32")
        kept = kind if matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, stored, raw_dtype=kept)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
