"""Prompts that a model's directory names for texts, such as "query: ", in the form of Sentence Transformers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from crossdock.cluster.api.errors import ApiError, shown, wrong

FILE = "config_sentence_transformers.json"


@dataclass(frozen=True, slots=True)
class TextPrompts:
    """The texts that stand before the texts of requests, by name. `default`: the one of requests that name none."""

    by_name: Mapping[str, str] = field(default_factory=dict)
    default: str = ""

    @classmethod
    def read(cls, fields: Mapping[str, Any], *, is_pooled: bool) -> Self:
        """Return the prompts that the fields of FILE give.

        `is_pooled`: the model's vectors hold their prompts' tokens too.

        Raises:
            ValueError: a field is wrong, or the vectors of all texts would leave out the tokens of a prompt.
        """
        by_name = fields.get("prompts") or {}
        if not isinstance(by_name, dict) or not all(isinstance(text, str) for text in by_name.values()):
            raise ValueError(f"model: {FILE}: prompts must be an object of texts")
        name = fields.get("default_prompt_name")
        if name is not None and name not in by_name:
            raise ValueError(f"model: {FILE}: default_prompt_name {name!r} is no name of prompts")
        default = "" if name is None else by_name[name]
        if not is_pooled and default:
            raise ValueError(
                f"model: {FILE} puts {default!r} before all texts, and the pooling leaves its tokens out of vectors "
                "(include_prompt: false), which is not served; set default_prompt_name to null in a copy"
            )
        return cls(by_name if is_pooled else {}, default)

    def added(self, given: Any, name: str | None) -> Any:
        """Return texts, each behind the prompt `name`; None: behind the default. Token ids have no prompt.

        Raises:
            ApiError: there is no prompt with this name, or token ids are given with a name.
        """
        if name is not None and name not in self.by_name:
            known = ", ".join(repr(shown(each)) for each in sorted(self.by_name)) or "none"
            raise wrong("prompt_name", f"this model names these prompts: {known}")
        prompt = self.default if name is None else self.by_name[name]
        if isinstance(given, str):
            return prompt + given
        if isinstance(given, list) and given and all(isinstance(each, str) for each in given):
            return [prompt + each for each in given]
        if name is not None:
            reason = "'prompt_name' needs texts: token ids already hold all that the model reads."
            raise ApiError(reason, param="prompt_name", code="invalid_value")
        return given
