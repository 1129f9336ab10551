"""Does verl train through the rollout `crossdock` against two replicas? Prints rewards and weight versions by step.

    python -m venv VENV, with verl==0.9.1, its dependencies and crossdock
    python benchmarks/clients/verl_grpo.py --verl VENV --steps 20

Starts a Ray and serves the embedded model in it. A process of VENV then uses verl as published, offline, on CPUs: its
registries resolve `crossdock`, `LLMServerManager` makes the servers, `LLMServerClient` samples, the workers of a
`RayWorkerGroup` hold the policy, `CheckpointEngineManager.update_weights` sends the weights, and `core_algos` has
GRPO's advantages and loss. Of verl's trainers only the loop itself is not run: its engines need GPUs. The reward is the
share of a completion's characters that are digits. Ends with an error unless every token was made by the weights of
the last update, and each update is on both replicas.
"""

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from trl_grpo import PROMPTS, free_port

SAMPLES, TOKENS = 8, 24  # completions of a prompt, tokens of each
REPLICA = "ray::ServeReplica:crossdock:mixed"  # title of a replica's process


def policy_class() -> Any:
    """Return a worker that holds the policy, as verl's `ActorRolloutRefWorker` does, without its engines."""
    import torch
    from transformers import AutoModelForCausalLM
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, compute_policy_loss_vanilla
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.torch_functional import logprobs_from_logits
    from verl.workers.rollout import get_rollout_class

    class Policy(Worker):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.rollout = get_rollout_class("crossdock")(config.rollout, {"_target_": "builtins.dict"}, None)
            self.model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-5, weight_decay=0.0)
            self.actor = omega_conf_to_dataclass(config.actor)

        @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # type: ignore[untyped-decorator]
        async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> None:
            await self.rollout.update_weights(iter(self.model.named_parameters()), global_steps=global_steps)

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
        def learn(self, prompt: list[int], outputs: Any, rewards: list[float]) -> float:
            """Take a step for the completions of one prompt. Returns the largest difference of log-probabilities."""
            width = max(len(ids) for ids, _ in outputs)
            mask, old, scores = (torch.zeros(len(outputs), width) for _ in range(3))
            tokens = torch.zeros(len(outputs), width, dtype=torch.long)
            for row, ((ids, logprobs), reward) in enumerate(zip(outputs, rewards, strict=True)):
                tokens[row, : len(ids)], mask[row, : len(ids)] = torch.tensor(ids), 1
                old[row, : len(ids)], scores[row, len(ids) - 1] = torch.tensor(logprobs), reward
            whole = torch.cat([torch.tensor([prompt] * len(outputs)), tokens], 1)
            logits = self.model(whole).logits[:, len(prompt) - 1 : -1]
            new = logprobs_from_logits(logits, tokens)
            index = np.zeros(len(outputs), dtype=int)
            advantages, _ = compute_grpo_outcome_advantage(scores, mask, index)
            loss, _ = compute_policy_loss_vanilla(old, new, advantages, mask, config=self.actor)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            return float(((new.detach() - old).abs() * mask).max())

    return Policy


def settings(model: str, url: str) -> list[str]:
    """Return the settings that differ from verl's own."""
    rollout = ["name=crossdock", "tensor_model_parallel_size=1", "nnodes=1", "n_gpus_per_node=1", f"n={SAMPLES}"]
    rollout += [f"response_length={TOKENS}"]
    actor = ["ppo_micro_batch_size_per_gpu=1", f"ppo_mini_batch_size={SAMPLES}"]
    parts = {"model": [f"path={model}"], "rollout": rollout, "actor": actor}
    changed = [f"actor_rollout_ref.{part}.{each}" for part, settings in parts.items() for each in settings]
    return [*changed, f"+actor_rollout_ref.rollout.engine_kwargs.crossdock.url={url}"]


async def check_interruption(client: Any, prompts: list[list[int]], victim: int) -> None:
    """Kill a replica while it samples. ValueError: completions differ from a run without a kill, or ended before it."""

    async def sample() -> list[Any]:
        sampling = {"temperature": 1.0, "top_p": 1.0, "logprobs": True, "max_tokens": 8 * TOKENS, "ignore_eos": True}
        asked = [
            client.generate(uuid.uuid4().hex, prompt_ids=prompt, sampling_params=sampling | {"seed": seed})
            for seed, prompt in enumerate(2 * prompts)
        ]
        return [(found.token_ids, found.log_probs) for found in await asyncio.gather(*asked)]

    await sample()  # warms up: its time says nothing about the next runs
    began = time.monotonic()
    whole = await sample()
    seconds = time.monotonic() - began
    kill = asyncio.get_running_loop().call_later(seconds / 4, os.kill, victim, signal.SIGKILL)
    began = time.monotonic()
    found = await sample()
    took = time.monotonic() - began
    if kill.when() > asyncio.get_running_loop().time():
        raise ValueError(f"the run ended after {took:.1f} s, before the kill after {seconds / 4:.1f} s")
    if found != whole:
        raise ValueError("completions after the kill of a replica are not those of a run without it")
    count = sum(len(tokens) for tokens, _ in found)
    shown = f"{seconds:.1f} s, with a kill after a quarter of it {took:.1f} s"
    print(f"INTERRUPTED: {len(found)} completions, {count} tokens and log-probabilities are equal: {shown}", flush=True)


async def train(model: str, url: str, steps: int, victim: int) -> None:
    """Train, in a process of verl's environment that joins the server's Ray."""
    import ray
    from hydra import compose, initialize_config_module
    from transformers import AutoTokenizer
    from verl.checkpoint_engine.base import CheckpointEngineManager
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.workers.rollout.llm_server import LLMServerManager
    from verl.workers.rollout.replica import get_rollout_replica_class

    ray.init(namespace="verl", runtime_env={"py_executable": sys.executable}, log_to_driver=False)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=settings(model, url))
    rollout = config.actor_rollout_ref.rollout
    pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
    policy = RayClassWithInitArgs(ray.remote(policy_class()), config.actor_rollout_ref)
    workers = RayWorkerGroup(pool, policy, use_gpu=False, device_name="cpu")
    print(f"REGISTRY: crossdock is {get_rollout_replica_class('crossdock')}", flush=True)
    manager = await LLMServerManager.create(config, workers)
    client = manager.get_client()
    weights = CheckpointEngineManager(rollout.checkpoint_engine, workers, manager.get_replicas())
    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    as_ids = partial(tokenizer.apply_chat_template, add_generation_prompt=True, tokenize=True, return_dict=False)
    prompts = list(map(as_ids, chats))
    if victim:
        await check_interruption(client, prompts, victim)
    for step in range(1, steps + 1):
        await weights.update_weights(global_steps=step)
        prompt = prompts[step % len(prompts)]
        sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}
        calls = [client.generate(uuid.uuid4().hex, prompt_ids=prompt, sampling_params=sampling) for _ in range(SAMPLES)]
        outputs = await asyncio.gather(*calls)
        for output in outputs:
            made_by = output.extra_fields["weight_versions"]
            if made_by != [{"version": str(step), "start": 0, "end": len(output.token_ids)}]:
                raise RuntimeError(f"tokens of step {step} were made by {made_by}")
        texts = [tokenizer.decode(output.token_ids, skip_special_tokens=True) for output in outputs]
        rewards = [sum(map(str.isdigit, text)) / max(len(text), 1) for text in texts]
        pairs = [(output.token_ids, output.log_probs) for output in outputs]
        [gap] = workers.learn(prompt, pairs, rewards)
        shown = f"reward {sum(rewards) / SAMPLES:.3f}, largest difference of logprobs {gap:.4f}"
        print(f"STEP {step}: {shown}, weights {step}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl", type=Path, help="environment of verl")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--interrupt", action="store_true", help="kill a replica in mid-rollout instead of training")
    parser.add_argument("--victim", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    if "--url" in sys.argv:
        given = parser.parse_args()
        asyncio.run(train(given.model, given.url, given.steps, given.victim))
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from servers import add_server_options, command_line, crossdock_server, end, launch, log_of, processes_of

    from crossdock.workers.model.weights.checkpoint import default_model_dir

    add_server_options(parser, "verl", 31980)
    args = parser.parse_args()
    args.model, port, mark = default_model_dir(), free_port(), uuid.uuid4().hex
    os.environ |= {"RAY_AUTH_MODE": "disabled", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    log = log_of(args, "ray")
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus=8"]
    own = ["--include-dashboard=false", "--node-ip-address=127.0.0.1", f"--port={port}", f"--temp-dir=/tmp/verl-{port}"]
    process = launch([*ray, *own], log, mark)
    os.environ["RAY_ADDRESS"] = f"127.0.0.1:{port}"
    try:
        flags = ["--pools", "mixed=2", "--max-model-len", "1024", "--enable-rollouts"]
        exact = ["--batch-invariant"] if args.interrupt else ["--dtype", "float32", "--cpu-kernels", "torch"]
        with crossdock_server(args, *flags, *exact, "--logprobs-mode", "processed_logprobs") as server:
            trainer = [args.verl / "bin" / "python", __file__, "--url", server.address, "--model", str(args.model)]
            if args.interrupt:
                victims = (pid for pid in processes_of(process.pid, mark) if command_line(pid) == REPLICA)
                trainer += ["--victim", str(next(victims))]
            subprocess.run([*trainer, "--steps", "0" if args.interrupt else str(args.steps)], check=True)
    finally:
        end(process, mark)


if __name__ == "__main__":
    main()
