import hashlib
import multiprocessing
import platform
import shutil
import subprocess
import sys
import warnings

import pytest
import torch

from kernels import ops, reference
from kernels.cpu import __main__ as program
from kernels.cpu import build, library, linear, targets
from kernels.cpu.targets import THIS_CPU

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc"))), reason="needs a C compiler"
)


@pytest.fixture
def _no_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "_COMPILERS", ("no-such-compiler",))
    monkeypatch.setattr(build, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(build, "cache_directory", lambda: tmp_path)


@pytest.mark.usefixtures("_no_compiler")
def test_without_a_compiler_the_twins_serve_and_one_warning_says_so(monkeypatch):
    with pytest.warns(RuntimeWarning, match="no C compiler; looked for no-such-compiler"):
        assert library.native.__wrapped__() is None
    for module in (ops, linear):
        monkeypatch.setattr(module, "native", lambda: None)
    x, weight = torch.randn(3, 16).bfloat16(), torch.randn(16).bfloat16()
    assert torch.equal(ops.silu_mul(x), reference.silu_mul(x))
    assert torch.equal(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert torch.equal(
        ops.add_rms_norm(x, x, weight, 1e-5)[0], reference.add_rms_norm(x, x, weight, 1e-5)[0]
    )
    assert not linear.can_pack(x)


@needs_compiler
def test_what_fails_to_compile_is_said_with_the_compiler_s_words(monkeypatch, tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "broken.c").write_text("int main( {")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "src")
    with pytest.raises(build.BuildError, match=r"(?s)broken\.c.*error"):
        build.find_or_build(tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


@needs_compiler
def test_a_directory_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "SHIPPED", tmp_path / "shipped")
    (tmp_path / "file").write_text("")
    with pytest.raises(build.BuildError, match=r"file.* cannot be written"):
        build.find_or_build(tmp_path / "file")


@needs_compiler
def test_clang_is_refused_because_of_its_openmp(monkeypatch, tmp_path):
    compiler = tmp_path / "cc"
    found = shutil.which("gcc") or shutil.which("cc")
    compiler.write_text(f'#!/bin/sh\nexec {found} -D__clang__ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(build, "_COMPILERS", (str(compiler),))
    monkeypatch.setattr(build, "_FLAGS", ("-fsyntax-only", *build._FLAGS[1:]))
    with pytest.raises(build.BuildError, match="gcc is needed: clang's OpenMP"):
        build.find_or_build(tmp_path / "cache")


def small_library(monkeypatch, tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "one.c").write_text("int one(void) { return 1; }")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "src")
    monkeypatch.setattr(build, "SHIPPED", tmp_path / "shipped")


@needs_compiler
def test_it_is_compiled_once_for_its_sources_and_flags(monkeypatch, tmp_path):
    small_library(monkeypatch, tmp_path)
    path = build.find_or_build(tmp_path / "cache").path
    written = path.stat().st_mtime_ns
    assert build.find_or_build(tmp_path / "cache").path == path
    assert path.stat().st_mtime_ns == written
    (tmp_path / "src" / "one.c").write_text("int one(void) { return 2; }")
    assert build.find_or_build(tmp_path / "cache").path != path
    assert len(list((tmp_path / "cache").iterdir())) == 2


@needs_compiler
def test_shipped_libraries_serve_where_none_is_compiled(monkeypatch, tmp_path):
    small_library(monkeypatch, tmp_path)
    monkeypatch.setattr(program, "SHIPPED", build.SHIPPED)
    shipped_targets = targets.targets_of(platform.machine())
    monkeypatch.setattr(build, "runnable_targets", lambda: shipped_targets)
    program.main()
    own = build.find_or_build(tmp_path / "cache")
    assert (own.target, own.why_shipped) == (THIS_CPU, None)
    monkeypatch.setattr(build, "_COMPILERS", ())
    assert build.find_or_build(tmp_path / "cache") == own, "it is compiled already"
    shipped = build.find_or_build(tmp_path / "other")
    assert shipped.path.parent == build.SHIPPED
    assert shipped.target == shipped_targets[0]
    assert shipped.why_shipped.startswith("no C compiler")
    shipped.path.unlink()
    next_best = build.find_or_build(tmp_path / "other")
    assert next_best.target == shipped_targets[1]
    (tmp_path / "src" / "one.c").write_text("int one(void) { return 2; }")
    with pytest.raises(build.BuildError, match="no C compiler"):
        build.find_or_build(tmp_path / "other")


@needs_compiler
def test_a_shipped_library_needs_no_place_for_compiled_ones(monkeypatch, tmp_path):
    small_library(monkeypatch, tmp_path)
    target = targets.targets_of(platform.machine())[-1]
    monkeypatch.setattr(build, "runnable_targets", lambda: (target,))
    path = build.build(build.SHIPPED, target)

    def no_place():
        raise build.BuildError("the user has no home")

    monkeypatch.setattr(build, "cache_directory", no_place)
    found = build.find_or_build()
    assert found == build.Build(path, target, "the user has no home")


@needs_compiler
def test_a_shipped_library_can_be_read_by_all_users(monkeypatch, tmp_path):
    small_library(monkeypatch, tmp_path)
    monkeypatch.setattr(program, "SHIPPED", build.SHIPPED)
    program.main()
    assert build.SHIPPED.stat().st_mode & 0o005 == 0o005
    paths = list(build.SHIPPED.iterdir())
    assert len(paths) == len(targets.targets_of(platform.machine()))
    assert all(path.stat().st_mode & 0o004 for path in paths)


@needs_compiler
def test_the_machine_code_s_hash_depends_on_code_alone(monkeypatch, tmp_path):
    def digest(name, number):
        small = tmp_path / name
        small.mkdir()
        small_library(monkeypatch, small)
        (small / "src" / "one.c").write_text(f"int one(void) {{ return {number}; }}")
        made = build.find_or_build(small / "cache")
        return hashlib.sha256(made.path.read_bytes()).digest()

    assert digest("a", 1) == digest("b", 1) != digest("c", 2)


def build_into(queue, sources, cache):
    build.SOURCES, build.SHIPPED = sources, sources / "none"
    queue.put(build.find_or_build(cache).path)


@needs_compiler
def test_processes_that_start_together_share_one_library(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "one.c").write_text("int one(void) { return 1; }")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    args = queue, tmp_path / "src", tmp_path / "cache"
    processes = [context.Process(target=build_into, args=args) for _ in range(3)]
    for process in processes:
        process.start()
    paths = {queue.get(timeout=120) for _ in processes}
    for process in processes:
        process.join()
    assert len(paths) == 1
    assert list((tmp_path / "cache").iterdir()) == list(paths)


KINDS = [("cc", THIS_CPU), *((f"{t.machine}-linux-gnu-gcc", t) for t in targets.SHIPPED_TARGETS)]


@pytest.mark.parametrize(("compiler", "target"), KINDS, ids=[target.name for _, target in KINDS])
def test_the_sources_compile_for_each_kind_of_cpu_without_a_warning(compiler, target, tmp_path):
    if shutil.which(compiler) is None:
        pytest.skip(f"{target.name} needs {compiler}")
    strict = ["-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    for source in build.SOURCES.glob("*.c"):
        command = [compiler, *build.flags_for(target), *strict, str(source)]
        subprocess.run(command, check=True, cwd=tmp_path)


def test_one_thread_pool_serves_torch_and_native_code():
    if library.native() is None:
        pytest.skip("needs native code")
    program = (
        "import torch, kernels.ops as ops, pathlib\n"
        "torch.set_num_threads(3)\n"
        "ops.silu_mul(torch.randn(64, 4096)); torch.randn(1000, 1000).exp().sum()\n"
        "names = pathlib.Path('/proc/self/maps').read_text().splitlines()\n"
        "omps = {n.rpartition(' ')[2] for n in names if 'omp.so' in n or 'omp5.so' in n}\n"
        "assert len(omps) == 1, omps\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_library_loads_without_a_warning():
    if library.native() is None:
        pytest.skip("needs native code")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert library.native.__wrapped__() is not None
