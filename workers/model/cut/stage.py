"""Pipeline parallelism: a range of a model's layers, entered and left by hooks around the model's own forward."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

from torch import Tensor, nn

from crossdock.kvtransfer.layout import layer_range
from crossdock.workers.model.architecture import attention_layers, has_layers_without_attention, is_multimodal
from crossdock.workers.model.cut.collectives import Collectives
from crossdock.workers.model.cut.position import CannotCut, RankPosition

_Answer = TypeVar("_Answer")


_WITH_TUPLES = {"bamba", "falcon_h1", "glm_moe_dsa"}  # models that take more than hidden states from a layer


class _StageDone(Exception):
    """Leaves the model's forward after this stage's last layer: all that follows runs on another stage."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _SkippedLayer(nn.Module):
    """Takes the place of a layer of another stage: models look layers up by their index."""

    def __init__(self, layer: nn.Module, gives_tuple: bool) -> None:
        super().__init__()
        self._gives_tuple = gives_tuple
        # Models choose a layer's mask by its string attributes.
        self.__dict__.update({name: value for name, value in vars(layer).items() if isinstance(value, str)})
        if (multipliers := getattr(getattr(layer, "mamba", None), "mup_vector", None)) is not None:
            self.mamba = SimpleNamespace(mup_vector=multipliers)  # Falcon-H1 fills those of all layers after loading

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor, None]:
        return (hidden_states, None) if self._gives_tuple else hidden_states


class PipelineStage:
    """A range of a model's layers: receives hidden states from the previous stage and sends them to the next.

    The model's own forward runs on every stage. The received hidden states replace the input of the stage's first
    layer. So the model's work on embeddings happens once, on the first stage.
    """

    def __init__(self, model: Any, config: Any, position: RankPosition, collectives: Collectives | None = None) -> None:
        """Replace the layers of other stages in `model`, which is on the meta device.

        Raises:
            CannotCut: fewer layers than stages, a stage without attention, or layers that share keys and values, or
                what an indexer chose, across stages.
        """
        num_layers = config.num_hidden_layers
        if position.num_stages > num_layers:
            raise CannotCut(f"{num_layers} layers cannot be divided among {position.num_stages} stages")
        if getattr(config, "num_kv_shared_layers", 0):
            raise CannotCut(f"{config.model_type}: layers share keys and values, which stages cannot")
        self._collectives = collectives
        self._position = position
        self._received: Tensor | None = None
        self._hidden_size: int = config.hidden_size
        self.needs_token_ids = position.is_first_stage or bool(getattr(config, "hidden_size_per_layer_input", 0))
        layers = _decoder_layers(model.get_decoder() if is_multimodal(model.config) else model, num_layers)
        self.first_layer, end = layer_range(num_layers, position.num_stages, position.stage)
        self.num_layers = end - self.first_layer
        _require_own_indexer(config, self.first_layer)
        self.first_place = self.first_layer
        if has_layers_without_attention(config):
            places = [layer for layer in attention_layers(config) if layer < end]
            self.first_place = sum(layer < self.first_layer for layer in places)
            if self.first_place == len(places):
                raise CannotCut(
                    f"{config.model_type}: no layer from {self.first_layer} to {end - 1} has attention, and so this "
                    f"stage would have no KV pages to keep states in; set a smaller pipeline_parallel_size"
                )
        for index in (*range(self.first_layer), *range(end, num_layers)):
            layers[index] = _SkippedLayer(layers[index], config.model_type in _WITH_TUPLES)
        if not position.is_first_stage:
            layers[self.first_layer].register_forward_pre_hook(self._enter, with_kwargs=True)
        if not position.is_last_stage:
            layers[end - 1].register_forward_hook(self._leave)
        self._drop_embedding_and_head(model)

    def run(self, forward: Callable[[Tensor | None], _Answer], num_tokens: int, like: Tensor) -> _Answer | None:
        """Call `forward` with the previous stage's hidden states [1, T, E], or None on the first stage.

        Returns its answer on the last stage, and None where the next stage continues. `like` has the hidden states'
        dtype and device.
        """
        collectives = self._collectives
        assert collectives is not None, "this part was made to be measured, not to be run"
        if not self._position.is_first_stage:
            self._received = collectives.receive((1, num_tokens, self._hidden_size), like.dtype, like.device)
        try:
            return forward(self._received)
        except _StageDone as done:
            collectives.send(done.hidden)
            return None

    def _enter(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._received is not None
        if args:
            return (self._received, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._received}

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> None:
        raise _StageDone(output[0] if isinstance(output, tuple) else output)

    def _drop_embedding_and_head(self, model: Any) -> None:
        """Keep the embedding on the first stage and the head on the last; where they are tied, each has a copy."""
        is_tied = bool(model.all_tied_weights_keys)
        dropped = []
        if not self._position.is_last_stage:
            dropped.append(model.get_output_embeddings())
        if not self.needs_token_ids and not (is_tied and self._position.is_last_stage):
            dropped.append(model.get_input_embeddings())
        for name, module in list(model.named_modules()):
            if any(module is end for end in dropped):
                path, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(path), attribute, nn.Identity())
                for target, source in list(model.all_tied_weights_keys.items()):
                    if name in (target.rpartition(".")[0], source.rpartition(".")[0]):
                        del model.all_tied_weights_keys[target]


def _require_own_indexer(config: Any, first_layer: int) -> None:
    """Check that the first layer of a stage reads no tokens that a layer of another stage chose. Raises CannotCut."""
    kinds = getattr(config, "indexer_types", None) or ()
    if first_layer < len(kinds) and kinds[first_layer] == "shared":
        own = [layer for layer, kind in enumerate(kinds) if kind == "full"]
        raise CannotCut(
            f"{config.model_type}: layer {first_layer} would begin a stage, and reads the tokens that an earlier layer "
            f"chose; stages may begin at layers {', '.join(map(str, own))}. Set another pipeline_parallel_size"
        )


def _decoder_layers(model: Any, num_layers: int) -> nn.ModuleList:
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise CannotCut(f"{model.config.model_type}: the decoder has no list of {num_layers} layers")
