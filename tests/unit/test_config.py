"""Options: defaults, environment variables, checks, and the way from one process to another."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zipfusion_vllm.config import CONFIG_KEY, ConfigError, ZipFusionConfig, is_active, option_rows


def test_defaults() -> None:
    config = ZipFusionConfig.from_env({"PATH": "/bin", "VLLM_ATTENTION_BACKEND": "ZIPFUSION"})
    assert config == ZipFusionConfig(compaction=True, check=False, expected_eligible=0.92, reserve=0.25)


def test_every_option_has_its_variable() -> None:
    environ = {
        "ZIPFUSION_COMPACTION": "0",
        "ZIPFUSION_CHECK": "1",
        "ZIPFUSION_EXPECTED_ELIGIBLE": "0.5",
        "ZIPFUSION_RESERVE": "1",
    }
    assert ZipFusionConfig.from_env(environ) == ZipFusionConfig(False, True, 0.5, 1.0)
    assert {row.variable for row in option_rows()} == set(environ)


@pytest.mark.parametrize(
    ("variable", "value", "accepted"),
    [
        ("ZIPFUSION_COMPACTION", "yes", "0 or 1"),
        ("ZIPFUSION_COMPACTION", "", "0 or 1"),
        ("ZIPFUSION_CHECK", "2", "0 or 1"),
        ("ZIPFUSION_EXPECTED_ELIGIBLE", "92%", "0 to 1"),
        ("ZIPFUSION_EXPECTED_ELIGIBLE", "1.01", "0 to 1"),
        ("ZIPFUSION_EXPECTED_ELIGIBLE", "nan", "0 to 1"),
        ("ZIPFUSION_RESERVE", "-0.1", "0 to 16"),
        ("ZIPFUSION_RESERVE", "inf", "0 to 16"),
    ],
)
def test_bad_values_name_variable_value_and_what_is_accepted(variable: str, value: str, accepted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ZipFusionConfig.from_env({variable: value})
    assert f"{variable}={value}" in str(caught.value)
    assert accepted in str(caught.value)


def test_unknown_variables_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="ZIPFUSION_COMPACTON is no option of ZIPFUSION: use one of ZIPFUSION_COMPACTION"
    ):
        ZipFusionConfig.from_env({"ZIPFUSION_COMPACTON": "1"})


@pytest.mark.parametrize("bad", [{"check": 1}, {"compaction": "0"}, {"reserve": True}, {"expected_eligible": "0.9"}])
def test_values_of_the_wrong_type(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="is not accepted"):
        ZipFusionConfig(**bad)  # type: ignore[arg-type]


@given(st.booleans(), st.booleans(), st.floats(0, 1), st.floats(0, 16))
def test_travels_as_json(compaction: bool, check: bool, expected: float, reserve: float) -> None:
    """vLLM hashes ``additional_config`` as JSON, and sends it to its processes."""
    config = ZipFusionConfig(compaction, check, expected, reserve)
    assert ZipFusionConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_of_an_engine() -> None:
    config = ZipFusionConfig(check=True)
    engine = SimpleNamespace(additional_config={CONFIG_KEY: config.to_dict()})
    assert is_active(engine)
    assert ZipFusionConfig.from_vllm_config(engine) == config
    for additional in ({}, None, {"other": 1}):
        stock = SimpleNamespace(additional_config=additional)
        assert not is_active(stock)
        with pytest.raises(ConfigError, match="was not started with ZIPFUSION"):
            ZipFusionConfig.from_vllm_config(stock)


def test_rows_of_the_table() -> None:
    rows = {row.name: row for row in option_rows()}
    assert rows["compaction"].default == "1"
    assert rows["reserve"].default == "0.25"
    assert all(row.meaning.endswith(".") and row.accepted for row in rows.values())
