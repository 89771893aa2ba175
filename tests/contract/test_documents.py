"""Links in the documents work, the named files and folders exist, and no lines were joined."""

import ast
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = [
    *(
        "bench",
        "clients",
        "contract",
        "deploy",
        "docs",
        "gpu_worker",
        "kernels",
        "model_files",
        "models",
        "protos",
        "quire",
    ),
    *("model_files", "router", "rpc", "scheduler_svc", "sim_worker", "tests"),
]
FOLDERS_OF_PAGES = ".", "docs", "docs/reference", "bench"
PAGES = [page for folder in FOLDERS_OF_PAGES for page in (ROOT / folder).glob("*.md")]
FILES = [
    f"/{path.relative_to(ROOT).as_posix()}" for name in FOLDERS for path in (ROOT / name).rglob("*")
]
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")
QUOTED = re.compile(r"`([^`\n]+)`")
SOURCE = re.compile(r"(?<![\w/.<-])(?!google/)[\w./-]+\.(?:py|proto|c|sh)(?![\w.])")
PLACE = re.compile(rf"(?<![\w/.<-])(?:{'|'.join(FOLDERS)})/[\w./-]+")


def anchors(page: Path) -> set[str]:
    """The anchors of `page`: its headings, in GitHub's form."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_a_page_and_a_heading_that_are_there(page):
    for target, anchor in LINK.findall(page.read_text()):
        led_to = (page.parent / target).resolve() if target else page
        assert led_to.exists(), target
        if anchor:
            assert anchor in anchors(led_to), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_and_folders_that_are_named_are_there(page):
    quoted = " ".join(QUOTED.findall(page.read_text()))
    for name in [*SOURCE.findall(quoted), *PLACE.findall(quoted)]:
        end = f"/{name.rstrip('/.')}"
        assert any(path.endswith(end) for path in FILES) or (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_lines_that_belong_apart_are_not_joined(page):
    text = page.read_text()
    for code in re.findall(r"^ *```python\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        compile(textwrap.dedent(code), page.name, "exec", flags)
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert not re.findall(r"^.*[.;:] - [A-Z*`].*$", prose, re.MULTILINE), "an item of a list"


def test_every_benchmark_is_in_the_table_of_benchmarks():
    listed = set(re.findall(r"`([\w.]+)`", (ROOT / "bench" / "README.md").read_text()))
    commands = {path.name for kind in ("*.py", "*.sh") for path in (ROOT / "bench").glob(kind)}
    assert commands <= listed
