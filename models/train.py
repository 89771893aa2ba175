"""Trains the small model that Quire ships, from scratch, on CPU or CUDA.

    python models/train.py --minutes 90    # trains, or continues after a stop; then exports
    python models/train.py --export        # exports the newest checkpoint and does nothing else

The learning rate falls to zero over the minutes, so training takes the same time on any machine.
Batches are a function of the seed and the step. SIGTERM and Ctrl-C write a checkpoint and end the
run; the same command continues from the checkpoint.
"""

import argparse
import os
import signal
import time
from pathlib import Path
from types import FrameType

import torch
from corpus import Corpus, load_corpus
from export import Facts, export_model
from ranks import Ranks
from tokenizers import Tokenizer
from trainer import STREAM_WEIGHTS, Options, Trainer

HERE = Path(__file__).parent


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
    flag("--checkpoint-s", type=float, default=400)
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


def _export(trainer: Trainer, corpus: Corpus, tokenizer: Tokenizer) -> None:
    options, progress = trainer.options, trainer.progress
    facts = Facts(
        num_steps=progress.step,
        num_tokens=progress.num_tokens,
        stream_shares=STREAM_WEIGHTS,
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
    if ranks.rank > 0:
        return
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
