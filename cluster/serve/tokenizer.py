"""The tokenizer of the served model, with the chat template that the configuration names."""

from pathlib import Path

from crossdock.cluster.api.text.tokenizer import ModelTokenizer
from crossdock.cluster.config import ModelConfig
from crossdock.workers.model.weights.checkpoint import resolve_tokenizer
from crossdock.workers.model.weights.untrusted import read_json_if_any


def load_tokenizer(path: Path, config: ModelConfig) -> ModelTokenizer:
    """Return the tokenizer of the model in the directory `path`.

    Raises:
        ValueError: there is no tokenizer, it has ids that the model lacks, or the template is no template.
    """
    if config.tokenizer is None:
        tokenizer = ModelTokenizer.load(path)
    else:
        from transformers import AutoConfig  # late, as in `ModelTokenizer.load`

        folder = resolve_tokenizer(config.tokenizer, path)
        tokenizer = ModelTokenizer.load(folder)
        size = AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config().vocab_size
        if tokenizer.last_token_id >= size:
            raise ValueError(
                f"tokenizer: {folder} has token ids up to {tokenizer.last_token_id}; the model has {size} tokens: "
                "it is the tokenizer of another model"
            )
    if config.chat_template is not None:
        try:
            tokenizer.set_chat_template(_template(config.chat_template))
        except ValueError as error:
            raise ValueError(f"chat_template: {error}") from None
    elif not tokenizer.has_chat_template and (template := _processor_template(path)) is not None:
        tokenizer.set_chat_template(template)
    form = config.chat_template_content_format
    tokenizer.takes_parts = form == "openai" or (form == "auto" and tokenizer.loses_strings())
    return tokenizer


def has_chat_template(path: Path, config: ModelConfig) -> bool:
    """Report whether the model in the directory `path` answers chats, by its files: no tokenizer is loaded."""
    if config.chat_template is not None:
        return True
    folder = path if config.tokenizer is None else resolve_tokenizer(config.tokenizer, path)
    files = [folder / "chat_template.jinja", *folder.glob("additional_chat_templates/*.jinja")]
    own = read_json_if_any(folder / "tokenizer_config.json").get("chat_template")
    return bool(own or _processor_template(path)) or any(file.is_file() for file in files)


def _processor_template(folder: Path) -> str | None:
    """Return the chat template that older checkpoints of models with pictures keep beside their processor."""
    found = read_json_if_any(folder / "chat_template.json").get("chat_template")
    return found if isinstance(found, str) else None


def _template(text: str) -> str:
    r"""Return the content of a file, or a template in one line, told apart as in vLLM. In one line, \n is a newline."""
    file = Path(text).expanduser()
    if any(character in text for character in "{}\n"):
        return text if "\n" in text else text.replace("\\n", "\n").replace("\\t", "\t")
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}; a template in one line has braces") from None
