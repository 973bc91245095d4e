"""Entry point ``vllm.general_plugins``."""


def register() -> None:
    return
