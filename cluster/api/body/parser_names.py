"""The names that vLLM and SGLang give to parsers, and the family of models that each means here."""

from collections.abc import Mapping

AUTO = "auto"  # the family that the chat template shows
NONE = "none"  # no parser

TOOL_PARSERS: Mapping[str, str] = {
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v3",
    "deepseek_v32": "deepseek_dsml",
    "deepseek_v4": "deepseek_dsml",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v3",
    "deepseekv32": "deepseek_dsml",
    "deepseekv4": "deepseek_dsml",
    "gemma4": "gemma4",
    "glm": "glm",
    "glm45": "glm",
    "glm47": "glm",
    "gpt-oss": "gpt_oss",
    "hermes": "hermes",
    "internlm": "internlm",
    "interns1": "internlm",
    "kimi_k2": "kimi_k2",
    "kimi_k3": "kimi_k3",
    "lfm2": "lfm2",
    "llama3": "llama3_json",
    "llama3_json": "llama3_json",
    "llama4_pythonic": "llama4_pythonic",
    "minimax-m2": "minimax_m2",
    "minimax_m2": "minimax_m2",
    "mistral": "mistral",
    "openai": "gpt_oss",
    "pythonic": "llama4_pythonic",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_coder": "qwen3_xml",
    "qwen3_xml": "qwen3_xml",
    "seed_oss": "seed_oss",
    "step3": "step3",
    "step3p5": "qwen3_xml",
}
REASONING_PARSERS: Mapping[str, str] = {
    "deepseek-r1": "think",
    "deepseek-v3": "think",
    "deepseek_r1": "think",
    "deepseek_v3": "think",
    "gemma4": "gemma4",
    "glm45": "think",
    "glm47": "think",
    "gpt-oss": "gpt_oss",
    "kimi_k2": "think",
    "interns1": "think",
    "kimi_k3": "kimi_k3",
    "minimax": "think",
    "minimax_m2": "think",
    "mistral": "mistral",
    "nemotron_3": "think",
    "nemotron_v3": "think",
    "openai_gptoss": "gpt_oss",
    "qwen3": "think",
    "qwen3-thinking": "think",
    "seed_oss": "seed_oss",
    "step3": "think",
    "step3p5": "think",
}


def family_of(name: str, parsers: Mapping[str, str]) -> str | None:
    """Return the family that a parser's name means; None for "auto" and "none".

    Raises ValueError for an unknown name.
    """
    if name in (AUTO, NONE):
        return None
    if name not in parsers:
        raise ValueError(f"{name!r} is no parser; it must be {AUTO}, {NONE}, {', '.join(sorted(parsers))}")
    return parsers[name]
