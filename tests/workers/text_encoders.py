"""Tiny random text encoders of every family that is served, as directories of Sentence Transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast

TEXTS = ["the quick brown fox", "a lazy dog", "jumps over the lazy dog, and over the fox", "dog"]
POSITIONS = 96  # of texts; RoBERTa's tables have two more
_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]  # ids 0 to 3
_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "pad_token_id": 1,
}
_LOCAL = {"local_attention": 16, "global_attn_every_n_layers": 2, "cls_token_id": 0, "sep_token_id": 2}
TYPED = ("bert", "electra", "nomic_bert")  # with token types, which tell the second text apart
_PADDED = {"type_vocab_size": 1, "max_position_embeddings": POSITIONS + 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {"max_position_embeddings": POSITIONS, "type_vocab_size": 2},
    "roberta": _PADDED,
    "xlm-roberta": _PADDED,
    "modernbert": {"max_position_embeddings": POSITIONS, **_LOCAL, "bos_token_id": 0, "eos_token_id": 2},
    "distilbert": {"max_position_embeddings": POSITIONS, "hidden_dim": 64, "intermediate_size": None},
    "electra": {"max_position_embeddings": POSITIONS, "type_vocab_size": 2, "embedding_size": 32},
    "mpnet": {"max_position_embeddings": POSITIONS + 2},
    "nomic_bert": {"max_position_embeddings": POSITIONS, "type_vocab_size": 2},
    "gte": {"max_position_embeddings": POSITIONS},
}
BIDIRECTIONAL: dict[str, Any] = {
    "max_position_embeddings": POSITIONS,
    "use_bidirectional_attention": True,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
"""Gemma 3 as a text encoder: it has vectors, and no head for labels."""
VECTORS = {**FAMILIES, "gemma3_text": BIDIRECTIONAL}


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """Return a small tokenizer that frames one text and two as the family's does: BERT's tells the second one apart."""
    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))  # type: ignore[call-arg]
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=_SPECIAL, show_progress=False)
    )
    is_bert = family not in ("roberta", "xlm-roberta", "mpnet", "gte")
    second = "</s> $B:1 </s>:1" if family in TYPED else "</s> $B </s>" if is_bert else "</s> </s> $B </s>"
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair=f"<s> $A {second}", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = {"unk_token": "<unk>", "pad_token": "<pad>", "cls_token": "<s>", "sep_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def build(family: str, num_labels: int = 0, **more: Any) -> Any:
    """Return transformers' random model in float32: with a head of so many labels, or 0: without one."""
    fields = {name: value for name, value in {**_SIZES, **VECTORS[family]}.items() if value is not None}
    config = AutoConfig.for_model(family, vocab_size=128, **fields, num_labels=num_labels or 2, **more)
    torch.manual_seed(num_labels)
    model = (AutoModelForSequenceClassification if num_labels else AutoModel).from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model


def saved(
    folder: Path,
    family: str,
    num_labels: int = 0,
    pooling: str = "",
    dense: Mapping[str, tuple[nn.Linear, str]] | None = None,
    **more: Any,
) -> Any:
    """Write a checkpoint with its tokenizer, and return transformers' model.

    `pooling`: the mode that files of Sentence Transformers name, with normalised vectors; empty: there are none.
    `dense`: dense layers behind the pooling by their folders, each with the name of its activation in torch.
    """
    model = build(family, num_labels, **more)
    model.save_pretrained(folder)
    tokenizer_of(family).save_pretrained(folder)
    if pooling:
        (folder / "1_Pooling").mkdir()
        modes = {f"pooling_mode_{each}": each == pooling for each in ("cls_token", "mean_tokens", "max_tokens")}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **modes}))
        layers = [(path, "Dense") for path in dense or {}]
        names = [("", "Transformer"), ("1_Pooling", "Pooling"), *layers, ("9_Normalize", "Normalize")]
        modules = [{"path": path, "type": f"sentence_transformers.models.{name}"} for path, name in names]
        (folder / "modules.json").write_text(json.dumps(modules))
    for path, (layer, activation) in (dense or {}).items():
        (folder / path).mkdir()
        fields = {"in_features": layer.in_features, "out_features": layer.out_features, "bias": layer.bias is not None}
        fields["activation_function"] = f"torch.nn.modules.activation.{activation}"
        (folder / path / "config.json").write_text(json.dumps(fields))
        tensors = {f"linear.{name}": tensor.detach() for name, tensor in layer.named_parameters()}
        save_file(tensors, folder / path / "model.safetensors")
    return model


@torch.inference_mode()
def hidden_of(model: Any, token_ids: list[int], **given: torch.Tensor) -> torch.Tensor:
    """Return the last hidden states [n, E] of transformers' own forward of one text."""
    ids = torch.tensor([token_ids])
    base = getattr(model, model.base_model_prefix, model)
    found: torch.Tensor = base(input_ids=ids, attention_mask=torch.ones_like(ids), **given).last_hidden_state[0]
    return found


@torch.inference_mode()
def logits_of(model: Any, token_ids: list[int], **given: torch.Tensor) -> torch.Tensor:
    """Return the logits [L] of transformers' own forward of one text."""
    ids = torch.tensor([token_ids])
    found: torch.Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits[0]
    return found


def pooled(hidden: torch.Tensor, pooling: str) -> torch.Tensor:
    """Return the vector [E] of hidden states, by plain torch."""
    return {"cls": hidden[0], "last": hidden[-1], "mean": hidden.mean(0)}[pooling]
