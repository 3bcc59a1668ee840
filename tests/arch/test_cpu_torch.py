"""The script that lets torch's CUDA build be imported without CUDA, as the tests with torch_xla do."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.source import ROOT

HEADERS = """
 0x0000000000000001 (NEEDED)             Shared library: [libcudart.so.12]
 0x0000000000000001 (NEEDED)             Shared library: [libnccl.so.2]
 0x0000000000000001 (NEEDED)             Shared library: [libc.so.6]
Version needs section '.gnu.version_r' contains 2 entries:
 Addr: 0x0000000000000530  Offset: 0x00000530  Link: 5 (.dynstr)
  000000: Version: 1  File: libcudart.so.12  Cnt: 1
  0x0010:   Name: libcudart.so.12  Flags: none  Version: 3
  0x0020: Version: 1  File: libc.so.6  Cnt: 1
  0x0030:   Name: GLIBC_2.2.5  Flags: none  Version: 2
"""
UNDEFINED = """
                 w __gmon_start__
                 U cudaFree@libcudart.so.12
                 U free@GLIBC_2.2.5
                 U ncclSend
                 U PyList_New
                 U _ZdlPv
"""


@pytest.fixture
def cpu_torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    return importlib.import_module("cpu_torch")


def test_stand_ins_are_for_absent_libraries_and_hold_what_is_wanted_of_them(cpu_torch: Any) -> None:
    wanted = cpu_torch.Wanted()
    wanted.read(HEADERS, UNDEFINED)
    assert wanted.stand_ins({"libc.so.6"}) == {
        "libcudart.so.12": {"libcudart.so.12": {"cudaFree"}, "": {"ncclSend"}},
        "libnccl.so.2": {},
    }
    assert wanted.stand_ins(wanted.files) == {}


@pytest.mark.skipif(
    sys.platform != "linux" or not all(map(shutil.which, ("gcc", "nm", "readelf"))), reason="no gcc and binutils"
)
def test_library_loads_with_stand_ins_and_sees_no_device(cpu_torch: Any, tmp_path: Path) -> None:
    functions = {"libcudart.so.12": {"cudaGetDeviceCount", "cudaFree"}, "": {"ncclGetVersion"}}
    cpu_torch.build(tmp_path / "libcudart.so.12", functions)
    code = """
        extern int cudaGetDeviceCount(int *), cudaFree(void), ncclGetVersion(void);
        int ask(void) { int num = 7; int error = cudaGetDeviceCount(&num); return error + cudaFree() + num; }
        int other(void) { return ncclGetVersion(); }
    """
    beside = ("-L.", "-l:libcudart.so.12", "-Wl,-rpath,$ORIGIN")
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", "libtorch.so", *beside],
                   input=code, text=True, cwd=tmp_path, check=True)  # fmt: skip
    (tmp_path / "libcudart.so.12").unlink()

    assert cpu_torch.fill(tmp_path) == ["libcudart.so.12"]
    load = f"import ctypes, os; print(ctypes.CDLL({str(tmp_path / 'libtorch.so')!r}, os.RTLD_NOW).ask())"
    assert subprocess.run([sys.executable, "-c", load], capture_output=True, text=True).stdout == "200\n"
    assert cpu_torch.fill(tmp_path) == []


@pytest.mark.parametrize(
    ("tools", "torch_is_there", "message"),
    [({"gcc"}, True, "with nm, readelf"), ({"gcc", "nm", "readelf"}, False, "torch is not")],
)
def test_script_says_what_is_missing(
    cpu_torch: Any, monkeypatch: pytest.MonkeyPatch, tools: set[str], torch_is_there: bool, message: str
) -> None:
    monkeypatch.setattr(cpu_torch.shutil, "which", lambda tool: tool if tool in tools else None)
    monkeypatch.setattr(cpu_torch.importlib.util, "find_spec", lambda name: pytest if torch_is_there else None)
    with pytest.raises(SystemExit, match=message):
        cpu_torch.main()
