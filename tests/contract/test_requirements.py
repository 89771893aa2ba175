"""requirements/ locks what pyproject.toml asks for, and is what Makefile and images install."""

import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
GROUPS = PROJECT["dependency-groups"]
SERVICES = PROJECT["project"]["dependencies"]
WORKER = [*SERVICES, *EXTRAS["worker"]]
MAKEFILE = (ROOT / "Makefile").read_text()
IMAGE_EXTRAS = re.findall(r"^IMAGE_EXTRAS := (.*)$", MAKEFILE, re.MULTILINE)[0].split()
FILE_TO_ASKED = {
    "services": SERVICES,
    **{extra: [*SERVICES, *EXTRAS[extra]] for extra in IMAGE_EXTRAS},
    "dev": [*WORKER, *EXTRAS["transformers"], *EXTRAS["dev"], *GROUPS["build"]],
    "build": [*PROJECT["build-system"]["requires"], *GROUPS["build"]],
    "tools": GROUPS["tools"],
}
PYTHONS = ("3.11", "3.12")
UNLOCKED = {"torch"}
"""Not locked, because each machine chooses its build of torch."""


def entries(name: str) -> list[str]:
    """The file's requirements with their hashes, one a string."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    return re.findall(r"^\w(?:.*\\\n)*.*$", text, re.MULTILINE)


def locked(name: str, python: str) -> dict[str, Version]:
    """The versions for a Python on Linux, by normalized name."""
    environment = {"python_version": python, "python_full_version": f"{python}.9"}
    found: dict[str, Version] = {}
    for entry in entries(name):
        requirement = Requirement(entry.partition(" \\\n")[0])
        if requirement.marker is None or requirement.marker.evaluate(environment):
            assert requirement.name not in found
            (pin,) = requirement.specifier
            assert pin.operator == "=="
            found[canonicalize_name(requirement.name)] = Version(pin.version)
    return found


def missing(asked: list[str], versions: dict[str, Version], python: str) -> Iterator[str]:
    for text in asked:
        requirement = Requirement(text)
        environment = {**default_environment(), "python_version": python, "extra": ""}
        if requirement.marker is not None and not requirement.marker.evaluate(environment):
            continue
        name = canonicalize_name(requirement.name)
        if name in UNLOCKED:
            continue
        if name not in versions or not requirement.specifier.contains(versions[name], True):
            yield f"{text}: {versions.get(name)}"


@pytest.mark.parametrize("name", FILE_TO_ASKED)
@pytest.mark.parametrize("python", PYTHONS)
def test_file_has_what_the_project_asks_for(name, python):
    assert not [*missing(FILE_TO_ASKED[name], locked(name, python), python)], "run `make lock`"


@pytest.mark.parametrize("name", FILE_TO_ASKED)
def test_file_is_complete_as_far_as_its_packages_are_installed(name):
    versions = locked(name, "3.11")
    checked = 0
    for package, version in versions.items():
        try:
            distribution = metadata.distribution(package)
        except metadata.PackageNotFoundError:
            continue
        if Version(distribution.version) == version:
            needs = [*missing(distribution.requires or [], versions, "3.11")]
            assert not needs, f"{package} needs them"
            checked += 1
    assert checked or name == "tools"


@pytest.mark.parametrize("name", FILE_TO_ASKED)
def test_every_entry_has_hashes_and_none_names_a_place(name):
    found = entries(name)
    assert found
    assert all("--hash=sha256:" in entry for entry in found)
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    assert not re.search(
        r"://|--index|--find-links|--extra-index|nvidia|^torch==", text, re.MULTILINE
    )


@pytest.mark.parametrize("name", ["services", "build", *IMAGE_EXTRAS])
def test_images_have_the_versions_that_are_tested(name):
    for python in PYTHONS:
        versions, tested = locked(name, python), locked("dev", python)
        assert {name: versions[name] for name in versions.keys() & tested}.items() <= tested.items()
        untested = {name for name in versions.keys() - tested if not name.startswith("nixl")}
        assert not untested, "but for NIXL, which `make nixl-test` installs"


def test_each_extra_that_the_guide_to_images_names_has_a_file():
    guide = (ROOT / "docs" / "deploy-docker.md").read_text()
    rows = re.findall(r"^\| `(?:SERVICE_)?EXTRAS` \|.*$", guide, re.MULTILINE)
    named = set(re.findall(r"`([a-z-]+)`", " ".join(rows)))
    assert named == {*IMAGE_EXTRAS}
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    (some, more) = re.findall(r'Extras of pyproject.toml.*"(.*)"', dockerfile)
    assert {*some.split(","), *more.split(",")} == {*IMAGE_EXTRAS}


def test_each_extra_that_the_documentation_installs_can_be_in_an_image():
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    installed = set(re.findall(r"quire\[([a-z-]+)\]", pages))
    assert installed - {*IMAGE_EXTRAS} == {"elastic"}, "which torch for CUDA includes"


def test_each_file_is_one_that_is_checked_here():
    assert {path.stem for path in (ROOT / "requirements").iterdir()} == FILE_TO_ASKED.keys()


def test_dependencies_are_bounded_above():
    lists = (SERVICES, *EXTRAS.values(), *GROUPS.values())
    everything = [text for each in lists for text in each]
    for text in everything:
        operators = {each.operator for each in Requirement(text).specifier}
        assert operators & {"<", "=="}, f"{text}: the next major version may break us"


def test_all_that_is_installed_is_locked_but_torch_and_our_own_code():
    makefile = MAKEFILE.replace("$(LOCKED)", "install --require-hashes")
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", "")
    installs = re.findall(r"pip install .*", makefile + dockerfile)
    assert len(installs) >= 8
    own = re.compile(
        r"--no-deps --no-build-isolation|TORCH|\(PUBLIC_CLIENTS\)|litellm|openai-agents|'smg>="
        r"|--target \$@ triton==|'nixl>=|'moto\[s3\]>=|'lm-eval\[api\]>=|'ai-dynamo-runtime>="
    )
    for install in installs:
        for command in re.findall(r"pip install [^&]*", install):
            assert "--require-hashes" in command or own.search(command), command
