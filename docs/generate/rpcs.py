"""Generates the page of RPCs, from the comments of the protos."""

import tempfile
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

_HEAD = """# RPCs

What each service offers; the messages' fields are explained in the `.proto` files themselves. Every
process also answers `grpc.health.v1.Health` and server reflection.
"""
_SERVICE, _METHOD = 6, 2
"""Field numbers in FileDescriptorProto and ServiceDescriptorProto, used in comments' paths."""


def page(protos: Path) -> str:
    """Return the page of all services below `protos`, in Markdown."""
    parts = [_HEAD]
    for file in _describe(protos):
        comments = {tuple(loc.path): loc.leading_comments for loc in file.source_code_info.location}
        for index, service in enumerate(file.service):
            name = f"{file.package}.{service.name}"
            parts += [
                f"## {name}\n",
                f"`protos/{file.name}`. {_first(comments, (_SERVICE, index))}\n",
            ]
            parts += ["| RPC | | |", "|---|---|---|"]
            for place, method in enumerate(service.method):
                text = _text(comments.get((_SERVICE, index, _METHOD, place), ""))
                takes = _kind(method.input_type, streams=method.client_streaming)
                gives = _kind(method.output_type, streams=method.server_streaming)
                parts.append(f"| `{method.name}` | {takes} → {gives} | {text} |")
            parts.append("")
    return "\n".join(parts)


def _describe(protos: Path) -> list[FileDescriptorProto]:
    """Return the files, with their comments; those with services, in order."""
    names = sorted(str(path.relative_to(protos)) for path in protos.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "descriptors"
        well_known = files("grpc_tools") / "_proto"
        arguments = [f"-I{protos}", f"-I{well_known}", "--include_source_info"]
        code = protoc.main(["protoc", *arguments, f"--descriptor_set_out={out}", *names])
        if code != 0:
            raise ValueError(f"protoc ended with {code}")
        described = FileDescriptorSet.FromString(out.read_bytes())
    return [file for file in described.file if file.service]


def _kind(message: str, *, streams: bool) -> str:
    return f"{'stream of ' if streams else ''}`{message.rpartition('.')[2]}`"


def _first(comments: Mapping[tuple[int, ...], str], path: tuple[int, ...]) -> str:
    return _text(comments.get(path, "").split("\n\n", 1)[0])


def _text(comment: str) -> str:
    return " ".join(comment.split()).replace("|", "\\|")
