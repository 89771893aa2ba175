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
from kernels.cpu import build, library, linear

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="needs a C compiler"
)


@pytest.fixture
def _no_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "_COMPILERS", ("no-such-compiler",))
    monkeypatch.setattr(build, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(library, "cache_directory", lambda: tmp_path)


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


def small_library(monkeypatch, tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "one.c").write_text("int one(void) { return 1; }")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "src")
    monkeypatch.setattr(build, "SHIPPED", tmp_path / "shipped")


@needs_compiler
def test_it_is_compiled_once_for_its_sources_and_flags(monkeypatch, tmp_path):
    small_library(monkeypatch, tmp_path)
    path = build.find_or_build(tmp_path / "cache")
    written = path.stat().st_mtime_ns
    assert build.find_or_build(tmp_path / "cache") == path
    assert path.stat().st_mtime_ns == written
    (tmp_path / "src" / "one.c").write_text("int one(void) { return 2; }")
    assert build.find_or_build(tmp_path / "cache") != path
    assert len(list((tmp_path / "cache").iterdir())) == 2


@needs_compiler
def test_shipped_files_need_no_compiler(monkeypatch, tmp_path):
    small_library(monkeypatch, tmp_path)
    path = build.build(build.SHIPPED)
    monkeypatch.setattr(build, "_COMPILERS", ())
    assert build.find_or_build(tmp_path / "cache") == path


@needs_compiler
def test_a_shipped_library_can_be_read_by_all_users(monkeypatch, tmp_path):
    small_library(monkeypatch, tmp_path)
    monkeypatch.setattr(program, "SHIPPED", build.SHIPPED)
    program.main()
    (path,) = build.SHIPPED.iterdir()
    assert build.SHIPPED.stat().st_mode & 0o005 == 0o005
    assert path.stat().st_mode & 0o004


def build_into(queue, sources, cache):
    build.SOURCES, build.SHIPPED = sources, sources / "none"
    queue.put(build.find_or_build(cache))


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


KINDS = [
    ("cc", "native"),
    ("cc", "x86-64-v3"),
    ("aarch64-linux-gnu-gcc", "armv8-a"),
    ("aarch64-linux-gnu-gcc", "armv8.6-a"),
]


@pytest.mark.parametrize(("compiler", "march"), KINDS)
def test_the_sources_compile_for_each_kind_of_cpu_without_a_warning(compiler, march, tmp_path):
    if shutil.which(compiler) is None:
        pytest.skip(f"{march} needs {compiler}")
    if march == "x86-64-v3" and platform.machine() != "x86_64":
        pytest.skip("x86-64-v3 needs an x86 compiler")
    flags = [f"-march={march}" if "-march" in flag else flag for flag in build._FLAGS]
    strict = ["-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    for source in build.SOURCES.glob("*.c"):
        subprocess.run([compiler, *flags, *strict, str(source)], check=True, cwd=tmp_path)


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
