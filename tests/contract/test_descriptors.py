"""The protos follow their style rules: comments, zero values, names."""

import pytest
from google.protobuf import descriptor_pb2

STREAM_MESSAGES = {
    # The messages of these two streams are not named request and response.
    "WorkerService.Execute": ("StepBatch", "StepResult"),
    # It returns the rest of that stream, so its messages are the same.
    "InferenceService.Resume": ("ResumeRequest", "GenerateResponse"),
    # Triton chose these names.
    "GRPCInferenceService.ModelStreamInfer": ("ModelInferRequest", "ModelStreamInferResponse"),
}

PUBLISHED = {"openengine.v1", "smg.grpc.common", "vllm.grpc.engine"}
"""Packages whose names another project has chosen."""

FILE = descriptor_pb2.FileDescriptorProto
MESSAGE = descriptor_pb2.DescriptorProto
ENUM = descriptor_pb2.EnumDescriptorProto
SERVICE = descriptor_pb2.ServiceDescriptorProto


def elements(file):
    """Yield the path of each element of a file, as source info counts it, and its full name."""
    for i, message in enumerate(file.message_type):
        yield from message_elements(message, (FILE.MESSAGE_TYPE_FIELD_NUMBER, i), file.package)
    for i, enum in enumerate(file.enum_type):
        yield from enum_elements(enum, (FILE.ENUM_TYPE_FIELD_NUMBER, i), file.package)
    for i, service in enumerate(file.service):
        path, name = (FILE.SERVICE_FIELD_NUMBER, i), f"{file.package}.{service.name}"
        yield path, name
        for j, method in enumerate(service.method):
            yield (*path, SERVICE.METHOD_FIELD_NUMBER, j), f"{name}.{method.name}"


def message_elements(message, path, scope):
    name = f"{scope}.{message.name}"
    # protoc makes this message for a map field, and the field has the comment
    if message.options.map_entry:
        return
    yield path, name
    for i, field in enumerate(message.field):
        yield (*path, MESSAGE.FIELD_FIELD_NUMBER, i), f"{name}.{field.name}"
    synthetic = {field.oneof_index for field in message.field if field.proto3_optional}
    for i, oneof in enumerate(message.oneof_decl):
        if i not in synthetic:
            yield (*path, MESSAGE.ONEOF_DECL_FIELD_NUMBER, i), f"{name}.{oneof.name}"
    for i, nested in enumerate(message.nested_type):
        yield from message_elements(nested, (*path, MESSAGE.NESTED_TYPE_FIELD_NUMBER, i), name)
    for i, enum in enumerate(message.enum_type):
        yield from enum_elements(enum, (*path, MESSAGE.ENUM_TYPE_FIELD_NUMBER, i), name)


def enum_elements(enum, path, scope):
    name = f"{scope}.{enum.name}"
    yield path, name
    for i, value in enumerate(enum.value):
        yield (*path, ENUM.VALUE_FIELD_NUMBER, i), f"{name}.{value.name}"


def uncommented(files):
    """Name the elements without a leading comment."""
    missing = []
    for file in files:
        comments = {
            tuple(location.path): location.leading_comments.strip()
            for location in file.source_code_info.location
        }
        missing += [name for path, name in elements(file) if not comments.get(path)]
    return missing


def all_enums(scope):
    yield from scope.enum_type
    messages = scope.message_type if isinstance(scope, FILE) else scope.nested_type
    for message in messages:
        yield from all_enums(message)


def meaningful_zeros(files):
    """Name the enums whose value 0 has a meaning."""
    return [
        enum.name
        for file in files
        for enum in all_enums(file)
        if not any(v.number == 0 and v.name.endswith("_UNSPECIFIED") for v in enum.value)
    ]


def misnamed(files):
    """Name the services not called …Service, and the RPCs without messages of their own."""
    wrong = []
    for file in files:
        for service in file.service:
            if not service.name.endswith("Service"):
                wrong.append(service.name)
            for method in service.method:
                rpc = f"{service.name}.{method.name}"
                expected = STREAM_MESSAGES.get(
                    rpc, (f"{method.name}Request", f"{method.name}Response")
                )
                messages = (method.input_type, method.output_type)
                if messages != tuple(f".{file.package}.{name}" for name in expected):
                    wrong.append(rpc)
    return wrong


def test_everything_has_a_comment(descriptors):
    assert uncommented(descriptors.file) == []


def test_no_enum_has_a_meaningful_zero(descriptors):
    assert meaningful_zeros(descriptors.file) == []


def test_services_and_their_messages_are_named_as_they_should(descriptors):
    ours = [file for file in descriptors.file if file.package not in PUBLISHED]
    assert misnamed(ours) == []


def test_every_exception_to_the_names_is_still_needed(descriptors):
    rpcs = {f"{s.name}.{m.name}" for f in descriptors.file for s in f.service for m in s.method}
    assert rpcs >= STREAM_MESSAGES.keys()


def test_the_files_import_nothing_outside_the_contract(descriptors):
    names = {file.name for file in descriptors.file}
    assert all(set(file.dependency) <= names for file in descriptors.file)
    assert {file.package for file in descriptors.file} == {"quire.v1", "inference"} | PUBLISHED


@pytest.fixture
def sloppy():
    """A file that breaks every rule."""
    file = FILE(package="sloppy")
    message = file.message_type.add(name="Message")
    message.field.add(name="field")
    message.oneof_decl.add(name="choice")
    message.nested_type.add(name="Nested").enum_type.add(name="Inner").value.add(
        name="INNER_FIRST", number=0
    )
    service = file.service.add(name="Greeter")
    service.method.add(name="Greet", input_type=".sloppy.Message", output_type=".sloppy.Message")
    return file


def test_the_rules_can_fail(sloppy):
    assert uncommented([sloppy]) == [
        "sloppy.Message",
        "sloppy.Message.field",
        "sloppy.Message.choice",
        "sloppy.Message.Nested",
        "sloppy.Message.Nested.Inner",
        "sloppy.Message.Nested.Inner.INNER_FIRST",
        "sloppy.Greeter",
        "sloppy.Greeter.Greet",
    ]
    assert meaningful_zeros([sloppy]) == ["Inner"]
    assert misnamed([sloppy]) == ["Greeter", "Greeter.Greet"]
