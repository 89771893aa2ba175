import pytest

from kernels.cpu import targets
from kernels.cpu.targets import SHIPPED_TARGETS, can_run

# Flags of real CPUs, shortened to those that matter.
NEHALEM = "fpu sse sse2 pni ssse3 cx16 sse4_1 sse4_2 popcnt lahf_lm"
HASWELL = f"{NEHALEM} abm fma movbe xsave avx f16c avx2 bmi1 bmi2"
SKYLAKE_SERVER = f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl"
ZEN_4 = f"{SKYLAKE_SERVER} avx512_bf16 avx512vbmi avx512_vnni"
SAPPHIRE_RAPIDS = f"{ZEN_4} amx_bf16 avx512_fp16 amx_tile amx_int8"
ALTRA = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm dcpop"
GRAVITON_3 = f"{ALTRA} asimddp sve i8mm bf16"
CPUS = [
    ("x86_64", NEHALEM, None),
    ("x86_64", HASWELL, "x86-64-v3"),
    ("x86_64", HASWELL.replace(" f16c", ""), None),
    ("x86_64", SKYLAKE_SERVER, "x86-64-v4"),
    ("x86_64", ZEN_4, "x86-64-v4-bf16"),
    ("x86_64", ZEN_4.replace(" avx512vl", ""), "x86-64-v3"),
    ("x86_64", f"{HASWELL} amx_tile amx_bf16", "x86-64-v3"),
    ("x86_64", SAPPHIRE_RAPIDS, "x86-64-v4-bf16-amx"),
    ("aarch64", "fp asimd evtstrm aes", "armv8-a"),
    ("aarch64", ALTRA, "armv8-a"),
    ("aarch64", GRAVITON_3, "armv8.2-a-bf16"),
    ("riscv64", "", None),
]


@pytest.mark.parametrize(("machine", "flags", "name"), CPUS)
def test_a_cpu_runs_the_library_that_uses_most_of_it(monkeypatch, tmp_path, machine, flags, name):
    line = "Features" if machine == "aarch64" else "flags"
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\t\t: {flags}\n\nprocessor\t: 1\n")
    monkeypatch.setattr(targets, "_CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(targets.platform, "machine", lambda: machine)
    names = [target.name for target in targets.runnable_targets()]
    assert names[:1] == ([name] if name else [])


def test_a_system_that_reports_nothing_runs_none(monkeypatch, tmp_path):
    monkeypatch.setattr(targets, "_CPU_INFO", tmp_path / "none")
    assert targets.runnable_targets() == ()


def test_the_targets_are_in_order_and_have_names_of_their_own():
    assert len({target.name for target in SHIPPED_TARGETS}) == len(SHIPPED_TARGETS)
    for place, target in enumerate(SHIPPED_TARGETS):
        for later in SHIPPED_TARGETS[place + 1 :]:
            assert not can_run(target, later.machine, later.needs), (target, later)
