"""Train a head of EAGLE-3 on a CPU, on text that the model writes itself.

    nice python benchmarks/models/eagle_head.py HEAD           # about 15 minutes of one core
    nice python benchmarks/models/head_gain.py HEAD            # what its drafts gain

The model writes the user's part of a chat, by sampling after the template's beginning, and answers it greedily. The
states that the head will read are taken from the steps that compute the answers. Then the head learns to draft what the
model draws, two drafts in a row, the second one from its own states (Li et al., arXiv 2503.01840: training-time
test). Its vocabulary is the tokens of the text and the first ones of the model's. It reads the model's embedding, and
its output projection is the model's own.

Prints CPU seconds, and the accepted share of drafts for chats that training leaves out. Writes HEAD in the form of
speculators, and the text beside it: with --text FILE a second run trains on that.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ByteSize
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import log_softmax, pad
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from crossdock.workers.draft.eagle_config import EagleConfig
from crossdock.workers.draft.eagle_head import EagleHead
from crossdock.workers.model.load import load_model
from crossdock.workers.model.model import LoadedModel
from crossdock.workers.model.model_spec import ModelSpec
from crossdock.workers.model.weights.checkpoint import default_model_dir
from crossdock.workers.replica.config import EngineConfig
from crossdock.workers.replica.engine.computing import new_engine
from crossdock.workers.schedule.request.batch import Batch
from crossdock.workers.schedule.request.request import FinishReason
from crossdock.workers.schedule.request.submission import SamplingParams, Submission

DRAFTS = 2  # in a row, that training has the head draft
HELD_OUT = 8  # chats that training leaves out
AT_A_TIME = 2  # chats of a training step
NORM_EPS = 1e-5
MOST_TOKENS_OF_A_QUESTION = 64


@dataclass(frozen=True, slots=True)
class Chat:
    """One answered question: its tokens, and what the model computed of all but the last."""

    tokens: Tensor  # [n + 1]
    states: Tensor  # [n, 3 E], the inputs of three layers
    hidden: Tensor  # [n, E], after the last norm
    num_prompt: int


# -- the text --------------------------------------------------------------------------------------------------------


def layers_of(model: LoadedModel) -> tuple[int, ...]:
    """Return the layers whose inputs the head reads: an early, a middle and the last one."""
    return 2, model.num_hidden_layers // 2, model.num_hidden_layers - 1


class Writer:
    """Has a model write questions and answer them, and keeps the states of the answers: a `StepReader`."""

    reads_last_states = True

    def __init__(self, model: LoadedModel, tokenizer: Any, num_chats: int, num_tokens: int) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.layers = layers_of(model)
        model.tap_layers(self.layers)
        config = EngineConfig(
            kv_cache_memory=ByteSize(1 << 30), max_num_seqs=32, admission="queue", enable_prefix_caching=False
        )
        self.engine = new_engine(model, config)
        self.engine.pipeline.head = self
        self.answer_sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
        self.left = num_chats
        self._tokens: dict[str, list[int]] = {}
        self._prompts: dict[str, list[int]] = {}
        self._kept: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def write(self) -> list[Chat]:
        """Return the chats. A question that does not end in time is left out, and another is asked for."""
        whole = self.tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
        beginning = self.tokenizer.encode(whole[: whole.rindex("?")], add_special_tokens=False)
        chats, asked, open_answers = list[Chat](), 0, 0
        while self.left or open_answers:
            while len(self._tokens) < min(32, self.left + open_answers):
                sampling = SamplingParams(max_tokens=MOST_TOKENS_OF_A_QUESTION, temperature=0.8, top_p=0.95, seed=asked)
                self._add(Submission(f"question {asked}", beginning, sampling))
                asked += 1
            for delta in self.engine.step().deltas:
                self._tokens[delta.request_id] += delta.token_ids
                if delta.finish_reason is None:
                    continue
                tokens = self._tokens.pop(delta.request_id)
                if delta.request_id.startswith("answer"):
                    chats.append(self._chat(delta.request_id, tokens))
                    open_answers -= 1
                elif delta.finish_reason is FinishReason.STOP and self.left:
                    self.left -= 1
                    open_answers += 1
                    self._answer(delta.request_id, tokens)
        return chats

    def _add(self, submission: Submission) -> None:
        self._tokens[submission.id] = []
        self._prompts[submission.id] = list(submission.prompt_token_ids)
        self.engine.add(submission)

    def _answer(self, name: str, question: Sequence[int]) -> None:
        text = self.tokenizer.decode(question, skip_special_tokens=True).strip()
        messages = [{"role": "user", "content": text}]
        prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        self._kept[f"answer to {name}"] = []
        self._add(Submission(f"answer to {name}", prompt, self.answer_sampling))

    def observe(self, batch: Batch, hidden: Tensor | None) -> None:
        """Keep the states of a step's answers. hidden: the last hidden states [T, E]."""
        states = self.model.layer_tap.take(self.layers)
        assert hidden is not None, "they are asked for"
        start = 0
        for part in batch.scheduled:
            kept = self._kept.get(part.request.id)
            if kept is not None:
                rows = slice(start, start + part.num_tokens)
                kept.append((states[rows].bfloat16(), hidden[rows].bfloat16()))
            start += part.num_tokens

    def _chat(self, name: str, answer: list[int]) -> Chat:
        prompt, kept = self._prompts.pop(name), self._kept.pop(name)
        tokens = torch.tensor(prompt + answer)
        states, hidden = (torch.cat(each) for each in zip(*kept, strict=True))
        assert len(states) == len(tokens) - 1, "a chat was preempted: give it more memory"
        return Chat(tokens, states, hidden, len(prompt))


def save_text(chats: Sequence[Chat], file: Path) -> None:
    """Write chats to a file."""
    fields = ("tokens", "states", "hidden")
    tensors = {f"{number} {name}": getattr(chat, name) for number, chat in enumerate(chats) for name in fields}
    save_file(tensors | {"num_prompt": torch.tensor([chat.num_prompt for chat in chats])}, file)


def load_text(file: Path) -> list[Chat]:
    """Return the chats of a file."""
    tensors = load_file(file)
    fields = ("tokens", "states", "hidden")
    return [
        Chat(*(tensors[f"{number} {name}"] for name in fields), num_prompt)
        for number, num_prompt in enumerate(tensors["num_prompt"].tolist())
    ]


# -- training --------------------------------------------------------------------------------------------------------


class Drill:
    """Computes drafts of a head for whole chats at once, as it will draft at each of their positions."""

    def __init__(self, head: EagleHead, embedding: Tensor, kept: Tensor, chats: Sequence[Chat]) -> None:
        self.head = head
        every = torch.cat([chat.states for chat in chats]).float()
        self.scale = every.square().mean(0).sqrt() + 1e-6  # [3 E]: a few numbers of a state are large, always
        self.embedding = embedding  # [vocabulary, E]
        self.kept = kept  # [draft vocabulary], the model's tokens
        self.groups = head.config.layer.num_attention_heads // head.config.layer.num_key_value_heads

    def drafts(self, chats: Sequence[Chat]) -> list[tuple[Tensor, Tensor]]:
        """Return for each draft in a row the logits [N, draft vocabulary] and the rows they are of, [N, 2].

        A row is the number of the chat and the position p that the head reads; it drafts the token at p + 2.
        """
        length = max(len(chat.states) for chat in chats) - 1
        width = self.head.width
        given = torch.stack([_padded(chat.states, length) for chat in chats]).float() / self.scale
        tokens = torch.stack([_padded(chat.tokens[1:], length) for chat in chats])
        states, embeddings = self.head.combined(given).flatten(0, 1), self.embedding[tokens].flatten(0, 1)
        positions = torch.arange(length).repeat(len(chats))
        keys, values, found = list[Tensor](), list[Tensor](), list[tuple[Tensor, Tensor]]()
        for _ in range(DRAFTS):
            rows = self._rows(chats, length, len(found))

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                keys.append(k.unflatten(0, (len(chats), length)))
                values.append(v.unflatten(0, (len(chats), length)))
                return self._attended(q.unflatten(0, (len(chats), length)), keys, values)

            flat = rows[:, 0] * length + rows[:, 1]
            logits, own = self.head(states, embeddings, positions, attend, flat)
            found.append((logits, rows))
            states = torch.zeros(len(states) + 1, width).index_copy(0, flat + 1, own)[:-1]
        return found

    def _rows(self, chats: Sequence[Chat], length: int, number: int) -> Tensor:
        """Return the rows after which draft `number` of a row is one of the answer's tokens."""
        rows = [
            torch.tensor([[chat, at] for at in range(each.num_prompt - 1 + number, min(len(each.states) - 1, length))])
            for chat, each in enumerate(chats)
        ]
        return torch.cat([each.view(-1, 2) for each in rows])

    def _attended(self, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """Return the values that queries [B, L, Hq, D] see, [B L, Hq, D].

        A row of the last pass sees the model's states up to where its drafts began, then a row of each pass since.
        """
        number, length = len(keys) - 1, q.shape[1]
        keys = [each.repeat_interleave(self.groups, 2) for each in keys]
        values = [each.repeat_interleave(self.groups, 2) for each in values]
        scores = torch.einsum("bihd,bjhd->bhij", q, keys[0])
        unseen = torch.ones(length, length, dtype=torch.bool).triu(1 - number)
        scores = scores.masked_fill(unseen, -1e9)
        since = [(keys[at], values[at], number - at) for at in range(1, number + 1)]
        own = [torch.einsum("bihd,bihd->bhi", q, _later(key, by))[..., None] for key, _, by in since]
        weights = (torch.cat([scores, *own], -1) * self.head.scale).softmax(-1)
        seen = torch.einsum("bhij,bjhd->bihd", weights[..., :length], values[0])
        for (_, value, by), weight in zip(since, weights[..., length:].unbind(-1), strict=True):
            seen = seen + weight.transpose(1, 2)[..., None] * _later(value, by)
        return seen.flatten(0, 1)

    def loss(self, chats: Sequence[Chat], projection: Tensor) -> Tensor:
        """Return how far the drafts are from what the model would draw, later drafts counting less."""
        total = torch.zeros(())
        for number, (logits, rows) in enumerate(self.drafts(chats)):
            hidden = torch.stack([chats[chat].hidden[at + 1] for chat, at in rows.tolist()]).float()
            wanted = (hidden @ projection.T).softmax(-1)
            total = total - 0.8**number * (wanted * log_softmax(logits, -1)).sum(-1).mean()
        return total

    @torch.inference_mode()
    def accepted(self, chats: Sequence[Chat]) -> list[float]:
        """Return the share of the first drafts that are accepted, and of later ones with all before them."""
        good: dict[tuple[int, int], bool] = {}
        shares = list[float]()
        for number, (logits, rows) in enumerate(self.drafts(chats)):
            tokens = self.kept[logits.argmax(-1)].tolist()
            found = dict[tuple[int, int], bool]()
            for (chat, at), token in zip(rows.tolist(), tokens, strict=True):
                before = good.get((chat, at - 1), False) if number else True
                found[chat, at] = before and token == int(chats[chat].tokens[at + 2])
            good = found
            shares.append(sum(good.values()) / len(good))
        return shares


def _padded(rows: Tensor, length: int) -> Tensor:
    """Return the first `length` rows, and zeros where there are fewer."""
    rows = rows[:length]
    return pad(rows, (*[0, 0] * (rows.ndim - 1), 0, length - len(rows)))


def _later(rows: Tensor, by: int) -> Tensor:
    """Return [B, L, ...] with each row moved to a later position."""
    return rows.roll(by, 1) if by else rows  # the first ones are of no row that is wanted


def new_head(model: LoadedModel, plain: Any, chats: Sequence[Chat], size: int) -> tuple[EagleHead, Tensor]:
    """Return a head to train, and the model's tokens in its vocabulary of `size`: those of the text, then others.

    `plain`: the model as in transformers.
    """
    counts = torch.bincount(torch.cat([chat.tokens[chat.num_prompt :] for chat in chats]), minlength=model.vocab_size)
    kept = torch.argsort(counts, descending=True, stable=True)[:size].sort().values
    text: Any = model.config.get_text_config()
    layer = LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=text.num_key_value_heads,
        rms_norm_eps=NORM_EPS,
        rope_theta=10_000.0,
        max_position_embeddings=text.max_position_embeddings,
    )
    head = EagleHead(EagleConfig(layer, size, text.hidden_size, False, layers_of(model)))
    with torch.no_grad():
        head.lm_head.weight.copy_(plain.get_output_embeddings().weight[kept])
        head.norm.weight.copy_(0.4 * plain.get_decoder().norm.weight)  # less sure than the model
        head.d2t.copy_(kept - torch.arange(size))
    head.lm_head.weight.requires_grad_(False)
    return head, kept


def train(drill: Drill, chats: Sequence[Chat], num_steps: int, rate: float) -> None:
    """Train a head, and print what becomes of its drafts for the chats that are held out."""
    trained, held_out = chats[:-HELD_OUT], chats[-HELD_OUT:]
    weights = [each for each in drill.head.parameters() if each.requires_grad]
    norms = [each for each in weights if each.ndim == 1]  # whose numbers are larger
    groups = [{"params": [each for each in weights if each.ndim > 1], "times": 1}, {"params": norms, "times": 10}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    draw, started = random.Random(0), time.process_time()
    order, losses = list[Chat](), list[float]()
    for number in range(num_steps):
        if len(order) < AT_A_TIME:
            order = draw.sample(list(trained), len(trained))
        chosen, order = order[:AT_A_TIME], order[AT_A_TIME:]
        for group in optimizer.param_groups:
            falling = 0.5 * (1 + math.cos(math.pi * number / num_steps))
            group["lr"] = group["times"] * rate * min(1.0, (number + 1) / 30) * falling
        loss = drill.loss(chosen, drill.head.lm_head.weight)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 0.5)
        optimizer.step()
        losses.append(loss.item())
        if (number + 1) % max(num_steps // 10, 1) == 0:
            shares = " ".join(f"{100 * each:.0f}" for each in drill.accepted(held_out))
            mean = sum(losses[-50:]) / len(losses[-50:])
            seconds = time.process_time() - started
            print(
                f"{number + 1} steps, {seconds:.0f} s of CPU time: loss {mean:.2f}; accepted, %: {shares}", flush=True
            )


# -- the head's files ------------------------------------------------------------------------------------------------


def write_head(drill: Drill, folder: Path) -> None:
    """Write a trained head in the form of speculators."""
    head = drill.head
    layer = head.config.layer
    fields = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    fields += ("head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings")
    config = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": {
            "model_type": "llama",
            "rope_theta": 10_000.0,
            **{name: getattr(layer, name) for name in fields},
        },
        "draft_vocab_size": head.config.draft_vocab_size,
        "target_hidden_size": head.config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(head.config.layers or ()),
    }
    tensors = {name: tensor.detach().clone() for name, tensor in head.state_dict().items()}
    tensors["fc.weight"] /= drill.scale
    tensors |= {name: each.bfloat16() for name, each in tensors.items() if each.is_floating_point()}  # as published
    tensors["t2d"] = torch.isin(torch.arange(layer.vocab_size), drill.kept)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path, help="directory to write")
    parser.add_argument("--model", type=Path, help="Hugging Face directory (default: the embedded model)")
    parser.add_argument("--chats", type=int, default=160, help="answers to learn from (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=192, help="most tokens of an answer (default: %(default)s)")
    parser.add_argument("--text", type=Path, help="file of chats that an earlier run has written")
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens that the head drafts (%(default)s)")
    parser.add_argument("--steps", type=int, default=450, help="of training (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="learning rate (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = args.model or default_model_dir()
    model = load_model(ModelSpec(str(folder), dtype="float32"), "cpu")
    args.head.mkdir(parents=True, exist_ok=True)
    if args.text is None:
        started = time.process_time()
        args.text = args.head / "text.safetensors.written"
        save_text(Writer(model, AutoTokenizer.from_pretrained(folder), args.chats, args.tokens).write(), args.text)
        print(f"text: {time.process_time() - started:.0f} s of CPU time", flush=True)
    chats = load_text(args.text)
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # its layers are not fused
    head, kept = new_head(model, plain, chats, args.vocabulary)
    num_answered = sum(len(chat.tokens) - chat.num_prompt for chat in chats)
    known = torch.isin(torch.cat([chat.tokens[chat.num_prompt :] for chat in chats[-HELD_OUT:]]), kept)
    print(f"{len(chats)} chats, {num_answered:,} tokens of answers; {100 * known.float().mean():.1f} % drafted at all")
    embedding = plain.get_input_embeddings().weight.detach()
    drill = Drill(head, embedding, kept, chats)
    train(drill, chats, args.steps, args.rate)
    write_head(drill, args.head)


if __name__ == "__main__":
    main()
