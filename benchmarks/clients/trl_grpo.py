"""Does TRL's GRPO trainer train against two replicas of this server? Prints rewards and weight versions, step by step.

    python -m venv VENV && VENV/bin/pip install torch==2.13.0 trl==1.16.0 requests
    python benchmarks/clients/trl_grpo.py --trl VENV --steps 20

Serves the embedded model with `--enable-rollouts --logprobs-mode processed_logprobs`, and trains it in a process of
VENV, offline, on CPUs. TRL's trainer and its client are as published, but for the tensors: TRL sends them by NCCL, that
needs GPUs, so a subclass of its client sends them by gloo. The reward is the share of a completion's characters that
are digits. Ends with an error unless every completion was made by the weights of the last update, from its first token
to its last.
"""

import argparse
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

SUBJECTS = "my phone", "a year", "the price", "the score", "a distance", "the population", "a room", "the bill"
PROMPTS = [f"Give me a number for {subject}." for subject in SUBJECTS]
WAIT = timedelta(seconds=300)


def share_of_digits(completions: list[Any], **_: Any) -> list[float]:
    texts = [each[0]["content"] for each in completions]
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in texts]


def gloo_client(clients: Any) -> Any:
    """Return a subclass of TRL's client that sends tensors by gloo and checks who made each completion."""
    import torch.distributed as dist

    class GlooClient(clients.VLLMClient):  # type: ignore[misc]
        updates = 0

        def init_communicator(self, device: Any = 0) -> None:
            size = self.get_world_size() + 1
            store = dist.TCPStore("127.0.0.1", self.group_port, size, True, WAIT, wait_for_workers=False)
            info = {"master_address": "127.0.0.1", "master_port": self.group_port, "rank_offset": 1, "world_size": size}
            with ThreadPoolExecutor(1) as thread:
                joined = thread.submit(
                    self._post, f"{self.base_url}/init_weight_transfer_engine", json={"init_info": info}
                )
                self.communicator = dist.ProcessGroupGloo(store, 0, size, WAIT)
                joined.result()
            print(f"GROUP: {size} processes, the trainer and a rank of each replica", flush=True)

        def update_named_params(self, metadata: Any, named_params: Any) -> None:
            names, dtypes, shapes = (list(each) for each in zip(*metadata, strict=True))
            info = {"names": names, "dtype_names": dtypes, "shapes": shapes}
            self._start_weight_update()
            with ThreadPoolExecutor(1) as thread:
                received = thread.submit(self._post, f"{self.base_url}/update_weights", json={"update_info": info})
                for _, tensor in named_params:
                    self.communicator.broadcast([tensor.detach().contiguous()], dist.BroadcastOptions()).wait()
                received.result()
            self.updates += 1
            self._post(f"{self.base_url}/finish_weight_update", json={"weight_version": f"update-{self.updates}"})

        def _post(self, url: str, **arguments: Any) -> Any:
            answer = super()._post(url, **arguments)
            for choice in answer.get("choices", ()):
                made_by = choice.get("weight_versions", [])
                wanted = [{"version": f"update-{self.updates}", "start": 0, "end": len(choice["token_ids"])}]
                if self.updates and made_by != wanted:
                    raise RuntimeError(f"a completion was made by {made_by}, not by {wanted}")
            return answer

        def close_communicator(self) -> None:
            self.communicator = None

    return GlooClient


def train(model: str, url: str, steps: int, port: int) -> None:
    """Train, in a process of TRL's environment."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_client, vllm_generation

    for module in (vllm_client, vllm_generation):  # TRL refuses a server without vLLM in the trainer's process
        module.is_vllm_available = lambda *_, **__: True
    vllm_generation.VLLMClient = gloo_client(vllm_client)

    class Shown(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "reward" in logs:
                gap = logs.get("sampling/sampling_logp_difference/max", float("nan"))
                client = trainer.vllm_generation.vllm_client
                text = f"reward {float(logs['reward']):.3f}, largest difference of logprobs {float(gap):.4f}"
                print(f"STEP {state.global_step}: {text}, weights update-{client.updates}", flush=True)

    config = GRPOConfig(
        output_dir="/tmp/trl_grpo",
        use_cpu=True,
        bf16=False,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        vllm_group_port=port,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=24,
        max_steps=steps,
        learning_rate=2e-5,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        model_init_kwargs={"dtype": torch.float32},
    )
    rows = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in PROMPTS]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=share_of_digits,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Shown()],
    )
    trainer.train()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, help="environment of TRL")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    if "--url" in sys.argv:
        given = parser.parse_args()
        train(given.model, given.url, given.steps, free_port())
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from servers import add_server_options, crossdock_server

    from crossdock.workers.model.weights.checkpoint import default_model_dir

    add_server_options(parser, "trl", 31970)
    args = parser.parse_args()
    args.model = default_model_dir()
    flags = ["--pools", "mixed=2", "--max-model-len", "1024", "--enable-rollouts", "--dtype", "float32"]
    exact = ["--cpu-kernels", "torch", "--logprobs-mode", "processed_logprobs"]  # others keep what bfloat16 holds
    with crossdock_server(args, *flags, *exact) as server:
        trainer = [args.trl / "bin" / "python", __file__, "--url", server.address, "--model", str(args.model)]
        subprocess.run([*trainer, "--steps", str(args.steps)], check=True)


if __name__ == "__main__":
    main()
