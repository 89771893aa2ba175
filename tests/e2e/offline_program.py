"""A program that uses `LLM`, for tests that end it. Usage: offline_program.py MODEL

A simulated worker serves: it starts fast, and takes long for the program's list of prompts.
"""

import sys

from quire import LLM, SamplingParams


def main(model):
    llm = LLM(model=model, simulate=1, num_blocks=4096)
    sys.stdout.write("up\n")
    sys.stdout.flush()
    llm.generate(["word " * 8] * 10_000, SamplingParams(max_tokens=2000, ignore_eos=True))


main(*sys.argv[1:])
