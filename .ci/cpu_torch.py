"""Let torch's CUDA build be imported where CUDA's libraries are not installed: `python .ci/cpu_torch.py`.

For test environments without a GPU only. Some builds of torch exist with CUDA alone (that which torch_xla wants, for
one) and require gigabytes of it, all of which the loader looks for when torch is imported, and none of which the CPU
uses. Installed without them (no_cuda.txt names them), torch imports once this script, run by that environment's
Python, has put empty libraries of their names beside it: their functions are there and report that there is no
device. It needs gcc and binutils. Nothing else in torch changes; delete the libraries to undo it.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

# Loaded only when a GPU is used.
UNUSED = ("libcaffe2_nvrtc.so", "libtorch_cuda_linalg.so")
# CUDA is C, so its names are neither C++'s nor Python's; most libraries give theirs a version, these do not.
UNVERSIONED = re.compile(r"(?:cu|nccl)[A-Za-z]")
SPECIAL = {
    "cudaGetDeviceCount": "int cudaGetDeviceCount(int *count) { *count = 0; return 100; }",
    "cudaGetErrorName": 'const char *cudaGetErrorName(int error) { return "cudaErrorNoDevice"; }',
    "cudaGetErrorString": 'const char *cudaGetErrorString(int error) { return "there is no CUDA here"; }',
}


@dataclass
class Wanted:
    """What some libraries want of others: their file names, whose version is whose, and symbols by version."""

    files: set[str] = field(default_factory=set)
    file_of_version: dict[str, str] = field(default_factory=dict)
    symbols: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def read(self, headers: str, undefined: str) -> None:
        """Add what `readelf -dVW` and `nm -D --undefined-only --with-symbol-versions` print of one library."""
        self.files.update(re.findall(r"\(NEEDED\).*\[(.+?)\]", headers))
        file = ""
        for word, name in re.findall(r"(File|Name): (\S+)", headers[headers.find("Version needs section") :]):
            if word == "File":
                file = name
            else:
                self.file_of_version[name] = file
        for name, version in re.findall(r"^\s*U ([^@\s]+)@*(\S*)$", undefined, re.MULTILINE):
            if version or UNVERSIONED.match(name):
                self.symbols[version].add(name)

    def stand_ins(self, present: Iterable[str]) -> dict[str, dict[str, set[str]]]:
        """Return the symbols, by version, of each file that is not present; those without a version go to the first."""
        absent = sorted(self.files - set(present))
        found: dict[str, dict[str, set[str]]] = {file: {} for file in absent}
        for version, names in self.symbols.items():
            file = self.file_of_version.get(version, "") if version else next(iter(absent), "")
            if file in found:
                found[file][version] = names
        return found


def run(*command: str | Path) -> str:
    """Run a command and return what it prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def source(versions: dict[str, set[str]]) -> tuple[str, str]:
    """Return the C source of a stand-in and its version script."""
    functions = [
        SPECIAL.get(name, f"int {name}(void) {{ return {100 if name.startswith('cuda') else 0}; }}")
        for names in versions.values()
        for name in sorted(names)
    ]
    script = [f"{version} {{ global: {'; '.join(sorted(names))}; }};" for version, names in versions.items() if version]
    return "\n".join(functions) + "\n", "\n".join(script) + "\n"


def build(library: Path, versions: dict[str, set[str]]) -> None:
    """Build one stand-in."""
    with tempfile.TemporaryDirectory() as folder:
        c, script = Path(folder, "stand_in.c"), Path(folder, "stand_in.map")
        texts = source(versions)
        for path, text in zip((c, script), texts, strict=True):
            path.write_text(text, encoding="utf-8")
        options = [f"-Wl,--version-script={script}"] if texts[1].strip() else []
        run("gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{library.name}", *options, "-o", library, c)


def fill(folder: Path) -> list[str]:
    """Build what the libraries of a folder miss, into it; return the names."""
    libraries = [path for path in sorted(folder.glob("*.so*")) if path.name not in UNUSED]
    wanted = Wanted()
    for library in libraries:
        wanted.read(run("readelf", "-dVW", library), run("nm", "-D", "-u", "--with-symbol-versions", library))
    of_system = re.findall(r"^\s+(\S+) \(", run(shutil.which("ldconfig") or "/sbin/ldconfig", "-p"), re.MULTILINE)
    stand_ins = wanted.stand_ins({*of_system, *(library.name for library in libraries)})
    for name, versions in stand_ins.items():
        build(folder / name, versions)
    return list(stand_ins)


def main() -> None:
    """Complete the torch of this environment."""
    if absent := [tool for tool in ("gcc", "nm", "readelf") if not shutil.which(tool)]:
        sys.exit(f"Stand-ins for CUDA's libraries are built with {', '.join(absent)}: apt-get install gcc")
    spec = importlib.util.find_spec("torch")  # not imported: it could not be
    if spec is None or not spec.origin:
        sys.exit(f"torch is not installed for {sys.executable}.")
    folder = Path(spec.origin).parent / "lib"
    print(f"Stand-ins in {folder}: {', '.join(fill(folder)) or 'none is needed'}")


if __name__ == "__main__":
    main()
