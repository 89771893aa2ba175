"""The directory of a service, as other commands see it."""

import os

from quire.cli.up.service_dir import ServiceDir, ServiceInfo, ended_services, running_services


def test_looking_at_a_directory_that_is_being_removed_leaves_nothing_in_it(tmp_path):
    root = tmp_path / "root"
    directory = ServiceDir.create(root)
    (directory.path / "lock").unlink()  # another command removes it at the moment
    assert list(running_services(root)) == []
    assert [path.name for path in directory.path.iterdir()] == ["logs"]
    directory.remove()


def ended(root, number):
    directory = ServiceDir.create(root)
    info = ServiceInfo(1, "/m", f"m{number}", "127.0.0.1:8000", "t", str(directory.log_dir))
    directory.write(info)
    (directory.log_dir / "router.log").write_text(f"of {number}\n")
    (directory.path / "scheduler.sock").touch()
    directory.leave()
    os.utime(directory.path, (number, number))  # otherwise both may begin in one clock tick
    return directory


def test_last_five_that_have_ended_keep_their_logs_and_nothing_else_that_runs(tmp_path):
    directories = [ended(tmp_path, number) for number in range(1, 8)]
    assert list(running_services(tmp_path)) == []
    running = ServiceDir.create(tmp_path)
    assert [service.model_name for service in ended_services(tmp_path)] == [
        *("m7", "m6", "m5", "m4", "m3")
    ]
    for directory in directories[2:]:
        left = sorted(path.name for path in directory.path.iterdir())
        assert left == ["lock", "logs", "service.json"]
    assert not any(directory.path.exists() for directory in directories[:2])
    running.remove()
