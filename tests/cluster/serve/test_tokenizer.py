"""The tokenizer and the chat template that the configuration names."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from crossdock.cluster.config import ModelConfig
from crossdock.cluster.serve.command import example
from crossdock.cluster.serve.tokenizer import load_tokenizer

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def model(tmp_path: Path, tokenizers: dict[str, PreTrainedTokenizerFast]) -> Path:
    """A directory with a tokenizer and the configuration of a model of 620 tokens."""
    folder = tmp_path / "model"
    tokenizers["byte_level"].save_pretrained(folder)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 620}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def settings(model: Path, **given: str) -> ModelConfig:
    return ModelConfig.model_validate({"path": str(model)} | given)


def test_template_in_a_file_or_in_one_line_is_that_of_all_chats(model: Path, tmp_path: Path) -> None:
    line = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    file = tmp_path / "template.jinja"
    file.write_text(line)
    for given in (line, str(file)):
        tokenizer = load_tokenizer(model, settings(model, chat_template=given))
        assert tokenizer.render_chat(HI) == "<Hi>"
        assert not tokenizer.takes_parts
    assert load_tokenizer(model, settings(model)).render_chat(HI) != "<Hi>"


def test_newlines_of_a_template_in_one_line_are_written_as_in_vllm(model: Path) -> None:
    tokenizer = load_tokenizer(model, settings(model, chat_template=r"a\n{{ messages[0].content + '\n' }}b"))
    assert tokenizer.render_chat(HI) == "a\nHi\nb"


def test_template_that_refuses_a_chat_is_a_template(model: Path) -> None:
    line = "{% if messages|length < 2 %}{{ raise_exception('two') }}{% endif %}x"
    tokenizer = load_tokenizer(model, settings(model, chat_template=line))
    assert tokenizer.render_chat(HI * 2) == "x"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("absent.jinja", "chat_template: absent.jinja cannot be read"),
        ("{% for %}", "chat_template: line 1 is not Jinja"),
    ],
)
def test_mistake_in_the_template_is_named_at_the_start(model: Path, given: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_tokenizer(model, settings(model, chat_template=given))


def test_content_in_parts_is_for_templates_that_ask_for_it(model: Path) -> None:
    assert load_tokenizer(model, settings(model, chat_template_content_format="openai")).takes_parts


def test_another_tokenizer_is_used_if_its_ids_are_the_models(
    model: Path, tmp_path: Path, tokenizers: dict[str, PreTrainedTokenizerFast]
) -> None:
    other = tmp_path / "other"
    backend = tokenizers["byte_level"]
    backend.save_pretrained(other)
    (other / "chat_template.jinja").write_text("other {{ messages[0].content }}")
    tokenizer = load_tokenizer(model, settings(model, tokenizer=str(other)))
    assert tokenizer.render_chat(HI) == "other Hi"

    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    with pytest.raises(ValueError, match=r"tokenizer: .* has token ids up to \d+; the model has 100 tokens"):
        load_tokenizer(model, settings(model, tokenizer=str(other)))


def test_tokenizer_that_is_not_there_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, message in (("empty", "has neither tokenizer.json"), ("absent", "tokenizer: model directory")):
        with pytest.raises(ValueError, match=message):
            load_tokenizer(model, settings(model, tokenizer=str(tmp_path / name)))


def test_ingress_that_is_not_forked_loads_a_tokenizer_without_torch(model: Path) -> None:
    load = f"""
import sys
from crossdock.cluster.config import ModelConfig
from crossdock.cluster.serve import ingress
ingress._keep_torch_out()
config = ModelConfig.model_validate(dict(path={str(model)!r}))
ingress.load_tokenizer(config.folder(), config)
assert "transformers" in sys.modules and not sys.modules["torch"]
"""
    subprocess.run([sys.executable, "-c", load], check=True, timeout=240)


def test_request_that_a_start_shows_is_one_that_the_model_answers(model: Path, tmp_path: Path) -> None:
    chats, prompts = "/v1/chat/completions", "/v1/completions"
    assert example(settings(model))[0] == chats
    other = tmp_path / "tokenizer"
    shutil.copytree(model, other)
    (model / "chat_template.jinja").unlink()
    cases: tuple[dict[str, str], ...] = ({}, {"tokenizer": str(other)}, {"chat_template": "{{ messages[0].content }}"})
    for given in cases:
        path, fields = example(settings(model, **given))
        assert path == (chats if given else prompts)
        assert [*json.loads(f"{{{fields}}}")] == ["messages" if given else "prompt"]
        assert load_tokenizer(model, settings(model, **given)).has_chat_template == bool(given)
    for file in ("chat_template.json", "tokenizer_config.json"):  # of older checkpoints
        beside = json.loads((model / file).read_text()) if (model / file).is_file() else {}
        (model / file).write_text(json.dumps(beside | {"chat_template": "{{ messages[0].content }}"}))
        assert example(settings(model))[0] == chats
        assert load_tokenizer(model, settings(model)).has_chat_template
        (model / file).write_text(json.dumps(beside))
    (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForSequenceClassification"]}))
    assert example(settings(model))[0] == "/classify"
