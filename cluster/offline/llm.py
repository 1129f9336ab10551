"""A model in this process: the engine, the templates and the detokenizer of the server, without Ray and HTTP."""

import asyncio
import uuid
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from types import TracebackType
from typing import Any, NoReturn, Self, TypeAlias, TypeVar

from crossdock.cluster.api.body.bodies import ChatCompletionRequest, CompletionRequest
from crossdock.cluster.api.body.embedding_body import ClassifyRequest, EmbeddingRequest
from crossdock.cluster.api.body.generation_defaults import GenerationDefaults
from crossdock.cluster.api.body.pooler_config import EmbeddingDefaults
from crossdock.cluster.api.body.score_body import ScoreRequest
from crossdock.cluster.api.bounds import OUTPUTS
from crossdock.cluster.api.errors import ApiError
from crossdock.cluster.api.http.own_requests import own_request
from crossdock.cluster.api.http.service_tiers import ServiceTiers
from crossdock.cluster.api.routes.embeddings import vector_of
from crossdock.cluster.api.routes.generation import Generation
from crossdock.cluster.api.routes.model_routes import ModelRoutes
from crossdock.cluster.api.text.choices import Output, Prompt
from crossdock.cluster.offline.local_engine import local_engine
from crossdock.cluster.offline.local_replica import LocalReplica
from crossdock.cluster.offline.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    OutputWriter,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from crossdock.cluster.offline.sampling_params import OfflineCompletion, PromptParams
from crossdock.cluster.offline.settings import offline_configuration
from crossdock.cluster.serve.media import open_media
from crossdock.cluster.serve.tokenizer import load_tokenizer
from crossdock.workers.schedule.shares import Shares

PromptInput: TypeAlias = str | Sequence[int] | Mapping[str, Any]
Params: TypeAlias = PromptParams | Sequence[PromptParams] | None
Message: TypeAlias = Mapping[str, Any]
_Result = TypeVar("_Result")
_Progress: TypeAlias = bool | Callable[..., Any]
_NO_BOUND = 1 << 62  # bytes
_OF_VLLM = {
    "encode": "use embed, classify or score",
    "beam_search": "use n with a temperature",
    "get_default_sampling_params": "generate without SamplingParams uses them",
    "reset_prefix_cache": "give prompts a cache_salt: prompts with different ones share nothing",
    "collective_rpc": "calls of workers do not exist",
    "apply_model": "calls of workers do not exist",
    **dict.fromkeys(("sleep", "wake_up"), "close the object, or use a server's /sleep and /wake_up"),
    **dict.fromkeys(("start_profile", "stop_profile"), "use a profiler of Python, such as py-spy"),
    "get_metrics": "a server has /metrics",
    "llm_engine": "the engine is `engine`",
}
_AHEAD = 2  # prompts in flight for each request that may hold pages: the next ones are ready when a page is free


class LLM:
    """Computes prompts with one engine. Names and results are those of vLLM's class.

    Further arguments are the flags of `crossdock serve` that concern the model and its engine, with underscores. One
    thread at a time may use the object. `close` frees what the model holds, as the end of a `with` block does.
    """

    def __init__(self, model: str | None = None, *, seed: int = 0, **settings: Any) -> None:
        """Load a model. `seed`: of prompts whose parameters have none.

        Raises:
            ValueError: a setting does not exist, or the model cannot run with it; the message names the setting.
        """
        config = offline_configuration(model, {"trust_request_chat_template": True, **settings})
        path = config.model.folder()
        self._stack = ExitStack()
        self._seeds = count(seed)
        with self._stack as stack:  # closed where anything below fails
            tokenizer = load_tokenizer(path, config.model)
            engine = stack.enter_context(local_engine(config.replica_spec(config.pools[0])))
            stack.callback(engine.grammars.close)
            if engine.tiers is not None:
                stack.callback(engine.tiers.close)
            media = open_media(path, tokenizer, config.http)
            if media is not None:
                stack.callback(media.close)
            self._loop = stack.enter_context(asyncio.Runner())
            self.routes = ModelRoutes(
                LocalReplica(engine, config.model.name),
                tokenizer,
                config.http,
                ServiceTiers(config.engine.slo_classes, config.engine.default_slo_class),
                GenerationDefaults.read(path, config.model.generation_config, config.model.override_generation_config),
                EmbeddingDefaults.read(path, config.model.pooler_config),
                media=media,
            )
            self._stack = stack.pop_all()
        self.engine = engine
        self._writer = OutputWriter(tokenizer)
        self.most_in_flight = _AHEAD * engine.config.max_num_seqs
        self.memory = Shares(_NO_BOUND)
        self._finalizer = weakref.finalize(self, self._stack.close)

    def close(self) -> None:
        """End the ranks and the processes of this model. The object cannot be used any more."""
        self._finalizer()

    def __getattr__(self, name: str) -> NoReturn:
        """Raise AttributeError; for a name of vLLM's class, with what to use here."""
        reason = f"LLM.{name} does not exist here: {_OF_VLLM[name]}" if name in _OF_VLLM else f"LLM has no {name!r}"
        raise AttributeError(reason, name=name, obj=self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: Params = None,
        *,
        use_tqdm: _Progress = True,
    ) -> list[RequestOutput]:
        """Continue prompts. Returns the outputs in the order of the prompts.

        Args:
            prompts: a text, token ids, {"prompt": …}, {"prompt_token_ids": …}, or a list of these.
            sampling_params: for all prompts, or a list with one for each; None: the model's recommended ones.
            use_tqdm: whether to show the progress, or a function with tqdm's parameters that shows it.

        Raises:
            ValueError: a prompt or a parameter cannot be served; the message names the field.
        """
        given = [_checked(prompt) for prompt in _listed(prompts)]
        bodies = [self._body(params, one) for one, params in zip(given, _each(sampling_params, given), strict=True)]

        async def prompt_of(number: int) -> Prompt:
            found = await self.routes.completions.prompts(bodies[number], self.routes.models.card(None), OUTPUTS)
            return found[0]

        texts = [one if isinstance(one, str) else None for one in given]
        return self.run(self._generate(bodies, texts, prompt_of, use_tqdm))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        use_tqdm: _Progress = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Answer conversations: one, or a list of them. The text of an output is as the model writes it, with the
        marks of tool calls and of reasoning. Arguments and errors are those of `generate` and of the chat template."""
        conversations = _conversations(messages)
        fields = {
            "tools": tools,
            "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
        }
        chats = _refused(lambda: [ChatCompletionRequest.of({**fields, "messages": one}) for one in conversations])
        bodies = [self._body(params, []) for params in _each(sampling_params, conversations)]

        async def prompt_of(number: int) -> Prompt:
            card = self.routes.models.card(None)
            return await self.routes.encoder.encode_chat(chats[number], card, truncates=False, salt="")

        return self.run(self._generate(bodies, [None] * len(chats), prompt_of, use_tqdm))

    def embed(
        self, prompts: PromptInput | Sequence[PromptInput], *, use_tqdm: _Progress = True, **fields: Any
    ) -> list[EmbeddingRequestOutput]:
        """Return the vectors of prompts. `fields`: of /v1/embeddings, such as `pooling` and `dimensions`."""
        given = [_checked(prompt) for prompt in _listed(prompts)]
        bodies = _refused(lambda: [EmbeddingRequest.of({**fields, "input": one}) for one in given])
        pooling = self.routes.pooling

        async def one(number: int) -> EmbeddingRequestOutput:
            body = bodies[number]
            completion = body.completion(pooling)
            normalizes = body.normalizes(pooling)
            (prompt,) = await self.routes.completions.prompts(completion, self.routes.models.card(None), 1)
            generation, (output,) = await self._outputs(completion, prompt)
            vector = vector_of(output, body.dimensions, pooling.dense, normalizes=normalizes)
            return EmbeddingRequestOutput(
                generation.state.request_id, EmbeddingOutput(vector.tolist()), prompt.token_ids
            )

        return self.run(self._all(len(given), one, use_tqdm))

    def classify(
        self, prompts: PromptInput | Sequence[PromptInput], *, use_tqdm: _Progress = True, **fields: Any
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of the model's labels for prompts. `fields`: of /classify."""
        given = [_checked(prompt) for prompt in _listed(prompts)]
        bodies = _refused(lambda: [ClassifyRequest.of({**fields, "input": one}) for one in given])
        head = _refused(self.routes.classification.head)

        async def one(number: int) -> ClassificationRequestOutput:
            completion = bodies[number].completion(head)
            (prompt,) = await self.routes.completions.prompts(completion, self.routes.models.card(None), 1)
            generation, (output,) = await self._outputs(completion, prompt)
            probs = self.routes.classification.numbers(output, bodies[number]).tolist()
            return ClassificationRequestOutput(
                generation.state.request_id, ClassificationOutput(probs), prompt.token_ids
            )

        return self.run(self._all(len(given), one, use_tqdm))

    def score(
        self, data_1: str | list[str], data_2: str | list[str], *, use_tqdm: _Progress = True, **fields: Any
    ) -> list[ScoringRequestOutput]:
        """Return how well texts fit texts: one and many, or as many on both sides. `fields`: of /v1/score."""
        whole = _refused(lambda: ScoreRequest.of({**fields, "text_1": data_1, "text_2": data_2}))
        pairs = _refused(whole.pairs)

        async def one(number: int) -> ScoringRequestOutput:
            left, right = pairs[number]
            request = own_request(uuid.uuid4().hex, self.memory)
            body = whole.model_copy(update={"text_1": left, "text_2": right})
            _, (score,) = await self.routes.scores.scores(request, body)
            return ScoringRequestOutput(request.state.request_id, ScoringOutput(score))

        return self.run(self._all(len(pairs), one, use_tqdm))

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer: `encode` makes token ids of a text, `decode` a text of token ids."""
        return self.routes.tokenizer

    # -- the event loop ----------------------------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine that uses the engine. Ctrl-C ends its requests, and then raises KeyboardInterrupt.

        Raises:
            ValueError: a request is refused; the message names the field.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return _refused(lambda: self._loop.run(work))
        with ThreadPoolExecutor(1, "llm") as thread:  # in a notebook, whose own loop runs here
            return _refused(thread.submit(self._loop.run, work).result)

    async def _generate(
        self,
        bodies: Sequence[CompletionRequest],
        texts: Sequence[str | None],
        prompt_of: Callable[[int], Awaitable[Prompt]],
        use_tqdm: _Progress,
    ) -> list[RequestOutput]:
        async def one(number: int) -> RequestOutput:
            generation, outputs = await self._outputs(bodies[number], await prompt_of(number))
            return self._writer.request(generation.state.request_id, texts[number], generation.choices, outputs)

        return await self._all(len(bodies), one, use_tqdm)

    async def _outputs(self, body: CompletionRequest, prompt: Prompt) -> tuple[Generation, list[Output]]:
        request = own_request(uuid.uuid4().hex, self.memory)
        generation = self.routes.generations.begin(request, body)
        await self.routes.generations.add_choices(generation, [prompt])
        outputs = await self.routes.generations.whole_outputs(generation)
        request.state.memory.release()
        return generation, outputs

    async def _all(self, num: int, one: Callable[[int], Awaitable[_Result]], use_tqdm: _Progress) -> list[_Result]:
        """Return the results of `one` for each number below `num`. The first error ends the others."""
        room = asyncio.Semaphore(self.most_in_flight)
        bar = _bar(use_tqdm, num)

        async def run(number: int) -> _Result:
            try:
                return await one(number)
            finally:
                room.release()
                if bar is not None:
                    bar.update(1)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = []
                for number in range(num):
                    await room.acquire()
                    tasks.append(group.create_task(run(number)))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            if bar is not None:
                bar.close()
        return [task.result() for task in tasks]

    def _body(self, params: PromptParams | None, prompt: str | list[int]) -> OfflineCompletion:
        """Return the prompt's body. Its seed is the parameters', or the next of this object's."""
        if params is None:
            return OfflineCompletion.of({"prompt": prompt, "seed": next(self._seeds)})
        return params.completion(prompt, **({} if params.seed is not None else {"seed": next(self._seeds)}))


def _refused(work: Callable[[], _Result]) -> _Result:
    """Return the result of `work`. A client's error becomes a ValueError with the same message."""
    try:
        return work()
    except ApiError as error:
        raise ValueError(str(error)) from None


def _listed(prompts: Any) -> Sequence[Any]:
    """Return the prompts as a list: one of token ids is a prompt itself."""
    if isinstance(prompts, str | Mapping) or (prompts and all(type(each) is int for each in prompts)):
        return [prompts]
    return list(prompts)


def _checked(prompt: Any) -> str | list[int]:
    """Return a prompt's text or token ids. ValueError: it has neither."""
    if isinstance(prompt, Mapping):
        if others := prompt.keys() - {"prompt", "prompt_token_ids"}:
            reason = "chat takes pictures, as parts of messages" if "multi_modal_data" in others else "not supported"
            raise ValueError(f"prompts: {', '.join(sorted(others))}: {reason}; give prompt or prompt_token_ids")
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence) and prompt and all(type(each) is int for each in prompt):
        return list(prompt)
    raise ValueError("prompts: each must be a text, a list of token ids, or a dictionary with one of them")


def _conversations(messages: Sequence[Any]) -> list[list[Message]]:
    if messages and isinstance(messages[0], Mapping):
        return [list(messages)]
    return [list(one) for one in messages]


def _each(params: Params, prompts: Sequence[Any]) -> Sequence[PromptParams | None]:
    """Return the parameters of each prompt. ValueError: their number is another one than that of the prompts."""
    if params is None or isinstance(params, PromptParams):
        return [params] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError(f"sampling_params: {len(params)} for {len(prompts)} prompts; give one for all or one for each")
    return params


def _bar(use_tqdm: _Progress, num: int) -> Any:
    if not use_tqdm:
        return None
    from tqdm.auto import tqdm

    return (tqdm if use_tqdm is True else use_tqdm)(total=num, desc="Processed prompts", unit="prompt")
