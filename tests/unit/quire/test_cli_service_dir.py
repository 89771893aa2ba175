"""The directory of a service, as other commands see it."""

from quire.cli.up.service_dir import ServiceDir, running_services


def test_looking_at_a_directory_that_is_being_removed_leaves_nothing_in_it(tmp_path):
    root = tmp_path / "root"
    directory = ServiceDir.create(root)
    (directory.path / "lock").unlink()  # it is being removed
    assert list(running_services(root)) == []
    assert [path.name for path in directory.path.iterdir()] == ["logs"]
    directory.remove()
