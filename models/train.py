"""Trains the small model that Quire ships, from scratch, on CPU or CUDA.

    python models/train.py --minutes 90    # trains, or goes on where it was stopped; then exports
    python models/train.py --export        # exports the newest checkpoint and does nothing else

The learning rate falls to zero by the clock: whatever the machine does, the run ends when its
minutes have passed. Batches are a function of the seed and the step. SIGTERM and Ctrl-C write a
checkpoint and end; the same command goes on from it.
"""

import argparse
import dataclasses
import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import numpy as np
import torch
from corpus import BOS, EOS, STREAMS, Corpus, load_corpus
from export import Facts, export_model
from numpy.typing import NDArray
from ranks import Ranks
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent


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
DECAY_FROM = 0.35  # parts of the time
LONG_FROM = 0.9
STREAM_WEIGHTS = {"library": 0.55, "tests": 0.2, "functions": 0.25}


def _parse_options() -> Options:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = parser.add_argument
    flag("--minutes", type=float, default=90, help="training time in all, over all runs")
    flag("--work-dir", type=Path, default=HERE.parent / "build" / "tiny-python")
    flag("--model-dir", type=Path, default=HERE / "quire-tiny-python")
    flag("--export", action="store_true", help="export the newest checkpoint, train nothing")
    flag("--compile", action=argparse.BooleanOptionalAction, default=True)
    flag("--processes", type=int, default=1, help="on a CPU; each with OMP_NUM_THREADS threads")
    flag("--checkpoint-s", type=float, default=240)
    flag("--first-export-s", type=float, default=600, help="when to export for the first time")
    flag("--batch-tokens", type=int, default=8192)
    flag("--micro-batch-tokens", type=int, default=4096)
    flag("--seq-len", type=int, default=512)
    flag("--long-seq-len", type=int, default=1024)
    flag("--learning-rate", type=float, default=4e-3)
    flag("--weight-decay", type=float, default=0.05)
    flag("--vocab-size", type=int, default=4096)
    flag("--hidden-size", type=int, default=256)
    flag("--intermediate-size", type=int, default=640)
    flag("--num-layers", type=int, default=5)
    flag("--num-heads", type=int, default=8)
    flag("--num-kv-heads", type=int, default=4)
    flag("--seed", type=int, default=0)
    return Options(**vars(parser.parse_args()))


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


class Batches:
    """Windows of the streams; what a step sees depends on the seed and the step alone."""

    def __init__(self, streams: dict[str, NDArray[np.uint16]], seed: int) -> None:
        self._streams = [streams[name] for name in STREAMS]
        self._weights = [STREAM_WEIGHTS[name] for name in STREAMS]
        self._seed = seed

    def at(self, step: int, num_windows: int, seq_len: int) -> Tensor:
        """int64 [num_windows, seq_len + 1]."""
        rng = np.random.default_rng((self._seed, step))
        rows = []
        for which in rng.choice(len(self._streams), size=num_windows, p=self._weights):
            stream = self._streams[which]
            start = rng.integers(len(stream) - seq_len)
            rows.append(stream[start : start + seq_len + 1].astype(np.int64))
        return torch.from_numpy(np.stack(rows))


@dataclass(slots=True)
class Progress:
    """What a checkpoint keeps besides weights and optimizer state."""

    train_loss: float  # nats per token over all streams, smoothed; starts at a uniform guess's
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
        self.progress = Progress(train_loss=uniform, held_out_loss=uniform)
        self._corpus = corpus
        self._batches = Batches(corpus.train, options.seed)
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
        """Goes back to the newest checkpoint, if there is one."""
        if not self._checkpoint_file.exists():
            return False
        state = torch.load(self._checkpoint_file, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])
        return True

    def save(self) -> None:
        """Writes a checkpoint; one that was interrupted never replaces a whole one."""
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
        """Mean loss on the whole held-out part of the library, nats per token."""
        length = self.options.seq_len
        stream = self._corpus.held_out["library"].astype(np.int64)
        num_windows = (len(stream) - 1) // length
        windows = np.stack([stream[i * length : (i + 1) * length + 1] for i in range(num_windows)])
        losses = []
        for batch in torch.from_numpy(windows).to(self.device).split(8):
            with self._autocast():
                losses.append((self._loss_of(batch).item(), len(batch)))
        return sum(loss * n for loss, n in losses) / sum(n for _, n in losses)


def _export(trainer: Trainer, corpus: Corpus, tokenizer: Tokenizer) -> None:
    options, progress = trainer.options, trainer.progress
    facts = Facts(
        num_tokens=progress.num_tokens,
        corpus_tokens={name: len(ids) for name, ids in corpus.train.items()},
        train_loss=progress.train_loss,
        held_out_loss=progress.held_out_loss,
        num_bytes_per_token=corpus.num_bytes_per_token,
        hours=progress.elapsed_s / 3600,
        seed=options.seed,
    )
    export_model(trainer.model, tokenizer, facts, options.model_dir)
    print(f"exported to {options.model_dir}", flush=True)


def _train(trainer: Trainer, corpus: Corpus, tokenizer: Tokenizer, ranks: Ranks) -> None:
    stop = False

    def request_stop(_signal: int, _frame: FrameType | None) -> None:
        nonlocal stop
        stop = True

    signal.signal(signal.SIGTERM, request_stop)
    signal.signal(signal.SIGINT, request_stop)
    options, progress = trainer.options, trainer.progress
    exported = progress.elapsed_s > options.first_export_s
    saved_at = last = time.monotonic()
    while True:
        progress.elapsed_s, stopping = ranks.agree(progress.elapsed_s, stop=stop)
        if stopping or progress.elapsed_s >= 60 * options.minutes:
            break
        trainer.train_step()
        now = time.monotonic()
        progress.elapsed_s += now - last
        last = now
        if ranks.rank > 0:
            continue
        if progress.step % 10 == 0:
            print(
                f"step {progress.step}  {progress.elapsed_s / 60:.1f} min"
                f"  {progress.num_tokens / 1e6:.2f}M tokens"
                f"  {progress.num_tokens / progress.elapsed_s:.0f}/s"
                f"  loss {progress.train_loss:.3f}",
                flush=True,
            )
        if now - saved_at > options.checkpoint_s:
            progress.held_out_loss = trainer.validate()
            trainer.save()
            print(f"step {progress.step}  held-out loss {progress.held_out_loss:.3f}", flush=True)
            saved_at = time.monotonic()
        if not exported and progress.elapsed_s > options.first_export_s:
            progress.held_out_loss = trainer.validate()
            _export(trainer, corpus, tokenizer)
            exported = True
    progress.held_out_loss = trainer.validate()
    trainer.save()
    print(
        f"stopped at step {progress.step}, held-out loss {progress.held_out_loss:.3f}", flush=True
    )
    if not stopping:
        _export(trainer, corpus, tokenizer)


def main() -> None:
    """Trains and exports."""
    options = _parse_options()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    corpus, tokenizer = load_corpus(options.work_dir, options.vocab_size)
    ranks = Ranks(1 if options.export else options.processes, options.work_dir)
    trainer = Trainer(options, corpus, tokenizer, ranks)
    restored = trainer.restore()
    if options.export:
        if not restored:
            raise SystemExit(f"no checkpoint in {options.work_dir}")
        _export(trainer, corpus, tokenizer)
    else:
        _train(trainer, corpus, tokenizer, ranks)
    ranks.close()


if __name__ == "__main__":
    main()
