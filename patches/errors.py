"""The error of a patch whose target is no longer what it was written for."""


class PatchError(RuntimeError):
    """vLLM changed under a patch: the message names the target and what to do."""
