from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_committed_stubs_are_those_that_the_protos_give(generated):
    fresh = {path.relative_to(generated): path.read_bytes() for path in generated.rglob("*_pb2*")}
    committed = {
        path.relative_to(ROOT): path.read_bytes()
        for path in (ROOT / "quire").rglob("*_pb2*")
        if path.is_file()
    }
    assert fresh
    assert sorted(committed) == sorted(fresh), "run `make protos` and delete what is left over"
    drifted = [str(path) for path, content in sorted(fresh.items()) if committed[path] != content]
    assert drifted == [], "run `make protos`"
