"""The script that trains a head of EAGLE-3: training drafts as the head will in an engine, and learns from it."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from crossdock.workers.draft.eagle_config import EagleConfig
from crossdock.workers.draft.eagle_head import EagleHead
from crossdock.workers.model.load import wrap_module
from crossdock.workers.schedule.request.submission import SamplingParams, Submission
from tests.benchmarks.scripts import script
from tests.workers.draft.eagle_reference import LAYERS, EagleReference, write_head
from tests.workers.draft.noted_heads import head_config, noting
from tests.workers.replica.engines import tokens_of
from tests.workers.replica.speculating import History, engine_of, module, serve

recipe = script("models/eagle_head")
gain = script("models/head_gain")


def chat_of(recipe: ModuleType, target: PreTrainedModel, tokens: list[int], num_prompt: int, layers: Any) -> Any:
    """Return a chat as the script keeps it."""
    with torch.inference_mode():
        run: Any = target
        found = run(torch.tensor(tokens[:-1])[None], output_hidden_states=True, use_cache=False).hidden_states
    states = torch.cat([found[layer][0] for layer in layers], -1)
    return recipe.Chat(torch.tensor(tokens), states, found[-1][0], num_prompt)


def test_training_drafts_in_a_row_what_plain_torch_drafts(recipe: ModuleType, tmp_path: Path) -> None:
    """Two chats of unequal length, each a text and its drafts: the drafts after that text are known."""
    folder = write_head(tmp_path, module())
    target: Any = module.__wrapped__()
    reference, head = EagleReference(folder, target), EagleHead.load(folder, torch.float32, torch.device("cpu"))
    texts = [[3 + 11 * n % 250 for n in range(40)], [5 + 7 * n % 250 for n in range(23)]]
    drafts = [reference.drafts(text, 3) for text in texts]
    tokens = [[*text, *found, 9] for text, found in zip(texts, drafts, strict=True)]
    chats = [chat_of(recipe, target, each, 10, LAYERS) for each in tokens]
    embedding = head.embed_tokens.weight if head.embed_tokens is not None else None
    drill = recipe.Drill(head, embedding, torch.arange(head.config.draft_vocab_size), chats)
    drill.scale = torch.ones_like(drill.scale)  # else a head to train, whose weights are for scaled states
    for number, (logits, rows) in enumerate(drill.drafts(chats)):
        found = dict(zip(map(tuple, rows.tolist()), logits.argmax(-1).tolist(), strict=True))
        for chat, text in enumerate(texts):
            assert found[chat, len(text) - 2 + number] == drafts[chat][number]
            assert min(at for each, at in found if each == chat) == 9 + number
    assert [share > 0 for share in drill.accepted(chats)] == [True] * recipe.DRAFTS


class Letters:
    """A tokenizer of chats: each letter is a token."""

    def apply_chat_template(self, chat: list[dict[str, str]], **options: bool) -> Any:
        text = f"<{chat[0]['content']}>"
        return text if options.get("tokenize") is False else self.encode(text)

    def encode(self, text: str, **_options: bool) -> list[int]:
        return [3 + ord(letter) % 250 for letter in text]

    def decode(self, tokens: list[int], **_options: bool) -> str:
        return "".join(chr(token) for token in tokens)


def test_text_that_the_model_writes_comes_with_the_states_of_its_answers(recipe: ModuleType) -> None:
    model = wrap_module(module.__wrapped__())
    chats = recipe.Writer(model, Letters(), 2, 9).write()
    assert len(chats) == 2
    for chat in chats:
        same = chat_of(recipe, module.__wrapped__(), chat.tokens.tolist(), chat.num_prompt, recipe.layers_of(model))
        assert len(chat.tokens) > chat.num_prompt > 1
        torch.testing.assert_close(chat.states.float(), same.states, atol=0.02, rtol=0.02)
        torch.testing.assert_close(chat.hidden.float(), same.hidden, atol=0.02, rtol=0.02)


@pytest.fixture
def trained(recipe: ModuleType, tmp_path: Path) -> tuple[Any, list[Any], list[list[int]], list[float]]:
    """Return a drill after some training, its chats, their prompts and what it accepted before."""
    target, model = module.__wrapped__(), wrap_module(module.__wrapped__())
    prompts = [[3 + (number + 5) * at % 250 for at in range(8)] for number in range(4)]
    greedy = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    works = [Submission(str(number), prompt, greedy) for number, prompt in enumerate(prompts)]
    answers = serve(engine_of(), History(works, [0] * 4, {}))[0]
    layers = recipe.layers_of(model)
    chats = [
        chat_of(recipe, target, [*prompt, *tokens_of(answers[str(number)])], len(prompt), layers)
        for number, prompt in enumerate(prompts)
    ]
    head, kept = recipe.new_head(model, target, chats, 100)
    plain: Any = target
    drill = recipe.Drill(head, plain.get_input_embeddings().weight.detach(), kept, chats)
    before = drill.accepted(chats)
    recipe.train(drill, [*chats, *chats * 2], 150, 3e-3)
    recipe.write_head(drill, tmp_path)
    return drill, chats, prompts, before


def test_trained_head_drafts_in_an_engine_as_in_training(
    recipe: ModuleType, trained: tuple[Any, list[Any], list[list[int]], list[float]], tmp_path: Path
) -> None:
    drill, chats, prompts, before = trained
    after = drill.accepted(chats)
    assert after[0] > max(2 * before[0], 0.5), (before, after)
    assert EagleConfig.read(tmp_path).layers == recipe.layers_of(wrap_module(module.__wrapped__()))
    greedy = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    works = [Submission(str(number), prompt, greedy) for number, prompt in enumerate(prompts)]
    engine = engine_of(speculative_config=head_config(tmp_path, 3), enable_prefix_caching=False)
    answers = {str(number): chat.tokens[chat.num_prompt :].tolist() for number, chat in enumerate(chats)}
    noted = noting(engine, answers)
    serve(engine, History(works, [0] * 4, {}))
    known = {
        (chat, at): int(drill.kept[row])
        for logits, rows in drill.drafts(chats)[:1]
        for (chat, at), row in zip(rows.tolist(), logits.argmax(-1).tolist(), strict=True)
    }
    checked = 0
    for text, drafts in noted.notes:
        chat = next(number for number, prompt in enumerate(prompts) if text[:8] == prompt)
        if (chat, len(text) - 2) in known:
            assert drafts[0] == known[chat, len(text) - 2]
            checked += 1
    assert checked > 20


def test_gain_counts_tokens_drafts_and_steps_of_streams(gain: ModuleType, tmp_path: Path) -> None:
    """A random head: few of its drafts are accepted, and answers are the same."""
    settings = gain.settings_of(write_head(tmp_path, module()))
    assert list(settings) == ["none", "lookup, 1", "lookup, 2", "head, 1", "head, 2"]
    prompts = [[3 + (number + 5) * at % 250 for at in range(8)] for number in range(3)]
    rows, wanted = {}, None
    for name, config in settings.items():
        found, answers = gain.serve(engine_of(speculative_config=config), prompts, 2, 20)
        wanted = wanted or answers
        assert answers == wanted
        assert found.tokens == sum(map(len, answers)) == found.parts + found.accepted
        assert (found.drafted > 0) == (name != "none")
        assert found.firsts_accepted <= found.firsts <= found.drafted
        rows[name] = found._replace(answers=3, same=3).row
    assert len(gain.table(rows).splitlines()) == 2 + len(settings)
