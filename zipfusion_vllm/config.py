"""Every option of ZIPFUSION: its environment variable, default, meaning and check.

Read from the environment once, in the process where vLLM's engine arguments are made (``patches/engine_args.py``); from there it travels as a plain
dict in ``vllm_config.additional_config["zipfusion"]``, so that all processes of an engine agree. Knows no vLLM.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple, Self

ENV_PREFIX = "ZIPFUSION_"
CONFIG_KEY = "zipfusion"
"""Key in vLLM's ``additional_config`` under which the options travel; ZIPFUSION is on in an engine if and only if it is there."""


class ConfigError(ValueError):
    """An option has a value that it does not take."""


class Option(NamedTuple):
    name: str
    variable: str
    default: str
    accepted: str
    meaning: str


_MEANING = {
    "compaction": ("0 or 1", "0 keeps every page raw, with the same kernels and plans: the twin to compare with."),
    "check": ("0 or 1", "1 checks the books of both sides while serving, and logs every broken invariant as an error."),
    "expected_eligible": (
        "0 to 1",
        "Share of blocks expected to be compressible: chooses the chunk size, and the expected capacity that is logged.",
    ),
    "reserve": ("0 to 16", "Raw pages per running request that a new request must leave free, so that growth preempts nobody."),
}  # fmt: skip


@dataclass(frozen=True)
class ZipFusionConfig:
    """The options. Raises ConfigError for a value that is not accepted."""

    compaction: bool = True
    check: bool = False
    expected_eligible: float = 0.92
    """Measured on SmolLM2 and Gemma with vLLM: 0.83 to 0.93 (README, 'What compresses')."""
    reserve: float = 0.25
    """(d + 1) / 16 pages for answers that come d = 3 steps late."""

    def __post_init__(self) -> None:
        for name in ("compaction", "check"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(_message(name, getattr(self, name)))
        for name, largest in (("expected_eligible", 1.0), ("reserve", 16.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= largest:
                raise ConfigError(_message(name, value))

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Self:
        """The options that ``environ`` sets. Raises ConfigError for an unknown ZIPFUSION_ variable or a bad value."""
        known = {_variable(field.name): field for field in fields(cls)}
        values: dict[str, Any] = {}
        for variable, text in environ.items():
            if not variable.startswith(ENV_PREFIX):
                continue
            if variable not in known:
                raise ConfigError(f"{variable} is no option of ZIPFUSION: use one of {', '.join(known)}, or unset it.")
            field = known[variable]
            values[field.name] = _parse_bool(field.name, text) if field.type is bool else _parse_float(field.name, text)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(**values)

    @classmethod
    def from_vllm_config(cls, vllm_config: Any) -> Self:
        """The options of an engine. Raises ConfigError when ZIPFUSION is not on in it."""
        if not is_active(vllm_config):
            raise ConfigError(
                "this vLLM engine was not started with ZIPFUSION: set VLLM_ATTENTION_BACKEND=ZIPFUSION or --attention-backend ZIPFUSION."
            )
        return cls.from_dict(vllm_config.additional_config[CONFIG_KEY])


def is_active(vllm_config: Any) -> bool:
    """Whether an engine runs with ZIPFUSION."""
    additional = vllm_config.additional_config
    return isinstance(additional, dict) and CONFIG_KEY in additional


def option_rows() -> list[Option]:
    """The options as rows of the README's table."""
    rows = []
    for field in fields(ZipFusionConfig):
        default = str(int(field.default)) if isinstance(field.default, bool) else str(field.default)
        rows.append(Option(field.name, _variable(field.name), default, *_MEANING[field.name]))
    return rows


def _variable(name: str) -> str:
    return ENV_PREFIX + name.upper()


def _message(name: str, value: Any) -> str:
    return f"{_variable(name)}={value} is not accepted: it takes {_MEANING[name][0]}."


def _parse_bool(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise ConfigError(_message(name, text))
    return text == "1"


def _parse_float(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(_message(name, text)) from None
