"""The processes of `quire up --simulate`, none of which needs torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from quire.cli.up import layout
from quire.cli.up.settings import UpSettings
from rpc.settings import parse_settings


def planned(**flags):
    settings = UpSettings(http_port=0, grpc_port=0, **flags)
    chosen = layout.choose_ports(settings)
    return layout.plan(settings, {"tiny": "/models/tiny"}, chosen, Path("/run/q"), {})


def flags_of(spec):
    """Flag to value, of `argv` after the module."""
    arguments = spec.argv[4:]
    return dict(zip(arguments[::2], arguments[1::2], strict=True))


@pytest.mark.parametrize("count", [1, 64])
def test_the_workers_are_one_process_and_the_scheduler_has_all_of_them(count):
    specs = {spec.name: spec for spec in planned(simulate=count, num_blocks=99).specs}
    assert list(specs) == ["sim-workers", "scheduler", "router"]
    assert specs["sim-workers"].argv[:4] == (sys.executable, "-P", "-m", "sim_worker")
    flags = flags_of(specs["sim-workers"])
    assert flags["--count"] == str(count)
    assert flags["--model"] == "/models/tiny"
    assert flags["--num-blocks"] == "99"
    targets = flags_of(specs["scheduler"])["--workers"].split(",")
    assert targets == [f"unix:/run/q/worker-{i}.sock" for i in range(count)]


def test_lower_tiers_are_simulated_too():
    layout_ = planned(simulate=2, host_kv_memory_gb=4.0, disk_kv_memory_gb=8.0)
    flags = flags_of(layout_.specs[0])
    assert (flags["--host-kv-memory-gb"], flags["--disk-kv-memory-gb"]) == ("4.0", "8.0")


@pytest.mark.parametrize("count", [1, 3])
def test_the_sockets_are_those_that_the_process_will_have(count):
    from sim_worker.settings import SimWorkerSettings  # noqa: PLC0415 - beside the command line

    layout_ = planned(simulate=count)
    flags = flags_of(layout_.specs[0])
    settings = SimWorkerSettings(uds=flags["--uds"], count=count)
    sockets = [f"unix:{settings.of_worker(i).uds}" for i in range(count)]
    assert ",".join(sockets) == flags_of(layout_.specs[1])["--workers"]


def test_without_the_flag_the_workers_are_real():
    assert [spec.argv[3] for spec in planned(workers=2).specs[:2]] == ["gpu_worker"] * 2


def test_flags_that_only_a_device_has_are_refused(capsys):
    argv = ["--simulate", "4", "--device", "cpu", "--num-threads", "2"]
    with pytest.raises(SystemExit):
        parse_settings(UpSettings, "quire up", argv)
    expected = "--simulate: 4: simulated workers have no --device, --num-threads"
    assert expected in capsys.readouterr().err


def test_it_imports_without_torch():
    program = "import sys, sim_worker.__main__; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert ran.stdout.strip() == b"False"
