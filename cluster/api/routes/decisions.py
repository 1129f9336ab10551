"""POST /v1/decisions: probabilities of the answers to typed questions about one input, as OpenAI and vLLM have them.

Each question is a chat that ends with the question and a label for each possible answer. The log-probabilities of the
labels, as the first token of the model's answer, are the answer. All prompts begin with the input.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

from fastapi import Request, Response

from crossdock.cluster.api.body.decision_body import DecisionChat, DecisionCompletion, DecisionRequest, Question
from crossdock.cluster.api.errors import ApiError, wrong
from crossdock.cluster.api.http.http_json import long_json_answer
from crossdock.cluster.api.routes.generation import Generation, Generations
from crossdock.cluster.api.text.choices import Output, Prompt
from crossdock.cluster.api.text.labels import AnswerLabels
from crossdock.cluster.api.text.message_format import MessageFormat
from crossdock.cluster.api.text.pairs import PairPrompts
from crossdock.cluster.api.text.prompts import PromptEncoder
from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.dispatch.dispatcher import ReplicaLost

_BORDER = "Question:"  # begins a line: a word never reaches across it
_LONG = 128  # tokens of a common beginning; not measured: a further step costs more than to compute a few tokens again


class Decisions:
    def __init__(
        self,
        generations: Generations,
        encoder: PromptEncoder,
        tokenizer: ModelTokenizer,
        message_format: MessageFormat,
    ) -> None:
        self._generations = generations
        self._encoder = encoder
        self._tokenizer = tokenizer
        self._format = message_format
        self._labels = AnswerLabels(tokenizer)

    async def create(self, request: Request, body: DecisionRequest) -> Response:
        questions = body.asked()
        chat = partial(_chat, body.messages())
        completion = DecisionCompletion(prompt="", max_tokens=1, n=1, label_ids=(), **body.passed())
        generation = self._generations.begin(request, completion)
        if not self._tokenizer.has_chat_template:
            reason = "This model has no chat template, so that it cannot be asked questions."
            raise ApiError(reason, param="model", code="unsupported_value")
        try:
            labels = await self._labels_for(chat, questions)
            generation.body = completion.model_copy(update={"label_ids": tuple(token_id for _, token_id in labels)})
            prompts = await self._prompts(request, generation, chat, questions, [label for label, _ in labels])
        except ApiError as error:
            raise DecisionChat.renamed(error) from None
        if not self._format.answers_at_once(prompts[0].token_ids):
            reason = "This model reasons, or names a channel, before it answers: its first token is no answer."
            raise ApiError(reason, param="model", code="unsupported_value")
        await self._generations.add_choices(generation, prompts)
        outputs = await self._outputs(generation, prompts)
        answers = [_answer(question, output) for question, output in zip(questions, outputs, strict=True)]
        model = generation.head("", "")["model"]
        return await long_json_answer({"model": model, "answers": answers, "usage": _usage(generation)})

    async def _labels_for(self, chat: Any, questions: Sequence[Question]) -> Sequence[tuple[str, int]]:
        """Return as many labels as the question with the most options needs. Raises ApiError: there are fewer."""
        most = max(range(len(questions)), key=lambda i: len(questions[i].options))
        num = len(questions[most].options)
        text, _ = await self._encoder.rendered(chat("", "."))
        labels = await self._labels.after(text, num)
        if len(labels) < num:
            field = "levels" if questions[most].kind == "score" else "choices"
            param = "type" if questions[most].kind == "predicate" else field
            reason = f"this model's tokenizer has {len(labels)} labels of one token, and the question needs {num}"
            raise wrong(f"questions[{most}].{param}", reason)
        return labels

    async def _prompts(
        self,
        request: Request,
        generation: Generation,
        chat: Any,
        questions: Sequence[Question],
        labels: Sequence[str],
    ) -> list[Prompt]:
        makes = PairPrompts(
            self._encoder,
            self._tokenizer,
            generation.body,
            generation.card,
            request.state.memory,
            "input",
            generation.salt,
        )
        return await makes.judged([("", question.written(labels)) for question in questions], chat, _BORDER)

    async def _outputs(self, generation: Generation, prompts: Sequence[Prompt]) -> list[Output]:
        """Return the output of each prompt.

        The first prompt goes alone where all have a long beginning: its pages then serve the others.
        """
        alike = takewhile(
            lambda tokens: tokens[0] == tokens[1], zip(prompts[0].token_ids, prompts[-1].token_ids, strict=False)
        )
        firsts = 1 if len(prompts) > 1 and sum(1 for _ in alike) >= _LONG else 0
        parts = (generation.choices[:firsts], generation.choices[firsts:])
        wholes = [await self._generations.whole_outputs(replace(generation, choices=part)) for part in parts if part]
        return [output for whole in wholes for output in whole]


def _chat(messages: Sequence[dict[str, Any]], _: str, question: str) -> DecisionChat:
    """Return the chat that asks a question after the messages of an input."""
    *before, last = messages
    content = f"{last['content'].rstrip()}\n{_BORDER} {question}".lstrip()  # one line break divides words everywhere
    asked = [*before, {"role": "user", "content": content}]
    return DecisionChat.of({"messages": asked, "chat_template_kwargs": {"enable_thinking": False}})


def _answer(question: Question, output: Output) -> dict[str, Any]:
    if not output.positions or output.positions[0][1] is None:
        raise ReplicaLost("the replica gave no log-probabilities")
    listed = [logprob for _, logprob in output.positions[0][1].top]
    return question.answer(listed[: len(question.options)])


def _usage(generation: Generation) -> dict[str, Any]:
    numbers = generation.usage()
    cached = numbers["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": numbers["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": numbers["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": numbers["total_tokens"],
    }
