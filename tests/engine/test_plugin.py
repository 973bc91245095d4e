"""The ways to ask for ZIPFUSION do the same; without a request vLLM is stock; engines with and without it share a process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.harness import engine, pool_of, scheduler_of
from tests.engine.test_refusals import LLAMA
from zipfusion_vllm import plugin
from zipfusion_vllm.config import CONFIG_KEY, ConfigError, ZipFusionConfig, is_active
from zipfusion_vllm.patches.errors import PatchError

STOCK_BACKEND = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("VLLM_ATTENTION_BACKEND", raising=False)
    plugin.deactivate()
    plugin.register()
    yield
    plugin.deactivate()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


def engine_args(folder: str, **arguments: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=folder, skip_tokenizer_init=True, max_model_len=512, enforce_eager=True, **arguments)


def backend_path() -> str:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return str(AttentionBackendEnum.CPU_ATTN.get_path())


def assert_zipfusion(config: Any) -> None:
    assert is_active(config)
    assert ZipFusionConfig.from_vllm_config(config) == ZipFusionConfig.from_env(os.environ)
    assert config.cache_config.block_size == 16
    assert config.kv_transfer_config.kv_connector == "ZipFusionConnector"
    assert config.kv_transfer_config.kv_connector_module_path == "zipfusion_vllm.connector"
    assert backend_path() == plugin.CPU_BACKEND


def assert_stock(config: Any) -> None:
    assert not is_active(config)
    assert config.kv_transfer_config is None
    assert config.cache_config.block_size == 128
    assert backend_path() == STOCK_BACKEND
    assert plugin.ENGINE_VARIABLE not in os.environ


@pytest.mark.parametrize("name", ["ZIPFUSION", "zipfusion", "ZipFusion"])
def test_asked_by_variable(name: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.envs
    from vllm.platforms import current_platform

    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", name)
    # Would raise for a variable that vLLM does not know.
    assert_zipfusion(engine_args(folder, fail_on_environ_validation=True).create_engine_config())
    current_platform.validate_environ(True)
    assert "VLLM_ATTENTION_BACKEND" in vllm.envs.environment_variables


@pytest.mark.parametrize("name", ["ZIPFUSION", "zipfusion", "ZipFusion"])
def test_asked_by_argument(name: str, folder: str) -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    assert_zipfusion(engine_args(folder, attention_backend=name).create_engine_config())
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(
        ["--model", folder, "--skip-tokenizer-init", "--max-model-len", "512", "--attention-backend", name]
    )
    assert_zipfusion(EngineArgs.from_cli_args(args).create_engine_config())


def test_arguments_are_left_as_they_were(folder: str) -> None:
    """vLLM makes several configs from the same arguments, when it starts more than one API server."""
    args = engine_args(folder, attention_backend="ZIPFUSION", additional_config={"other": 1})
    for _ in range(2):
        config = args.create_engine_config()
        assert_zipfusion(config)
        assert config.additional_config["other"] == 1
    assert args.attention_backend == "ZIPFUSION"
    assert args.block_size is None
    assert args.kv_transfer_config is None
    assert args.additional_config == {"other": 1}


def test_arguments_are_left_as_they_were_after_an_error(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = engine_args(folder, attention_backend="ZIPFUSION", gpu_memory_utilization=2.0)
    with pytest.raises(ValueError, match="gpu_memory_utilization"):
        args.create_engine_config()
    assert args.kv_transfer_config is None
    monkeypatch.setenv("ZIPFUSION_CHECK", "maybe")
    with pytest.raises(ConfigError):
        args.create_engine_config()
    assert args.block_size is None


def test_not_asked(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_stock(engine_args(folder).create_engine_config())
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASH_ATTN")  # vLLM ignores it, and so do we
    assert_stock(engine_args(folder).create_engine_config())
    assert "VLLM_ATTENTION_BACKEND" not in __import__("vllm.envs").envs.environment_variables


def test_not_asked_gives_the_config_of_the_original(folder: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config._zipfusion_original  # type: ignore[attr-defined]
    ours, stock = engine_args(folder).create_engine_config(), original(engine_args(folder))
    assert str(ours) == str(stock)
    assert ours.compute_hash() == stock.compute_hash()


def test_configs_with_and_without_take_turns(folder: str) -> None:
    for _ in range(2):
        assert_zipfusion(engine_args(folder, attention_backend="ZIPFUSION").create_engine_config())
        assert_stock(engine_args(folder).create_engine_config())
        assert_stock(engine_args(folder, attention_backend="CPU_ATTN").create_engine_config())


def test_config_survives_pickle_and_hash(folder: str) -> None:
    import pickle

    config = engine_args(folder, attention_backend="ZIPFUSION").create_engine_config()
    again = pickle.loads(pickle.dumps(config))
    assert again.additional_config[CONFIG_KEY] == config.additional_config[CONFIG_KEY]
    assert config.compute_hash() == again.compute_hash()


def test_register_is_reentrant() -> None:
    from vllm.engine.arg_utils import EngineArgs

    method = EngineArgs.create_engine_config
    plugin.register()
    plugin.register()
    assert EngineArgs.create_engine_config is method
    assert hasattr(method, "_zipfusion_original")
    assert backend_path() == STOCK_BACKEND


def test_processes_of_an_engine_are_activated_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.ENGINE_VARIABLE, "1")
    plugin.register()
    assert backend_path() == plugin.CPU_BACKEND


def test_misfit_of_the_patch() -> None:
    from dataclasses import dataclass

    from vllm.engine.arg_utils import EngineArgs

    from zipfusion_vllm.patches.engine_args import find_misfit

    @dataclass
    class Renamed:
        attention: str = ""

        def create_engine_config(self, usage_context: Any = None, headless: bool = False) -> None: ...

    @dataclass
    class Changed:
        def create_engine_config(self, context: Any) -> None: ...

    assert find_misfit(EngineArgs) is None
    assert "attention_backend, attention_config, block_size" in str(find_misfit(Renamed)).replace(
        "additional_config, ", ""
    )
    assert "it takes ('self', 'context')" in str(find_misfit(Changed))
    assert ">=0.32.0,<0.34" in str(find_misfit(Changed))


def test_a_vllm_that_cannot_be_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of no concern to stock engines; one sentence for those who asked."""
    from zipfusion_vllm.patches import engine_args

    def fail() -> None:
        raise ImportError("no such module")

    monkeypatch.setattr(engine_args, "apply", fail)
    plugin.register()
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "ZIPFUSION")
    with pytest.raises(PatchError, match=r"cannot be loaded into this vLLM \(ImportError: no such module\): install"):
        plugin.register()


def classes_of(llm: Any) -> dict[str, str]:
    """What an engine is made of: backend, implementation, scheduler, pool, manager, connector."""
    core = llm.llm_engine.engine_core.engine_core
    scheduler = scheduler_of(llm)
    runner = core.model_executor.driver_worker.worker.model_runner
    layer = next(iter(runner.compilation_config.static_forward_context.values()))
    manager = scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    parts = {
        "backend": layer.attn_backend,
        "implementation": type(layer.impl),
        "scheduler": type(scheduler),
        "pool": type(pool_of(llm)),
        "manager": type(manager),
        "connector": type(scheduler.connector),
        "spec": type(scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec),
    }
    return {name: f"{cls.__module__}.{cls.__qualname__}" for name, cls in parts.items()}


STOCK = {
    "backend": STOCK_BACKEND,
    "implementation": STOCK_BACKEND + "Impl",
    "scheduler": "vllm.v1.core.sched.scheduler.Scheduler",
    "pool": "vllm.v1.core.block_pool.BlockPool",
    "manager": "vllm.v1.core.single_type_kv_cache_manager.FullAttentionManager",
    "connector": "builtins.NoneType",
    "spec": "vllm.v1.kv_cache_interface.FullAttentionSpec",
}


def test_engines_with_and_without_in_one_process(tiny_llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(monkeypatch, tiny_llama, backend=None) as llm:
        assert classes_of(llm) == STOCK
    with engine(monkeypatch, tiny_llama) as llm:
        with_zipfusion = classes_of(llm)
        ours = {name for name, path in with_zipfusion.items() if path.startswith("zipfusion_vllm.")}
        assert ours == set(STOCK) - {"scheduler"}
        assert with_zipfusion["scheduler"] == STOCK["scheduler"]
    with engine(monkeypatch, tiny_llama, backend=None) as llm:
        assert classes_of(llm) == STOCK


def run_python(code: str, **environ: str) -> str:
    base = {name: value for name, value in os.environ.items() if not name.startswith(("ZIPFUSION_", "VLLM_ATTENTION"))}
    base.pop(plugin.ENGINE_VARIABLE, None)
    result = subprocess.run(
        [sys.executable, "-c", code], env={**base, **environ}, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.strip().splitlines()[-1]


UNTOUCHED = """
import sys
from vllm.plugins import load_general_plugins
load_general_plugins()
import vllm.envs
from vllm.v1.attention.backends import registry
from vllm.v1.core.sched.scheduler import Scheduler
print(registry._ATTN_OVERRIDES, registry.AttentionBackendEnum.__members__.keys() & {"ZIPFUSION"},
      "VLLM_ATTENTION_BACKEND" in vllm.envs.environment_variables, hasattr(Scheduler.make_stats, "_zipfusion_original"),
      sorted(name for name in sys.modules if name.startswith("zipfusion_vllm.") and "patches" not in name))
"""


def test_fresh_process_without_a_request_is_untouched() -> None:
    told = run_python(UNTOUCHED)
    assert told.startswith("{} set() False False [")
    loaded = set(told.split("[")[1].rstrip("]").replace("'", "").split(", "))
    assert not any(
        part in name for name in loaded for part in ("attention", "connector", "kernels", "metrics", "manager")
    )


def test_fresh_process_without_the_plugin_is_untouched_too() -> None:
    """VLLM_PLUGINS that leaves zipfusion out: nothing of ours runs, so nothing of ours can warn (README says so)."""
    assert run_python(UNTOUCHED, VLLM_PLUGINS="other", VLLM_ATTENTION_BACKEND="ZIPFUSION") == "{} set() False False []"


def test_worker_without_the_plugin_is_one_error(folder: str, monkeypatch: pytest.MonkeyPatch, tiny_llama: str) -> None:
    """A worker that did not load the plugin plans stock pages, and the connector says why that cannot be."""
    from vllm import LLM

    from zipfusion_vllm.patches import engine_args as patch

    monkeypatch.setattr(patch.plugin, "activate", lambda: None)
    with pytest.raises(
        RuntimeError, match=r"its plugin did not load there; do not leave zipfusion out of VLLM_PLUGINS"
    ):
        LLM(
            model=tiny_llama,
            attention_backend="ZIPFUSION",
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=512,
            skip_tokenizer_init=True,
            num_gpu_blocks_override=256,
        )


def test_command_line_ends_with_one_sentence(folder: str) -> None:
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", folder]
    options = ["--skip-tokenizer-init", "--attention-backend", "zipfusion", "--block-size", "32", "--port", "0"]
    result = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert result.stderr.strip().splitlines()[-1] == (
        "vllm serve: error: ZIPFUSION does not support block sizes other than 16 (--block-size 32), because a page has 16 tokens: "
        "leave --block-size unset or at 16."
    )
