"""Flags, their environment variables, and the command lines of processes."""

import socket
from pathlib import Path

import pytest

from gpu_worker.settings import WorkerSettings
from model_files.errors import ModelError
from quire.cli.__main__ import COMMANDS, main
from quire.cli.settings import DownSettings, GenerateSettings
from quire.cli.up import layout, ports, processes
from quire.cli.up.settings import UpSettings
from rpc.settings import parse_settings
from scheduler_svc.__main__ import EXIT_STALE_EPOCH


def parse_up(*argv: str) -> UpSettings:
    return parse_settings(UpSettings, "quire up", argv)


def plan(settings: UpSettings, environment: dict[str, str] | None = None) -> layout.Layout:
    routers = (8000,) if settings.routers == 1 else tuple(range(9000, 9000 + settings.routers))
    names, paths = settings.served_model_name or ("m",), settings.model or ("/models/m",)
    models = dict(zip(names, paths, strict=True))
    firsts = [8001 + 100 * cell for cell in range(len(models))]
    workers = tuple(tuple(range(first + 1, first + 1 + settings.workers)) for first in firsts)
    schedulers = tuple((first, first + 50)[: 1 + settings.standby] for first in firsts)
    chosen = layout.ServicePorts(8000, 50051, routers, schedulers, workers)
    return layout.plan(settings, models, chosen, Path("/run/quire"), environment or {})


def value_of(flag: str, argv: tuple[str, ...]) -> str:
    assert argv.count(flag) == 1
    return argv[argv.index(flag) + 1]


def taken_port() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener


def test_defaults_are_the_documented_ports():
    settings = parse_up()
    assert (settings.http_port, settings.grpc_port, settings.workers) == (8000, 50051, 1)


@pytest.mark.parametrize("name", UpSettings.model_fields)
def test_every_flag_of_up_has_an_environment_variable_in_its_help(name, capsys):
    with pytest.raises(SystemExit) as end:
        parse_up("--help")
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"--{name.replace('_', '-')}" in text
    assert f"[env: QUIRE_{name.upper()}]" in text


def test_environment_sets_what_no_flag_does_and_a_flag_wins(monkeypatch):
    monkeypatch.setenv("QUIRE_WORKERS", "3")
    monkeypatch.setenv("QUIRE_HTTP_PORT", "9000")
    settings = parse_up("--http-port", "9001")
    assert (settings.workers, settings.http_port) == (3, 9001)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (("--workers", "0"), "--workers: 0:"),
        (("--http-port", "65536"), "--http-port: 65536:"),
        (("--dtype", "int3"), "--dtype: int3:"),
        (("--device", "abacus"), "--device: abacus:"),
        (("--attached", "--detach"), "--attached: cannot be set with --detach"),
        (("--device", "cuda:1", "--workers", "2"), "--device is cuda:1, which is one GPU"),
        (
            ("--device", "cuda:1", "--tensor-parallel-size", "2"),
            "--device is cuda:1, which is one GPU, but --tensor-parallel-size is 2",
        ),
    ],
)
def test_bad_value_is_named_with_its_flag(argv, problem, capsys):
    with pytest.raises(SystemExit) as end:
        parse_up(*argv)
    assert end.value.code == 2
    assert problem in capsys.readouterr().err


def test_only_the_router_gets_no_ui():
    router_flags = {
        flags: [spec.name for spec in plan(parse_up(*flags)).specs if "--no-ui" in spec.argv]
        for flags in ((), ("--no-ui",))
    }
    assert router_flags == {(): [], ("--no-ui",): ["router"]}


def test_only_the_router_gets_local_drain():
    """Only the router listens on TCP."""
    obeying = {
        flags: [spec.name for spec in plan(parse_up(*flags)).specs if "--local-drain" in spec.argv]
        for flags in ((), ("--local-drain",))
    }
    assert obeying == {(): [], ("--local-drain",): ["router"]}


def test_processes_are_joined_by_sockets_in_the_private_directory():
    worker, scheduler, router = plan(parse_up()).specs
    assert value_of("--uds", worker.argv) == "/run/quire/worker-0.sock"
    assert value_of("--workers", scheduler.argv) == "unix:/run/quire/worker-0.sock"
    assert value_of("--uds", scheduler.argv) == "/run/quire/scheduler.sock"
    assert value_of("--scheduler", router.argv) == "unix:/run/quire/scheduler.sock"
    assert value_of("--grpc-port", router.argv) == "50051"
    assert [value_of("--http-port", each.argv) for each in (worker, scheduler, router)] == [
        "8002",
        "8001",
        "8000",
    ]


def test_router_stops_first_and_workers_last():
    groups = {spec.name: spec.stop_group for spec in plan(parse_up("--workers", "2")).specs}
    assert groups["router"] < groups["scheduler"] < groups["worker-0"] == groups["worker-1"]


def test_a_scheduler_and_its_standby_differ_in_their_addresses_only():
    models = ("--model", "/models/a,/models/b", "--served-model-name", "a,b")
    planned = plan(parse_up("--standby", *models))
    schedulers = [spec for spec in planned.specs if spec.name.startswith("scheduler")]
    names = ["scheduler-a-0", "scheduler-a-1", "scheduler-b-0", "scheduler-b-1"]
    assert [spec.name for spec in schedulers] == names
    sockets = [value_of("--uds", spec.argv) for spec in schedulers]
    own = ["scheduler", "standby", "scheduler-1", "standby-1"]
    assert sockets == [f"/run/quire/{name}.sock" for name in own]
    for spec in schedulers:
        assert {"--standby", "--standby-http"} < {*spec.argv}
        assert spec.harmless_exit_code == EXIT_STALE_EPOCH
    assert len({value_of("--http-port", spec.argv) for spec in schedulers}) == 4
    targets = [",".join(f"unix:{path}" for path in pair) for pair in (sockets[:2], sockets[2:])]
    assert planned.service.scheduler_targets == dict(zip("ab", targets, strict=True))
    (router,) = (spec for spec in planned.specs if spec.name == "router")
    assert value_of("--scheduler", router.argv) == targets[0]
    assert value_of("--cell", router.argv) == f"b=/models/b@{targets[1]}"


def test_several_routers_share_ports_and_have_one_each():
    planned = plan(parse_up("--routers", "2"))
    routers = planned.specs[2:]
    assert [spec.name for spec in routers] == ["router-0", "router-1"]
    for i, spec in enumerate(routers):
        assert value_of("--http-port", spec.argv) == str(9000 + i)
        assert value_of("--shared-http-port", spec.argv) == "8000"
        assert value_of("--grpc-port", spec.argv) == "50051"
        assert value_of("--operator-uds", spec.argv) == f"/run/quire/router-{i}.sock"
        assert spec.http_address == f"127.0.0.1:{9000 + i}"
    assert planned.service.http_address == "127.0.0.1:8000"
    assert planned.service.operator_target == "unix:/run/quire/router-0.sock"
    assert planned.service.other_operator_targets == ("unix:/run/quire/router-1.sock",)
    assert "--shared-http-port" not in plan(parse_up()).specs[2].argv


@pytest.mark.parametrize("flag", ["--uds", "--operator-uds"])
def test_several_routers_cannot_share_a_socket(flag, capsys):
    with pytest.raises(SystemExit):
        parse_up("--routers", "2", flag, "/run/x.sock")
    assert f"routers cannot share {flag}" in capsys.readouterr().err


def test_several_workers_share_the_machine():
    specs = plan(parse_up("--workers", "2"), {"CUDA_VISIBLE_DEVICES": "4,6"}).specs[:2]
    assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["4", "6"]
    assert [value_of("--worker-id", spec.argv) for spec in specs] == ["worker-0", "worker-1"]
    assert int(value_of("--num-threads", specs[0].argv)) >= 1


def test_workers_of_several_devices_share_no_device():
    argv = ("--workers", "2", "--tensor-parallel-size", "2")
    specs = plan(parse_up(*argv), {"CUDA_VISIBLE_DEVICES": "4,6,1,0"}).specs[:2]
    assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["4,6", "1,0"]
    assert value_of("--tensor-parallel-size", specs[0].argv) == "2"


def test_only_what_is_set_is_passed_on():
    worker, _, router = plan(parse_up("--num-blocks", "64", "--served-model-name", "m2")).specs
    assert value_of("--num-blocks", worker.argv) == "64"
    assert "--max-model-len" not in worker.argv
    assert "--num-blocks" not in router.argv
    assert value_of("--served-model-name", router.argv) == "m2"
    assert value_of("--served-model-name", worker.argv) == "m2"


def test_wildcard_host_is_probed_on_the_loopback():
    planned = plan(parse_up("--host", "0.0.0.0"))
    assert planned.service.http_address == "127.0.0.1:8000"
    assert value_of("--host", planned.specs[0].argv) == "0.0.0.0"


def test_port_in_use_is_refused_by_flag_and_number():
    with taken_port() as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ports.PortError, match=f"--grpc-port: {port}: is in use on 127.0.0.1"):
            layout.choose_ports(parse_up("--http-port", "0", "--grpc-port", str(port)))


def test_command_line_says_in_one_line_that_a_port_is_in_use(tmp_path, capsys):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    with taken_port() as listener:
        port = listener.getsockname()[1]
        code = main(["up", "--model", str(tmp_path), "--http-port", str(port)])
    assert code == 1
    assert capsys.readouterr().err == f"quire: --http-port: {port}: is in use on 127.0.0.1\n"


def test_two_flags_with_one_port_are_refused():
    with taken_port() as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ports.PortError, match="--grpc-port"):
        layout.choose_ports(parse_up("--http-port", str(port), "--grpc-port", str(port)))


def test_preferred_port_that_is_taken_is_replaced():
    with taken_port() as listener:
        port = listener.getsockname()[1]
        assert ports.prefer("127.0.0.1", port, ()) != port


def test_ports_of_a_service_differ():
    flags = ("--http-port", "0", "--grpc-port", "0", "--workers", "3", "--standby")
    chosen = layout.choose_ports(parse_up(*flags))
    each = [chosen.http_port, chosen.grpc_port, *chosen.scheduler_http_ports[0]]
    assert len({*each, *chosen.worker_http_ports[0]}) == 7


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_model_directory_without_its_files_is_refused(tmp_path, missing):
    for name in {"config.json", "tokenizer.json"} - {missing}:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError, match=f"--model: .* it must have a {missing}"):
        layout.choose_models(parse_up("--model", str(tmp_path)))


@pytest.mark.parametrize("model", ["llama", "./meta/llama", "/models/llama", "a/b/c", "README.md"])
def test_model_that_is_nowhere_is_refused(model):
    with pytest.raises(ModelError, match=rf"model is '{model}'[,:]"):
        layout.choose_models(parse_up("--model", model))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B@v1.2", "Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf", "Qwen3-0.6B-Q8_0"),
        ("s3://bucket/models/tiny", "tiny"),
        ("gs://bucket/tiny.Q4_0.gguf", "tiny.Q4_0"),
    ],
)
def test_what_is_elsewhere_is_left_to_the_processes(model, name):
    assert layout.choose_models(parse_up("--model", model)) == {name: model}


def test_several_models_have_schedulers_and_workers_of_their_own_behind_one_router():
    flags = ("--model", "org/a", "--model", "org/b", "--served-model-name", "a,org/b")
    planned = plan(parse_up(*flags, "--workers", "2"))
    names = [spec.name for spec in planned.specs]
    assert names == [
        *("worker-a-0", "worker-a-1", "worker-org-b-0", "worker-org-b-1"),
        *("scheduler-a", "scheduler-org-b", "router"),
    ]
    workers, schedulers, router = planned.specs[:4], planned.specs[4:6], planned.specs[6]
    assert [value_of("--model", each.argv) for each in workers] == ["org/a"] * 2 + ["org/b"] * 2
    for first, scheduler in zip((0, 2), schedulers, strict=True):
        own = [f"unix:{value_of('--uds', each.argv)}" for each in workers[first : first + 2]]
        assert value_of("--workers", scheduler.argv) == ",".join(own)
    assert value_of("--served-model-name", router.argv) == "a"
    second = planned.service.scheduler_targets["org/b"]
    assert value_of("--cell", router.argv) == f"org/b=org/b@{second}"
    addresses = [spec.http_address for spec in planned.specs]
    assert len({*addresses}) == len(addresses)
    for each in workers:
        assert value_of("--gpu-memory-utilization", each.argv) == "0.450"
        assert "--unloaded" not in each.argv


def test_what_models_divide_is_what_a_single_one_takes():
    whole = WorkerSettings.model_fields["gpu_memory_utilization"].default
    assert whole == processes.GPU_MEMORY_UTILIZATION


def test_models_on_demand_start_unloaded_and_have_the_whole_device():
    flags = ("--model", "org/a", "--model", "org/b", "--served-model-name", "a,b")
    planned = plan(parse_up(*flags, "--on-demand", "1", "--min-loaded-s", "3"))
    for each in planned.specs[:2]:
        assert "--unloaded" in each.argv
        assert "--gpu-memory-utilization" not in each.argv
        assert "--num-threads" not in each.argv
    assert value_of("--on-demand", planned.specs[-1].argv) == "1"
    assert value_of("--min-loaded-s", planned.specs[-1].argv) == "3.0"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--model", "o/a", "--model", "o/b", "--served-model-name", "a"), "has 1 names"),
        (("--model", "o/a", "--model", "o/b", "--lora", "x=/x"), "--lora: is for one model"),
        (("--model", "o/a", "--on-demand", "1"), "needs several models"),
        (("--model", "o/a", "--model", "o/b", "--on-demand", "1", "--routers", "2"), "one router"),
        (
            ("--model", "o/a", "--model", "o/b", "--on-demand", "1", "--tensor-parallel-size", "2"),
            "keep their model",
        ),
    ],
)
def test_flags_that_several_models_cannot_have_are_refused(flags, problem, capsys):
    with pytest.raises(SystemExit):
        parse_up(*flags)
    assert problem in capsys.readouterr().err


def test_two_models_of_one_name_are_refused():
    with pytest.raises(ModelError, match="two models have the name"):
        layout.choose_models(parse_up("--model", "o/a", "--model", "o/a"))


def test_generate_takes_its_prompt_and_flags():
    settings = parse_settings(  # type: ignore[type-var]
        GenerateSettings, "quire generate", ["def f(", "--max-tokens", "5", "--stop", "\n\n,"]
    )
    assert (settings.prompt, settings.max_tokens, settings.stop) == ("def f(", 5, "\n\n,")


def test_down_reads_the_same_port_variable_as_up(monkeypatch):
    monkeypatch.setenv("QUIRE_HTTP_PORT", "9000")
    assert parse_settings(DownSettings, "quire down", []).http_port == 9000


def test_unknown_command_is_named(capsys):
    assert main(["upp"]) == 2
    assert "quire: upp: no such command" in capsys.readouterr().err


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in COMMANDS)


def test_service_that_is_not_there_is_one_line(capsys):
    assert main(["generate", "x", "--target", "127.0.0.1:1", "--timeout-s", "5"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("quire: ")
    assert error.count("\n") == 1


def test_any_port_is_another_one_each_time_though_the_system_offers_one_twice(monkeypatch):
    offers = iter([40001, 40001, 40001, 40002, 40002, 40001, 40003, 40003, 40004])
    monkeypatch.setattr(layout.ports, "_bind", lambda _, port: port or next(offers))
    flags = [f"--{name}port=0" for name in ("http-", "grpc-", "scheduler-http-", "worker-http-")]
    chosen = layout.choose_ports(parse_up(*flags))
    assert [chosen.http_port, chosen.grpc_port] == [40001, 40002]
    assert chosen.scheduler_http_ports == ((40003,),)


def test_turns_are_kept_in_a_file_that_the_next_start_finds_again(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))

    def store_of(*flags, **environment):
        planned = plan(parse_up(*flags), environment)
        assert "turn_store" not in planned.service.flags  # it may have a password
        *others, router = planned.specs
        assert "--turn-store" not in router.argv  # which `ps` shows
        assert not any("QUIRE_TURN_STORE" in other.environment for other in others)
        return router.environment.get("QUIRE_TURN_STORE")

    file = "quire/turns/m-8000.sqlite"
    assert store_of() == f"{tmp_path}/.local/share/{file}"
    assert store_of(XDG_DATA_HOME="/data") == f"/data/{file}"
    for off in (("--turn-store", "none"), ("--http-port", "0"), ("--attached",)):
        assert store_of(*off) is None
    url = "postgresql://me:secret@db/turns"
    assert store_of("--turn-store", url) == url
