"""YAML as people mean it: `no` is text, 1e-3 is a number."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from hftrain import ConfigError
from hftrain.cli.configured import YamlFile, to_yaml

yaml = pytest.importorskip("yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("no", "no"), ("on", "on"), ("true", True), ("False", False), ("~", None), ("", None)),
        *(("1e-3", 1e-3), ("1.5E3", 1500.0), (".5", 0.5), ("-2.", -2.0), ("-.inf", -math.inf)),
        *(("8", 8), ("-3", -3), ("010", "010"), ("1:30", "1:30"), ("1_000", "1_000"), ("2026-01-01", "2026-01-01")),
    ],
)
def test_plain_value(tmp_path: Path, text: str, value: Any) -> None:
    (tmp_path / "file.yaml").write_text(f"key: {text}\n", encoding="utf-8")
    found = YamlFile(str(tmp_path / "file.yaml")).values["key"]
    assert found == value
    assert type(found) is type(value)


def test_written_values_are_read_as_they_were_by_both_versions(tmp_path: Path) -> None:
    texts = ["no", "1e-3", "010", "1:30", "true", "~", "", "2026-01-01", "ü\n", "=", "# no comment"]
    values = {"texts": texts, "numbers": [1e-5, 1e300, 10, -1.5, math.inf, True, None], "a": {"b": [], "c": {}}}
    (tmp_path / "file.yaml").write_text(to_yaml(values), encoding="utf-8")
    assert YamlFile(str(tmp_path / "file.yaml")).values == values == yaml.safe_load(to_yaml(values))


def test_lines_of_keys_are_known_through_anchors_and_merges(tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text("a: &a\n  x: 1\nb:\n  <<: *a\n  y: 2\n", encoding="utf-8")
    file = YamlFile(str(tmp_path / "file.yaml"))
    assert file.values["b"] == {"x": 1, "y": 2}
    assert file.at("b.y").endswith("line 5: b.y")
    assert file.at("b.z").endswith("line 3: b.z")
    assert "c" not in file


@pytest.mark.parametrize(("text", "told"), [("- 1", "mapping"), ("a: 1\na: 2", "line 2"), ("a: [", "Cannot read")])
def test_file_that_holds_no_configuration_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "file.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=told):
        YamlFile(str(tmp_path / "file.yaml"))
