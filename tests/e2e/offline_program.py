"""What a user of `LLM` runs in tests that end it. Usage: offline_program.py MODEL

A simulated worker serves, so that it starts soon and works on a long list for as long as it takes.
"""

import sys

from quire import LLM, SamplingParams


def main(model):
    llm = LLM(model=model, simulate=1, num_blocks=4096)
    sys.stdout.write("up\n")
    sys.stdout.flush()
    llm.generate(["word " * 8] * 10_000, SamplingParams(max_tokens=2000, ignore_eos=True))


main(*sys.argv[1:])
