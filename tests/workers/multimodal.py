"""Tiny random multimodal models, prompts with pictures, and transformers' own pass over them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from crossdock.workers.model.load import wrap_module
from crossdock.workers.model.load_options import LoadOptions
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.schedule.request.items import Item

IMAGE, VIDEO, BREAK, BEGIN, END = 120, 121, 122, 123, 124  # tokens
VOCAB_SIZE = 128
NO_PLACEHOLDERS = ((IMAGE, -100.0), (VIDEO, -100.0))  # as `logit_bias`: transformers takes no placeholder in an output
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # of fused layers
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}}
PLAIN: dict[str, Any] = {"head_dim": 16, "num_attention_heads": 8}  # layers that are not fused
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_QWEN: dict[str, Any] = {
    "depth": 3,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
}
_QWEN3_VISION = {
    **_QWEN,
    "hidden_size": 32,
    "out_hidden_size": 128,
    "intermediate_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}
_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": BEGIN, "vision_end_token_id": END}
CONFIGS: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32, **_VISION},
        "image_token_index": IMAGE,
    },
    "idefics3": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": _VISION,
        "image_token_id": IMAGE,
        "scale_factor": 2,
    },
    "smolvlm": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": _VISION,
        "image_token_id": IMAGE,
        "scale_factor": 2,
    },
    "qwen2_vl": {
        "text_config": {**TEXT, **_MROPE},
        "vision_config": {**_QWEN, "embed_dim": 32, "hidden_size": 128},
        **_TOKENS,
    },
    "qwen2_5_vl": {
        "text_config": {**TEXT, **_MROPE},
        "vision_config": {
            **_QWEN,
            "hidden_size": 32,
            "out_hidden_size": 128,
            "intermediate_size": 64,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
        **_TOKENS,
    },
    "qwen3_vl": {
        "text_config": {**TEXT, **_MROPE},
        "vision_config": _QWEN3_VISION,
        **_TOKENS,
    },
    "qwen3_vl_moe": {
        "text_config": {
            **TEXT,
            **_MROPE,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
        "vision_config": _QWEN3_VISION,
        **_TOKENS,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", "sliding_window": None, **TEXT},
        "vision_config": {"model_type": "pixtral", **_VISION, "image_size": 64},
        "image_token_index": IMAGE,
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
    },
    "pixtral": {
        "model_type": "llava",
        "text_config": {"model_type": "mistral", "sliding_window": None, **TEXT},
        "vision_config": {"model_type": "pixtral", **_VISION, "image_size": 64},
        "image_token_index": IMAGE,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "internvl": {
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {**_VISION, "image_size": [32, 32], "patch_size": [8, 8]},
        "image_token_id": IMAGE,
        "image_seq_length": 4,
        "tie_word_embeddings": False,
    },
    "gemma3": {
        "text_config": {
            **TEXT,
            "query_pre_attn_scalar": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 24,  # more than a picture
        },
        "vision_config": _VISION,
        "image_token_index": IMAGE,
        "boi_token_index": BEGIN,
        "eoi_token_index": END,
        "mm_tokens_per_image": 16,
        "tie_word_embeddings": False,  # else a random model repeats its last token, whatever comes before
    },
}
BOTH_WAYS = ("gemma3",)
"""Families in which a row of a picture sees the later rows of that picture too: no chunk ends inside one."""
OTHER_DECODERS = ("qwen3_vl_moe",)
"""Families whose pictures are another one's, before another decoder. Tests of pictures alone skip them."""
FAMILIES = tuple(family for family in CONFIGS if family not in (*BOTH_WAYS, *OTHER_DECODERS))


def build_multimodal(family: str, **text: Any) -> PreTrainedModel:
    """Return a random fp32 model of a family, the same at every call. `text`: changes to its decoder."""
    settings = {"model_type": family, **CONFIGS[family]}
    settings["text_config"] = {**settings["text_config"], **text}
    if text and "rope_parameters" in settings["text_config"]:
        settings["text_config"] |= {"rope_parameters": {**_MROPE["rope_parameters"], "mrope_section": [2, 3, 3]}}
    torch.manual_seed(0)
    config = AutoConfig.for_model(**settings)
    module: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in module.parameters():  # random weights of 0.02 give pictures that hardly matter
            if parameter.dim() > 1 and not parameter.is_meta and not parameter.any():
                generator = torch.Generator().manual_seed(0)
                torch.nn.init.normal_(parameter, std=0.1, generator=generator)  # Gemma 3's projector begins with zeros
            elif parameter.dim() > 1:
                parameter.mul_(4.0)
    return module


def paged_multimodal(family: str, **text: Any) -> LoadedModel:
    """Return a model of a family behind our attention."""
    return wrap_module(build_multimodal(family, **text), LoadOptions())


def picture(family: str, seed: int, size: tuple[int, int] = (2, 2)) -> tuple[list[int], Item]:
    """Return the tokens that stand for a random picture of `size` (rows, columns), and the item, which starts at 0."""
    rng = np.random.default_rng([seed, *size])
    height, width = size
    tensors: dict[str, NDArray[Any]] = {}
    if family.startswith("qwen"):
        grid = np.array([[1, 2 * height, 2 * width]])
        tensors = {"pixel_values": _noise(rng, int(grid.prod()), 3 * 2 * 4 * 4), "image_grid_thw": grid}
        tokens = [BEGIN, *[IMAGE] * (height * width), END]
    elif family in ("mistral3", "pixtral"):
        side = 16 if family == "mistral3" else 8
        shape = (height * side, width * side)
        tensors = {"pixel_values": _noise(rng, 1, 3, *shape), "image_sizes": np.array([shape])}
        tokens = [token for _ in range(height) for token in [*[IMAGE] * width, BREAK]]
        tokens[-1] = END
    elif family == "gemma3":
        tensors, tokens = {"pixel_values": _noise(rng, 1, 3, 32, 32)}, [BEGIN, *[IMAGE] * 16, END]
    elif family == "llava":
        tensors, tokens = {"pixel_values": _noise(rng, 1, 3, 32, 32)}, [IMAGE] * 16
    else:  # tiles, each of four rows
        tiles = height * width
        tensors = {"pixel_values": _noise(rng, tiles, 3, 32, 32)}
        if family in ("idefics3", "smolvlm"):
            tensors = {
                "pixel_values": tensors["pixel_values"][None],
                "pixel_attention_mask": np.ones((1, tiles, 32, 32), np.int64),
            }
        tokens = [token for _ in range(tiles) for token in [BEGIN, *[IMAGE] * 4]] + [END]
    return tokens, Item(0, len(tokens), tokens.count(IMAGE), "image", rng.bytes(16), tensors)


def video(seed: int, frames: int, size: tuple[int, int] = (2, 2)) -> tuple[list[int], Item]:
    """Return the tokens and the item of a random video of Qwen2-VL's and Qwen2.5-VL's kind."""
    rng = np.random.default_rng([seed, frames, *size])
    grid = np.array([[frames, 2 * size[0], 2 * size[1]]])
    tensors: dict[str, NDArray[Any]] = {
        "pixel_values_videos": _noise(rng, int(grid.prod()), 3 * 2 * 4 * 4),
        "video_grid_thw": grid,
        "second_per_grid_ts": np.array([2.0]),
    }
    tokens = [BEGIN, *[VIDEO] * (frames * size[0] * size[1]), END]
    return tokens, Item(0, len(tokens), tokens.count(VIDEO), "video", rng.bytes(16), tensors)


@dataclass(frozen=True, slots=True)
class PicturePrompt:
    """A prompt of text and pictures."""

    token_ids: list[int]
    items: list[Item]

    @classmethod
    def of(cls, *parts: "int | list[int] | tuple[list[int], Item]", seed: int = 0) -> "PicturePrompt":
        """Join parts: random text of so many tokens, given text, or pictures as `picture` returns them."""
        rng, token_ids, items = np.random.default_rng(seed), list[int](), list[Item]()
        for part in parts:
            if isinstance(part, int):
                token_ids += rng.integers(3, 119, part).tolist()
            elif isinstance(part, list):
                token_ids += part
            else:
                tokens, item = part
                items.append(
                    Item(
                        len(token_ids),
                        len(tokens),
                        item.num_embedding_tokens,
                        item.kind,
                        item.content_hash,
                        item.tensors,
                    )
                )
                token_ids += tokens
        return cls(token_ids, items)


def arguments(prompt: PicturePrompt) -> dict[str, Tensor]:
    """Return the prompt as transformers' processors give it to a model."""
    ids = torch.tensor([prompt.token_ids])
    given: dict[str, list[NDArray[Any]]] = {}
    for item in prompt.items:
        for name, tensor in item.tensors.items():
            given.setdefault(name, []).append(tensor)
    tensors = {}
    for name, arrays in given.items():
        is_nested = name in ("pixel_values", "pixel_attention_mask") and arrays[0].ndim == (
            5 if name == "pixel_values" else 4
        )
        if is_nested:
            tensors[name] = torch.from_numpy(np.concatenate(arrays, 1))
        elif name == "pixel_values" and arrays[0].ndim == 4 and len({array.shape for array in arrays}) > 1:
            most = [max(array.shape[axis] for array in arrays) for axis in (2, 3)]
            padded = [np.pad(a, ((0, 0), (0, 0), (0, most[0] - a.shape[2]), (0, most[1] - a.shape[3]))) for a in arrays]
            tensors[name] = torch.from_numpy(np.concatenate(padded))
        else:
            tensors[name] = torch.from_numpy(np.concatenate(arrays))
    if "image_grid_thw" in tensors or "video_grid_thw" in tensors:
        tensors["mm_token_type_ids"] = (ids == IMAGE).long() + 2 * (ids == VIDEO).long()
    return {"input_ids": ids, **tensors}


@torch.inference_mode()
def one_pass(module: Any, prompt: PicturePrompt, output: Sequence[int] = ()) -> Tensor:
    """Return the logits [T, vocab] of transformers' own forward over the prompt and `output`."""
    if hasattr(module.model, "rope_deltas"):
        module.model.rope_deltas = None
    whole = arguments(PicturePrompt([*prompt.token_ids, *output], prompt.items))
    if module.config.model_type in BOTH_WAYS:
        whole["token_type_ids"] = (whole["input_ids"] == IMAGE).long()
    logits: Tensor = module(**whole, use_cache=False).logits[0]
    return logits


def continuation(module: Any, prompt: PicturePrompt, num_tokens: int) -> list[int]:
    """Return transformers' greedy tokens, by one whole pass for each; none is a placeholder, see `NO_PLACEHOLDERS`."""
    output = list[int]()
    for _ in range(num_tokens):
        logits = one_pass(module, prompt, output)[-1].clone()
        logits[IMAGE : VIDEO + 1] = -torch.inf
        output.append(int(logits.argmax()))
    return output


def assert_continues(module: Any, prompt: PicturePrompt, tokens: list[int]) -> None:
    """Assert that each token is transformers' likeliest after those before it, or as likely to within 1e-3."""
    logits = one_pass(module, prompt, tokens[:-1])[len(prompt.token_ids) - 1 :].clone()
    logits[:, IMAGE : VIDEO + 1] = -torch.inf
    behind = logits.max(-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert behind.max() < 1e-3, behind


def _noise(rng: np.random.Generator, *shape: int) -> NDArray[Any]:
    return rng.standard_normal(shape).astype(np.float32)
