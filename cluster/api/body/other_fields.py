"""Fields of OpenAI's and vLLM's requests that this server knows and does not honour.

No field is ignored in silence. A field without effect here is accepted. A field that would change the answer is refused
by name, except with a value that asks for nothing. Any other field is refused as unknown, as OpenAI does: a name may be
misspelt.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from crossdock.cluster.api.errors import ApiError, shown

_LONGEST_NAME = 40  # characters; a longer unknown name resembles none
_TEXT_ONLY = "answers are text alone"


@dataclass(frozen=True, slots=True)
class RefusedField:
    """A field that would change the answer. `neutral`: the values that ask for nothing; null is always one."""

    reason: str  # and, where there is one, the other way to the same end
    neutral: tuple[Any, ...] = ()
    details: Mapping[str, Any] | None = None  # of the error, for clients that read them and go on in another way


NO_EFFECT: Mapping[str, str] = {
    "guided_decoding_backend": "one backend serves all structured output",
    "metadata": "completions and chats are not stored, so there is nothing to label",
    "mm_payload": "for vLLM's render endpoints alone",
    "prediction": "it makes OpenAI's answers faster, not different",
    "prompt_cache_options": "cached pages stay until their place is needed",
    "return_mm_kwargs": "for vLLM's render endpoints alone",
    "return_weight_versions": "answers have them wherever an update has replaced the weights of the start",
    "routed_experts_prompt_start": "answers have no data on experts",
    "safety_identifier": "nothing is kept about end users",
    "session_id": "the router finds the replica that has the conversation in its cache",
    "spaces_between_special_tokens": "tokenizers here put no spaces there, with either value",
    "stream_options.include_obfuscation": "events are not padded",
    "user": "nothing is kept about end users",
}

REFUSED: Mapping[str, RefusedField] = {
    "audio": RefusedField(_TEXT_ONLY),
    "best_of": RefusedField("outputs are not ranked; use 'n'", (1,)),
    "detokenize": RefusedField("answers always have text; 'return_token_ids' adds the token ids", (True,)),
    "documents": RefusedField("completions have no template; write the documents into the prompt", ([],)),
    "early_stopping": RefusedField("there is no beam search; use 'n' with a temperature", (False,)),
    "ec_transfer_params": RefusedField("pictures are encoded where the prompt is computed", ({},)),
    "function_call": RefusedField("use 'tools' and 'tool_choice'", ("none", "auto")),
    "functions": RefusedField("use 'tools'", ([],)),
    "guided_whitespace_pattern": RefusedField("write the white space into a 'guided_grammar' or 'guided_regex'"),
    "include_reasoning": RefusedField("completions are text alone; use /v1/chat/completions", (True,)),
    "kv_transfer_params": RefusedField("pages travel between pools by themselves", ({},)),
    "length_penalty": RefusedField("there is no beam search; use 'n' with a temperature", (1,)),
    "logits_processors": RefusedField("use 'logit_bias', 'bad_words' or 'allowed_token_ids'", ([],)),
    "media_io_kwargs": RefusedField("completions are text alone; use /v1/chat/completions", ({},)),
    "mm_processor_kwargs": RefusedField("the server's --mm-processor-kwargs hold for all requests", ({},)),
    "modalities": RefusedField(_TEXT_ONLY, (["text"],)),
    "moderation": RefusedField("there is no moderation model; call one yourself"),
    "prompt_embeds": RefusedField("send the prompt as text or token ids"),
    "reasoning_effort": RefusedField("completions have no template; use /v1/chat/completions", ("none",)),
    "repetition_detection": RefusedField("use 'repetition_penalty', 'stop' or 'max_tokens'"),
    "return_prompt_text": RefusedField(
        "send the token ids of 'return_token_ids' to /detokenize, or use 'echo' of completions", (False,)
    ),
    "return_token_offsets": RefusedField("for vLLM's render endpoints; use 'text_offset' of 'logprobs'", (False,)),
    "store": RefusedField("completions and chats are not stored; use /v1/responses", (False,)),
    "stream_interval": RefusedField("every event has the tokens of one step", (1,)),
    "structured_outputs.disable_additional_properties": RefusedField(
        "a property that the schema does not declare is generated only where the schema asks for more", (False, True)
    ),
    "structured_outputs.disable_any_whitespace": RefusedField("use 'structured_outputs.grammar'", (False,)),
    "structured_outputs.structural_tag": RefusedField("use 'structured_outputs.grammar'"),
    "structured_outputs.whitespace_pattern": RefusedField("use 'structured_outputs.grammar'"),
    "suffix": RefusedField("write the prompt in the model's own fill-in-the-middle format", ("",)),
    "thinking_token_budget": RefusedField("completions are text alone; use /v1/chat/completions", (-1,)),
    "use_beam_search": RefusedField("use 'n' with a temperature", (False,)),
    "verbosity": RefusedField("completions have no template; ask for short or long answers in the prompt", ("medium",)),
    "vllm_xargs": RefusedField("there are no extensions that would read it", ({},)),
    "watermarking": RefusedField("answers have no watermark", (False,)),
    "web_search_options": RefusedField("search yourself, and put what you find into the messages"),
}


def check_other_fields(
    data: Mapping[str, Any],
    honoured: Collection[str],
    parent: str = "",
    *,
    no_effect: Mapping[str, str] = NO_EFFECT,
    refused_fields: Mapping[str, RefusedField] = REFUSED,
) -> None:
    """Raise ApiError for the first field of `data` that is not honoured, would change the answer, or is unknown.

    `parent`: the field whose value `data` is, and a dot; empty for a body. `no_effect`, `refused_fields`: the API's.
    """
    for name, value in data.items():
        path = parent + name
        if name in honoured or value is None or path in no_effect:
            continue
        refused = refused_fields.get(path)
        if refused is None:
            raise _unknown(name, honoured, parent)
        if not any(type(value) is type(each) and value == each for each in _with_floats(refused.neutral)):
            reason = f"'{path}' is not supported here: {refused.reason}."
            raise ApiError(reason, param=path, code="unsupported_parameter", details=refused.details)


def _with_floats(neutral: tuple[Any, ...]) -> list[Any]:
    """Return the values, and whole numbers also as floats: JSON does not tell 1 from 1.0."""
    return [*neutral, *(float(value) for value in neutral if type(value) is int)]


_ELSEWHERE = {  # fields of a completion or a chat that belong to another place
    "extra_body": "Write its fields into the body itself: it is an argument of OpenAI's Python client.",
    "messages": "Chats have it: /v1/chat/completions.",
    "prompt": "Completions have it: /v1/completions.",
}


def _unknown(name: str, honoured: Collection[str], parent: str) -> ApiError:
    if not parent and name in _ELSEWHERE and "input" not in honoured:
        reason = f"Unrecognized request argument: '{name}'. {_ELSEWHERE[name]}"
        return ApiError(reason, param=name, code="unknown_parameter")
    similar = get_close_matches(name, honoured, 1) if len(name) <= _LONGEST_NAME else []
    hint = f" Did you mean '{parent}{similar[0]}'?" if similar else ""
    path = parent + shown(name)
    return ApiError(f"Unrecognized request argument: '{path}'.{hint}", param=path, code="unknown_parameter")
