"""Tiny random text encoders of every family that is served, as directories of Sentence Transformers."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
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
_PADDED = {"type_vocab_size": 1, "max_position_embeddings": POSITIONS + 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {"max_position_embeddings": POSITIONS, "type_vocab_size": 2},
    "roberta": _PADDED,
    "xlm-roberta": _PADDED,
    "modernbert": {"max_position_embeddings": POSITIONS, **_LOCAL, "bos_token_id": 0, "eos_token_id": 2},
}


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """Return a small tokenizer that frames one text and two as the family's does: BERT's tells the second one apart."""
    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))  # type: ignore[call-arg]
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=_SPECIAL, show_progress=False)
    )
    is_bert = family in ("bert", "modernbert")
    second = "</s> $B:1 </s>:1" if family == "bert" else "</s> $B </s>" if is_bert else "</s> </s> $B </s>"
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair=f"<s> $A {second}", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    names = {"unk_token": "<unk>", "pad_token": "<pad>", "cls_token": "<s>", "sep_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def build(family: str, num_labels: int = 0, **more: Any) -> Any:
    """Return transformers' random model in float32: with a head of so many labels, or 0: without one."""
    config = AutoConfig.for_model(
        family, vocab_size=128, **_SIZES, **FAMILIES[family], num_labels=num_labels or 2, **more
    )
    torch.manual_seed(num_labels)
    model = (AutoModelForSequenceClassification if num_labels else AutoModel).from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model


def saved(folder: Path, family: str, num_labels: int = 0, pooling: str = "", **more: Any) -> Any:
    """Write a checkpoint with its tokenizer, and return transformers' model.

    `pooling`: the mode that files of Sentence Transformers name, with normalised vectors; empty: there are none.
    """
    model = build(family, num_labels, **more)
    model.save_pretrained(folder)
    tokenizer_of(family).save_pretrained(folder)
    if pooling:
        (folder / "1_Pooling").mkdir()
        modes = {f"pooling_mode_{each}": each == pooling for each in ("cls_token", "mean_tokens", "max_tokens")}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **modes}))
        names = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
        modules = [{"path": path, "type": f"sentence_transformers.models.{name}"} for name, path in names.items()]
        (folder / "modules.json").write_text(json.dumps(modules))
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
