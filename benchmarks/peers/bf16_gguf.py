"""Rewrite a GGUF with all matrices in bf16, so that llama.cpp is measured on the same weights as the other servers.

    python benchmarks/peers/bf16_gguf.py IN.gguf OUT.gguf [KIND]      # seconds

The matrices are equal to the source's, dequantized; vectors stay in fp32. With a KIND (Q4_0, Q8_0) all matrices but the
embedding are rounded to it.
"""

import sys
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

# The writer sets these fields.
_OWN = {"general.architecture", "general.file_type", "general.quantization_version"}


def rewrite(source: str, target: str, kind_of_matrices: str = "BF16") -> None:
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    writer.add_file_type(LlamaFileType[f"MOSTLY_{kind_of_matrices}"])
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in _OWN:
            continue
        of = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], of)
    for tensor in reader.tensors:
        values: np.ndarray[Any, np.dtype[np.float32]] = dequantize(tensor.data, tensor.tensor_type)
        # llama.cpp needs vectors (norms, biases) in fp32.
        name = "F32" if values.ndim == 1 else "BF16" if tensor.name.startswith("token_embd") else kind_of_matrices
        kind = GGMLQuantizationType[name]
        writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    rewrite(*sys.argv[1:])
