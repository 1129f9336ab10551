"""Convert the default model's GGUF file to a Hugging Face directory."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

from crossdock.workers.model.weights.gguf_keys import Metadata
from crossdock.workers.model.weights.gguf_tokenizer import save_tokenizer

# The model card says 0.2; a GGUF has no such field. These weights were quantised once: even at 0.1 they begin the
# answer to "What is the capital of France?" with nonsense in three cases of ten.
_SAMPLING = {"do_sample": False, "temperature": 0.0}


def convert_gguf(gguf: Path, target: Path) -> None:
    """Write config, tokenizer with chat template, and bfloat16 weights."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    with converting(gguf) as reader:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        # The weights are plain by now, but transformers refuses to save a model that it remembers as quantised.
        model.hf_quantizer = None
        model.quantization_method = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.config.rms_norm_eps = 1e-5  # a float32 in GGUF
        model.save_pretrained(target)
        metadata = Metadata(gguf, reader.fields)
        save_tokenizer(gguf, target, metadata, model.config.max_position_embeddings)
    # a name from the GGUF that is neither path nor hub name
    _edit(target / "config.json", drop=("_name_or_path", "_model_name_or_path"))
    _edit(target / "generation_config.json", add=_SAMPLING)  # transformers saves no temperature of 0


def _edit(path: Path, add: Mapping[str, Any] = MappingProxyType({}), drop: Sequence[str] = ()) -> None:
    values = {name: value for name, value in json.loads(path.read_text()).items() if name not in drop}
    path.write_text(json.dumps({**values, **add}, indent=2) + "\n")


@contextlib.contextmanager
def converting(file: Path) -> Iterator[Any]:
    """Let transformers read a GGUF file without progress bars, which would garble a service's log. Yield its reader.

    It would parse the file for the configuration, for the tokenizer and for the weights, and list an architecture's
    tensors again for each module: 36 CPU seconds for the default model, not 8. Callers report progress themselves.
    """
    import gguf
    import numpy as np
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        """Reads from a plain array: of a mapped one, each of a million slices would take three times as long."""

        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = np.asarray(mapped)

    reader = cache(Reader)
    modeling_gguf_pytorch_utils.tqdm = logging.tqdm  # the tqdm imported there ignores transformers' switch
    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    once: dict[str, Any] = {
        "GGUFReader": lambda path: reader(Path(path)),
        "get_tensor_name_map": cache(gguf.get_tensor_name_map),
    }
    try:
        with patch.multiple(gguf, **once):
            yield reader(file)
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
