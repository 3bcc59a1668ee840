"""What torch's safe reader is given to read."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from support import hostile

from hftrain.storage.archives import check_archive

PLAIN = {
    "containers": {"a": [1, 1.5, None, True, "é", (1, 2)], 5: {}, None: 2**100},
    "dtypes": [torch.ones(2).to(dtype) for dtype in (torch.bool, torch.bfloat16, torch.int64, torch.complex128)],
    "newer dtypes": [torch.ones(2).to(dtype) for dtype in (torch.float8_e4m3fn, torch.uint16)],
    "views": (lambda base: [base, base[::2], base.view(2, 3).t(), base[2:3].expand(100), base[:0]])(torch.ones(6)),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "sparse": torch.eye(3).to_sparse(),
    "modules": torch.nn.Linear(2, 2).state_dict(),
    "optimizer": torch.optim.AdamW([torch.ones(2)]).state_dict(),
    "shared": [[1, 2]] * 50,
    "schedule": torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([torch.ones(2)]), [2, 2, 5]).state_dict(),
    "other values": [{1, "a", (2, 3)}, set(), b"ab", bytearray(b"ab"), bytearray(), 1 + 2j, torch.Size([2])],
    "torch's values": [torch.float32, torch.device("cpu"), torch.device("cuda", 1), torch.strided],
}


@pytest.mark.parametrize("name", PLAIN)
def test_archives_of_plain_data_pass(tmp_path: Path, name: str) -> None:
    torch.save(PLAIN[name], tmp_path / "x.pt")
    check_archive(tmp_path / "x.pt")


def test_arrays_pass_where_they_are_asked_for(tmp_path: Path) -> None:
    torch.save({"numpy": numpy.random.get_state(), "more": numpy.ones((2, 3))}, tmp_path / "x.pt")
    check_archive(tmp_path / "x.pt", with_numpy=True)
    with pytest.raises(ValueError, match="more than plain data"):
        check_archive(tmp_path / "x.pt")


def test_arrays_of_objects_do_not_pass(tmp_path: Path) -> None:
    torch.save(numpy.array([{}, []], dtype=object), tmp_path / "x.pt")
    with pytest.raises(ValueError, match="does not hold numbers"):
        check_archive(tmp_path / "x.pt", with_numpy=True)


REASONS = {
    "bomb": "more than plain data: posix.mkdir",
    "bomb in the older format": "not in the zip format",
    "bomb in the oldest format": "not in the zip format",
    "module": "NEWOBJ",
    "script": "compressed or encrypted",
    "memory": "bytearray",
    "memory by the older name": "where torch.save would not write one",
    "compressed": "compressed or encrypted",
    "overlapping": "overlap",
    "laughs": "repeats values",
    "endless": "holds itself",
    "lying size": "another size than its record",
    "reaching beyond": "beyond its memory",
    "reaching one beyond": "beyond its memory",
    "reaching one beyond from an offset": "beyond its memory",
    "expanded": "repeats its memory",
    "frozen methods": "an object with a state",
    "nested": "100 deep",
    "nested key": "not text or a short number",
    "colliding keys": "not text or a short number",
    "many": "more containers than torch.save writes",
}


@pytest.mark.skipif(not Path("/proc").exists(), reason="the names of the calls are those of this system")
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("name", REASONS)
def test_hostile_archives_are_named_before_torch_reads_them(tmp_path: Path, name: str) -> None:
    hostile.ZIPPED[name](tmp_path / "x.pt")
    with pytest.raises(ValueError, match=REASONS[name]):
        check_archive(tmp_path / "x.pt")


def test_archives_of_other_programs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    for names, reason in ((["a/b"], "torch.save"), (["a/data.pkl", "b"], "names of their own")):
        with zipfile.ZipFile(path, "w") as archive:
            for name in names:
                archive.writestr(name, b"")
        with pytest.raises(ValueError, match=reason):
            check_archive(path)


def test_directory_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "x.pt")
    data = bytearray((tmp_path / "x.pt").read_bytes())
    at = data.rfind(b"PK\6\6") + 40
    data[at : at + 8] = (1 << 30).to_bytes(8, "little")
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(ValueError, match="directory is longer"):
        check_archive(tmp_path / "x.pt")
