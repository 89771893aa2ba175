"""One training run: model, optimizers, batches, checkpoints."""

import dataclasses
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from corpus import BOS, EOS, STREAMS, Corpus
from numpy.typing import NDArray
from ranks import Ranks
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True, slots=True)
class Options:
    """The flags."""

    minutes: float  # training time in all, over all runs
    work_dir: Path  # corpus, checkpoints
    model_dir: Path  # where the model is exported to
    export: bool  # only export
    compile: bool
    processes: int
    checkpoint_s: float
    first_export_s: float
    batch_tokens: int
    micro_batch_tokens: int
    seq_len: int
    long_seq_len: int  # used for the last part of the time; the model's context
    learning_rate: float
    weight_decay: float
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    seed: int


WARMUP_STEPS = 100
DECAY_FROM = 0.35  # share of the training time, as LONG_FROM
LONG_FROM = 0.9
STREAM_WEIGHTS = {"library": 0.55, "tests": 0.2, "functions": 0.25}


def _build_model(options: Options, tokenizer: Tokenizer) -> LlamaForCausalLM:
    torch.manual_seed(options.seed)
    config = LlamaConfig(
        vocab_size=options.vocab_size,
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        num_hidden_layers=options.num_layers,
        num_attention_heads=options.num_heads,
        num_key_value_heads=options.num_kv_heads,
        max_position_embeddings=options.long_seq_len,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
    )
    return LlamaForCausalLM(config)


class Windows:
    """Windows of the streams; a step's windows depend only on the seed and the step."""

    def __init__(self, streams: dict[str, NDArray[np.uint16]], seed: int) -> None:
        self._streams = [streams[name] for name in STREAMS]
        self._weights = [STREAM_WEIGHTS[name] for name in STREAMS]
        self._seed = seed

    def at(self, step: int, num_windows: int, seq_len: int) -> Tensor:
        """Returns the windows of a step, int64 [num_windows, seq_len + 1]."""
        rng = np.random.default_rng((self._seed, step))
        rows = []
        for which in rng.choice(len(self._streams), size=num_windows, p=self._weights):
            stream = self._streams[which]
            start = rng.integers(len(stream) - seq_len)
            rows.append(stream[start : start + seq_len + 1].astype(np.int64))
        return torch.from_numpy(np.stack(rows))


@dataclass(slots=True)
class TrainingProgress:
    """The state in a checkpoint other than weights and optimizer state."""

    train_loss: float  # nats per token over all streams, smoothed; at first that of a uniform guess
    held_out_loss: float  # nats per token, library stream
    step: int = 0
    elapsed_s: float = 0.0
    num_tokens: int = 0


class Trainer:
    """Owns model, optimizers and progress."""

    def __init__(
        self, options: Options, corpus: Corpus, tokenizer: Tokenizer, ranks: Ranks
    ) -> None:
        self.options = options
        self._ranks = ranks
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = _build_model(options, tokenizer).to(self.device)
        uniform = math.log(options.vocab_size)
        self.progress = TrainingProgress(train_loss=uniform, held_out_loss=uniform)
        self._corpus = corpus
        self._batches = Windows(corpus.train, options.seed)
        self._checkpoint_file = options.work_dir / "checkpoint.pt"
        matrices = [p for n, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in n]
        others = [p for n, p in self.model.named_parameters() if p.ndim != 2 or "embed" in n]
        decay = options.weight_decay
        # Muon orthogonalizes the update of a matrix; with so few tokens it learns much faster.
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self._loss: Callable[[Tensor], Tensor] = self._loss_of
        if options.compile:
            self._loss = torch.compile(self._loss_of, dynamic=False)

    def _loss_of(self, ids: Tensor) -> Tensor:
        logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    def restore(self) -> bool:
        """Goes back to the newest checkpoint; returns False if there is none."""
        if not self._checkpoint_file.exists():
            return False
        state = torch.load(self._checkpoint_file, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = TrainingProgress(**state["progress"])
        return True

    def save(self) -> None:
        """Writes a checkpoint; an interrupted write never replaces a complete checkpoint."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "progress": dataclasses.asdict(self.progress),
        }
        unfinished = self._checkpoint_file.with_suffix(".tmp")
        torch.save(state, unfinished)
        unfinished.replace(self._checkpoint_file)

    def _autocast(self) -> torch.autocast | nullcontext[None]:
        return torch.autocast(self.device.type, torch.bfloat16)

    def train_step(self) -> None:
        """One optimizer step."""
        options, progress = self.options, self.progress
        part = min(1.0, progress.elapsed_s / (60 * options.minutes))
        seq_len = options.long_seq_len if part > LONG_FROM else options.seq_len
        warm = min(1.0, (progress.step + 1) / WARMUP_STEPS)
        rate = options.learning_rate * warm * min(1.0, (1 - part) / (1 - DECAY_FROM))
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        ids = self._batches.at(progress.step, options.batch_tokens // seq_len, seq_len)
        micro_batches = ids.to(self.device).split(options.micro_batch_tokens // seq_len)
        total = 0.0
        for micro_batch in micro_batches[self._ranks.rank :: self._ranks.world_size]:
            with self._autocast():
                loss = self._loss(micro_batch)
            (loss / len(micro_batches)).backward()
            total += loss.item() / len(micro_batches)
        total = self._ranks.sum_gradients(self.model.parameters(), total)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.num_tokens += options.batch_tokens
        progress.train_loss += 0.02 * (total - progress.train_loss)

    @torch.no_grad()
    def validate(self) -> float:
        """Returns the mean loss on the whole held-out part of the library, in nats per token."""
        length = self.options.seq_len
        stream = self._corpus.held_out["library"].astype(np.int64)
        num_windows = (len(stream) - 1) // length
        windows = np.stack([stream[i * length : (i + 1) * length + 1] for i in range(num_windows)])
        losses = []
        for batch in torch.from_numpy(windows).to(self.device).split(8):
            with self._autocast():
                losses.append((self._loss_of(batch).item(), len(batch)))
        return sum(loss * n for loss, n in losses) / sum(n for _, n in losses)
