from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field, SecretStr, ValidationError, model_validator

from rpc.settings import LinkSettings, Port, ProcessSettings, parse_settings


class ExampleSettings(ProcessSettings):
    """Serves examples."""

    grpc_port: Port = 50051
    """Port of gRPC."""
    model: str
    """What to serve."""
    peers: tuple[str, ...] = ()
    """Addresses of peers."""
    eager: bool = False
    """Skip the graphs."""

    @model_validator(mode="after")
    def _ports_differ(self):
        if self.grpc_port == self.http_port:
            raise ValueError("--grpc-port and --http-port: both are the same")
        return self


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch):
    for name in ExampleSettings.model_fields:
        monkeypatch.delenv(f"QUIRE_{name.upper()}", raising=False)


def parse(*argv):
    return parse_settings(ExampleSettings, "quire-example", argv)


def complaint(capsys, *argv):
    with pytest.raises(SystemExit) as it:
        parse(*argv)
    assert it.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    return printed.err


def test_a_flag_wins_over_the_environment_and_that_over_the_default(monkeypatch):
    assert parse("--model=m").grpc_port == 50051
    monkeypatch.setenv("QUIRE_GRPC_PORT", "1")
    assert parse("--model=m").grpc_port == 1
    assert parse("--model=m", "--grpc-port", "2").grpc_port == 2


def test_an_empty_variable_counts_as_unset(monkeypatch):
    monkeypatch.setenv("QUIRE_GRPC_PORT", "")
    assert parse("--model=m").grpc_port == 50051


def test_flags_of_all_kinds():
    settings = parse(
        "--model=m", "--peers", "a:1", "--peers", "b:2", "--eager", "--uds=/tmp/s", "--drain-s=.5"
    )
    assert settings.peers == ("a:1", "b:2")
    assert settings.eager
    assert settings.uds == Path("/tmp/s")
    assert settings.drain_s == 0.5


def test_settings_are_frozen():
    with pytest.raises(ValidationError):
        parse("--model=m").grpc_port = 3


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["--grpc-port", "99999"],
            "--grpc-port: 99999: Input should be less than or equal to 65535",
        ),
        (["--http-port=-1"], "--http-port: -1: Input should be greater than or equal to 0"),
        (["--drain-s", "inf"], "--drain-s: inf: Input should be a finite number"),
        (["--max-message-mb", "0"], "--max-message-mb: 0: Input should be greater than"),
        (["--log-level", "loud"], "--log-level: loud: Input should be 'debug', 'info'"),
        (["--uds", "/" + "x" * 107], "x: has 108 bytes; a socket's path must have at most 107"),
    ],
)
def test_a_bad_value_is_one_line_with_flag_value_and_limit(capsys, argv, line):
    printed = complaint(capsys, "--model=m", *argv)
    assert printed.startswith("quire-example: --")
    assert line in printed
    assert printed.count("\n") == 1


def test_a_bad_variable_is_named_as_such(capsys, monkeypatch):
    monkeypatch.setenv("QUIRE_GRPC_PORT", "many")
    assert complaint(capsys, "--model=m").startswith("quire-example: QUIRE_GRPC_PORT: many: ")


def test_a_bad_flag_is_named_even_if_the_variable_is_set(capsys, monkeypatch):
    monkeypatch.setenv("QUIRE_GRPC_PORT", "1")
    assert "--grpc-port: many: " in complaint(capsys, "--model=m", "--grpc-port=many")


def test_a_variable_that_is_no_list_is_named(capsys, monkeypatch):
    monkeypatch.setenv("QUIRE_PEERS", "a:1,b:2")
    printed = complaint(capsys, "--model=m")
    assert "peers" in printed
    assert printed.count("\n") == 1


def test_a_rule_over_several_flags_names_them_itself(capsys):
    printed = complaint(capsys, "--model=m", "--grpc-port=7", "--http-port=7")
    assert printed == "quire-example: --grpc-port and --http-port: both are the same\n"


def test_every_bad_value_gets_its_line(capsys):
    printed = complaint(capsys, "--grpc-port=-1", "--http-port=-1")
    assert [line.split(": ")[1] for line in printed.splitlines()] == [
        "--grpc-port",
        "--http-port",
        "--model",
    ]
    assert printed.endswith("--model: is required\n")


@pytest.mark.parametrize("argv", [["--wat", "3"], ["--grpc", "3"], ["stray"]])
def test_unknown_fields_are_refused_by_name(capsys, argv):
    assert f"unrecognized arguments: {' '.join(argv)}" in complaint(capsys, "--model=m", *argv)


def test_help_shows_docstring_default_and_variable_of_each_flag(capsys):
    with pytest.raises(SystemExit) as it:
        parse("--help")
    assert it.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Serves examples." in printed
    for name, field in ExampleSettings.model_fields.items():
        assert "--" + name.replace("_", "-") in printed
        assert field.description
        assert " ".join(field.description.split()) in printed
        assert f"[env: QUIRE_{name.upper()}]" in printed
    assert "Port of gRPC. (default: 50051)" in printed


class HelpSettings(ProcessSettings):
    """Has defaults whose `repr` would not help a reader.

    This is the second paragraph.
    """

    peers: tuple[str, ...] = ()
    """Addresses of peers."""
    place: str = ""
    """Where it is."""
    limit: int | None = None
    """The limit."""
    secret: SecretStr = SecretStr("")
    """The secret."""
    port: Port = Field(default_factory=lambda: 7)
    """Default: computed."""


def test_help_has_no_words_of_python(capsys):
    with pytest.raises(SystemExit):
        parse_settings(HelpSettings, "quire-example", ["--help"])
    out = capsys.readouterr().out
    assert "\n\nThis is the second paragraph.\n" in out
    printed = " ".join(out.split())
    assert "Addresses of peers. [env: QUIRE_PEERS]" in printed
    assert "Where it is. [env: QUIRE_PLACE]" in printed
    assert "The limit. [env: QUIRE_LIMIT]" in printed
    assert "--peers str " in printed
    assert "--secret str " in printed
    assert "tuple" not in printed
    assert "factory" not in printed
    assert "Default: computed. [env: QUIRE_PORT]" in printed


class AliasSettings(LinkSettings):
    json_: Annotated[bool, Field(alias="json")] = False


def test_a_field_with_an_alias_has_the_prefix_in_its_variable(monkeypatch):
    monkeypatch.setenv("JSON", "1")
    assert not parse_settings(AliasSettings, "quire-example", []).json_
    monkeypatch.setenv("QUIRE_JSON", "1")
    assert parse_settings(AliasSettings, "quire-example", []).json_
    assert not parse_settings(AliasSettings, "quire-example", ["--no-json"]).json_
