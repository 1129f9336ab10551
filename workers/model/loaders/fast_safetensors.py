"""Read parts of files with fastsafetensors: a file's bytes go to a GPU at once, past the host where GDS is set up."""

from collections.abc import Sequence
from math import prod

from crossdock.workers.model.loaders.part import TensorPart, Tensors


def load_fast(parts: Sequence[TensorPart], device: str) -> Tensors:
    """Yield (number of a part, its tensor), file after file. The device holds one file's buffer at a time."""
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    numbers: dict[str, list[int]] = {}
    for number, part in enumerate(parts):
        numbers.setdefault(part.file, []).append(number)
    for file, found in numbers.items():
        loader = SafeTensorsFileLoader(SingleGroup(), device, nogds=device == "cpu")
        keys = {parts[number].key for number in found}
        loader.set_tensor_filter(keys.__contains__)
        loader.add_filenames({0: [file]})
        content = loader.copy_files_to_device()
        try:
            for number in found:
                part = parts[number]
                elements = content.get_tensor(part.key).reshape(-1)
                yield number, elements[part.first : part.first + prod(part.shape)].clone().reshape(part.shape)
        finally:
            content.close()
            loader.close()
