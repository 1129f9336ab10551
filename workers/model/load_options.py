"""How a module of transformers is put behind our attention."""

from dataclasses import dataclass

from transformers import GenerationConfig

from crossdock.kernels.backend import Attention
from crossdock.kernels.options import CpuKernels, KVCacheDtype, Quantization
from crossdock.workers.model.cut.part import ModelPart
from crossdock.workers.model.weights.formats import PlainWeights, format_of


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of `wrap_module`, beside the module itself."""

    max_model_len: int | None = None  # tokens; None: the model's own limit
    generation: GenerationConfig | None = None  # names further tokens that end a stream
    part: ModelPart | None = None  # what `cut_model` left; None: the whole model
    attention: Attention | None = None  # None: the best on the module's device
    kv_cache_dtype: KVCacheDtype = "auto"  # auto: the model's own
    cpu_kernels: CpuKernels = "auto"
    batch_invariant: bool = False  # refuse a model whose bits depend on the batch
    quantization: Quantization | None = None
    used_by_others: int = 0  # see `LoadedModel`
    max_lora_rank: int = 0  # of adapters; 0: the model takes none
    max_loras: int = 1  # adapters in memory at once
    checkpoint: str = ""  # a name for the weights, if logits of their check may be those of an earlier start

    @property
    def weights(self) -> PlainWeights:
        """The format of the weights that products read."""
        return format_of(self.quantization)
