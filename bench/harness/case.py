"""What all benchmarks share: command line, tables, and JSON with a description of the machine.

Each script parses `arguments(__doc__, ...)` and passes them to `main` with the function that
measures; `main` returns the numbers, which the script compares with its goals.
"""

import argparse
import asyncio
import inspect
import json
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import uvloop
from harness.machine import headline, machine_facts

ROOT = Path(__file__).parents[2]
SHIPPED_MODEL = ROOT / "models" / "quire-tiny-python"

Results: TypeAlias = Mapping[str, Any]
"""Maps names to numbers, without nesting, as `--json` writes them."""

_START = time.monotonic()


class BenchError(Exception):
    """The measurement is impossible; the message says why."""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Shows the docstring unchanged, and the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.option_strings and action.default not in (None, False, "==SUPPRESS==")
        return f"{action.help} (default: %(default)s)" if has_default else action.help


def arguments(doc: str | None, quick: str) -> argparse.ArgumentParser:
    """Return a parser that has --help, --quick and --json; `quick` says what --quick does."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=_Help)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the numbers and the machine's facts"
    )
    return parser


def numbers(text: str) -> tuple[int, ...]:
    """Parse an option such as 1,8,32."""
    return tuple(map(int, text.split(",")))


def main(
    given: argparse.Namespace,
    measure: Callable[[argparse.Namespace], Results | Coroutine[Any, Any, Results]],
) -> Results:
    """Print the machine, measure, write JSON if asked to, and return the results.

    If the measurement fails, end the process.
    """
    name = Path(sys.argv[0]).name
    print(headline(machine_facts()), flush=True)
    try:
        results = measure(given)
        if inspect.iscoroutine(results):
            results = uvloop.run(_cancelled_by_sigterm(results))
    except (BenchError, aiohttp.ClientError) as error:
        sys.exit(f"{name}: {error}")
    except (KeyboardInterrupt, asyncio.CancelledError):  # all processes have ended
        sys.exit(130)
    if given.json is not None:
        write_json(given.json, results)
    return results


async def _cancelled_by_sigterm(measuring: Coroutine[Any, Any, Results]) -> Results:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await measuring


def write_json(file: Path, results: Results) -> None:
    """Replace the file; write the results, floats with five decimals, and the machine's facts."""
    rounded = {
        name: round(value, 5) if isinstance(value, float) else value
        for name, value in results.items()
    }
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"machine": machine_facts(), **rounded}, indent=2) + "\n")
    new.replace(file)


def progress(line: str) -> None:
    """Write a line to standard error; it begins with the time that this process has run."""
    print(f"[{time.monotonic() - _START:5.1f} s] {line}", file=sys.stderr, flush=True)


class Table:
    """A table that is printed row by row, as results come.

    A column is "title:format". The format is Python's, such as ".1f" for numbers or "<20" for text.
    """

    def __init__(self, *columns: str) -> None:
        self._columns: list[tuple[int, str]] = []
        titles = []
        for column in columns:
            title, _, spec = column.partition(":")
            is_text = spec.startswith("<")
            width = max(len(title), int(spec[1:]) if is_text else 8)
            titles.append(f"{title:<{width}}" if is_text else f"{title:>{width}}")
            self._columns.append((width, spec))
        print("  ".join(titles).rstrip())

    def row(self, *values: Any) -> None:
        """Print a row; None leaves a cell empty."""
        cells = []
        for (width, spec), value in zip(self._columns, values, strict=False):
            if spec.startswith("<"):
                cells.append(f"{value:<{width}}")
            else:
                cells.append(f"{'' if value is None else format(value, spec):>{width}}")
        print("  ".join(cells).rstrip(), flush=True)
